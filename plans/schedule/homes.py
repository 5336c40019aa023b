"""Homes: where every element of every state lives between uses, from a plan's fractions.

Owns the rounding of fractions to whole ranges and to whole states. A state's elements are in the order prompt then
delayed; within each, each of its forms (optimizer states, parameters, delayed gradient) is on host first, then on ssd.
Parameters that stay on the device are there whole, because compute wants a state's weights side by side; so are the
optimizer states and the waiting gradient of a state that the device updates. Frozen states have parameters only, and no
delayed part. A home is a range in which none of these changes, no longer than one update op takes. Of a state of
matrices it is whole matrices, at least one, however long: each cut is at the edge of one, and what a fraction is missed
by in a state is made up for in the next ones of its class. Of several ranks each has homes of its own elements alone,
and fractions are of these.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from ..documents.matrices import Matrix
from ..documents.plan import Decision
from ..documents.profile import Model
from ..documents.state_layout import GRADIENT, GRAIN
from ..graph.contents import Role
from ..graph.ops import Buffer, Home, Region, Tier
from .shards import Shards


class Buffers:
    """The buffers of a schedule while it is built: made once by name, looked up afterwards."""

    def __init__(self) -> None:
        self.all: list[Buffer] = []
        self._by_name: dict[str, int] = {}

    def get(self, name: str, tier: Tier, nbytes: int, role: Role, pool: str = "", shared_by: int = -1) -> int:
        """The index of the buffer of that name. The same name must mean the same buffer."""
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = len(self.all)
            self.all.append(Buffer(found, name, tier, nbytes, role, pool, shared_by))
        else:
            assert self.all[found].nbytes == nbytes, f"two buffers named {name}"
        return found


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop) of a state whose parameters lie together at `region`."""

    start: int
    stop: int
    delayed: bool
    tier: Tier
    region: Region


@dataclass(frozen=True, slots=True)
class Kept:
    """The states whose parameters the device keeps between uses."""

    device: frozenset[int]
    """For the whole run."""
    turn: frozenset[int]
    """From a layer's forward to its backward."""
    updated: frozenset[int]
    """Of those for the whole run: the device keeps their optimizer states too, and updates them."""


def kept_on_device(model: Model, decision: Decision) -> Kept:
    """Which states a decision keeps on the device: of each class the nearest whole number to its fractions, spread
    evenly over the class, so that what the others read and upload is even. Those kept across the turn are spread over
    the states that are not there for the whole run.
    """
    classes: dict[str, list[int]] = {}
    for index, state in enumerate(model.states):
        classes.setdefault(state.state_class, []).append(index)
    device: set[int] = set()
    turn: set[int] = set()
    updated: set[int] = set()
    for name, states in classes.items():
        placement = decision.placement[name]
        stay = sorted(spread(states, round(placement.parameters_device * len(states))))
        device.update(stay)
        updated.update(spread(stay, min(round(placement.optimizer_device * len(states)), len(stay))))
        rest = [state for state in states if state not in device]
        turn.update(spread(rest, min(round(placement.parameters_turn * len(states)), len(rest))))
    turning = set(model.trained_blocks)
    assert all(set(model.uses(state)) <= turning for state in turn), "only blocks with a backward have a turn"
    return Kept(frozenset(device), frozenset(turn), frozenset(updated))


def device_tier(decision: Decision) -> Tier:
    """The tier whose memory compute works on: host itself where memory is unified."""
    return "host" if decision.unified_memory else "device"


