"""What scripts share that take one run apart: one plan of one shape, and its run in this process with methods of ours
replaced."""

import argparse
import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from prediction import SHAPES, Bench

from commands import command
from ssdplan import cli
from ssdplan.plans.documents.plan import Plan


def add_options(parser: argparse.ArgumentParser, *, shape: str, host_memory: str) -> None:
    """Which plan; `shape` and `host_memory` unless told."""
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="on the drive to measure")
    parser.add_argument("--only", choices=sorted(SHAPES), default=shape, help=f"the shape [{shape}]")
    parser.add_argument("--host-memory", default=host_memory, metavar="SIZE", help=f"as ssdplan solve [{host_memory}]")
    parser.add_argument("--precision", default="bf16", metavar="P", help="as ssdplan profile [bf16]")
    parser.add_argument("--shorten", type=int, choices=(1, 2, 4), default=1, help="divide sequence lengths by it [1]")


class OnePlan:
    """A profiled shape and a plan of it, in a folder of their own."""

    def __init__(self, bench: Bench, given: argparse.Namespace, micro_batches: int) -> None:
        self.bench = bench
        bench.profile()
        self._path = bench.folder / "plan.json"
        command("solve", bench.profiled, "--host-memory", given.host_memory, "--micro-batches", micro_batches,
                "-o", self._path)  # fmt: skip
        self.plan = Plan.load(self._path)

    def run(self, steps: int, *replaced: tuple[Any, str, Callable[..., Any]]) -> None:
        """So many steps of it, with these (class, method, other method); quietly unless it fails."""
        bench = self.bench
        arguments = ("run", self._path, "--data", bench.data, "--volume", bench.folder, "--out", bench.folder / "run",
                     "--steps", steps)  # fmt: skip
        with ExitStack() as stack:
            for owner, name, instead in replaced:
                stack.enter_context(patch.object(owner, name, instead))
            said = stack.enter_context(redirect_stdout(io.StringIO()))
            stack.enter_context(redirect_stderr(said))
            code = cli.main(list(map(str, arguments)))
        if code:
            raise SystemExit(said.getvalue())


@contextmanager
def one_plan(given: argparse.Namespace, *, micro_batches: int) -> Iterator[OnePlan]:
    """Made as the options say; its folder goes with the block."""
    with tempfile.TemporaryDirectory(prefix="ssdplan-one-plan-", dir=given.work) as folder:
        yield OnePlan(Bench(given.only, Path(folder), given.precision, given.shorten), given, micro_batches)
