"""The loop: step after step of a run, and what happens between two of them.

Owns the order of that: metrics, snapshots, evaluations, the move to another plan, and the end that a signal asks for.
What a step does, the plan's graphs say; what a snapshot holds, the keeper.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial

from ssdplan.native import process
from ssdplan.plans.analysis.cache import CacheReader
from ssdplan.plans.documents.metrics import SnapshotCost, StepMetrics
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import StoppedWithSnapshot
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.units import format_seconds

from .batches import Texts
from .calibration import Calibrator
from .data.text_data import Batch
from .metrics.metrics import History, MetricsFile
from .model.inspection.routing import Routing
from .ranks.group import ALONE, Ranks
from .recipe import Recipe, Watch
from .runtime.interruption import Interruption
from .runtime.pace import require_pace
from .runtime.session import Session
from .sessions import Sessions
from .snapshots.keeper import Keeper, StoreKeeper
from .stepping import Stepping

FAR_FROM_PROFILED = 1.5
"""By how many times a block's busiest expert may be busier than in the profile before it is told."""
_ENDS_WITH_MODEL = "its steps are done: it ends with its model; a second signal stops it now"


class _StoppedError(Exception):
    """The run was asked to stop, and stands between two operations."""


@dataclass
class Loop:
    """The steps that a run has before it, and what it found in those behind it."""

    sessions: Sessions
    plan: Plan
    """Of the current session; another one after a move."""
    texts: Texts
    recipe: Recipe
    watch: Watch
    metrics_file: MetricsFile
    history: History
    """Losses of all steps of the run so far."""
    stepping: Stepping
    keeper: Keeper | None
    """None in a run without snapshots."""
    interruption: Interruption
    calibrator: Calibrator | None
    ranks: Ranks = ALONE
    routing: Routing | None = None
    """Counted in the first step; None once that is told."""
    measured: list[StepMetrics] = field(default_factory=list)
    """Of the steady steps under `plan`."""
    timeline: Timeline | None = None
    """Of the last step; None when none was left."""
    written_before: int = 0
    """Bytes that the run had written to ssd before this session."""
    _after_flush: bool = field(default=True, init=False)
    """Whether the step to come finishes no delayed updates, and so is no steady one."""
    ended: bool = field(default=False, init=False)
    """Whether who watches asked for the end, so that there are fewer steps than the recipe has."""
    _told_recomputed: bool = field(default=False, init=False)
    _cache: CacheReader = field(init=False)
    """Of the steps under `plan`."""

    def __post_init__(self) -> None:
        self._cache = CacheReader(self.plan)
        if self.keeper:
            self.keeper.written_bytes = lambda: self.written_bytes

    @property
    def session(self) -> Session:
        return self.sessions.current

    @property
    def done(self) -> int:
        """Steps of the whole run so far."""
        return len(self.history.losses)

    @property
    def written_bytes(self) -> int:
        """What the whole run has written so far: states, when they were loaded too, and snapshots."""
        besides = self.keeper.besides_bytes if self.keeper else 0
        return self.written_before + self.session.traffic()[1] + besides

    def run(self) -> None:
        """All steps that are left, and a last evaluation and snapshot. Raises NumericalError for a loss or a gradient
        that is not finite, and StoppedWithSnapshot after a snapshot when the end was asked for."""
        recipe, begun = self.recipe, len(self.history.losses)
        if self.keeper:
            self.keeper.scaling = self.stepping.scaling
        try:
            if not begun or self._evaluated_after(begun):
                self._evaluate(begun)
            for step in range(begun, recipe.steps):
                better = self._step(step, only=recipe.steps == begun + 1)
                last = self.ended or step + 1 == recipe.steps
                if not last or self.keeper or self.stepping.resumable:
                    self._between(step + 1)
                if last:
                    break
                if better:
                    self._move(better, step + 1)
            self.session.flush()
            if self.keeper or self.stepping.resumable:
                self._evaluate(self.done)
                self.stepping.sync()
                self.interruption.tell_from_now_on(lambda: self.watch.note(_ENDS_WITH_MODEL))
                self._stop_if_asked()
            else:
                self._evaluate_unless_asked()
        except _StoppedError:
            if self.keeper and self.history.losses:
                self.keeper.end(self.session, len(self.history.losses))
            if (self.keeper or self.stepping.resumable) and self.history.losses:
                self.metrics_file.sync()
                self.stepping.sync()
                raise StoppedWithSnapshot from None
            raise KeyboardInterrupt from None
        if self.keeper:
            self.keeper.end(self.session, self.done)

    def _step(self, step: int, *, only: bool) -> Plan | None:
        """One step (from 0), and its metrics; `only`: there is no other. Returns a better plan, if there is one."""
        session = self.session
        batches = self.texts.step(step)
        read, written = session.traffic()
        start, stolen = time.perf_counter(), process.stolen_seconds()
        if session.pacer:
            session.pacer.begin()
        if self.routing:
            self.routing.begin()
        done = self.stepping.step(session, step, batches)
        if session.pacer and not self._after_flush:
            require_pace(session.pacer, self.plan)
        seconds, self.timeline = time.perf_counter() - start, done.timeline
        if step + 1 == self.recipe.steps:
            self._keep_to_the_end()
        now_read, now_written = session.traffic()
        computed = sum(batch.input_ids.size for batch in batches)
        host, device = session.peak_bytes("host", self.plan), session.peak_bytes("device", self.plan)
        store = session.store.nbytes if session.store else 0
        found = self._cache.figures(done.timeline, {"device": device, "host": host, "ssd": store})
        metrics = StepMetrics(
            step=step + 1,
            loss=done.loss,
            grad_norm=done.grad_norm,
            lr=done.lr,
            tokens=done.tokens,
            step_seconds=seconds,
            tokens_per_second=computed / seconds,
            ssd_read_bytes=now_read - read,
            ssd_write_bytes=now_written - written,
            host_peak_bytes=host,
            device_peak_bytes=device,
            process_peak_bytes=process.peak_resident_bytes(),
            loss_scale=done.loss_scale,
            skipped=done.skipped,
            ssd_written_bytes=self.written_bytes,
            stolen_seconds=process.stolen_seconds() - stolen,
            computed_tokens=computed,
            learnt_tokens_per_second=done.tokens / seconds,
            **asdict(found),
        )
        self.history.losses.append(done.loss)
        better = self.calibrator.take(self.timeline) if self.calibrator and not self._after_flush else None
        if not self._after_flush or only:
            self.measured.append(metrics)
        self._after_flush = done.skipped
        self.metrics_file.write(metrics)
        if self.keeper:
            self.keeper.scaling = self.stepping.scaling
        if self.watch.step(metrics) is True and step + 1 < self.recipe.steps:
            self.ended = True
            self._keep_to_the_end()
            if not self.measured:  # there is no later one
                self.measured.append(metrics)
        self._tell_recomputed()
        self._tell_routing()
        return better

    def _keep_to_the_end(self) -> None:
        """After the last step of a run without snapshots, whose states are but here: from now on a signal lets it end
        with its model."""
        if not (self.keeper or self.stepping.resumable):
            self.interruption.tell_from_now_on(lambda: self.watch.note(_ENDS_WITH_MODEL))
            self.interruption.begin()

    def _tell_recomputed(self) -> None:
        """Say once that blocks recompute what the plan would have them save."""
        blocks = self.session.layers.saved_blocks
        if blocks.whole and not self._told_recomputed:
            self._told_recomputed = True
            numbers = "the numbers are the same" if self.plan.exact else "without int8, which loses digits"
            self.watch.note(
                f"of {blocks.by_graph + blocks.whole:,} backwards of blocks that save activations {blocks.whole:,} "
                "recomputed their block whole, since its code does not run by the plan's rungs on such rows; "
                f"{numbers}, the steps are longer. If torch or transformers changed since, profile again"
            )

    def _tell_routing(self) -> None:
        """Say once where tokens spread over experts far less evenly than in the profile."""
        if self.routing is None:
            return
        spread, self.routing = self.routing.end(), None
        profiled = self.plan.model.busiest_expert
        if spread and profiled and spread.times > FAR_FROM_PROFILED * profiled:
            self.watch.note(
                f"tokens (padding counted) spread over experts less evenly than where the profile measured a block: of "
                f"the {spread.experts} experts of block.{spread.block} the busiest takes {spread.times:.1f} times as "
                f"many as a mean one, and there it was {profiled:.1f} times. Steps may take longer than the plan says; "
                "nothing has to be done"
            )

    def _between(self, steps: int) -> None:
        """What is due after so many steps."""
        self._stop_if_asked()
        if self.keeper and self._any_rank(self.keeper.due(steps)):
            self.keeper.take(self.session, steps)
            self._after_flush = True
        if self._evaluated_after(steps):
            self._evaluate(steps)
            self._after_flush = True

    def _move(self, better: Plan, steps: int) -> None:
        """Go on with another plan, if there is room for its store beside this one's."""
        start = time.perf_counter()
        store = self.session.store
        describe = None
        if isinstance(self.keeper, StoreKeeper):
            self.metrics_file.sync()  # the move makes a snapshot
            describe = partial(self.keeper.describe, steps)
        earlier = self.sessions.move(better, describe)
        self._after_flush = True
        if earlier is None:
            return
        seconds = time.perf_counter() - start
        self.written_before += store.bytes_written if store else 0
        self.plan, self.measured, self._cache = better, [], CacheReader(better)
        if self.keeper:
            self.keeper.kept(steps, SnapshotCost(seconds, self.session.traffic()[1], 0.0))
        self.watch.note(
            f"moved to the other plan after step {steps}, in {format_seconds(seconds)}; the first is {earlier}"
        )

    def _evaluated_after(self, steps: int) -> bool:
        """Whether there is an evaluation after so many steps, which are not the last."""
        every = self.recipe.eval_every
        return bool(every) and steps % every == 0 and steps < self.recipe.steps

    def _evaluate(self, steps: int) -> None:
        passes = self.texts.held_out()
        if passes is not None and steps not in self.history.eval_losses:
            loss = self.session.evaluate(self._stopping(passes))
            self.history.eval_losses[steps] = loss
            self.metrics_file.write_evaluation(steps, loss)
            self.watch.evaluation(steps, loss)

    def _evaluate_unless_asked(self) -> None:
        """The last evaluation of a run without snapshots, which a signal cuts short, and not the run: that goes on to
        its model."""
        try:
            self._stop_if_asked()
            self._evaluate(self.done)
        except _StoppedError:
            if self.texts.evaluated:
                self.watch.note("leaves out the last evaluation")

    def _stopping(self, passes: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        for batches in passes:
            self._stop_if_asked()
            yield batches

    def _stop_if_asked(self) -> None:
        if self._any_rank(self.interruption.asked):
            raise _StoppedError

    def _any_rank(self, mine: bool) -> bool:
        """Whether it is so on any rank: all do the same between two steps, at the same step."""
        return any(map(bool, self.ranks.tell(b"y" if mine else b"")))
