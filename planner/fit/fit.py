"""Fitting: from the program's fractions to a decision whose schedule keeps every budget, exactly.

Owns the difference between what the program sees (what stays) and what the schedule takes (the pipeline's buffers, in
whole pages): it has schedules built, compares them with the budgets and asks the program again. What it promises is
built.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf

from ssdplan.plans.documents.plan import Decision, Recompute
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.units import PAGE

from ..predict.shortened import ENDS
from ..program.choices import Aim, FixedChoices, KeptShares, Limits
from ..program.placement import ProgramResult, footprint
from ..program.program import solve_program
from .budgets import UNLIMITED, Candidate, Constraint, Needs, Room, in_memory, reduced
from .decided import decision_of, spilled
from .estimate import Builder
from .found import Branch, Sketch, Solved, fastest, largest_passing
from .kept import everything, keeps, large_to_update_there, may_keep_everything, parameter_bytes
from .lean import Lean, first_within, leanest_of
from .pace import ROOM, Pace, paces, with_less_on_device
from .transit import MEASURED, Pipelines, saved_in_transit
from .whole import best_whole_states

ROUNDS, HARDER = 5, 4.0
"""Attempts, and how many times as much as before is taken off the device's limit when it was too much again."""
LESS_HIDDEN = 0.99
"""Of a program's seconds: a pace that hides less is taken where its program takes no more."""
SPARE = 0.005
"""A host budget with less than this share unused is used."""
SURE, NEAR = SPARE / 4, SPARE / 8
"""So much less than what would do is tried first, and after too much, for rounding may be against it."""
DOUBTFUL = 2
"""Estimates that are too much before the leanest is looked at; most that fits does with the first or the second."""
ROOMY = 1.5
"""Times the host memory of a pipeline of states on ssd, which the leanest plan takes at most. With less the device
keeps parameters alone, as that plan does, so that the least budget is its own."""


