"""What fitting is given and what it finds: branches, decisions that are built, and decisions that are estimated.

Owns these records, and which of several answers of the program is the best.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import Model
from ssdplan.plans.schedule.saved import saved_bytes

from ..program.choices import FixedChoices, Limits
from ..program.placement import ProgramResult
from ..program.program import NEGLIGIBLE
from .budgets import Needs
from .estimate import Fitted


@dataclass(frozen=True, slots=True)
class Branch:
    """What the program is given: choices and limits."""

    fixed: FixedChoices
    limits: Limits

    def with_host(self, nbytes: float) -> "Branch":
        """The same for as much host memory."""
        return replace(self, limits=replace(self.limits, host_bytes=max(nbytes, 0.0)))


@dataclass(frozen=True, slots=True)
class Solved:
    """A fitted decision and the program that it came from."""

    fitted: Fitted
    program: ProgramResult
    branch: Branch
    """What the program was given in the end."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A decision that was estimated and not built."""

    program: ProgramResult
    decision: Decision
    needs: Needs


def inputs_elsewhere(branches: Sequence[Branch]) -> list[Branch]:
    """Those of `branches` whose program may keep activation checkpoints on the device, with none there. The program is
    slower for it, but a step that keeps something else instead may wait for less than the program sees."""
    free = [each for each in branches if each.fixed.checkpoints_device is None]
    return [replace(each, fixed=replace(each.fixed, checkpoints_device=0.0)) for each in free]


Given = TypeVar("Given")


def fastest(fitting: Sequence[tuple[ProgramResult, Given]]) -> tuple[ProgramResult, Given]:
    """Of programs' answers, and what belongs to each, the fastest; of about equally fast ones that which writes least
    to ssd, as a program itself decides."""
    most = min(program.seconds for program, _ in fitting) * (1 + NEGLIGIBLE)
    return min((each for each in fitting if each[0].seconds <= most), key=lambda each: each[0].ssd_write_bytes)


def largest_passing(model: Model, program: ProgramResult) -> int:
    """Bytes of the largest of the saved activations of a pair that pass through the device; 0 where none do."""
    size = program.question.micro_batch_size
    return max(
        (
            saved_bytes(model.timing(name, size).rung(each.rung))
            for name, shares in program.saved.items()
            for each in shares
            if each.tier != "device"
        ),
        default=0,
    )
