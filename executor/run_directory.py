"""A run's directory: what lies in it, whose it is at the moment, and how it changes so that no crash leaves it unclear.

Owns run.json, the plans and config.yaml beside it, and the order in which the former are written around the making of
a store. Before a store is made its identity is in run.json and its plan is in the directory, so whatever store is found
later is known.
"""

import contextlib
import errno
import hashlib
import itertools
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from ssdplan.plans.documents import Document, Name
from ssdplan.plans.errors import DiskFullError, UsageError
from ssdplan.plans.plan import Plan

from .metrics import flush_directory
from .store import Locks

SCHEMA: Literal["ssdplan.run/1"] = "ssdplan.run/1"
OptionValue = bool | str | tuple[str, ...]

RUN, PLAN, METRICS, MODEL = "run.json", "plan.json", "metrics.jsonl", "model"
CONFIGURATION = "config.yaml"
"""The run's options for people, who may start another by it; a run never reads its own."""
_NEXT = "plan.next.json"
"""The plan of a store that the run is moving to."""
_DOCUMENTS = (RUN, PLAN, "plan-*.json", _NEXT, CONFIGURATION)
"""What is written here whole or not at all, as patterns."""


class Run(Document):
    """run.json: what a run was started with, or went on with last."""

    schema_: Literal["ssdplan.run/1"] = Field(alias="schema")
    options: dict[Name, OptionValue] = Field(default_factory=dict)
    """Of `ssdplan run`, by name, resolved: paths are absolute, and what was not given has its default."""
    volumes: tuple[str, ...] = ()
    """Where the store was to lie, absolute; none: in the run's directory."""
    snapshots: bool = False
    """Whether it keeps any."""
    left: tuple[str, ...] = ()
    """Volumes that it is moving away from, on which a crash leaves what must be cleared."""
    stores: tuple[str, ...] = ()
    """The identities of the stores that it may have made, the latest last: others on a volume are not its own."""
    wandb: str | None = None
    """Which run it is at Weights & Biases; None as long as it is none."""
    rendered_at: datetime | None = None
    """When it is, by the clock on the wall, for chat templates that write the time; None of a version that did not keep
    it."""


