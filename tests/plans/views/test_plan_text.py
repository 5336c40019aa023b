"""What a person reads of a plan and of a profile: the document's own figures, in lines that fit."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from ssdplan.plans.analysis.allocators import Blocks, Pool
from ssdplan.plans.documents.plan import (
    Alternative,
    Compared,
    Decision,
    Least,
    Placement,
    Plan,
    Prediction,
    Reason,
    Sensitivity,
    most_micro_batches,
)
from ssdplan.plans.documents.profile import Model, Profile, Volume
from ssdplan.plans.graph.contents import Role
from ssdplan.plans.graph.ops import Schedule
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import format_bytes, format_enough
from ssdplan.plans.views import plan_text as text
from ssdplan.plans.views.plan_text import describe_plan
from ssdplan.plans.views.profile_text import describe_profile
from ssdplan.plans.views.quantities import bar, count, decimal, duration, exact_percent, number, percent
from ssdplan.plans.views.report_text import describe_report
from ssdplan.plans.views.screen import describe_briefly
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import made_machine, made_model, made_profile, made_volume

EXAMPLES = sorted((Path(__file__).parents[3] / "plans" / "examples").glob("*.json"))
GIB = 1 << 30


def _prediction(schedule: Schedule, **changes: object) -> Prediction:
    traffic = schedule.traffic("steady")
    prediction = Prediction(
        step_seconds=12.5,
        tokens_per_second=1311.0,
        peak_host_bytes=schedule.arenas["host"],
        peak_device_bytes=schedule.arenas["device"] + 3 * GIB,
        host_arena_bytes=schedule.arenas["host"],
        device_arena_bytes=schedule.arenas["device"],
        ssd_bytes=schedule.arenas["ssd"],
        ssd_read_bytes=traffic["read"],
        ssd_write_bytes=traffic["write"],
        h2d_bytes=traffic["h2d"],
        d2h_bytes=traffic["d2h"],
        bound_by="ssd",
        busy={"compute": 0.61, "read": 0.93, "write": 0.42, "h2d": 0.1, "d2h": 0.002, "cpu": 0.0},
        program_seconds=11.9,
    )
    return prediction.model_copy(update=changes)


def _alternative(size: int, n: int, **changes: object) -> Alternative:
    entry = Alternative(
        micro_batch_size=size,
        micro_batches=n,
        tokens_per_second=1000.0 * size * n / (n + 3),
        delay_ratio=0.25,
        program_seconds=1.0,
        compute_tokens_per_second=4321.0,
        io_tokens_per_second=900.0 * n,
        simulated=False,
    )
    return entry.model_copy(update=changes)


def _plan(model: Model, decision: Decision, schedule: Schedule, **changes: object) -> Plan:
    plan = Plan(
        schema="ssdplan.plan/1",
        profile_sha256="0" * 64,
        model=model,
        machine=made_machine(),
        decision=decision,
        prediction=_prediction(schedule),
        alternatives=(_alternative(1, 2), _alternative(1, 4), _alternative(2, 3, simulated=True)),
        sensitivity=(
            Sensitivity(resource="compute", unit="10%", seconds_per_unit=0.0, throughput_gain=0.0),
            Sensitivity(resource="host memory", unit="GiB", seconds_per_unit=-0.5, throughput_gain=0.0923),
            Sensitivity(
                resource="drives",
                unit="2x",
                seconds_per_unit=-2.0,
                throughput_gain=0.38,
                words="a second SSD like the first",
            ),
        ),
    )
    return plan.model_copy(update=changes)


def _page(alpha: float = 0.3125, **changes: object) -> str:
    model = made_model(blocks=6, hidden=256)
    decision = decide(
        model, alpha=alpha, optimizer=0.25, parameters=0.5, checkpoints=0.123456, gradient=0.75, micro_batches=3
    ).model_copy(update={"micro_batch_size": 2, "host_budget_bytes": 40 * GIB, "device_budget_bytes": 4 * GIB})
    schedule = build_schedule(model, decision)
    return describe_plan(_plan(model, decision, schedule, **changes), schedule)


def _line(page: str, start: str) -> str:
    """The only line that begins so, as words."""
    found = [line for line in (" ".join(line.split()) for line in page.splitlines()) if line.startswith(start)]
    assert len(found) == 1, found
    return found[0]


def test_what_a_plan_decides() -> None:
    page = _page()
    assert _line(page, "batch") == "batch 3 micro-batches of 2 sequences of 32 tokens"
    assert "192 tokens a step" in page
    assert "0.3125: 31.25% of each layer's update" in page
    assert _line(page, "checkpoints on host") == "checkpoints on host 12.3456%"
    assert _line(page, "optimizer adamw") == "optimizer adamw, states in fp32"
    assert "at most 16,384 elements at once, 2 ahead" in page


def test_where_states_live() -> None:
    """Six blocks of 786,432 elements: the shares of the decision, and the bytes of the homes."""
    lines = _page().splitlines()
    block = next(index for index, line in enumerate(lines) if line.startswith("  block x6"))
    parameters = "block x6 parameters 34.4% 34.4% 15.6% 15.6% 4.5 MiB 4.5 MiB"
    assert lines[block].split() == parameters.split()
    optimizer = "optimizer states 17.2% 51.6% 7.8% 23.4% 13.5 MiB 40.5 MiB"
    assert lines[block + 1].split() == optimizer.split()
    gradients = "delayed gradients - - 23.4% 7.8% 4.22 MiB 1.41 MiB"
    assert lines[block + 2].split() == gradients.split()


def test_other_ways_and_ideas_are_told_beside_the_plan() -> None:
    figures = {"host_bytes": GIB, "ssd_read_bytes": 2 * GIB, "ssd_write_bytes": 0, "step_seconds": 2.0}
    long = "w" * 60
    page = _page(
        comparison=(
            Compared(kind="schedule", name=long, tokens_per_second=500.0, fits=True, device_bytes=3 * GIB, **figures),
            Compared(kind="schedule", name="single", fits=False, note="not profiled " * 20),
            Compared(kind="idea", name="first way", tokens_per_second=500.0, fits=False, note="needs more", **figures),
            Compared(kind="idea", name="+ an idea", tokens_per_second=750.0, fits=True, **figures),
        )
    )
    assert all(cell_len(line) <= 100 for line in page.splitlines())
    assert _line(page, "www").endswith("... 1 GiB 3 GiB 2 GiB - 2 s 500 yes")
    assert _line(page, "single ") == "single ? ? ? ? ? ? no"
    assert _line(page, "first way ") == "first way 1 GiB 2 GiB - 2 s 500 no"
    assert _line(page, "+ an idea") == "+ an idea 1 GiB 2 GiB - 2 s 750 +50.0% yes"
    assert "  first way: needs more" in page.splitlines()
    assert "Schedules compared" not in _page() and "What each idea brings" not in _page()


def test_nothing_delayed_needs_no_columns_for_it() -> None:
    page = _page(alpha=0.0)
    assert "0: every update runs in its own step" in page
    heading, body = "Where states live", page.split("Where states live")[1].split("\n\n")[0]
    assert "delayed" not in body and "prompt" not in body, heading


def test_what_a_plan_predicts() -> None:
    page = _page(prediction=_prediction(_made_schedule(), ssd_read_bytes=7 * GIB, ssd_write_bytes=5 * GIB))
    assert "12.5 s a step, 1,311 tokens/s." in page
    assert "What bounds it: ssd." in page
    assert _line(page, "step ").startswith("step 12.5 s (the linear program, stage by stage, estimates 11.9 s)")
    assert _line(page, "read from ssd") == "read from ssd 7 GiB"
    a_day = 5 * GIB / 12.5 * 86400 / 1e12
    assert _line(page, "written to ssd") == f"written to ssd 5 GiB, or {a_day:.3g} TB a day"
    assert "of 40 GiB budget" in _line(page, "peak host memory")
    assert "of 4 GiB budget" in _line(page, "peak device memory")
    assert "of 4 TiB free on 1 volume" in _line(page, "store on ssd")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_memory_is_rounded_up_as_on_the_first_screen(path: Path) -> None:
    """What is printed is enough, and one plan takes one size wherever it is told."""
    plan = Plan.load(path)
    p, schedule = plan.prediction, build_schedule(plan.model, plan.decision)
    page, brief = describe_plan(plan, schedule), describe_briefly(plan, schedule, "more")
    for name, short, nbytes in (
        ("peak host memory", "host memory", p.peak_host_bytes),
        ("peak device memory", "device memory", p.peak_device_bytes),
        ("whole process", "whole process", p.peak_process_bytes or 0),
    ):
        if not (name == "peak device memory" and plan.decision.unified_memory):
            assert f" {format_enough(nbytes)}" in _line(page, name) and format_enough(nbytes) in _line(brief, short)


def _made_schedule() -> Schedule:
    model = made_model(blocks=1)
    return build_schedule(model, decide(model))


def test_a_step_that_leaves_the_drive_alone() -> None:
    page = _page(prediction=_prediction(_made_schedule(), ssd_read_bytes=0, ssd_write_bytes=0))
    assert _line(page, "written to ssd") == "written to ssd nothing"


def test_busy_shares_are_bars() -> None:
    page = _page()
    assert _line(page, "ssd read") == f"ssd read [{'#' * 19}.] 93%"
    assert _line(page, "device to host") == f"device to host [#{'.' * 19}] 0%"  # a little is not nothing
    assert _line(page, "cpu updates") == f"cpu updates [{'.' * 20}] 0%"


def test_why_a_resource_idles() -> None:
    """Of a step of 12.5 s; what is below half a percent is left out."""
    idle = {
        "read": {"compute": 4.75, "host buffer": 1.5, "fill": 0.625, "drain": 0.5, "h2d": 0.01},
        "cpu": {"no work": 12.5},
        "compute": {"device buffer": 0.25, "a new cause": 1.25},
    }
    page = " ".join(_page(prediction=_prediction(_made_schedule(), idle=idle)).split())
    assert "93% idles 38% for compute, 12% for a free host buffer, 9% fill and drain ssd write" in page
    assert "0% idles 100% without any work" in page
    assert "61% idles 10% for a new cause, 2% for a free device buffer" in page
    assert "% idles" not in " ".join(_page().split())


def test_the_critical_path_by_resource_and_work() -> None:
    path = {"read": {"parameters": 1.0, "optimizer states": 2.125}, "compute": {"backward": 9.375}}
    section = _page(prediction=_prediction(_made_schedule(), critical_path=path)).split("The chain of operations")[1]
    assert [" ".join(line.split()) for line in section.splitlines()[1:3]] == [
        "compute 9.38 s 75% backward 9.38 s",
        "ssd read 3.12 s 25% optimizer states 2.12 s, parameters 1 s",
    ]


def test_reasons_come_first() -> None:
    told = (
        Reason(topic="bound", text="word " * 40 + "end."),
        Reason(topic="to be faster", text="a \x1b[2J second SSD"),
    )
    lines = _page(reasons=told).splitlines()
    first = lines.index("Why")
    assert lines[first - 2].startswith("What bounds it") and lines[first - 1] == ""
    assert lines[first + 1].startswith("  bound           word word")
    assert lines[first + 3].split()[-1] == "end." and lines[first + 3].startswith(" " * 18)
    assert lines[first + 4] == "  to be faster    a ?[2J second SSD"
    assert "\nWhy\n" not in _page()


def test_the_least_budgets() -> None:
    """Rounded up, as a refusal writes them: what is printed does."""
    least = (
        Least(budget="host memory", least_bytes=3 * GIB, tokens_per_second=700.0),
        Least(budget="ssd space", least_bytes=12 * GIB + 1, tokens_per_second=1311.0),
    )
    page = _page(least=least)
    assert "host memory 3 GiB about 700 tokens/s" in " ".join(page.split())
    section = page.split("The least budgets that ")[1].split("\n\n")[0]
    assert section.startswith("3 micro-batches of 2 would still fit, each alone")
    assert "bound" not in section and "at most" not in section, "a simulated step may beat the program"
    assert "ssd space 12.1 GiB about 1,311 tokens/s" in " ".join(page.split())


def test_how_long_the_drive_lasts() -> None:
    """5 GiB in 12.5 s are 37.1 TB a day: 600 TB last 16.2 days."""
    prediction = _prediction(_made_schedule(), ssd_write_bytes=5 * GIB)
    assert "a profile with --endurance SIZE" in _line(_page(prediction=prediction), "drive wear")
    (volume,) = made_machine().volumes
    rated = made_machine(volumes=(volume.model_copy(update={"endurance_bytes": 600 * 10**12}),))
    line = _line(_page(prediction=prediction, machine=rated), "drive wear")
    assert line == f"drive wear 16.2 days without a pause, to the 600 TB of {volume.path}"
    assert "drive wear" not in _page(prediction=_prediction(_made_schedule(), ssd_write_bytes=0), machine=rated)


def test_alternatives_mark_the_plan() -> None:
    page = _page()
    marked = [line for line in page.splitlines() if line.startswith("  * ")]
    assert len(marked) == 1
    assert marked[0].split()[:4] == ["*", "2", "3", "1,000"] and marked[0].endswith("simulated")


def test_many_alternatives_are_thinned_but_never_the_plan() -> None:
    many = tuple(_alternative(size, n) for size in (1, 2) for n in range(1, 101))
    page = _page(alternatives=many)
    section = page.split("What else was looked at")[1].split("\n\n")[0]
    rows = [line.removeprefix("  *").split() for line in section.splitlines()[2:-1]]
    assert len(rows) <= 2 * text.MOST_ROWS
    assert f"and {200 - len(rows)} more, in plan.json" in section
    assert ["2", "3"] in [row[:2] for row in rows] and "  *  " in section
    assert {"1", "100"} <= {row[1] for row in rows}


def test_sensitivity_in_words_best_first() -> None:
    page = _page()
    gains = page.split("What more of something")[1].splitlines()[1:4]
    assert [" ".join(line.split()) for line in gains] == [
        "a second SSD like the first +38.00% tokens/s a step 2 s shorter",
        "1 GiB more of host memory +9.23% tokens/s a step 500 ms shorter",
        "10% more of compute nothing",
    ]


def test_reserved_memory_is_split() -> None:
    model = made_model(blocks=6, hidden=256)
    decision = decide(model, micro_batches=3)
    schedule = build_schedule(model, decision)
    page = describe_plan(_plan(model, decision, schedule), schedule)
    shares = re.findall(r"([0-9.]+)%$", page.split("Host memory, by")[1].split("\n\n")[0], re.MULTILINE)
    assert sum(map(float, shares)) == pytest.approx(100, abs=0.5)
    assert "at most): 3 GiB" in page


def test_parameters_on_the_device() -> None:
    """Of four blocks two are on the device; the table's percentages are of the whole."""
    model = made_model(blocks=4)
    decision = decide(model, parameters=1.0, on_device=0.5, across_turn=0.25)
    schedule = build_schedule(model, decision)
    page = describe_plan(_plan(model, decision, schedule), schedule)
    assert "embedding 50%, block 50%, head 50% of the states, for the whole run" in page
    assert _line(page, "and across the turn").endswith("block 25% of the states, from forward to backward")
    assert _line(page, "block x4 parameters") == "block x4 parameters 50% - 192 KiB -"
    assert "on device" not in describe_plan(_plan(model, decide(model), schedule), schedule)


