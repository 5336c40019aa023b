"""Transit: estimates the bytes of the pipeline's buffers as a function of what the program decides.

Owns that estimate, from a few small schedules that are really built. It only leads the program to a good placement;
whether a decision keeps its budgets is read from its own schedule.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import Model
from ssdplan.plans.documents.state_layout import checkpoint_bytes
from ssdplan.plans.graph.contents import ROLES, Role
from ssdplan.plans.graph.ops import TIERS, Buffer, Schedule, Tier, Transfer
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.schedule.saved import saved_bytes
from ssdplan.plans.units import whole_pages

from ..predict.peaks import Peaks, predict_peaks, workspace_bytes
from ..program.choices import NO_BUFFERS, GradientBuffers
from .budgets import Candidate

SHARED: Literal["shared"] = "shared"
"""In place of a role: what slots of different stages save by sharing bytes, as negative bytes."""
BOOKKEEPING: Literal["bookkeeping"] = "bookkeeping"
"""In place of a role: what a run keeps of its operations, and loads weights through."""


@dataclass(frozen=True, slots=True)
class InTransit:
    """In place of a role: parameters of that class on their way."""

    state_class: str


Holder = Role | InTransit | Literal["shared", "bookkeeping"]
MEASURED = (1, 2, 6)
"""Numbers of micro-batches that are built; from two on everything grows linearly."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Bytes of buffers that follow each other in slots."""

    constant: float
    """On host, whatever the placement."""
    parameters: tuple[tuple[str, float], ...]
    """On host besides, for each class of states when all of its parameters live on ssd; in proportion to the fraction
    that does."""
    checkpoints: float
    """On host besides, when all activation checkpoints live on ssd; in proportion to the fraction that does."""
    device: float
    """The device's peak, without what is for the gradients below."""
    gradients: GradientBuffers = NO_BUFFERS
    """On host and on the device besides."""

    @property
    def host(self) -> float:
        """When all lives on ssd and host updates it."""
        parameters = sum(nbytes for _, nbytes in self.parameters)
        return self.constant + parameters + self.checkpoints + self.gradients.host

    @property
    def device_peak(self) -> float:
        """Of the device, when host updates all."""
        return self.device + self.gradients.device


@dataclass(frozen=True, slots=True)
class _Measured:
    """Of `Pipeline`, for micro-batches of the smallest size."""

    constant: float
    hidden: float
    """What passes between layers, on host whatever the placement; in proportion to a micro-batch, as `spilled` is."""
    parameters: tuple[tuple[str, float], ...]
    spilled: float
    """Of `Pipeline.checkpoints`."""
    device: float
    by_tokens: float
    """Of the device besides, in proportion to a micro-batch."""


