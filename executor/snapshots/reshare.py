"""Reshare: the states of a stopped run of some ranks become those of the ranks of another plan.

Owns the order in which nothing is lost, whenever a kill comes. First each rank to be has a store with all of its share,
durable, beside what there is. Then rank 0's plan.json becomes the other plan: from that moment on the run has as many
ranks as that says. Then what the ranks before had is cleared away. `finish` brings to its end what a kill left: before
that moment it takes back what was made, behind it it clears what is left.

One process does it all, so it needs all ranks' directories in one place.

A run without gradients shares nothing out: each of its ranks has all of the model, and its log and the first weights
are its state. So a rank that joins has rank 0's log, and the weights that rank 0 kept, before that moment.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ssdplan.plans.analysis.cache import FIGURES
from ssdplan.plans.documents.metrics import METRICS
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.run import RUN, SCHEMA, OptionValue, Run
from ssdplan.plans.errors import MismatchError, UsageError
from ssdplan.plans.files import Folder
from ssdplan.plans.schedule.build import build_schedule

from ..memory.migration import carry_over
from ..memory.store_records import Records
from ..metrics.metrics import Line, lines
from ..optimizer.zeroth_order_log import LOG, copy_log
from ..ranks.place import directory_of
from ..store import MOST_KEPT, Lying, Store, sweep
from . import kept_weights
from .resume import Kept, clear, reopened, stores_of
from .run_directory import RunDirectory, lies_in, remove_unbegun
from .shares import each_of, whole_of
from .snapshots import Snapshot, batch_of
from .stores import store_beside

Progress = Callable[[float, str], None]
Note = Callable[[str], None]
_OF_SHARING = {"ranks", "micro_batches", "micro_batch_size", "schedule", "compute_threads"}
"""What of a batch ranks share out otherwise: sums are added in another order, and it is the same training."""


def reshare(
    run: Path,
    plan: Plan,
    *,
    volumes: Sequence[Path] = (),
    adopt: bool = False,
    options: Mapping[str, OptionValue] | None = None,
    note: Note = lambda text: None,
    progress: Progress = lambda share, what: None,
) -> None:
    """Let the stopped run in this directory be one of the ranks of `plan`, another number than it had. `volumes`,
    `adopt`: of one that has one rank, or shall have one, as `resume.reopened`. `options`: what its run.json has from
    then on, if not what it had.

    Raises MismatchError where the plan is for another model or batch; StoreError, DiskFullError, IoFailure and
    UsageError as `resume.reopened` and `Store.create`: then the run has what it had.
    """
    finish(run, note, volumes)
    with reopened(run, volumes, adopt=adopt) as first, each_of(first) as each, contextlib.ExitStack() as stack:
        had, ranks = len(each), plan.decision.ranks
        assert had != ranks, "the ranks that it has"
        _require_same(first, plan)
        note(f"goes on with {ranks} rank(s) instead of {had}: {_what_changes(plan)}")
        places = _places(first.directory, ranks, volumes, note)
        made: list[RunDirectory] = []
        try:
            for rank in range(had, ranks):
                document = Run(
                    schema=SCHEMA,
                    options=dict(options or first.directory.run.options),
                    volumes=tuple(str(place) for place in places[rank] if not lies_in(run, place)),
                    snapshots=True,
                    rendered_at=first.directory.run.rendered_at,
                )
                joining = stack.enter_context(RunDirectory.join(directory_of(run, rank), document))
                made.append(joining)
                _tell_of_steps(joining, first)
            directories = (*(kept.directory for kept in each), *made)
            if first.snapshot and plan.decision.zeroth_order:
                _copy_out(first, made, progress)
            elif first.snapshot:
                _share_out(each, plan, directories, places, progress)
        except BaseException:
            for joining in made:
                _remove_unjoined(joining)
            for kept in each:
                kept.directory.forget_ahead()
            raise
        for kept, there in zip(each[1:], places[1:], strict=False):
            kept.directory.change(volumes=there, left=_left_by(kept))
        first.directory.change(options=options, volumes=places[0], left=_left_by(first))
        first.directory.moved(plan)
    finish(run, note, volumes)


def _places(first: RunDirectory, ranks: int, volumes: Sequence[Path], note: Note) -> list[list[Path]]:
    """Where the stores of so many ranks are to lie: in the directories that the run was told, each rank in one of its
    own, made here, or at the `volumes` of one rank alone. A device or a file is one rank's, and nobody said whose: then
    they lie in the run's directory. Raises UsageError."""
    if ranks == 1 and volumes:
        return [list(volumes)]
    own = [[directory_of(first.path, rank)] for rank in range(ranks)]
    told = [place for place in first.volumes if not lies_in(first.path, place)]
    if not told:
        return own
    if other := [place for place in told if not place.is_dir()]:
        where = f"{first.path} and rank-1 and so on in it" if ranks > 1 else str(first.path)
        note(f"{other[0]} is one rank's alone, so the store of each rank is from now on in {where}")
        return own
    places = [[directory_of(place, rank) for place in told] for rank in range(ranks)]
    for place in (place for of_rank in places for place in of_rank):
        try:
            place.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"{place}: cannot make this directory: {error.strerror}") from error
    return places


