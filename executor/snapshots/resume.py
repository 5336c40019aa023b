"""Resume: finds a stopped run's last snapshot, wherever its volumes are, and whatever else a crash left.

Owns the choice of a store among those that a stopped run may have, and the clearing of the others. It reads no states.
"""

import contextlib
import operator
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdplan.plans.documents.metrics import METRICS
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.run import MODEL, RUN
from ssdplan.plans.errors import MismatchError, StoreError, UsageError
from ssdplan.plans.files import Folder, require_one_name

from ..metrics.metrics import lines, tells_of_snapshot
from ..optimizer.zeroth_order_log import LOG, read_log
from ..recipe import Recipe
from ..store import SUFFIX, Lying, discard, survey, sweep
from . import kept_weights
from .kept_weights import KeptWeights
from .run_directory import RunDirectory, lies_in
from .snapshots import SCHEMA, Origin, Snapshot, batch_of


@dataclass(frozen=True)
class Kept:
    """A run that was stopped."""

    directory: RunDirectory
    plan: Plan
    """That of the last snapshot, or that it was started with."""
    snapshot: Snapshot | None
    """The last; None when it was stopped before the first, and begins again."""
    volumes: tuple[Path, ...]
    """Of the store that has it; none without."""
    others: tuple[Lying, ...]
    """Stores of this run that are of no use any more."""
    unseen: tuple[Path, ...]
    """Where its stores may be, and nothing is now, as when a drive is not connected."""
    told: int
    """The step of the last snapshot that there was, or of a zeroth-order run the last step, of which a model that the
    run finished with is; later than `step` where it is damaged, or where the log has lost its end."""
    weights: KeptWeights | None = None
    """Of a zeroth-order run, the last that it kept; None: it goes on from the first weights."""

    @property
    def step(self) -> int:
        return self.snapshot.step if self.snapshot else 0

    def lies_in(self, places: Sequence[Path]) -> bool:
        """Whether the snapshot's volumes are in or at these places, at least one in each, and nowhere else."""
        held = [[path for path in self.volumes if _holds(place, path)] for place in places]
        return all(held) and {path for paths in held for path in paths} == set(self.volumes)

    def tidy(self, tell: Callable[[str], None]) -> None:
        """Clear away what crashes left: stores without use, each told first, and files of the run's directory that
        never became one."""
        for lying in self.others:
            where = " ".join(map(str, lying.paths))
            tell(f"clears away the store {lying.store[:8]} on {where}, which a move or a crash left")
            clear(lying, self.directory)
        sweep(self.directory.path)
        kept_weights.clear(self.directory.folder, spared=self.weights.path.name if self.weights else "")
        for partial in self.directory.path.glob(f".{MODEL}.partial-*"):
            shutil.rmtree(partial)

    def begin_again(self, plan: Plan, places: Sequence[Path], tell: Callable[[str], None]) -> None:
        """Clear away what there is of a run that was stopped before its first snapshot, but run.json: it begins with
        `plan`, its store at `places`."""
        assert self.snapshot is None
        self.directory.folder.remove(METRICS)
        self.tidy(tell)
        self.directory.change(volumes=places, left=self.unseen)
        self.directory.moved(plan)

    def require_same(self, plan: Plan, origin: Origin, recipe: Recipe, anyway: Callable[[str], None] | None) -> None:
        """Refuse to go on with what would be another run; `anyway` takes what is another instead, where the states can
        be used at all.

        Raises MismatchError, and UsageError when there is nothing left to do or less than nothing.
        """
        path, snapshot = self.directory.path, self.snapshot
        if snapshot is None:
            return
        if recipe.steps < snapshot.step:
            raise UsageError(f"--steps {recipe.steps}: the run has {snapshot.step} behind it")
        if recipe.steps == snapshot.step == self.told and (path / MODEL).exists():
            raise UsageError(
                f"{path}: its {snapshot.step} steps are done; to go on, give --steps or --epochs a larger number"
            )
        before, now = ({state.name for state in each.model.states if state.frozen} for each in (self.plan, plan))
        patterns = (self.plan.model.freeze, plan.model.freeze)
        other = patterns[0] != patterns[1] and self.plan.model.fingerprint != plan.model.fingerprint
        if before != now or other:
            was, is_now = (" ".join(each) or "nothing" for each in patterns)
            raise MismatchError(
                f"{path}: the run froze {was}, and this plan freezes {is_now}, another set of parameters; a run keeps "
                "what it freezes: go on with a plan of the same --freeze, or export the model and train that anew"
            )
        ours, theirs = ([(state.name, state.elements) for state in each.model.states] for each in (self.plan, plan))
        formats, asked = self.plan.decision.formats, plan.decision.formats
        if formats != asked:
            raise MismatchError(
                f"{path}: its masters are {formats.masters} and its optimizer states {formats.moments}, this plan's "
                f"{asked.masters} and {asked.moments}; a run keeps its formats: solve with --masters {formats.masters} "
                f"--optimizer-states {formats.moments}"
            )
        if ours != theirs:
            raise MismatchError(f"{path}: its states are not laid out as those of this plan; it cannot go on with it")
        if now and snapshot.origin.weights != origin.weights:
            raise MismatchError(
                f"{path}: the model's weights changed, and what the run froze is still in its files; go on with the "
                "model that was trained (--model)"
            )
        differences = snapshot.origin.differences(origin)
        rows = plan.decision.rows
        if snapshot.samples != snapshot.step * rows:
            differences.append(f"the next row of data would be {snapshot.step * rows}, not {snapshot.samples}")
        if differences and not anyway:
            raise MismatchError(
                f"{path}: this would be another run than the one that was stopped: {'; '.join(differences)}; go on "
                "with what it had, or with --resume-anyway to other losses"
            )
        if differences and anyway:
            anyway(f"goes on as another run than the one that was stopped: {'; '.join(differences)}")


