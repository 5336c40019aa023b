"""Sensitivity: what a little more of each thing that a plan depends on would bring.

Owns the units that people buy. A dual is the slope of the optimum at a point, and a drive is far from it on most
machines. So the program is solved again on each changed machine. Where that promises something, the plan's own step is
simulated there, on shortened models: it says what a step waits for that the program does not see, and what the program
makes of the plan's batch, with whole states, is lengthened by as much. Where that is a very different plan, it is
simulated itself.
"""

from dataclasses import dataclass, field, replace

from ssdplan.plans.documents.matrices import longer
from ssdplan.plans.documents.plan import Decision, Prediction, Sensitivity
from ssdplan.plans.documents.profile import Machine, Model, Network
from ssdplan.plans.documents.state_layout import OPTIMIZER_FORMATS
from ssdplan.plans.graph.ops import Schedule
from ssdplan.plans.units import format_bytes

from ..fit.budgets import Candidate, Needs
from ..fit.fit import Fitter
from ..fit.found import Branch, Sketch, Solved
from ..fit.whole import bound_of
from ..predict.drive import combined_frontier
from ..predict.shortened import step_seconds
from ..program.choices import FixedChoices
from ..program.program import Bound, placed_seconds, program_bound

GIB = 1 << 30
MOST_HOST_MEMORY, MORE_DEVICE_MEMORY = 16 * GIB, 8 * GIB
PROMISING = 5e-3
"""Of the program's tokens a second: what a change has to promise for the batch to be placed anew."""
WAITING = 1.03
"""A step that takes longer than the program's by this factor waits for what the program does not see: there any faster
part may bring something, and the plan's own step is simulated with each."""
UNLIKE, MUCH = 0.97, 0.25
"""Of the program's seconds of the plan as it is, and of tokens a second. A batch that takes less when it is placed anew
for a change that promises so much has so different a plan that it waits for other things: that plan is simulated, as it
is where the plan as it is waits for much."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One unit more of a resource, in words, and the step's circumstances with it."""

    resource: str
    unit: str
    words: str
    model: Model
    machine: Machine
    branch: Branch
    """What the program is given."""
    budget: Needs
    fixed: FixedChoices
    """Of the search."""
    tokens: float = 1.0
    """Of a step with it, to those without."""
    same: bool = True
    """Whether the plan's own schedule could be run so."""
    larger: tuple[Candidate, ...] = field(default=())
    """Candidates of the same batch that fit only so."""


OF_CORES = ("read_cores", "write_cores", "read_cores_unsummed", "write_cores_unsummed")
"""Of a volume: what its full bandwidth takes of the cores."""
OF_UPDATES = ("update rate",)
"""What is of no use without gradients."""


def sensitivities(fitter: Fitter, solved: Solved, prediction: Prediction) -> tuple[Sensitivity, ...]:
    """One row for each thing that one could buy, for the plan of `solved` with its `prediction`; negative seconds are
    saved ones. Of an emulated machine sizes and bandwidths are the workstation's, seconds the stand-in's."""
    own = _Own(fitter, solved, prediction)
    rows = []
    for change in _changes(fitter, solved):
        gain = own.gain(change)
        rows.append(
            Sensitivity(
                resource=change.resource,
                unit=change.unit,
                seconds_per_unit=prediction.step_seconds * (change.tokens / (1 + gain) - 1),
                throughput_gain=gain,
                words=change.words,
            )
        )
    return tuple(rows)


