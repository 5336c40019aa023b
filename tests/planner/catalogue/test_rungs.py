"""Rungs of a what-if: bytes as a real block takes them, seconds by hand, and what no estimate may say."""

from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from ssdplan.executor.device.device import open_device
from ssdplan.executor.model.layers import Layers, MicroBatch
from ssdplan.executor.model.model import open_model
from ssdplan.executor.model.weights import Weights
from ssdplan.planner.catalogue.choices import choices
from ssdplan.planner.catalogue.costs import Compute, Costs
from ssdplan.planner.catalogue.models import MODELS
from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.plan import Plan, Recompute
from ssdplan.plans.documents.profile import PAPER, Rung, Timing
from ssdplan.plans.documents.state_layout import Precision
from ssdplan.plans.errors import InfeasibleError, MismatchError
from ssdplan.profiler import layer_bench
from ssdplan.profiler.layer_bench import Bench
from tests.extent import FULL, short_or_full
from tests.made.models import make_model
from tests.planner.catalogue.test_whatif import DTYPES, FIELDS, LENGTH, tiny_shape

GIB = 1 << 30
SIZES = (1, 4)
ACTIVATIONS = ("mlp.act_fn", "mlp.act", "activation_fn")
"""How the leaf modules of activation functions are named."""
ATTENTION, HEADS, PRODUCTS = 0, 1, 2
VALUES: dict[str, tuple[tuple[str, ...], ...]] = {
    "llama": (("getitem", "getitem_1", "add_3", "rsqrt", "rsqrt_1"), ("add_1", "add_2", "mm_2"), ("mm_4", "mm_5")),
    "mistral": (("getitem", "getitem_1", "add_3", "rsqrt", "rsqrt_1"), ("add_1", "add_2", "mm_2"), ("mm_4", "mm_5")),
    "qwen2": (("getitem", "getitem_1", "add_3", "rsqrt", "rsqrt_1"), ("add_1", "add_2", "addmm_2"), ("mm_1", "mm_2")),
    "gpt2": (("getitem_6", "getitem_7", "add"), ("addmm",), ("addmm_2",)),
    "opt": (("getitem_3", "getitem_4", "add"), ("mul", "addmm_1", "addmm_2"), ("relu",)),
}
"""What a traced block calls attention's output, log-sum-exp, the sum behind it and the scales of norms; queries, keys
and values; and the products of the MLP, or what it keeps of them."""


def costs_of(shape: Any, precision: Precision, rows: int) -> Costs:
    return Costs(shape, precision, rows, LENGTH, Compute(1e12, 1e11, 1e12, 0.0), None, 0.0)


