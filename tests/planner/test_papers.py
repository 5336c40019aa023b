"""What the papers say, asked of our planner. Numbers are in paper_figures.py, beside where each is from.

Nothing here is tuned: where a figure is not reached, its bound says how far ours is, and docs/papers.md why.
"""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdplan.planner.explain.zero_infinity import horizontal_traffic, vertical_traffic
from ssdplan.planner.program.choices import FixedChoices
from ssdplan.planner.program.traffic import layer_groups, stages, total_bytes
from ssdplan.planner.program.variables import CONSTANT
from ssdplan.plans.analysis.allocators import Pool, by_class, one_size, powers_of_two
from ssdplan.plans.documents.state_layout import checkpoint_bytes
from ssdplan.plans.graph.contents import Role
from tests.made.works import work_of
from tests.planner.paper_figures import (
    CHECKPOINT_SECONDS,
    COMPUTE_SECONDS,
    EVERYTHING_ON_SSD,
    FIGURES,
    FREE,
    GIB,
    ROWS,
    SMALL_ROWS,
    Figure,
    compute_seconds,
    gpt_65b,
    needs,
    over_horizontal,
    parameter_bytes,
    plateau,
    saturation,
    step_seconds,
    utilisation,
    vertical_parts,
)
from tests.planner.zeroth_order_table import row_by_rows, tokens_per_second

DOCUMENT = Path(__file__).parents[2] / "docs" / "papers.md"
NO_DELAY = FixedChoices(recompute="all", delay_ratio=0.0)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda each: f"{each.paper}, {each.where}: {each.what}")
def test_a_figure_is_reached_as_far_as_it_says(figure: Figure) -> None:
    """Each row of docs/papers.md; what is more than 5% off has its reason there."""
    assert abs(figure.difference) <= figure.within, f"{figure.ours()} beside {figure.stated}"
    assert figure.within <= 0.05 or figure.reason