def test_host_memory_by_pool_and_otherwise() -> None:
    """Six blocks of 786,432 elements, all on ssd: 1.5 MiB each in bf16, updated in chunks of 16,384 elements."""
    model = made_model(blocks=6, hidden=256)
    decision = decide(model, micro_batches=1, chunk=1 << 14, lookahead=2)
    schedule = build_schedule(model, decision)
    page = describe_plan(_plan(model, decision, schedule), schedule)
    slots = page.split("Host memory in slots")[1].split("\n\n")[0].splitlines()[2:]
    assert [" ".join(line.split()) for line in slots[:1] + slots[3:5] + slots[-2:]] == [
        "parameters in transit 2 1.5 MiB 3 MiB",
        "optimizer states in transit 3 192 KiB 576 KiB",
        "gradients 3 64 KiB 192 KiB",
        "all 12 4.3 MiB",
        "less what is never used at once -260 KiB",
    ]
    rows = page.split("What this plan would take")[1].split("\n\n")[0].splitlines()[2:]
    # The head's parameters lie where the embedding's do at the other end of the step.
    assert " ".join(rows[0].split()).endswith("4.05 MiB - - 4.05 MiB - -")
    assert " ".join(rows[1].split()).endswith("4.3 MiB 260 KiB 5.9% 4.3 MiB 260 KiB 5.9%")
    # Twelve slots of 1.5 MiB; then of 2 MiB.
    assert " ".join(rows[3].split()).endswith("18 MiB 14 MiB 77.5% 18 MiB 14 MiB 77.5%")
    assert " ".join(rows[5].split()).endswith("24 MiB 20 MiB 83.1% 24 MiB 20 MiB 83.1%")
    assert rows[-1] == "  page-locking the arena as it is takes 0 B beyond it"


