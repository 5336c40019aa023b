"""What blocks can keep: sub-layers, rungs and their figures, of real blocks; the clock counts operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ssdplan.executor.device.device import open_device
from ssdplan.executor.model.layers import Layers
from ssdplan.executor.model.model import open_model
from ssdplan.executor.model.template import MicroBatch
from ssdplan.executor.model.weights import Weights
from ssdplan.plans.analysis.sublayers import fence, outliers, throughput
from ssdplan.plans.documents.profile import SubLayer, Timing
from ssdplan.profiler import activations, layer_bench
from ssdplan.profiler.measure import Limits
from ssdplan.profiler.model import ModelCosts, measure_model
from tests.executor.model.test_layers import DROPOUT
from tests.made.models import make_model

LENGTH = 16


class Counting(TorchDispatchMode):
    """Counts what is computed: products of matrices take a thousand times as long as anything else, copies of what is
    kept a tenth."""

    seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        fake = any("Fake" in kind.__name__ or "Functional" in kind.__name__ for kind in types)
        if not fake:
            products = ("mm", "bmm", "addmm", "attention")
            self.seconds += 1e-3 if name.endswith(products) or "attention" in name else 1e-7 if "copy" in name else 1e-6
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counting]:
    with Counting() as mode:
        yield mode


@pytest.fixture(autouse=True, scope="module")
def few() -> Iterator[None]:
    """Bytes of the process are not looked at here, and operations that are counted take as long each time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GROWING_ROUNDS", "GROWING_RUNS"):
            patch.setattr(layer_bench, name, 1)
        patch.setattr(activations, "ROUNDS", 3)
        yield


def measured(
    path: Path,
    seconds: float = 0.3,
    sizes: tuple[int, ...] = (1, 2),
    *,
    int8: bool = False,
    freeze: tuple[str, ...] = (),
) -> ModelCosts:
    model = open_model(path, torch.float32, freeze=freeze)
    device = open_device("cpu")
    with counted() as mode:
        return measure_model(
            model,
            Layers(model, device.torch_device),
            MicroBatch,
            Weights(model),
            device,
            sequence_length=LENGTH,
            micro_batch_sizes=sizes,
            limits=Limits(0.01),
            progress=lambda *_: None,
            bandwidth=1e12,
            activations=Limits(seconds),
            int8=int8,
            clock=lambda: mode.seconds,
        )


def blocks_of(costs: ModelCosts) -> list[Timing]:
    """The timings of the first class of blocks."""
    return list(next(entry for entry in costs.classes if entry.timings[0].rungs or "block" in entry.name).timings)


@pytest.fixture(scope="module")
def llama(few: None, tmp_path_factory: pytest.TempPathFactory) -> ModelCosts:
    return measured(make_model("llama", tmp_path_factory.mktemp("made") / "llama"))


def test_sub_layers_are_told_in_order_with_what_autograd_saves(llama: ModelCosts) -> None:
    for timing in blocks_of(llama):
        names = [each.name for each in timing.sublayers]
        assert names[0] == "input_layernorm" and names.index("self_attn.q_proj") < names.index("mlp.down_proj")
        assert "after self_attn.v_proj" in names, "rotation and attention are functional code"
        assert all(each.samples >= 3 for each in timing.sublayers)
        saved = sum(each.saved_bytes for each in timing.sublayers)
        # The input and what lies in it are not counted; saved_activation_bytes has a mask's kernels in it.
        assert 0 < saved <= timing.saved_activation_bytes * 1.2
    one, two = blocks_of(llama)
    assert [each.saved_bytes * 2 for each in one.sublayers] == [each.saved_bytes for each in two.sublayers]


def test_rungs_rise_in_bytes_and_fall_in_seconds(llama: ModelCosts) -> None:
    for timing in blocks_of(llama):
        assert len(timing.rungs) >= 2 and {"all", "paper"} & {rung.name for rung in timing.rungs}
        steps = [rung for rung in timing.rungs if rung.name != "paper"]
        seconds = [timing.forward_seconds + timing.backward_seconds]
        seconds += [rung.forward_seconds + rung.backward_seconds for rung in steps]
        assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == len(seconds)
        last = timing.rungs[-1]
        left = last.backward_seconds - (timing.backward_seconds - timing.forward_seconds)
        assert left < 0.1 * timing.forward_seconds, "the last one computes no product again"
        assert all(rung.backward_workspace_bytes > 0 and rung.process_growth_bytes is not None for rung in timing.rungs)
    one, two = blocks_of(llama)
    assert [rung.values for rung in one.rungs] == [rung.values for rung in two.rungs]
    for small, large in zip(one.rungs, two.rungs, strict=True):
        assert small.kept_bytes < large.kept_bytes <= 2 * small.kept_bytes