class Pipelines:
    """Pipelines of one model at any micro-batch size and number of micro-batches."""

    def __init__(
        self,
        model: Model,
        short: Model,
        decide: Callable[[int, int, float, tuple[str, ...]], Decision],
        large: tuple[tuple[str, float], ...] = (),
    ) -> None:
        """`decide` gives the decision for a micro-batch size, n, fraction of activation checkpoints on host and
        classes of states that the device keeps and updates, with all else on ssd; `short` is the model that schedules
        are built of; `large` are those of `GradientBuffers`."""
        self.model, self.short, self.decide, self.large = model, short, decide, large
        self.size = min(model.micro_batch_sizes)
        self._layers = Counter(model.states[index].state_class for layer in model.layers for index in layer.states)
        """Class of states -> how many times layers have one of it."""
        self._measured: dict[tuple[int, float, tuple[str, ...]], dict[tuple[Tier, Holder], int]] = {}
        self._numbers: dict[tuple[int, bool, tuple[str, ...]], _Measured] = {}
        self._sized: dict[int, tuple[float, int]] = {}
        """Micro-batch size -> a checkpoint in proportion to one of the smallest size, and the workspace's bytes."""

    def at(self, candidate: Candidate, *, mixed: bool) -> Pipeline:
        """`mixed`: activation checkpoints may lie on host and on ssd; otherwise all on ssd, which takes fewer slots."""
        whole, gradients = self._pipeline(candidate, mixed=mixed, there=()), self.gradients
        return replace(
            whole,
            constant=whole.constant - gradients.host,
            device=whole.device - gradients.device,
            gradients=gradients,
        )

    def fits_device(self, candidate: Candidate, nbytes: float) -> bool:
        """Whether a device of so many bytes has room for the pipeline, by this estimate, which may be a little too
        much."""
        return self.at(candidate, mixed=False).device_peak <= nbytes

    @cached_property
    def gradients(self) -> GradientBuffers:
        """What there is not when the device keeps and updates `large`, their parameters in transit apart: with two
        micro-batches, for it does not depend on their number or size."""
        if not self.large:
            return NO_BUFFERS
        two, large = Candidate(self.size, MEASURED[1]), tuple(name for name, _ in self.large)
        without, there = (self._pipeline(two, mixed=False, there=each) for each in ((), large))
        in_transit = sum(nbytes for name, nbytes in without.parameters if name in large)
        spared = max(without.host - in_transit - there.host, 0.0)
        return GradientBuffers(self.large, spared, max(without.device - there.device, 0.0))

    def _pipeline(self, candidate: Candidate, *, mixed: bool, there: tuple[str, ...]) -> Pipeline:
        size, n = candidate.micro_batch_size, candidate.micro_batches
        if size not in self._sized:
            scale = checkpoint_bytes(self.model, size) / checkpoint_bytes(self.model, self.size)
            self._sized[size] = scale, workspace_bytes(self.model, size)
        (scale, workspace), measured = self._sized[size], self._of_number(n, mixed, there)
        return Pipeline(
            constant=measured.constant + scale * measured.hidden,
            parameters=measured.parameters,
            checkpoints=scale * measured.spilled,
            device=measured.device + scale * measured.by_tokens + workspace + n * self.model.context_bytes[size],
        )

    def _of_number(self, n: int, mixed: bool, there: tuple[str, ...]) -> "_Measured":
        """The pipeline of so many micro-batches of the smallest size."""
        key = n, mixed, there
        if key not in self._numbers:
            self._numbers[key] = self._interpolated(n, mixed, there)
        return self._numbers[key]

    def _interpolated(self, n: int, mixed: bool, there: tuple[str, ...]) -> "_Measured":
        def host(role: Holder, fraction: float) -> float:
            return self._linear(n, fraction, there, "host", role)

        # What passes between layers follows the activation checkpoints, parameters in transit those that ssd holds.
        hidden = Role.HIDDEN_STATES
        kept = host(hidden, 1.0) if mixed else host(hidden, 0.0)
        spilled = 2 * (host(hidden, 0.5) - kept) if mixed else 0.0
        built = [
            count for count in MEASURED if count == min(n, MEASURED[1]) or (count > MEASURED[1] and n > MEASURED[1])
        ]
        roles = {role for count in built for _, role in self._at(count, 0.0, there)}
        transit = {role: host(role, 0.0) for role in roles if isinstance(role, InTransit)}
        others = sum(host(role, 0.0) for role in roles - {hidden, SHARED} - transit.keys())
        shared = host(SHARED, 0.0)
        # What comes once for a whole pass, as the ends of a model do, shares bytes with what comes in other stages.
        once = [role for role in transit if self._layers[role.state_class] == 1]
        most = sum(transit[role] for role in once)
        part = min(-shared / most, 1.0) if most else 0.0
        for role in once:
            transit[role] *= 1.0 - part
        by_tokens = {role for role in roles if isinstance(role, Role) and ROLES[role].by_tokens}
        return _Measured(
            constant=others + shared + part * most,
            hidden=kept,
            parameters=tuple(sorted((role.state_class, nbytes) for role, nbytes in transit.items())),
            spilled=max(spilled, 0.0),
            device=sum(self._linear(n, 0.0, there, "device", role) for role in roles - by_tokens),
            by_tokens=sum(self._linear(n, 0.0, there, "device", role) for role in by_tokens),
        )

    def _linear(self, n: int, fraction: float, there: tuple[str, ...], tier: Tier, role: Holder) -> float:
        one, two, six = MEASURED
        key = (tier, role)
        if n <= two:
            return self._at(one if n == one else two, fraction, there).get(key, 0)
        low, high = (self._at(count, fraction, there).get(key, 0) for count in (two, six))
        return low + (high - low) * (n - two) / (six - two)

    def _at(self, n: int, fraction: float, there: tuple[str, ...]) -> dict[tuple[Tier, Holder], int]:
        key = (n, fraction, there)
        if key not in self._measured:
            decision = self.decide(self.size, n, fraction, there)
            schedule = build_schedule(self.short, decision)
            peaks = predict_peaks(schedule, self.short, decision)
            found = _by_role(schedule, self.short)
            found["host", BOOKKEEPING] = bookkeeping_of(peaks, self.model, self.short)
            self._measured[key] = found
        return self._measured[key]


