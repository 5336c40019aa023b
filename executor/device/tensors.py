"""Tensors: our names of torch's dtypes, and the search for tensors in the arguments of a call.

Owns both. The search is for the inspection, which watches every call that a model makes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.Size))


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among `values` and within them, in the order of `tree_leaves`, which takes several times as long."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) not in _PLAIN:
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found
