"""Finds out up to which width rows that are shared or padded are computed exactly, where layers choose among tokens.

Owns that one question. A layer may choose among the tokens of a row, say the best so many of all, once there are more
than some number of its configuration; among equals the choice may then depend on what else is in the row. It is
answered by behaviour: each number of the configuration and of the layers is made small, and one layer of each kind is
run on rows of more tokens than that, of which many are alike. So no row need be as long as the number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .blocks import one_of_each_kind
from .isolation import Isolation, arguments_apart
from .sparse import CannotRunError, outputs

_SMALL = 5
"""What a number is made, to see whether it is a limit."""
_SHORT, _LONG = 9, 15
"""Tokens of the two sequences that share a row."""
_TOKENS = (70, 80, 89)
"""Of which every sequence is made, so that many are alike."""
_TRIED = 512
"""Up to this a number that seems a limit, or beyond it one that is also a size of a parameter, is tried as it is."""


def row_limit(
    module: PreTrainedModel,
    blocks: nn.ModuleList,
    apart: Isolation,
    *,
    known: int | None,
    returned: int | None,
    hidden_size: int,
) -> int | None:
    """The widest row in which sequences that share it, or are padded to it, get what they get alone; None: any.

    `apart` is what was found on short rows, `known` a length that `reach` told, `returned` is as in
    `inspection.Anatomy`; the module is in eval mode, its parameters are on meta.
    """
    layers = one_of_each_kind(module, blocks)

    def differs(short: int, long: int) -> bool:
        """Whether one of the two sequences gets something else than alone, in a row of which no length is told
        otherwise. Errors: CannotRunError."""
        if known is not None:
            long = max(1, min(long, known - 2))
            short = max(1, min(short, known - long))
        generator = torch.Generator().manual_seed(17)
        drawn = torch.randint(len(_TOKENS), (short + long,), generator=generator)

        def run(index: torch.Tensor, more: dict[str, Any]) -> list[torch.Tensor]:
            def hidden_of(layer: int) -> torch.Tensor:
                numbers = torch.Generator().manual_seed(1000 + layer)
                return torch.randn(len(_TOKENS), hidden_size, generator=numbers)[index]

            ids = torch.tensor(_TOKENS)[index]
            return outputs(module, blocks, {"input_ids": ids, **more}, hidden_of, returned, layers)

        first, second = drawn[None, :short], drawn[None, short:]
        alone = run(first, {}), run(second, {})
        found = []
        if apart.keeps_apart is not None:
            positions = torch.cat([torch.arange(short), torch.arange(long)])[None]
            both = run(drawn[None], arguments_apart(apart.keeps_apart, positions, module.config, torch.float32))
            found += [[each[:, :short] for each in both], [each[:, short:] for each in both]]
        else:
            found += list(alone)
        padded = torch.cat([second, first[:, :1].expand(1, short)], 1)
        mask = (torch.arange(short + long) < long).long()[None]
        found.append([each[:, :long] for each in run(padded, {"attention_mask": mask})])
        pairs = zip(found, (*alone, alone[1]), strict=True)
        return any(
            not torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
            for one, other in pairs
            for a, b in zip(one, other, strict=True)
        )

    sizes = {size for parameter in module.parameters() for size in parameter.shape}
    inside = {id(part) for part in blocks.modules()}
    modules = [part for part in module.modules() if id(part) not in inside]
    modules += [part for layer in layers for part in blocks[layer].modules()]
    limits = []
    for (name, value), places in _numbers(module, modules).items():
        if value <= _SMALL or (known is not None and value >= known):
            continue
        with _made(places, name, _SMALL), _as_they_were(modules):
            if not _or_cannot(differs, _SHORT, _LONG):
                continue
        if value <= _TRIED or value in sizes:
            with _as_they_were(modules):
                if not _or_cannot(differs, value // 2 + 4, value + value // 4 + 8):
                    continue
        limits.append(value)
    return min(limits, default=None)


def _numbers(module: PreTrainedModel, modules: list[nn.Module]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Where each number stands that a model's own code may read: in the configuration, and in the parts."""
    configs = {id(config): config for config in (module.config, module.config.get_text_config(decoder=True))}
    own = [part for part in modules if not type(part).__module__.startswith("torch.nn.")]
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for place in (*(vars(config) for config in configs.values()), *(vars(part) for part in own)):
        for name, value in place.items():
            if type(value) is int:
                found.setdefault((name, value), []).append(place)
    return found


@contextmanager
def _made(places: list[dict[str, Any]], name: str, value: int) -> Iterator[None]:
    before = [place[name] for place in places]
    try:
        for place in places:
            place[name] = value
        yield
    finally:
        for place, old in zip(places, before, strict=True):
            place[name] = old


@contextmanager
def _as_they_were(modules: list[nn.Module]) -> Iterator[None]:
    """After the context, what the parts hold is as before it: some keep what they made for the longest row."""
    before = [(vars(part), dict(vars(part)), dict(part._buffers)) for part in modules]
    try:
        yield
    finally:
        for place, values, buffers in before:
            place.clear()
            place.update(values)
            place["_buffers"].clear()
            place["_buffers"].update(buffers)


def _or_cannot(differs: Callable[[int, int], bool], short: int, long: int) -> bool:
    """False where the model cannot be run so: a size of a part, which limits no row."""
    try:
        return differs(short, long)
    except CannotRunError:
        return False
