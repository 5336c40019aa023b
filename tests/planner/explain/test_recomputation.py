"""What a plan recomputes, what it could, and what saving writes: rows and sentences against plans that are made."""

import re
from dataclasses import replace

import pytest

from ssdplan.planner.catalogue.configs import shape_of_config
from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.explain.reasons import Evidence, explain
from ssdplan.planner.explain.recomputation import SavedEvidence, gather_saved, why_it_recomputes
from ssdplan.planner.predict.peaks import predict_peaks
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.plan import Compared, Plan, Recompute, Saved
from ssdplan.plans.documents.profile import Model, Profile
from ssdplan.plans.graph.contents import Content
from ssdplan.plans.graph.ops import Transfer
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import format_bytes, whole_pages
from ssdplan.plans.views.plan_text import describe_plan
from tests.extent import FULL
from tests.made.decisions import decide
from tests.made.plans import planned
from tests.made.profiles import GIB, MIB, made_machine, made_model, made_profile, made_volume

ALL, RULE, LITTLE = "recompute everything", "PyAO's rule", "recompute nothing"
BATCH = SolveRequest(64 * MIB, micro_batch_size=2, micro_batches=4)


def model_of(*rungs: tuple[str, float, float], blocks: int = 6, flops: float = 2e11) -> Model:
    """Blocks with these rungs: what each keeps of all, and leaves of the recomputation; by default PyAO's is one of
    two, and not the quickest."""
    chosen = rungs or (("paper", 0.3, 0.5), ("all", 1.0, 0.0))
    model = made_model(
        blocks=blocks, hidden=256, vocab=1024, flops=flops, rungs=tuple((kept, left) for _, kept, left in chosen)
    )
    names = {f"rung-{number}": name for number, (name, _, _) in enumerate(chosen, 1)}
    classes = tuple(
        entry.model_copy(
            update={
                "timings": tuple(
                    timing.model_copy(
                        update={
                            "rungs": tuple(rung.model_copy(update={"name": names[rung.name]}) for rung in timing.rungs)
                        }
                    )
                    for timing in entry.timings
                )
            }
        )
        for entry in model.classes
    )
    return model.model_copy(update={"classes": classes})


def profile_of(model: Model | None = None, *, drive: float = 4e9, **machine: object) -> Profile:
    """By default bound by compute."""
    made = made_machine(volumes=(made_volume(read=drive, write=drive),), **machine)
    return made_profile(machine=made, model=model or model_of())


def rows_of(plan: Plan) -> dict[str, Compared]:
    return {row.name: row for row in plan.comparison if row.kind == "schedule"}


def told(plan: Plan, topic: str = "recomputation") -> str:
    return "".join(reason.text for reason in plan.reasons if reason.topic == topic)


@pytest.mark.parametrize(
    ("schedule", "shared"),
    [("auto", False), ("horizontal", True), *([("auto", True), ("horizontal", False)] if FULL else [])],
)
def test_rows_are_about_the_plans_that_would_be_made(schedule: str, shared: bool) -> None:
    """Seconds and, but for a twentieth of the host budget, by which the estimate of buffers is off, bytes."""
    request = replace(BATCH, schedule=schedule, unified_memory=shared)
    profile = profile_of(shared=shared)
    rows = rows_of(solve(profile, request))
    for name, recompute in ((ALL, "all"), (RULE, "paper"), (LITTLE, "none")):
        if name in rows:
            made = solve(profile, replace(request, recompute=recompute), told="step").prediction
            assert rows[name].fits, name
            assert rows[name].step_seconds == pytest.approx(made.step_seconds, rel=0.05), name
            assert rows[name].ssd_write_bytes == pytest.approx(made.ssd_write_bytes, rel=0.1, abs=64 * MIB / 20), name
    assert ALL in rows and len({ALL, RULE, LITTLE} & set(rows)) >= 2


@pytest.mark.parametrize(("recompute", "own"), [("all", ALL), ("paper", RULE), ("none", LITTLE)])
def test_the_row_that_the_plan_is_is_left_out(recompute: str, own: str) -> None:
    plan = solve(profile_of(), replace(BATCH, recompute=recompute))
    assert {ALL, RULE, LITTLE} - set(rows_of(plan)) == {own}
    assert "as was asked for" in told(plan)
    note = rows_of(plan).get(LITTLE)
    assert note is None or note.note.startswith("by the quickest of its rungs, all")