def _left_by(kept: Kept) -> list[Path]:
    """Where stores are that go when the others are durable, and where some may be that are out of sight now."""
    path = kept.directory.path
    return [*kept.unseen, *(place for place in kept.volumes if not lies_in(path, place))]


def finish(run: Path, note: Note, volumes: Sequence[Path] = ()) -> None:
    """Bring to its end what a kill left of `reshare`; of a run that it left nothing of, nothing changes. Raises
    UsageError and StoreError as `RunDirectory.open`."""
    with RunDirectory.open(run) as first:
        plan = first.current_plan()
        others = sorted((int(path.name[5:]), path) for path in run.glob("rank-*") if path.name[5:].isdecimal())
        for rank, path in others:
            if not (path / RUN).is_file():
                if rank >= plan.decision.ranks:
                    remove_unbegun(path)
                continue
            with RunDirectory.open(path) as directory:
                if rank < plan.decision.ranks:
                    _settle(directory, plan, ())
                else:
                    _retire(directory, note)
        if plan.decision.ranks > 1 or others or any(name.startswith("plan-") for name in first.folder.names("plan-*")):
            _settle(first, plan, volumes)


def _settle(directory: RunDirectory, plan: Plan, volumes: Sequence[Path]) -> None:
    """Let a rank of the run be one by `plan`, and have no store that other ranks shared out."""
    ranks = plan.decision.ranks
    if not directory.joined or directory.current_plan().decision.ranks != ranks:
        directory.moved(plan)
    left = [lying for lying in stores_of(directory, volumes, confirm="--adopt").clearable if lying.generation]
    if foreign := [lying for lying in left if _ranks_of(lying, directory) not in (None, ranks)]:
        for lying in foreign:
            clear(lying, directory)
        gone = {path for lying in foreign for path in lying.paths}
        directory.change(left=[place for place in directory.left if place not in gone])


def _ranks_of(lying: Lying, directory: RunDirectory) -> int | None:
    plan = directory.plan(lying.plan_sha256)
    return plan.decision.ranks if plan else None


def _retire(directory: RunDirectory, note: Note) -> None:
    """Put aside what a rank that the run has no more leaves, without its store; of one that never joined, nothing."""
    sweep(directory.path)
    for lying in stores_of(directory, (), confirm="").clearable:
        clear(lying, directory)
    if not directory.joined:
        _remove_unjoined(directory)
        return
    kept_weights.clear(directory.folder)
    told = [line["step"] for line in _lines(directory.folder) if "loss" in line]
    path = directory.path
    _remove_places(directory)
    first = f"{path.name}-until-{told[-1] if told else 0}"
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(1)))
    aside = next(there for name in names if not (there := path.with_name(name)).exists())
    path.rename(aside)
    note(f"what rank {path.name[5:]}, which the run has no more, has told of its steps is in {aside}")


def _remove_unjoined(directory: RunDirectory) -> None:
    """Remove all that a rank which never joined has but its store, which is gone."""
    kept_weights.clear(directory.folder)
    for name in (LOG, *directory.folder.names(f".{LOG}.*tmp")):
        directory.folder.remove(name)
    _remove_places(directory)
    directory.remove_unjoined()


def _remove_places(directory: RunDirectory) -> None:
    """Remove the directories that were made on drives for a rank's store, if nothing else is in them."""
    for place in directory.volumes:
        if place.name == directory.path.name and not lies_in(directory.path, place):
            with contextlib.suppress(OSError):
                place.rmdir()


def _lines(folder: Folder) -> Iterator[Line]:
    """Of metrics.jsonl, but for an end that was cut off."""
    if folder.has_file(METRICS):
        with contextlib.suppress(ValueError, RecursionError):
            yield from lines(folder)