class _Own:
    """A plan, beside which changes are held."""

    def __init__(self, fitter: Fitter, solved: Solved, prediction: Prediction) -> None:
        self.fitter, self.solved, self.candidate = fitter, solved, solved.fitted.candidate
        self.bound = self._bound(fitter.model, fitter.machine, self.candidate, solved.branch)
        self.waits = prediction.step_seconds > WAITING * solved.program.seconds
        self._built: list[tuple[Model, Decision, Schedule]] = []
        self._seconds: float | None = None

    def gain(self, change: _Change) -> float:
        """The share of tokens a second that a change brings."""
        changed = _changed(self.fitter, change)
        promised = self._promised(change, changed)
        placed_anew = promised >= PROMISING
        if self.solved.fitted.decision.zeroth_order or not (placed_anew or (self.waits and change.same)):
            return promised
        kept, drain = self.seconds, self.seconds / self.solved.program.seconds
        if change.same and (change.model, change.machine) != (self.fitter.model, self.fitter.machine):
            kept = self._simulated(change.model, change.machine)
            drain = kept / placed_seconds(change.model, change.machine, self.solved.program)
        # No part that is better has to be used: where the order of a step's operations happens to make it longer.
        found = [kept, self.seconds] if change.same else []
        if placed_anew:
            part = change.same and not self._more_memory(change)
            longer = self.lean if part else 1.0
            own, *larger = (drain * longer * seconds for seconds in self._placed_anew(change, changed))
            unlike = promised >= MUCH and (own < UNLIKE * kept or drain > WAITING)
            if part and longer < WAITING and unlike:
                own = self._sketched(change, changed) or own
            found += [own, *larger]
        return change.tokens * self.seconds / min(found) - 1

    @property
    def seconds(self) -> float:
        """Of the plan's step, by shortened models."""
        if self._seconds is None:
            self._seconds = self._simulated(self.fitter.model, self.fitter.machine)
        return self._seconds

    @property
    def lean(self) -> float:
        """The program's seconds of the plan over those of the best placement. They are more than 1 where memory is so
        scarce that the leanest plan was taken. A faster part does not bring back what is lost so; memory may."""
        best = self.fitter.seconds(self.candidate, self.solved.branch)
        return max(self.solved.program.seconds / best, 1.0)

    def _more_memory(self, change: _Change) -> bool:
        """Whether more stays on host or on the device with a change."""
        there, now = change.budget, self.fitter.budget
        return (there.host, there.device) != (now.host, now.device)

    def _promised(self, change: _Change, changed: Fitter) -> float:
        """The share that the program says, which knows neither fill nor drain nor whole states."""
        ways = self._ways(change, changed)
        bounds = (self._bound(change.model, change.machine, *way) for way in ways)
        found = [bound for bound in bounds if bound is not None]
        assert found and self.bound is not None, "more of something has made a program infeasible"
        return change.tokens * self.bound / min(found) - 1

    def _placed_anew(self, change: _Change, changed: Fitter) -> list[float]:
        """The program's seconds with a change, with whole states, by each way to cut the plan's batch."""
        return [changed.seconds(*way) for way in self._ways(change, changed)]

    def _ways(self, change: _Change, changed: Fitter) -> list[tuple[Candidate, Branch]]:
        """The plan's own cut of its batch, and what fits only with a change."""
        larger = [(larger, branch) for larger in change.larger for branch in changed.branches(larger)]
        return [(self.candidate, change.branch), *larger]

    def _sketched(self, change: _Change, changed: Fitter) -> float | None:
        """A step of what fits of the plan's batch with a change, as `solve` finds it: what the program says, or what
        keeps all on the device; None where neither is found so."""
        branches = changed.branches(self.candidate)
        ways = changed.sketch(self.candidate, branches), changed.resident_sketch(self.candidate, branches)
        return min((self._hastened(change, changed, way) for way in ways if way), default=None)

    def _hastened(self, change: _Change, changed: Fitter, sketch: Sketch) -> float:
        """A step of `sketch`; where that waits for chunks, also at a pace that may hide more. Such a pace may take a
        little more memory. The placement is taken to stay as it is."""
        decisions = sketch.decision, changed.paces.hastier.of(sketch.decision)
        ways = (step_seconds(change.model, change.machine, each, changed.builder.schedule) for each in decisions)
        seconds = next(ways)
        return min(seconds, next(ways)) if seconds > WAITING * sketch.program.seconds else seconds

    def _bound(self, model: Model, machine: Machine, candidate: Candidate, branch: Branch) -> float | None:
        """The program's seconds, as `bound_of` says."""

        def bound(way: Branch) -> Bound | None:
            return program_bound(
                model,
                machine,
                micro_batch_size=candidate.micro_batch_size,
                micro_batches=candidate.micro_batches,
                limits=way.limits,
                fixed=way.fixed,
            )

        found = bound_of(branch, bound)
        return found.seconds if found else None

    def _simulated(self, model: Model, machine: Machine) -> float:
        """A step of the plan as it is."""
        return step_seconds(model, machine, self.solved.fitted.decision, self._build)

    def _build(self, model: Model, decision: Decision) -> Schedule:
        """The schedule of the plan for a shortened model: no rate changes it, so each is built once."""
        same = model.model_copy(update={"classes": self.fitter.model.classes})
        for known, decided, schedule in self._built:
            if len(known.layers) == len(same.layers) and decided == decision:
                return schedule
        self._built.append((same, decision, self.fitter.builder.schedule(same, decision)))
        return self._built[-1][2]


