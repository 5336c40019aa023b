"""Runs a Hugging Face model's own forward with its decoder layers replaced by stand-ins.

Owns the two tricks by which code around the layers is run and never rewritten: the entries of this model instance's own
ModuleList, and its own parameters, are swapped inside a context and put back after it. It never patches a library class
and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

HIDDEN_KEYWORD = "hidden_states"


@dataclass(frozen=True)
class LayerCall:
    """What a model calls one of its decoder layers with, but for the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_is_positional: bool

    def arguments(self, hidden: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's positional and keyword arguments with `hidden` in its place."""
        if self.hidden_is_positional:
            return (hidden, *self.args), self.kwargs
        return self.args, {HIDDEN_KEYWORD: hidden, **self.kwargs}


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, LayerCall]:
    """Takes the hidden state out of a layer's arguments; a TypeError where there is none."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0], LayerCall(args[1:], dict(kwargs), hidden_is_positional=True)
    if isinstance(kwargs.get(HIDDEN_KEYWORD), torch.Tensor):
        rest = {key: value for key, value in kwargs.items() if key != HIDDEN_KEYWORD}
        return kwargs[HIDDEN_KEYWORD], LayerCall(args, rest, hidden_is_positional=False)
    raise TypeError("a layer is called without a hidden state")


# Called with the layer's index and its arguments; what it returns, the model takes for the layer's output.
Answer = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


class StandIn(nn.Module):
    """Stands where one decoder layer stands: other attributes are the layer's, the forward is `answer`'s."""

    def __init__(self, index: int, layer: nn.Module, answer: Answer) -> None:
        super().__init__()
        # Not a submodule: a functional call on the model must not see the layer's parameters.
        self.__dict__["stands_for"] = layer
        self.__dict__["index"] = index
        self.__dict__["answer"] = answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stands_for"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(self.index, args, kwargs)


@contextmanager
def stand_ins(blocks: nn.ModuleList, answer: Answer) -> Iterator[None]:
    """Within the context every entry of `blocks` answers with `answer`; after it the layers are back, errors or not."""
    layers = list(blocks)
    try:
        for index, layer in enumerate(layers):
            blocks[index] = StandIn(index, layer, answer)
        yield
    finally:
        for index, layer in enumerate(layers):
            blocks[index] = layer


@contextmanager
def parameters_as(module: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Within the context the parameters named in `values`, wherever they are used, are these tensors; after it the
    parameters are back, errors or not."""
    given = {id(parameter): values[name] for name, parameter in module.named_parameters() if name in values}
    assert len(given) == len(values), f"no parameters: {sorted(values)}"
    places = [
        (child._parameters, own, parameter)
        for child in module.modules()
        for own, parameter in child._parameters.items()
        if id(parameter) in given
    ]
    try:
        for table, own, parameter in places:
            table[own] = given[id(parameter)]  # type: ignore[assignment]
        yield
    finally:
        for table, own, parameter in places:
            table[own] = parameter
