"""HTML as values: text that is escaped unless it is markup already. Owns the escaping, and knows no plan."""

from collections.abc import Sequence
from html import escape

VOID = {"meta", "rect", "line", "path", "circle"}
"""Elements without an end tag, or that end in themselves."""


class Markup(str):
    """Text that is HTML already; every other string is escaped."""

    __slots__ = ()


def joined(*parts: str) -> Markup:
    """One after the other; what is not markup is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def element(tag: str, *parts: str, **attributes: str | float | bool | None) -> Markup:
    """`<tag ...>parts</tag>`. An attribute's `_` is a `-`, except at its end, where it spares a word of Python's.

    True is an attribute without a value; False and None are none.
    """
    written = ""
    for name, value in attributes.items():
        if value is not None and value is not False:
            written += " " + name.rstrip("_").replace("_", "-")
            if value is not True:
                written += f'="{escape(_text(value))}"'
    if tag in VOID and not parts:
        return Markup(f"<{tag}{written}>" if tag == "meta" else f"<{tag}{written}/>")
    return Markup(f"<{tag}{written}>{joined(*parts)}</{tag}>")


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,), class_: str = ""
) -> Markup:
    """Rows under heads; columns in `words` are text and stand left, figures stand right. It scrolls where it must."""

    def cells(tag: str, row: Sequence[str]) -> Markup:
        made = []
        for column, cell in enumerate(row):
            head = tag == "th"
            made.append(
                element(
                    "th" if head or column == 0 else "td",
                    cell,
                    scope="col" if head else "row" if column == 0 else None,
                    class_=None if column in words else "n",
                )
            )
        return element("tr", *made)

    head = element("thead", cells("th", heads)) if heads else Markup()
    body = element("tbody", *(cells("td", row) for row in rows))
    return element("div", element("table", head, body), class_="scroll", tabindex="0")


def facts(pairs: Sequence[tuple[str, str]], *, class_: str = "facts") -> Markup:
    """Names and values."""
    made = (element("div", element("dt", name), element("dd", value)) for name, value in pairs)
    return element("dl", *made, class_=class_)


def section(title: str, *parts: str, lead: str = "", name: str = "", wide: bool = False) -> Markup:
    """A part of the page under a heading; nothing where there is nothing to show."""
    if not any(parts):
        return Markup()
    heading = element("h2", title)
    opening = element("p", lead, class_="lead") if lead else Markup()
    return element("section", heading, opening, *parts, id=name or None, class_="wide" if wide else None)
