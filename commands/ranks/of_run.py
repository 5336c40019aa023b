"""The ranks of `ssdplan run`: which there are, how those of this machine are started, and what they do before a run
goes on.

Owns that a run of some ranks goes on with as many unless the user says otherwise, and what is then to be done first:
a plan for them, what they exchange, and their shares of the states.
"""

import contextlib
import io
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ssdplan.executor.ranks.place import PATIENCE_SECONDS, Place, directory_of, told_to_launcher
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.run import PLAN, RUN, OptionValue, Run
from ssdplan.plans.errors import InfeasibleError, MismatchError, SsdplanError, UsageError, error_of, said_by_another
from ssdplan.plans.views.progress_line import ProgressLine

from ..parsing import options as of

if TYPE_CHECKING:
    from ssdplan.executor.ranks.group import Ranks
    from ssdplan.plans.documents.profile import Network

PATIENT_STEPS = 5.0
"""Predicted steps for which a rank waits for the others, and at least `PATIENCE_SECONDS`."""
STILL_LONGER = 1.25
_NETWORK_SECONDS = 2.0
"""For which what ranks exchange is measured, where a run goes on with another number of them."""
_STILL_AT_IT_SECONDS = 1.0
_AT_IT, _DONE, _INTERRUPTED = b"at it", b"done", b""


class Asked(Protocol):
    """What matters here of the options of `ssdplan run` (`commands/run_options.py`)."""

    @property
    def plan(self) -> Path | None: ...
    @property
    def out(self) -> Path | None: ...
    @property
    def resume(self) -> Path | None: ...
    @property
    def ranks(self) -> int | None: ...
    @property
    def volume(self) -> Sequence[Path]: ...
    @property
    def adopt(self) -> bool: ...
    @property
    def resume_anyway(self) -> bool: ...
    @property
    def keep(self) -> int: ...
    @property
    def replan(self) -> bool: ...
    @property
    def stall_abort(self) -> float | None: ...


def patience(options: Asked, plan: Plan) -> float:
    """Seconds for which a rank waits for the others: a little longer than one of them may stand still itself, so that
    it has said why before the others end."""
    if options.stall_abort:
        return STILL_LONGER * options.stall_abort
    return max(PATIENCE_SECONDS, PATIENT_STEPS * plan.prediction.step_seconds)


def asked_ranks(options: Asked) -> int:
    """How many ranks this command is to start, or to be: of a run that goes on as many as it has, unless told
    otherwise."""
    if options.ranks is not None or options.resume is None:
        return options.ranks or 1
    from ssdplan.executor.snapshots.run_directory import require_run

    require_run(options.resume)
    ranks = Plan.load(options.resume / PLAN).decision.ranks
    if ranks > 1:
        ProgressLine("run").note(f"goes on with the {ranks} ranks that the run has (--ranks says another number)")
    return ranks


def launched(options: Asked, ranks: int) -> int:
    """The run by ranks that this process starts, each of which reads the command line itself."""
    require_alone(options)
    require_shared(options.volume, ranks)
    if options.resume is not None:
        from ssdplan.executor.snapshots.run_directory import require_run
        from ssdplan.executor.snapshots.shares import ranks_of, require_whole

        require_run(options.resume)
        require_whole(options.resume, ranks_of(options.resume))
    plan = None
    if options.plan is not None:
        require_ranks(plan := Plan.load(options.plan), ranks)
    elif options.resume is not None:
        plan = Plan.load(options.resume / PLAN)
    if options.out is not None and options.resume is None:
        from ssdplan.executor.snapshots.run_directory import require_new

        require_new(options.out)
    of.settle_process()
    from ssdplan.executor.ranks.launcher import ENDING_SECONDS, launch

    step = PATIENT_STEPS * plan.prediction.step_seconds if plan else 0.0
    return launch(
        ranks, of.said_words(), max(ENDING_SECONDS, step), "; a run with snapshots goes on with ssdplan run --resume"
    )


def require_ranks(plan: Plan, ranks: int) -> None:
    """Raise MismatchError where the plan is for another number of ranks."""
    if (there := plan.decision.ranks) != ranks:
        raise MismatchError(
            f"the plan is for {there} rank(s), and {ranks} are to run: "
            + (f"give --ranks {there}, or start as many by torchrun" if there > 1 else "leave --ranks out")
            + f", or solve again with --ranks {ranks}"
        )


