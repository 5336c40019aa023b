"""Finds out whether a model's forward reads no more of its table of token embeddings than the rows of its tokens.

Owns this question. It is answered by running the model's own forward up to its last layer, in training and outside it,
with padding and without: each use of the table is seen. Where the code cannot be run so, or uses the table otherwise
than by torch's `embedding` of the model's own token ids, the answer is no.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...device.tensors import tensors_in
from .sparse import CannotRunError, SparseWeights, outputs

ROWS, LENGTH = 2, 8


def reads_rows(module: PreTrainedModel, blocks: nn.ModuleList, table: nn.Parameter, *, returned: int | None) -> bool:
    """`table`: of the module, whose parameters are on meta; `returned` is as in `inspection.Anatomy`."""
    ids = torch.randint(min(table.shape[0], 1000), (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, LENGTH - 3 :] = 0
    trains, random = module.training, torch.random.get_rng_state()
    try:
        for training in (True, False):
            module.train(training)
            for more in ({}, {"attention_mask": mask}):
                watching = _Watching(module, table, ids)
                arguments = {"input_ids": ids, **more}
                outputs(module, blocks, arguments, _no_layer_runs, returned, only=(), weights=watching)
                if watching.used_otherwise or not watching.read:
                    return False
    except CannotRunError:
        return False
    finally:
        module.train(trains)
        torch.random.set_rng_state(random)
    return True


def _no_layer_runs(layer: int) -> torch.Tensor:
    raise AssertionError(f"layer {layer} runs, and none was to")


class _Watching(SparseWeights):
    """Notes whether all uses of a table are embeddings of these token ids."""

    def __init__(self, module: nn.Module, table: nn.Parameter, ids: torch.Tensor) -> None:
        super().__init__(list(module.parameters()))
        self._table, self._ids = table, ids
        self.read, self.used_otherwise = False, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(tensor is self._table for tensor in tensors_in((*args, *kwargs.values()))):
            if func is nn.functional.embedding and args[1] is self._table:
                plain = torch.equal(args[0], self._ids) and kwargs.get("max_norm") is None and len(args) == 2
                self.read, self.used_otherwise = True, self.used_otherwise or not plain
            elif not tells_only_of_itself(func):
                self.used_otherwise = True
        return super().__torch_function__(func, types, args, kwargs)


def tells_only_of_itself(func: Any) -> bool:
    """Whether a function of a parameter asks for its dtype or its device, which its rows share with it."""
    return func in (torch.Tensor.dtype.__get__, torch.Tensor.device.__get__)  # type: ignore[attr-defined]
