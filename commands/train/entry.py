"""`ssdplan train`: the command, and the order in which it prepares a run.

Owns that order, the processes of the commands that it starts, and train.json. The last step is `ssdplan run` itself, in
the place of this process: its exit code, its signals and its memory are those of a run that was started by hand.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.preparation import PROFILE, SCHEMA, TRAIN, Preparation
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.documents.run import PLAN, RUN, Run
from ssdplan.plans.errors import UsageError
from ssdplan.plans.views.progress_line import ProgressLine

from .. import profile, run, solve
from ..parsing import options as of
from ..parsing import outputs
from ..parsing.command import Command
from ..resolved import as_told, as_written, flag_of, over, words_of
from . import choosing, saying
from .children import Tell, command_line, do
from .options import Options, argument, exclusive, sections, takes
from .validity import Wanted, why_stale

_NEEDED = ("model", "data", "out")


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to begin, or to go on."""

    out: Path
    run: Mapping[str, Any]
    """The options of `ssdplan run`, by name."""


def command() -> Command:
    made = Command(
        Options.of,
        call,
        [argument()],
        sections(),
        exclusive=exclusive(),
        tells_given=True,
        epilog="Each option is that of ssdplan profile, solve or run, and means the same there.",
    )
    made.name = "train"
    return made


def call(options: Options) -> int:
    of.require_engine()
    line = ProgressLine("train")
    ready = prepare(said(options), line)
    _become(["run", *words_of(run.command(), ready.run)])


def said(options: Options) -> dict[str, Any]:
    """The options that the user gave, on the command line or, below that, in a configuration."""
    return with_configuration({name: options.values[name] for name in options.values if name in options.given})


