"""What a step takes of a machine, as linear forms of everything that may be chosen, scaled for a solver.

Owns the seconds of a stage on each resource (GreedySnake 4.5). It knows no limits and nothing that is decided, so that
one set of forms serves every program on the same work.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import not_
from typing import Literal

from ssdplan.plans.profile import Machine, Model, update_rate
from ssdplan.plans.state_layout import GRADIENT_BYTES, OptimizerStates, checkpoint_bytes

from . import horizontal
from . import traffic as vertical
from .drive import combined_frontier, hull_edges, io_cores, unsummed_io_cores
from .lexicographic import Linear, Row
from .traffic import (
    CHECKPOINT_HOST,
    LayerGroup,
    Stage,
    device_bytes,
    layer_groups,
    total_bytes,
    variables_of,
    without_links,
)

TRAFFIC = {"vertical": vertical, "horizontal": horizontal}
"""Schedule -> what its stages move, and what it keeps."""
REMEMBERED = 16
"""Forms that are kept for the next program on the same work."""


@dataclass(frozen=True, slots=True)
class Work:
    """All that forms depend on beside model and machine."""

    micro_batch_size: int
    micro_batches: int
    schedule: Literal["vertical", "horizontal"]
    optimizer_states: OptimizerStates
    unified_memory: bool
    keeps: bool
    """The device may keep parameters between their uses."""


class Forms:
    """The forms of a step.

    The time of a stage is counted in multiples of what its constant work takes when the device keeps nothing (see
    `_scale`), a step in multiples of their sum, and bytes in multiples of what there is to move or keep.
    """

    def __init__(self, model: Model, machine: Machine, work: Work) -> None:
        groups, of = layer_groups(model), TRAFFIC[work.schedule]
        size, n, states = work.micro_batch_size, work.micro_batches, work.optimizer_states
        turning = [group.role == "block" and group.backward for group in groups]
        classes = [{use.state_class for use in group.uses} for group in groups]
        self.turning = set().union(*compress(classes, turning)).difference(*compress(classes, map(not_, turning)))
        """Classes of blocks' states that run backward, and so can be kept from forward to backward."""
        self.frozen = frozenset(state.state_class for state in model.states if state.frozen)
        self.classes = tuple(dict.fromkeys(state.state_class for state in model.states))
        self.largest: dict[str, int] = {}
        """State class -> the elements of its largest state."""
        for state in model.states:
            self.largest[state.state_class] = max(self.largest.get(state.state_class, 0), state.elements)
        every = of.stages(model, groups, size, n, states)
        if work.unified_memory:
            every = tuple(without_links(stage) for stage in every)
        self.stages = every if work.keeps else tuple(_keeping_nothing(stage, self.classes) for stage in every)
        self.device_bytes = device_bytes(model, groups)
        self.host_bytes = of.host_bytes(model, groups, size, n, states)
        if work.unified_memory:
            self.host_bytes = _sum(self.host_bytes, self.device_bytes)
        self.store_bytes = of.ssd_bytes(model, groups, size, n, states)
        self.read_bytes = total_bytes(self.stages, "read")
        self.write_bytes = total_bytes(self.stages, "write")
        self.times = _Times(machine, self.classes, states).of(self.stages)
        least = [max(form.get("", 0.0) for _, form in each if set(form) <= {""}) for each in self.times]
        scales = [_scale([form for _, form in each]) for each in self.times]
        self.unit = sum(stage.count * seconds for stage, seconds in zip(self.stages, scales, strict=True))
        """Seconds that a step is counted in."""
        self.least_seconds = {
            _seconds_of(number): seconds / scale
            for number, (seconds, scale) in enumerate(zip(least, scales, strict=True))
        }
        """The variable of each stage's time -> its constant work."""
        self.seconds: Linear = {
            _seconds_of(number): stage.count * seconds / self.unit
            for number, (stage, seconds) in enumerate(zip(self.stages, scales, strict=True))
        }
        """Of a step."""
        self.stage_rows = [
            Row({name: factor / scale for name, factor in form.items()} | {_seconds_of(number): -1.0}, "<=")
            for number, (each, scale) in enumerate(zip(self.times, scales, strict=True))
            for _, form in each
            if not set(form) <= {""}  # constant work is in the least already
        ]
        """A stage takes at least as long as each of its resources."""
        self.reclaimed_rows = _reclaimed(groups, n * checkpoint_bytes(model, size))


def forms_of(model: Model, machine: Machine, work: Work) -> Forms:
    """The forms of the very same model, machine and work, of which the last few are kept."""
    for known, on, what, forms in _remembered:
        if known is model and on is machine and what == work:
            return forms
    forms = Forms(model, machine, work)
    _remembered.append((model, machine, work, forms))
    return forms