def bookkeeping_of(peaks: Peaks, model: Model, short: Model) -> int:
    """What a run keeps besides its buffers of all of a model, whose shortened model has `peaks`."""
    if len(model.layers) == len(short.layers):
        return peaks.bookkeeping
    kept = peaks.kept * (len(model.layers) - 2) // (len(short.layers) - 2)  # most ops are of blocks
    return max(kept + peaks.passing, peaks.loading)


def saved_in_transit(schedule: Schedule, model: Model, decision: Decision) -> float:
    """Pairs of layer and micro-batch that would have saved activations on their way between device and ssd at once if
    all were saved so, from the schedule of a shortened model; 0 where none is."""
    on_ssd = 0.0
    for name, shares in decision.saved.items():
        rungs = {rung.name: rung for rung in model.timing(name, decision.micro_batch_size).rungs}
        on_ssd = max(on_ssd, sum(each.share * saved_bytes(rungs[each.rung]) for each in shares if each.tier == "ssd"))
    there = _by_role(schedule, model).get(("host", Role.SAVED_ACTIVATIONS), 0)
    return there / on_ssd if on_ssd else 0.0


def _by_role(schedule: Schedule, model: Model) -> dict[tuple[Tier, Holder], int]:
    """Bytes of the slots that the buffers of each role pass through, parameters in transit by their class, and what
    slots that share bytes save."""
    classes = {
        op.target.buffer: model.states[op.state].state_class
        for op in (*schedule.emitted("steady"), *schedule.emitted("evaluate"))
        if isinstance(op, Transfer) and op.kind == "read" and op.state is not None
    }

    def holder(buffer: Buffer) -> Holder:
        there = buffer.role == Role.PARAMETERS_IN_TRANSIT and buffer.index in classes
        return InTransit(classes[buffer.index]) if there else buffer.role

    size: dict[tuple[Tier, str], int] = {}
    kept = dict.fromkeys(TIERS, 0)
    for buffer in schedule.buffers:
        end = whole_pages(buffer.offset + buffer.nbytes)
        if buffer.pool:
            size[buffer.tier, buffer.pool] = max(size.get((buffer.tier, buffer.pool), 0), end - buffer.offset)
        else:
            kept[buffer.tier] = max(kept[buffer.tier], end)
    slots = {
        (buffer.tier, buffer.pool, buffer.offset): (holder(buffer), size[buffer.tier, buffer.pool])
        for buffer in schedule.buffers
        if buffer.pool
    }
    total: dict[tuple[Tier, Holder], int] = {
        (tier, SHARED): schedule.arenas[tier]
        - kept[tier]
        - sum(nbytes for key, (_, nbytes) in slots.items() if key[0] == tier)
        for tier in TIERS
    }
    for (tier, _, _), (role, nbytes) in slots.items():
        total[tier, role] = total.get((tier, role), 0) + nbytes
    return total