def test_many_sizes_of_slots_are_thinned() -> None:
    found = Blocks((), tuple(Pool((Role.GRADIENTS,), size << 20, 1) for size in range(20, 0, -1)), arena=210 << 20)
    lines = text._pools(found)
    assert len(lines) == text.MOST_ROWS + 3 and lines[-1] == "  and 12 smaller sizes"
    assert lines[-2].split() == ["all", "20", "210", "MiB"]


def test_a_profile() -> None:
    profile = made_profile(
        machine=made_machine(volumes=(made_volume(mixed=((1.5e9, 1.2e9),)), made_volume(path="/mnt/second"))),
        blocks=32,
        tied=True,
    ).model_copy(update={"notes": ("io_uring is not allowed here; threads instead",)})
    page = describe_profile(profile)
    assert "reads 3 GB/s, writes 2 GB/s; together 1.5 GB/s and 1.2 GB/s" in page
    assert "/mnt/second" in page
    assert _line(page, "block 32") == "block 32 49,152 96 KiB 576 KiB"
    assert _line(page, "embedding 1 32,768").endswith("tied")
    assert "io_uring is not allowed here; threads instead" in page
    assert _line(page, "host memory") == "host memory 64 GiB, 64 GiB available"
    assert "beside compute" not in page
    measured = {"compute_beside_updates": 0.4, "updates_beside_compute": 0.55}
    page = describe_profile(profile.model_copy(update={"machine": profile.machine.model_copy(update=measured)}))
    assert "55% of its rate beside compute, which keeps 40% of its own" in page


