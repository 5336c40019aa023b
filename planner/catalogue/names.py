"""Names: which thing of the catalogue somebody means who writes "RTX 4090", "h100-sxm" or "meta-llama/Llama-3.1-8B".

Owns that rule, and other names of the same thing. A name stands for a thing where its parts are parts of the thing's
name, in their order, and of no other's; so "l40" is no `l40s`, and "h100" could be two cards.
"""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Protocol, TypeVar

from ssdplan.plans.errors import UsageError


class Named(Protocol):
    """A thing of the catalogue."""

    @property
    def name(self) -> str: ...


Thing = TypeVar("Thing", bound=Named)

MOST_HINTS = 4
MOST_LETTERS = 120
"""Of a name; what is longer is none."""
ALIASES = {
    "a100-sxm4-40gb": "a100-40gb",
    "a100-sxm4-80gb": "a100-80gb",
    "dgx-spark": "gb10",
    "strix-halo": "radeon-8060s",
    "v100": "v100-32gb",
    "v100-sxm2-32gb": "v100-32gb",
    "gh200-480gb": "gh200",
    "h200-sxm": "h200",
    "h100-sxm": "h100-80gb",
    "h100-sxm5": "h100-80gb",
    "gpt2-124m": "gpt2",
    "gpt2-0.8b": "gpt2-large",
    "gpt2-774m": "gpt2-large",
    "gpt2-1.7b": "gpt-1.7b",
    "gpt2-4b": "gpt-4b",
    "gpt2-4.0b": "gpt-4b",
    "gpt2-5.9b": "gpt-5.9b",
    "gpt3-175b": "gpt-175b",
    "llama-1.2b": "llama-3.2-1b",
    "falcon-10b": "falcon3-10b",
    "falcon2-11b": "falcon-11b",
    "bloom-7b1": "bloom-7b",
    "mistral-7b-v0.3": "mistral-7b",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "pcie3": "pcie-3.0-x16",
    "pcie4": "pcie-4.0-x16",
    "pcie5": "pcie-5.0-x16",
}
"""Another name of a thing -> its own."""
SILENT = frozenset(
    [
        "nvidia",
        "geforce",
        "tesla",
        "quadro",
        "amd",
        "instinct",
        "radeon",
        "intel",
        "platinum",
        "gold",
        "generation",
        "black",
        "graphics",
        "gpu",
        "cpu",
        "processor",
        "ssd",
        "nvme",
        "meta",
        "instruct",
        "base",
        "chat",
        "hf",
        "pt",
        "it",
        "hbm2",
        "hbm2e",
        "hbm3",
        "hbm3e",
        "blackwell",
        "workstation",
        "edition",
        "superchip",
        "threads",
        "cores",
        "optane",
        "with",
        "heatsink",
    ]
)
"""Words that say nothing more of a thing that the rest of its name names."""
CORES = re.compile(r"\b\d+-cores?\b", re.IGNORECASE)
"""How many cores there are, as Linux has it in the names of processors: AMD EPYC 7763 64-Core Processor."""


def find(kind: str, name: str, things: Iterable[Thing]) -> Thing:
    """The thing that `name` stands for. Raises UsageError: with the candidates where it could be several, and with the
    nearest name and all others where it is none."""
    known = {thing.name: thing for thing in things}
    if name.lower() in known:
        return known[name.lower()]
    name = name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 3] + "..."
    found = _candidates(name, known)
    if len(found) > 1:
        raise UsageError(f"{kind} {name!r}: could be {', '.join(found[:-1])} or {found[-1]}; name one of them")
    if not found:
        raise UsageError(nearest(f"no {kind} {name!r} in the catalogue", name, known))
    return known[found[0]]


def nearest(problem: str, name: str, known: Iterable[str]) -> str:
    """`problem`, the known names that begin as `name` does or the one nearest to it, and all that there are, in one
    line."""
    names, text = sorted(known), "".join(_parts(name))
    begun = [each for each in names if text and "".join(_parts(each)).startswith(text)]
    near = begun[:MOST_HINTS] or get_close_matches(name.lower(), names, 1, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{problem}{hint} (known: {', '.join(names)})"


def _candidates(name: str, known: Iterable[str]) -> list[str]:
    """Names that `name` could stand for: those that it spells, else those that its parts are parts of; then the same of
    its telling parts alone."""
    spelled = {own: own for own in known} | {other: own for other, own in ALIASES.items() if own in known}
    whole = _parts(CORES.sub("", name.rpartition("/")[2]))
    telling = [part for part in whole if part not in SILENT]
    for parts in (whole, telling):
        text = "".join(parts)
        if same := sorted({own for other, own in spelled.items() if "".join(_parts(other)) == text}):
            return same
    for parts in (whole, telling):
        if parts and (among := sorted({own for other, own in spelled.items() if _among(parts, _parts(other))})):
            return among
    return []


def _parts(name: str) -> list[str]:
    """Runs of letters and digits."""
    return re.findall(r"[a-z0-9]+(?:\.[a-z0-9]+)*", name.lower())


def _among(asked: Sequence[str], own: Sequence[str]) -> bool:
    """Whether the parts that are asked for follow each other in a name's own; parts of either that stand together count
    as one, so that rtx4090 is rtx-4090."""
    if not asked:
        return True
    for start in range(len(own)):
        for end in range(start + 1, len(own) + 1):
            text = "".join(own[start:end])
            for used in range(1, len(asked) + 1):
                if "".join(asked[:used]) == text and _among(asked[used:], own[end:]):
                    return True
    return False