_remembered: deque[tuple[Model, Machine, Work, Forms]] = deque(maxlen=REMEMBERED)


class _Times:
    """Seconds of stages on one machine."""

    def __init__(self, machine: Machine, classes: Sequence[str], optimizer_states: OptimizerStates) -> None:
        self.machine, self.rate = machine, update_rate(machine, optimizer_states)
        frontier = combined_frontier(machine.volumes)
        self.edges = hull_edges(frontier)
        full = (frontier[0][0], frontier[-1][1])
        self.io_core_seconds, self.unsummed_core_seconds = (
            tuple(cores / bandwidth for cores, bandwidth in zip(each(machine.volumes), full, strict=True))
            for each in (io_cores, unsummed_io_cores)
        )
        """Of a core, that a byte read and a byte written take; and one of states that an update sums in passing."""
        self.passing = {variable for name in classes for variable in variables_of(name).optimizer[1::2]}
        """Of optimizer states on ssd."""

    def of(self, stages: Sequence[Stage]) -> list[list[tuple[str, Linear]]]:
        return [self._times(stage) for stage in stages]

    def _times(self, stage: Stage) -> list[tuple[str, Linear]]:
        """Resource -> seconds of a stage, as linear forms; the stage takes at least each of them."""
        machine = self.machine
        h2d = _scaled(stage.h2d_bytes, 1 / machine.h2d_bandwidth)
        d2h = _scaled(stage.d2h_bytes, 1 / machine.d2h_bandwidth)
        updates = {name: factor / self.rate for name, factor in stage.updates.items() if factor}
        if machine.checksum_rate is not None:
            passing = {name: factor for name, factor in stage.read_bytes.items() if name in self.passing}
            updates = _sum(updates, _scaled(passing, 1 / machine.checksum_rate))
        times: list[tuple[str, Linear]] = [("compute", {"": stage.compute_seconds}), ("h2d", h2d), ("d2h", d2h)]
        if machine.compute_shares_cpu:
            # Compute and updates want every core, a copy wants one.
            copies = [_scaled(link, 1 / machine.cores) for link in (h2d, d2h)]
            moves = zip(
                (stage.read_bytes, stage.write_bytes), self.io_core_seconds, self.unsummed_core_seconds, strict=True
            )
            drives = [
                {
                    name: factor * (unsummed if name in self.passing else summed) / machine.cores
                    for name, factor in moved.items()
                }
                for moved, summed, unsummed in moves
                if summed or unsummed
            ]
            times.append(("cores", _sum({"": stage.compute_seconds}, updates, *copies, *drives)))
        elif updates:
            times.append(("cpu", updates))
        for a, b in self.edges:
            form = _sum(_scaled(stage.read_bytes, a), _scaled(stage.write_bytes, b))
            if form:
                times.append(("ssd", form))
        return times


def _reclaimed(groups: tuple[LayerGroup, ...], checkpoints: int) -> list[Row]:
    """A layer's delayed gradients take the place of its own resident checkpoints, at most."""
    rows = []
    for group in groups:
        scale = GRADIENT_BYTES * sum(use.elements for use in group.uses if not use.frozen)
        if not scale:
            continue
        terms: dict[str, float] = {CHECKPOINT_HOST: -checkpoints / scale} if group.role == "block" else {}
        for use in group.uses:
            reclaimed = variables_of(use.state_class).gradient[0]
            terms[reclaimed] = terms.get(reclaimed, 0.0) + GRADIENT_BYTES * use.elements / scale
        rows.append(Row(terms, "<="))
    return rows


def _keeping_nothing(stage: Stage, classes: tuple[str, ...]) -> Stage:
    """`stage` without the variables of what the device keeps between uses."""
    absent = {name for each in map(variables_of, classes) for name in (*each.device, *each.turn)}

    def without(form: Linear) -> Linear:
        return {name: factor for name, factor in form.items() if name not in absent}

    return replace(
        stage,
        read_bytes=without(stage.read_bytes),
        write_bytes=without(stage.write_bytes),
        h2d_bytes=without(stage.h2d_bytes),
        d2h_bytes=without(stage.d2h_bytes),
    )


def _scale(forms: Sequence[Linear]) -> float:
    """Seconds that a stage is counted in: its constant work, or where there is none all that it could have to do."""
    constant = max(form.get("", 0.0) for form in forms)
    return constant or max(sum(factor for factor in form.values() if factor > 0) for form in forms) or 1.0


def _scaled(form: Linear, factor: float) -> dict[str, float]:
    return {name: factor * each for name, each in form.items()}


def _sum(*forms: Linear) -> dict[str, float]:
    total: dict[str, float] = {}
    for form in forms:
        for name, factor in form.items():
            total[name] = total.get(name, 0.0) + factor
    return total


def _seconds_of(number: int) -> str:
    return f"seconds of stage {number}"
