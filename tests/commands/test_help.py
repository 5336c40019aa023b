"""Help is there at once, in groups, with every default."""

import argparse
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ssdplan import cli
from ssdplan.commands.options import Default
from tests.bounds import HANG_SECONDS

HEAVY = {"torch", "transformers", "numpy", "matplotlib", "yaml", "highspy", "shtab"}


def parsers(parser: argparse.ArgumentParser, name: str = "ssdplan") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parser of every command and action."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below, found in action.choices.items():
                yield from parsers(found, f"{name} {below}")


PARSERS = dict(parsers(cli._parser()))


@pytest.mark.parametrize("name", [name for name in PARSERS if name != "ssdplan completion"])
def test_every_default_is_shown(name: str) -> None:
    shown = " ".join(PARSERS[name].format_help().split())
    for action in PARSERS[name]._actions:
        default = action.default.value if isinstance(action.default, Default) else action.default
        if isinstance(action, argparse.BooleanOptionalAction) and default is not None:
            assert f"[{action.option_strings[0 if default else 1]}]" in shown, action.dest
        elif action.nargs != 0 and default not in (None, argparse.SUPPRESS, {}, ()):
            assert f"(default: {default})" in shown.replace("- ", "-"), action.dest


@pytest.mark.parametrize("name", PARSERS)
def test_many_options_stand_in_groups(name: str) -> None:
    """Beside --help, no more than four stand without a heading."""
    parser = PARSERS[name]
    grouped = parser._optionals._group_actions
    assert len([action for action in grouped if action.dest != "help"]) <= 4, name
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), f"{name}: {action.dest} has no help"


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
def test_the_option_that_was_meant_is_named(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    said = capsys.readouterr()
    assert stopped.value.code == 2 and says in said.err and len(said.err.splitlines()) == 1 and not said.out