class RunDirectory:
    """A run's directory, locked for as long as it is open."""

    def __init__(self, path: Path, run: Run) -> None:
        self.path, self.run = path, run

    @classmethod
    @contextlib.contextmanager
    def create(cls, path: Path, run: Run, plan: Plan) -> Iterator[Self]:
        """A new one; when the run ends before its first step, what it wrote goes again, and of others' only what
        is an empty directory. Raises UsageError where it cannot be made or is not empty, StoreError when another run
        has it.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(
                f"{path}: exists already and is not an empty directory; choose another --out, or remove it"
                + (f", or go on with it: ssdplan run --resume {path}" if (path / RUN).exists() else "")
            )
        try:
            made = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path}: cannot make this directory: {error.strerror}") from error
        with _locked(path):
            opened = cls(path, run)
            try:
                _save(plan, path / PLAN)
                _save(run, path / RUN)
                yield opened
            except BaseException:
                if not (path / METRICS).exists():
                    opened._remove_own(directory=made)
                raise

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """That of a run that ended or was stopped. Raises UsageError for what is none, StoreError when it goes on."""
        if not (path / RUN).is_file():
            raise UsageError(f"{path}: no run that could go on: it has no {RUN}")
        with _locked(path):
            _remove_unfinished(path)
            yield cls(path, Run.load(path / RUN))

    @property
    def volumes(self) -> list[Path]:
        """Where its stores are made."""
        return [Path(place) for place in self.run.volumes] or [self.path]

    @property
    def left(self) -> list[Path]:
        return [Path(place) for place in self.run.left]

    def plan(self, sha256: str) -> Plan | None:
        """Its plan of that hash, if it is here: of the file as it was written, which a version of ours with more fields
        would write otherwise."""
        for path in sorted(self.path.glob("plan*.json")):
            plan = Plan.load(path)
            if sha256 in (plan.sha256(), hashlib.sha256(path.read_bytes()).hexdigest()):
                return plan
        return None

    def change(
        self,
        *,
        options: Mapping[str, OptionValue] | None = None,
        volumes: Sequence[Path] | None = None,
        left: Sequence[Path] | None = None,
        stores: Sequence[str] | None = None,
        wandb: str | None = None,
        rendered_at: datetime | None = None,
    ) -> None:
        """Write run.json with other values of these fields."""
        changed: dict[str, object] = {}
        if options is not None:
            changed["options"] = dict(options)
        if volumes is not None:
            # Its own directory goes without a name, so that it may move.
            own = len(volumes) == 1 and volumes[0].exists() and volumes[0].samefile(self.path)
            changed["volumes"] = () if own else tuple(str(place.absolute()) for place in volumes)
        if left is not None:
            changed["left"] = tuple(str(place.absolute()) for place in left)
        if stores is not None:
            changed["stores"] = tuple(stores)
        if wandb is not None:
            changed["wandb"] = wandb
        if rendered_at is not None:
            changed["rendered_at"] = rendered_at
        self.run = self.run.model_copy(update=changed)
        _save(self.run, self.path / RUN)

    def keep_configuration(self, text: str) -> None:
        """Let config.yaml be `text`. Raises DiskFullError, UsageError where it cannot be written otherwise."""
        path = self.path / CONFIGURATION
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
            raise kind(f"{path}: cannot write: {error.strerror}") from error

    def next_store(self) -> bytes:
        """The identity of a store that is to be made."""
        identity = secrets.token_bytes(16)
        self.change(stores=(*self.run.stores, identity.hex()))
        return identity

    def plan_ahead(self, plan: Plan) -> None:
        """Keep the plan of a store that the run is to move to."""
        _save(plan, self.path / _NEXT)

    def forget_ahead(self) -> None:
        (self.path / _NEXT).unlink(missing_ok=True)

    def moved(self, plan: Plan) -> str:
        """The run is at `plan` now, whatever a crash left of the move: that is plan.json, and the one that it was is
        under a name of its own (plan-0.json, then plan-1.json), which is returned."""
        current, earlier = self.path / PLAN, ""
        if current.exists() and (before := Plan.load(current)).sha256() != plan.sha256():
            earlier = next(name for n in itertools.count() if not (self.path / (name := f"plan-{n}.json")).exists())
            _save(before, self.path / earlier)
        if earlier or not current.exists():
            _save(plan, current)
        self.forget_ahead()
        return earlier

    def _remove_own(self, *, directory: bool) -> None:
        """What a run leaves here before its first step, and with `directory` that, if nothing else is in it. Its store
        and its other records have removed themselves."""
        _remove_unfinished(self.path)
        for name in (RUN, PLAN, CONFIGURATION):
            (self.path / name).unlink(missing_ok=True)
        if self.run.wandb:
            shutil.rmtree(self.path / "wandb", ignore_errors=True)
        for entry in (*self.path.iterdir(), *([self.path] if directory else [])):
            with contextlib.suppress(OSError):  # no directory, or somebody's file is in it
                entry.rmdir()

    def put_model_aside(self, step: int) -> None:
        """Give the model of a run that ended after `step` steps, and goes on, a name of its own."""
        if (self.path / MODEL).exists():
            names = itertools.chain([f"{MODEL}-{step}"], (f"{MODEL}-{step}-{n}" for n in itertools.count(1)))
            (self.path / MODEL).rename(next(path for name in names if not (path := self.path / name).exists()))
            _flush(self.path)


def _remove_unfinished(path: Path) -> None:
    """What a kill left of a document that was being written."""
    for name in _DOCUMENTS:
        for entry in path.glob(f".{name}.*tmp"):
            entry.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    locks = Locks()
    try:
        locks.take(path)
        yield
    finally:
        locks.close()


def _save(document: Document, path: Path) -> None:
    """Durably. Raises DiskFullError, UsageError where it cannot be written otherwise."""
    try:
        document.save(path)
    except UsageError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(str(error)) from error
        raise
    _flush(path.parent)


def _flush(directory: Path) -> None:
    with contextlib.suppress(OSError):  # the name is there; only a power cut could still take it
        flush_directory(directory)
