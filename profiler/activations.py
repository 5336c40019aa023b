"""Measures what blocks can keep of their activations: sub-layers, and the rungs from little that is kept to all of it.

Owns the sub-layers' table (PyAO sections 3.4 and 5.1), which rungs there are, and their seconds and bytes. A rung is a
cut of a block's own graph: for so many bytes it leaves the least to be computed again. One of them is what the paper's
rule keeps. Which names modules have, it does not know.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ssdplan.native import process
from ssdplan.plans.analysis.sublayers import outliers
from ssdplan.plans.documents.profile import PAPER, Rung, SubLayer, Timing
from ssdplan.plans.errors import MemoryBudgetError

from .layer_bench import Bench
from .measure import FEWEST, Limits, Progress, mean_of
from .parts import TracedCall

ROUNDS, SETTLED, ROUNDS_SECONDS, ROUNDS_SHARE = 100, 0.02, 2.0, 0.15
"""How often a forward's operations are timed at most. They are timed less often where the median of all has changed by
less than SETTLED between a half of the rounds and all, or where the rounds take longer than so many seconds, or than
this share of the time for a class."""
PRICES = tuple(10.0 ** (-7 - each / 4) for each in range(25))
"""Seconds a byte, from so much that nothing is kept to next to nothing."""
LEFT = (0.5, 0.25, 0.1, 0.0)
"""Of what a block computes again where nothing is kept, what a rung leaves, about."""
WORTH = 0.01
"""Of a block's seconds: what a rung that keeps more has to gain."""
TINY = 1e-15
"""Seconds a byte at which everything is kept that saves anything."""
ALL = "all"
IN_INT8 = "-int8"
"""How the names of rungs end that keep the values of another one in int8."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a rung keeps."""

    values: tuple[str, ...]
    packed: bool = False
    """In int8 where that may be."""


@dataclass(slots=True)
class Found:
    """What was measured of one class of blocks at one micro-batch size."""

    sublayers: tuple[SubLayer, ...] = ()
    rungs: tuple[Rung, ...] = ()


@dataclass(slots=True)
class Activations:
    """What was found of all blocks."""

    of: dict[tuple[str, int], Found] = field(default_factory=dict)
    """(class, micro-batch size)"""
    notes: list[str] = field(default_factory=list)
    choosing_bytes: int = 0
    """What the process keeps since rungs were chosen: the library of graphs, which no run loads."""


def measure_activations(
    bench: Bench,
    blocks: Mapping[str, int],
    timings: Mapping[tuple[str, int], Timing],
    *,
    bandwidth: float,
    limits: Limits,
    progress: Progress,
    int8: bool = False,
) -> Activations:
    """The sub-layers and rungs of each class of `blocks` (-> the layer that stands for it) at each size of `timings`,
    within about `limits.seconds`.

    `bandwidth`: bytes a second of the slower way that activations can leave by; `timings` are of blocks that recompute
    everything, to which a rung's seconds are held, measured in turns. With `int8` there is another of each rung, whose
    values are kept in int8. All of it runs in the device's lane of compute.
    """
    found = Activations()
    for number, (name, layer) in enumerate(blocks.items()):
        sizes = sorted(size for known, size in timings if known == name)
        mine = Limits(limits.seconds / len(blocks))
        progress(number / len(blocks), f"activations of {name}")
        try:
            with bench.lane():
                bench.load(layer)
                _measure_class(bench, name, layer, sizes, timings, bandwidth, mine, found, int8)
        except MemoryBudgetError:
            found.notes.append(f"{name}: too little memory to measure what could be kept of its activations")
    progress(1.0, "activations")
    return found


def _measure_class(
    bench: Bench,
    name: str,
    layer: int,
    sizes: Sequence[int],
    timings: Mapping[tuple[str, int], Timing],
    bandwidth: float,
    limits: Limits,
    found: Activations,
    int8: bool,
) -> None:
    seconds: dict[str, float] = {}
    calls: dict[int, TracedCall] = {}
    for size in sizes:
        call = bench.trace(layer, size)
        if call is None:
            found.notes.append(f"{name}: its code cannot be traced, so its activations are recomputed")
            return
        calls[size] = call
        most = min(ROUNDS_SECONDS, ROUNDS_SHARE * limits.seconds / len(sizes))
        seconds, samples = _operation_seconds(bench, call, most)
        found.of[name, size] = Found(sublayers=_sublayers(call, seconds, samples))
    call = calls[sizes[-1]]  # names are the same at every size, and seconds surest at the largest
    before = process.kept_bytes()
    choices = _choices(call, seconds, found.of[name, sizes[-1]].sublayers, bandwidth)
    found.choosing_bytes += max(process.kept_bytes() - before, 0)
    if not choices:
        found.notes.append(f"{name}: nothing that could be kept of its activations saves time")
        return
    if int8:
        choices |= {f"{rung}{IN_INT8}": replace(choice, packed=True) for rung, choice in choices.items()}
    for rung, choice in choices.items():
        nbytes = call.kept_bytes(choice.values, packed=choice.packed)
        bench.learn(name, rung, choice.values, nbytes, packed=choice.packed)
    budget = limits.seconds
    last: dict[str, tuple[float, float]] = {}
    for size in sizes:
        base = timings[name, size]
        once = (base.forward_seconds + base.backward_seconds) * (len(choices) + 1)
        rounds = min(max(int(budget / len(sizes) / max(once, 1e-9)) - 1, FEWEST), 20)
        ratios = last
        if size == sizes[0] or once * (rounds + 1) <= budget:
            ratios = _ratios(bench, layer, size, tuple(choices), rounds)
            budget -= once * (rounds + 1)
            if not ratios:
                found.notes.append(f"{name}: its graph computes other bits than its code, so it is recomputed")
                return
            last = ratios
        else:
            found.notes.append(
                f"{name} at micro-batch size {size}: seconds of its rungs are those of smaller ones, scaled"
            )
        found.of[name, size].rungs = _rungs(bench, layer, calls[size], base, choices, ratios)


