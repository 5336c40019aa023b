"""`ssdplan volume`: volumes made, described and verified, and the store of a run removed."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from ssdplan.plans.errors import StoreError
from ssdplan.plans.units import format_bytes
from ssdplan.plans.views.progress_line import ProgressLine

from .parsing import options as of
from .parsing import outputs
from .parsing.command import Argument, Command, Group, Member
from .parsing.types import DIRECTORY, PATH, SIZE


@dataclass(frozen=True)
class NewVolume:
    place: Path
    json: bool
    size: int | None
    force: bool


@dataclass(frozen=True)
class Places:
    places: Sequence[Path]
    json: bool


@dataclass(frozen=True)
class Drop:
    run: Path
    json: bool
    yes: bool
    without_model: bool
    volume: Sequence[Path]


def command() -> Group:
    return Group(
        {
            "init": Member("make a blank volume, which can hold a store, of a block device or of a new file", _init),
            "info": Member(
                "tell what files and devices are: blank, a volume of which store, or not ssdplan's",
                lambda: Command(Places, info, [_places(), _json()]),
            ),
            "check": Member(
                "read every extent of a store's last two generations and verify its checksum",
                lambda: Command(Places, check, [_places(), _json()]),
            ),
            "drop": Member("remove the store of a run, with its snapshots: after that the run cannot go on", _drop),
        },
        "ACTION",
    )


def _json() -> click.Option:
    return click.Option(["--json"], is_flag=True, help="print the result as JSON")


def _places() -> Argument:
    return Argument(
        ["places"],
        type=PATH,
        nargs=-1,
        required=True,
        metavar="PATH",
        help="volumes, or directories that hold them",
    )


def _init() -> Command:
    return Command(
        NewVolume,
        init,
        [
            Argument(["place"], type=PATH, metavar="PATH", help="a block device, a file, or a directory for a file"),
            _json(),
            click.Option(["--size"], type=SIZE, metavar="SIZE", help="size of a new file"),
            click.Option(
                ["--force"],
                is_flag=True,
                help="make it even over a store, or over data that is not ssdplan's",
            ),
        ],
    )


def _drop() -> Command:
    return Command(
        Drop,
        drop,
        [
            Argument(["run"], type=DIRECTORY, metavar="RUN", help="a run's directory"),
            _json(),
            click.Option(["--yes"], is_flag=True, help="remove it; without --yes the command only says what would go"),
            click.Option(
                ["--without-model"],
                is_flag=True,
                help="remove it even if the run did not finish with a model, and its last snapshot was not exported",
            ),
            click.Option(
                ["--volume"],
                type=PATH,
                multiple=True,
                metavar="PATH",
                help="where the store lies, if it moved; repeatable",
            ),
        ],
    )


def init(options: NewVolume) -> int:
    of.require_engine()
    missing = not os.path.lexists(options.place)
    if missing and options.place.parent != Path("/dev"):  # where a name that is not there is no new file's
        outputs.require_new_file(options.place, "PATH")
    from ssdplan.executor.store import describe, initialise

    made = [initialise(options.place, options.size, force=options.force)]
    print(describe.volumes_json(made) if options.json else describe.volumes(made))
    return 0


def info(options: Places) -> int:
    of.require_engine()
    from ssdplan.executor.store import describe, inspect

    found = inspect(options.places)
    print(describe.volumes_json(found) if options.json else describe.volumes(found))
    return 0


def check(options: Places) -> int:
    of.require_engine()
    from ssdplan.executor import store

    line = ProgressLine("check")
    try:
        checked = store.check(options.places, lambda fraction: line(fraction, "of the store's bytes"))
    finally:
        line.done()
    print(store.describe.checked_json(checked) if options.json else store.describe.checked(checked))
    return StoreError.exit_code if checked.damaged else 0


def drop(options: Drop) -> int:
    of.require_engine()
    of.settle_process()
    from ssdplan.executor.snapshots.run_directory import require_run

    require_run(options.run)  # before torch is loaded, which takes seconds
    from ssdplan.executor.snapshots.drop import drop_store

    gone = drop_store(options.run, sure=options.yes, without_model=options.without_model, volumes=options.volume)
    if options.json:
        parts = {"removed": list(map(str, gone.removed)), "blank": list(map(str, gone.blank))}
        print(json.dumps({**parts, "bytes": gone.nbytes, "step": gone.step}))
        return 0
    if gone.removed:
        print(f"removed {' '.join(map(str, gone.removed))}: {format_bytes(gone.nbytes)} are free again")
    if gone.blank:
        print(f"blank again: {' '.join(map(str, gone.blank))}")
    return 0
