"""The headline: a model whose training state is many times the memory of the whole process, trained from the SSD.

Makes a random model of a shape, profiles it, solves for a limit on the whole process, trains a few steps, and prints
what was predicted beside what the kernel counted. It checks for free space first, and removes all that it wrote. The
defaults are a 3B-parameter shape with 42 GB of training state within 4 GiB.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from commands import begun, end_on_sigterm
from ssdplan.executor.model.directory.random_model import Shape, write_random_model
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.errors import DiskFullError, InfeasibleError, SsdplanError
from ssdplan.plans.units import format_bytes, parse_bytes

ON_DISK_BYTES = {"fp32": 2 + 2 + 14, "bf16": 2 + 2 + 10, "mezo": 2 + 2 + 4}
"""A parameter: the model, the trained one, and the store, by the format of the moments; or without gradients."""
SOLVES = 4
"""Attempts to bring the prediction for the process below the limit."""


def main() -> int:
    options = _options()
    end_on_sigterm()
    try:
        with tempfile.TemporaryDirectory(prefix="headline-", dir=options.volume) as folder:
            return headline(options, Path(folder))
    except SsdplanError as error:
        print(f"headline: error: {error}", file=sys.stderr)
        return error.exit_code


def headline(options: argparse.Namespace, folder: Path) -> int:
    shape = Shape(options.hidden, options.layers, vocab=options.vocab, intermediate=options.intermediate)
    parameters = _about(shape)
    states = "mezo" if options.optimizer == "mezo" else options.optimizer_states
    needed = parameters * ON_DISK_BYTES[states] * 21 // 20
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFullError(f"{options.volume}: the run takes {format_bytes(needed)}, {format_bytes(free)} are free")
    parameters = write_random_model(shape, folder / "model")
    print(f"model: {parameters / 1e9:.3f}B parameters", flush=True)
    rows = options.global_batch * (options.steps + 1)
    (folder / "text.txt").write_text("What is read again is the same. " * (rows * options.sequence_length // 32 + 1))
    _ssdplan(
        folder, "profile", "--model", "model", "--volume", ".", "--sequence-length", options.sequence_length,
        "--micro-batch-sizes", options.micro_batch_size,
    )  # fmt: skip
    plan = _solve(options, folder)
    state = plan.prediction.ssd_bytes
    print(f"plan: {format_bytes(state)} on ssd, {plan.decision.micro_batches} micro-batches", flush=True)
    peak = _ssdplan(
        folder, "run", "plan.json", "--data", "text.txt", "--steps", options.steps, "--volume", ".", "--out", "run"
    )
    report = json.loads((folder / "run" / "report.json").read_text())
    for row in report["predictions"]:
        print(
            f"{row['quantity']:22} {row['predicted']:16.4f} {row['measured']:16.4f} {row['unit']:9}"
            f" {row['relative_error']:+.2%}"
        )
    print(f"losses {report['losses'][0]:.4f} to {report['losses'][-1]:.4f}")
    print(f"the most that the process had resident, from its start to its end: {peak} bytes ({format_bytes(peak)})")
    kept = peak <= options.process_memory
    print(f"limit of {format_bytes(options.process_memory)}: {'kept' if kept else 'BROKEN'}")
    return 0 if kept else 1


def _solve(options: argparse.Namespace, folder: Path) -> Plan:
    """A plan whose predicted process keeps the limit: the budget of the host arena is what is left of it."""
    base = Profile.load(folder / "profile.json").machine.process_bytes
    assert base is not None, "ssdplan profile measures the process"
    budget = options.process_memory - base
    given: list[object] = ["--optimizer-states", options.optimizer_states]
    if options.optimizer == "mezo":
        given = ["--optimizer", "mezo", "--masters", options.masters]
    if options.device_memory is not None:
        given += ["--device-memory", options.device_memory]
    for _ in range(SOLVES):
        if budget <= 0:
            break
        _ssdplan(
            folder, "solve", "profile.json", "--host-memory", f"{budget}B", "--global-batch", options.global_batch,
            *given,
        )  # fmt: skip
        plan = Plan.load(folder / "plan.json")
        assert plan.prediction.peak_process_bytes is not None
        excess = plan.prediction.peak_process_bytes - options.process_memory
        if excess <= 0:
            return plan
        budget -= excess + options.process_memory // 100
    raise InfeasibleError(f"no plan for a process of {format_bytes(options.process_memory)}; the base is {base} bytes")


def _ssdplan(folder: Path, *arguments: object) -> int:
    """Run a command in `folder`; returns the most bytes that it had resident. Raises SsdplanError where it fails."""
    command = [sys.executable, "-m", "ssdplan.cli", *map(str, arguments)]
    print("$ ssdplan", *arguments, flush=True)
    with begun(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SsdplanError(f"ssdplan {arguments[0]} ended with {process.returncode}")
    return usage.ru_maxrss << 10


def _about(shape: Shape) -> int:
    config = shape.configuration()
    block = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size
    return int(shape.layers * block + config.vocab_size * config.hidden_size)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--volume", type=Path, default=Path(), metavar="DIR", help="where to write [.]")
    parser.add_argument("--hidden", type=int, default=2560, metavar="N", help="[2560]")
    parser.add_argument("--layers", type=int, default=32, metavar="N", help="[32]")
    parser.add_argument("--intermediate", type=int, default=8448, metavar="N", help="[8448]")
    parser.add_argument("--vocab", type=int, default=32000, metavar="N", help="[32000]")
    parser.add_argument("--sequence-length", type=int, default=512, metavar="S", help="[512]")
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="B", help="[1]")
    parser.add_argument("--global-batch", type=int, default=8, metavar="N", help="[8]")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="[3]")
    parser.add_argument("--optimizer", choices=["adamw", "mezo"], default="adamw", help="[adamw]")
    parser.add_argument("--optimizer-states", choices=["fp32", "bf16"], default="fp32", help="of adamw [fp32]")
    parser.add_argument("--masters", choices=["fp32", "none"], default="none", help="of mezo [none]")
    parser.add_argument("--device-memory", metavar="SIZE", help="of an emulated device [as ssdplan solve]")
    parser.add_argument(
        "--process-memory", type=parse_bytes, default=parse_bytes("4GiB"), metavar="SIZE", help="[4GiB]"
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
