"""What layers cost: known times, bytes counted by hand, sizes that do not fit, and one layer in memory at a time."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle, groupby
from typing import Any

import pytest
import torch
from torch.nn import functional

from ssdplan.plans.errors import MemoryBudgetError
from ssdplan.profiler.layer_bench import Bench, saved_activation_bytes
from ssdplan.profiler.measure import Limits
from ssdplan.profiler.model import ModelCosts, measure_model
from tests.bounds import HANG_SECONDS
from tests.profiler.made import (
    FORWARD_SECONDS,
    MadeDevice,
    MadeLayers,
    MadeMicroBatch,
    MadeModel,
    MadeRouting,
    MadeWeights,
)

LENGTH = 16


def silent(fraction: float, what: str) -> None:
    pass


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads of torch that wait for one another on a busy machine would blur the known times."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def small_caches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssdplan.profiler.layer_bench.ELSEWHERE_BYTES", 1 << 16)
        yield


def measure(layers: MadeLayers, weights: MadeWeights, sizes: tuple[int, ...], seconds: float) -> ModelCosts:
    return measure_model(
        layers.model,
        layers,
        MadeMicroBatch,
        weights,
        MadeDevice(peak=777),
        sequence_length=LENGTH,
        micro_batch_sizes=sizes,
        limits=Limits(seconds=seconds),
        progress=silent,
        clock=layers.clock,
    )


@dataclass
class Measured:
    layers: MadeLayers
    weights: MadeWeights
    costs: ModelCosts


@pytest.fixture(scope="module")
def measured() -> Measured:
    layers, weights = MadeLayers(), MadeWeights()
    return Measured(layers, weights, measure(layers, weights, sizes=(2, 1), seconds=4.0))


def test_known_times_and_bytes(measured: Measured) -> None:
    costs, model = measured.costs, measured.layers.model
    assert [entry.name for entry in costs.classes] == ["embedding", "block.0", "block.1", "head"]
    for entry in costs.classes:
        assert [timing.micro_batch_size for timing in entry.timings] == [1, 2]
        for timing in entry.timings:
            rows = timing.micro_batch_size
            known = FORWARD_SECONDS[entry.name] * rows
            assert timing.forward_seconds == pytest.approx(known)
            assert timing.backward_seconds == pytest.approx(3 * known)
            assert timing.forward_workspace_bytes == timing.backward_workspace_bytes == 777
            # By hand: what gelu takes and what it gives. Input, weights and mask were there before.
            mlp = 2 * rows * LENGTH * model.inner * 4 if entry.name.startswith("block") else 0
            assert timing.saved_activation_bytes == mlp
    # By hand: ids, labels and attention mask of int64, and the made mask of fp32.
    assert costs.context_bytes == {rows: rows * LENGTH * (3 * 8 + 4) for rows in (1, 2)}


def test_a_layer_that_caches_do_not_hold_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = {"forward": 0.004, "loss": 0.004, "backward": 0.009}
    forgotten = []

    class Cached(MadeLayers):
        def _run(self, what: str, *given: Any) -> None:
            super()._run(what, *given)
            if forgotten:
                self.clock.sleep(longer[what])
                forgotten.clear()

    monkeypatch.setattr("ssdplan.profiler.layer_bench.Bench.forget", lambda bench, layer: forgotten.append(layer))
    costs = measure(Cached(), MadeWeights(), sizes=(1,), seconds=1.0)
    for entry in costs.classes:
        (timing,) = entry.timings
        known = FORWARD_SECONDS[entry.name]
        assert timing.forward_seconds == pytest.approx(known), "what is cold is not counted"
        assert timing.forward_cold_seconds == pytest.approx(longer["forward"])
        assert timing.backward_cold_seconds == pytest.approx(longer["backward"])
        assert timing.forward_stage_seconds(3) == timing.forward_cold_seconds + 3 * timing.forward_seconds
        assert timing.backward_stage_seconds(3) == timing.backward_cold_seconds + 3 * timing.backward_seconds


def test_only_a_class_of_one_layer_begins_with_an_empty_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a step, where what is free goes back when compute turns to another class."""
    layers, device, given = MadeLayers(), MadeDevice(peak=777), []
    bench = Bench(layers.model, layers, MadeMicroBatch, MadeWeights(), device, LENGTH, [1])
    monkeypatch.setattr("ssdplan.profiler.layer_bench.process.give_back", lambda: given.append(layer))
    for layer in range(len(layers.model.layers)):
        bench.forget(layer)
    assert given == [0, 2, 4], "blocks 0 and 2 are of one class"


