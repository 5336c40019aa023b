"""The layout of text: titles, facts and tables of at most 100 columns, no colour, the same everywhere.

Owns how lines fit, whatever the documents say. It knows no document.
"""

from collections.abc import Iterable, Sequence
from textwrap import wrap

from rich.cells import cell_len, set_cell_size

COLUMNS = 100
NAME_COLUMNS = 24
"""The most of a name that a table shows."""

Row = Sequence[str]


class Whole(str):
    """A line that people copy, a path or a command: it is never cut, however long it is."""


def page(title: str, opening: list[str], *sections: tuple[str, list[str]]) -> str:
    """Lines that never exceed COLUMNS, whatever the documents say, but for those that are `Whole`; sections without
    lines are left out."""
    lines = [title, "=" * min(cell_len(title), COLUMNS), *opening]
    for heading, body in sections:
        if body:
            lines += ["", heading, *body]
    fitting = (clean(line) if isinstance(line, Whole) else short(line, COLUMNS) for line in lines)
    return "\n".join(line.rstrip() for line in fitting) + "\n"


def facts(*pairs: tuple[str, str]) -> list[str]:
    """A line for each (name, value), values below each other."""
    return aligned([(f"  {name}", value) for name, value in pairs], least=20)


def spread(name: str, value: str) -> list[tuple[str, str]]:
    """One of the facts, whose value takes as many lines as it needs."""
    lines = wrap(clean(value), COLUMNS - 22, break_on_hyphens=False) or [""]
    return [("" if row else name, line) for row, line in enumerate(lines)]


def aligned(pairs: Iterable[tuple[str, str]], least: int = 0) -> list[str]:
    pairs = list(pairs)
    width = max([least, *(cell_len(name) for name, _ in pairs)])
    return [f"{set_cell_size(name, width)}  {value}" for name, value in pairs]


def table(heads: Sequence[Row], rows: Sequence[Row], left: Sequence[int] = (0, 1)) -> list[str]:
    """Columns as wide as their widest cell; those in `left` to the left, the others to the right."""
    whole = [*heads, *rows]
    widths = [max(map(cell_len, column)) for column in zip(*whole, strict=True)]
    lines = []
    for row in whole:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            pad = " " * (width - cell_len(cell))
            cells.append(cell + pad if column in left else pad + cell)
        lines.append("  " + "  ".join(cells))
    return lines


def hanging(head: str, words: str) -> list[str]:
    """`words` whole behind `head`, on as many lines as they take, all of them beginning at one column."""
    columns = cell_len(head)
    body = wrap(clean(words), max(COLUMNS - columns, NAME_COLUMNS)) or [""]
    return [head + body[0], *(" " * columns + line for line in body[1:])]


def wrapped(text: str) -> list[str]:
    """Lines that fit, when no character is wide; the page cuts those that do not."""
    return wrap(text, COLUMNS - 4, initial_indent="", subsequent_indent="  ") or [""]


def clean(text: str) -> str:
    """Without what could move a terminal's cursor: documents come from anywhere."""
    return "".join(char if char.isprintable() else "?" for char in text)


def short(text: str, columns: int) -> str:
    """Clean, and cut to `columns` with an ellipsis."""
    text = clean(text)
    return text if cell_len(text) <= columns else set_cell_size(text, columns - 3).rstrip() + "..."