def test_a_name_cannot_move_the_cursor() -> None:
    model = made_model().model_copy(update={"name": "evil\x1b[2J\nname\u202e"})
    decision = decide(model)
    schedule = build_schedule(model, decision)
    for page in (
        describe_plan(_plan(model, decision, schedule), schedule),
        describe_profile(made_profile(model=model).model_copy(update={"notes": ("a\x1b[31mred\nnote",)})),
    ):
        assert "\x1b" not in page and "\u202e" not in page and "evil?[2J?name?" in page


texts = st.text(min_size=1, max_size=256)
sizes = st.integers(0, (1 << 60) - 1)
positive = st.floats(min_value=1e-300, max_value=1e300)
counts = st.integers(1, (1 << 40) - 1)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(
    data=st.data(),
    names=st.tuples(texts, texts, texts, texts, texts),
    nbytes=st.tuples(sizes, sizes, sizes, sizes, sizes, sizes, sizes),
    rates=st.tuples(positive, positive, positive, positive, positive, positive),
    numbers=st.tuples(counts, counts, counts, counts),
)
def test_no_line_is_too_long(
    data: st.DataObject,
    names: tuple[str, ...],
    nbytes: tuple[int, ...],
    rates: tuple[float, ...],
    numbers: tuple[int, ...],
) -> None:
    """Whatever a document that passes its checks may say, in 100 columns of a terminal, wide characters included."""
    model = made_model(blocks=2)
    renamed = {"embedding": names[0], "block": names[1] + "b", "head": names[2] + "h"}
    if len(set(renamed.values())) < 3:
        renamed = {name: name for name in renamed}
    states = [state.model_copy(update={"state_class": renamed[state.state_class]}) for state in model.states]
    model = model.model_copy(
        update={
            "name": names[3],
            "path": names[4],
            "architecture": names[4],
            "parameters": numbers[0],
            "states": tuple(states),
        }
    )
    decision = decide(model, alpha=data.draw(st.floats(0, 1)), checkpoints=data.draw(st.floats(0, 1)))
    schedule = build_schedule(model, decision)
    decision = decision.model_copy(
        update={
            "micro_batches": min(numbers[1], most_micro_batches(model)),
            "update_chunk_elements": numbers[2] // 2048 * 2048 or 2048,
            "update_lookahead": numbers[3],
            "host_budget_bytes": nbytes[5],
            "device_budget_bytes": nbytes[6],
        }
    )
    prediction = _prediction(
        schedule,
        step_seconds=rates[0],
        tokens_per_second=rates[1],
        peak_host_bytes=nbytes[0],
        peak_device_bytes=nbytes[1],
        ssd_bytes=nbytes[2],
        ssd_read_bytes=nbytes[3],
        ssd_write_bytes=nbytes[4],
        h2d_bytes=nbytes[3],
        d2h_bytes=nbytes[4],
        bound_by=names[0],
        busy={names[0]: 1.0, names[1]: 0.5},
        idle={names[1]: {names[2]: rates[3], "fill": rates[4], "read": rates[5]}},
        critical_path={names[3]: {names[4]: rates[3], names[0]: rates[4]}},
        program_seconds=rates[2],
    )
    entry = _alternative(
        numbers[0], numbers[1], tokens_per_second=rates[3], io_tokens_per_second=rates[4], delay_ratio=1 / 3
    )
    row = Sensitivity(resource=names[1], unit=names[2], seconds_per_unit=-rates[5], throughput_gain=rates[4])
    said = row.model_copy(update={"words": names[3]})
    least = Least(budget="host memory", least_bytes=nbytes[0], tokens_per_second=rates[1])
    machine = made_machine(host_memory=nbytes[0], device_memory=nbytes[1], link=rates[0], update_rate=rates[1])
    machine = machine.model_copy(update={"name": names[2], "device_name": names[3], "cores": numbers[0]})
    volume = Volume(path=names[4], free_bytes=nbytes[2], engine="io_uring", frontier=machine.volumes[0].frontier)
    volume = volume.model_copy(update={"endurance_bytes": data.draw(st.none() | sizes)})
    machine = machine.model_copy(update={"volumes": (volume,) * 3})
    plan = _plan(
        model,
        decision,
        schedule,
        machine=machine,
        prediction=prediction,
        alternatives=(entry, entry),
        sensitivity=(row, said),
        least=(least,),
        reasons=(Reason(topic=names[0], text=names[1]),),
    )
    profile = Profile(schema="ssdplan.profile/1", created=names[0], machine=machine, model=model, notes=names)
    for page in (describe_plan(plan, schedule), describe_profile(profile)):
        assert page.endswith("\n")
        for line in page.splitlines():
            assert cell_len(line) <= 100, line
            assert line.isprintable()


