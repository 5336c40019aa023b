"""A figure and where it is from. Owns nothing else: no figure of the catalogue stands without one of these."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["measured", "data sheet", "assumed", "given"]
GIVEN = "given"
"""The source of a figure that the user says."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its unit and its source."""

    value: float
    unit: str
    source: str
    """The document that has it, by name; of an assumed figure, the reasoning."""
    assumed: bool = False
    """No document that we could look up has this number: it is a judgement, or recalled."""
    measured: bool = False
    """Somebody ran it and told of it; else a data sheet, a product page or a standard has it."""

    @property
    def kind(self) -> Kind:
        """What the figure is worth, in a word."""
        if self.source == GIVEN:
            return "given"
        return "assumed" if self.assumed else "measured" if self.measured else "data sheet"


def assumed(value: float, unit: str, why: str) -> Figure:
    """A figure that rests on reasoning."""
    return Figure(value, unit, why, assumed=True)


def measured(value: float, unit: str, how: str) -> Figure:
    """A figure that somebody measured on such a thing."""
    return Figure(value, unit, how, measured=True)
