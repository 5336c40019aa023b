"""A command on top of click: options in titled sections, and the record of options that the command is called with.

Owns what all commands share: how they take their words, refuse wrong ones and print their help. Each command's module
declares its options; `cli.py` says how an error reads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from .words import UnknownWords, read_words, spelled

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

T = TypeVar("T")
CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100}
COMPLETE = "_SSDPLAN_COMPLETE"
"""The variable through which a shell's script asks what may follow."""


class Argument(click.Argument):
    """An argument; its help names its default, and its usage says whether it may be left out or repeated."""

    def get_usage_pieces(self, ctx: click.Context) -> list[str]:
        written = self.make_metavar(ctx)
        if self.nargs == -1:
            written = f"{written}..."
        return [written if self.required else f"[{written}]"]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        written, about = super().get_help_record(ctx)
        default = self.get_default(ctx)
        return written, about if default is None or self.required else f"{about}  [default: {default}]"


@dataclass(frozen=True)
class Section:
    """Options that stand together in a command's help."""

    title: str
    options: tuple[click.Option, ...]


class Command(click.Command):
    """A command: `call` does its work with a `record` of its options, a dataclass, and returns the exit code.

    Of the options that one of the tuples in `exclusive` names only one may be given. With `tells_given` the record has
    a field `given` too: the names of the options that were given on the command line, not left to their defaults.
    """

    def __init__(
        self,
        record: Callable[..., T],
        call: Callable[[T], int],
        parameters: Sequence[click.Parameter] = (),
        sections: Sequence[Section] = (),
        *,
        exclusive: Sequence[tuple[str, ...]] = (),
        tells_given: bool = False,
        epilog: str | None = None,
    ) -> None:
        options = [option for section in sections for option in section.options]
        super().__init__(
            None, params=[*parameters, *options], callback=call, epilog=epilog, context_settings=dict(CONTEXT)
        )
        self.record = record
        self.sections = tuple(sections)
        self.exclusive = tuple(exclusive)
        self.tells_given = tells_given

    def parse(self, arguments: Sequence[str]) -> click.Context:
        """What the command makes of arguments, without running it. Raises click.UsageError."""
        return self.make_context(self.name, list(arguments))

    def values(self, ctx: click.Context) -> dict[str, Any]:
        """The values of all options, by name, in the order in which the command has them; a list for several values."""
        several = {param.name for param in self.params if param.multiple or param.nargs == -1}
        return {
            param.name: list(ctx.params[param.name]) if param.name in several else ctx.params[param.name]
            for param in self.params
        }

    def given(self, ctx: click.Context) -> dict[str, Any]:
        """The values of the options that the user gave."""
        return {name: value for name, value in self.values(ctx).items() if _was_given(name, ctx)}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell asks what may follow: nothing is wrong yet
            return super().parse_args(ctx, args)
        words = read_words(args, ctx)
        ctx.allow_extra_args = True
        try:
            left = super().parse_args(ctx, words.for_click())
        except click.MissingParameter as error:
            missing = [spelled(param) for param in self.params if param.required and param.name not in ctx.params]
            raise click.UsageError(f"the following arguments are required: {', '.join(missing)}", ctx) from error
        self._refuse_two_of_one(ctx)
        if unknown := words.left(len(left)):
            raise UnknownWords(unknown, ctx)
        return left

    def invoke(self, ctx: click.Context) -> Any:
        assert self.callback is not None
        values = self.values(ctx)
        if self.tells_given:
            values["given"] = frozenset(self.given(ctx))
        return ctx.invoke(self.callback, self.record(**values))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        grouped = {option.name for section in self.sections for option in section.options}
        others = [param for param in self.get_params(ctx) if param.name not in grouped]
        for title, options in (("Options", others), *((each.title, each.options) for each in self.sections)):
            rows = [option.get_help_record(ctx) for option in options if isinstance(option, click.Option)]
            with formatter.section(title):
                formatter.write_dl([row for row in rows if row])

    def _refuse_two_of_one(self, ctx: click.Context) -> None:
        """Raises click.BadParameter where two options are given that exclude each other."""
        by_name = {param.name: param for param in self.params}
        for names in self.exclusive:
            given = [name for name in ctx.params if name in names and _was_given(name, ctx)]
            if len(given) > 1:
                first, second = (by_name[name] for name in given[:2])
                raise click.BadParameter(f"not allowed with argument {spelled(first)}", ctx, second)


@dataclass(frozen=True)
class Member:
    """A command of a group: a line about it, and what makes it, which imports its module."""

    about: str
    make: Callable[[], click.Command]


class Group(click.Group):
    """Commands that are made when they are called; help lists them without. `kind` is what help calls one of them."""

    def __init__(self, members: Mapping[str, Member], kind: str, params: Sequence[click.Option] = ()) -> None:
        super().__init__(
            None,
            params=list(params),
            context_settings=dict(CONTEXT),
            no_args_is_help=False,
            subcommand_metavar=f"{kind} ...",
        )
        self.members = members
        self.kind = kind

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.members)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.members:
            return None
        member = self.members[cmd_name]
        made = member.make()
        made.name, made.help = cmd_name, f"{member.about[0].upper()}{member.about[1:]}."
        return made

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        words = read_words(args, ctx, of_group=True)
        left = super().parse_args(ctx, words.for_click())
        if not words.arguments:
            raise click.UsageError(f"the following arguments are required: {self.kind}", ctx)
        name = words.arguments[0][1]
        if name not in self.members:
            told = f"argument {self.kind}: invalid choice: {name!r} (choose from {', '.join(map(repr, self.members))})"
            raise click.NoSuchCommand(name, told, self.members, ctx)
        if words.unknown:
            raise UnknownWords(words.left(0), ctx)
        return left

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section(f"{self.kind.capitalize()}s"):
            formatter.write_dl([(name, member.about) for name, member in self.members.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem[str]]":
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(name, help=member.about)
            for name, member in self.members.items()
            if name.startswith(incomplete)
        ]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]


def _was_given(name: str, ctx: click.Context) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