def test_where_the_rule_is_the_quickest_its_row_stands_for_both() -> None:
    model = model_of(("rung-1", 0.1, 0.5), ("paper", 0.5, 0.1))
    rows = rows_of(solve(profile_of(model), replace(BATCH, recompute="all")))
    assert rows[LITTLE] == rows[RULE].model_copy(update={"name": LITTLE, "note": f"the same as {RULE}"})
    both = solve(profile_of(model), replace(BATCH, recompute="paper"))
    assert {ALL, RULE, LITTLE} & set(rows_of(both)) == {ALL}
    assert told(both).startswith(
        "All pairs of block and micro-batch save activations, by PyAO's rule, as was asked for"
    )


def test_without_the_papers_rung_there_is_no_row_of_it() -> None:
    rows = rows_of(solve(profile_of(model_of(("all", 1.0, 0.0))), replace(BATCH, recompute="all")))
    assert LITTLE in rows and RULE not in rows


def test_a_profile_without_rungs_has_no_row_and_no_word_of_it() -> None:
    profile = profile_of(made_model(blocks=6, hidden=256, vocab=1024))
    plan = solve(profile, BATCH)
    assert not {ALL, RULE, LITTLE} & set(rows_of(plan)) and not told(plan)
    assert [row.name for row in plan.comparison if row.kind == "idea"][-1] == "+ the program's placement"


def test_saved_activations_are_the_last_idea() -> None:
    """No way before it saves any: that of the program's placement is the row that recomputes everything."""
    plan = solve(profile_of(), BATCH)
    assert plan.decision.saved
    ideas = [row for row in plan.comparison if row.kind == "idea"]
    assert [row.name for row in ideas[-2:]] == ["+ the program's placement", "+ saved activations"]
    assert ideas[-2].step_seconds == rows_of(plan)[ALL].step_seconds
    assert ideas[-1].step_seconds == plan.prediction.step_seconds
    recomputing = solve(profile_of(), replace(BATCH, recompute="all"))
    before = [row for row in recomputing.comparison if row.kind == "idea"]
    for ours, theirs in zip(ideas[:-2], before[:-1], strict=True):
        assert ours.name == theirs.name
        assert ours.ssd_write_bytes == theirs.ssd_write_bytes and ours.host_bytes == theirs.host_bytes


@pytest.mark.parametrize(
    ("budget", "price", "schedule", "shared"),
    [
        (52, 0.1, "auto", False),
        (80, 50.0, "auto", False),
        (80, 0.0, "auto", True),
        (52, 0.1, "horizontal", True),
        (80, 50.0, "horizontal", True),
        *(
            [
                (80, 0.0, "auto", False),
                (52, 0.1, "auto", True),
                (80, 50.0, "auto", True),
                (80, 0.0, "horizontal", True),
            ]
            if FULL
            else []
        ),
    ],
)
def test_every_figure_is_that_of_a_row_or_of_the_schedule(
    budget: int, price: float, schedule: str, shared: bool
) -> None:
    request = replace(BATCH, host_memory_bytes=budget * MIB, wear_price=price, schedule=schedule, unified_memory=shared)
    plan = solve(profile_of(model_of(flops=5e10), drive=1e10, shared=shared), request)
    text, rows, p = told(plan), rows_of(plan), plan.prediction
    pairs = 6 * 4
    count = sum(bool(op.saved) for op in _forwards(plan))
    if not plan.decision.saved:
        assert text.startswith("Backward recomputes the whole forward of every block. ")
    elif text.startswith("All pairs "):
        assert count >= pairs - 1
    else:
        share = re.match(r"([\d.]+)% of the pairs of block and micro-batch save activations, so", text)
        assert share and float(share[1]) / 100 == pytest.approx(count / pairs, abs=1 / pairs)
    for subject, name in (("recomputing everything", ALL), ("PyAO's rule", RULE), ("recomputing nothing", LITTLE)):
        if name not in rows:
            assert f"{subject} would" not in text
            continue
        if not rows[name].fits:
            assert f"for {subject} no placement was found" in text
            continue
        longer = rows[name].step_seconds / p.step_seconds - 1
        said = re.search(rf"{subject} would take (?:as long|([\d.]+)% (longer|less time))", text)
        assert said, text
        value = float(said[1]) / 100 * (1 if said[2] == "longer" else -1) if said[1] else 0.0
        assert value == pytest.approx(longer, abs=6e-4)
    written = sum(op.nbytes for op in _writes(plan))
    if plan.decision.saved:
        words = f"{format_bytes(written)} of saved activations are written" if written else "No saved activations go to"
        assert f"{words} " in text
        compared = re.search(r"in all a step writes ([\d.]+)% (more|less) than one that recomputes everything", text)
        if compared and rows[ALL].fits:
            share = float(compared[1]) / 100 * (1 if compared[2] == "more" else -1)
            assert share == pytest.approx(p.ssd_write_bytes / rows[ALL].ssd_write_bytes - 1, abs=1e-3)
    if "by a wear price of" in text:
        assert f"wear price of {price:g}" in text and price > 0
        faster = [row for name, row in rows.items() if name in (ALL, RULE, LITTLE) and row.fits]
        faster = [row for row in faster if row.step_seconds < p.step_seconds * (1 - 5e-4)]
        assert faster and all(row.ssd_write_bytes > p.ssd_write_bytes for row in faster)


