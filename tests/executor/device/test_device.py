"""The CUDA device itself, run on a processor against a stub of torch.cuda: what it asks of CUDA, and what it makes of
failures. `tests/executor/test_gpu.py` has what only a GPU can tell."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ssdplan import cli
from ssdplan.executor.device.device import CudaDevice, open_device
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.layers import Layers, MicroBatch
from ssdplan.executor.model.model import open_model
from ssdplan.executor.model.weights import Weights
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.runtime.runner import OF_THE_DEVICE
from ssdplan.executor.train import Result, train
from ssdplan.plans.errors import MemoryBudgetError, MismatchError, SsdplanError, UsageError
from ssdplan.plans.graph.ops import Resource
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.profiler import layer_bench
from ssdplan.profiler.measure import Limits
from ssdplan.profiler.model import measure_model
from tests.executor.device.cuda_stub import MIB, Stub, stubbed
from tests.executor.runs import LENGTH, prepare
from tests.made.plans import make_plan

GIB = 1 << 30
WORKSPACE, TF32 = "CUBLAS_WORKSPACE_CONFIG", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a device settles in a process is as it was, for the tests that follow."""
    for name in (WORKSPACE, TF32, *ALLOCATOR):
        monkeypatch.setenv(name, "")  # so that it is set back whatever the device writes there
        monkeypatch.delenv(name)
    deterministic, filled = torch.are_deterministic_algorithms_enabled(), _filled()
    cudnn, products = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch._C._set_deterministic_fill_uninitialized_memory(filled)
    torch.backends.cudnn.allow_tf32 = cudnn
    torch.set_float32_matmul_precision(products)


def _filled() -> bool:
    return torch._C._get_deterministic_fill_uninitialized_memory()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    with stubbed(lambda owner, name, value: monkeypatch.setattr(owner, name, value, raising=False), Stub()) as it:
        yield it


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("model"))


# What a process is settled to


def test_a_gpu_gives_the_same_bits_and_multiplies_fp32_as_fp32(stub: Stub) -> None:
    torch.set_float32_matmul_precision("high")
    os.environ[TF32] = "1"
    CudaDevice()
    assert os.environ[WORKSPACE] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not _filled()
    assert os.environ[TF32] == "0" and not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32
    assert stub.settings == ["expandable_segments:True"]


@pytest.mark.parametrize(("given", "kept"), [(":16:8", ":16:8"), (":4096:2:16:8", ":4096:8"), (":0:0", ":4096:8")])
def test_another_workspace_of_cublas_is_kept_where_it_gives_the_same_bits(stub: Stub, given: str, kept: str) -> None:
    os.environ[WORKSPACE] = given
    CudaDevice()
    assert os.environ[WORKSPACE] == kept


@pytest.mark.parametrize("name", ALLOCATOR)
def test_what_the_user_says_of_the_allocator_stays(stub: Stub, name: str) -> None:
    os.environ[name] = "max_split_size_mb:512"
    CudaDevice()
    assert not stub.settings


def test_where_there_is_no_gpu_nothing_is_settled(stub: Stub) -> None:
    stub.names = ()
    with pytest.raises(UsageError, match="torch sees no GPU here; use --device cpu"):
        open_device("cuda")
    assert not torch.are_deterministic_algorithms_enabled() and WORKSPACE not in os.environ


def test_libraries_have_what_they_keep_before_anything_is_measured(stub: Stub) -> None:
    """A product forward and backward in the stream of compute, in the thread of compute and in autograd's."""
    CudaDevice()
    products = [op for _, op in stub.launched if op in ("mm", "addmm")]
    assert len(products) >= 4 and products.count("addmm") >= 2, "forward and backward, in two precisions"
    assert {stream for stream, _ in stub.launched} == {"compute"}


# Which GPU


def test_a_gpu_is_chosen_by_its_number(stub: Stub) -> None:
    for word, index, name in (("cuda", 0, "Made 100"), ("cuda:0", 0, "Made 100"), ("cuda:1", 1, "Made 200")):
        device = open_device(word)
        assert (device.index, device.name, device.torch_device) == (index, name, torch.device("cuda", index))
        with device.lane("compute"):
            assert stub.device == index
    assert open_device("cuda", 1).name == "Made 200", "as a plan says it"
    assert isinstance(open_device("cpu", 1), EmulatedDevice)


@pytest.mark.parametrize("word", ["cuda:2", "cuda:x", "cuda:", "cuda:-1", "gpu", "cpu:0"])
def test_an_unknown_device_is_refused_and_those_there_are_named(stub: Stub, word: str) -> None:
    with pytest.raises(UsageError, match=rf"--device {word}: .*there is cuda:0 \(Made 100\), cuda:1 \(Made 200\)$"):
        open_device(word)


