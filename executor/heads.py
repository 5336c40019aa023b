"""Finds out whether a model's head acts on each position by itself, so that its logits can be made in chunks of tokens.

Owns that one question, and answers it by running the model's own forward: a tiny input as a whole and in rows of one
token, with random weights for a few entries of the vocabulary. It allocates nothing that grows with a vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from ssdplan.executor.standins import split_call, stand_ins

ROWS, LENGTH, CHUNK = 2, 8, 5
ENTRIES = 16
"""Of the vocabulary: a head's matrix has as many rows here."""


def is_position_wise(
    module: PreTrainedModel,
    blocks: nn.ModuleList,
    *,
    after: Collection[str],
    returned: int | None,
    hidden_size: int,
    vocab_size: int,
) -> bool:
    """Whether each position's logits depend on that position's hidden state alone: not on its neighbours, on where it
    is, or on what is padding. `after` names the parameters that run behind the blocks; the module is in eval mode.

    False too for a forward that fails on rows of one token, or with a vocabulary cut to a few entries.
    """
    generator = torch.Generator().manual_seed(11)
    parameters: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        if name in after:
            shape = [ENTRIES if size == vocab_size else size for size in parameter.shape]
            parameters[name] = torch.randn(shape, generator=generator)
        else:
            parameters[name] = torch.zeros(()).expand(parameter.shape)
    ids = torch.randint(ENTRIES, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, LENGTH // 2 :] = 0
    hidden = torch.randn(ROWS * LENGTH, hidden_size, generator=generator)

    def logits(ids: torch.Tensor, mask: torch.Tensor | None, given: torch.Tensor) -> torch.Tensor:
        def answer(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            passed = given.view(*ids.shape, hidden_size) if index == len(blocks) - 1 else split_call(args, kwargs)[0]
            return passed if returned is None else (passed, *(None,) * (returned - 1))

        arguments = {"input_ids": ids, "attention_mask": mask, "use_cache": False, "return_dict": True}
        with stand_ins(blocks, answer):
            result: torch.Tensor = functional_call(module, parameters, (), arguments).logits
        return result.reshape(ids.numel(), -1)

    with torch.no_grad():
        try:
            whole = logits(ids, mask, hidden)
            chunks = zip(ids.view(-1, 1).split(CHUNK), hidden.split(CHUNK), strict=True)
            cut = torch.cat([logits(few, None, given) for few, given in chunks])
        except Exception:  # any code of any model may be in there
            return False
    return torch.allclose(cut, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
