"""Forms: the seconds and bytes of a step, as linear forms of everything that may be chosen, scaled for a solver.

Owns the seconds of a stage on each resource (GreedySnake 4.5). It knows no limits and nothing that is decided, so that
one set of forms serves every program on the same work.
"""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from ssdplan.plans.documents.plan import SavedTier, ScheduleName
from ssdplan.plans.documents.profile import (
    Machine,
    Model,
    Rung,
)
from ssdplan.plans.documents.rates import device_update_rate, perturb_seconds, rows_rates, update_rate, updated_bytes
from ssdplan.plans.documents.state_layout import GRADIENT_BYTES, OptimizerFormats, checkpoint_bytes

from ..predict.drive import combined_frontier, hull_edges, io_cores, unsummed_io_cores
from . import saved, zeroth_order
from .horizontal import HORIZONTAL
from .stages import LayerGroup, Stage, Work
from .traffic import VERTICAL, Traffic, device_bytes, layer_groups, total_bytes, without_links
from .variables import (
    CHECKPOINTS_ON_DEVICE,
    CHECKPOINTS_ON_HOST,
    CONSTANT,
    Linear,
    Variable,
    is_constant,
    saved_by,
    seconds_of_stage,
    variables_of,
)
from .zeroth_order import ZEROTH_ORDER

TRAFFIC: dict[ScheduleName, Traffic] = {
    "vertical": VERTICAL,
    "horizontal": HORIZONTAL,
    "zeroth-order": ZEROTH_ORDER,
}
REMEMBERED = 16
"""Forms that are kept for the next program on the same work."""


@dataclass(frozen=True, slots=True)
class StageRow:
    """What one kind of stage takes of one resource. The stage takes at least as long."""

    stage: int
    """Its number in `Forms.stages`."""
    resource: str
    seconds: Linear
    """In the stage's unit, not constant."""

    @property
    def variable(self) -> Variable:
        """The stage's own seconds, which are at least these."""
        return seconds_of_stage(self.stage)