def test_a_profile_refuses_it_with_the_exit_code_of_wrong_usage(
    stub: Stub, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["profile", "--model", str(directory / "llama"), "-o", str(tmp_path / "profile.json"), "--device"]
    assert cli.main([*arguments, "cuda:7"]) == 2
    assert "--device cuda:7: there is cuda:0 (Made 100), cuda:1 (Made 200)" in capsys.readouterr().err


# Host memory that the driver will not register


@pytest.mark.parametrize("has_last_error", [True, False])
def test_a_failed_registration_is_told_and_forgotten(monkeypatch: pytest.MonkeyPatch, has_last_error: bool) -> None:
    """Else the next kernel, whatever it is, raises it."""
    stub = Stub(registering=2, has_last_error=has_last_error)
    with stubbed(lambda owner, name, value: monkeypatch.setattr(owner, name, value, raising=False), stub):
        device = CudaDevice()
        arena = device.host_arena(1 << 20)
        assert arena.note == "cudaHostRegister failed: made error 2; copies go through pageable memory"
        target = device.allocate(1 << 20)
        arena.bytes.fill_(7)
        device.copy_h2d(target, arena.bytes)
        assert bool((target == 7).all())
        device.release(arena)  # there is nothing to unregister


@pytest.mark.parametrize("has_last_error", [True, False])
def test_an_error_that_is_no_registrations_is_raised(monkeypatch: pytest.MonkeyPatch, has_last_error: bool) -> None:
    stub = Stub(registering=2, has_last_error=has_last_error)
    with stubbed(lambda owner, name, value: monkeypatch.setattr(owner, name, value, raising=False), stub):
        device = CudaDevice()
        stub.fails["fill_"] = RuntimeError("CUDA error: an illegal memory access was encountered")
        with pytest.raises(RuntimeError, match="illegal memory access"):
            device.host_arena(1 << 20)


def test_memory_that_the_driver_does_not_let_go_of_is_an_error(stub: Stub) -> None:
    device = CudaDevice()
    arena = device.host_arena(1 << 20)
    assert stub.registered == {arena.address} and not arena.note
    device.release(arena)
    assert not stub.registered
    stub.unregistering = 3
    with pytest.raises(SsdplanError, match="Made 100: cudaHostUnregister failed: made error 3"):
        device.release(device.host_arena(1 << 20))


def test_it_takes_no_other_errors_place(stub: Stub) -> None:
    device = CudaDevice()
    arena = device.host_arena(1 << 20)
    stub.unregistering = 3
    with pytest.raises(ZeroDivisionError) as raised:
        try:
            raise ZeroDivisionError
        finally:
            device.release(arena)
    assert raised.value.__notes__ == ["Made 100: cudaHostUnregister failed: made error 3"]


# Memory: what a plan may have, what was taken, and what happens when there is no more


@pytest.mark.parametrize(("total", "reserve"), [(4 * GIB, 512 * MIB), (80 * GIB, int(0.02 * 80 * GIB))])
def test_no_plan_may_have_the_reserve(stub: Stub, total: int, reserve: int) -> None:
    stub.total, stub.others = total, 300 * MIB
    device = CudaDevice()
    assert device.reserve_bytes == reserve
    assert device.memory_bytes() == total - 300 * MIB - reserve - stub.reserved()
    stub.others = total - 100 * MIB
    assert device.memory_bytes() == 0


def test_torch_may_take_the_budget_and_half_of_the_reserve(stub: Stub) -> None:
    device = CudaDevice()
    device.keep_to(GIB)
    assert stub.fraction * stub.total == pytest.approx(stub.reserved() + GIB + 256 * MIB)
    kept = device.allocate(GIB)
    with pytest.raises(MemoryBudgetError) as raised:
        device.allocate(300 * MIB)
    assert raised.value.exit_code == 4
    for words in ("Made 100", "an arena of 300 MiB", "budget is 1 GiB", "reserve of 512 MiB", "--device-memory"):
        assert words in str(raised.value)
    assert kept.numel() == GIB


def test_torch_may_take_what_is_free_until_a_plan_says_less(stub: Stub) -> None:
    device = CudaDevice()
    free = stub.total - stub.reserved()
    assert stub.fraction * stub.total == pytest.approx(stub.reserved() + free - 256 * MIB)
    device.keep_to(100 * GIB)
    assert stub.fraction == 1.0


NO_CUBLAS = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize(
    ("error", "told", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has"), MemoryBudgetError,
         "too little for compute: 3.50 GiB more were wanted"),
        (RuntimeError(NO_CUBLAS), MemoryBudgetError, "too little for compute: CUDA error: CUBLAS_STATUS_NOT_INI"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas`"), MemoryBudgetError, "ALLOC"),
        (RuntimeError("CUDA error: out of memory\nCompile with"), MemoryBudgetError, "compute: CUDA error: out of mem"),
        (RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation, but you set"), MismatchError,
         "cumsum_cuda_kernel gives other bits each time on Made 100"),
    ],
)  # fmt: skip
def test_what_cuda_raises_is_an_error_that_a_user_can_act_on(
    stub: Stub, error: RuntimeError, told: type[SsdplanError], words: str
) -> None:
    device = CudaDevice()
    with pytest.raises(told, match=words), device.lane("compute"):
        raise error


def test_another_error_stays_what_it_is(stub: Stub) -> None:
    device = CudaDevice()
    with pytest.raises(RuntimeError, match=r"^CUDA error: misaligned address$"), device.lane("d2h"):
        raise RuntimeError("CUDA error: misaligned address")


def test_what_was_taken_is_counted_from_the_libraries_up(stub: Stub) -> None:
    device = CudaDevice()
    device.keep_to(GIB)
    arena = device.allocate(5 * MIB)
    with device.lane("compute"):
        torch.empty(2 * MIB, dtype=torch.uint8, device=device.torch_device)
    _, workspace = device.peak_bytes(lambda: len(torch.empty(MIB // 2, dtype=torch.uint8, device=device.torch_device)))
    assert workspace == MIB, "half of it, and the gap behind the arena, as a run has one too"
    taken = device.taken()
    assert (taken.reserved, taken.allocated) == (8 * MIB, 7 * MIB), "though torch's own peak was forgotten meanwhile"
    del arena
    device.keep_to(GIB)
    assert (device.taken().reserved, device.taken().allocated) == (0, 0)


# Work that is given without waiting for its end


def test_work_is_launched_behind_what_it_is_told_and_waits_asleep(stub: Stub) -> None:
    device = CudaDevice()
    done: list[str] = []
    stub.waits.clear()
    stub.slept = stub.spun = 0
    place = device.allocate(MIB)

    def launch(name: str) -> Callable[[], Callable[[], None]]:
        def action() -> Callable[[], None]:
            place.fill_(len(done))
            done.append(f"{name} in {stub.stream}")
            return lambda: done.append(f"rest of {name}")

        return action

    before = time.perf_counter()
    first = device.submit("h2d", launch("copy"), ())
    assert first is not None and first.holds
    second = device.submit("compute", launch("layer"), [first])
    assert second is not None
    assert done == ["copy in h2d", "layer in compute"] and stub.waits == [("compute", "h2d")]
    assert stub.slept == stub.spun == 0, "nobody waited yet"
    (began, ended), after = first.wait(), time.perf_counter()
    assert before <= began <= ended <= after
    assert done[2:] == ["rest of copy"] and (stub.slept, stub.spun) == (1, 0)
    assert device.submit("cpu", launch("update"), ()) is None
    assert done[3:] == ["update in default", "rest of update"]
    plain = device.submit("d2h", lambda: None, [second])
    assert plain is not None and not plain.holds and stub.waits[1:] == [("d2h", "compute")]


def test_what_fails_later_is_told_where_it_is_waited_for(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice()
    begun = device.submit("compute", lambda: None, ())
    assert begun is not None

    def fail() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(begun.ended, "synchronize", fail)
    with pytest.raises(MemoryBudgetError, match="Made 100 has too little for compute"):
        begun.wait()


def test_events_are_told_from_a_moment_not_long_ago(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice()
    stub.spun = 0
    for _ in range(3):
        device.submit("compute", lambda: None, ())
    assert stub.spun == 0
    monkeypatch.setattr("ssdplan.executor.device.device.ANCHORED_SECONDS", 0.0)
    device.submit("compute", lambda: None, ())
    assert stub.spun == 1, "one moment more, of a stream where nothing else is"


# Profiles and runs


def test_a_profile_leaves_out_the_sizes_that_have_no_room(
    stub: Stub, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest is too much for what all sizes share, the one below for a layer."""
    monkeypatch.setattr(layer_bench, "ELSEWHERE_BYTES", MIB)
    model = open_model(directory / "llama", torch.float32)
    device = CudaDevice()
    stub.others = stub.total - 48 * MIB
    weights = Weights(model)
    costs = measure_model(
        model,
        Layers(model, device.torch_device),
        MicroBatch,
        weights,
        device,
        sequence_length=32,
        micro_batch_sizes=[1, 500, 5000],
        limits=Limits(seconds=0.01),
        progress=lambda share, words: None,
    )
    weights.close()
    assert {timing.micro_batch_size for entry in costs.classes for timing in entry.timings} == {1}
    assert costs.notes[:2] == [f"micro-batch size {size} does not fit into Made 100" for size in (500, 5000)]
    assert {stream for stream, op in stub.launched if op in ("mm", "addmm")} == {"compute"}
    with pytest.raises(MemoryBudgetError, match="Made 100: a layer of llama at micro-batch size 5000 and sequence"):
        measure_model(
            model,
            Layers(model, device.torch_device),
            MicroBatch,
            weights,
            device,
            sequence_length=32,
            micro_batch_sizes=[5000],
            limits=Limits(seconds=0.01),
            progress=lambda share, words: None,
        )


def _run(directory: Path, out: Path, device: Any, kind: Any, *, serial: bool = True) -> tuple[Any, Result]:
    model = open_model(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, device=kind, optimizer=0.5, parameters=0.5, alpha=0.3)
    recipe = Recipe(steps=2, optimizer=AdamW(lr=1e-3), serial=serial)
    return plan, train(plan, model, device, data=directory / "text.txt", out=out, recipe=recipe)


def test_a_run_trains_the_same_and_says_what_the_allocator_held(stub: Stub, directory: Path, tmp_path: Path) -> None:
    plan, result = _run(directory, tmp_path / "gpu", CudaDevice(), "cuda")
    layers, micro_batches = len(plan.model.layers), plan.decision.micro_batches
    looked = [stream for stream, shape in stub.made if shape == (layers, micro_batches, 2)]
    assert looked == ["compute"] * 4, "what each step notes of its layers is made in the lane that writes it"
    assert len(stub.registered) == 0
    peak = next(row for row in result.compared if row.quantity == "peak_device_bytes")
    arena = plan.prediction.device_arena_bytes
    assert arena < peak.measured < arena + 64 * MIB and peak.measured % (2 * MIB) == 0
    _, emulated = _run(directory, tmp_path / "cpu", EmulatedDevice(), "cpu")
    assert result.losses == emulated.losses


def test_a_run_gives_the_gpu_work_ahead(
    stub: Stub, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its waits are asleep, and each step's end is seen; the losses are those of one op after the other."""
    _, expected = _run(directory, tmp_path / "serial", CudaDevice(), "cuda")
    monkeypatch.setattr(CudaDevice, "_to_host", lambda self, tensor: tensor.clone())  # in threads that see no stub
    stub.waits.clear()
    stub.slept = 0
    plan, found = _run(directory, tmp_path / "ahead", CudaDevice(), "cuda", serial=False)
    assert found.losses == expected.losses
    schedule = build_schedule(plan.model, plan.decision)
    graphs = (schedule.first, schedule.steady, schedule.flush)
    assert stub.slept == sum(op.resource in OF_THE_DEVICE for graph in graphs for op in graph.ops)
    lanes = {(op.resource, graph.ops[wait].resource) for graph in graphs for op in graph.ops for wait in op.waits}
    assert set(stub.waits) <= {each for each in lanes if set(each) <= OF_THE_DEVICE and each[0] != each[1]}
    assert stub.waits, "some work was given before what it is behind had ended"


@pytest.mark.parametrize(("operator", "lane"), [("mm", "compute"), ("copy_", "h2d")])
def test_a_run_without_memory_ends_with_its_own_error(
    stub: Stub, directory: Path, tmp_path: Path, operator: str, lane: Resource
) -> None:
    device = CudaDevice()
    real = device.submit

    def submit(resource: Resource, *work: Any) -> Any:
        if resource == lane:
            stub.fails[operator] = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")
        return real(resource, *work)

    device.submit = submit  # type: ignore[method-assign]
    with pytest.raises(MemoryBudgetError, match=f"too little for {lane}: 20.00 MiB more were wanted; the budget is"):
        _run(directory, tmp_path / "run", device, "cuda")
    assert not stub.registered, "the host arena is given back all the same"


def test_fakes_of_a_tracing_are_no_memory() -> None:
    """A block is traced when a run first meets its rows, in an operation that is measured."""

    def work() -> torch.Tensor:
        with FakeTensorMode():
            torch.empty(1 << 20) + 1
        return torch.empty(1 << 10) + 1

    _, peak = EmulatedDevice().peak_bytes(work)
    assert peak == 2 * 4 << 10
