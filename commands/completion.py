"""`ssdplan completion`: the script by which a shell completes commands, options and their values.

The scripts are click's. At each press of TAB a script starts ssdplan and asks it, through the variable `COMPLETE`.
"""

from dataclasses import dataclass

import click

from .parsing.command import COMPLETE, Argument, Command
from .parsing.types import Choice

SHELLS = ("bash", "zsh", "fish")
_WHERE = """\b
in bash, for good: ssdplan completion bash > ~/.local/share/bash-completion/completions/ssdplan
in zsh, in a directory of $fpath: ssdplan completion zsh > ~/.zfunc/_ssdplan
in fish: ssdplan completion fish > ~/.config/fish/completions/ssdplan.fish"""


@dataclass(frozen=True)
class Options:
    shell: str


def command() -> Command:
    shell = Argument(["shell"], type=Choice(SHELLS), metavar="shell", help="whose script to print: bash, zsh or fish")
    return Command(Options, call, [shell], epilog=_WHERE)


def call(options: Options) -> int:
    from click.shell_completion import get_completion_class

    kind = get_completion_class(options.shell)
    assert kind is not None, "click has a script for each of the shells"
    source = kind(click.Command(None), {}, "ssdplan", COMPLETE)
    print(source.source())
    return 0
