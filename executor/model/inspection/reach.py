"""Finds out up to which length a row is computed as if its length did not matter.

Owns that one question: to some models the length of the longest row is an input (rotary scaling of the kinds dynamic
and longrope), others have a table of positions that ends. It is answered by running the model's own forward and one
of its layers of each kind with positions of a row that is so long beside those of a short one, which must
not notice. It makes no long rows, and takes no memory of the size of a weight.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from .blocks import one_of_each_kind
from .sparse import CannotRunError, outputs

_LENGTH = 8
_FARTHEST = 1 << 20
"""Tokens of the longest row that is tried, or four times what the configuration tells."""
_VOCABULARY = 90


@dataclass(frozen=True, slots=True)
class Reach:
    """`alike`: up to so many tokens every row gets what it gets alone; None: however many. `beyond`: rows that are all
    longer are also computed alike, in another way; a longer one beside a shorter one is not."""

    alike: int | None
    beyond: bool


def reach(module: PreTrainedModel, blocks: nn.ModuleList, *, returned: int | None, hidden_size: int) -> Reach | None:
    """How long rows may be; None where the model cannot be told positions here.

    `returned` is as in `inspection.Anatomy`; the module is in eval mode, its parameters are on meta.
    """
    ids = torch.randint(_VOCABULARY, (2, _LENGTH), generator=torch.Generator().manual_seed(13))
    begin = torch.arange(_LENGTH)
    everything = one_of_each_kind(module, blocks)

    def hidden_of(layer: int) -> torch.Tensor:
        return torch.randn(2, _LENGTH, hidden_size, generator=torch.Generator().manual_seed(1000 + layer))

    def beside(length: int, layers: Collection[int]) -> list[torch.Tensor] | None:
        """What a short row gets beside one of so many tokens; None where that one cannot be run."""
        positions = torch.stack([begin, begin + length - _LENGTH])
        try:
            found = outputs(module, blocks, {"input_ids": ids, "position_ids": positions}, hidden_of, returned, layers)
        except CannotRunError:
            return None
        return [each[0] for each in found]

    if beside(_LENGTH, everything) is None:
        everything = [layer for layer in everything if beside(_LENGTH, [layer]) is not None]
    alone = beside(_LENGTH, everything)
    if alone is None:
        return None

    def notices(length: int, layers: Collection[int]) -> bool:
        before = beside(_LENGTH, layers)  # some models keep what they made for the longest row until a short one comes
        found = beside(length, layers)
        return before is None or found is None or not _same(found, before)

    def who_notices(length: int) -> Collection[int] | None:
        """Layers, fewest if they can be told, that suffice to notice a row of so many tokens; None: none does."""
        beside(_LENGTH, everything)
        found = beside(length, everything)
        if found is None:
            return () if notices(length, ()) else everything
        differ = [n for n, (one, other) in enumerate(zip(found, alone, strict=True)) if not _same([one], [other])]
        if not differ:
            return None
        return () if differ[0] == 0 else [everything[differ[0] - 1]]

    config = module.config.get_text_config(decoder=True)
    farthest = max(_FARTHEST, 4 * (getattr(config, "max_position_embeddings", None) or 0))
    low = farthest
    while low > _LENGTH and (layers := who_notices(low)) is not None:
        least, most = _LENGTH, low
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if notices(middle, layers) else (middle, most)
        low = least
    if low == farthest:
        return Reach(None, beyond=False)
    nearest, farther = beside(low + 1, everything), beside(farthest, everything)
    again = beside(_LENGTH, everything)
    forgets = again is not None and _same(again, alone)
    return Reach(low, beyond=forgets and nearest is not None and farther is not None and _same(nearest, farther))


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether the same computations gave the same numbers; kernels may round differently from call to call."""
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-6 * float(b.abs().max())) for a, b in pairs)
