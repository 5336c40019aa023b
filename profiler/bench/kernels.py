"""Compares the native kernels with what torch, or DeepSpeed, offers for the same work on the same memory.

Owns the memory of a comparison (one huge-page-backed arena, touched before anything is timed, that both sides use) and
the calls of the rivals. Values are such that no arithmetic is on denormal numbers, which are slow.
"""

import importlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ssdplan import native
from ssdplan.native import process
from ssdplan.plans.documents.state_layout import GRAIN, USUAL

from ..measure import Progress, portion
from .report import Row, Target, Unit
from .turns import ratio_of, spread, take_turns

MIB = 1 << 20
ALIGNMENT = 2 * MIB
"""Every array begins at a huge page."""
LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-5, 0.9, 0.95, 1e-8, 0.1
STEP = 10
ADAMW: dict[str, Any] = {
    "lr": LR,
    "beta1": BETA1,
    "beta2": BETA2,
    "eps": EPS,
    "weight_decay": WEIGHT_DECAY,
    "step": STEP,
}
GROUP = 64
"""Elements under one scale."""
_CHUNK = 1 << 20
"""Elements that training updates in a call."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a comparison may take."""

    nbytes: int
    """Memory of all its arrays together, the rival's temporary ones included."""
    threads: int
    """On both sides."""
    pairs: int


def measure_adam(setting: Setting, progress: Progress) -> list[Row]:
    """The fused AdamW on fp32 states with a bf16 copy of the weights, and with moments in bf16."""
    count = setting.nbytes // AdamStates.ELEMENT_BYTES // GRAIN * GRAIN
    states, threads = AdamStates(count), setting.threads
    contenders: dict[str, Callable[[], object]] = {
        "ours": partial(states.native_step, threads),
        "torch": states.torch_step(),
        "traffic": partial(states.traffic_of_a_step, threads),
        "bf16 moments": partial(states.native_step, threads, "bf16"),
    }
    deepspeed = states.deepspeed_step()
    if callable(deepspeed):
        contenders["deepspeed"] = deepspeed
    seconds = take_turns(contenders, setting.pairs, progress, "adam")
    speed = partial(_speed, "adam", amount=count, seconds=seconds)
    return [
        speed("torch fused AdamW and copy", rival="torch", target=Target(1.15)),
        speed("DeepSpeedCPUAdam and copy", rival="deepspeed", target=Target(1.15))
        if callable(deepspeed)
        else Row("adam", "DeepSpeedCPUAdam and copy", "elements/s", target=Target(1.15), missing=deepspeed),
        speed("the same bytes, nothing computed", rival="traffic", target=Target(0.9)),
        speed("bf16 moments against fp32 ones", ours="bf16 moments", rival="ours", target=Target(1.3)),
    ]