def files_of(lying: Lying, directory: RunDirectory) -> list[bool]:
    """For each volume of a run's store whether it is a file that was made for it."""
    made = lying.metadata.get("made")  # nothing says so in a store without a snapshot
    return [
        bool(made[number]) if made and number < len(made) else _holds(directory.path, path)
        for number, path in zip(lying.numbers, lying.paths, strict=True)
    ]


def clear(lying: Lying, directory: RunDirectory) -> None:
    """Delete the files that were made for a run's store, and leave its other volumes blank."""
    discard(lying, files_of(lying, directory))


@dataclass(frozen=True)
class Found:
    """Where a run's stores may lie, and those that do."""

    places: tuple[Path, ...]
    stores: tuple[Lying, ...]
    clearable: tuple[Lying, ...]
    """Those that may be cleared away: of a run that this user did not begin where it is, only what lies in its own
    directory, in files that have no other name."""


def stores_of(directory: RunDirectory, volumes: Sequence[Path], *, confirm: str) -> Found:
    """The stores of a run, in its directory, at `volumes`, which were named, and, where this user began the run there,
    at the places that its run.json says. `confirm`: the option, if any, by which the user says that a store at a place
    that was named is the run's.

    Raises UsageError for a run that was begun elsewhere, whose places outside of its directory must be named.
    """
    path, told = directory.path, (*directory.volumes, *directory.left)
    outside = [] if directory.known else [place for place in told if not lies_in(path, place)]
    if outside and not volumes:
        raise UsageError(
            f"{path}: was begun elsewhere or by somebody else, and its {RUN} has its store outside of it, in "
            f"{' '.join(map(str, outside))}; if that is so, say where it is and that it is this run's: "
            f"--volume PLACE {confirm}".rstrip()
        )
    believed = [place for place in told if place not in outside]
    places = tuple(dict.fromkeys(place.absolute() for place in (*volumes, *believed, path)))
    stores = tuple(lying for lying in survey(places) if lying.store in directory.run.stores)
    own = tuple(
        lying
        for lying in stores
        if directory.known or all(lies_in(path, each) and each.lstat().st_nlink == 1 for each in lying.paths)
    )
    return Found(places, stores, own)