def test_what_a_profile_says_of_a_rung_a_run_keeps(tmp_path: Path, llama: ModelCosts) -> None:
    """The values are found again by another opened model, and take the bytes that were told."""
    model = open_model(make_model("llama", tmp_path / "llama"), torch.float32)
    layers, weights = Layers(model, torch.device("cpu")), Weights(model)
    flats = [torch.empty(state.elements) for state in model.states]
    for index, flat in enumerate(flats):
        weights.read(index, flat)
    ids = torch.randint(3, 97, (2, LENGTH))
    layers.begin_step(0, [MicroBatch(ids, ids)])
    out = torch.empty(2 * LENGTH * model.hidden_size)
    layers.forward(0, 0, [flats[index] for index in model.layers[0].states], None, out)
    call = layers.trace_block(1, 0, [flats[index] for index in model.layers[1].states], out)
    assert call is not None
    for rung in blocks_of(llama)[1].rungs:
        assert set(rung.values) <= {value.name for value in call.traced.values}
        assert call.kept_bytes(rung.values) == rung.kept_bytes


def test_int8_rungs_and_how_far_off_they_put_gradients(tmp_path: Path) -> None:
    """Each rung has one in int8 of fewer bytes; the errors are those of plain PyTorch's gradients in no way that a
    rounding to 127 steps cannot explain, and a block below all that is trained has none."""
    path = make_model("llama", tmp_path / "llama")
    costs = measured(path, sizes=(1,), int8=True)
    (timing,) = blocks_of(costs)
    exact = {rung.values: rung for rung in timing.rungs if rung.format is None}
    lossy = [rung for rung in timing.rungs if rung.format == "int8"]
    assert lossy and all(rung.name.endswith("-int8") for rung in lossy)
    assert [rung.kept_bytes for rung in timing.rungs] == sorted(rung.kept_bytes for rung in timing.rungs)
    for rung in lossy:
        if twin := exact.get(rung.values):
            assert rung.name == f"{twin.name}-int8" and rung.kept_bytes < 0.45 * twin.kept_bytes
    model = open_model(path, torch.float32)
    blocks = [layer.name for layer in model.layers[1:-1]]
    assert [(each.layer, each.rung) for each in costs.compression] == [
        (block, rung.name) for block in blocks for rung in lossy
    ]
    for each in costs.compression:
        assert 1e-5 < each.parameters < 0.03 and 1e-6 < each.hidden < 0.03, each
    lowest = costs.compression[0]
    frozen = measured(path, sizes=(1,), int8=True, freeze=("model.embed_tokens.*", "model.layers.0.*"))
    assert {each.layer for each in frozen.compression} == set(blocks[1:])
    assert frozen.compression[0].hidden == 0 and frozen.compression[0].parameters > 0 and lowest.hidden > 0


def test_without_int8_none_is_measured(llama: ModelCosts) -> None:
    assert llama.compression == ()
    assert all(rung.format is None for timing in blocks_of(llama) for rung in timing.rungs)


def test_dropout_is_kept_by_every_rung(tmp_path: Path) -> None:
    costs = measured(make_model("gpt2", tmp_path / "gpt2", **DROPOUT["gpt2"]), sizes=(1,))
    (timing,) = blocks_of(costs)
    assert timing.rungs
    for rung in timing.rungs:
        drawn = [value for value in rung.values if value.startswith(("div_", "bernoulli", "native_dropout", "getitem"))]
        assert len(drawn) >= 3, "the masks of attention and of both projections"


def test_blocks_that_cannot_be_traced_have_no_rungs_and_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model("llama", tmp_path / "llama")
    monkeypatch.setattr(Layers, "trace_block", lambda *_: None)
    costs = measured(path, sizes=(1,))
    assert not any(timing.rungs or timing.sublayers for entry in costs.classes for timing in entry.timings)
    assert any("cannot be traced" in note for note in costs.notes)


def test_blocks_whose_graph_computes_other_bits_have_no_rungs_and_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Mamba's code does, which rounds otherwise where autograd does not look on."""
    path = make_model("llama", tmp_path / "llama")
    monkeypatch.setattr(Layers, "keeps", lambda *_: False)
    costs = measured(path, sizes=(1,))
    assert not any(timing.rungs for entry in costs.classes for timing in entry.timings)
    assert any("computes other bits than its code" in note for note in costs.notes), costs.notes


def test_without_time_the_larger_sizes_are_scaled(tmp_path: Path) -> None:
    costs = measured(make_model("llama", tmp_path / "llama"), seconds=1e-6)
    assert any("are those of smaller ones, scaled" in note for note in costs.notes)
    one, two = blocks_of(costs)
    for small, large in zip(one.rungs, two.rungs, strict=True):
        assert small.backward_seconds / one.backward_seconds == pytest.approx(
            large.backward_seconds / two.backward_seconds
        )


def sub(saved: int, seconds: float) -> SubLayer:
    return SubLayer(name="x", saved_bytes=saved, forward_seconds=seconds, samples=3)


def test_an_outlier_is_above_the_fence_and_above_the_bandwidth() -> None:
    """By hand: throughputs 10, 11, 12, 13 and 40; quartiles 11 and 13, so the fence is 16. What saves nothing is none
    of the distribution."""
    made = [sub(each, 1.0) for each in (10, 11, 12, 13, 40)] + [sub(0, 1.0)]
    assert [throughput(each) for each in made] == [10, 11, 12, 13, 40, 0]
    assert fence(made) == 16
    assert outliers(made, bandwidth=5.0) == (False,) * 4 + (True, False)
    assert outliers(made, bandwidth=39.0)[4] and not outliers(made, bandwidth=41.0)[4]
    assert fence([sub(0, 1.0)]) == 0 and outliers([sub(0, 0.0)], 1.0) == (False,)