def test_the_document_has_what_the_code_computes() -> None:
    """docs/papers.md row by row: where, what, the paper's figure, ours, the difference and the reason."""
    text = DOCUMENT.read_text(encoding="utf-8")
    wanted = [row(figure) for figure in FIGURES]
    found = [line for line in text.splitlines() if re.match(r"\| (GreedySnake|MemAscend|PyAO|10Cache) ", line)]
    assert found == wanted
    rows = [saturation(choices) for choices in (FREE, NO_DELAY, EVERYTHING_ON_SSD)]
    prose = " ".join(text.split())
    assert f"at {rows[0]} rows, without delayed updates at {rows[1]}, with everything on ssd at {rows[2]}" in prose
    llama = needs("llama-3.1-8b")
    slots = [Pool((Role.PARAMETERS,), llama.parameter_buffers // 9, 9)]
    one_block = powers_of_two([Pool((Role.PARAMETERS,), llama.parameter_buffers, 1)]) - powers_of_two(slots)
    assert f"would put Llama 3.1 8B at {(llama.total + one_block) / GIB:.1f} GiB" in prose


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mistral-7b"])
def test_a_table_by_rows_brings_what_the_document_says(model: str) -> None:
    """The bytes, the memory and the tokens a second of a what-if, in which host's work and copies share DRAM."""
    assert row_by_rows(model) in DOCUMENT.read_text(encoding="utf-8").splitlines()
    assert tokens_per_second(model, "fp16", by_rows=True) > tokens_per_second(model, "fp16")


def row(figure: Figure) -> str:
    """A figure as a row of the table."""
    percent = round(100 * figure.difference, 1)
    difference = f"{percent:+.1f}%" if percent else "0.0%"
    stated, ours = figure.shown(figure.stated), figure.shown(figure.ours())
    cells = (figure.paper, figure.where, figure.what, stated, ours, difference, figure.reason)
    return f"| {' | '.join(cells)} |".replace("  |", " |")


# GreedySnake.


@pytest.mark.parametrize("micro_batches", range(1, 17))
def test_traffic_of_both_schedules(micro_batches: int) -> None:
    """GreedySnake 1: with ms the size of the parameters, the horizontal schedule loads 2 x M x ms of parameters and
    moves (2M - 1) x 2 ms of gradients; the vertical one 2 ms of each, whatever M is. GPT-65B, 8 x 2048 (3.4).

    Ours beyond that: a tied table is loaded once more, for the head, and its gradient comes from both ends.
    """
    m, ms = micro_batches, parameter_bytes()
    horizontal = horizontal_traffic(gpt_65b()[0], micro_batch_size=ROWS, micro_batches=m)
    assert horizontal.parameters.h2d == 2 * m * ms and horizontal.parameters.d2h == 0
    assert horizontal.gradients.link == (2 * m - 1) * 2 * ms
    assert horizontal.checkpoints.link == 2 * m * 80 * checkpoint_bytes(gpt_65b()[0], ROWS)
    to, back = vertical_parts(m)
    table = 51200 * 8192
    assert to == pytest.approx(2 * ms + 2 * table + 4 * table, rel=1e-3)
    assert back == pytest.approx(2 * ms + 4 * table, rel=1e-3)
    assert (to, back) == vertical_parts(1)


def test_the_vertical_schedule_moves_less_from_two_micro_batches_on() -> None:
    """GreedySnake 3.4 and figure 5: less to the device and from it, though more of checkpoints; by about a factor of M
    in parameters. For GPT-65B with 8 x 2048, where a checkpoint is a sixth of a block.
    """
    model, _ = gpt_65b()
    for m in range(2, 17):
        horizontal = horizontal_traffic(model, micro_batch_size=ROWS, micro_batches=m)
        vertical = vertical_traffic(model, micro_batch_size=ROWS, micro_batches=m)
        assert vertical.h2d < horizontal.total.h2d and vertical.d2h < horizontal.total.d2h
        to, back = vertical_parts(m)
        assert horizontal.parameters.h2d / to == pytest.approx(m, rel=0.02)
        assert vertical.link - to - back > horizontal.checkpoints.link
    four = horizontal_traffic(model, micro_batch_size=ROWS, micro_batches=4).total
    assert vertical_traffic(model, micro_batch_size=ROWS, micro_batches=4).link < 0.3 * four.link


def test_the_time_credit_of_one_more_micro_batch() -> None:
    """GreedySnake 6.4: for GPT-65B one more micro-batch computes for 16.4 s and moves checkpoints for 1.1 s, so even
    with everything on ssd each adds 15.3 s in which the update can run.

    The drive's bandwidth follows from the 1.1 s, so that these come back is no surprise; that the program's step grows
    by 1.1 s a micro-batch while ssd bounds it, by 16.4 s when compute does, and by nothing else, is what is tested.
    The delay ratio is fixed for that: delayed parameters are not read again for the forward, so alpha moves bytes too.
    """
    model, machine = gpt_65b()
    form = [
        total_bytes(stages(model, layer_groups(model), work_of(SMALL_ROWS, n)), kind)[CONSTANT]
        for kind in ("read", "write")
        for n in (1, 2)
    ]  # fmt: skip
    extra = form[1] - form[0] + form[3] - form[2]
    bandwidth = sum(volume.frontier[0].read for volume in machine.volumes)
    assert extra / bandwidth == pytest.approx(CHECKPOINT_SECONDS)
    assert compute_seconds(model, SMALL_ROWS) == pytest.approx(COMPUTE_SECONDS)
    half = FixedChoices(recompute="all", delay_ratio=0.5, parameters=0.0, optimizer=0.0, checkpoints=0.0)
    head = model.timing("head", SMALL_ROWS).backward_seconds  # its stage computes for longer than it reads, always
    growth = [step_seconds(n + 1, half) - step_seconds(n, half) for n in (1, 2, 3, 4, 40)]
    assert growth[:4] == pytest.approx([CHECKPOINT_SECONDS + head] * 4, rel=0.01)
    assert growth[4] == pytest.approx(COMPUTE_SECONDS, rel=0.01)
    least = step_seconds(1, EVERYTHING_ON_SSD)
    credit = COMPUTE_SECONDS - CHECKPOINT_SECONDS
    assert saturation(EVERYTHING_ON_SSD) // SMALL_ROWS == pytest.approx(least / credit, abs=1)


def test_the_roofline() -> None:
    """GreedySnake 3.1, figure 3: with optimizer states on ssd no step is faster than reading and writing them once, nor
    than its compute; throughput grows in proportion at first, and then stays.
    """
    model, machine = gpt_65b()
    bandwidth = sum(volume.frontier[0].read for volume in machine.volumes)
    states = 2 * 12 * model.parameters / bandwidth
    choices = FixedChoices(recompute="all", optimizer=0.0)
    for n in range(1, 33):
        assert step_seconds(n, choices) >= max(states, n * COMPUTE_SECONDS) * (1 - 1e-9)
    assert utilisation(2, choices) == pytest.approx(2 * utilisation(1, choices), rel=0.05)
    assert step_seconds(1, choices) <= 1.2 * states
    assert utilisation(32, choices) > 0.99


def test_delayed_updates_saturate_at_a_smaller_batch_and_the_same_throughput() -> None:
    """GreedySnake 6.3, figure 11."""
    assert saturation() < saturation(NO_DELAY)
    assert plateau() == pytest.approx(plateau(NO_DELAY), rel=1e-3)
    assert all(step_seconds(n) <= step_seconds(n, NO_DELAY) * (1 + 1e-9) for n in range(1, 33))


def test_everything_on_ssd_reaches_the_plateau_later() -> None:
    """GreedySnake 6.4, figure 12: throughput grows more slowly, to a similar value. By 6.3 and 6.4 both delay and DRAM
    let it saturate at a smaller batch; that without DRAM comes after without delay is ours: the text has no figures.
    """
    on_ssd_without = FixedChoices(recompute="all", delay_ratio=0.0, parameters=0.0, optimizer=0.0, checkpoints=0.0)
    order = [saturation(choices) for choices in (FREE, NO_DELAY, EVERYTHING_ON_SSD, on_ssd_without)]
    assert all(first < second for first, second in pairwise(order))
    assert plateau(EVERYTHING_ON_SSD) > 0.99 * plateau()
    assert utilisation(4, EVERYTHING_ON_SSD) < 0.7 * utilisation(4)


def test_the_horizontal_plateau_is_lower_unless_its_micro_batches_are_large() -> None:
    """GreedySnake 3.3 and 6.2: more micro-batches do not help the horizontal schedule as they help the vertical one,
    larger ones do. With the compute of the paper's own GPU, GPT-65B, its 1.96 is beyond what ours gives the perfectly
    overlapped schedule; with the catalogue's faster one, GPT-175B, its 2.53 is about what ours gives (papers.md).
    """
    for name, within, hidden in (("gpt-65b", (1.0, 1.96), 0.92), ("gpt-175b", (2.53, 2.8), 0.995)):
        ratios = [over_horizontal(name, size) for size in (1, SMALL_ROWS, ROWS)]
        assert ratios == sorted(ratios, reverse=True)
        assert within[0] < ratios[1] < within[1]
        assert ratios[2] == pytest.approx(hidden, abs=0.01)  # eight rows hide all of it, or nearly
    assert over_horizontal("gpt-65b", SMALL_ROWS, 512) < over_horizontal("gpt-65b", SMALL_ROWS, 4)


@given(st.lists(st.integers(1, 10**11), min_size=1))
def test_a_power_of_two_wastes_less_than_half(sizes: list[int]) -> None:
    """GreedySnake 5, MemAscend III-B: rounding wastes at most half of what is locked; 2 GiB and a little take 4."""
    pools = [Pool((), nbytes, 1) for nbytes in sizes]
    assert by_class(pools) <= powers_of_two(pools) < 2 * by_class(pools)
    assert powers_of_two([Pool((), 2 * GIB + 1, 1)]) == 4 * GIB


# 10Cache.


def test_a_buffer_of_the_largest_size_is_half_empty() -> None:
    """10Cache 3.3.1: a tensor of 512 bytes in a buffer made for the largest, of 1,024, leaves half unused."""
    small, large = Pool((), 512, 1), Pool((), 1024, 1)
    assert (one_size([small, large]) - by_class([small, large])) / large.nbytes == 0.5