def make_homes(model: Model, decision: Decision, buffers: Buffers, shards: Shards) -> tuple[Home, ...]:
    """Cut what a rank owns of every state into homes and make the buffers that they lie in.

    A delayed gradient on host shares its memory with the activation checkpoints of its layer (`Buffer.shared_by`),
    which are consumed before it arrives and made after it is used (GreedySnake 4.4). The delayed gradients of layers
    without an activation checkpoint keep a place of their own.
    """
    homes: list[Home] = []
    kept = kept_on_device(model, decision)
    missed: dict[tuple[str, str], float] = {}
    blocks = range(1, len(model.layers) - 1)
    for index, state in enumerate(model.states):
        first, end = shards.own(state.elements)
        elements = end - first
        if not elements:
            continue
        delayed = 0.0 if state.frozen else decision.delay_ratio
        optimized = not state.frozen and decision.optimizer != "mezo"
        there = index in kept.updated
        if there:
            delayed = float(decision.updates_wait)
        formats = decision.formats_of(state)
        cutter = _Cutter(state.state_class, elements, state.matrices, missed)
        delayed_start = cutter.share("delayed", (1.0 - delayed, delayed), 0, elements)
        p = decision.placement[state.state_class]
        optimizer = cutter.host_ends(
            "optimizer",
            delayed_start,
            (p.optimizer_prompt_host, p.optimizer_prompt_ssd),
            (p.optimizer_delayed_host, p.optimizer_delayed_ssd),
        )
        parameters = cutter.host_ends(
            "parameters",
            delayed_start,
            (p.parameters_prompt_host, p.parameters_prompt_ssd),
            (p.parameters_delayed_host, p.parameters_delayed_ssd),
        )
        if index in kept.device:
            parameters = (0, delayed_start)
        if there:
            optimizer = (0, delayed_start)
        waits = (p.delayed_gradient_host, p.delayed_gradient_ssd)
        gradient = cutter.host_ends("gradient", delayed_start, (0.0, 0.0), waits)
        if there:
            gradient = (0, delayed_start)
        cuts = sorted({0, delayed_start, elements, *optimizer, *parameters, *gradient})
        pieces = [
            piece
            for start, stop in itertools.pairwise(cuts)
            for piece in cutter.pieces(start, stop, decision.update_chunk_elements)
        ]
        first_layer = model.uses(index)[0]
        shared_by = first_layer if first_layer in blocks else -1
        in_parameters = [_tier(start, delayed_start, parameters) for start, _ in pieces]
        if index in kept.device:
            in_parameters = [device_tier(decision)] * len(pieces)
        in_optimizer: list[Tier] = [_tier(start, delayed_start, optimizer) for start, _ in pieces]
        if there:
            in_optimizer = ["device"] * len(pieces)
        own_masters = optimized and formats.takes_copy
        role_of_parameters = Role.OWN_MASTERS if own_masters else Role.PARAMETERS
        sides = [
            (Role.OPTIMIZER, formats.range_bytes, in_optimizer),
            (role_of_parameters, decision.parameters_of(state).bytes_of, in_parameters),
        ]
        if not optimized:
            del sides[0]
        regions = {role: _lay(pieces, state.name, role, size, tiers, buffers) for role, size, tiers in sides}
        waiting = [(start, stop) for start, stop in pieces if start >= delayed_start]
        in_waiting: list[Tier] = [_tier(start, delayed_start, gradient) for start, _ in waiting]
        if there:
            in_waiting = ["device"] * len(waiting)
        gradients = dict(
            zip(
                waiting,
                _lay(waiting, state.name, Role.DELAYED_GRADIENT, GRADIENT.bytes_of, in_waiting, buffers, shared_by),
                strict=True,
            )
        )
        for number, (piece, home_parameters) in enumerate(zip(pieces, regions[role_of_parameters], strict=True)):
            start, stop = piece
            home_optimizer = regions[Role.OPTIMIZER][number] if optimized else None
            late = start >= delayed_start
            homes.append(
                Home(
                    state=index,
                    start=first + start,
                    stop=first + stop,
                    delayed=late,
                    optimizer=home_optimizer,
                    parameters=home_parameters,
                    gradient=gradients.get(piece),
                    formats=formats,
                    trained=not state.frozen,
                    matrices=cutter.within(start, stop),
                )
            )
    return tuple(homes)


def parameter_spans(homes: tuple[Home, ...], buffers: Buffers) -> dict[int, tuple[Span, ...]]:
    """State -> its parameters as the fewest spans that lie together, in element order."""
    spans: dict[int, list[Span]] = {}
    for home in homes:
        mine = spans.setdefault(home.state, [])
        region = home.parameters
        if mine:
            last = mine[-1]
            if (
                last.region.buffer == region.buffer
                and last.region.stop == region.start
                and last.delayed == home.delayed
                and last.stop == home.start
            ):
                joined = Region(region.buffer, last.region.start, region.stop)
                mine[-1] = Span(last.start, home.stop, last.delayed, last.tier, joined)
                continue
        mine.append(Span(home.start, home.stop, home.delayed, buffers.all[region.buffer].tier, region))
    return {state: tuple(mine) for state, mine in spans.items()}


