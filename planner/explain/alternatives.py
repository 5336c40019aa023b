"""Alternatives: trains the chosen batch in other ways on the same machine, and says what each idea of the plan brings.

Owns which ways there are and how each is estimated; it decides nothing. The program places another schedule, and its
step is extrapolated from simulated steps of two shortened models. A rung of ideas is the program's step
for one rule of placement, with the fill and drain that a simulated step of the same schedule has.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import floor, inf
from typing import Literal

from ssdplan.plans.analysis.memory_usage import checkpoint_layers, device_alone_bytes
from ssdplan.plans.analysis.sublayers import blocks_with_backward
from ssdplan.plans.documents.plan import Compared, Decision, Prediction, Recompute, needs_all_gradients
from ssdplan.plans.documents.profile import PAPER, Model, rungs_to_save_by
from ssdplan.plans.documents.state_layout import checkpoint_bytes, optimizer_bytes, parameters_bytes
from ssdplan.plans.schedule.shards import Shards
from ssdplan.plans.units import format_bytes

from ..fit.budgets import UNLIMITED, Candidate, Needs
from ..fit.fit import Fitter
from ..fit.found import Branch, Sketch, Solved
from ..predict.peaks import compute_seconds
from ..predict.shortened import step_seconds
from ..program.choices import FixedChoices, KeptShares, Limits
from ..program.placement import DIGITS
from ..program.program import solve_program
from .zero_infinity import Ways, tensors_of_model, zero_infinity_memory

NO_DELAY = "vertical, no delayed update"
"""The row that says what delayed updates bring; why a plan delays them is told by the same figures."""
RECOMPUTATIONS: dict[Recompute, str] = {
    "all": "recompute everything",
    "paper": "PyAO's rule",
    "none": "recompute nothing",
}
"""What backward could recompute -> its row; why a plan saves what it does is told by the same figures."""
ALMOST = 1 - 1e-3
"""Of a class's pairs of layer and micro-batch: so many are all, for shares are rounded."""
NO_SUMS = "gradients add up on the device, so no buffer of them all"
NO_SUMS_UNIFIED = "gradients add up in memory a layer at a time, so no buffer of them all"
ENDLESS = Needs(*(UNLIMITED // 2,) * 4)
"""Budgets that a decision can name and nothing exceeds."""


def rungs_by(recompute: Recompute, model: Model, micro_batch_size: int) -> dict[str, tuple[str, ...]] | None:
    """Class of blocks -> the rungs by which all of its pairs save where the user asks for `recompute`: one, and that in
    int8 where the user allows it; none for "all". Of classes that have rungs; None where no class has any, or one of
    them has none of PyAO's."""
    chosen: dict[str, tuple[str, ...]] = {}
    for name in blocks_with_backward(model):
        rungs = model.timing(name, micro_batch_size).rungs
        if rungs and recompute == "paper" and PAPER not in [rung.name for rung in rungs]:
            return None
        if rungs:
            asked = () if recompute == "all" else rungs_to_save_by(rungs, by_paper=recompute == "paper")
            chosen[name] = tuple(rung.name for rung in asked)
    return chosen or None


def recomputes(recompute: Recompute, model: Model, decision: Decision) -> bool:
    """Whether that is what a plan does by itself."""
    if recompute == "all":
        return not decision.saved
    chosen = rungs_by(recompute, model, decision.micro_batch_size)
    return chosen is not None and all(
        sum(each.share for each in decision.saved.get(name, ()) if each.rung in rungs) >= ALMOST
        for name, rungs in chosen.items()
    )


def compare(fitter: Fitter, chosen: Solved, prediction: Prediction) -> tuple[Compared, ...]:
    """The rows of a plan: its own, then other schedules and places, then the rungs from ZeRO-Infinity's way to it."""
    return _Comparison(fitter, chosen, prediction).rows()


class _Comparison:
    """One plan and its rows."""

    def __init__(self, fitter: Fitter, chosen: Solved, prediction: Prediction) -> None:
        self.fitter, self.chosen, self.prediction = fitter, chosen, prediction
        self.model, self.machine, self.budget = fitter.model, fitter.machine, fitter.budget
        self.candidate = chosen.fitted.candidate
        self.decision = chosen.fitted.decision
        self.fixed, self.given = fitter.fixed, chosen.branch.fixed
        self.tokens = fitter.fixed.ranks * self.candidate.global_batch * self.model.sequence_length
        self.all_first = needs_all_gradients(self.model.precision, self.fixed.clip_grad_norm)
        self.drain = {self.decision.schedule: prediction.step_seconds / chosen.program.seconds}
        """Schedule -> a simulated step over the program's."""
        own = step_seconds(self.model, self.machine, self.decision, fitter.builder.schedule)
        self.whole = prediction.step_seconds / own
        """The plan's step over what shortened models say of it; they say of its neighbours as much too little."""

    def rows(self) -> tuple[Compared, ...]:
        schedule = self.decision.schedule
        own = "single" if schedule == "vertical" and self.candidate.micro_batches == 1 else schedule
        rows = [self._own("schedule", f"{own} (this plan)")]
        if schedule == "horizontal":
            rows.append(self._schedule("vertical", replace(self.fixed, schedule="vertical", delay_ratio=None)))
        rows.append(self._prompt())
        if schedule == "vertical":
            rows.append(self._horizontal())
        if own != "single":
            rows.append(self._single())
        rows += (again := self._recomputations())
        rows.append(self._on_host())
        if not self.decision.unified_memory:
            rows.append(self._on_device())
        if self.decision.ranks > 1:
            return tuple(rows)
        return (*rows, *self._ideas(again))

    # Other schedules.

    def _own(self, kind: Literal["schedule", "idea"], name: str) -> Compared:
        p = self.prediction
        return Compared(
            kind=kind,
            name=name,
            host_bytes=p.peak_host_bytes,
            device_bytes=p.peak_device_bytes,
            ssd_read_bytes=p.ssd_read_bytes,
            ssd_write_bytes=p.ssd_write_bytes,
            step_seconds=p.step_seconds,
            tokens_per_second=p.tokens_per_second,
            fits=True,
        )

    def _prompt(self) -> Compared:
        name = NO_DELAY
        if self.all_first:
            return Compared(kind="schedule", name=name, fits=False, note=f"not possible: {self.all_first}")
        if self.decision.schedule == "vertical" and not self.decision.delay_ratio:
            return self._own("schedule", name).model_copy(update={"note": "this plan delays no update"})
        return self._schedule(name, replace(self.fixed, schedule="vertical", delay_ratio=0.0))

    def _horizontal(self) -> Compared:
        if self.all_first:
            note = f"not possible: it delays no update, and {self.all_first}"
            return Compared(kind="schedule", name="horizontal", fits=False, note=note)
        kept = self.fixed.kept and {name: KeptShares(each.device) for name, each in self.fixed.kept.items()}
        return self._schedule("horizontal", replace(self.fixed, schedule="horizontal", delay_ratio=0.0, kept=kept))

    def _single(self) -> Compared:
        batch = self.candidate.global_batch
        if batch not in self.model.micro_batch_sizes:
            sizes = ", ".join(map(str, sorted(self.model.micro_batch_sizes)))
            note = f"a micro-batch of {batch} rows was not profiled; the profile has {sizes}"
            return Compared(kind="schedule", name="single", fits=False, note=note)
        fixed = self.fixed
        if fixed.schedule == "horizontal":
            fixed = replace(fixed, schedule="vertical", delay_ratio=None)
        return self._schedule("single", fixed, [Candidate(batch, 1)])

    def _recomputations(self) -> list[Compared]:
        """What else backward could recompute; nothing where no rungs say what that would take."""
        size = self.candidate.micro_batch_size
        rows: list[Compared] = []
        for recompute, name in RECOMPUTATIONS.items():
            rungs = rungs_by(recompute, self.model, size)
            if rungs is None or recomputes(recompute, self.model, self.decision):
                continue
            if recompute == "none" and rungs == rungs_by("paper", self.model, size):
                rule = RECOMPUTATIONS["paper"]
                same = [row for row in rows if row.name == rule]
                rows += [row.model_copy(update={"name": name, "note": f"the same as {rule}"}) for row in same]
                continue
            # For a what-if, which is to be quick, only as the plan cuts its batch.
            candidates = [self.candidate] if self.model.figures == "estimated" else None
            row = self._schedule(name, replace(self.fixed, recompute=recompute), candidates)
            note = f"by the quickest of its rungs, {_listed(rungs)}" if recompute == "none" else ""
            rows.append(row.model_copy(update={"note": _joined(note, row.note)}))
        return rows

    def _schedule(self, name: str, fixed: FixedChoices, candidates: list[Candidate] | None = None) -> Compared:
        """A way of training within the plan's budgets; where none fits, with all on ssd, and what it would need."""
        fitter = self._fitter(fixed)
        limits = self.chosen.branch.limits
        if (fixed.schedule, fixed.recompute) != (self.fixed.schedule, self.fixed.recompute):
            limits = limits.without_buffers(self.budget.host)
        for candidate in candidates or self._alike():
            branch = Branch(self._with_room(fixed), limits)
            found = fitter.glance(candidate, branch), fitter.resident_sketch(candidate, [branch])
            note = "" if candidate == self.candidate else _batch(candidate)
            rows = [self._sketched(name, fitter, sketch, fits=True, note=note) for sketch in found if sketch]
            if rows:
                return min(rows, key=lambda row: row.step_seconds or inf)
        candidate = (candidates or [self.candidate])[0]
        return self._endless(name, candidate, replace(fixed, parameters=0.0, optimizer=0.0, checkpoints=0.0))

    def _fitter(self, fixed: FixedChoices) -> Fitter:
        """Within the plan's budgets. What passes through memory depends neither on delays nor on what is saved."""
        own = self.fixed
        alike = replace(fixed, delay_ratio=own.delay_ratio, recompute=own.recompute) == own
        return Fitter(self.model, self.machine, self.budget, fixed, self.fitter.pipelines if alike else None)

    def _with_room(self, fixed: FixedChoices) -> FixedChoices:
        """What the device may keep of the plan, unless that is everything, it may keep of its neighbours."""
        if self.given.updates_there:
            return fixed
        everything = self.given.kept is not None and self.fixed.kept is None
        inputs = self.fixed.checkpoints_device or 0.0 if everything else self.given.checkpoints_device
        return replace(fixed, updates_there=False, checkpoints_device=inputs)

    def _alike(self) -> list[Candidate]:
        """The plan's micro-batches, then the profile's smaller ones that make the same batch, the largest first."""
        batch, own = self.candidate.global_batch, self.candidate.micro_batch_size
        sizes = sorted(
            (size for size in self.model.micro_batch_sizes if size <= own and batch % size == 0), reverse=True
        )
        return [Candidate(size, batch // size) for size in sizes]

    def _endless(self, name: str, candidate: Candidate, fixed: FixedChoices, note: str = "") -> Compared:
        """A way of training with all the memory that it needs."""
        fitter = Fitter(self.model, self.machine, ENDLESS, fixed)
        sketch = fitter.glance(candidate, Branch(fixed, Limits(UNLIMITED)))
        assert sketch is not None, "no limit, and still no placement"
        over = sketch.needs.over(self.budget)
        needs = _needs([f"{format_bytes(sketch.needs.of(room))} of {room}" for room in over])
        return self._sketched(name, fitter, sketch, fits=not over, note=_joined(note, needs))

    def _sketched(self, name: str, fitter: Fitter, sketch: Sketch, *, fits: bool, note: str) -> Compared:
        seconds = step_seconds(self.model, self.machine, sketch.decision, fitter.builder.schedule)
        if sketch.decision.schedule == self.decision.schedule:
            seconds *= self.whole
        self.drain.setdefault(sketch.decision.schedule, seconds / sketch.program.seconds)
        return Compared(
            kind="schedule",
            name=name,
            host_bytes=sketch.needs.host,
            device_bytes=sketch.needs.device,
            ssd_read_bytes=round(sketch.program.ssd_read_bytes),
            ssd_write_bytes=round(sketch.program.ssd_write_bytes),
            step_seconds=seconds,
            tokens_per_second=self.tokens / seconds,
            fits=fits,
            note=note,
        )

    # Other places.

    def _on_host(self) -> Compared:
        """All that the plan keeps on ssd, on host."""
        fixed = replace(self.fixed, parameters=1.0, optimizer=1.0, checkpoints=1.0)
        return self._endless("everything on host", self.candidate, fixed, "nothing on ssd")

    def _on_device(self) -> Compared:
        size, n = self.candidate.micro_batch_size, self.candidate.micro_batches
        owned = Shards(self.decision.shares).owned(self.model)
        nbytes = device_alone_bytes(owned, size, self.decision.formats)
        seconds = n * compute_seconds(self.model, size, 1)
        needs = _needs([f"{format_bytes(nbytes)} of device memory"] if nbytes > self.budget.device else [])
        return Compared(
            kind="schedule",
            name="everything on device",
            host_bytes=0,
            device_bytes=nbytes,
            ssd_read_bytes=0,
            ssd_write_bytes=0,
            step_seconds=seconds,
            tokens_per_second=self.tokens / seconds,
            fits=not needs,
            note=_joined("compute alone, its updates taken to cost nothing", needs),
        )

    # Ideas.

    def _ideas(self, again: list[Compared]) -> Iterator[Compared]:
        """From ZeRO-Infinity's way to this plan, each rung with the ideas of those before it (MemAscend IV, GreedySnake
        4). What its processes keep besides is on neither side, nor are its gradients on ssd: in its favour. Saved
        activations are the last idea; the row of `again` that recomputes everything is the plan without it."""
        check = self.model.precision == "fp16"  # bf16 cannot overflow where fp32 does not
        ways = Ways(overflow_copies=check)
        yield self._zero_infinity("ZeRO-Infinity's way", ways)
        ways = replace(ways, one_size_buffers=False)
        yield self._zero_infinity("+ buffers by class", ways)
        ways = replace(ways, powers_of_two=False)
        yield self._zero_infinity("+ exact page-locked memory", ways)
        if check:
            yield self._zero_infinity("+ overflow check without copies", replace(ways, overflow_copies=False))
        if self.decision.schedule == "vertical":
            sums = NO_SUMS_UNIFIED if self.fixed.unified_memory else NO_SUMS
            if self.all_first:
                yield self._vertical("+ vertical schedule, delayed update", 1.0, sums)
            else:
                yield self._vertical("+ vertical schedule", 0.0, sums)
                yield self._vertical("+ delayed update", None, "")
        placed = "+ the program's placement"
        for row in again:
            if row.name == RECOMPUTATIONS["all"]:
                yield row.model_copy(update={"kind": "idea", "name": placed})
                placed = "+ saved activations"
        yield self._own("idea", placed)

    def _zero_infinity(self, name: str, ways: Ways) -> Compared:
        """The horizontal schedule beside the buffers of one way of allocating them, checkpoints on host. What is left
        of the budget goes to parameters, which are used most often, and then to optimizer states."""
        tokens = self.candidate.micro_batch_size * self.model.sequence_length
        needs = zero_infinity_memory(tensors_of_model(self.model), ways, checkpoint_tokens=tokens)
        fixed = needs.total - needs.processes
        left = float(self.budget.host - fixed)
        parameters, left = _share(left, self._parameter_bytes, self.fixed.parameters)
        optimizer, left = _share(left, self._optimizer_bytes, self.fixed.optimizer)
        choices = replace(
            self.fixed,
            schedule="horizontal",
            delay_ratio=0.0,
            parameters=parameters,
            optimizer=optimizer,
            checkpoints=1.0,
            kept=self._kept,
            recompute="all",
        )
        return self._rung(name, choices, Limits(UNLIMITED), left, "")

    def _vertical(self, name: str, delay_ratio: float | None, note: str) -> Compared:
        """The vertical schedule beside its own pipeline's buffers, by the same rule, checkpoints after parameters."""
        branches = self.fitter.branches(self.candidate)
        limits = branches[-1].limits
        left = limits.host_bytes - limits.buffers
        checkpoint_bytes = self._checkpoint_bytes - limits.checkpoint_buffers
        given = self.fixed.checkpoints
        if left < 0:  # all on ssd, they take fewer buffers
            limits, given = branches[0].limits, branches[0].fixed.checkpoints
            left = limits.host_bytes - limits.buffers
        passing = sum(nbytes for _, nbytes in limits.parameter_buffers)
        parameters, left = _share(left, self._parameter_bytes - passing, self.fixed.parameters)
        checkpoints, left = _share(left, checkpoint_bytes, given)
        optimizer, left = _share(left, self._optimizer_bytes, self.fixed.optimizer)
        choices = replace(
            self.fixed,
            delay_ratio=delay_ratio,
            kept=self._kept,
            parameters=parameters,
            optimizer=optimizer,
            checkpoints=checkpoints,
            recompute="all",
        )
        limits = replace(limits, ssd_bytes=None, ssd_write_bytes=None)
        return self._rung(name, choices, limits, left, note)

    @property
    def _kept(self) -> Mapping[str, KeptShares] | None:
        """What the device keeps until the last rung: nothing but what the user asked for."""
        return None if self.fixed.unified_memory else self.fixed.kept or {}

    def _rung(self, name: str, choices: FixedChoices, limits: Limits, left: float, note: str) -> Compared:
        """`left`: bytes of the host budget that these choices leave; negative where they need more."""
        if left < 0:
            limits = replace(limits, host_bytes=UNLIMITED)
        program = solve_program(
            self.model,
            self.machine,
            micro_batch_size=self.candidate.micro_batch_size,
            micro_batches=self.candidate.micro_batches,
            limits=limits,
            fixed=choices,
        )
        assert program is not None, "a rule of thumb that leaves no room for itself"
        seconds = program.seconds * self.drain.get(choices.schedule, 1.0)
        host = round(self.budget.host - left)
        lacking = {
            f"{format_bytes(host)} of host memory": left < 0,
            f"{format_bytes(program.ssd_bytes)} of ssd space": program.ssd_bytes > self.budget.ssd,
            f"{format_bytes(program.ssd_write_bytes)} of ssd writes": program.ssd_write_bytes > self.budget.writes,
        }
        needs = _needs([words for words, lacks in lacking.items() if lacks])
        kept = f"on host {choices.parameters:.0%} of parameters, {choices.optimizer:.0%} of optimizer states"
        return Compared(
            kind="idea",
            name=name,
            host_bytes=host,
            ssd_read_bytes=round(program.ssd_read_bytes),
            ssd_write_bytes=round(program.ssd_write_bytes),
            step_seconds=seconds,
            tokens_per_second=self.tokens / seconds,
            fits=not needs,
            note=_joined(note, kept, needs),
        )

    @property
    def _parameter_bytes(self) -> int:
        return parameters_bytes(self.model.states, self.model.precision)

    @property
    def _optimizer_bytes(self) -> int:
        return optimizer_bytes(self.model.states, self.model.precision, self.fixed.formats)

    @property
    def _checkpoint_bytes(self) -> int:
        """Of all micro-batches."""
        each = checkpoint_bytes(self.model, self.candidate.micro_batch_size)
        return checkpoint_layers(self.model) * self.candidate.micro_batches * each


def _share(left: float, nbytes: float, given: float | None) -> tuple[float, float]:
    """The fraction of `nbytes` that has room in `left`, or the one that was given, and what it leaves."""
    room = 1.0 if nbytes <= 0 else floor(min(max(left, 0.0) / nbytes, 1.0) * 10**DIGITS) / 10**DIGITS
    share = room if given is None else given
    return share, left - share * nbytes


def _batch(candidate: Candidate) -> str:
    return f"{candidate.micro_batches} micro-batches of {candidate.micro_batch_size}"


def _listed(rungs: Mapping[str, tuple[str, ...]]) -> str:
    """`rung-2`, `all or all-int8`, or with several classes of blocks `rung-2 of block.a, all of block.b`."""
    words = {name: " or ".join(names) for name, names in rungs.items()}
    if len(words) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{text} of {name}" for name, text in words.items())


def _needs(lacking: list[str]) -> str:
    return f"needs {' and '.join(lacking)}" if lacking else ""


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