def with_configuration(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, with those of the configuration that they name below them."""
    given = dict(options)
    source = given.pop("configuration", None)
    if source is None:
        return given
    from ..configuration import is_configuration, read_configuration

    if not is_configuration(source):
        raise UsageError(f"{source}: a configuration ends in .yaml or .yml; a plan is for ssdplan run")
    made = command()
    below = read_configuration(source, made)
    if "configuration" in below:
        raise UsageError(f"{source}: configuration: a configuration names no other; take it out")
    return over(given, below, made)


def prepare(given: Mapping[str, Any], line: ProgressLine, tell: Tell | None = None) -> Prepared:
    """Profile and plan for a run with the options that were `given`, in its directory. What is still valid there stays.
    `tell`: gets the lines of the commands that do it; None: they go to standard error.

    Raises UsageError for what lacks or cannot be, and the errors of the commands.
    """
    if lacking := [flag_of(name) for name in _NEEDED if given.get(name) is None]:
        raise UsageError(f"train needs {', '.join(lacking)}")
    from ssdplan.executor.data.reading.files import find_files
    from ssdplan.executor.model.directory.hub import find_model
    from ssdplan.executor.snapshots.run_directory import require_new
    from ssdplan.plans.files import make_folder

    out: Path = given["out"]
    for name in ("out", "write_lp", "tensorboard"):
        if isinstance(given.get(name), Path):
            outputs.require_folder(given[name], flag_of(name))
    if (out / RUN).is_file():
        return Prepared(out, _going_on(given, out, line))
    require_new(out)
    find_files(given["data"])
    model = find_model(given["model"])
    make_folder(out)
    kept = Preparation.load(out / TRAIN) if (out / TRAIN).is_file() else Preparation(schema=SCHEMA)
    data = _looked_at(given, model, line)
    source: Path | None = given.get("from_profile")
    planned, chosen = _batch(given, data)
    measured, also = _measuring(given, data, model, out, planned, Profile.load(source) if source else None)
    chosen |= also
    if data.sequence_length != measured["sequence_length"]:
        data = _looked_at(given, model, line, measured["sequence_length"], data.most_length)
        more, batch = _batch(given, data)
        planned, chosen = {**planned, **more}, {**chosen, **batch}
    if data.refusal:
        raise UsageError(data.refusal)
    line.note(saying.of_data(data, given["data"]))
    _require_rows(given, data, _least_batch(given, planned, measured["micro_batch_sizes"]))
    kept = _profiled(out, measured, planned, kept, source, line, given, tell)
    kept = _planned(out, planned, kept, line, tell)
    plan = Plan.load(out / PLAN)
    _require_rows(given, data, plan.decision.rows)
    running = _running(given, out, model)
    trained, store_bytes, each = _snapshots(given, plan)
    length, steps = _length(given, data, plan)
    for name, value in {**trained, **length}.items():
        chosen[flag_of(name)] = f"{value:g}"
    line.note(saying.of_choice(chosen))
    told = saying.of_plan(plan, steps=steps, store_bytes=store_bytes, snapshot_bytes=each, exact="steps" in given)
    for words in told:
        line.note(words)
    return Prepared(out, {"plan": out / PLAN, **running, **trained, **length})


def _looked_at(
    given: Mapping[str, Any], model: Path, line: ProgressLine, length: int | None = None, most: int | None = None
) -> choosing.Data:
    """The data in rows of `length`, or of what the user gave, or as they usually are."""
    from ssdplan.executor.data import previewing

    cache = of.token_cache(given.get("token_cache"))
    order = previewing.Order(
        model=str(model),
        data=str(given["data"]),
        sequence_length=length or given.get("sequence_length"),
        usual_length=choosing.USUAL_LENGTH,
        pack=given.get("pack", True),
        format=given.get("data_format"),
        append_eos=given.get("append_eos", False),
        cache=None if cache is None else str(cache),
        samples=1,
    )
    try:
        found = previewing.look_apart(order, lambda done, total: line(done / total, f"tokenising {given['data']}"))
    finally:
        line.done()
    return choosing.Data.of(found, most or found.sequence_length)


def _batch(given: Mapping[str, Any], data: choosing.Data) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of solve, and what of them was chosen: rows a step, unless something else settles these."""
    planned = {name: given[name] for name in takes("solve") if name in given}
    settled = {"global_batch", "micro_batches", "schedule"} & planned.keys()
    if settled:
        return planned, {}
    size, ranks = given.get("micro_batch_size"), given.get("ranks") or 1
    batch = choosing.rows_a_step(_rows(given, data), micro_batch_size=size, ranks=ranks)
    return {**planned, "global_batch": batch}, {"--global-batch": str(batch)}


def _rows(given: Mapping[str, Any], data: choosing.Data) -> int:
    """Rows of an epoch, without what is held out of it."""
    share, samples = given.get("eval_split"), given.get("eval_samples")
    return choosing.rows_to_train_on(data, held_out_share=share, held_out_samples=samples)


def _least_batch(given: Mapping[str, Any], planned: Mapping[str, Any], sizes: Sequence[int]) -> int:
    """Rows a step, at least, by what is known before there is a plan."""
    if batch := planned.get("global_batch"):
        return int(batch)
    size, ranks = given.get("micro_batch_size") or min(sizes), given.get("ranks") or 1
    return int((planned.get("micro_batches") or 1) * size * ranks)


def _require_rows(given: Mapping[str, Any], data: choosing.Data, batch: int) -> None:
    """Raise UsageError where a step of `batch` rows takes more than an epoch has, and the run is to last epochs."""
    rows, ranks = _rows(given, data), given.get("ranks") or 1
    if batch <= rows or "steps" in given:
        return
    fits = choosing.rows_a_step(rows, micro_batch_size=None, ranks=ranks)
    others = " ".join(flag_of(name) for name in ("schedule", "micro_batches", "micro_batch_size") if name in given)
    raise UsageError(
        f"{given['data']}: has {rows:,} row(s) to train on, and a step takes {batch:,}, so no step is a part of an "
        f"epoch; give --global-batch {fits}{f' in the place of {others}' if others else ''}, or --steps N in the place "
        "of --epochs"
    )


def _measuring(
    given: Mapping[str, Any],
    data: choosing.Data,
    model: Path,
    out: Path,
    planned: Mapping[str, Any],
    source: Profile | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of profile, and what of them was chosen. Those of `source`, if there is one, are taken of it."""
    told = {name: given[name] for name in takes("profile") if name in given}
    told["model"] = str(model.absolute())
    if not told.get("volume"):
        told["volume"] = [out]
    if (given.get("optimizer") or ("muon" if source and source.model.muon else "")) == "muon":
        told["optimizer"] = "muon"
    choices: dict[str, Any] = {}
    if "device" not in told:
        choices["device"] = source.machine.device if source else choosing.device_here()
    if "sequence_length" not in told:
        choices["sequence_length"] = source.model.sequence_length if source else choosing.row_length(data)
    if "precision" not in told:
        choices["precision"] = source.model.precision if source else "bf16"
    if "micro_batch_sizes" not in told:
        size, ranks = given.get("micro_batch_size"), given.get("ranks") or 1
        number = planned.get("micro_batches")
        most = _rows(given, data) // (number * ranks) if number and "steps" not in given else None
        sizes = (size,) if size else choosing.sizes_to_measure(planned.get("global_batch"), ranks, most=most)
        choices["micro_batch_sizes"] = source.model.micro_batch_sizes if source and not size else sizes
    shown = {
        flag_of(name): ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in choices.items()
    }
    return {**told, **choices}, shown


def _profiled(
    out: Path,
    measured: Mapping[str, Any],
    planned: Mapping[str, Any],
    kept: Preparation,
    source: Path | None,
    line: ProgressLine,
    given: Mapping[str, Any],
    tell: Tell | None,
) -> Preparation:
    """See to a valid profile in `out`: the one that is there, that of `source`, or a new one."""
    wanted = Wanted(
        model=Path(measured["model"]),
        sequence_length=measured["sequence_length"],
        micro_batch_sizes=tuple(measured["micro_batch_sizes"]),
        precision=measured["precision"],
        freeze=tuple(measured.get("freeze", ())),
        allow_unused_weights=measured.get("allow_unused_weights", False),
        compression_error=measured.get("compression_error", False),
        muon=measured.get("optimizer") == "muon",
        rows=measured.get("rows", "any"),
        device=measured["device"],
        volumes=tuple(Path(each) for each in measured["volume"]),
        endurance=tuple(measured.get("endurance", ())),
        ranks=measured.get("ranks") or 1,
    )
    path = out / PROFILE
    names = {name for name in (*measured, *planned) if name in given}
    now = kept.model_copy(
        update={
            "measured": as_told(profile.command(), measured),
            "planned": as_told(solve.command(), planned),
            "given": tuple(sorted(names)),
        }
    )
    if source is not None:
        taken = Profile.load(source)
        if why := why_stale(taken, wanted):
            raise UsageError(f"--from-profile {source}: {why}; leave it out, and train measures anew")
        taken.save(path)
        line.note(f"takes {source}, and measures nothing")
    elif path.is_file() and kept.profile:
        there = Profile.load(path)
        why = why_stale(there, wanted) if there.sha256() == kept.profile else "it was written to since"
        if not why:
            line.note(f"{path} is still valid: the machine, the model and the drive are the same")
            now.save(out / TRAIN)
            return now
        line.note(f"{path}: {why}; measures again")
        do(["profile", *words_of(profile.command(), {**measured, "output": path, "quiet": True})], tell)
    else:
        now.model_copy(update={"profile": None, "plan": None}).save(out / TRAIN)
        seconds = measured.get("seconds") or 82 + 38 * (len(wanted.volumes) - 1)
        line.note(f"measures this machine and the model, which takes about {seconds:.0f} s (ssdplan profile)")
        do(["profile", *words_of(profile.command(), {**measured, "output": path, "quiet": True})], tell)
    now = now.model_copy(update={"profile": Profile.load(path).sha256(), "plan": None})
    now.save(out / TRAIN)
    return now


def _planned(
    out: Path, planned: Mapping[str, Any], kept: Preparation, line: ProgressLine, tell: Tell | None
) -> Preparation:
    """See to a plan in `out` that was solved of the profile there with these options."""
    path, options = out / PLAN, as_told(solve.command(), planned)
    before = kept.plan
    if path.is_file() and before == _stamp(path, options, kept):
        line.note(f"{path} is still valid: it was solved from that profile with the same options")
        return kept
    solved = {**planned, "profile": out / PROFILE, "output": path, "quiet": True}
    do(["solve", *words_of(solve.command(), solved)], tell)
    kept = kept.model_copy(update={"plan": _stamp(path, options, kept)})
    kept.save(out / TRAIN)
    return kept


def _stamp(path: Path, options: Mapping[str, Any], kept: Preparation) -> str:
    """A hash of a plan, of the profile that it was solved from and of the options by which it was."""
    import hashlib
    import json

    content = [Plan.load(path).sha256(), kept.profile, sorted(options.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _running(given: Mapping[str, Any], out: Path, model: Path) -> dict[str, Any]:
    """The options of run that were given."""
    told = {name: given[name] for name in takes("run") if name in given}
    return {**told, "out": out, "model": str(model.absolute())}


def _snapshots(given: Mapping[str, Any], plan: Plan) -> tuple[dict[str, float], int, int | None]:
    """When snapshots are taken, where nobody says and the drive has room for them; the bytes of the store; and those
    that a snapshot writes, None where none is taken."""
    from ssdplan.plans.analysis.memory_usage import snapshot_bytes, snapshot_store_bytes
    from ssdplan.plans.documents.stripe_shares import room
    from ssdplan.plans.schedule.build import build_schedule

    if plan.decision.zeroth_order:  # whose log is the state
        return {}, plan.prediction.ssd_bytes, None
    schedule = build_schedule(plan.model, plan.decision)
    durable = snapshot_store_bytes(schedule, keep=given.get("keep", 2))
    if {"snapshot_every", "snapshot_minutes"} & given.keys():
        return {}, durable, snapshot_bytes(schedule)
    if durable > choosing.FREE_SHARE * room(plan.machine.volumes):
        return {}, plan.prediction.ssd_bytes, None
    return {"snapshot_minutes": choosing.SNAPSHOT_MINUTES}, durable, snapshot_bytes(schedule)


def _length(given: Mapping[str, Any], data: choosing.Data, plan: Plan) -> tuple[dict[str, float], int]:
    """One epoch where nobody says how long; and how many steps the run has, as far as is known before it reads."""
    from ssdplan.executor.data.epochs import Epochs

    if "steps" in given:
        return {}, given["steps"]
    steps = Epochs(given.get("epochs", 1.0)).steps(_rows(given, data), plan.decision.rows)
    return ({} if "epochs" in given else {"epochs": 1.0}), steps


def _going_on(given: Mapping[str, Any], out: Path, line: ProgressLine) -> dict[str, Any]:
    """The options by which `ssdplan run` goes on with the run in `out`. Raises UsageError where it cannot, and where
    the options say another profile or plan than it has."""
    from ssdplan.executor.snapshots.run_directory import could_go_on, require_new

    if not could_go_on(out):
        require_new(out)
    kept = Preparation.load(out / TRAIN) if (out / TRAIN).is_file() else Preparation(schema=SCHEMA)
    known = {**kept.measured, **kept.planned}
    trained = takes("run")
    planning = {name: given[name] for name in (*takes("profile"), *takes("solve")) if name in given}
    planning = {name: value for name, value in planning.items() if name not in trained and name != "model"}
    now = as_told(command(), planning)
    if other := {name: value for name, value in now.items() if known.get(name) != value}:
        leave = (
            f"{out}: a run is there, which was not planned with {as_written(other)}; leave that out to go on with it"
        )
        if {"masters", "optimizer_states"} & other.keys():
            raise UsageError(f"{leave}, since a run keeps its formats, or choose another --out")
        raise UsageError(f"{leave}, choose another --out, or give it another plan: ssdplan run PLAN --resume RUN")
    told = {name: given[name] for name in trained if name in given and name not in ("out", "model")}
    told |= _same_model(given, out)
    line.note(f"{out}: a run is there, and goes on from its last snapshot (ssdplan run --resume {out})")
    return {**told, "resume": out}


def _same_model(given: Mapping[str, Any], out: Path) -> dict[str, str]:
    """Of the options by which the run in `out` goes on, its model: none where that is where it was, the one that was
    given where it moved. Raises UsageError where another was given."""
    from ssdplan.executor.model.directory.hub import find_model
    from ssdplan.executor.model.directory.weight_files import weights_fingerprint

    kept = Run.load(out / RUN).options.get("model")
    if not isinstance(kept, str):  # a plan that was given by hand says it
        kept = Plan.load(out / PLAN).model.path or ""
    found, its = find_model(given["model"]), Path(kept)
    if found.resolve() == its.resolve():
        return {}
    if its.is_dir() and weights_fingerprint(its) != weights_fingerprint(found) and not given.get("resume_anyway"):
        raise UsageError(
            f"{out}: a run is there, which trains {its}, and --model {given['model']} has other weights; give --model "
            f"{shlex.quote(str(its))} to go on with it, or choose another --out to train the other"
        )
    return {"model": str(found.absolute())}


def _become(words: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command_line(words))