class Forms:
    """The forms of a step.

    The time of a stage is counted in multiples of what its constant work takes when the device keeps nothing (see
    `_unit`), a step in multiples of their sum, and bytes in multiples of what there is to move or keep.
    """

    def __init__(self, model: Model, machine: Machine, work: Work) -> None:
        self.work = work
        groups, of = layer_groups(model, work.ranks), TRAFFIC[work.schedule]
        size, n, states = work.micro_batch_size, work.micro_batches, work.formats
        turning, others = set[str](), set[str]()
        for group in groups:
            kind = turning if group.role == "block" and group.backward else others
            kind.update(use.state_class for use in group.uses)
        self.turning = turning - others
        """Classes of blocks' states that run backward, and so can be kept from forward to backward."""
        updated = work.zeroth_order is None
        self.frozen = frozenset(state.state_class for state in model.states if state.frozen or not updated)
        """Classes whose states have parameters alone."""
        self.classes = tuple(dict.fromkeys(state.state_class for state in model.states))
        self.by_rows = zeroth_order.class_by_rows(model, work)
        """The class of the table that comes by rows, and lives on host whole."""
        on_device = {variable for name in self.classes for variable in variables_of(name).on_device}
        every = of.stages(model, groups, work)
        if work.unified_memory:
            every = tuple(without_links(stage) for stage in every)
        self.saved = _saved(model, groups, size, work.saves)
        absent = {each for group in groups for each in _shares(model, group, size, saved.TIERS)}
        absent -= {share for shares in self.saved.values() for _, share in shares}
        if not work.keeps:
            absent |= {variable for name in self.classes for variable in variables_of(name).on_device}
        if not work.updates_on_device:
            absent |= {variable for name in self.classes for variable in variables_of(name).updated_there}
        if not work.checkpoints_on_device:
            absent.add(CHECKPOINTS_ON_DEVICE)
        self.stages = tuple(_without(stage, absent) for stage in every) if absent else every
        self.device_bytes = _less(device_bytes(model, groups, work), absent - on_device)
        self.host_bytes = of.host_bytes(model, groups, work)
        if work.unified_memory:
            self.host_bytes = _sum(self.host_bytes, self.device_bytes)
        self.host_bytes = _less(self.host_bytes, absent - on_device)
        self.store_bytes = _less(of.ssd_bytes(model, groups, work), absent - on_device)
        self.read_bytes = total_bytes(self.stages, "read")
        self.write_bytes = total_bytes(self.stages, "write")
        masters = work.zeroth_order is not None and work.zeroth_order.masters
        updates_there = device_update_rate(machine, states) if work.updates_on_device else None
        self.times = _Times(machine, self.classes, states, updates_there, masters=masters).of(self.stages)
        least = [
            max((form.get(CONSTANT, 0.0) for _, form in resources if is_constant(form)), default=0.0)
            for resources in self.times
        ]
        units = [_unit([form for _, form in resources]) for resources in self.times]
        self.unit = sum(stage.count * unit for stage, unit in zip(self.stages, units, strict=True))
        """Seconds that a step is counted in."""
        self.least_seconds: dict[Variable, float] = {
            seconds_of_stage(number): seconds / unit
            for number, (seconds, unit) in enumerate(zip(least, units, strict=True))
        }
        """The variable of each stage's seconds -> its constant work."""
        self.seconds: Linear = {
            seconds_of_stage(number): stage.count * unit / self.unit
            for number, (stage, unit) in enumerate(zip(self.stages, units, strict=True))
        }
        """A step's seconds."""
        self.stage_rows = [
            StageRow(number, resource, {variable: factor / unit for variable, factor in form.items()})
            for number, (resources, unit) in enumerate(zip(self.times, units, strict=True))
            for resource, form in resources
            if not is_constant(form)  # constant work is in the least already
        ]
        self.reclaimed = _reclaimed(groups, n * checkpoint_bytes(model, size)) if updated else []
        """Forms that are at most 0: delayed gradients that lie where consumed activation checkpoints were, less these.
        One for each kind of layer that has gradients."""


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

    def __init__(
        self,
        machine: Machine,
        classes: Sequence[str],
        formats: OptimizerFormats,
        on_device: float | None,
        *,
        masters: bool,
    ) -> None:
        """`on_device`: elements a second that the device updates, if it does."""
        self.machine, self.rate, self.on_device = machine, update_rate(machine, formats), on_device
        self.masters = masters
        """Zeroth-order passes are over masters."""
        self.updated_bytes = updated_bytes(formats)
        frontier = combined_frontier(machine.volumes)
        self.edges = hull_edges(frontier)
        full = (frontier[0][0], frontier[-1][1])
        self.io_core_seconds, self.unsummed_core_seconds = (
            tuple(cores / bandwidth for cores, bandwidth in zip(each(machine.volumes), full, strict=True))
            for each in (io_cores, unsummed_io_cores)
        )
        """Of a core, that a byte read and a byte written take; and one of states that an update sums in passing."""
        there = machine.network
        self._network_cores = (1 - (there.compute_kept or 1.0)) / (there.kept_beside_compute or 1.0) if there else 0.0
        """Of all cores, that a second of collectives takes."""
        self.passing = {variable for name in classes for variable in variables_of(name).optimizer.on_ssd}
        """Optimizer states on ssd: they pass through an update, which sums them itself."""

    def of(self, stages: Sequence[Stage]) -> list[list[tuple[str, Linear]]]:
        return [self._times(stage) for stage in stages]

    def _times(self, stage: Stage) -> list[tuple[str, Linear]]:
        """Resource -> seconds of a stage, as linear forms; the stage takes at least each of them."""
        machine = self.machine
        h2d = _scaled(stage.h2d_bytes, 1 / machine.h2d_bandwidth)
        d2h = _scaled(stage.d2h_bytes, 1 / machine.d2h_bandwidth)
        updates = {variable: factor / self.rate for variable, factor in stage.updates.items() if factor}
        if stage.matrices:
            updates = _sum(updates, _scaled(stage.matrices, -1 / self.rate), stage.matrix_seconds)
        if machine.checksum_rate is not None:
            passing = {variable: read for variable, read in stage.read_bytes.items() if variable in self.passing}
            updates = _sum(updates, _scaled(passing, 1 / machine.checksum_rate))
        if stage.on_host or stage.taken:
            rates = rows_rates(machine)
            assert rates is not None, "a table by rows on a machine where nobody measured what host does for it"
            updates = _sum(updates, {CONSTANT: stage.on_host / rates[0] + stage.taken / rates[1]})
        compute = stage.compute_seconds
        if self.on_device and stage.device_updates:
            compute = _sum(compute, _scaled(stage.device_updates, 1 / self.on_device))
        if stage.device_matrix_seconds:
            compute = _sum(compute, stage.device_matrix_seconds)
        if stage.perturbed or stage.pending:
            passes = perturb_seconds(machine, stage.perturbed, copies=True, pending=0.0, masters=self.masters)
            each = perturb_seconds(machine, 1.0, copies=False, pending=1.0, masters=self.masters)
            compute = _sum(compute, {CONSTANT: passes}, _scaled(stage.pending, each))
        network: Linear = {}
        if stage.collectives:
            there = machine.network
            assert there is not None, "several ranks on a machine whose network nobody measured"
            exchanged = stage.exchanged / there.exchange_bandwidth + stage.added / there.add_rate
            fixed = exchanged + stage.collectives * there.latency_seconds
            network = _sum(_scaled(stage.gathered, 1 / there.gather_bandwidth), {CONSTANT: fixed})
        times: list[tuple[str, Linear]] = [("compute", compute), ("h2d", h2d), ("d2h", d2h)]
        if network:
            times.append(("network", network))
        if machine.compute_shares_cpu:
            # Compute and updates want every core, a copy wants one.
            copies = [_scaled(link, 1 / machine.cores) for link in (h2d, d2h)]
            moves = zip(
                (stage.read_bytes, stage.write_bytes), self.io_core_seconds, self.unsummed_core_seconds, strict=True
            )
            drives = [
                {
                    variable: factor * (unsummed if variable in self.passing else summed) / machine.cores
                    for variable, factor in moved.items()
                }
                for moved, summed, unsummed in moves
                if summed or unsummed
            ]
            times.append(("cores", _sum(compute, updates, *copies, *drives, _scaled(network, self._network_cores))))
        elif updates:
            times.append(("cpu", updates))
        if machine.dram_bandwidth:
            moved = _sum(stage.read_bytes, stage.write_bytes, stage.h2d_bytes, stage.d2h_bytes)
            moved = _sum(moved, _scaled(stage.updates, self.updated_bytes))
            times.append(("dram", _scaled(moved, 1 / machine.dram_bandwidth)))
        for a, b in self.edges:
            form = _sum(_scaled(stage.read_bytes, a), _scaled(stage.write_bytes, b))
            if form:
                times.append(("ssd", form))
        return times


