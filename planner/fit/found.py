"""What fitting is given and what it finds: branches, decisions that are built, and decisions that are estimated.

Owns these records alone.
"""

from dataclasses import dataclass

from ssdplan.plans.documents.plan import Decision

from ..program.choices import FixedChoices, Limits
from ..program.placement import ProgramResult
from .budgets import Needs
from .estimate import Fitted


@dataclass(frozen=True, slots=True)
class Branch:
    """What the program is given: choices and limits."""

    fixed: FixedChoices
    limits: Limits


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