def _changed(fitter: Fitter, change: _Change) -> Fitter:
    """The fitter of a plan with a change: what passes through memory depends neither on rates nor on what the device
    has, but on formats and shares."""
    alike = change.fixed == fitter.fixed
    return Fitter(change.model, change.machine, change.budget, change.fixed, fitter.pipelines if alike else None)


def _changes(fitter: Fitter, solved: Solved) -> list[_Change]:
    model, machine, branch = fitter.model, fitter.machine, solved.branch
    part, slower = (machine.emulation.smaller**2, machine.emulation.slower) if machine.emulation else (1, 1.0)
    host_there, gpu = more_host_memory(fitter.budget.host * part), "a device" if machine.compute_shares_cpu else "a GPU"
    host, device = host_there // part, MORE_DEVICE_MEMORY // part
    faster = "compute" if branch.fixed.unified_memory else gpu
    one = len(machine.volumes) == 1
    space = branch.limits.ssd_bytes
    more_drives = replace(branch, limits=replace(branch.limits, ssd_bytes=None if space is None else 2 * space))
    read = combined_frontier(machine.volumes)[0][0] * part * slower
    link = {"h2d_bandwidth": 2 * machine.h2d_bandwidth, "d2h_bandwidth": 2 * machine.d2h_bandwidth}
    plain = _Change("", "", "", model, machine, branch, fitter.budget, fitter.fixed)
    there = branch.limits.device_bytes
    wider = replace(branch.limits, device_bytes=there if there is None else there + device)
    changes = [
        replace(
            plain,
            resource="host memory",
            unit=format_bytes(host_there),
            words=f"{format_bytes(host_there)} more host memory",
            branch=replace(branch, limits=replace(branch.limits, host_bytes=branch.limits.host_bytes + host)),
            budget=replace(fitter.budget, host=fitter.budget.host + host),
        ),
        _with_larger(
            fitter,
            solved,
            replace(
                plain,
                resource="device memory",
                unit=format_bytes(MORE_DEVICE_MEMORY),
                words=f"{format_bytes(MORE_DEVICE_MEMORY)} more device memory",
                branch=replace(branch, limits=wider),
                budget=replace(fitter.budget, device=fitter.budget.device + device),
            ),
        ),
        replace(
            plain,
            resource="drives",
            unit="2x",
            words="a second SSD like the first" if one else "twice as many SSDs, with lanes of their own",
            machine=_faster_drives(machine, 2.0),
            branch=more_drives,
            budget=replace(fitter.budget, ssd=2 * fitter.budget.ssd),
        ),
        replace(
            plain,
            resource="ssd bandwidth",
            unit="GB/s",
            words=f"{'an SSD' if one else 'SSDs'} 1 GB/s faster",
            machine=_faster_drives(machine, (read + 1e9) / read),
        ),
        replace(
            plain, resource="compute", unit="2x", words=f"{faster} twice as fast", model=scaled_compute(model, 0.5)
        ),
        replace(
            plain, resource="link", unit="2x", words="a link twice as fast", machine=machine.model_copy(update=link)
        ),
        replace(
            plain,
            resource="update rate",
            unit="2x",
            words="updates twice as fast" if machine.compute_shares_cpu else "twice the cores for updates",
            machine=_faster_updates(machine, 2.0),
            model=_faster_matrices(model, 2.0),
        ),
    ]
    if branch.fixed.formats.moments == "fp32" and not branch.fixed.zeroth_order and not model.muon:
        halved = OPTIMIZER_FORMATS[branch.fixed.formats.masters, "bf16"]
        changes.append(
            replace(
                plain,
                resource="optimizer states in bf16",
                unit="instead of fp32",
                words="both moments in bf16 (--optimizer-states bf16)",
                branch=replace(branch, fixed=replace(branch.fixed, formats=halved)),
                fixed=replace(fitter.fixed, formats=halved),
                same=False,
            )
        )
    if machine.network and branch.fixed.ranks > 1:
        ranks = branch.fixed.ranks + 1
        changes += [
            replace(
                plain,
                resource="network",
                unit="2x",
                words="a network twice as fast",
                machine=_faster_network(machine, machine.network, 2.0),
            ),
            replace(
                plain,
                resource="ranks",
                unit="rank",
                words="another rank like these",
                machine=machine.model_copy(update={"network": machine.network.model_copy(update={"ranks": ranks})}),
                branch=replace(branch, fixed=replace(branch.fixed, ranks=ranks)),
                fixed=replace(fitter.fixed, ranks=ranks),
                tokens=ranks / branch.fixed.ranks,
                same=False,
            ),
        ]
    without: tuple[str, ...] = ("network",) if branch.fixed.shares == 1 else ()
    without += OF_UPDATES if branch.fixed.zeroth_order else ()
    without += ("device memory", "link") if branch.fixed.unified_memory else ()
    return [change for change in changes if change.resource not in without]


