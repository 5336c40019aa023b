"""`ssdplan volume`: volumes made, described, verified, and those of a run that is done removed."""

import argparse
import json

from ssdplan.plans.errors import StoreError
from ssdplan.plans.progress import ProgressLine
from ssdplan.plans.units import format_bytes

from . import options as of


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")

    def action(name: str, about: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = actions.add_parser(
            name, help=about, description=f"{about[0].upper()}{about[1:]}.", formatter_class=of.Help, allow_abbrev=False
        )
        made.set_defaults(command=call, action=name)
        made.add_argument("--json", action="store_true", help="print the result as JSON")
        return made

    init = action("init", "make a blank volume of a block device, or of a new file, for a store to lie on")
    init.add_argument("place", type=of.path, metavar="PATH", help="a block device, a file, or a directory for a file")
    init.add_argument("--size", type=of.nbytes, metavar="SIZE", help="of a new file")
    init.add_argument("--force", action="store_true", help="even over a store, or data that is not ssdplan's")
    for name, about in (
        ("info", "tell what files and devices are: blank, a volume of which store, or not ssdplan's"),
        ("check", "read every extent of a store's last two generations and verify its checksum"),
    ):
        action(name, about).add_argument(
            "places", type=of.path, nargs="+", metavar="PATH", help="volumes, or directories that hold them"
        )
    drop = action("drop", "remove the store of a run, with its snapshots: after that the run cannot go on")
    drop.add_argument("run", type=of.path, metavar="RUN", help="a run's directory")
    drop.add_argument("--yes", action="store_true", help="do so; else it is only told what would go")
    drop.add_argument("--without-model", action="store_true", help="even if the run did not finish with a model")
    drop.add_argument(
        "--volume", type=of.path, action="append", metavar="PATH", help="where the store lies, if it moved; repeatable"
    )


def call(options: argparse.Namespace) -> int:
    of.require_engine()
    if options.action == "drop":
        return _drop(options)
    from ssdplan.executor.store import check, describe, initialise, inspect

    if options.action == "init":
        found = [initialise(options.place, options.size, force=options.force)]
        print(describe.volumes_json(found) if options.json else describe.volumes(found))
        return 0
    if options.action == "info":
        found = inspect(options.places)
        print(describe.volumes_json(found) if options.json else describe.volumes(found))
        return 0
    line = ProgressLine("check")
    try:
        checked = check(options.places, lambda fraction: line(fraction, "of the store's bytes"))
    finally:
        line.done()
    print(describe.checked_json(checked) if options.json else describe.checked(checked))
    return StoreError.exit_code if checked.damaged else 0


def _drop(options: argparse.Namespace) -> int:
    of.settle_process()
    from ssdplan.executor.run_directory import require_run

    require_run(options.run)  # before torch is loaded, which takes seconds
    from ssdplan.executor.drop import drop_store

    gone = drop_store(options.run, sure=options.yes, without_model=options.without_model, volumes=options.volume or ())
    if options.json:
        parts = {"removed": list(map(str, gone.removed)), "blank": list(map(str, gone.blank))}
        print(json.dumps({**parts, "bytes": gone.nbytes, "step": gone.step}))
        return 0
    if gone.removed:
        print(f"removed {' '.join(map(str, gone.removed))}: {format_bytes(gone.nbytes)} are free again")
    if gone.blank:
        print(f"blank again: {' '.join(map(str, gone.blank))}")
    return 0