def _forwards(plan: Plan) -> list:
    return [op for op in build_schedule(plan.model, plan.decision).steady.ops if getattr(op, "out", None)]


def _writes(plan: Plan) -> list[Transfer]:
    moves = [op for op in build_schedule(plan.model, plan.decision).steady.ops if isinstance(op, Transfer)]
    return [op for op in moves if op.kind == "write" and op.content == Content.SAVED_ACTIVATIONS]


def test_a_dear_drive_is_a_reason() -> None:
    """Host memory has no room, and activations on ssd would have to gain more than they can."""
    request = replace(BATCH, host_memory_bytes=44 * MIB, wear_price=50.0, unified_memory=True)
    plan = solve(profile_of(model_of(flops=5e10), drive=1e10, shared=True), request)
    assert not _writes(plan)
    assert "gains less than it must for what it writes, by a wear price of 50" in told(plan)


def test_where_everything_fits_nothing_is_written() -> None:
    """Behind a device of DRAM, which keeps nothing."""
    plan = solve(profile_of(shared=True), replace(BATCH, host_memory_bytes=GIB, residency={"device": 0.0}))
    assert plan.decision.saved and not plan.prediction.ssd_bytes
    assert {each.tier for each in plan.decision.saved["block"]} == {"host"}
    assert told(plan).endswith(" No saved activations go to the ssd.")
    assert "recomputing everything would take" in told(plan)
    saved = sum(whole_pages(_kept(plan, each.rung)) * each.share * 24 for each in plan.decision.saved["block"])
    assert f"{format_bytes(round(saved))} of saved activations" in told(plan, "ssd")
    assert " fit in the host budget of 1 GiB, and leave " in told(plan, "ssd")


def test_nothing_is_not_a_share_of_what_others_write() -> None:
    """A plan that writes nothing beside rows that write, and a row that writes nothing beside a plan that does."""
    plan = solve(profile_of(shared=True), replace(BATCH, host_memory_bytes=GIB, residency={"device": 0.0}))

    def writing(own: int, others: int) -> str:
        rows = tuple(row.model_copy(update={"ssd_write_bytes": others}) for row in plan.comparison)
        prediction = plan.prediction.model_copy(update={"ssd_write_bytes": own})
        changed = plan.model_copy(update={"prediction": prediction, "comparison": rows})
        return why_it_recomputes(changed, SavedEvidence())

    assert writing(0, GIB).endswith(
        " A step writes nothing to the ssd; one that recomputes everything would write 1 GiB."
    )
    assert "%" not in writing(0, GIB).partition(" A step writes nothing")[2]
    assert "and write nothing to the ssd" in writing(GIB, 0)


def _kept(plan: Plan, rung: str) -> int:
    return plan.model.timing("block", plan.decision.micro_batch_size).rung(rung).kept_bytes