def test_numbers() -> None:
    assert [duration(s) for s in (0, 2e-6, 0.0123, 1.5, 59, 353.2, 4000)] == [
        "0 ms",
        "2 us",
        "12.3 ms",
        "1.5 s",
        "59 s",
        "353 s",
        "1:06:40",
    ]
    assert [number(v) for v in (0, 0.01234, 1.5, 99.9, 1234.5, 5e15)] == [
        "0",
        "0.0123",
        "1.5",
        "99.9",
        "1,234",
        "5e+15",
    ]
    assert [count(v) for v in (999, 12_345, 124_439_808, 7_615_616_512)] == [
        "999",
        "12,345",
        "124 million",
        "7.62 billion",
    ]
    edges = [duration(0.9996e-3), count(999_960_000), decimal(999.96e6), number(999.6)]
    assert edges == ["1 ms", "1 billion", "1 GB", "1,000"], "nothing is written as 1e+03"
    assert [percent(s) for s in (0, 1e-5, 0.0005, 0.5, 0.9999, 1)] == ["-", "<0.1%", "0.1%", "50%", ">99.9%", "100%"]
    assert exact_percent(0.258912) == "25.8912%" and exact_percent(1.0) == "100%"
    assert bar(0, 1, 4) == "[....]" and bar(1e-9, 1, 4) == "[#...]" and bar(5, 1, 4) == "[####]" == bar(1, 0, 4)


