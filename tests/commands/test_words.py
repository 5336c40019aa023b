"""Negative values: refused in the words that other wrong values get, however they are joined to their option."""

import click
import pytest
from click.testing import CliRunner

from ssdplan import cli
from ssdplan.commands.parsing.types import Value
from tests.commands.test_help import CONTEXTS

NEGATIVE = ("-1GiB", "-.5G", "-1,-2", "-1e3", "-5")


def refuses(kind: click.ParamType, text: str) -> bool:
    try:
        kind.convert(text, None, None)
    except click.BadParameter:
        return True
    return False


CASES = [
    (name, max(param.opts, key=len), text)
    for name, context in CONTEXTS.items()
    for param in context.command.params
    if isinstance(param, click.Option) and isinstance(param.type, Value)
    for text in NEGATIVE
    if refuses(param.type, text)
]


@pytest.mark.parametrize(("name", "flag", "text"), CASES)
def test_a_negative_value_is_refused_for_what_it_is(name: str, flag: str, text: str) -> None:
    command, runner = name.split()[1:], CliRunner()
    apart = runner.invoke(cli.make_command_line(), [*command, flag, text])
    joined = runner.invoke(cli.make_command_line(), [*command, f"{flag}={text}"])
    assert isinstance(apart.exception, click.BadParameter | SystemExit), apart.exception
    assert apart.output == joined.output and apart.exit_code == 2
    assert "expected one argument" not in apart.output


def test_every_size_and_count_is_among_them() -> None:
    said = {flag for _, flag, _ in CASES}
    assert said >= {"--host-memory", "--device-memory", "--size", "--steps", "--global-batch", "--lr", "--seconds"}


def test_a_word_that_is_no_number_is_no_value() -> None:
    """`-1x` may be a file's name; it is one where a path is joined to its option."""
    for words in (["solve", "--host-memory", "-x"], ["run", "--out", "-1run"]):
        said = CliRunner().invoke(cli.make_command_line(), words)
        assert "expected one argument" in str(said.output) + str(said.exception)