@contextlib.contextmanager
def reopened(
    path: Path, volumes: Sequence[Path] = (), *, adopt: bool = False, reading: bool = False, ranks: int | None = None
) -> Iterator[Kept]:
    """The stopped run in directory `path`, or one rank's part of it, locked. `volumes`: where else its store may be.
    `ranks`: how many the run has, if not as many as the plan here says; a store of a plan for others is of no use.

    Of a run that this user did not begin here (one that was received, or moved), only what lies in its directory is
    used, and the `volumes`, which were named: with `adopt` to go on with it, or for `reading` alone. Nothing outside of
    its directory is cleared away then.
    Raises UsageError for what is no run, one without snapshots, or one whose places outside must be named or adopted;
    LinkError where its metrics.jsonl or a file of its store has other names too (hard links);
    StoreError when another process has it, or when its store is missing, damaged or not whole.
    """
    with RunDirectory.open(path) as directory:
        if not directory.run.snapshots:
            raise UsageError(
                f"{path}: kept no snapshots, so it cannot go on; start it again with --snapshot-every or "
                "--snapshot-minutes"
            )
        if directory.current_plan().decision.zeroth_order:
            yield _logged(directory, volumes, adopt=adopt, reading=reading)
            return
        found = stores_of(directory, volumes, confirm="" if reading else "--adopt")
        ours, places = found.stores, found.places
        if not directory.known and not reading:
            foreign = [str(place) for lying in ours for place in lying.paths if not lies_in(path, place)]
            if foreign and not adopt:
                raise UsageError(
                    f"{path}: was begun elsewhere or by somebody else; going on with it writes to {' '.join(foreign)}, "
                    "which holds a store of the identity that it names; if that is this run's, repeat with --adopt"
                )
            if adopt:
                directory.adopt()
        unseen = tuple(
            place for place in dict.fromkeys((*directory.left, *map(Path, directory.run.volumes))) if _is_empty(place)
        )
        told = _last_told(directory.folder)
        ranks = ranks or directory.current_plan().decision.ranks
        whole = [lying for lying in ours if lying.generation and not lying.refused and _is_of(lying, directory, ranks)]
        if not whole and directory.run.dropped is not None:
            raise StoreError(
                f"{path}: its store was dropped (ssdplan volume drop), and with it the states after step "
                f"{directory.run.dropped}, so it cannot go on; {_model_left(directory)}"
            )
        if not whole:
            _require_unused(directory, ours, places)
            yield Kept(directory, directory.current_plan(), None, (), found.clearable, unseen, told)
            return
        snapshots = {lying.store: Snapshot.read(lying.metadata, str(lying.paths[0])) for lying in whole}
        last = max(whole, key=lambda lying: (snapshots[lying.store].step, directory.run.stores.index(lying.store)))
        for lying in ours:
            if lying.refused and lying.metadata.get("step", 0) > snapshots[last.store].step:
                raise StoreError(lying.refused)
        for place in last.paths:  # before anything is written; the store looks again at what it has open
            require_one_name(place, place.stat())
        step = snapshots[last.store].step
        if told > step and not last.fell_back:
            raise StoreError(
                f"{path}: the last snapshot is of step {told}, but the store on {' '.join(map(str, last.paths))} has "
                f"one of step {step} only; name where the other is with --volume, or, to lose those steps, cut "
                f"{METRICS} behind step {step}"
            )
        plan = directory.plan(last.plan_sha256)
        if plan is None:
            raise StoreError(
                f"{path}: none of the plans here is that of the store on {' '.join(map(str, last.paths))} (sha256 "
                f"{last.plan_sha256[:8]}); bring the run's own back"
            )
        others = tuple(lying for lying in found.clearable if lying is not last)
        yield Kept(directory, plan, snapshots[last.store], last.paths, others, unseen, max(step, told))


def _is_of(lying: Lying, directory: RunDirectory, ranks: int) -> bool:
    """Whether a store is not known to be shared out among another number of ranks."""
    plan = directory.plan(lying.plan_sha256)
    return plan is None or plan.decision.ranks == ranks