def test_a_placement_that_is_all_on_host() -> None:
    model = made_model(blocks=1)
    decision = decide(model, optimizer=1.0, parameters=1.0, checkpoints=1.0)
    schedule = build_schedule(model, decision)
    assert isinstance(decision.placement["block"], Placement)
    body = describe_plan(_plan(model, decision, schedule), schedule).split("Where states live")[1].split("\n\n")[0]
    assert body.count("100%") == 7  # two states of three classes, and the checkpoints


def test_a_report_tells_what_the_host_gave_to_others(tmp_path):
    report = {"steps": 3, "model": "made", "steady_steps": 2, "losses": [], "eval_losses": {}, "predictions": []}
    row = {"quantity": "step_seconds", "unit": "s", "predicted": 2.0, "measured": 3.0, "relative_error": 0.5}
    for share, told in ((0.0, False), (0.004, False), (0.13, True)):
        (tmp_path / "report.json").write_text(json.dumps({**report, "predictions": [row], "stolen_share": share}))
        text = describe_report(tmp_path / "report.json")
        assert ("the host gave 13% of the processors' time to others (steal), among them" in text) == told
    (tmp_path / "report.json").write_text(json.dumps({**report, "predictions": [row]}))  # of an older version
    assert "steal" not in describe_report(tmp_path / "report.json")


