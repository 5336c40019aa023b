"""The model's own code around its layers, run as a stateless template, and what it is run on.

Owns the call of a Hugging Face model with parameters that someone else brings, and the form of a micro-batch. What the
model's layers answer is not decided here (`inspection/standins.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.func import functional_call

from ssdplan.plans.errors import first_line

from .inspection.isolation import arguments_apart
from .model import StreamedModel

IGNORED_LABEL = -100


@dataclass(frozen=True)
class MicroBatch:
    """input_ids, labels: int64 [b, s]; labels are unshifted (the loss shifts them), -100 is not counted.

    attention_mask: int64 or bool [b, s], rows padded on the right, with labels that are not counted there; None where
    nothing is padded. position_ids: int64 [b, s], for rows of several sequences that must not attend to each other:
    they begin at 0 again with each, and attention_mask is None; None where each row is one sequence.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None

    def label_tokens(self) -> int:
        """How many tokens the loss counts: the first of each row is predicted from nothing."""
        return int((self.labels[:, 1:] != IGNORED_LABEL).sum())


class Inputs(Protocol):
    """What a model is called with: a micro-batch, or some of its tokens."""

    @property
    def input_ids(self) -> torch.Tensor: ...
    @property
    def attention_mask(self) -> torch.Tensor | None: ...
    @property
    def position_ids(self) -> torch.Tensor | None: ...


def run_model(model: StreamedModel, inputs: Inputs, parameters: dict[str, torch.Tensor]) -> Any:
    """The model's own forward with `parameters`, by name; what it returns."""
    arguments = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    if inputs.position_ids is not None:
        how = model.anatomy.isolation.keeps_apart
        assert how is not None
        arguments |= arguments_apart(how, inputs.position_ids)
    options = {"use_cache": False, "return_dict": True}
    return functional_call(model.module, parameters | _never_used(model, inputs), (), arguments | options)


def _never_used(model: StreamedModel, inputs: Inputs) -> dict[str, torch.Tensor]:
    """What stands for parameters outside the blocks that the model never uses, and takes no memory. A model may ask on
    which device they are. Whatever were made of them would be no number, and so be noticed."""
    if not model.anatomy.unused:
        return {}
    nothing = torch.full((), torch.nan, dtype=model.dtype, device=inputs.input_ids.device)
    inside = f"{model.anatomy.blocks_path}."
    return {
        name: nothing.expand(parameter.shape)
        for name, parameter in model.module.named_parameters()
        if name in model.anatomy.unused and not name.startswith(inside)
    }


def as_returned(model: StreamedModel, hidden: torch.Tensor) -> Any:
    """A block's result in the form that this model's blocks return it."""
    returned = model.anatomy.returned
    return hidden if returned is None else (hidden, *(None,) * (returned - 1))


def failed(model: StreamedModel, layer: int, inputs: Inputs, error: Exception) -> str:
    """In words, that the model's own code cannot do what is asked of it in a layer."""
    rows, length = inputs.input_ids.shape
    kind = "padded" if inputs.attention_mask is not None else "shared" if inputs.position_ids is not None else "full"
    return (
        f"{model.name}: the code of {model.architecture} fails in {model.layers[layer].name} on {rows} x {length} "
        f"tokens in {kind} rows: {type(error).__name__}: {first_line(error)}"
    )
