"""Freezing: which parameters of a model are not to be trained, from patterns of their names.

Owns what a pattern matches, and what is said where it matches nothing. What follows from it (states, graphs, exports)
is everyone else's.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from transformers import PreTrainedModel

from ssdplan.plans.errors import UsageError

from .shards import Checkpoint

_NEAR = 3
"""Names that an error lists."""


def frozen_parameters(
    path: Path, module: PreTrainedModel, patterns: Sequence[str], unused: frozenset[str] = frozenset()
) -> frozenset[str]:
    """The parameters of `module`, opened from the model directory `path`, whose names match one of `patterns`, under
    the names that `named_parameters` has for them.

    A pattern is a glob as of fnmatch, in which case counts and `*` also stands for dots. It is held against each name
    that a parameter has: the model's own, that of the checkpoint, and every name of a tied one, which is frozen under
    all of them; and, of one that is stored in parts, as experts, against the names of all parts. `unused` parameters
    are not trained anyway. Errors: UsageError where a pattern matches nothing, or nothing is left to train.
    """
    if not patterns:
        return frozenset()
    names, parts = _names(path, module)
    frozen: set[str] = set()
    for pattern in patterns:
        matched = {own for own, others in names.items() if fnmatch.filter(others, pattern)}
        for own, stored in parts.items():
            if own not in matched and (some := fnmatch.filter(stored, pattern)):
                if len(some) < len(stored):
                    raise UsageError(
                        f"--freeze {pattern}: matches {len(some)} of {len(stored)} stored parts of {own}, which is "
                        "frozen whole or not at all; match all of them"
                    )
                matched.add(own)
        if not matched:
            near = _near(pattern, (name for others in names.values() for name in others))
            raise UsageError(f"--freeze {pattern}: matches no parameter of {path.name}; near it are {', '.join(near)}")
        frozen |= matched
    if not names.keys() - frozen - unused:
        raise UsageError(f"--freeze {' '.join(patterns)}: freezes all of {path.name}, so there is nothing to train")
    return frozenset(frozen - unused)


def _names(path: Path, module: PreTrainedModel) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """For each parameter all of its names, and for each that is stored in parts the names of these."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    checkpoint = Checkpoint(path, module)
    names = {
        names[0]: list(dict.fromkeys([*names, *(entry.name for entry in checkpoint.find(tuple(names)))]))
        for names in aliases.values()
    }
    return names, {
        own: [part.stored for part in parts] for own, others in names.items() if (parts := checkpoint.parts(others))
    }


def _near(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern may have been meant for: those in which all of its plain pieces are, else alike ones."""
    every = sorted(set(names))
    pieces = [piece for piece in pattern.replace("?", "*").split("*") if piece]
    loose = "*".join(["", *pieces, ""])
    found = fnmatch.filter(every, loose) or get_close_matches(pattern.replace("*", ""), every, n=_NEAR, cutoff=0.0)
    return found[:_NEAR]