class Fitter:
    """Fits candidates of one model on one machine into one set of budgets."""

    def __init__(self, model: Model, machine: Machine, budget: Needs, fixed: FixedChoices) -> None:
        self.model, self.machine, self.budget, self.fixed = model, machine, budget, fixed
        self.usuals, self.tight, self.others = paces(model, budget, fixed.formats, fixed.shares)
        self.usual = self.usuals[0]
        self.shorts = with_less_on_device(self.usuals[-1], fixed)
        self.shortest = with_less_on_device(self.tight, fixed)[-1:]
        self.builder = Builder(model)
        self._in_dram = machine.device == "cpu" and not machine.emulation
        large = () if self._in_dram else large_to_update_there(model, machine, budget, fixed)
        # A function of no fitter, for what refers to itself is freed late, and with it the schedules that it keeps.
        decide = partial(spilled, model, machine, budget, fixed, self.usuals[-1])
        self.pipelines = Pipelines(model, self.builder.short, decide, large)
        self._leanest: dict[tuple[Candidate, Recompute], tuple[Lean, ...]] = {}
        self._programs: dict[Hashable, ProgramResult | None] = {}
        self._sketches: dict[tuple[int, Pace], Sketch] = {}
        self._passing: dict[Candidate, int] = {}
        """Bytes of the largest pair on its way that left no room on a device that keeps nothing, since last asked."""

    def with_recompute(self, recompute: Recompute) -> "Fitter":
        """The same where backward recomputes that. The two share what they build and solve."""
        other = copy(self)
        other.fixed = replace(self.fixed, recompute=recompute)
        return other

    def estimating(self, zeroth_order: ZerothOrder) -> "Fitter":
        """The same for zeroth-order plans of that kind."""
        other = copy(self)
        other.fixed, other._leanest = replace(self.fixed, zeroth_order=zeroth_order), {}
        return other

    # Before solving: what the program may use.

    def branches(self, candidate: Candidate) -> list[Branch]:
        """The programs to choose between: activation checkpoints all on ssd, which takes fewer buffers, or anywhere.
        What is too much for the device by the estimate of its pipeline may fit exactly, so it is tried with nothing
        kept there."""
        found, unified, inputs = [], self.fixed.unified_memory, self.fixed.checkpoints_device or 0.0
        for checkpoints in (0.0, None) if self.fixed.checkpoints is None else (self.fixed.checkpoints,):
            mixed, fixed = checkpoints != 0.0, replace(self.fixed, checkpoints=checkpoints)
            pipeline = self.pipelines.at(candidate, mixed=mixed)
            if self.budget.host < ROOMY * (pipeline.host - pipeline.gradients.host):
                fixed = replace(fixed, updates_there=False, checkpoints_device=inputs)
            limits = Limits(
                host_bytes=(1 - SURE) * self.budget.host - pipeline.constant - (pipeline.device if unified else 0),
                ssd_bytes=self.budget.ssd,
                ssd_write_bytes=None if self.budget.writes == UNLIMITED else self.budget.writes,
                device_bytes=None if unified else self._spare_on_device(pipeline.device),
                parameter_buffers=pipeline.parameters,
                checkpoint_buffers=pipeline.checkpoints,
                gradient_buffers=pipeline.gradients,
            )
            found.append(Branch(fixed, limits))
        return found

    def at_most(self, branches: Sequence[Branch]) -> list[Branch]:
        """`branches` with all of the host budget, as if the estimate of the buffers were too careful."""
        return [each.with_host(self.budget.host) for each in branches]

    def has_room(self, candidate: Candidate, part: float = 1.0) -> bool:
        """Whether a part of the device has room for the pipeline, by its estimate, which may be a little too much."""
        pipeline = self.pipelines.at(candidate, mixed=False)
        return self.fixed.unified_memory or pipeline.device_peak <= part * self.budget.device

    def _paces(self, candidate: Candidate) -> tuple[tuple[Pace, ...], tuple[Pace, ...]]:
        """The usual paces and the tight ones; where the device may have no room, then those for less of it."""
        if self.has_room(candidate, ROOM):
            return self.usuals, (self.tight,)
        return (*self.usuals, *self.shorts), (self.tight, *self.shortest)

    def _spare_on_device(self, used: float) -> float | None:
        """What the device may keep between uses: states, unless `kept` says which, and activations. None where that is
        nothing: a device made of DRAM for want of another would only have what is on host by another name."""
        return None if self._in_dram else max(self.budget.device - used, 0.0)

    # Solving.

    def solve(self, candidate: Candidate, branches: Sequence[Branch]) -> Solved | None:
        """The fastest decision of a candidate that keeps every budget, by the first of `branches` that has one."""
        usuals, tight = self._paces(candidate)
        branches = self._fastest_first(candidate, branches)
        for pace, branch in product(usuals, branches):
            solved = self._approach(candidate, branch, pace, "seconds", self.budget)
            if solved is not None and solved.branch.limits.saved_in_transit:
                # It saves less for want of room; shorter chunks leave more, and hide less.
                below = solved.program.seconds * LESS_HIDDEN
                return self._approach(candidate, branch, tight[0], "seconds", self.budget, below) or solved
            if solved is not None:
                return solved
        if not self._hopeless(candidate):
            for aim, pace, branch in product(("seconds", *self._last_resorts(candidate)), tight, branches):
                solved = self._approach(candidate, branch, pace, aim, self.budget)
                if solved is not None:
                    return solved
        smaller = self._with_smaller_pairs(candidate, branches)
        return self.solve(candidate, smaller) if smaller else first_within(self.leanest(candidate), self.budget)

    def _fastest_first(self, candidate: Candidate, branches: Sequence[Branch]) -> list[Branch]:
        """By the program with whole states, on a device; as they are where one has no room by the estimate."""
        known = not self.fixed.unified_memory and all(self.seconds(candidate, each) < inf for each in branches)
        return sorted(branches, key=lambda each: self.seconds(candidate, each)) if known else list(branches)

    def _with_smaller_pairs(self, candidate: Candidate, branches: Sequence[Branch]) -> list[Branch]:
        """`branches` without the largest saved activations of those that were too much on their way through a device
        that keeps nothing; none where no such were found."""
        largest = self._passing.pop(candidate, 0)
        return [replace(each, limits=replace(each.limits, pair_bytes=largest - 1)) for each in branches if largest]

    def paced(self, candidate: Candidate, branches: Sequence[Branch], pace: Pace) -> Solved | None:
        """The same at that one of `others`, for whoever can tell which is the fastest: the program knows no pace."""
        found = (self._approach(candidate, branch, pace, "seconds", self.budget) for branch in branches)
        return next((solved for solved in found if solved), None)

    def seconds(self, candidate: Candidate, branch: Branch) -> float:
        """The program's seconds of a step with whole states; infinite where it has no placement."""
        program = self._program(candidate, self._whole_states(candidate, branch, "seconds"), "seconds")
        return program.seconds if program else inf

    def leaner(self, candidate: Candidate, branch: Branch, host: int, below: float) -> Solved | None:
        """The fastest decision by a branch within `host`, as a plan for all of the host budget; None where by the
        program a step takes `below` seconds or more."""
        if below <= self.seconds(candidate, branch) < inf:
            return None
        solved = self._approach(candidate, branch, self.usual, "seconds", self.budget.changed("host memory", host))
        if solved is None:
            return None
        return replace(solved, branch=branch.with_host(branch.limits.host_bytes + self.budget.host - host))

    def resident(self, candidate: Candidate, branches: Sequence[Branch]) -> Solved | None:
        """The decision that keeps all on the device, and updates there; None where that does not fit or may not be."""
        for branch in self._keeping_everything(branches):
            solved = self._approach(candidate, branch, self.usual, "seconds", self.budget)
            if solved is not None:
                return replace(solved, branch=branch)
        return None

    def resident_sketch(self, candidate: Candidate, branches: Sequence[Branch]) -> Sketch | None:
        """About what `resident` would find, by the estimate."""
        return self._first_that_fits(candidate, [(each, self.usual) for each in self._keeping_everything(branches)])

    def _keeping_everything(self, branches: Sequence[Branch]) -> list[Branch]:
        """Those of `branches` that may keep all on the device, with that fixed."""
        if not may_keep_everything(self.model, self.machine, self.budget.device, self.fixed):
            return []
        there = [each for each in branches if each.limits.device_bytes is not None]
        kept = everything(self.model)
        return [replace(each, fixed=replace(each.fixed, kept=kept, checkpoints_device=1.0)) for each in there]

    def least(self, candidate: Candidate, constraint: Constraint) -> int | None:
        """The least of one budget with which `solve` succeeds, the others as they are; None when they rule it out."""
        budget, ways = self.budget.without(constraint), self.leanest(candidate)
        if all(in_memory(way.at_least.over(budget)) for way in ways):
            return None
        leanest = leanest_of(ways, constraint, budget)
        found = [leanest.of(constraint)] if leanest else []
        if constraint in ("ssd space", "ssd writes"):
            aim: Aim = "ssd space" if constraint == "ssd space" else "ssd writes"
            for branch in self.branches(candidate):
                solved = self._approach(candidate, branch, self.tight, aim, budget)
                found += [solved.fitted.needs.of(constraint)] if solved else []
        return min(found, default=None)

    def least_beside(self, solved: Solved, rooms: Collection[Room]) -> dict[Room, tuple[int, float]]:
        """Each of `rooms` that there is -> about the least of it with which the candidate of `solved` still fits, the
        other budgets as they are, and the program's seconds of a step there.

        What the shortened model takes, rounded up.
        """
        candidate, own, found = solved.fitted.candidate, solved.fitted.needs, dict[Room, tuple[int, float]]()
        memories: tuple[Room, ...] = ("host memory",) if self.fixed.unified_memory else ("host memory", "device memory")
        for constraint in (memory for memory in memories if memory in rooms):
            found[constraint] = own.of(constraint), solved.program.seconds
            lean = self._lean_sketches(candidate, every=constraint == "device memory")
            fits = [each.needs for each in lean if not each.needs.over(self.budget.without(constraint))]
            least = min(fits, key=lambda needs: needs.of(constraint), default=own)
            if least.of(constraint) < own.of(constraint):
                # As if all of it, and of the other budget, were for what stays.
                room = self.budget.changed(constraint, least.of(constraint))
                limits = Limits(room.host, device_bytes=self._spare_on_device(self.budget.device - room.device))
                best = self._program(candidate, Branch(self.fixed, limits), "seconds")
                found[constraint] = least.of(constraint), best.seconds if best else solved.program.seconds
            elif constraint == "host memory":
                # What the plan takes is no budget that does: of less room, more goes to the operations that it keeps.
                exact = leanest_of(self.leanest(candidate), constraint, self.budget.without(constraint))
                found[constraint] = exact.host if exact else self.budget.host, solved.program.seconds
        if "ssd space" not in rooms:
            return found
        found["ssd space"] = own.ssd, solved.program.seconds
        limits = replace(solved.branch.limits, ssd_bytes=None)
        smallest = self._program(candidate, Branch(solved.branch.fixed, limits), "ssd space")
        if smallest is not None and smallest.ssd_bytes < own.ssd:
            needs = self._sketched(candidate, smallest, self.tight).needs
            if not needs.over(self.budget) and needs.ssd < own.ssd:
                found["ssd space"] = needs.ssd, smallest.seconds
        return found

    def _last_resorts(self, candidate: Candidate) -> tuple[Aim, ...]:
        """What to aim for, when the fastest placement breaks a budget by its rounding: the least of that budget."""
        corner = self._corner(candidate, 0, 0, 0, self.fixed.kept)
        everything = footprint(self.model, self._decision(candidate, corner, self.tight))
        aims: list[Aim] = []
        if everything.ssd_write_bytes > 0.9 * self.budget.writes:
            aims.append("ssd writes")
        if everything.ssd_bytes > 0.9 * self.budget.ssd:
            aims.append("ssd space")
        return tuple(aims)

    def _approach(
        self, candidate: Candidate, branch: Branch, pace: Pace, aim: Aim, budget: Needs, below: float = inf
    ) -> Solved | None:
        """Of what fits by the estimate the fastest, or for another aim the last: build, compare, and again. Nothing
        where by the program a step takes `below` seconds or more."""
        placements = self._placements(candidate, branch, pace, aim, budget)
        fitting = [(sketch.program, found) for sketch, found in placements if not sketch.needs.over(budget)]
        if not fitting:
            return None
        best, found = fastest(fitting) if aim == "seconds" else fitting[-1]
        if best.seconds >= below:
            return None
        for number in range(ROUNDS):
            fitted = self.builder.build(candidate, self._decision(candidate, best, pace))
            over = fitted.needs.over(budget)
            if not over:
                return Solved(fitted, best, found)
            if "device memory" in over and not keeps(best):
                break
            found = replace(found, limits=reduced(found.limits, over, HARDER**number, NEAR * budget.host))
            again = self._program(candidate, self._whole_states(candidate, found, aim), aim)
            if again is None:
                break
            best = again
        return None

    def _placements(
        self, candidate: Candidate, branch: Branch, pace: Pace, aim: Aim, budget: Needs
    ) -> Iterator[tuple[Sketch, Branch]]:
        """What the program finds, by the estimate within `budget` or not, and what it was given: as much as leaves room
        for the pipeline's buffers, by solving, estimating, and again."""
        limits = branch.limits
        if aim == "ssd writes":
            limits = replace(limits, ssd_write_bytes=None)  # as little as can be, so only the exact figure counts
        elif aim == "ssd space":
            limits = replace(limits, ssd_bytes=None)
        guessed, fits, kept, broken, refused, push, harder = True, False, -inf, inf, -inf, 1.0, 1.0
        """The most that was found not to be too much, the least that was, what no placement has room in, and how hard
        to lean on what is too much."""
        for _ in range(ROUNDS):
            attempt = self._whole_states(candidate, Branch(branch.fixed, limits), aim)
            program = self._program(candidate, attempt, aim)
            if program is None:
                if guessed:
                    guessed, limits = False, replace(limits, host_bytes=budget.host)  # perhaps it was too careful
                    continue
                refused = limits.host_bytes
                if fits or not refused < broken < inf or broken - refused < SPARE * budget.host:
                    break
                limits = replace(limits, host_bytes=(refused + broken) / 2)
                continue
            sketch = self._sketched(candidate, program, pace)
            over = sketch.needs.over(budget)
            if "device memory" in over and not keeps(program):
                largest = largest_passing(self.model, program)
                self._passing[candidate] = max(self._passing.get(candidate, 0), largest)
                break
            if "host memory" in over and program.saved and not limits.saved_in_transit:
                # The program knew nothing of what saved activations take on their way to ssd: now it does.
                pairs = saved_in_transit(self.builder.in_short(sketch.decision), self.model, sketch.decision)
                if pairs:
                    limits = replace(limits, host_bytes=branch.limits.host_bytes, saved_in_transit=pairs)
                    guessed = True
                    continue
            guessed, fits = False, fits or not over
            yield sketch, Branch(branch.fixed, limits)
            spare = budget.host - sketch.needs.host
            if spare < 0:
                broken = limits.host_bytes
                wanted = broken + push * spare - NEAR * budget.host
                push *= 2
            else:
                if "device memory" not in over:  # with less of the device, host has more to take
                    kept = max(kept, limits.host_bytes)
                unused = program.limited_bytes < limits.host_bytes - SPARE * budget.host
                wanted = limits.host_bytes if unused or spare < SPARE * budget.host else limits.host_bytes + spare
            if not over and wanted == limits.host_bytes:
                break
            least = max(kept, refused)
            if not least <= wanted < broken or wanted == refused:
                wanted = (max(least, min(wanted, limits.host_bytes)) + broken) / 2
            limits = replace(reduced(limits, over, harder), host_bytes=wanted)
            harder *= HARDER if "device memory" in over else 1.0

    def _whole_states(self, candidate: Candidate, branch: Branch, aim: Aim) -> Branch:
        """`branch` with what the device keeps decided, as whole states."""
        if branch.fixed.kept is not None or not (self.fixed.unified_memory or branch.limits.device_bytes is not None):
            return branch
        return best_whole_states(self.model, branch, lambda branch: self._program(candidate, branch, aim))

    def sketch(self, candidate: Candidate, branches: Sequence[Branch]) -> Sketch | None:
        """About what `solve` would find, by the same attempts on the shortened model alone."""
        tried = 0
        for branch, pace, aim in self._attempts(candidate, self._fastest_first(candidate, branches)):
            fitting = list[tuple[ProgramResult, Sketch]]()
            for sketch, _ in self._placements(candidate, branch, pace, aim, self.budget):
                if not sketch.needs.over(self.budget):
                    fitting.append((sketch.program, sketch))
                elif (tried := tried + 1) == DOUBTFUL and not fitting and self._hopeless(candidate):
                    return None
            if fitting:
                return fastest(fitting)[1] if aim == "seconds" else fitting[-1][1]
        if smaller := self._with_smaller_pairs(candidate, branches):
            return self.sketch(candidate, smaller)
        return next((each for each in self._lean_sketches(candidate) if not each.needs.over(self.budget)), None)

    def _attempts(self, candidate: Candidate, branches: Sequence[Branch]) -> Iterator[tuple[Branch, Pace, Aim]]:
        """What `solve` tries, one after the other."""
        yield from ((branch, pace, "seconds") for pace, branch in product(self.usuals, branches))
        usuals, tight = self._paces(candidate)
        yield from ((branch, pace, "seconds") for pace, branch in product(usuals[len(self.usuals) :], branches))
        for aim in ("seconds", *self._last_resorts(candidate)):
            yield from ((branch, pace, aim) for pace, branch in product(tight, branches))

    def glance(self, candidate: Candidate, branch: Branch) -> Sketch | None:
        """The same without the attempts that find the leanest: for a comparison, which nothing runs."""
        found = self._first_that_fits(candidate, [(branch, self.usual), (branch, self.tight)])
        more = self._paces(candidate)[0][len(self.usuals) :] if found is None else ()
        return found or self._first_that_fits(candidate, [(branch, pace) for pace in more])

    def _first_that_fits(self, candidate: Candidate, ways: Sequence[tuple[Branch, Pace]]) -> Sketch | None:
        found = (each for way in ways for each, _ in self._placements(candidate, *way, "seconds", self.budget))
        return next((each for each in found if not each.needs.over(self.budget)), None)

    def cannot_fit(self, candidate: Candidate) -> bool:
        """Whether even the leanest takes too much memory: by the estimate, and by what it takes at least."""
        ways = self.leanest(candidate) if self._hopeless(candidate) else ()
        return bool(ways) and all(in_memory(way.at_least.over(self.budget)) for way in ways)

    def _hopeless(self, candidate: Candidate) -> bool:
        """Whether by the estimate even the leanest takes too much memory."""
        return all(in_memory(sketch.needs.over(self.budget)) for sketch in self._lean_sketches(candidate))

    def _lean_sketches(self, candidate: Candidate, *, every: bool = False) -> list[Sketch]:
        """About what `leanest` finds, which takes long to build: everything on ssd and prompt. Where there are so few
        layers that to keep all of a kind may take less than to pass it through, what it finds. `every`: also what takes
        least of the device where that has room for more."""
        if len(self.model.layers) <= 2 * ENDS:
            solved = (each.solved for each in self.leanest(candidate))
            return [Sketch(each.program, each.fitted.decision, each.fitted.needs) for each in solved]
        kept_ways = self._kept_ways(candidate)
        ways = (self.fixed.kept, *(kept_ways[1:] or kept_ways))
        found = [(self._corner(candidate, 0, 0, 0, kept), self.tight) for kept in ways]
        found += [(found[0][0], pace) for pace in (self.shortest if every else self._paces(candidate)[1][1:])]
        return [self._sketched(candidate, *each) for each in found]

    def leanest(self, candidate: Candidate) -> tuple[Lean, ...]:
        """What a tight budget ends in: everything at one end or the other, and all updates prompt or delayed, whichever
        takes least host memory; once for each way to use the device: for no parameters between their uses, for those of
        both ends of the model, as many as there is room for, or all states; and without room, for one layer alone."""
        key = candidate, self.fixed.recompute_leanly
        if key not in self._leanest:
            ways = [(kept, self.tight) for kept in (self.fixed.kept, *self._kept_ways(candidate))]
            least = self.shortest if len(self.model.layers) <= 2 * ENDS else self._paces(candidate)[1][1:]
            ways += [(self.fixed.kept, pace) for pace in least]
            self._leanest[key] = tuple(self._find_leanest(candidate, *way) for way in ways)
        return self._leanest[key]

    def _kept_ways(self, candidate: Candidate) -> list[Mapping[str, KeptShares]]:
        if self.fixed.kept is not None or self._spare_on_device(0.0) is None:
            return []
        counts = Counter(state.state_class for state in self.model.states)
        size = {each.state_class: parameter_bytes(each, self.model, self.fixed) for each in self.model.states}
        blocks = {self.model.states[index].state_class for layer in self.model.layers[1:-1] for index in layer.states}
        ends = {name: KeptShares(0.0 if name in blocks else 1.0) for name in counts}
        least = self._sketched(candidate, self._corner(candidate, 0, 0, 0, ends), self.tight)
        spare = self.budget.device - least.needs.device
        most = dict(ends)
        for name in sorted(blocks):
            kept = min(max(spare // size[name], 0), counts[name])
            most[name] = KeptShares(kept / counts[name])
            spare -= kept * size[name]
        whole = dict.fromkeys(counts, KeptShares(1.0))
        if most != whole and sum(size[name] * counts[name] for name in counts) <= self.budget.device:
            # Where all stay, nothing passes through: what the last of them takes, its buffers give back.
            needs = self._sketched(candidate, self._corner(candidate, 0, 0, 0, whole), self.tight).needs
            most = whole if needs.device <= self.budget.device else most
        fixed = replace(self.fixed, checkpoints_device=None)  # all states are meant
        may = may_keep_everything(self.model, self.machine, self.budget.device, fixed)
        return [ends, *([most] if most != ends else []), *([everything(self.model)] if may else [])]

    def _find_leanest(self, candidate: Candidate, kept: Mapping[str, KeptShares] | None, pace: Pace) -> Lean:
        few = replace(candidate, micro_batches=min(candidate.micro_batches, max(MEASURED)))
        delays = (0, 1) if self.fixed.delay_ratio is None else (0,)  # of no effect where it is decided
        best: tuple[int, int, tuple[int, int, int, int]] | None = None
        for optimizer, parameters, checkpoints, delay in product((0, 1), (0, 1), (0, 1), delays):
            corner = self._corner(few, optimizer, parameters, checkpoints, kept, delay)
            if best is not None and corner.host_bytes > best[0]:
                continue  # what stays is too much alone
            needs = self._sketched(few, corner, pace).needs
            found = needs.host, needs.ssd, (optimizer, parameters, checkpoints, delay)
            best = found if best is None else min(best, found)
        assert best is not None
        optimizer, parameters, checkpoints, delay = best[2]
        program = self._corner(candidate, optimizer, parameters, checkpoints, kept, delay)
        branch = Branch(replace(self.fixed, kept=kept), Limits(program.host_bytes + PAGE))
        return Lean(self.builder, candidate, self._decision(candidate, program, pace), program, branch)

    def _corner(
        self,
        candidate: Candidate,
        optimizer: float,
        parameters: float,
        checkpoints: float,
        kept: Mapping[str, KeptShares] | None,
        delay_ratio: float = 0.0,
    ) -> ProgramResult:
        there = 1.0 if kept == everything(self.model) else None
        choices = self.fixed.where_free(delay_ratio, parameters, optimizer, checkpoints, there)
        choices = replace(choices, kept=kept, recompute=self.fixed.recompute_leanly)
        program = self._program(candidate, Branch(choices, Limits(UNLIMITED)), "host memory")
        assert program is not None, "no limit, and still no placement"
        return program

    def _program(self, candidate: Candidate, branch: Branch, aim: Aim) -> ProgramResult | None:
        """What solves the program, or None; kept, for the paces and the attempts of one candidate begin alike."""
        kept = branch.fixed.kept
        shares = None if kept is None else tuple(kept.items())
        key = candidate, branch.limits, replace(branch.fixed, kept=None), shares, aim
        if key not in self._programs:
            self._programs[key] = solve_program(
                self.model,
                self.machine,
                micro_batch_size=candidate.micro_batch_size,
                micro_batches=candidate.micro_batches,
                limits=branch.limits,
                fixed=branch.fixed,
                aim=aim,
            )
        return self._programs[key]

    def _decision(self, candidate: Candidate, program: ProgramResult, pace: Pace) -> Decision:
        return decision_of(self.model, self.budget, self.fixed, candidate, program, pace)

    def _sketched(self, candidate: Candidate, program: ProgramResult, pace: Pace) -> Sketch:
        """The estimate of a program that `_program` keeps, which is what tells it from others; kept too."""
        key = id(program), pace
        if key not in self._sketches:
            decision = self._decision(candidate, program, pace)
            self._sketches[key] = Sketch(program, decision, self.builder.estimate(decision))
        return self._sketches[key]
