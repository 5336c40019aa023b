"""`ssdplan completion`: what a shell needs to complete commands, options and their values.

The scripts are shtab's, made once from the parser, so that a press of TAB starts no Python.
"""

import argparse

from ssdplan.plans.errors import UsageError

from . import options as of

SHELLS = ("bash", "zsh", "fish")
_WHERE = """in bash, for good: ssdplan completion bash > ~/.local/share/bash-completion/completions/ssdplan
in zsh, in a directory of $fpath: ssdplan completion zsh > ~/.zfunc/_ssdplan
in fish: ssdplan completion fish > ~/.config/fish/completions/ssdplan.fish
It needs the package shtab: pip install shtab"""
_DIRECTORIES = ("DIR", "RUN", "DIR|NAME")
"""Values that are directories, by what help calls them; the other paths may be files."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=call)
    parser.epilog = _WHERE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")


def call(options: argparse.Namespace) -> int:
    """`options.parser` is that of all commands."""
    try:
        import shtab
    except ImportError:
        raise UsageError("completion needs the package shtab, which is not installed: pip install shtab") from None
    _name_paths(options.parser, shtab.FILE, shtab.DIRECTORY)
    print(shtab.complete(options.parser, shell=options.shell))
    return 0


def _name_paths(parser: argparse.ArgumentParser, file: object, directory: object) -> None:
    """Say of every option, of every command below too, whether its value is a path, in shtab's way."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _name_paths(below, file, directory)
        elif action.metavar in _DIRECTORIES:
            action.complete = directory  # type: ignore[attr-defined]
        elif action.type in (of.path, of.path_or_none):
            action.complete = file  # type: ignore[attr-defined]