def _reclaimed(groups: tuple[LayerGroup, ...], checkpoints: int) -> list[Linear]:
    """A layer's delayed gradients take the place of its own resident activation checkpoints, at most.

    Each form is counted in multiples of the layer's gradients. `checkpoints`: bytes of a layer's.
    """
    forms: list[Linear] = []
    for group in groups:
        unit = GRADIENT_BYTES * sum(use.elements for use in group.uses if not use.frozen)
        if not unit:
            continue
        form: dict[Variable, float] = {CHECKPOINTS_ON_HOST: -checkpoints / unit} if group.role == "block" else {}
        for use in group.uses:
            reclaimed = variables_of(use.state_class).gradient_reclaimed
            form[reclaimed] = form.get(reclaimed, 0.0) + GRADIENT_BYTES * use.elements / unit
        forms.append(form)
    return forms


def _saved(
    model: Model, groups: tuple[LayerGroup, ...], micro_batch_size: int, tiers: Sequence[SavedTier]
) -> dict[str, list[tuple[Rung, Variable]]]:
    """Class of blocks -> every way in which they may save activations."""
    found: dict[str, list[tuple[Rung, Variable]]] = {}
    for group in groups:
        if group.layer_class not in found and (shares := _shares(model, group, micro_batch_size, tiers)):
            rungs = {rung.name: rung for rung in model.timing(group.layer_class, micro_batch_size).rungs}
            found[group.layer_class] = [(rungs[share.rung], share) for share in shares]
    return found


def _shares(model: Model, group: LayerGroup, micro_batch_size: int, tiers: Sequence[SavedTier]) -> list[Variable]:
    rungs = saved.rungs_of(group, model.timing(group.layer_class, micro_batch_size))
    return [saved_by(group.layer_class, rung.name, tier) for rung in rungs for tier in tiers]


def _without(stage: Stage, absent: Set[Variable]) -> Stage:
    """`stage` without variables that a program does not have."""
    return replace(
        stage,
        read_bytes=_less(stage.read_bytes, absent),
        write_bytes=_less(stage.write_bytes, absent),
        h2d_bytes=_less(stage.h2d_bytes, absent),
        d2h_bytes=_less(stage.d2h_bytes, absent),
        compute_seconds=_less(stage.compute_seconds, absent),
        updates=_less(stage.updates, absent),
        device_updates=_less(stage.device_updates, absent),
        matrices=_less(stage.matrices, absent),
        matrix_seconds=_less(stage.matrix_seconds, absent),
        device_matrix_seconds=_less(stage.device_matrix_seconds, absent),
        pending=_less(stage.pending, absent),
        gathered=_less(stage.gathered, absent),
    )


def _less(form: Linear, absent: Set[Variable]) -> Linear:
    return {variable: factor for variable, factor in form.items() if variable not in absent}


def _unit(forms: Sequence[Linear]) -> float:
    """Seconds that a stage is counted in: its constant work, or where there is none all that it could have to do."""
    constant = max(form.get(CONSTANT, 0.0) for form in forms)
    return constant or max(sum(factor for factor in form.values() if factor > 0) for form in forms) or 1.0


def _scaled(form: Linear, factor: float) -> dict[Variable, float]:
    return {variable: factor * each for variable, each in form.items()}


def _sum(*forms: Linear) -> dict[Variable, float]:
    total: dict[Variable, float] = {}
    for form in forms:
        for variable, factor in form.items():
            total[variable] = total.get(variable, 0.0) + factor
    return total
