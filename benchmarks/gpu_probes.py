"""What torch alone tells of a GPU, without ssdplan: its link, page-locking, what libraries keep, attention, waits.

Owns the probes of `benchmarks/gpu.py`. Each is a function that yields findings as it makes them; with `tiny`, on the
processor, the same code runs at sizes that take seconds and mean nothing. `gpu_probes.py libraries` prints one of them,
for it needs a process that has used no GPU yet.
"""

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
COPIES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
PROCESS_SECONDS = 60.0
Found = dict[str, Any]
Wait = Callable[[], None]


def probe(device: str, note: Callable[..., None], *, tiny: bool) -> None:
    """All of them; one that fails says so and the others go on. Raises SystemExit at the end if any did."""
    failed = []
    for each in (copies, registration, library_bytes, attention, waits):
        name = each.__name__
        try:
            for found in each(device, tiny):
                note(**{f"{name}: {key}": value for key, value in found.items()})
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            failed.append(name)
            note(**{f"{name}: failed": f"{type(error).__name__}: {error}"[:400]})
    if failed:
        raise SystemExit(f"these probes failed: {', '.join(failed)}")


@dataclass
class Measured:
    """Filled when the block that it is of has ended."""

    seconds: float = 0.0


class Clock:
    """Seconds by a GPU's own events, or by the processor's clock where there is none."""

    def __init__(self, gpu: bool) -> None:
        self._gpu = gpu

    def synchronize(self) -> None:
        if self._gpu:
            torch.cuda.current_stream().synchronize()

    @contextmanager
    def measured(self) -> Iterator[Measured]:
        """What the block puts into the current stream, from the first to the last."""
        measured = Measured()
        if not self._gpu:
            started = time.perf_counter()
            yield measured
            measured.seconds = time.perf_counter() - started
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield measured
        last.record()
        last.synchronize()
        measured.seconds = first.elapsed_time(last) / 1e3


class HostBytes:
    """Pages of DRAM as a tensor, which a GPU's driver may know."""

    def __init__(self, nbytes: int) -> None:
        self._pages = mmap.mmap(-1, nbytes)
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)
        self.tensor.fill_(1)  # memory that was never touched is not there yet
        self._registered = False

    def register(self, gpu: bool) -> None:
        """Raises RuntimeError where the driver will not."""
        if gpu:
            status = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.tensor.nbytes, 0)
            if int(status):
                raise RuntimeError(f"cudaHostRegister: {torch.cuda.cudart().cudaGetErrorString(status)}")
            self._registered = True

    def unregister(self) -> None:
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._registered = False


