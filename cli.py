"""The command line: the list of commands, and how their errors reach the user. The commands are in `commands/`.

Results go to standard output, progress to standard error. An error is one line, with an exit code of
`plans/errors.py`.
"""

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, cast

import click

from ssdplan import __version__
from ssdplan.commands.parsing.command import COMPLETE, Group, Member
from ssdplan.commands.parsing.words import UnknownWords, spelled
from ssdplan.commands.streams import is_of_results, settle_streams
from ssdplan.plans.errors import (
    INTERRUPTED,
    DiskFullError,
    IoFailure,
    MemoryBudgetError,
    SaidInterruption,
    SsdplanError,
    StallError,
    UsageError,
    first_line,
    says_no_memory,
)
from ssdplan.plans.room import no_room

COMMANDS: dict[str, str] = {
    "doctor": "check whether this machine and a directory are fit, and print the command that fixes each problem",
    "train": "profile, solve and run in one command: choose everything that is not given, and say what it will take",
    "profile": "measure this machine and a model, and write profile.json",
    "solve": "find the best plan for a profile, or for a machine that you do not have, and write plan.json",
    "show": "print what a plan decides and predicts, what a profile measured, or how a run goes",
    "data": "look at the samples that a run would train on",
    "run": "train by a plan, and write a Hugging Face model directory",
    "replay": "write the model of any step of a run without gradients, from its log",
    "export": "write the model of a run: that of its last snapshot, or the finished one",
    "volume": "make, describe or verify the volumes that hold the store of a run",
    "bench": "compare the parts of ssdplan with their rivals on this machine",
    "compare": "train the same model by ssdplan, plain PyTorch and DeepSpeed, side by side",
    "completion": "print the script by which a shell completes commands, options and values",
}
"""What each command does. Its module in `commands/` is imported when it is called."""


class CommandLine(Group):
    """All commands. click's own `main` has other words and exit codes for errors, so its test runner calls this one."""

    def main(self, args: Sequence[str] | None = None, *_: object, **__: object) -> NoReturn:
        raise SystemExit(main(args))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Raises SystemExit for wrong usage, and behind --help and --version."""
    os.umask(os.umask(0o077) | 0o077)  # what libraries write is its user's alone too, as all that ssdplan writes
    settle_streams()
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # else a disk that is full ends Python itself, with a code of its own
        return code
    except click.exceptions.Exit as done:  # --help and --version
        raise SystemExit(done.exit_code) from None
    except click.UsageError as error:
        raise SystemExit(_refuse(error)) from None
    except StallError as error:
        if not error.said:
            _fail(str(error), error.exit_code)
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(error.exit_code)  # an orderly end would wait for what hangs
    except SsdplanError as error:
        return error.exit_code if error.said else _fail(str(error), error.exit_code)
    except SaidInterruption:
        return INTERRUPTED
    except KeyboardInterrupt:
        from ssdplan.executor.ranks.place import launcher_speaks

        return INTERRUPTED if launcher_speaks(os.environ) else _fail("interrupted", INTERRUPTED)
    except (MemoryError, RuntimeError) as error:
        if not says_no_memory(error):
            raise
        return _fail(f"the process may take no more memory: {first_line(error)}", MemoryBudgetError.exit_code)
    except OSError as error:
        results = is_of_results(error)
        if results and isinstance(error, BrokenPipeError):
            return 0  # who reads the results, as `head`, has enough of them
        name = "standard output" if results else error.filename
        told = f"{name}: {no_room(error) or error.strerror}" if name else str(error)
        return _fail(told, DiskFullError.exit_code if no_room(error) else IoFailure.exit_code)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what is left is Python's own end, which cannot be interrupted


def _interrupt(number: int, frame: object) -> NoReturn:
    """A request to end is an interruption: what was made is closed and removed, as after Ctrl-C."""
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> int:
    print(f"ssdplan: error: {message}", file=sys.stderr)
    return code


def _run(words: list[str]) -> int:
    command_line = make_command_line()
    if instruction := os.environ.get(COMPLETE):
        from click.shell_completion import shell_complete

        return shell_complete(command_line, {}, "ssdplan", COMPLETE, instruction)
    with command_line.make_context("ssdplan", words, obj=tuple(words)) as context:
        return cast(int, command_line.invoke(context))


def _refuse(error: click.UsageError) -> int:
    """Say in one line what is wrong on the command line, and name the option that may be meant."""
    assert error.ctx is not None, "click says where an error was met"
    called, told = error.ctx.command_path, error.message
    if isinstance(error, click.BadParameter) and error.param is not None:
        told = f"argument {spelled(error.param)}: {told}"
    if isinstance(error, click.NoSuchCommand) and error.possibilities:
        told = f"{told}; did you mean {error.possibilities[0]}?"
    if isinstance(error, UnknownWords):
        from ssdplan.commands.parsing.suggestions import hint, long_names

        known = {name: long_names(command) for name, command in all_commands(make_command_line())}
        flags = [word.partition("=")[0].removeprefix("--") for word in error.words if word.startswith("--")]
        hints = [hint(flag, called.removeprefix("ssdplan").strip(), known) for flag in flags]
        told = "; ".join([told, *dict.fromkeys(filter(None, hints))])
    print(f"{called}: error: {told} (see {called} --help)", file=sys.stderr)
    return UsageError.exit_code


def make_command_line() -> CommandLine:
    version = click.version_option(__version__, message="ssdplan %(version)s")
    members = {name: Member(about, partial(_command, name)) for name, about in COMMANDS.items()}
    made = CommandLine(members, "COMMAND")
    made.help = "Train language models in SSD, DRAM and GPU memory, by a plan."
    return version(made)


def all_commands(group: click.Group, above: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command and action below a group, by its name as one writes it behind `ssdplan`."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from all_commands(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", command


def _command(name: str) -> click.Command:
    module: Any = importlib.import_module(f"ssdplan.commands.{name}")
    made: click.Command = module.command()
    return made


if __name__ == "__main__":
    raise SystemExit(main())