class AdamStates:
    """Master, moments, gradient (fp32), a bf16 copy and bf16 moments of `count` elements, and everyone's step on them.

    Each step works on these arrays alone, in any order of steps. The native ones change all that they own; a traffic of
    bytes leaves the values as they are.
    """

    ELEMENT_BYTES = 26
    """Of all these arrays, and one of zeros."""

    def __init__(self, count: int) -> None:
        self.count = count
        fp32, bf16 = torch.float32, torch.bfloat16
        self.master, self.exp_avg, self.exp_avg_sq, self.gradient, self.nothing, self.copy, *self.half = _arrays(
            *[(fp32, count)] * 5, *[(bf16, count)] * 3
        )
        moments = (self.exp_avg, self.exp_avg_sq, *self.half)
        for array, value in ((self.master, 0.5), (self.gradient, 0.02), *((moment, 0.01) for moment in moments)):
            array.fill_(value)

    def native_step(self, threads: int, moment_dtype: str = "fp32") -> None:
        """One step of ours: update and copy in one pass, with moments in fp32 or bf16."""
        exp_avg, exp_avg_sq = (self.exp_avg, self.exp_avg_sq) if moment_dtype == "fp32" else self.half
        native.adamw(
            elements=self.count,
            parameter=self.copy.data_ptr(),
            parameter_dtype="bf16",
            master=self.master.data_ptr(),
            exp_avg=exp_avg.data_ptr(),
            exp_avg_sq=exp_avg_sq.data_ptr(),
            moment_dtype=moment_dtype,
            gradient=self.gradient.data_ptr(),
            **ADAMW,
            threads=threads,
        )

    def step_of_chunk(self, start: int, threads: int, update: Callable[..., object]) -> None:
        """Our step with fp32 moments on a chunk, as `update` makes it."""
        streams = (self.master, self.exp_avg, self.exp_avg_sq, self.gradient, self.copy)
        update(
            *(stream[start:].data_ptr() for stream in streams),
            "bf16",
            _CHUNK,
            **ADAMW,
            threads=threads,
        )

    def traffic_of_a_step(self, threads: int) -> None:
        """The memory traffic of our step with fp32 moments, and as good as no arithmetic: what bandwidth alone allows.

        Its gradient is zero, whose bits change none of the states'.
        """
        native.stream_mix(
            elements=self.count,
            parameter=self.copy.data_ptr(),
            master=self.master.data_ptr(),
            exp_avg=self.exp_avg.data_ptr(),
            exp_avg_sq=self.exp_avg_sq.data_ptr(),
            gradient=self.nothing.data_ptr(),
            threads=threads,
        )

    def torch_step(self) -> Callable[[], object]:
        """One step of torch's fused AdamW, then the copy; its other two implementations are slower."""
        optimizer = torch.optim.AdamW(
            [self._parameter()], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )
        return partial(self._step_and_copy, self._adopted(optimizer, torch.tensor(float(STEP - 1))))

    def deepspeed_step(self) -> Callable[[], object] | str:
        """The same with DeepSpeedCPUAdam; or why it is not here."""
        with _output_to_errors():
            return self._deepspeed_step()

    def _deepspeed_step(self) -> Callable[[], object] | str:
        try:
            kind = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        except ImportError:
            return "DeepSpeed is not installed; pip install deepspeed ninja"
        try:
            optimizer = kind(
                [self._parameter()], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY, adamw_mode=True
            )
        except Exception as error:  # it compiles itself, and what stops it has many names
            return f"DeepSpeed cannot build its optimizer here ({type(error).__name__}); it needs ninja and a compiler"
        return partial(self._step_and_copy, self._adopted(optimizer, STEP - 1))

    def _parameter(self) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(self.master)
        parameter.grad = self.gradient
        return parameter

    def _adopted(self, optimizer: torch.optim.Optimizer, steps: object) -> torch.optim.Optimizer:
        """`optimizer` with our moments as its own, `steps` steps done."""
        (parameter,) = optimizer.param_groups[0]["params"]
        optimizer.state[parameter] = {"step": steps, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return optimizer

    def _step_and_copy(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self.copy.copy_(self.master)


def measure_overflow(setting: Setting, progress: Progress) -> list[Row]:
    """Whether a gradient is finite: ours, and isinf and isnan as MemAscend III-C found them in ZeRO-Infinity."""
    count = setting.nbytes // 16 // GRAIN * GRAIN  # the chain takes up to 2.25 times as much again
    (gradient,) = _arrays((torch.float32, count))
    gradient.fill_(0.02)

    def ours() -> bool:
        return native.is_finite(gradient.data_ptr(), count, "fp32", setting.threads)

    def chain() -> bool:
        return not (bool(gradient.isinf().any()) or bool(gradient.isnan().any()))

    seconds = take_turns({"ours": ours, "torch": chain}, setting.pairs, progress, "overflow")
    rows = [
        _speed("overflow", "torch isinf and isnan", amount=count, seconds=seconds, rival="torch", target=Target(20.0))
    ]
    taken = peak_bytes(ours), peak_bytes(chain)
    what = "memory taken, torch isinf and isnan"
    if None in taken:
        rows.append(Row("overflow", what, "B", missing="the kernel here does not let a process reset its peak (VmHWM)"))
    else:
        note = f"to check an array of {count * 4 / MIB:.0f} MiB"
        rows.append(Row("overflow", what, "B", ours=taken[0], rival=taken[1], note=note))
    return rows


def measure_quantise(setting: Setting, progress: Progress) -> list[Row]:
    """int8 by groups of 64, one fp32 scale a group, of saved activations (PyAO). torch's passes write to arrays that
    are there, as ours does: with new ones for each they took three to six times as long."""
    count = setting.nbytes // 32 // GRAIN * GRAIN
    three = ((torch.float32, count), (torch.int8, count), (torch.float32, count // GROUP))
    source, values, scales, back, their_values, their_scales, passing = _arrays(
        *three, (torch.float32, count), *three[1:], (torch.float32, count)
    )
    source.copy_(torch.randn(GRAIN).repeat(count // GRAIN))
    rows, threads = source.view(-1, GROUP), setting.threads
    theirs, scale, between = their_values.view(-1, GROUP), their_scales.view(-1, 1), passing.view(-1, GROUP)

    def quantise() -> bool:
        addresses = values.data_ptr(), scales.data_ptr(), source.data_ptr()
        return native.quantize(*addresses, "fp32", count, group=GROUP, threads=threads)

    def torch_quantise() -> None:
        torch.abs(rows, out=between)
        torch.amax(between, 1, keepdim=True, out=scale)
        scale.div_(127)
        theirs.copy_(torch.div(rows, scale, out=between).round_().clamp_(-127, 127))

    def dequantise() -> None:
        addresses = values.data_ptr(), scales.data_ptr()
        native.dequantize(back.data_ptr(), "fp32", *addresses, count, group=GROUP, threads=threads)

    def torch_dequantise() -> None:
        between.copy_(theirs).mul_(scale)

    for work in (quantise, torch_quantise, dequantise, torch_dequantise):
        work()
    assert torch.equal(values, their_values) and torch.equal(back, passing), "the rivals do not do the same"

    contenders: dict[str, Callable[[], object]] = {
        "ours": quantise,
        "torch": torch_quantise,
        "dequantise": dequantise,
        "torch dequantise": torch_dequantise,
    }
    seconds = take_turns(contenders, setting.pairs, progress, "quantise")
    speed = partial(_speed, "quantise", amount=count, seconds=seconds, target=None)
    return [
        speed("quantise, torch's passes", rival="torch"),
        speed("dequantise, torch's passes", rival="torch dequantise", ours="dequantise"),
    ]


def measure_zeroth_order(setting: Setting, progress: Progress) -> list[Row]:
    """One pass that finishes the last step's update and makes both perturbed copies (MeZO), of bf16 parameters."""
    count = setting.nbytes // 24 // GRAIN * GRAIN
    parameters, plus, minus, direction = _arrays(*[(torch.bfloat16, count)] * 4)
    parameters.fill_(0.02)

    def ours() -> None:
        addresses = parameters.data_ptr(), plus.data_ptr(), minus.data_ptr()
        native.zeroth_order(
            *addresses,
            "bf16",
            count,
            seed=1,
            tensor=0,
            step=2,
            eps=1e-3,
            pending=[(1, 0, 1e-6, 1.0)],
            threads=setting.threads,
        )

    def chain() -> None:
        torch.manual_seed(1)
        parameters.sub_(torch.randn(count, dtype=torch.bfloat16, out=direction), alpha=1e-6)
        torch.manual_seed(2)
        torch.randn(count, dtype=torch.bfloat16, out=direction)
        torch.add(parameters, direction, alpha=1e-3, out=plus)
        torch.sub(parameters, direction, alpha=1e-3, out=minus)

    seconds = take_turns({"ours": ours, "torch": chain}, setting.pairs, progress, "zeroth order")
    return [
        _speed(
            "zeroth-order", "torch randn twice, three passes", amount=count, seconds=seconds, rival="torch", target=None
        )
    ]


def measure_checksum(setting: Setting, progress: Progress) -> list[Row]:
    """The checksum alone, and where most of a step's bytes have theirs taken: in an update."""
    halves = portion(progress, 0.0, 0.5), portion(progress, 0.5, 1.0)
    return [_checksum_alone(setting, halves[0]), _checksum_in_passing(setting, halves[1])]


def _checksum_in_passing(setting: Setting, progress: Progress) -> Row:
    """An update that takes the checksums of its states before and after, and one between two passes that do."""
    count = max(setting.nbytes // AdamStates.ELEMENT_BYTES // _CHUNK, 1) * _CHUNK
    states = AdamStates(count)
    parts = USUAL.parts(_CHUNK)
    positions, ends = tuple(part.offset for part in parts), [part.stop for part in parts]

    def summed(chunk: int) -> None:
        for stream, part in zip((states.master, states.exp_avg, states.exp_avg_sq), parts, strict=True):
            native.checksum(stream[chunk:].data_ptr(), part.nbytes, setting.threads)

    def apart() -> None:
        for chunk in range(0, count, _CHUNK):
            summed(chunk)
            states.step_of_chunk(chunk, setting.threads, native.adamw_statistics)
            summed(chunk)

    def passing() -> None:
        for chunk in range(0, count, _CHUNK):
            update = partial(native.adamw_summed, positions=positions, ends=ends)
            states.step_of_chunk(chunk, setting.threads, update)

    seconds = take_turns({"ours": passing, "apart": apart}, setting.pairs, progress, "checksum in passing")
    name = "taken by an update, two passes beside it"
    return _speed("checksum", name, amount=count, seconds=seconds, rival="apart", target=None)


def _checksum_alone(setting: Setting, progress: Progress) -> Row:
    """The checksum reads what a copy reads and writes."""
    nbytes = setting.nbytes // 2 // ALIGNMENT * ALIGNMENT
    source, target = _arrays((torch.uint8, nbytes), (torch.uint8, nbytes))
    source.fill_(7)
    target.fill_(9)
    contenders: dict[str, Callable[[], object]] = {
        "ours": partial(native.checksum, source.data_ptr(), nbytes, setting.threads),
        "copy": partial(native.copy, target.data_ptr(), source.data_ptr(), nbytes, threads=setting.threads),
    }
    seconds = take_turns(contenders, setting.pairs, progress, "checksum")
    return _speed(
        "checksum", "copy of as many bytes", amount=nbytes, seconds=seconds, rival="copy", target=None, unit="B/s"
    )


def measure_page_lock(setting: Setting, progress: Progress) -> list[Row]:
    """What the kernel says is locked beyond what was asked for, for a size that no page divides."""
    progress(0.0, "page-locked memory")
    name = "locked beyond what was asked for"
    page = os.sysconf("SC_PAGE_SIZE")
    wanted = setting.nbytes // 3 // page * page + 1
    before = _status("VmLck")
    arena = native.Arena(wanted)
    after = _status("VmLck")
    locked, why = arena.locked, arena.lock_error
    arena.close()
    progress(1.0, "page-locked memory")
    if not locked or before is None or after is None:
        missing = f"{why}; raise the limit (ulimit -l), which training wants too" if why else "no VmLck in /proc"
        return [Row("page-lock", name, "B", target=_PAGE, missing=missing)]
    waste = after - before - wanted
    doubled = (1 << (wanted - 1).bit_length()) - wanted
    note = f"an arena of {wanted:,} bytes; the rival is torch's rule, the next power of two, computed and not run; the "
    note += "ratio is ours in pages"
    return [Row("page-lock", name, "B", waste, doubled, spread([waste / page]), _PAGE, note=note)]


_PAGE = Target(1.0, at_most=True)


@contextmanager
def _output_to_errors() -> Iterator[None]:
    """Standard output is for the result: what others print meanwhile, compilers included, goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def peak_bytes(work: Callable[[], object]) -> int | None:
    """The most resident memory that `work` took beyond what was there before; None where the kernel does not tell."""
    with process.nothing_kept():
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return None
        before = _status("VmRSS")
        work()
        peak = _status("VmHWM")
    return max(peak - before, 0) if peak is not None and before is not None else None


def _status(field: str) -> int | None:
    """A size in /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return None


def _arrays(*shapes: tuple[torch.dtype, int]) -> list[torch.Tensor]:
    """One-dimensional arrays in one huge-page-backed arena that was touched; they keep it alive."""
    sizes = [count * dtype.itemsize for dtype, count in shapes]
    starts = [0]
    for nbytes in sizes:
        starts.append(starts[-1] + -(-nbytes // ALIGNMENT) * ALIGNMENT)
    memory = torch.from_dlpack(native.Arena(starts[-1], lock=False))
    return [
        memory[start : start + nbytes].view(dtype)
        for start, nbytes, (dtype, _) in zip(starts, sizes, shapes, strict=False)
    ]


def _speed(
    group: str,
    name: str,
    *,
    amount: int,
    seconds: Mapping[str, tuple[float, ...]],
    rival: str,
    target: Target | None,
    ours: str = "ours",
    unit: Unit = "elements/s",
) -> Row:
    """`amount` of work a call, ours against `rival`: the ratio is the rival's seconds over ours."""
    return Row(
        group,
        name,
        unit,
        ours=amount / statistics.median(seconds[ours]),
        rival=amount / statistics.median(seconds[rival]),
        ratio=ratio_of(seconds[rival], seconds[ours]),
        target=target,
    )
