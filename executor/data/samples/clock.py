"""The time that a chat template writes: one instant for all samples of a run, and for the run when it goes on.

Owns how a template gets it. Templates ask for the time by `strftime_now(format)`, as Llama 3's does for the date of its
system message. A function that is given to `apply_chat_template` under that name does not count (transformers makes
text of it), so the template is given a macro of that name, and what each format gives at the instant.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

_ASKS = "strftime_now"
_TIMES = "times_of_this_run"
_FORMAT = re.compile(r"%[-_0^#]?[A-Za-z]")
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_MACRO = (
    f"{{% macro {_ASKS}(format) %}}{{{{ {_TIMES}[format] if format in {_TIMES} else raise_exception("
    "'it asks for the time in a format that it does not write out, ' ~ format ~ '; write that out in the template') }}"
    "{% endmacro %}\n"
)
"""Its last line break is trimmed, as all behind a block are, and a template that begins with white space finds itself
at the begin of a line, as before."""


@dataclass(frozen=True)
class Timed:
    """A chat template that writes the time of an instant, and the variables that it does so by (`apply_chat_template`).

    A template that does not ask for the time is as it was, and has none.
    """

    template: str
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def times(self) -> str:
        """All that the instant decides of what it writes: the same `times`, the same texts. Empty when nothing."""
        times = self.variables.get(_TIMES)
        return json.dumps(times, sort_keys=True, ensure_ascii=False) if times else ""


def timed(template: str, instant: datetime) -> Timed:
    """The template as it is to be rendered when it is `instant`, by the clock on the wall."""
    if _ASKS not in template:
        return Timed(template)
    formats = _formats(template)
    if formats is None:
        return Timed(template)
    return Timed(_MACRO + template, {_TIMES: {text: instant.strftime(text) for text in formats}})


def _formats(template: str) -> list[str] | None:
    """The string literals of a template that may be formats of times: those that it asks with, or, where that cannot be
    told, all. None where it does not ask."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        tokens = [(token.type, str(token.value)) for token in Environment().lexer.tokenize(template)]
    except TemplateSyntaxError:  # what is wrong with it is said when it is rendered
        return None
    places = [place for place, token in enumerate(tokens) if token == ("name", _ASKS)]
    if not places:
        return None
    literals = {text for kind, text in tokens if kind == "string"}
    asked: set[str] = set()
    for place in places:
        found = _asked(tokens, place)
        if found is None:
            # Not %s, the seconds of an epoch: each run would have tokens of its own for what is printf's as a rule.
            asked |= {text for text in literals if "%s" not in text}
        else:
            asked |= found
    return sorted(text for text in asked if _FORMAT.search(text) and not _NO_TEXT.search(text))


def _asked(tokens: list[tuple[str, str]], place: int) -> set[str] | None:
    """With which formats the name at `place` is called, none where a template only looks whether it is there; None
    where that cannot be told."""
    before = tokens[place - 1]
    match [kind for kind, _ in tokens[place + 1 : place + 6]]:
        case ["name", *_] if tokens[place + 1][1] == "is":
            return set()
        case ["lparen", "string", "rparen", *_] if before[0] != "dot":
            return {tokens[place + 2][1]}
        case ["lparen", "name", "assign", "string", "rparen"] if before[0] != "dot":
            return {tokens[place + 4][1]}
    return None