def require_alone(options: Asked) -> None:
    """Raise UsageError for what a run of several ranks does not do."""
    named = {
        "--resume-anyway": (options.resume_anyway, "leave it out, and start with what the run was started with"),
        "--adopt": (options.adopt, "leave it out, and bring all directories of the run to where it began"),
        "--keep 1": (
            options.keep == 1,
            "leave it out: of several ranks one may have a snapshot that others lack, so each keeps the one before too",
        ),
        "--replan": (
            options.replan,
            "leave it out; profile --ranks R and solve make another plan, and run PLAN --resume RUN goes on by it",
        ),
    }
    for name, (given, way) in named.items():
        if given:
            raise UsageError(f"{name}: is for runs of one rank; {way}")


def require_shared(volumes: Sequence[Path], ranks: int) -> None:
    """Raise UsageError for volumes that so many ranks of one machine cannot share."""
    own = [volume for volume in volumes if not volume.is_dir()]
    for volume in own:
        if not volume.exists():
            raise UsageError(f"--volume {volume}: is not there; make the directory first")
    for number, volume in enumerate(own):
        if any(volume.samefile(before) for before in own[:number]):
            raise UsageError(f"--volume {volume}: is named twice, and is one rank's alone; name another for each rank")
    if len(own) % ranks:
        raise UsageError(
            f"--volume {own[-1]}: is one rank's alone, and {ranks} ranks of this machine cannot share {len(own)} of "
            "such evenly; name a directory, in which each has its own, or as many blank volumes as ranks (of one drive "
            "its partitions)"
        )


def dealt(volumes: Sequence[Path], place: Place | None) -> list[int]:
    """The numbers of this rank's volumes among those that were named for all. All ranks have the directories. Devices
    and files are dealt in turn to the ranks of this machine. Raises UsageError where they do not come out even."""
    if place is None:
        return list(range(len(volumes)))
    require_shared(volumes, place.local_size)
    own = [number for number, volume in enumerate(volumes) if not volume.is_dir()]
    mine = set(own[place.local_rank :: place.local_size])
    return [number for number in range(len(volumes)) if number not in own or number in mine]


def volumes_of(volumes: Sequence[Path], place: Place) -> list[Path]:
    """Where a rank's store lies on the volumes that were named for all: on the devices and files that are its own, and
    in each directory in one of its own, made here; rank 0 in the directory itself. Raises UsageError as `dealt`."""
    mine = [volumes[number] for number in dealt(volumes, place)]
    found = [directory_of(volume, place.rank) if volume.is_dir() else volume for volume in mine]
    for directory, volume in zip(found, mine, strict=True):
        if volume.is_dir():
            try:
                directory.mkdir(exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"--volume {volume}: cannot make {directory}: {error.strerror}; name another directory"
                ) from error
    return found


@contextlib.contextmanager
def once(place: Place | None) -> Iterator[None]:
    """An error that all ranks meet is told once: by our own launcher, or by `told_once` of the executor, which loads
    torch, where there are several ranks and one fails."""
    if place and place.launcher is not None:
        with told_to_launcher(place):
            yield
        return
    try:
        yield
    except SsdplanError:
        if place is None:
            raise
        from ssdplan.executor.ranks.group import told_once

        with told_once(place):
            raise


@contextlib.contextmanager
def going_on(options: Asked, said: Collection[str], place: Place | None, run: Path) -> "Iterator[Ranks]":
    """The ranks of a run that goes on, once each has its share of the states, and they agree on the snapshot. `said`:
    the names of the options that were given now."""
    from ssdplan.executor.ranks.group import ALONE, joined
    from ssdplan.executor.snapshots.agreement import settle, settle_log

    if place is None:
        _shared_out(options, said, ALONE, run, Plan.load(run / PLAN))
        yield ALONE
        return
    plan = Plan.load(options.plan or _known_plan(run, place.rank))
    with joined(place, plan.machine.device, patience(options, plan)) as ranks:
        _shared_out(options, said, ranks, run, plan)
        line = ProgressLine("run", io.StringIO() if place.rank else None)
        mine = directory_of(run, place.rank)
        if plan.decision.zeroth_order:
            settle_log(mine, ranks, line.note)
        else:
            settle(mine, ranks, line.note, options.volume)
        yield ranks


def _known_plan(run: Path, rank: int) -> Path:
    """A plan of the run; of a rank that is to join it, another rank's."""
    own = directory_of(run, rank) / PLAN
    if not own.is_file() and not (run / PLAN).is_file():
        raise UsageError(f"{directory_of(run, rank)}: no run that could go on: it has no {RUN}")
    return own if own.is_file() else run / PLAN