def _require_same(kept: Kept, plan: Plan) -> None:
    """Raise MismatchError where the plan is not for the states and the batch that the run has."""
    path, before = kept.directory.path, kept.plan
    if plan.model.fingerprint != before.model.fingerprint or plan.model.freeze != before.model.freeze:
        raise MismatchError(f"{path}: the run trains another model than the plan is for, or freezes other parts of it")
    both = before, plan
    ours, theirs = ([(state.name, state.elements, state.frozen) for state in each.model.states] for each in both)
    if ours != theirs:
        raise MismatchError(f"{path}: its states are not laid out as those of this plan; it cannot go on with it")
    had, now = ({name: value for name, value in batch_of(each).items() if name not in _OF_SHARING} for each in both)
    if not before.decision.zeroth_order:
        had["masters"], now["masters"] = before.decision.masters, plan.decision.masters
    had["rows a step"], now["rows a step"] = before.decision.rows, plan.decision.rows
    names = [*had, *(name for name in now if name not in had)]
    if differences := [
        f"{name} was {had.get(name)} and is {now.get(name)}" for name in names if had.get(name) != now.get(name)
    ]:
        raise MismatchError(
            f"{path}: with this plan it would be another run: {'; '.join(differences)}; solve for the same, with "
            f"--global-batch {before.decision.rows} {_asked_of(before)}"
        )


def _asked_of(plan: Plan) -> str:
    """The options of solve by which a plan has the states of this one."""
    decision = plan.decision
    if zeroth_order := decision.zeroth_order:
        masters = "fp32" if zeroth_order.masters else "none"
        return f"--optimizer mezo --directions {zeroth_order.directions} --masters {masters}"
    return f"--masters {decision.masters} --optimizer-states {decision.optimizer_states}"


def _what_changes(plan: Plan) -> str:
    """When a run goes on with another number of ranks, in words."""
    if plan.decision.zeroth_order:
        return (
            "each has all of the model, and goes on from rank 0's log. Bits may differ from those of the ranks before "
            "from now on, where a rank has another number of threads or other micro-batches"
        )
    return (
        "its states are shared out anew. Sums are added in another order, so that bits may differ from those of the "
        "ranks before from now on (losses by about 1e-6 in fp32)"
    )


def _tell_of_steps(joining: RunDirectory, first: Kept) -> None:
    """metrics.jsonl of a rank that joins: the steps until then, in which it moved nothing and found nothing in time."""
    told: list[dict[str, Any]] = []
    for line in _lines(first.directory.folder):
        if line["step"] > first.step:
            break
        if "loss" in line or "eval_loss" in line:
            left_out = {name: None for name in FIGURES if name in line}
            told.append({name: 0 if name.endswith("_bytes") else value for name, value in line.items()} | left_out)
    text = "".join(json.dumps(line) + "\n" for line in told)
    joining.folder.write(METRICS, text, durable=True)


def _copy_out(first: Kept, joining: Sequence[RunDirectory], progress: Progress) -> None:
    """Let each rank that joins a run without gradients have what rank 0 has: the log, and the weights that it kept."""
    for number, directory in enumerate(joining):
        if first.weights:
            progress(number / len(joining), f"copying {first.weights.path.name}")
            kept_weights.carry(first.directory.folder, first.weights, directory.folder)
        copy_log(first.directory.folder, first.step, directory.folder)
    if first.weights:
        progress(1.0, f"copying {first.weights.path.name}")


def _share_out(
    each: tuple[Kept, ...],
    plan: Plan,
    directories: Sequence[RunDirectory],
    places: Sequence[Sequence[Path]],
    progress: Progress,
) -> None:
    """A store for each rank to be, with its share of the newest snapshot that all ranks have; all go when one cannot
    be made."""
    with contextlib.ExitStack() as made, whole_of(each) as whole:
        ranks = plan.decision.ranks
        for rank in range(ranks):
            schedule = build_schedule(plan.model, plan.decision, rank)
            records = Records.of(schedule, snapshots=True)
            store = store_beside(directories[rank], places[rank], plan, records, durable=True, keep=MOST_KEPT)
            made.push(partial(_left, store))
            # which counts the half of it that a move to another plan is
            told = partial(lambda share, what, rank: progress((rank + 2 * share) / ranks, what), rank=rank)
            carry_over(whole.shares, schedule, records, store, told)
            store.commit(_of_plan(whole.snapshot, plan).with_files(store.made).metadata())


def _left(store: Store, kind: object, error: BaseException | None, trace: object) -> None:
    if error:
        store.remove()
    else:
        store.close()


def _of_plan(snapshot: Snapshot, plan: Plan) -> Snapshot:
    """The snapshot as the ranks of this plan would have taken it."""
    origin = snapshot.origin.model_copy(update={"batch": batch_of(plan)})
    return snapshot.model_copy(update={"origin": origin})