def _share(fractions: tuple[float, float], elements: int) -> int:
    """The first of two shares of `elements`, in whole grains; a share of nothing is nothing."""
    first, second = fractions
    if first + second <= 0.0:
        return 0
    return round(first / (first + second) * (elements // GRAIN)) * GRAIN


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Where a state may be cut: at any grain, or at the edges of its matrices."""

    state_class: str
    elements: int
    matrices: tuple[Matrix, ...]
    missed: dict[tuple[str, str], float]
    """Class and what is cut -> the elements by which the cuts of the states before this one fell short."""

    def share(self, what: str, fractions: tuple[float, float], start: int, stop: int) -> int:
        """Where in [start, stop) the first of two shares ends; a share of nothing is nothing."""
        if not self.matrices:
            return start + _share(fractions, stop - start)
        if (total := sum(fractions)) <= 0.0:
            return start
        if 0.0 in fractions:
            return stop if fractions[0] else start
        key = self.state_class, what
        wanted = start + fractions[0] / total * (stop - start) + self.missed.get(key, 0.0)
        edges = [start, *(matrix.stop for matrix in self.matrices if start < matrix.stop <= stop)]
        found = min(edges, key=lambda edge: abs(edge - wanted))
        self.missed[key] = wanted - found
        return found

    def host_ends(
        self, what: str, delayed_start: int, prompt: tuple[float, float], delayed: tuple[float, float]
    ) -> tuple[int, int]:
        """Where what stays on host ends, in the prompt and in the delayed part, from (host, ssd) fractions."""
        return (
            self.share(f"prompt {what}", prompt, 0, delayed_start),
            self.share(f"delayed {what}", delayed, delayed_start, self.elements),
        )

    def pieces(self, start: int, stop: int, most: int) -> list[tuple[int, int]]:
        """Cut [start, stop) into ranges of at most `most` elements; of matrices each as many as that is, at least
        one."""
        if not self.matrices:
            return _even(start, stop, most)
        ranges: list[tuple[int, int]] = []
        for matrix in self.within(start, stop):
            if ranges and matrix.stop - ranges[-1][0] <= most:
                ranges[-1] = (ranges[-1][0], matrix.stop)
            else:
                ranges.append((matrix.start, matrix.stop))
        return ranges

    def within(self, start: int, stop: int) -> tuple[Matrix, ...]:
        """The matrices that [start, stop) consists of."""
        return tuple(matrix for matrix in self.matrices if start <= matrix.start < stop)


def _tier(start: int, delayed_start: int, host_ends: tuple[int, int]) -> Tier:
    return "host" if start < host_ends[1 if start >= delayed_start else 0] else "ssd"


def spread(numbers: list[int], count: int) -> frozenset[int]:
    """So many of `numbers`, at even distances; the last is among them unless there are none."""
    return frozenset(
        each
        for number, each in enumerate(numbers)
        if (number + 1) * count // len(numbers) > number * count // len(numbers)
    )


def _even(start: int, stop: int, most: int) -> list[tuple[int, int]]:
    """Cut [start, stop) into the fewest ranges of at most `most` elements, as equal as the grain allows."""
    grains = (stop - start) // GRAIN
    count = -(-(stop - start) // most)
    cuts = [start + grains * part // count * GRAIN for part in range(count + 1)] if count else []
    return list(itertools.pairwise(cuts))


def _lay(
    pieces: list[tuple[int, int]],
    state: str,
    role: Role,
    size: Callable[[int], int],
    tiers: list[Tier],
    buffers: Buffers,
    shared_by: int = -1,
) -> list[Region]:
    """Lay `pieces` one after the other in a buffer of the tier that each is for. `size`: bytes of so many elements."""
    totals: dict[Tier, int] = {"host": 0, "ssd": 0, "device": 0}
    places: list[tuple[Tier, int, int]] = []
    for (start, stop), tier in zip(pieces, tiers, strict=True):
        begin = totals[tier]
        totals[tier] += size(stop - start)
        places.append((tier, begin, totals[tier]))
    made = {
        tier: buffers.get(f"{role}/{state}/{tier}", tier, total, role, shared_by=shared_by if tier == "host" else -1)
        for tier, total in totals.items()
        if total
    }
    return [Region(made[tier], begin, end) for tier, begin, end in places]