def _shared_out(options: Asked, said: Collection[str], ranks: "Ranks", run: Path, plan: Plan) -> None:
    """Where the run has another number of ranks, let it have these: rank 0 sees to it, and the others wait."""
    from ssdplan.executor.snapshots.reshare import finish, reshare

    line = ProgressLine("run", io.StringIO() if ranks.rank else None)
    with _at_it(ranks):
        if not ranks.rank:
            finish(run, line.note, options.volume)
            plan = Plan.load(run / PLAN)
    had = int(ranks.tell(str(plan.decision.ranks).encode())[0])
    if had == ranks.size:
        return
    network = None
    if ranks.size > 1 and options.plan is None:
        network = _measured(ranks, plan)
    with _at_it(ranks):
        if ranks.rank:
            return
        kept = _kept_options(run, said, ranks.size, line)
        other = Plan.load(options.plan) if options.plan else _planned(plan, ranks.size, network, line)
        require_ranks(other, ranks.size)
        try:
            if options.volume and ranks.size > 1:
                raise UsageError("--volume: goes with the ranks that a run has; leave it out when their number changes")
            reshare(
                run, other, volumes=options.volume, adopt=options.adopt, options=kept, note=line.note, progress=line
            )
        finally:
            line.done()


def _kept_options(run: Path, said: Collection[str], ranks: int, line: ProgressLine) -> dict[str, OptionValue]:
    """The options in run.json, without those that are for one rank where there are several from now on."""
    kept = dict(Run.load(run / RUN).options)
    alone: dict[str, tuple[OptionValue, OptionValue]] = {"keep": ("1", "2"), "replan": (True, False)}
    for name, (one, several) in alone.items():
        if ranks > 1 and name not in said and kept.get(name) == one:
            line.note(f"--{name}{'' if one is True else f' {one}'} is for runs of one rank, and ends here")
            kept[name] = several
    return kept


def _planned(plan: Plan, ranks: int, network: "Network | None", line: ProgressLine) -> Plan:
    """A plan for so many ranks by the figures of the one that the run has."""
    from ssdplan.planner.replan import Replanner

    had, machine = plan.decision.ranks, plan.machine
    cores = len(os.sched_getaffinity(0))
    changed = {
        "network": network or machine.network,
        "compute_threads": max(1, min(machine.compute_threads * had // ranks, cores)),
        "update_threads": max(1, min(machine.update_threads * had // ranks, cores)),
        "host_memory_bytes": machine.host_memory_bytes * had // ranks,
        "host_available_bytes": machine.host_available_bytes * had // ranks,
    }
    line.note(
        f"plans for {ranks} rank(s) by the figures of the plan for {had}, which may be others for each of them now "
        f"(ssdplan profile --ranks {ranks} and solve make a plan that knows)"
    )
    try:
        return Replanner(plan).replanned(machine.model_copy(update=changed), plan.model, ranks)
    except InfeasibleError as error:
        raise InfeasibleError(
            f"{error}. Each rank was given an equal part of the host memory that the run had. To give it more: ssdplan "
            f"profile --ranks {ranks}, ssdplan solve --host-memory SIZE for the same batch and optimizer, then ssdplan "
            f"run PLAN --resume RUN --ranks {ranks}"
        ) from error


def _measured(ranks: "Ranks", plan: Plan) -> "Network":
    """What these ranks exchange. All of them measure at the same time."""
    from ssdplan.executor.device.device import open_device
    from ssdplan.plans.documents.state_layout import ELEMENT_BYTES, GRADIENT_BYTES
    from ssdplan.profiler.machine import measure_network

    elements = max(state.elements for state in plan.model.states) // ranks.size
    precision = plan.decision.precision
    device = open_device(plan.machine.device, int(os.environ.get("LOCAL_RANK", "0")))
    nbytes = elements * ELEMENT_BYTES[precision], elements * GRADIENT_BYTES
    return measure_network(ranks, device, *nbytes, _NETWORK_SECONDS, lambda share, what: None)


@contextlib.contextmanager
def _at_it(ranks: "Ranks") -> Iterator[None]:
    """Within, rank 0 works as long as it needs, and the others wait: it tells them that it is still at it."""
    if ranks.rank:
        yield
        while (told := ranks.tell(b"")[0]) == _AT_IT:
            pass
        if told != _DONE:
            raise said_by_another(error_of(int(told), "rank 0 could not do it"))
        return
    stop = threading.Event()

    def tell() -> None:
        while ranks.size > 1 and not stop.wait(_STILL_AT_IT_SECONDS):
            with contextlib.suppress(Exception):  # another has ended, as rank 0 will find where it asks itself
                ranks.tell(_AT_IT)

    telling = threading.Thread(target=tell, name="ssdplan-at-it", daemon=True)
    telling.start()
    outcome = _INTERRUPTED
    try:
        yield
        outcome = _DONE
    except SsdplanError as error:
        outcome = str(error.exit_code).encode()
        raise
    finally:
        stop.set()
        telling.join()
        if outcome != _INTERRUPTED:
            ranks.tell(outcome)