@pytest.mark.parametrize("times", [None, 2.5])
def test_the_busiest_expert_is_the_routings(times: float | None) -> None:
    model = MadeModel(routing=MadeRouting(times))
    costs = measure_model(
        model, MadeLayers(model), MadeMicroBatch, MadeWeights(), MadeDevice(peak=0),
        sequence_length=LENGTH, micro_batch_sizes=(1,), limits=Limits(seconds=0.01), progress=silent,
    )  # fmt: skip
    assert costs.busiest_expert == times and model.routing.asked == ["begin", "end"]


def test_bytes_are_the_most_of_padded_and_shared_rows() -> None:
    """A made model that keeps more for rows that two sequences share, and whose layers take more for them."""

    class Sharing(MadeLayers):
        def context_bytes(self) -> int:
            return sum(1000 if batch.position_ids is not None else 10 for batch in self.micro_batches)

        def backward(self, layer: int, micro_batch: int, *arguments: Any) -> None:
            device.peak = 5 if self.micro_batches[micro_batch].position_ids is None else 9
            super().backward(layer, micro_batch, *arguments)

    for apart, kept, peak in ((True, 1000, 9), (False, 10, 5)):
        layers, device = Sharing(MadeModel(apart=apart)), MadeDevice(peak=0)
        costs = measure_model(
            layers.model, layers, MadeMicroBatch, MadeWeights(), device,
            sequence_length=LENGTH, micro_batch_sizes=(1, 2), limits=Limits(seconds=0.01), progress=silent,
        )  # fmt: skip
        assert costs.context_bytes == {rows: kept + rows * LENGTH * 3 * 8 for rows in (1, 2)}
        assert {t.backward_workspace_bytes for entry in costs.classes for t in entry.timings} == {peak}
        last = layers.micro_batches[-1]
        shared = (torch.arange(LENGTH) - 1).clamp(min=0)
        assert (last.position_ids is not None) == apart
        assert not apart or (last.position_ids == shared).all()


def growths() -> list[int | None]:
    """What profiling says that the process grows by where each backward of a made layer keeps 4 MiB more."""
    held: list[torch.Tensor] = []

    class Leaving(MadeLayers):
        def backward(self, layer: int, micro_batch: int, *arguments: Any) -> None:
            held.append(torch.ones(1 << 20))
            super().backward(layer, micro_batch, *arguments)

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssdplan.profiler.layer_bench.ELSEWHERE_BYTES", 1 << 16)
        patch.setattr("ssdplan.profiler.layer_bench.GROWING_RUNS", 6)
        costs = measure(Leaving(), MadeWeights(), sizes=(1,), seconds=0.01)
    return [timing.process_growth_bytes for entry in costs.classes for timing in entry.timings]


def test_the_process_grows_by_what_micro_batches_leave() -> None:
    """So many runs make that much more of the process. In a process of its own: where many tests ran, it also grows by
    the free pages of theirs that are used again."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        for growth in fresh.submit(growths).result(timeout=HANG_SECONDS):
            assert growth == pytest.approx(6 * 4 << 20, abs=1 << 20)


def test_the_most_of_the_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of which the kernel tells nothing do not."""
    found = cycle([3 << 20, None, 9 << 20])
    monkeypatch.setattr("ssdplan.profiler.layer_bench.process.growth_bytes", lambda work: next(found))
    monkeypatch.setattr("ssdplan.profiler.layer_bench.ELSEWHERE_BYTES", 1 << 16)
    costs = measure(MadeLayers(), MadeWeights(), sizes=(1,), seconds=0.01)
    assert {timing.process_growth_bytes for entry in costs.classes for timing in entry.timings} == {9 << 20}