def _logged(directory: RunDirectory, volumes: Sequence[Path], *, adopt: bool, reading: bool) -> Kept:
    """A zeroth-order run: its log and the first weights are its state, so of its stores nothing is needed."""
    clearable = () if reading else stores_of(directory, volumes, confirm="--adopt").clearable
    if adopt and not directory.known and not reading:
        directory.adopt()
    plan, path = directory.current_plan(), directory.path
    unseen = tuple(place for place in directory.left if _is_empty(place))
    origin, log, told = _logged_steps(directory.folder, reading=reading)
    steps = len(log) - 1
    if not steps:
        return Kept(directory, plan, None, (), clearable, unseen, 0)
    rows = plan.decision.rows
    origin = origin | {"batch": batch_of(plan)}  # ranks may have shared it out otherwise when the log began
    document = {"schema": SCHEMA, "step": steps, "samples": steps * rows, "origin": origin, "made": ()}
    snapshot = Snapshot.read(document, str(path / LOG))
    weights = kept_weights.latest(directory.folder, log)
    return Kept(directory, plan, snapshot, (), clearable, unseen, max(steps, told), weights)


def _logged_steps(folder: Folder, *, reading: bool) -> tuple[dict[str, Any], list[bytes], int]:
    """The origin that the log names, and its checksums after none, one and so on of its steps: for `reading` of all,
    else of those that metrics.jsonl has too, for a kill may have come between two lines; and the last step that
    metrics.jsonl has. Raises MismatchError where one of the two files is gone: to begin again would lose what the other
    has."""
    has_log, has_metrics = folder.has_file(LOG), folder.has_file(METRICS)
    if not has_log and not has_metrics:
        return {}, [b""], 0
    if not has_log:
        told = _told_steps(folder)
        if told:
            raise MismatchError(
                f"{folder.path / LOG}: is gone, and {METRICS} tells of {told} steps; without it the run cannot go on: "
                "bring it back"
            )
        return {}, [b""], 0
    log = read_log(folder)
    if reading:
        return log.header.origin, log.checksums, 0
    told = _told_steps(folder) if has_metrics else 0
    if not told and len(log.moves) > 1:
        raise MismatchError(
            f"{folder.path / METRICS}: tells of no step, and the log beside it has {len(log.moves)}; bring it "
            f"back, or remove {LOG} if it is another run's"
        )
    if told > 1 and not log.moves:  # a kill loses the end of the last line at most
        raise MismatchError(f"{folder.path / LOG}: has no step, and {METRICS} tells of {told}; bring it back")
    return log.header.origin, log.checksums[: told + 1], told


def logged_steps(folder: Folder) -> int:
    """From how many steps a zeroth-order run goes on, as its log and its metrics have them. Raises MismatchError."""
    return len(_logged_steps(folder, reading=False)[1]) - 1


def _told_steps(folder: Folder) -> int:
    """The last step of which metrics.jsonl has a whole line."""
    told = 0
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        for line in lines(folder):
            told = operator.index(line["step"]) if "loss" in line else told
    return told


def _require_unused(directory: RunDirectory, ours: Sequence[Lying], places: Sequence[Path]) -> None:
    """Raise StoreError unless the run was stopped before its first snapshot."""
    for lying in ours:
        if lying.refused and lying.generation:
            raise StoreError(lying.refused)
    if tells_of_snapshot(directory.folder):
        raise StoreError(
            f"{directory.path}: its store is on none of {' '.join(map(str, places))}; name where it is with --volume"
        )


def _last_told(folder: Folder) -> int:
    """The step of the last snapshot that metrics.jsonl tells of; 0 without."""
    told = 0
    if folder.has_file(METRICS):
        # What follows a line cut off, `cut_back` drops.
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            for line in lines(folder):
                told = operator.index(line["step"]) if "snapshot_seconds" in line else told
    return told


def _holds(place: Path, volume: Path) -> bool:
    """Whether the volume is at `place` or in it, by whatever names."""
    return place.exists() and (place.samefile(volume) or place.samefile(volume.parent))


def _is_empty(place: Path) -> bool:
    """Whether no volume is at `place` or in it."""
    return not (any(place.glob(f"*{SUFFIX}")) if place.is_dir() else place.exists())


def _model_left(directory: RunDirectory) -> str:
    """Where the model of a run without a store is, in words."""
    exported = directory.run.exported if directory.known else None  # else a place that somebody else named
    places = [directory.path / MODEL, *([Path(exported.to)] if exported else [])]
    there = next((place for place in places if place.is_dir()), None)
    if there is None:
        return "no model of it is known here either"
    return f"its model is in {there}, and a new run may train that further, with new optimizer states"