def copies(device: str, tiny: bool) -> Iterator[Found]:
    """Bytes a second of copies one way and both ways at once, from registered and from pageable memory."""
    gpu, sizes = not tiny, COPIES[:3] if tiny else COPIES
    clock, there = Clock(gpu), torch.device(device)
    for registered in (True, False):
        up, down = HostBytes(sizes[-1]), HostBytes(sizes[-1])
        on_device = [torch.empty(sizes[-1], dtype=torch.uint8, device=there) for _ in range(2)]
        streams: list[Any] = [torch.cuda.Stream(there) for _ in range(2)] if gpu else [None, None]
        if registered:
            up.register(gpu)
            down.register(gpu)
        for nbytes in sizes:
            pairs = {"h2d": (on_device[0], up.tensor), "d2h": (down.tensor, on_device[1])}
            times = max(1, min(200, (2 * MIB if tiny else 512 * MIB) // nbytes))
            rates: dict[str, float] = {}
            for ways in (("h2d",), ("d2h",), ("h2d", "d2h")):
                best = float("inf")
                for _ in range(3):
                    started = time.perf_counter()
                    for _ in range(times):
                        for way, stream in zip(ways, streams, strict=False):
                            target, source = pairs[way]
                            with torch.cuda.stream(stream) if gpu else nullcontext():
                                target[:nbytes].copy_(source[:nbytes], non_blocking=True)
                    if gpu:
                        torch.cuda.synchronize(there)
                    best = min(best, time.perf_counter() - started)
                rates["+".join(ways)] = len(ways) * times * nbytes / best
            each = []
            for _ in range(20):  # one copy and its wait, as an op of a run has them
                started = time.perf_counter()
                on_device[0][:nbytes].copy_(up.tensor[:nbytes], non_blocking=True)
                clock.synchronize()
                each.append(time.perf_counter() - started)
            rates["one h2d and its wait, seconds"] = sorted(each)[len(each) // 2]
            yield {f"{'registered' if registered else 'pageable'}, {nbytes // KIB} KiB": rates}
        up.unregister()
        down.unregister()


def registration(device: str, tiny: bool) -> Iterator[Found]:
    """Seconds to register memory that is there, and to let go of it."""
    nbytes = MIB if tiny else GIB
    memory = HostBytes(nbytes)
    started = time.perf_counter()
    memory.register(not tiny)
    between = time.perf_counter()
    memory.unregister()
    per_gib = GIB / nbytes
    yield {
        "register, seconds a GiB": (between - started) * per_gib,
        "unregister, seconds a GiB": (time.perf_counter() - between) * per_gib,
    }


def library_bytes(device: str, tiny: bool) -> Iterator[Found]:
    """What a context takes, and cuBLAS in the thread of compute and in autograd's: by its own choice, and as ssdplan
    has it, each in a process that has used no GPU yet."""
    for name, config in (("its own choice", ""), (":4096:8", ":4096:8")):
        environment = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
        environment |= {"CUBLAS_WORKSPACE_CONFIG": config} if config else {}
        call = [sys.executable, __file__, "libraries", device]
        done = subprocess.run(
            call, env=environment, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        yield {name: json.loads(done.stdout)}


def libraries(device: str) -> Found:
    """The figures of one process."""
    gpu, there = device != "cpu", torch.device(device)

    def taken() -> tuple[int, int]:
        if not gpu:
            return 0, 0
        torch.cuda.synchronize(there)
        free, total = torch.cuda.mem_get_info(there)
        return total - free, torch.cuda.memory_allocated(there)

    inputs = torch.ones(64, 64, device=there, requires_grad=True)
    weights = torch.ones(64, 64, device=there)
    found = {"context and all others": taken()}
    product = inputs @ weights
    found["after a product"] = taken()
    product.sum().backward()
    found["after its backward"] = taken()
    return {name: {"of the GPU": used, "of torch's tensors": own} for name, (used, own) in found.items()}


def attention(device: str, tiny: bool) -> Iterator[Found]:
    """Forward and backward, causal, at 2048 tokens: whether they give the same bits each time, and what that costs."""
    heads, length, width = (2, 64, 16) if tiny else (32, 2048, 128)
    there, clock = torch.device(device), Clock(not tiny)
    generator = torch.Generator(there).manual_seed(0)
    made = [
        torch.randn(1, heads, length, width, device=there, dtype=torch.bfloat16, generator=generator) for _ in range(4)
    ]
    leaves = [tensor.requires_grad_() for tensor in made[:3]]

    def once() -> tuple[torch.Tensor, ...]:
        out = scaled_dot_product_attention(*leaves, is_causal=True)
        return (out, *torch.autograd.grad(out, leaves, made[3]))

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    backends: dict[str, list[SDPBackend]] = {
        "torch's choice": [],
        "flash": [SDPBackend.FLASH_ATTENTION],
        "efficient": [SDPBackend.EFFICIENT_ATTENTION],
        "cudnn": [SDPBackend.CUDNN_ATTENTION],
        "math": [SDPBackend.MATH],
    }
    for name, backend in backends.items():
        for deterministic in (False, True):
            key = f"{name}, {'deterministic' if deterministic else 'not deterministic'}"
            torch.use_deterministic_algorithms(deterministic)
            try:
                with sdpa_kernel(backend) if backend else nullcontext():
                    first = once()
                    same = [all(map(torch.equal, first, once())) for _ in range(4)]
                    runs = 2 if tiny else 10
                    with clock.measured() as measured:
                        for _ in range(runs):
                            once()
            except RuntimeError as error:  # a backend that is not for this GPU
                yield {key: str(error).partition("\n")[0][:200]}
            else:
                yield {key: {"same bits": all(same), "seconds": measured.seconds / runs}}
            finally:
                torch.use_deterministic_algorithms(False)


def waits(device: str, tiny: bool) -> Iterator[Found]:
    """What threads that update on all cores lose to threads that wait for a GPU: by spinning, and asleep."""
    seconds = 0.1 if tiny else 1.0
    cores = len(os.sched_getaffinity(0))
    waiting: dict[str, list[Wait]] = {"nobody waits": [], **_waits(torch.device(device), tiny)}
    for name, each in waiting.items():
        over = threading.Event()
        threads = [threading.Thread(target=_waiter, args=(wait, over), daemon=True) for wait in each]
        for thread in threads:
            thread.start()
        rate = _update_rate(cores, seconds)
        over.set()
        for thread in threads:
            thread.join()
        yield {name: {"updates, elements a second": rate, "cores": cores, "waiters": len(each)}}


def _waits(there: torch.device, tiny: bool) -> dict[str, list[Wait]]:
    """Three waiters, as runs have lanes, each for some milliseconds of its own stream."""
    if tiny:

        def spin() -> None:
            end = time.perf_counter() + 0.01
            while time.perf_counter() < end:
                pass

        return {"spinning": [spin] * 3, "asleep": [lambda: time.sleep(0.01)] * 3}

    def of(blocking: bool) -> Wait:
        stream = torch.cuda.Stream(there)

        def wait() -> None:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)  # cycles: some 10 ms
                if blocking:
                    event = torch.cuda.Event(blocking=True)
                    event.record(stream)
                    event.synchronize()
                else:
                    stream.synchronize()

        return wait

    return {"spinning": [of(False) for _ in range(3)], "asleep": [of(True) for _ in range(3)]}


def _waiter(wait: Wait, over: threading.Event) -> None:
    while not over.is_set():
        wait()


def _update_rate(threads: int, seconds: float) -> float:
    """Elements a second of an update of 12 bytes each way, on so many threads, in C without Python's lock."""
    count = 1 << 18
    done = [0] * threads
    end = time.perf_counter() + seconds

    def update(which: int) -> None:
        moment, square, master = (torch.full((count,), 0.01) for _ in range(3))
        while time.perf_counter() < end:
            moment.mul_(0.9).add_(master, alpha=0.1)
            square.mul_(0.99).addcmul_(master, master, value=0.01)
            master.addcdiv_(moment, square.sqrt().add_(1e-8), value=-1e-4)
            done[which] += count

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # of torch's own in each of ours
    try:
        workers = [threading.Thread(target=update, args=(which,)) for which in range(threads)]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sum(done) / (time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    assert sys.argv[1] == "libraries"
    print(json.dumps(libraries(sys.argv[2])))
