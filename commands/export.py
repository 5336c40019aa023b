"""`ssdplan export`: the model of a run, from its last snapshot or as it finished."""

import argparse
import json

from ssdplan.plans.progress import ProgressLine

from . import options as of


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=call)
    parser.add_argument("run", type=of.path, metavar="RUN", help="a run's directory")
    parser.add_argument("--to", type=of.path, required=True, metavar="DIR", help="a new directory for the model")
    parser.add_argument("--model", type=of.model, metavar="DIR|NAME", help="the model that was trained, if it moved")
    parser.add_argument(
        "--volume", type=of.path, action="append", metavar="PATH", help="where the store lies, if it moved; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="print where the model is, and of which step")


def call(options: argparse.Namespace) -> int:
    of.require_engine()
    of.settle_process()
    from ssdplan.executor.run_directory import require_run

    require_run(options.run)  # before torch is loaded, which takes seconds
    from ssdplan.executor.export_run import export_run
    from ssdplan.executor.hub import find_model

    line = ProgressLine("export")
    try:
        model = find_model(options.model) if options.model else None
        step = export_run(options.run, options.to, model=model, volumes=options.volume or (), progress=line)
    finally:
        line.done()
    if options.json:
        print(json.dumps({"model": str(options.to), "step": step}))
    line.note(f"the model after {step} steps is in {options.to}" if step else f"the run's model is in {options.to}")
    return 0
