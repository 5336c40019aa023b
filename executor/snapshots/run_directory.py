"""A run's directory: its files, its lock, and an order of writing in which no crash leaves it unclear.

Owns run.json, the plans and config.yaml beside it, and the order in which the former are written around the making of
a store. Before a store is made its identity is in run.json and its plan is in the directory, so whatever store is found
later is known.
"""

import contextlib
import hashlib
import itertools
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Self

from ssdplan.plans.documents.base import MAX_DOCUMENT_BYTES, Document
from ssdplan.plans.documents.metrics import METRICS, REPORT, TRACE
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.preparation import PROFILE, TRAIN
from ssdplan.plans.documents.run import MODEL, PLAN, RUN, Exported, OptionValue, Run
from ssdplan.plans.errors import DiskFullError, UsageError
from ssdplan.plans.files import Folder, make_folder
from ssdplan.plans.room import no_room

from ..ranks.place import directory_of
from ..store import Locks
from .claims import Claims

CONFIGURATION = "config.yaml"
"""The run's options for people, who may start another by it; a run never reads its own."""
_NEXT = "plan.next.json"
"""The plan of a store that the run is moving to."""
_OLD_PLAN = re.compile("plan-[0-9]+\\.json")
_DOCUMENTS = (RUN, PLAN, "plan-*.json", _NEXT, CONFIGURATION)
"""What is written here whole or not at all, as patterns."""
_RESULTS = (METRICS, REPORT, TRACE, MODEL)
"""What else a run writes here."""


def require_new(path: Path, rank: int = 0) -> None:
    """Raise UsageError where no new run's directory can be made, because something lies there. `rank`: whose part of
    the run in `path` it is."""
    mine = directory_of(path, rank)
    if mine.exists() and (not mine.is_dir() or _holds_more(mine)):
        raise UsageError(
            f"{mine}: exists already and is not an empty directory; choose another --out, or remove {path}"
            + (f", or go on with it: ssdplan run --resume {path}" if could_go_on(mine) else "")
        )


def _holds_more(directory: Path) -> bool:
    """Whether it holds anything but what `ssdplan train` prepares of a run before that begins."""
    names = {entry.name for entry in directory.iterdir()}
    prepared = {TRAIN, PROFILE, PLAN} | {name for name in names if _OLD_PLAN.fullmatch(name)}
    return bool(names - prepared if TRAIN in names else names)


def could_go_on(path: Path) -> bool:
    """Whether something there is a run that keeps snapshots, and has not lost its store."""
    try:
        run = Run.load(path / RUN)
    except UsageError:  # none, or none that can be read
        return False
    return run.snapshots and run.dropped is None


def require_run(path: Path) -> None:
    """Raise UsageError where no run is."""
    if not (path / RUN).is_file():
        raise UsageError(f"{path}: no run that could go on: it has no {RUN}")


def is_known(run: Run, path: Path) -> bool:
    """Whether this user began the run of that run.json in the directory `path`. What it says of places outside of the
    directory is believed only then."""
    return run.identity is not None and Claims.of_user().knows(run.identity, path)


def lies_in(directory: Path, place: Path) -> bool:
    """Whether `place` is the directory, or an entry of it, links resolved."""
    here, there = directory.resolve(), place.resolve()
    return here in (there, there.parent)


def on_planned_drives(plan: Plan, places: Sequence[Path]) -> bool:
    """Whether a store at `places` lies on the drives that the plan's profile measured, as many and in their order."""
    return on_drives([Path(volume.path) for volume in plan.machine.volumes], places)


def on_drives(measured: Sequence[Path], places: Sequence[Path]) -> bool:
    """Whether `places` lie on the drives of the places that were `measured`, as many and in their order."""
    return [_drive(path) for path in places] == [_drive(path) for path in measured]


def _drive(path: Path) -> int | None:
    """The file system of a directory, or of the nearest one above that exists."""
    for folder in (path.absolute(), *path.absolute().parents):
        if folder.exists():
            return folder.stat().st_dev
    return None


