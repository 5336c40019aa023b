"""Finds out whether a model's head acts on each position by itself, so that its logits can be made in chunks of tokens.

Owns this question, and whether the head lets a position see those behind it. Answers them by running the model's own
forward: a tiny input as a whole and in rows of one token, with random weights for a few entries of the vocabulary. It
allocates nothing that grows with a vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ssdplan.plans.errors import MismatchError

from .standins import parameters_as, split_call, stand_ins

ROWS, LENGTH, CHUNK = 2, 8, 5
ENTRIES = 16
"""Of the vocabulary: a head's matrix has as many rows here."""

HeadKind = Literal["position-wise", "whole", "looks ahead"]
"""What the logits of a position depend on: its hidden state alone; those of a whole row; those behind it too."""


class _FailedError(Exception):
    """The model's own forward failed on what it was given."""


def head_kind(
    module: PreTrainedModel,
    blocks: nn.ModuleList,
    *,
    after: Collection[str],
    returned: int | None,
    hidden_size: int,
    vocab_size: int,
) -> HeadKind:
    """What each position's logits depend on. `after` names the parameters that run behind the blocks; the module is in
    eval mode.

    "position-wise" needs a head that knows neither a position's neighbours, nor where it is, nor what is padding.
    "whole" also says that the forward fails on rows of one token, or with a vocabulary cut to a few entries.
    """
    generator = torch.Generator().manual_seed(11)
    inside = {id(parameter) for parameter in blocks.parameters()}
    parameters: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        if name in after:
            shape = [ENTRIES if size == vocab_size else size for size in parameter.shape]
            parameters[name] = torch.randn(shape, generator=generator)
        elif id(parameter) not in inside:  # those stand-ins have no parameters
            parameters[name] = torch.zeros(()).expand(parameter.shape)
    ids = torch.randint(ENTRIES, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, LENGTH // 2 :] = 0
    hidden = torch.randn(ROWS * LENGTH, hidden_size, generator=generator)

    def logits(ids: torch.Tensor, mask: torch.Tensor | None, given: torch.Tensor) -> torch.Tensor:
        def answer(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            passed = given.view(*ids.shape, hidden_size) if index == len(blocks) - 1 else split_call(args, kwargs)[0]
            return passed if returned is None else (passed, *(None,) * (returned - 1))

        with torch.no_grad(), parameters_as(module, parameters), stand_ins(blocks, answer):
            try:
                output = module(input_ids=ids, attention_mask=mask, use_cache=False, return_dict=True)
            except Exception as error:  # any code of any model may be in there
                raise _FailedError from error
        result: torch.Tensor = output.logits
        return result.reshape(ids.numel(), -1)

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        if other.isnan().any():
            raise MismatchError(f"{type(module).__name__} cannot be streamed exactly: its logits are no numbers (NaN)")
        return torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))

    try:
        whole = logits(ids, mask, hidden)
        chunks = zip(ids.view(-1, 1).split(CHUNK), hidden.split(CHUNK), strict=True)
        if same(torch.cat([logits(few, None, given) for few, given in chunks]), whole):
            return "position-wise"
    except _FailedError:
        pass
    other = hidden.view(ROWS, LENGTH, hidden_size).clone()
    other[:, -1] += 1
    try:
        rows = [logits(ids, None, given).view(ROWS, LENGTH, -1) for given in (hidden, other)]
    except _FailedError:
        return "whole"
    return "whole" if same(rows[0][:, :-1], rows[1][:, :-1]) else "looks ahead"
