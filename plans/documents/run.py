"""run.json: what a run was started with, or went on with last, and the names of what lies in its directory.

Owns the document's fields. When it is written, and in which order with the rest, is the executor's business.
"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from .base import Document, Name, Part

SCHEMA: Literal["ssdplan.run/1"] = "ssdplan.run/1"
OptionValue = bool | str | tuple[str, ...]
RUN = "run.json"
PLAN = "plan.json"
MODEL = "model"
Identity = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
"""Of a store, in hex."""


class Exported(Part):
    """A model that `ssdplan export` wrote of a snapshot."""

    step: int = Field(ge=1)
    """Of the snapshot."""
    to: str
    """The directory, absolute."""


class Run(Document):
    """run.json: what a run was started with, or went on with last."""

    schema_: Literal["ssdplan.run/1"] = Field(alias="schema")
    identity: Identity | None = None
    """Of the run, by which its user's claims know it (`executor/snapshots/claims.py`)."""
    options: dict[Name, OptionValue] = Field(default_factory=dict)
    """Of `ssdplan run`, by name, resolved: paths are absolute, and what was not given has its default."""
    volumes: tuple[str, ...] = ()
    """Where the store was to lie, absolute; none: in the run's directory."""
    snapshots: bool = False
    """Whether it keeps any."""
    left: tuple[str, ...] = ()
    """Volumes that it is moving away from, on which a crash leaves what must be cleared."""
    stores: tuple[Identity, ...] = ()
    """The identities of the stores that it may have made, the latest last: others on a volume are not its own."""
    wandb: str | None = None
    """Which run it is at Weights & Biases; None as long as it is none."""
    dropped: int | None = None
    """After how many steps its states were when its store was dropped; None: it was not."""
    exported: Exported | None = None
    """The model that was exported last; None: none was."""
    rendered_at: datetime | None = None
    """When it is, by the clock on the wall, for chat templates that write the time; None of a version that did not keep
    it."""
    steps: int | None = Field(default=None, ge=1)
    """How many steps it was last to make in all, as its options say or so many epochs of its data are; None of a
    version that did not keep it."""