class RunDirectory:
    """A run's directory, locked for as long as it is open."""

    def __init__(self, folder: Folder, run: Run, *, known: bool) -> None:
        self.folder, self.run = folder, run
        self.known = known
        """Whether this user began the run here, so that what its run.json says of places outside of it is believed."""

    @property
    def path(self) -> Path:
        return self.folder.path

    @classmethod
    @contextlib.contextmanager
    def create(cls, path: Path, run: Run, plan: Plan) -> Iterator[Self]:
        """A new one; when the run ends before its first step, what it wrote goes again, and of others' only what
        is an empty directory. Raises UsageError where it cannot be made or is not empty, StoreError when another run
        has it.
        """
        require_new(path)
        try:
            made = not path.exists()
            make_folder(path)
        except OSError as error:
            raise UsageError(f"{path}: cannot make this directory: {error.strerror}") from error
        with _locked(path) as folder:
            folder.require_own()
            _require_no_links(folder)
            _make_private(folder)
            opened = cls(folder, run.model_copy(update={"identity": secrets.token_hex(16)}), known=True)
            try:
                opened._save(plan, PLAN)
                opened._save(opened.run, RUN)
                opened._claim()
                yield opened
            except BaseException:
                if not folder.has_file(METRICS):
                    opened._remove_own(directory=made)
                raise

    @classmethod
    @contextlib.contextmanager
    def join(cls, path: Path, run: Run) -> Iterator[Self]:
        """A new one of a rank that joins a run that others began. It has no plan, and so is not yet the run's, until
        `moved` says by which all go on. Raises as `create`."""
        require_new(path)
        make_folder(path)
        with _locked(path) as folder:
            folder.require_own()
            _make_private(folder)
            opened = cls(folder, run.model_copy(update={"identity": secrets.token_hex(16)}), known=True)
            opened._claim()  # first: whoever finds its run.json is to believe the places in it
            opened._save(opened.run, RUN)
            yield opened

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """That of a run that ended or was stopped. Raises UsageError for what is none or belongs to another user,
        LinkError where one of its files is a link, StoreError when it goes on."""
        require_run(path)
        with _locked(path) as folder:
            folder.require_own()
            _require_no_links(folder)
            run = Run.parse(folder.read(RUN, MAX_DOCUMENT_BYTES, "run"), path / RUN)
            opened = cls(folder, run, known=is_known(run, path))
            _remove_unfinished(folder)
            yield opened

    def adopt(self) -> None:
        """The user says that this directory is theirs, though the run was begun elsewhere: from now on it is known. Of
        places that were left, which nobody named, nothing is believed."""
        self.run = self.run.model_copy(update={"identity": self.run.identity or secrets.token_hex(16), "left": ()})
        self._save(self.run, RUN)
        self._claim()
        self.known = True

    def _claim(self) -> None:
        assert self.run.identity is not None
        Claims.of_user().note(self.run.identity, self.path)

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
        for name in self.folder.names("plan*.json"):
            data = self._read(name)
            plan = Plan.parse(data, self.path / name)
            if sha256 in (plan.sha256(), hashlib.sha256(data).hexdigest()):
                return plan
        return None

    @property
    def joined(self) -> bool:
        """Whether it is that of a rank of the run, and not of one that was to join when a crash came."""
        return self.folder.has_file(PLAN)

    def current_plan(self) -> Plan:
        """plan.json; of a rank that has not joined, the plan by which it is to. Raises UsageError."""
        name = PLAN if self.joined or not self.folder.has_file(_NEXT) else _NEXT
        return Plan.parse(self._read(name), self.path / name)

    def _read(self, name: str) -> bytes:
        try:
            return self.folder.read(name, MAX_DOCUMENT_BYTES, "plan")
        except OSError as error:
            raise UsageError(f"{self.path / name}: cannot read this plan: {error.strerror}") from error

    def wandb_identity(self) -> str:
        """The run's name at Weights & Biases, made and kept the first time that it is asked for."""
        if self.run.wandb is None:
            self.change(wandb=secrets.token_hex(8))
        assert self.run.wandb is not None
        return self.run.wandb

    def change(
        self,
        *,
        options: Mapping[str, OptionValue] | None = None,
        volumes: Sequence[Path] | None = None,
        left: Sequence[Path] | None = None,
        stores: Sequence[str] | None = None,
        wandb: str | None = None,
        dropped: int | None = None,
        exported: Exported | None = None,
        rendered_at: datetime | None = None,
        steps: int | None = None,
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
        if dropped is not None:
            changed["dropped"] = dropped
        if exported is not None:
            changed["exported"] = exported
        if rendered_at is not None:
            changed["rendered_at"] = rendered_at
        if steps is not None:
            changed["steps"] = steps
        self.run = self.run.model_copy(update=changed)
        self._save(self.run, RUN)

    def keep_store(self) -> None:
        """The run goes on with its store, should a drop of that have been cut off."""
        if self.run.dropped is not None:
            self.run = self.run.model_copy(update={"dropped": None})
            self._save(self.run, RUN)

    def keep_configuration(self, text: str) -> None:
        """Let config.yaml be `text`. Raises DiskFullError, UsageError where it cannot be written otherwise."""
        self._write(CONFIGURATION, text)

    def next_store(self) -> bytes:
        """The identity of a store that is to be made."""
        identity = secrets.token_bytes(16)
        self.change(stores=(*self.run.stores, identity.hex()))
        return identity

    def plan_ahead(self, plan: Plan) -> None:
        """Keep the plan of a store that the run is to move to."""
        self._save(plan, _NEXT)

    def forget_ahead(self) -> None:
        self.folder.remove(_NEXT)

    def moved(self, plan: Plan) -> str:
        """The run is at `plan` now, whatever a crash left of the move: that is plan.json, and the one that it was is
        under a name of its own (plan-0.json, then plan-1.json), which is returned."""
        there, earlier = self.folder.has_file(PLAN), ""
        if there and (before := self.current_plan()).sha256() != plan.sha256():
            earlier = next(name for n in itertools.count() if self.folder.mode(name := f"plan-{n}.json") is None)
            self._save(before, earlier)
        if earlier or not there:
            self._save(plan, PLAN)
        self.forget_ahead()
        return earlier

    def _save(self, document: Document, name: str) -> None:
        self._write(name, document.text())

    def _write(self, name: str, text: str) -> None:
        """Whole and durably. Raises DiskFullError, UsageError where it cannot be written otherwise."""
        try:
            self.folder.write(name, text, durable=True)
        except OSError as error:
            kind = DiskFullError if no_room(error) else UsageError
            raise kind(f"{self.path / name}: cannot write: {no_room(error) or error.strerror}") from error

    def _remove_own(self, *, directory: bool) -> None:
        """What a run leaves here before its first step, and with `directory` that, if nothing else is in it. Its store
        and its other records have removed themselves."""
        _remove_unfinished(self.folder)
        prepared = {PLAN} if self.folder.has_file(TRAIN) else set()
        for name in {RUN, PLAN, CONFIGURATION} - prepared:
            self.folder.remove(name)
        if self.run.wandb:
            shutil.rmtree(self.path / "wandb", ignore_errors=True)
        for entry in (*self.path.iterdir(), *([self.path] if directory else [])):
            with contextlib.suppress(OSError):  # no directory, or somebody's file is in it
                entry.rmdir()

    def remove_unjoined(self) -> None:
        """Remove all of a rank's that never joined. Its store is gone."""
        self.folder.remove(METRICS)
        self.forget_ahead()
        self._remove_own(directory=True)

    def put_model_aside(self, step: int) -> None:
        """Give the model of a run that ended after `step` steps, and goes on, a name of its own."""
        if (self.path / MODEL).exists():
            names = itertools.chain([f"{MODEL}-{step}"], (f"{MODEL}-{step}-{n}" for n in itertools.count(1)))
            (self.path / MODEL).rename(next(path for name in names if not (path := self.path / name).exists()))
            self.folder.flush()


def remove_unbegun(path: Path) -> None:
    """Remove a directory that was to become a rank's when a kill came before its run.json; not what else is in one."""
    with Folder(path) as folder:
        _remove_unfinished(folder)
    with contextlib.suppress(OSError):
        path.rmdir()


def _remove_unfinished(folder: Folder) -> None:
    """What a kill left of a document that was being written, or of the metrics of a rank that was to join."""
    for pattern in (*_DOCUMENTS, METRICS):
        for name in folder.names(f".{pattern}.*tmp"):
            folder.remove(name)


def _require_no_links(folder: Folder) -> None:
    """Raise LinkError where a file that a run writes or reads here is a link, or where the one that it appends to has
    other names too: before its first step, not at its end. Other files are replaced whole, so their other names keep
    what they had."""
    for pattern in (*_DOCUMENTS, *_RESULTS):
        for name in folder.names(pattern):
            folder.require_no_link(name)
    folder.require_one_name(METRICS)


def _make_private(folder: Folder) -> None:
    """Nobody else may look into a run, nor lock it, even where its directory was there before. A file system without
    permissions has them from its mount, and nothing here can change that."""
    with contextlib.suppress(PermissionError):
        folder.make_private()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Folder]:
    locks = Locks()
    try:
        locks.take(path)
        with Folder(path) as folder:
            yield folder
    finally:
        locks.close()
