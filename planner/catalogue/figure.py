"""A figure and where it is from. Owns nothing else: no figure of the catalogue stands without one of these."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its unit and its source."""

    value: float
    unit: str
    source: str
    """The document that has it, by name; of an assumed figure, the reasoning."""
    assumed: bool = False
    """No document that we could look up has this number: it is a judgement, or recalled."""


def assumed(value: float, unit: str, why: str) -> Figure:
    """A figure that rests on reasoning."""
    return Figure(value, unit, why, assumed=True)