@pytest.mark.parametrize("unified", [False, True])
def test_delayed_gradients_share_with_checkpoints_as_much_as_without_saved_activations(unified: bool) -> None:
    """By what stays for the whole run, which has saved activations in it; the table of residency finds the same bytes
    by places."""
    model = made_model(blocks=6, hidden=256, rungs=((0.5, 0.5), (1.0, 0.0)))
    mixed = (Saved(rung="rung-1", tier="host", share=0.5), Saved(rung="rung-2", tier="ssd", share=0.25))
    texts, notes = [], []
    for saved in ((), mixed):
        decision = decide(
            model, alpha=1.0, checkpoints=1.0, optimizer=0.2, micro_batches=4, saved=saved, unified=unified
        ).model_copy(update={"host_budget_bytes": 8 * MIB})
        schedule = build_schedule(model, decision)
        plan = planned(model, made_machine(), decision, schedule)
        alone = Plan.model_validate(
            plan.model_dump(by_alias=True)
            | {"alternatives": [plan.alternatives[0].model_dump() | {"micro_batch_size": 1, "micro_batches": 4}]}
        )
        alone = alone.model_copy(
            update={"alternatives": tuple(each.model_copy(update={"simulated": True}) for each in alone.alternatives)}
        )
        evidence = Evidence(
            given=frozenset(),
            loads={"compute": 1.0, "ssd": 0.5},
            resident_bytes=predict_peaks(schedule, model, decision).residents,
            free=None,
            prompt=None,
            saved=gather_saved(schedule, 0.1),
        )
        text = next(reason.text for reason in explain(alone, evidence) if reason.topic == "ssd")
        texts.append(text)
        shared = re.search(r"([\d.]+ [KM]iB) of the delayed gradients lie where checkpoints were", text)
        twice = re.search(r"([\d.]+ [KM]iB) of these on host count twice", describe_plan(alone, schedule))
        assert shared and twice, text
        notes.append((shared[1], twice[1]))
    assert notes[0] == notes[1], "with saved activations as without"
    said, placed = (float(words.removesuffix(" KiB")) for words in notes[0])
    assert said == pytest.approx(placed, rel=0.1), "but for whole pages"
    host, ssd = 12 * whole_pages(_bytes(0.5)), 6 * whole_pages(_bytes(1.0))
    assert f"{format_bytes(host + ssd)} of saved activations" in texts[1] and "saved activations" not in texts[0]
    assert f"{host / (host + ssd):.1%} of the saved activations" in texts[1]


def _bytes(kept: float) -> int:
    """34 bytes a token and hidden unit, and byte of an element."""
    return round(kept * 34 * 32 * 256 * 2)


def test_what_pyaos_rule_makes_fit_is_found_without_being_asked_for() -> None:
    """Without a GPU, in budgets that by the estimate of the buffers leave no room: keeping everything takes less
    memory than computing it again, so a plan that the rule allows fits with room to spare, and is a sixth shorter."""
    llama = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048}
    blocks = {"num_hidden_layers": 12, "num_attention_heads": 12, "tie_word_embeddings": False}
    what_if = WhatIf(
        model=shape_of_config({**llama, **blocks, "max_position_embeddings": 1024}, "made", "made"),
        gpu="none",
        ssds=["samsung-990-pro"],
        host_memory_bytes=GIB,
        precision="fp32",
        sequence_length=256,
        micro_batch_sizes=(1, 4),
        figures={"cpu.cores": 2, "cpu.flops": 1.2e11, "cpu.memory-bandwidth": 1.7e10, "ssd.read": 2.8e9},
    )
    profile = estimate(what_if)

    def seconds(recompute: Recompute, host: int) -> float:
        asked = SolveRequest(host, micro_batch_size=4, micro_batches=1, unified_memory=True, recompute=recompute)
        return solve(profile, asked, told="step").prediction.step_seconds

    for host in (840 * MIB, 960 * MIB, 1024 * MIB, 1060 * MIB):
        by_rule, everything, best = (seconds(each, host) for each in ("paper", "all", "auto"))
        assert by_rule < 0.9 * everything
        assert best <= by_rule * 1.001, host // MIB


def test_what_saved_activations_take_on_their_way_to_ssd_counts() -> None:
    """Where the widest rung of all pairs would take more memory on its way than there is, narrower ones are saved
    instead of none: a tenth faster in the same budget."""
    what_if = WhatIf(
        model="llama-3.2-1b",
        gpu="none",
        ssds=["samsung-980-pro:1TB"],
        host_memory_bytes=6 * GIB,
        sequence_length=1024,
        micro_batch_sizes=(1,),
    )
    profile = estimate(what_if)
    asked = SolveRequest(6 * GIB, micro_batch_size=1, micro_batches=14, unified_memory=True)
    saving, nothing = (
        solve(profile, replace(asked, recompute=recompute), told="step") for recompute in ("auto", "all")
    )
    (shares,) = saving.decision.saved.values()
    assert {each.rung for each in shares} - {"rung-3", "paper"} and all(each.tier == "ssd" for each in shares)
    assert saving.prediction.step_seconds < 0.92 * nothing.prediction.step_seconds
    for plan in (saving, nothing):
        assert plan.prediction.peak_host_bytes <= 6 * GIB
