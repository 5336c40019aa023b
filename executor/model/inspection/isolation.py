"""Finds out whether a model keeps sequences apart that share a row.

Owns three questions: whether no sequence sees another and positions begin again with each; whether the beginning of a
row is untouched by what follows, such as padding; and whether a token sees those behind it. Answers them by running the
model's own forward and each of its layers on sequences side by side and alone, with matrices that stand for trained
ones and take no memory. Also whether its attention can be told by spans instead of masks of pairs
(`model/attention/by_spans.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from ..attention.by_spans import BY_SPANS, attending_by_spans, may_attend_by_spans
from .blocks import has_experts, one_of_each_kind
from .sparse import CannotRunError, outputs

_SHORT, _LONG = 4, 6
_LATER = 2
"""Tokens at the end of a row that are others, to see whether those before them notice."""
_VOCABULARY = 90


How = Literal["positions", "mask", "masks"]
"""How a model is told which tokens of a row belong together: by positions that begin again, from which its own masks
follow, or by positions and masks: one of ours, or those that transformers makes by the model's configuration, one for
each kind of its layers, with windows and in the form that its attention takes."""


def arguments_apart(
    how: How, position_ids: torch.Tensor, config: PreTrainedConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """What a model of `config`, which computes in `dtype`, is called with, beside its tokens, so that sequences that
    share a row are apart. `position_ids` [b, s] begin at 0 again with each; a mask is bool [b, 1, s, s], or spans where
    the model attends by these."""
    told: dict[str, Any] = {"position_ids": position_ids}
    if how == "masks":
        shape = torch.zeros((), dtype=dtype, device=position_ids.device).expand(*position_ids.shape, 1)
        masks = create_masks_for_generate(config, shape, None, None, position_ids=position_ids)
        return told | {"attention_mask": masks}
    if how == "mask" and config._attn_implementation == BY_SPANS:
        first = torch.arange(position_ids.shape[1], device=position_ids.device) - position_ids
        told["attention_mask"] = first[:, None, None].to("cpu", torch.int32)
    elif how == "mask":
        sequence = (position_ids == 0).cumsum(-1, dtype=torch.int32)
        told["attention_mask"] = (sequence[:, None, :, None] == sequence[:, None, None, :]).tril_()
    return told


@dataclass(frozen=True, slots=True)
class Isolation:
    """What sequences that share a row get from the embedding, and from every layer."""

    causal: bool
    """The first of a row gets what it gets alone: padding on the right needs no mask."""
    keeps_apart: How | None
    """How a model can be told so that each gets what it gets alone; None where it cannot."""
    looks_ahead: bool | None
    """Whether a token gets something of those behind it; None where the model cannot be run here."""
    padding_shows: bool
    """Whether a padded row gets something else than it gets alone although a mask says what is padding."""
    in_the_way: str = ""
    """What keeps it from keeping sequences apart, in words; empty where nothing does."""
    by_spans: bool = False
    """Whether attention by spans gives whole rows what they get without, to the bit, and keeps sequences apart."""


def isolation(module: PreTrainedModel, blocks: nn.ModuleList, *, returned: int | None, hidden_size: int) -> Isolation:
    """What a model does with sequences that share a row.

    `returned` is as in `inspection.Anatomy`; the module is in eval mode, its parameters are on meta. Layers are run on
    hidden states of unit scale, so that no layer's rounding grows in the next; of mixtures of experts one layer of each
    kind is.
    """
    generator = torch.Generator().manual_seed(5)
    short = torch.randint(_VOCABULARY, (2, _SHORT), generator=generator)
    long = torch.randint(_VOCABULARY, (2, _LONG), generator=generator)
    later = torch.randint(_VOCABULARY, (2, _LATER), generator=generator)

    layers = one_of_each_kind(module, blocks) if has_experts(blocks) else None  # many experts take minutes

    def side_by_side(short: torch.Tensor, long: torch.Tensor) -> torch.Tensor:
        """One row begins with a short sequence, the other with a long one."""
        return torch.stack([torch.cat([short[0], long[0]]), torch.cat([long[1], short[1]])])

    def hidden_of(layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        numbers = torch.Generator().manual_seed(1000 + layer)
        first, second, third = (torch.randn(2, n, hidden_size, generator=numbers) for n in (_SHORT, _LONG, _LATER))
        return first, second, third

    def run(ids: torch.Tensor, more: dict[str, Any], hidden: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        return outputs(module, blocks, {"input_ids": ids, **more}, hidden, returned, layers)

    def shared(more: dict[str, Any]) -> list[torch.Tensor]:
        return run(side_by_side(short, long), more, lambda layer: side_by_side(*hidden_of(layer)[:2]))

    def are_exact(found: list[torch.Tensor], alone: list[torch.Tensor], row: int, tokens: slice) -> bool:
        return all(
            torch.allclose(one[row, tokens], other[row, tokens], rtol=1e-4, atol=1e-4 * float(other.abs().max()))
            for one, other in zip(found, alone, strict=True)
        )

    def begin_as_alone(more: dict[str, Any], alone: list[torch.Tensor]) -> bool:
        found = shared(more)
        return are_exact(found, alone, 0, slice(_SHORT)) and are_exact(found, alone, 1, slice(_LONG))

    differ: dict[How, list[int]] = {}
    """Of each way in which the model can be run: which outputs, by their numbers, are not what they are alone."""

    def is_apart(how: How, alone: list[torch.Tensor]) -> bool:
        positions = side_by_side(*(torch.arange(n).expand(2, -1) for n in (_SHORT, _LONG)))
        try:
            more = arguments_apart(how, positions, module.config, torch.float32)
        except Exception as error:  # whatever a configuration lacks that the library's masks are made of
            raise CannotRunError from error
        found = list(enumerate(zip(shared(more), alone, strict=True)))
        exact = [n for n, (one, other) in found if all(are_exact([one], [other], row, slice(None)) for row in (0, 1))]
        differ[how] = [number for number, _ in found if number not in exact]
        return not differ[how]

    def whole_rows_are_the_same() -> bool:
        again = run(long, {}, lambda layer: hidden_of(layer)[1])
        return all(torch.equal(one, other) for one, other in zip(again, longs, strict=True))

    def has_another_end(begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        return torch.cat([begin[:, : _LONG - _LATER], end], 1)

    try:
        shorts = run(short, {}, lambda layer: hidden_of(layer)[0])
        longs = run(long, {}, lambda layer: hidden_of(layer)[1])
        others = run(has_another_end(long, later), {}, lambda layer: has_another_end(*hidden_of(layer)[1:]))
        alone = [side_by_side(*pair) for pair in zip(shorts, longs, strict=True)]
        causal = begin_as_alone({}, alone)
    except CannotRunError:
        return Isolation(causal=False, keeps_apart=None, looks_ahead=None, padding_shows=False)
    looks_ahead = not all(are_exact(others, longs, row, slice(_LONG - _LATER)) for row in (0, 1))
    lengths = torch.tensor([[_SHORT], [_LONG]])
    mask = (torch.arange(_SHORT + _LONG) < lengths).long()
    padding_shows = _holds(lambda: begin_as_alone({"attention_mask": mask}, alone)) is False
    without = {"mask": _attends_locally(module), "masks": bool(_attends_otherwise(module))}
    every: tuple[How, ...] = ("positions", "mask", "masks")
    ways = [how for how in every if not without.get(how)]
    apart = next((how for how in ways if _holds(lambda how=how: is_apart(how, alone))), None)  # type: ignore[misc]
    kinds = [type(blocks[layer]).__name__ for layer in (range(len(blocks)) if layers is None else layers)]
    in_the_way = "" if apart else _in_the_way(differ, kinds, _attends_otherwise(module))
    by_spans = False
    if apart is not None and may_attend_by_spans(module):
        with attending_by_spans(module):
            by_spans = bool(_holds(whole_rows_are_the_same) and _holds(lambda: is_apart(apart, alone)))
    return Isolation(causal, apart, looks_ahead, padding_shows, in_the_way, by_spans)


def _in_the_way(differ: Mapping[How, Sequence[int]], kinds: Sequence[str], otherwise: str) -> str:
    """`differ`: of each way in which a model could be told, the outputs that differed, the embedding's being 0; of
    `kinds` are the layers whose outputs are the others. `otherwise`: why one of the ways was not tried."""
    if otherwise:
        return otherwise
    if not {"mask", "masks"} & differ.keys():
        return "its own code takes no masks of several sequences"
    if any(0 in numbers for how, numbers in differ.items()):
        return "its own code counts positions along the row, or otherwise than from 0"
    fewest = min(differ.values(), key=len)
    return f"{kinds[fewest[0] - 1]} passes something on along the row that no mask stops"


def _holds(question: Callable[[], bool]) -> bool | None:
    """The answer; None where the model cannot be run so."""
    try:
        return question()
    except CannotRunError:
        return None


def _attends_otherwise(module: PreTrainedModel) -> str:
    """What attention does that masks alone do not undo, in words; empty where nothing is known."""
    config = module.config.get_text_config(decoder=True)
    biased = any(getattr(part, "alibi", False) for part in (config, getattr(config, "attn_config", None)))
    if biased:
        return "its biases grow along the row (ALiBi), and in bf16 their rounding with them"
    return "it attends in blocks of long rows" if getattr(config, "attention_type", "") == "block_sparse" else ""


def _attends_locally(module: PreTrainedModel) -> bool:
    """Whether a window or chunks may limit attention, for which a mask of ours would stand instead."""
    config = module.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    fields = ("sliding_window", "attention_chunk_size", "window_size")
    return bool(kinds - {"full_attention"}) or any(getattr(config, field, None) for field in fields)