def test_a_report_says_which_steps_its_speed_is_of_and_what_it_counts(tmp_path):
    row = {"quantity": "step_seconds", "unit": "s", "predicted": 2.0, "measured": 3.0, "relative_error": 0.5}
    report = {"steps": 9, "model": "made", "losses": [], "eval_losses": {}, "predictions": [row]}
    for steady, share, words in (
        (6, 238 / 1024, "measured is the median of 6 steady steps"),
        (1, None, "measured is the one steady step"),
    ):
        (tmp_path / "report.json").write_text(json.dumps({**report, "steady_steps": steady, "learnt_share": share}))
        text = describe_report(tmp_path / "report.json")
        assert words in text and max(map(len, text.splitlines())) <= 100
        assert ("of which 23.2% are learnt" in " ".join(text.split())) == (share is not None)
        assert "counts all positions" in text


def test_a_headline_is_never_cut() -> None:
    prediction = _prediction(_made_schedule(), ssd_bytes=0, step_seconds=123_456.0, tokens_per_second=1234567.0)
    page = _page(prediction=prediction)
    opening = page.split("What bounds it")[0]
    assert "..." not in opening
    assert "the device alone has memory for this training, and a step uses no ssd." in " ".join(opening.split())
    assert "1,234,567 tokens/s." in opening


def test_what_takes_turns_on_host_is_said_below_the_table() -> None:
    """Delayed gradients lie where checkpoints were: the rows are then more than the memory that they take."""
    model = made_model(blocks=3)

    def table(alpha: float, gradients: float) -> tuple[str, Schedule]:
        decision = decide(model, alpha=alpha, checkpoints=1.0, gradient=gradients)
        schedule = build_schedule(model, decision)
        return describe_plan(_plan(model, decision, schedule), schedule).split("Where states live")[1], schedule

    text, schedule = table(0.5, 1.0)
    taken = set()
    whole = 0
    for home in schedule.homes:
        for region in (home.parameters, home.optimizer, home.gradient):
            if region and schedule.buffers[region.buffer].tier == "host":
                at = schedule.buffers[region.buffer].offset
                taken.update(range(at + region.start, at + region.stop, 64))
                whole += len(range(region.start, region.stop, 64))
    for buffer in schedule.buffers:
        if buffer.role == Role.CHECKPOINTS and buffer.tier == "host":
            taken.update(range(buffer.offset, buffer.offset + buffer.nbytes, 64))
            whole += len(range(0, buffer.nbytes, 64))
    shared = 64 * (whole - len(taken))
    assert shared > 0
    assert f"  {format_bytes(shared)} of these on host count twice: delayed gradients lie where checkpoints" in text
    assert "count twice" not in table(0.0, 0.0)[0]
