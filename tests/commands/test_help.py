"""Help is there at once, in groups, with every default."""

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from ssdplan import cli
from ssdplan.commands.parsing.command import Command
from tests.bounds import HANG_SECONDS

HEAVY = {"torch", "transformers", "numpy", "matplotlib", "yaml", "highspy", "pandas", "pulp", "networkx"}


def contexts(context: click.Context) -> Iterator[tuple[str, click.Context]]:
    """The context of every command and action, by what one writes."""
    yield context.command_path, context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            below = context.command.get_command(context, name)
            assert below is not None
            yield from contexts(click.Context(below, context, name, **below.context_settings))


CONTEXTS = dict(contexts(click.Context(cli.make_command_line(), info_name="ssdplan")))


def params(name: str) -> list[click.Parameter]:
    """What a command takes, without --help and --version."""
    return [param for param in CONTEXTS[name].command.params if not getattr(param, "is_eager", False)]


@pytest.mark.parametrize("name", CONTEXTS)
def test_every_default_is_shown(name: str) -> None:
    context = CONTEXTS[name]
    shown = " ".join(context.get_help().split()).replace("- ", "-")
    for param in params(name):
        default = param.to_info_dict()["default"]
        if isinstance(param, click.Option) and param.secondary_opts and default is not None:
            flag = (param.opts if default else param.secondary_opts)[0].removeprefix("--")
            assert f"[default: {flag}]" in shown, param.name
        elif not getattr(param, "is_flag", False) and default is not None and default != () and not callable(default):
            assert f"[default: {default}]" in shown, param.name


@pytest.mark.parametrize("name", CONTEXTS)
def test_many_options_stand_in_groups(name: str) -> None:
    """Beside --help, no more than four stand without a heading."""
    command = CONTEXTS[name].command
    sections = command.sections if isinstance(command, Command) else ()
    grouped = [option for section in sections for option in section.options]
    options = [param for param in params(name) if isinstance(param, click.Option)]
    assert len([option for option in options if option not in grouped]) <= 4, name
    shown = CONTEXTS[name].get_help()
    for section in sections:
        assert f"\n{section.title}:\n" in shown
    for param in params(name):
        assert param.help, f"{name}: {param.name} has no help"


def test_commands_name_their_options_in_the_record_that_they_are_called_with() -> None:
    for name, context in CONTEXTS.items():
        if isinstance(context.command, Command) and name != "ssdplan train":  # tests/commands/test_train.py
            given = {"given"} if context.command.tells_given else set()
            names = [*(param.name for param in params(name)), *given]
            assert sorted(names) == sorted(context.command.record.__dataclass_fields__), name


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import contextlib, io, sys\nfrom ssdplan import cli\n"
        "for command in ((), *((name,) for name in cli.COMMANDS)):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        cli.main([*command, '--help'])\n"
        f"assert not {HEAVY!r} & set(sys.modules), {HEAVY!r} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--sed", "3"], "ssdplan run: error: unrecognized arguments: --sed; did you mean --seed?"),
        (["run", "--warmup=3"], "did you mean --warmup-steps?"),
        (["data", "preview", "--data=a", "--model=b", "--colour"], "did you mean --color? (see ssdplan data preview"),
        (["show", "a", "b"], "unrecognized arguments: b (see ssdplan show --help)"),
        (["--directory"], "COMMAND"),
    ],
)
def test_the_option_that_was_meant_is_named(arguments: list[str], says: str) -> None:
    said = CliRunner().invoke(cli.make_command_line(), arguments)
    assert said.exit_code == 2 and says in said.stderr and len(said.stderr.splitlines()) == 1 and not said.stdout


def test_help_imports_no_command() -> None:
    """So it is there in less than 0.3 seconds."""
    code = (
        "import sys\nfrom ssdplan import cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "made = {f'ssdplan.commands.{name}' for name in cli.COMMANDS} | {'pydantic', 'difflib', 'rich'}\n"
        "assert not made & set(sys.modules), made & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS, stdout=subprocess.DEVNULL)
