"""Pacing: simulates what was fitted, and finds how a step's updates are best cut into chunks.

Owns the choice between paces, which the linear program does not see, and what operations take beside their work.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.graph.timeline import Timeline

from .fit.budgets import Candidate
from .fit.fit import Fitter
from .fit.found import Branch, Solved, inputs_elsewhere
from .fit.pace import Pace
from .predict.simulator import simulate, simulated_seconds
from .ranked import WORTH, Simulated

WAITING = 1.03
"""A step that takes longer than the program's by this factor waits for chunks: other paces are tried."""
PROMISING = 2
"""Of these as many as that."""
OPERATION_CORE_SECONDS = 2e-4
"""What each operation takes of the cores beside its work, for the choice between paces: the simulator gives it none.
(A step with 5,600 more operations, the same bytes in shorter chunks, on two cores that compute shares: 8.43 and 10.34
instead of 8.01 and 10.03 s; run by run, 9.57 and 9.22 instead of 8.62 and 8.55.)"""
GPU_OPERATION_SECONDS = 1e-4
"""The same where a GPU was measured: its operations are begun and waited for by one interpreter, one after the other.
(On an H200 3,646 updates of 131,072 elements took 0.15 ms each instead of 0.03, and 3,144 copies 0.1 ms instead of
0.01: steps of 0.71 and 0.75 s instead of 0.44 and 0.39.) What-ifs count none."""
FEW_OPS = 20_000
"""A schedule of so many is built again in a moment; in a longer one chunks are a small part of what flows."""


class Pacing:
    """What a fitted decision takes, at the pace that it has or at a better one."""

    def __init__(self, model: Model, machine: Machine, fitter: Fitter) -> None:
        self.model, self.machine, self.fitter = model, machine, fitter

    def paced(self, solved: Solved, candidate: Candidate, branches: Sequence[Branch], most: float = inf) -> Simulated:
        """`met`, or where that waits for chunks and its program takes less than `most` seconds the fastest of the paces
        that promise to hide more."""
        return self.hastened(self.met(solved, candidate, branches), candidate, branches, most)

    def met(self, solved: Solved, candidate: Candidate, branches: Sequence[Branch]) -> Simulated:
        """`solved`; or what keeps all on the device, where that is faster: the program does not see what the end of a
        step waits for."""
        best = self.simulated(solved)
        resident = self.fitter.resident(candidate, branches)
        return best if resident is None else min(best, self.simulated(resident), key=self.with_operations)

    def hastened(
        self, best: Simulated, candidate: Candidate, branches: Sequence[Branch], most: float = inf
    ) -> Simulated:
        """`best` as it is, or at the fastest of the paces that promise to hide more: where it waits for chunks and its
        program takes less than `most` seconds. A zeroth-order step has no updates to cut."""
        solved = best.solved
        if solved.fitted.decision.zeroth_order:
            return best
        waits = best.timeline.seconds > WAITING * solved.program.seconds and solved.program.seconds < most
        if waits and len(solved.fitted.schedule.steady.ops) <= FEW_OPS:
            for pace in self._promising(solved):
                other = self.fitter.paced(candidate, branches, pace)
                best = min((best, *([self.simulated(other)] if other else [])), key=self.with_operations)
            for branch in inputs_elsewhere(branches) if solved.fitted.decision.checkpoint_device else ():
                if self.fitter.seconds(candidate, branch) < best.timeline.seconds * (1 - WORTH):
                    other = self.fitter.paced(candidate, [branch], self.fitter.paces.usual)
                    best = min((best, *([self.simulated(other)] if other else [])), key=self.with_operations)
        return best

    def _promising(self, solved: Solved) -> list[Pace]:
        """The other paces that promise a noticeably faster step, the best of them: by a shortened model with the same
        placement, and by what the program makes of the memory that they leave or take."""
        builder, decision = self.fitter.builder, solved.fitted.decision

        def glimpsed(decision: Decision) -> tuple[float, int]:
            """Seconds of the shortened model's step, and host memory of the whole one."""
            timeline = simulate(builder.in_short(decision).steady, builder.short, self.machine, size)
            return self._counting_operations(timeline), builder.estimate(decision).host

        size = decision.micro_batch_size
        own, host = glimpsed(decision)
        enough, found = own * (1 - WORTH), list[tuple[float, int]]()
        for number, pace in enumerate(self.fitter.paces.others):
            seconds, taken = glimpsed(pace.of(decision))
            left = self._seconds_with(solved, host - taken) / solved.program.seconds
            found.append((seconds * left, number))
        return [self.fitter.paces.others[number] for reached, number in sorted(found) if reached < enough][:PROMISING]

    def _seconds_with(self, solved: Solved, host_bytes: int) -> float:
        """The program's seconds with so many more bytes of host memory than it had, or fewer."""
        limits = replace(solved.branch.limits, host_bytes=solved.branch.limits.host_bytes + host_bytes)
        return self.fitter.seconds(solved.fitted.candidate, replace(solved.branch, limits=limits))

    def simulated(self, solved: Solved) -> Simulated:
        """A decision with its simulated step."""
        candidate, steady = solved.fitted.candidate, solved.fitted.schedule.steady
        timeline = simulate(steady, self.model, self.machine, candidate.micro_batch_size)
        fitted = solved.fitted
        seconds = simulated_seconds(fitted.schedule, self.model, self.machine, fitted.decision, timeline)
        return Simulated(solved, timeline, self.tokens(candidate) / seconds, seconds)

    def with_operations(self, simulated: Simulated) -> float:
        """Seconds of a step, with what its operations take."""
        return self._counting_operations(simulated.timeline)

    def _counting_operations(self, timeline: Timeline) -> float:
        """Seconds of a step, with what its operations take where compute wants the same cores, or begins on a GPU."""
        operations = len(timeline.graph.ops)
        if self.machine.compute_shares_cpu:
            return timeline.seconds + OPERATION_CORE_SECONDS * operations / self.machine.cores
        counted = self.machine.device == "cuda" and self.machine.figures == "measured"
        return timeline.seconds + GPU_OPERATION_SECONDS * operations * counted

    def tokens(self, candidate: Candidate) -> int:
        """Of a step of all ranks."""
        return self.fitter.fixed.ranks * candidate.global_batch * self.model.sequence_length