def kept_kernels() -> dict[int, int]:
    """What profiling says of made layers that keep 4 MiB for each number of tokens that they meet; the embedding meets
    all of them before anything is measured."""
    held: dict[tuple[int, int], torch.Tensor] = {}

    class Keeping(MadeLayers):
        def backward(self, layer: int, micro_batch: int, *arguments: Any) -> None:
            tokens = self.micro_batches[micro_batch].input_ids.numel()
            if layer and (layer, tokens) not in held:
                held[layer, tokens] = torch.ones(1 << 20)
            super().backward(layer, micro_batch, *arguments)

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssdplan.profiler.layer_bench.ELSEWHERE_BYTES", 1 << 16)
        layers = Keeping()
        costs = measure_model(
            layers.model, layers, MadeMicroBatch, MadeWeights(), MadeDevice(),
            sequence_length=4 * LENGTH, micro_batch_sizes=(3, 1), limits=Limits(seconds=0.01), progress=silent,
        )  # fmt: skip
    return {kernels.tokens: kernels.kept_bytes for kernels in costs.kernels}


def test_what_is_kept_for_each_number_of_tokens_is_told_apart() -> None:
    """By three classes, and but for what ran first: one row of 64 tokens, with which everything else began."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        kept = fresh.submit(kept_kernels).result(timeout=HANG_SECONDS)
    assert set(kept) == {16, 32, 3 * 16, 3 * 32, 3 * 64}
    for nbytes in kept.values():
        assert nbytes == pytest.approx(3 * 4 << 20, abs=1 << 20)


def test_every_class_is_measured_with_one_of_its_layers(measured: Measured) -> None:
    calls = measured.layers.calls
    assert {layer for _, layer, _ in calls} == {0, 1, 2, 4}, "block.2 is of the class of block.0"
    assert {method for method, layer, _ in calls if layer == 4} == {"loss", "backward"}


def test_one_layer_in_memory_at_a_time(measured: Measured) -> None:
    # Layers' first states all go to one place; only the head's second lies after its first.
    reads = measured.weights.reads
    first = {address for state, address in reads if state != 4}
    assert len(first) == 1
    assert {address - min(first) for state, address in reads if state == 4} == {0, 2048 * 4}


def test_figures_take_turns_in_rounds(measured: Measured) -> None:
    visits = [layer for layer, _ in groupby(layer for _, layer, _ in measured.layers.calls)]
    assert visits[:4] == visits[4:8] == [0, 1, 2, 4], "once for bytes, then for seconds"
    assert len(visits) >= 4 * (1 + 5) and visits == [0, 1, 2, 4] * (len(visits) // 4)


def test_sizes_that_do_not_fit_are_left_out() -> None:
    costs = measure(MadeLayers(largest=4), MadeWeights(), sizes=(1, 2, 4, 8), seconds=0.01)
    assert all([timing.micro_batch_size for timing in entry.timings] == [1, 2] for entry in costs.classes)
    assert set(costs.context_bytes) == {1, 2}
    assert costs.notes[:2] == [f"micro-batch size {size} does not fit into made device" for size in (4, 8)]


def test_a_size_whose_memory_goes_to_others_while_it_is_timed_is_left_out() -> None:
    class Later(MadeLayers):
        def _run(self, method: str, layer: int, micro_batch: int, *rest: Any) -> None:
            if micro_batch == 2 and layer:  # of the largest size, without padding: only times are taken of it
                raise MemoryBudgetError("made to fail")
            super()._run(method, layer, micro_batch, *rest)

    costs = measure(Later(), MadeWeights(), sizes=(1, 2, 4), seconds=0.01)
    assert all([timing.micro_batch_size for timing in entry.timings] == [1, 2] for entry in costs.classes)
    assert costs.notes[0] == "micro-batch size 4 does not fit into made device"


def test_a_model_that_does_not_fit_at_all() -> None:
    with pytest.raises(MemoryBudgetError, match="made device: a layer of made at micro-batch size 1 and sequence len"):
        measure(MadeLayers(largest=1), MadeWeights(), sizes=(1, 2), seconds=1.0)


def test_weights_reach_a_device_of_its_own_memory() -> None:
    class Gpu(MadeDevice):
        kind = "cuda"
        copies = 0

        def copy_h2d(self, target: torch.Tensor, source: torch.Tensor) -> None:
            assert target.dtype == source.dtype == torch.uint8 and target.data_ptr() != source.data_ptr()
            target.copy_(source)
            self.copies += 1

    layers, weights, device = MadeLayers(), MadeWeights(), Gpu()
    costs = measure_model(
        layers.model,
        layers,
        MadeMicroBatch,
        weights,
        device,
        sequence_length=LENGTH,
        micro_batch_sizes=[1],
        limits=Limits(seconds=0.01),
        progress=silent,
    )  # MadeLayers checks that its weights are there
    assert device.copies == len(weights.reads)
    assert {timing.process_growth_bytes for entry in costs.classes for timing in entry.timings} == {None}, "not its own"
    assert costs.kernels == ()


def test_want_of_time_is_noted_once() -> None:
    costs = measure(MadeLayers(), MadeWeights(), sizes=(1, 2), seconds=0.01)
    (note,) = costs.notes
    assert note.startswith("made: 16 of 16 times are unstable, most the ") and "once only" in note


def test_progress_rises_to_one() -> None:
    seen: list[float] = []
    layers = MadeLayers()
    measure_model(
        layers.model,
        layers,
        MadeMicroBatch,
        MadeWeights(),
        MadeDevice(),
        sequence_length=LENGTH,
        micro_batch_sizes=[1],
        limits=Limits(seconds=0.2),
        progress=lambda fraction, what: seen.append(fraction),
        clock=layers.clock,
    )
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) > 10


def test_saved_bytes_of_a_multilayer_perceptron_by_hand() -> None:
    x = torch.randn(10, 8)
    up, down = torch.randn(8, 32, requires_grad=True), torch.randn(32, 8, requires_grad=True)

    def work() -> float:
        result = (functional.gelu(x @ up) @ down).tanh().sum()
        result.backward()
        return float(result.detach())

    value, nbytes = saved_activation_bytes(work)
    # Input of gelu [10, 32], its output [10, 32], output of tanh [10, 8]; x and the weights were there before.
    assert nbytes == (320 + 320 + 80) * 4
    assert value == pytest.approx(float((functional.gelu(x @ up) @ down).tanh().sum().detach()))


def test_a_storage_counts_once_and_an_address_that_is_used_again_counts_twice() -> None:
    weight = torch.randn(64, 64, requires_grad=True)

    def twice_saved() -> None:
        y = weight * 2.0
        (y * y[:1]).sum().backward()  # y whole, and a part of it

    assert saved_activation_bytes(twice_saved)[1] == 64 * 64 * 4
    addresses = []

    def one_after_another() -> None:
        for _ in range(2):
            y = weight.detach().clone().requires_grad_() * 2.0
            addresses.append(y.data_ptr())
            y.exp().sum().backward()
            del y

    assert saved_activation_bytes(one_after_another)[1] == 2 * 64 * 64 * 4
    assert len(addresses) == 2


def test_counting_changes_no_gradient() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    layer(x).sum().backward()
    plain = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
    layer.zero_grad()
    saved_activation_bytes(lambda: layer(x).sum().backward())
    counted = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    assert len(plain) == len(counted) > 0
    assert all(torch.equal(one, other) for one, other in zip(plain, counted, strict=True))


def test_what_is_below_all_that_is_trained_is_measured_forward_only() -> None:
    """Of blocks of one class one that hands a gradient down; a layer frozen in part has gradients of the rest."""
    whole = MadeModel()
    states = tuple(replace(state, frozen=index in (0, 1, 4)) for index, state in enumerate(whole.states))
    layers = MadeLayers(replace(whole, states=states))
    assert layers.model.first_trained == 3
    costs = measure(layers, MadeWeights(), sizes=(1,), seconds=0.01)
    found = {entry.name: entry.timings[0] for entry in costs.classes}
    assert {layer for method, layer, _ in layers.calls if method == "backward"} == {3, 4}
    assert {layer for method, layer, _ in layers.calls if method == "forward"} == {0, 2, 3}
    for name in ("embedding", "block.1"):
        assert found[name].backward_seconds == found[name].backward_workspace_bytes == 0
        assert found[name].saved_activation_bytes == 0 and found[name].forward_seconds > 0
    for name in ("block.0", "head"):
        assert found[name].backward_seconds > 0 and found[name].backward_workspace_bytes == 777
