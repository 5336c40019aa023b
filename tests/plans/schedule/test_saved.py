"""Saved activations in a schedule: written before they are read, moved by exactly their bytes, and where planned."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ssdplan.plans.documents.plan import Decision, Saved
from ssdplan.plans.graph.contents import Content, Role
from ssdplan.plans.graph.ops import Backward, Forward, Schedule, Transfer
from ssdplan.plans.graph.verify import verify
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import whole_pages
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import made_model
from tests.plans.schedule.test_schedule import assert_every_element_is_updated_once, fractions

RUNGS = ((0.05, 0.6), (0.3, 0.2), (1.0, 0.0))
TIERS = ("device", "host", "ssd")


@st.composite
def shares(draw: st.DrawFn) -> list[tuple[str, str, float]]:
    """Some of the rungs on some of the tiers, at most all of the pairs."""
    chosen = draw(st.lists(st.tuples(st.sampled_from(("rung-1", "rung-2", "rung-3")), st.sampled_from(TIERS)),
                           min_size=1, max_size=4, unique=True))  # fmt: skip
    parts = draw(st.lists(st.floats(0.01, 1), min_size=len(chosen), max_size=len(chosen)))
    whole = sum(parts) + draw(st.sampled_from([0.0, 0.5]))
    return [(rung, tier, part / whole) for (rung, tier), part in zip(chosen, parts, strict=True)]


def saved_of(chosen: list[tuple[str, str, float]], *, unified: bool) -> list[Saved]:
    """As a plan has them; with unified memory what would be on the device is nowhere."""
    return [Saved(rung=r, tier=t, share=s) for r, t, s in chosen if not (unified and t == "device")]


@settings(max_examples=examples(80), deadline=None, print_blob=True)
@given(
    schedule=st.sampled_from(["vertical", "horizontal"]),
    unified=st.booleans(),
    blocks=st.integers(1, 5),
    tied=st.booleans(),
    alpha=fractions,
    optimizer=fractions,
    checkpoints=fractions,
    gradient=fractions,
    micro_batches=st.integers(1, 4),
    on_device=st.sampled_from([0.0, 1.0]),
    chosen=shares(),
)
def test_every_schedule_that_saves_activations_verifies(schedule, unified, blocks, tied, alpha, chosen, **choices):
    model = made_model(blocks=blocks, tied=tied, rungs=RUNGS)
    vertical = schedule == "vertical"
    saved = saved_of(chosen, unified=unified)
    decision = decide(
        model, unified=unified, schedule=schedule, alpha=alpha if vertical else 0.0, saved=saved, **choices
    )
    made = build_schedule(model, decision)
    verify(made)
    assert_every_element_is_updated_once(made, model)
    assert_each_pair_keeps_what_its_share_says(made, model, decision)
    assert_moves_are_exact(made, model, decision)
    evaluated = [op for op in made.evaluate.ops if isinstance(op, Forward)]
    assert all(op.rung == "" and op.saved is None for op in evaluated)


def assert_each_pair_keeps_what_its_share_says(made: Schedule, model, decision: Decision) -> None:
    """Forward and backward of a pair agree, and each entry of the plan has its share of the pairs, but for one."""
    forwards = {(op.layer, op.micro_batch): op for op in made.steady.ops if isinstance(op, Forward)}
    backwards = {(op.layer, op.micro_batch): op for op in made.steady.ops if isinstance(op, Backward)}
    head = len(model.layers) - 1
    counts: Counter[str] = Counter()
    for (layer, micro_batch), forward in forwards.items():
        backward = backwards[layer, micro_batch]
        assert forward.rung == backward.rung
        assert (forward.saved is None) == (backward.saved is None) == (forward.rung == "")
        if forward.saved and backward.saved:
            nbytes = whole_pages(model.timing("block", 1).rung(forward.rung).kept_bytes)
            assert forward.saved.nbytes == backward.saved.nbytes == nbytes
            assert 0 < layer < head
            counts[forward.rung] += 1
    pairs = (head - 1) * decision.micro_batches
    places = (head - 1) * (1 if decision.schedule == "horizontal" else decision.micro_batches)
    for rung in {each.rung for each in decision.saved.get("block", ())}:
        wanted = sum(each.share for each in decision.saved["block"] if each.rung == rung)
        entries = sum(each.rung == rung for each in decision.saved["block"])
        assert abs(counts[rung] * places / pairs - wanted * places) <= entries + 1e-6


def assert_moves_are_exact(made: Schedule, model, decision: Decision) -> None:
    """Whatever waits on ssd is written and read once, whatever waits on host crosses the link twice, and no more."""
    moved: Counter[str] = Counter()
    for op in made.steady.ops:
        if isinstance(op, Transfer) and op.content is Content.SAVED_ACTIVATIONS:
            moved[op.kind] += op.nbytes
    kept: Counter[str] = Counter()
    for buffer in made.buffers:
        if buffer.role is Role.SAVED_ACTIVATIONS and not buffer.pool:
            kept[buffer.tier] += buffer.nbytes
    times = decision.micro_batches if decision.schedule == "horizontal" else 1
    assert moved["read"] == moved["write"] == times * kept["ssd"]
    assert moved["h2d"] == moved["d2h"] == (0 if decision.unified_memory else times * (kept["host"] + kept["ssd"]))
    assert not (decision.unified_memory and kept["device"])


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_what_waits_on_host_needs_no_place_on_the_device_but_its_way(schedule):
    """Two slots of the largest at most, however many pairs there are: one that computes, one that leaves or arrives."""
    model = made_model(blocks=8, rungs=RUNGS)
    made = build_schedule(
        model,
        decide(model, schedule=schedule, micro_batches=4, saved=[Saved(rung="rung-3", tier="host", share=1.0)]),
    )
    each = whole_pages(model.timing("block", 1).rung("rung-3").kept_bytes)
    places = {b.offset for b in made.buffers if b.role is Role.SAVED_ACTIVATIONS and b.tier == "device"}
    assert 1 <= len(places) <= 3
    plain = build_schedule(model, decide(model, schedule=schedule, micro_batches=4)).arenas
    assert made.arenas["device"] - plain["device"] <= 3 * each
    assert made.arenas["host"] - plain["host"] == 8 * (4 if schedule == "vertical" else 1) * each


def test_a_graph_that_reads_what_was_not_saved_is_refused():
    """The trap is sprung by hand: a forward that saves nothing before a backward that reads it."""
    model = made_model(blocks=3, rungs=RUNGS)
    made = build_schedule(model, decide(model, unified=True, saved=[Saved(rung="rung-1", tier="host", share=1.0)]))
    for op in made.steady.ops:
        if isinstance(op, Forward) and op.saved is not None:
            op.saved = None
            break
    with pytest.raises(AssertionError, match=r"saved/.*which is not there any more"):
        verify(made)


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("unified", [False, True])
def test_every_wait_of_a_saved_activation_matters(schedule, unified):
    """Traps sprung by hand: without one wait a reload overtakes what is still on its way out, or a slot is used again
    while a copy still reads it. Each wait that no other one implies is missed."""
    model = made_model(blocks=3, rungs=RUNGS)
    tier = "ssd" if unified else "host"
    saved = [Saved(rung="rung-1", tier="ssd", share=0.5), Saved(rung="rung-3", tier=tier, share=0.5)]
    made = build_schedule(model, decide(model, unified=unified, schedule=schedule, micro_batches=3, saved=saved))
    ours = {buffer.index for buffer in made.buffers if buffer.role is Role.SAVED_ACTIVATIONS}
    ops = made.steady.ops
    missed: Counter[tuple[str, str]] = Counter()
    for op in ops:
        touched = {region.buffer for region in (*op.reads, *op.writes)} & ours
        for wait in list(op.waits) if touched else ():
            shared = touched & {region.buffer for region in (*ops[wait].reads, *ops[wait].writes)}
            kept, op.waits = op.waits, tuple(each for each in op.waits if each != wait)
            try:
                verify(made)
            except AssertionError as error:
                assert "may run together" in str(error)
                if shared:
                    missed[kind_of(ops[wait]), kind_of(op)] += 1
            op.waits = kept
    verify(made)
    assert missed["write", "read"], "a reload that overtakes the way out"
    assert missed["forward", "write" if unified else "d2h"], "a copy that overtakes the forward"
    assert missed["read" if unified else "h2d", "backward"], "a backward that overtakes the copy"


def kind_of(op) -> str:
    return op.kind if isinstance(op, Transfer) else "forward" if isinstance(op, Forward) else type(op).__name__.lower()


def test_a_slot_is_not_used_again_while_a_copy_still_reads_it():
    """The pool's slots are used in turn: whoever writes one waits for whoever reads it."""
    model = made_model(blocks=6, rungs=RUNGS)
    made = build_schedule(model, decide(model, micro_batches=4, saved=[Saved(rung="rung-1", tier="ssd", share=1.0)]))
    pooled = {buffer.index: buffer for buffer in made.buffers if buffer.role is Role.SAVED_ACTIVATIONS and buffer.pool}
    places: dict[tuple[str, int], int] = {}
    sprung = 0
    for op in made.steady.ops:
        for region in op.writes:
            if region.buffer in pooled:
                buffer = pooled[region.buffer]
                last = places.get((buffer.tier, buffer.offset))
                if last is not None:
                    kept, op.waits = op.waits, tuple(each for each in op.waits if each < last)
                    with pytest.raises(AssertionError, match=r"may run together|not there any more"):
                        verify(made)
                    op.waits = kept
                    sprung += 1
        for region in op.reads:
            if region.buffer in pooled:
                places[pooled[region.buffer].tier, pooled[region.buffer].offset] = op.index
        if sprung > 20:
            break
    assert sprung > 20
    verify(made)


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_ssd_takes_one_pair_while_the_next_comes_to_host(schedule):
    """There are two places on host: a copy waits for the write before the last, and not for the last."""
    model = made_model(blocks=5, rungs=RUNGS)
    saved = [Saved(rung="rung-1", tier="ssd", share=1.0)]
    made = build_schedule(model, decide(model, schedule=schedule, micro_batches=4, saved=saved))
    moves = [op for op in made.steady.ops if isinstance(op, Transfer) and op.content is Content.SAVED_ACTIVATIONS]
    copies = [op for op in moves if op.kind == "d2h"]
    writes = {(op.layer, op.micro_batch): op.index for op in moves if op.kind == "write"}
    assert len(copies) == len(writes) == 20
    runs = [copies] if schedule == "vertical" else [copies[at : at + 5] for at in range(0, 20, 5)]
    for run in runs:
        written = [writes[op.layer, op.micro_batch] for op in run]
        for before, last, copy in zip(written, written[1:], run[2:], strict=False):
            assert before in copy.waits
            assert last not in copy.waits


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"block": [{"rung": r, "tier": "host", "share": s} for r, s in (("rung-1", 0.7), ("rung-2", 0.4))]},
         "the shares sum to 1.1"),
        ({"block": [{"rung": "rung-1", "tier": "host", "share": 0.2}] * 2}, "names a rung and tier twice"),
        ({"block": [{"rung": "rung-1", "tier": "device", "share": 0.2}]}, "there is no device memory"),
        ({}, "recompute = part"),
    ],
)  # fmt: skip
def test_an_edited_plan_that_saves_nonsense_is_refused(saved, words):
    content = decide(made_model(rungs=RUNGS), unified=True).model_dump() | {"recompute": "part", "saved": saved}
    with pytest.raises(ValidationError, match=words):
        Decision.model_validate(content)