@pytest.mark.parametrize(
    ("family", "precision"),
    short_or_full([*product(VALUES, ["fp32"]), ("llama", "bf16")], list(product(VALUES, ["bf16", "fp32"]))),
)
def test_bytes_are_those_of_a_real_block(
    family: str, precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept bytes and the forward's workspace closely; the backward's never less than it takes, and where attention is
    its largest part up to a quarter more, for the fp32 sums that a GPU has."""
    monkeypatch.setattr(layer_bench, "GROWING_RUNS", 1)  # what the process grows by is not compared
    path = make_model(family, tmp_path / "model", layers=3, vocab=1500, hidden=128, tied=True, **FIELDS[family])
    real = open_model(path, DTYPES[precision])
    device, weights = open_device("cpu"), Weights(real)
    try:
        bench = Bench(real, Layers(real, device.torch_device), MicroBatch, weights, device, LENGTH, SIZES)
        bench.begin()
        bench.load(1)
        for rows in short_or_full(SIZES if (family, precision) == ("llama", "fp32") else SIZES[:1], SIZES):
            costs = costs_of(tiny_shape(family, True), precision, rows)
            timing = costs.block()
            call = bench.trace(1, rows)
            assert call
            for choice in choices(costs.shape, costs.element):
                rung = costs.rung(choice, timing)
                kept = values_of(call, family, rung.name)
                assert call.kept_bytes(frozenset(kept)) == pytest.approx(rung.kept_bytes, rel=1e-3), rung.name
                bench.learn(real.layers[1].layer_class, rung.name, kept, rung.kept_bytes + 4096)
                space = bench.rung_space(1, rows, rung.name)
                where = f"{rung.name} at {rows}"
                assert rung.forward_workspace_bytes == pytest.approx(space.forward_workspace, rel=0.01), where
                least = space.backward_workspace
                assert 0.99 * least <= rung.backward_workspace_bytes <= 1.27 * least, where
    finally:
        weights.close()


def values_of(call: Any, family: str, name: str) -> tuple[str, ...]:
    """What the traced block keeps by an estimated rung of that name."""
    if name == PAPER:
        found = (each for each in call.traced.sublayers if each.name not in ACTIVATIONS)
        return tuple(value for each in found for value in each.saved)
    groups = VALUES[family][: int(name.removeprefix("rung-"))]
    return tuple(value for group in groups for value in group)


def what_if(**changes: Any) -> WhatIf:
    usual: dict[str, Any] = {
        "model": "llama-2-7b",
        "gpu": "h100-80gb",
        "ssds": ["samsung-990-pro*2"],
        "host_memory_bytes": 64 * GIB,
        "sequence_length": 2048,
        "micro_batch_sizes": (4,),
    }
    return WhatIf(**(usual | changes))


def block_of(**changes: Any) -> Timing:
    return estimate(what_if(**changes)).model.classes[1].timings[0]


def test_seconds_are_work_over_rate() -> None:
    """Of the rung from which only norms and the activation are rebuilt, and of one that multiplies again."""
    block = block_of()
    tokens, hidden, inner, bandwidth = 4 * 2048, 4096, 11008, 3350e9
    matrices = 4 * hidden * hidden + 3 * hidden * inner
    multiplied = 2 * tokens / (0.95 * 792.1e12)  # seconds an element of a matrix
    scores = 2 * 4 * 2048 * 2048 * hidden / (0.4 * 792.1e12 * 2048 / 2448)
    accumulation = 12 * (matrices + 2 * hidden) / bandwidth
    rung = block.rung("rung-3")
    # Queries, keys, values, attention's output, the sum behind it; log-sum-exps of 32 heads; scales of two norms.
    assert rung.kept_bytes == tokens * (2 * (5 * hidden + 2 * inner) + 4 * 32 + 8) == 697368576
    assert rung.forward_seconds == pytest.approx(block.forward_seconds + 2.5 * 2 * rung.kept_bytes / bandwidth)
    # A norm: 2 h read and 4 h written, 8 h scaled, 6 h cast, 4 h weighed; SiLU and the product behind it: 10 i.
    passes = tokens * (2 * 24 * hidden + 10 * inner) / bandwidth
    moved = 2.5 * 2 * 2 * (matrices + 2 * hidden + block.saved_activation_bytes) / bandwidth
    gradients = 2 * multiplied * matrices + 2.5 * scores + accumulation + moved
    assert rung.backward_seconds == pytest.approx(gradients + passes)
    again = block.rung("rung-2").backward_seconds - rung.backward_seconds
    assert again == pytest.approx((multiplied + 2.5 * 2 / bandwidth) * 2 * hidden * inner)
    rule = block.rung(PAPER)
    assert rule.kept_bytes == 1347485696
    assert rule.backward_seconds == pytest.approx(gradients + tokens * 4 * inner / bandwidth)


# Measured on an NVIDIA H100 at 4 x 2048 tokens (docs/benchmarks.md): bytes, forward and backward in milliseconds.
MEASURED = {"": (0, 7.6, 24.1), "rung-3": (697368704, 8.9, 18.3), PAPER: (1347485824, 9.0, 17.4)}
DOCUMENT = Path(__file__).parents[3] / "docs" / "catalogue.md"


def test_the_document_sets_the_estimate_beside_the_h100() -> None:
    """Row by row, against what the same block takes that recomputes everything; a rung gains up to 6% too much."""
    block, text = block_of(), DOCUMENT.read_text(encoding="utf-8")
    _, *base = MEASURED[""]
    for name, (nbytes, *measured) in MEASURED.items():
        rung = block.by_rung(name)
        if isinstance(rung, Rung):
            assert rung.kept_bytes == pytest.approx(nbytes, abs=1024)
        ours = (rung.forward_seconds, rung.backward_seconds)
        cells = [f"`{name}`" if name else "recomputes everything", f"{nbytes:,}"]
        for mine, theirs in zip(ours, measured, strict=True):
            cells.append(f"{theirs:.1f} ms | {1e3 * mine:.1f} ms")
        relative = sum(ours) / (block.forward_seconds + block.backward_seconds)
        theirs = sum(measured) / sum(base)
        assert abs(relative / theirs - 1) < 0.06
        cells += [f"{theirs:.3f}", f"{relative:.3f} ({relative / theirs - 1:+.1%})"]
        assert f"| {' | '.join(cells)} |" in text


DEVICES = {
    "a fast GPU": Compute(6.3e14, 3.35e12, 3.2e14, 400),
    "a slow GPU": Compute(4.9e13, 5.0e11, 5.2e13, 400),
    "a GPU of slow memory": Compute(6.3e14, 3e11, 3.2e14, 400),
    "a processor": Compute(5e11, 7e10, 5e11, 0.0),
}


@cache
def blocks() -> dict[str, Timing]:
    """Of all models, on devices of several kinds, in short rows and long ones, few and many."""
    found = {}
    for shape, (device, compute) in product(MODELS, DEVICES.items()):
        for (rows, length), precision in product(((1, 128), (8, 512), (2, shape.max_positions or 16384)), DTYPES):
            where = f"{shape.name} on {device}, {precision}, {rows} rows of {length}"
            found[where] = Costs(shape, precision, rows, length, compute, None, 0.18).block()
    return found


def test_keeping_more_takes_less_of_backward_and_never_more_than_there_is() -> None:
    for where, block in blocks().items():
        rungs = block.rungs
        assert Timing.model_validate(block.model_dump()) == block, where
        assert [rung.name for rung in rungs].count(PAPER) == 1, where
        steps = [block, *rungs]
        for few, more in pairwise(steps):
            assert more.backward_seconds <= few.backward_seconds, where
            assert more.forward_seconds >= few.forward_seconds, where
            if isinstance(few, Rung) and isinstance(more, Rung):
                assert more.kept_bytes > few.kept_bytes, where
            if isinstance(more, Rung) and more.name != PAPER:
                gained = few.forward_seconds + few.backward_seconds - more.forward_seconds - more.backward_seconds
                assert gained > 0, where
        assert all(0 < rung.kept_bytes <= block.saved_activation_bytes for rung in rungs), where
        assert all(rung.backward_workspace_bytes <= block.backward_workspace_bytes for rung in rungs), where


def test_what_a_mixture_of_two_others_gains_is_left_out() -> None:
    """Of a block, each rung but PyAO's gains more for its bytes than the next one adds for its own."""
    for where, block in blocks().items():
        whole = block.forward_seconds + block.backward_seconds
        points = [(0, 0.0)]
        points += [(r.kept_bytes, whole - r.forward_seconds - r.backward_seconds) for r in block.rungs]
        for low, own, high, rung in zip(points, points[1:], points[2:], block.rungs, strict=False):
            if rung.name != PAPER:
                share = (own[0] - low[0]) / (high[0] - low[0])
                assert own[1] >= low[1] + share * (high[1] - low[1]) - 1e-9 * whole, where


@pytest.mark.parametrize(
    ("model", "gpu", "memory", "rows"),
    [
        ("smollm2-135m", "rtx-4090", 1, 4), ("smollm2-135m", "none", 8, 1), ("gpt2", "rtx-4070", 1, 1),
        ("opt-1.3b", "rtx-4070", 8, 4),
        *([
            ("smollm2-135m", "rtx-4090", 1, 1), ("smollm2-135m", "none", 8, 4), ("gpt2", "rtx-4070", 1, 4),
            ("opt-1.3b", "rtx-4070", 8, 1), ("opt-1.3b", "h100-80gb", 64, 1), ("opt-1.3b", "h100-80gb", 64, 4),
        ] if FULL else []),
    ],
)  # fmt: skip
def test_a_plan_is_never_slower_than_recomputing_everything_or_pyaos_rule(
    model: str, gpu: str, memory: int, rows: int
) -> None:
    changes = {"model": model, "gpu": gpu, "host_memory_bytes": memory * GIB, "micro_batch_sizes": (rows,)}
    profile = estimate(what_if(**changes, sequence_length=512))

    def seconds(recompute: Recompute) -> float | None:
        request = SolveRequest(memory * GIB, micro_batches=4, recompute=recompute, wear_price=0.0)
        try:
            return solve(profile, request, told="step").prediction.step_seconds
        except InfeasibleError:
            return None

    auto = seconds("auto")
    assert auto is not None
    for other in (seconds("all"), seconds("paper")):
        assert other is None or auto <= other * (1 + 1e-9)


def test_no_run_takes_a_plan_with_estimated_rungs() -> None:
    """So nothing looks for the values that they name in a graph."""
    profile = estimate(what_if(model="opt-1.3b", sequence_length=512))
    plan = solve(profile, SolveRequest(64 * GIB, micro_batches=2, recompute="paper"), told="step")
    assert plan.decision.saved and isinstance(plan, Plan)
    with pytest.raises(MismatchError):
        plan.refuse_estimates()
