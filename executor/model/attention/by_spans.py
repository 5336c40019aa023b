"""The attention of transformers' models by spans: a name under which models find both its masks and its work.

Owns the name, and the two functions that transformers' own registers have under it. A model that runs by it is called
with first tokens of spans where it would be with a mask of pairs, if sequences share a row or a window limits it, and
with what `sdpa` has in all other cases. Whether a model's code can is found out by running it
(`model/inspection/isolation.py`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .kernel import attend_spans, works_on
from .spans import as_mask, first_visible, is_spans

BY_SPANS = "ssdplan_spans"
_ASKS = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)[^:\n]*sdpa")
"""Code that does something else for masks of `sdpa` than for others."""


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **more: Any,
) -> torch.Tensor | None:
    """transformers' `sdpa_mask`; first tokens of spans where that would be a mask of pairs and these say as much."""
    whole = q_length == kv_length and not (q_offset or kv_offset or use_vmap) and attention_mask is None
    if whole and not _is_plain(q_length, **more):
        first = first_visible(more["mask_function"], batch_size, q_length, device)
        if first is not None:
            return first
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        device=device,
        **more,
    )


def _is_plain(tokens: int, *, allow_is_causal_skip: bool = True, local_size: int | None = None, **_: Any) -> bool:
    """Whether causal order is all that limits a row."""
    return allow_is_causal_skip and (local_size is None or tokens <= local_size)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention by `sdpa`; by `attend_spans` where a layer's mask is spans and all that decides."""
    if attention_mask is None or not is_spans(attention_mask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    if dropout or any(more.get(name) is not None for name in ("position_bias", "softcap", "cache")):
        mask = as_mask(attention_mask, query.device)
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **more)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out, _ = attend_spans(query, key, value, attention_mask, scale)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(BY_SPANS, _attention)
AttentionMaskInterface.register(BY_SPANS, _mask)


def may_attend_by_spans(module: PreTrainedModel) -> bool:
    """Whether a model attends by `sdpa` through transformers' register, and its code does not ask by which name."""
    if module.config._attn_implementation != "sdpa" or not module._can_set_attn_implementation():
        return False
    files = {inspect.getsourcefile(type(part)) for part in module.modules() if "transformers" in type(part).__module__}
    sources = []
    for file in sorted(each for each in files if each is not None):
        with open(file, encoding="utf-8") as source:
            sources.append(source.read())
    return not any(_ASKS.search(source) for source in sources)


def settle(module: PreTrainedModel, by_spans: bool, device: torch.device, dtype: torch.dtype) -> bool:
    """Lets a model that can (`by_spans`) attend by spans where the device has kernels for it; whether it lacks them."""
    lacking = by_spans and not works_on(device, dtype)
    if by_spans != (module.config._attn_implementation == BY_SPANS) or lacking:
        module.set_attn_implementation("sdpa" if lacking or not by_spans else BY_SPANS)
    return lacking


@contextmanager
def attending_by_spans(module: PreTrainedModel) -> Iterator[None]:
    """Within this context a model, which attends by `sdpa`, attends by spans."""
    module.set_attn_implementation(BY_SPANS)
    try:
        yield
    finally:
        module.set_attn_implementation("sdpa")
