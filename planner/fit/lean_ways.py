"""Lean ways: the plans that take least memory, one for each way to use the device.

Owns which they are, and what they are estimated to take together. `lean.py` builds one.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace
from itertools import product

from ssdplan.plans.units import PAGE

from ..predict.shortened import ENDS
from ..program.choices import KeptShares, Limits
from ..program.placement import ProgramResult
from .answers import Answers
from .budgets import UNLIMITED, Candidate, in_memory
from .found import Branch, Sketch
from .kept import everything, may_keep_everything, parameter_bytes
from .lean import Lean
from .pace import ROOM, Pace, Paces
from .transit import MEASURED, Pipelines


class LeanWays:
    """The lean ways of one model's candidates."""

    def __init__(self, answers: Answers, paces: Paces, pipelines: Pipelines) -> None:
        self.answers, self.paces, self.pipelines = answers, paces, pipelines
        self.model, self.machine, self.budget, self.fixed = (
            answers.model,
            answers.machine,
            answers.budget,
            answers.fixed,
        )
        self._whole = len(self.model.layers) <= 2 * ENDS
        """Whether there are so few layers that to keep all of a kind may take less than to pass it through."""
        self._found: dict[Hashable, tuple[Lean, ...]] = {}

    def by(self, answers: Answers) -> "LeanWays":
        """The same by other choices; the two share what they find."""
        other = LeanWays(answers, self.paces, self.pipelines)
        other._found = self._found
        return other

    def of(self, candidate: Candidate) -> tuple[Lean, ...]:
        """What a tight budget ends in: everything at one end or the other, and all updates prompt or delayed, whichever
        takes least host memory; once for each way to use the device: for no parameters between their uses, for those of
        both ends of the model, as many as there is room for, or all states; and without room, for one layer alone."""
        key = candidate, self.fixed.recompute_leanly, self.fixed.zeroth_order
        if key not in self._found:
            ways = [(kept, self.paces.tight) for kept in (self.fixed.kept, *self._kept_ways(candidate))]
            ways += [
                (self.fixed.kept, pace) for pace in (self.paces.tight_in_less if self._whole else self._less(candidate))
            ]
            self._found[key] = tuple(self._leanest(candidate, *way) for way in ways)
        return self._found[key]

    def sketches(self, candidate: Candidate, *, every: bool = False) -> list[Sketch]:
        """About what `of` finds, which takes long to build: everything on ssd and prompt. Where there are few layers,
        what it finds. `every`: also what takes least of the device where that has room for more."""
        if self._whole:
            solved = (each.solved for each in self.of(candidate))
            return [Sketch(each.program, each.fitted.decision, each.fitted.needs) for each in solved]
        kept_ways = self._kept_ways(candidate)
        ways = (self.fixed.kept, *(kept_ways[1:] or kept_ways))
        found = [(self.corner(candidate, kept), self.paces.tight) for kept in ways]
        found += [(found[0][0], pace) for pace in (self.paces.tight_in_less if every else self._less(candidate))]
        return [self.answers.sketched(candidate, *each) for each in found]

    def hopeless(self, candidate: Candidate) -> bool:
        """Whether by the estimate even the leanest takes too much memory."""
        return all(in_memory(sketch.needs.over(self.budget)) for sketch in self.sketches(candidate))

    def _less(self, candidate: Candidate) -> tuple[Pace, ...]:
        """Paces for less of the device, where that may have no room."""
        roomy = self.pipelines.fits_device(candidate, ROOM * self.budget.device)
        return () if roomy else self.paces.tight_in_less

    def _kept_ways(self, candidate: Candidate) -> list[Mapping[str, KeptShares]]:
        if self.fixed.kept is not None or self.answers.in_dram:
            return []
        counts = Counter(state.state_class for state in self.model.states)
        size = {each.state_class: parameter_bytes(each, self.model, self.fixed) for each in self.model.states}
        blocks = {self.model.states[index].state_class for layer in self.model.layers[1:-1] for index in layer.states}
        ends = {name: KeptShares(0.0 if name in blocks else 1.0) for name in counts}
        spare = self.budget.device - self._device_bytes(candidate, ends)
        most = dict(ends)
        for name in sorted(blocks):
            kept = min(max(spare // size[name], 0), counts[name])
            most[name] = KeptShares(kept / counts[name])
            spare -= kept * size[name]
        whole = dict.fromkeys(counts, KeptShares(1.0))
        if most != whole and sum(size[name] * counts[name] for name in counts) <= self.budget.device:
            # Where all stay, nothing passes through: what the last of them takes, its buffers give back.
            most = whole if self._device_bytes(candidate, whole) <= self.budget.device else most
        fixed = replace(self.fixed, checkpoints_device=None)  # all states are meant
        may = may_keep_everything(self.model, self.machine, self.budget.device, fixed)
        return [ends, *([most] if most != ends else []), *([everything(self.model)] if may else [])]

    def _device_bytes(self, candidate: Candidate, kept: Mapping[str, KeptShares]) -> int:
        """What the device takes, by the estimate, where it keeps that."""
        return self.answers.sketched(candidate, self.corner(candidate, kept), self.paces.tight).needs.device

    def _leanest(self, candidate: Candidate, kept: Mapping[str, KeptShares] | None, pace: Pace) -> Lean:
        few = replace(candidate, micro_batches=min(candidate.micro_batches, max(MEASURED)))
        delays = (0, 1) if self.fixed.delay_ratio is None else (0,)  # of no effect where it is decided
        best: tuple[int, int, tuple[int, int, int, int]] | None = None
        for ends in product((0, 1), (0, 1), (0, 1), delays):
            corner = self.corner(few, kept, *ends)
            if best is not None and corner.host_bytes > best[0]:
                continue  # what stays is too much alone
            needs = self.answers.sketched(few, corner, pace).needs
            found = needs.host, needs.ssd, ends
            best = found if best is None else min(best, found)
        assert best is not None
        program = self.corner(candidate, kept, *best[2])
        branch = Branch(replace(self.fixed, kept=kept), Limits(program.host_bytes + PAGE))
        decision = self.answers.decision(candidate, program, pace)
        return Lean(self.answers.builder, candidate, decision, program, branch)

    def corner(
        self,
        candidate: Candidate,
        kept: Mapping[str, KeptShares] | None,
        optimizer: float = 0.0,
        parameters: float = 0.0,
        checkpoints: float = 0.0,
        delay_ratio: float = 0.0,
    ) -> ProgramResult:
        """The program's answer where the device keeps that, and host those fractions: nothing, unless given."""
        there = 1.0 if kept == everything(self.model) else None
        choices = self.fixed.where_free(delay_ratio, parameters, optimizer, checkpoints, there)
        choices = replace(choices, kept=kept, recompute=self.fixed.recompute_leanly)
        program = self.answers.program(candidate, Branch(choices, Limits(UNLIMITED)), "host memory")
        assert program is not None, "no limit, and still no placement"
        return program