def _with_larger(fitter: Fitter, solved: Solved, change: _Change) -> _Change:
    """`change` of the device's memory with each larger micro-batch that makes the same batch and fits only then."""
    candidate, richer = solved.fitted.candidate, _changed(fitter, change)
    sizes = [size for size in fitter.model.micro_batch_sizes if size > candidate.micro_batch_size]
    others = [Candidate(size, candidate.global_batch // size) for size in sizes if candidate.global_batch % size == 0]
    fitting = [other for other in others if richer.has_room(other) and not fitter.has_room(other)]
    return replace(change, larger=tuple(fitting))


def more_host_memory(budget: int) -> int:
    """What one would add to a host budget: a half of it, or less, as a power of two, and no more than 16 GiB."""
    return min(1 << max((budget // 2).bit_length() - 1, 0), MOST_HOST_MEMORY)


def scaled_compute(model: Model, factor: float) -> Model:
    """`model` on a device that takes `factor` times as long for every forward and backward, and its updates
    of matrices."""
    return model.model_copy(
        update={
            "classes": tuple(
                entry.model_copy(
                    update={
                        "timings": tuple(
                            timing.model_copy(
                                update={
                                    "forward_seconds": timing.forward_seconds * factor,
                                    "backward_seconds": timing.backward_seconds * factor,
                                    "forward_cold_seconds": timing.forward_cold_seconds * factor,
                                    "backward_cold_seconds": timing.backward_cold_seconds * factor,
                                    "rungs": tuple(rung.longer(factor, factor) for rung in timing.rungs),
                                }
                            )
                            for timing in entry.timings
                        )
                    }
                )
                for entry in model.classes
            ),
            "matrix_updates": longer(model.matrix_updates, 1.0, device=factor),
        }
    )


def _faster_network(machine: Machine, network: Network, factor: float) -> Machine:
    rates = {name: getattr(network, name) * factor for name in ("gather_bandwidth", "exchange_bandwidth")}
    return machine.model_copy(update={"network": network.model_copy(update=rates)})


def _faster_updates(machine: Machine, factor: float) -> Machine:
    """`machine` with a faster optimizer, whatever the format of its states."""
    names = ("update_rate", "update_rate_bf16", "update_rate_int8", "checksum_rate")
    rates = {name: getattr(machine, name) for name in names}
    return machine.model_copy(update={name: rate and rate * factor for name, rate in rates.items()})


def _faster_matrices(model: Model, factor: float) -> Model:
    """`model` with host's updates of matrices faster; the very same where it has none."""
    if not model.muon:
        return model
    return model.model_copy(update={"matrix_updates": longer(model.matrix_updates, 1 / factor)})


def _faster_drives(machine: Machine, factor: float) -> Machine:
    """`machine` with drives that do everything `factor` times as fast, and take as much of the cores for each byte."""

    def more(cores: float | None) -> float | None:
        return None if cores is None else cores * factor

    return machine.model_copy(
        update={
            "volumes": tuple(
                volume.model_copy(
                    update={
                        "frontier": tuple(
                            point.model_copy(update={"read": point.read * factor, "write": point.write * factor})
                            for point in volume.frontier
                        ),
                        **{name: more(getattr(volume, name)) for name in OF_CORES},
                    }
                )
                for volume in machine.volumes
            )
        }
    )
