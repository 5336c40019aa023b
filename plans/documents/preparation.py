"""train.json: what `ssdplan train` has prepared in a run's directory: by which options, and which profile and plan.

Owns the document's fields. Whether what it names is still valid is the command's business.
"""

from typing import Annotated, Literal

from pydantic import Field

from .base import Document, Name
from .run import OptionValue

SCHEMA: Literal["ssdplan.train/1"] = "ssdplan.train/1"
TRAIN = "train.json"
PROFILE = "profile.json"
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Preparation(Document):
    """train.json: what was prepared for a run, before that began."""

    schema_: Literal["ssdplan.train/1"] = Field(alias="schema")
    measured: dict[Name, OptionValue] = Field(default_factory=dict)
    """The options of `ssdplan profile` that were given or chosen, by name; paths are absolute."""
    planned: dict[Name, OptionValue] = Field(default_factory=dict)
    """The same of `ssdplan solve`."""
    given: tuple[Name, ...] = ()
    """Which of both the user gave; the others were chosen."""
    profile: Hash | None = None
    """The sha256 of profile.json; None until it is there."""
    plan: Hash | None = None
    """The sha256 of plan.json together with that profile's and with `planned`, from which it was solved; None until it
    is there."""