def _operation_seconds(bench: Bench, call: TracedCall, most: float) -> tuple[dict[str, float], int]:
    """The median seconds of each operation of a forward, and of how many rounds."""
    samples: dict[str, list[float]] = {}
    began, rounds = bench.clock(), 0
    call.operation_seconds(bench.settled_clock)  # the first is cold
    while rounds < ROUNDS:
        for operation, each in call.operation_seconds(bench.settled_clock).items():
            samples.setdefault(operation, []).append(each)
        rounds += 1
        totals = [sum(each) for each in zip(*samples.values(), strict=True)]
        if rounds >= FEWEST and bench.clock() - began > most:
            break
        if rounds % 10 == 0 and abs(statistics.median(totals[: rounds // 2]) / statistics.median(totals) - 1) < SETTLED:
            break
    return {operation: statistics.median(each) for operation, each in samples.items()}, rounds


def _sublayers(call: TracedCall, seconds: Mapping[str, float], samples: int) -> tuple[SubLayer, ...]:
    return tuple(
        SubLayer(
            name=each.name,
            saved_bytes=each.saved_bytes,
            forward_seconds=sum(seconds[operation] for operation in each.operations),
            samples=samples,
        )
        for each in call.traced.sublayers
    )


def _choices(
    call: TracedCall, seconds: Mapping[str, float], sublayers: Sequence[SubLayer], bandwidth: float
) -> dict[str, Choice]:
    """The rungs by name, in rising order of bytes -> what each keeps."""
    traced = call.traced
    again = sum(seconds[each] for each in traced.cut(()).rebuilt) if traced.can_be_kept(()) else sum(seconds.values())
    frontier: dict[frozenset[str], tuple[int, float]] = {}
    for price in (*PRICES, TINY):
        kept = traced.cheapest(seconds, price)
        if kept and kept not in frontier:
            left = sum(seconds[operation] for operation in traced.cut(kept).rebuilt)
            frontier[kept] = (call.kept_bytes(kept), left)
    chosen: list[frozenset[str]] = []
    for share in LEFT:
        enough = [kept for kept, (_, left) in frontier.items() if left <= share * again]
        if enough:
            least = min(enough, key=lambda kept: frontier[kept][0])
            if least not in chosen:
                chosen.append(least)
    chosen.sort(key=lambda kept: frontier[kept][0])
    rungs = {kept: f"rung-{number}" for number, kept in enumerate(chosen, 1)}
    if chosen:
        rungs[chosen[-1]] = ALL
    by_paper = frozenset(
        value
        for each, whether in zip(traced.sublayers, outliers(sublayers, bandwidth), strict=True)
        if not whether
        for value in each.saved
    )
    if by_paper and traced.can_be_kept(by_paper):
        rungs[by_paper] = PAPER
    return {rungs[kept]: Choice(tuple(sorted(kept))) for kept in sorted(rungs, key=call.kept_bytes)}


def _ratios(bench: Bench, layer: int, size: int, rungs: Sequence[str], rounds: int) -> dict[str, tuple[float, float]]:
    """Rung -> what its forward and its backward take, against those that recompute everything, measured in turns."""
    samples: dict[str, tuple[list[float], list[float]]] = {rung: ([], []) for rung in ("", *rungs)}
    for number in range(rounds + 1):
        for rung, (forwards, backwards) in samples.items():
            forward, backward, by_graph = bench.pair_seconds(layer, size, rung)
            if rung and not by_graph:
                return {}
            if number:  # the first of each is cold, and proves the graph
                forwards.append(forward)
                backwards.append(backward)
    base = tuple(mean_of(each) for each in samples[""])
    return {
        rung: (mean_of(forwards) / base[0], mean_of(backwards) / base[1])
        for rung, (forwards, backwards) in samples.items()
        if rung
    }


def _rungs(
    bench: Bench,
    layer: int,
    call: TracedCall,
    base: Timing,
    choices: Mapping[str, Choice],
    ratios: Mapping[str, tuple[float, float]],
) -> tuple[Rung, ...]:
    """Those that gain more than the ones that keep less in the same format, and the paper's, in rising order of
    bytes."""
    made: list[Rung] = []
    least = dict.fromkeys((False, True), base.forward_seconds + base.backward_seconds)
    for name, choice in choices.items():
        forward, backward = ratios[name]
        seconds = base.forward_seconds * forward + base.backward_seconds * backward
        if name != PAPER and seconds > least[choice.packed] * (1 - WORTH):
            continue
        least[choice.packed] = min(least[choice.packed], seconds)
        space = bench.rung_space(layer, base.micro_batch_size, name)
        made.append(
            Rung(
                name=name,
                format="int8" if choice.packed else None,
                values=choice.values,
                kept_bytes=call.kept_bytes(choice.values, packed=choice.packed),
                forward_seconds=base.forward_seconds * forward,
                backward_seconds=base.backward_seconds * backward,
                forward_workspace_bytes=space.forward_workspace,
                backward_workspace_bytes=space.backward_workspace,
                process_growth_bytes=space.process_growth,
            )
        )
    return tuple(sorted(made, key=lambda rung: rung.kept_bytes))
