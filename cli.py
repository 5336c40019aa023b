"""The command line: which commands there are, and what becomes of their errors. What each does is in `commands/`.

Results go to standard output, progress to standard error; an error is one line and the exit code of README.md.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

from ssdplan import __version__
from ssdplan.commands import bench, compare, completion, data, doctor, export, profile, run, show, solve, volume
from ssdplan.commands.options import Help
from ssdplan.commands.streams import is_of_results, settle_streams
from ssdplan.commands.suggestions import hint, long_names
from ssdplan.plans.errors import (
    DiskFullError,
    IoFailure,
    MemoryBudgetError,
    SsdplanError,
    StallError,
    StoppedWithSnapshot,
    UsageError,
    first_line,
)
from ssdplan.plans.room import no_room

INTERRUPTED = 130
NO_MEMORY = ("can't allocate memory", "could not create a primitive", "std::bad_alloc", "can't start new thread")
"""What torch's allocator, the oneDNN in it, products without oneDNN and Python, for the stack of a thread, say where an
operating system gives no more."""
COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "doctor": (doctor, "look whether this machine and a directory are fit, and say what mends what is not"),
    "profile": (profile, "measure this machine and a model -> profile.json"),
    "solve": (solve, "find the best plan for a profile, or for a machine one does not have -> plan.json"),
    "show": (show, "what a plan decides and predicts, what a profile measured"),
    "data": (data, "look at the samples that a run would train on"),
    "run": (run, "train by a plan -> a Hugging Face model directory"),
    "export": (export, "write the model of a run, from its last snapshot or as it finished"),
    "volume": (volume, "make, describe or verify the volumes that a store lies on"),
    "bench": (bench, "compare the parts of ssdplan with their rivals on this machine"),
    "compare": (compare, "train the same by ssdplan, plain PyTorch and DeepSpeed, side by side"),
    "completion": (completion, "let a shell complete commands, options and values"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    os.umask(os.umask(0o077) | 0o077)  # what libraries write is its user's alone too, as all that ssdplan writes
    settle_streams()
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        code: int = options.command(options)
        sys.stdout.flush()  # else a disk that is full ends Python itself, with a code of its own
        return code
    except StallError as error:
        _fail(str(error), error.exit_code)
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(error.exit_code)  # an orderly end would wait for what hangs
    except SsdplanError as error:
        return _fail(str(error), error.exit_code)
    except StoppedWithSnapshot:
        return INTERRUPTED  # the run has said what it keeps
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except (MemoryError, RuntimeError) as error:  # torch's allocator has no error of its own
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in NO_MEMORY):
            raise
        return _fail(f"the process may take no more memory: {first_line(error)}", MemoryBudgetError.exit_code)
    except OSError as error:
        results = is_of_results(error)
        if results and isinstance(error, BrokenPipeError):
            return 0  # who reads the results, as `head`, has enough of them
        told = f"standard output: {no_room(error) or error.strerror}" if results else str(error)
        return _fail(told, DiskFullError.exit_code if no_room(error) else IoFailure.exit_code)


def _interrupt(number: int, frame: object) -> NoReturn:
    """A request to end is an interruption: what was made is closed and removed, as after Ctrl-C."""
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> int:
    print(f"ssdplan: error: {message}", file=sys.stderr)
    return code


class _Listing(argparse.HelpFormatter):
    """Every command beside what it does: argparse forgets the indent of their names, so the longest stands alone."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if action.nargs == argparse.PARSER:
            self._action_max_length += self._indent_increment


class _Parser(argparse.ArgumentParser):
    """Errors as the other commands' errors: one line, exit code 2; of an unknown option it says what may be meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = _long_names(_parser())
            command = self.prog.removeprefix("ssdplan").strip()
            flags = [word.partition("=")[0].removeprefix("--") for word in unknown if word.startswith("--")]
            hints = list(dict.fromkeys(filter(None, (hint(flag, command, known) for flag in flags))))
            self.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *hints]))
        return options, unknown

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(UsageError.exit_code)


def _long_names(parser: argparse.ArgumentParser, command: str = "") -> dict[str, list[str]]:
    """The long options of every command and action below `parser`, without dashes."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    names = {} if below else {command: long_names(parser)}
    for action in below:
        for name, its in action.choices.items():
            names |= _long_names(its, f"{command} {name}".strip())
    return names


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ssdplan",
        description="Train language models in SSD, DRAM and GPU memory, by a plan.",
        formatter_class=_Listing,
    )
    parser.add_argument("--version", action="version", version=f"ssdplan {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (module, about) in COMMANDS.items():
        module.add_options(
            commands.add_parser(
                name,
                help=about,
                description=about[0].upper() + about[1:] + ".",
                formatter_class=Help,
                allow_abbrev=False,
            )
        )
    commands.choices["completion"].set_defaults(parser=parser)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
