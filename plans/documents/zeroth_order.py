"""Zeroth order: how a step without gradients estimates one, as far as a schedule knows it; a part of a plan.

Owns these fields (docs/plan-format.md), and the format that parameters have under them.
"""

from typing import Self

from pydantic import Field, model_validator

from .base import Part
from .state_layout import FP32, GRAIN, PARAMETERS, Format, OptimizerFormats, Precision

MOST_DIRECTIONS = 256
"""Of a zeroth-order step."""
MOST_STEPS_BETWEEN = 64
"""Between two writes of a zeroth-order run's parameters."""
SIDES = 2
"""Forwards of a direction: at plus and at minus eps."""


class ZerothOrder(Part):
    """How a zeroth-order step estimates its gradient (MeZO; ZO-Offloading section 2), as far as a schedule knows it."""

    directions: int = Field(default=1, ge=1, le=MOST_DIRECTIONS)
    """Random directions of a step, along each of which the loss is taken twice."""
    in_turns: bool = False
    """The copies at plus and at minus eps take turns in one place, and each direction is drawn twice. Else both are
    there at once."""
    written_every: int = Field(default=1, ge=1, le=MOST_STEPS_BETWEEN)
    """Steps from one in which updated parameters go back to where they live to the next. In between each pass makes
    anew the updates that are pending, and parameters that the device keeps are updated where they are."""
    masters: bool = False
    """Trained parameters are fp32 wherever they live, move and are updated; compute takes copies, of which each number
    is rounded to the plan's precision before it is perturbed."""
    piece_elements: int = Field(default=0, ge=0, lt=1 << 40)
    """Trained parameters come and go in pieces of at most so many elements, through places that the next ones take
    again; copies are made piece by piece, and the pieces come once for each of `rounds`. 0: a state is on its way
    whole."""
    by_rows: bool = False
    """Of the table of token embeddings (`Table` in profile.py), which lives on host whole, come the rows that a step's
    tokens name, side by side; host makes each step's updates of all of it where it lives."""

    @model_validator(mode="after")
    def _whole_pieces(self) -> Self:
        if self.piece_elements % GRAIN:
            raise ValueError(f"piece_elements = {self.piece_elements} is not a multiple of {GRAIN}")
        return self

    @property
    def rounds(self) -> int:
        """How often a layer's copies are made in a step: for each direction, and where they take turns for each side of
        it."""
        return self.directions * (SIDES if self.in_turns else 1)

    def unfit(self, precision: Precision, formats: OptimizerFormats, gradients: bool, turns: bool) -> str:
        """Why a decision of such a step cannot be so; empty where it can. `gradients`: it says something of gradients;
        `turns`: of what stays from forward to backward."""
        if gradients:
            return "a zeroth-order step has no gradients: delay_ratio, clip_grad_norm and saved stay empty"
        if turns:
            return "a zeroth-order step has no turn: parameters_turn stays 0"
        if not formats.usual:
            return "a zeroth-order step has no optimizer states: optimizer_states and masters stay fp32"
        if self.masters and precision == "fp32":
            return "zeroth_order.masters: parameters in fp32 are their own masters; set it to false"
        return ""

    def waiting(self, *, lags: bool) -> float:
        """The updates that wait for a pass over a state, on average over steps: of one that goes back to where it lives
        or (`lags` False) of one that stays where it is."""
        return self.directions * ((self.written_every + 1) / 2 if lags else 1.0)


def parameter_format(precision: Precision, zeroth_order: ZerothOrder | None, *, frozen: bool) -> Format:
    """Of parameters wherever they live, move and are updated: of masters that have no other copy, or what compute
    takes."""
    masters = zeroth_order is not None and zeroth_order.masters and not frozen
    return FP32 if masters else PARAMETERS[precision]
