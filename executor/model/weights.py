"""Streams a model's weights from its safetensors shards into flat states.

Owns which stored tensor fills which place of a state, and the checks that each is there, once, of the right shape. It
holds a few MiB beyond the caller's buffer and knows nothing of training.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ssdplan.plans.errors import MismatchError

from .directory.shards import FLOAT_DTYPES, Checkpoint, Entry
from .directory.weight_files import left_weights
from .layout import TensorSpec
from .model import StreamedModel

_NAMED = 3
"""Kinds of tensors that a note lists."""


@dataclass(frozen=True)
class Stored:
    """Elements [start, stop) of a tensor, and where the files have them: more than once if stored twice. All of a
    tensor but where it is stored in parts, as experts."""

    start: int
    stop: int
    entries: tuple[Entry, ...]


class Weights:
    """The checkpoint of an opened model. Opening reads the headers of all shards and checks the whole table.

    `notes` say, a line each, which of several sets of weights are these, and which stored tensors are left out. Those
    that the model has no place for are, as with from_pretrained, but only where the model allows it.
    Errors: MismatchError naming file, tensor and both shapes where the checkpoint is not this model's.
    """

    def __init__(self, model: StreamedModel) -> None:
        self._model = model
        self._checkpoint: Checkpoint | None = Checkpoint(model.path, model.module)
        self._stored: dict[str, tuple[Stored, ...]] = {}
        self._aliases = _aliases(model)
        for state in model.states:
            for tensor in state.tensors:
                self._stored[tensor.name] = self._look_up(tensor, self._checkpoint)
        self.notes = tuple(filter(None, (left_weights(model.path), self._left_out(model))))

    def _left_out(self, model: StreamedModel) -> str:
        """What is said of tensors without a place; MismatchError where they are not allowed."""
        assert self._checkpoint is not None
        unused = self._checkpoint.without_place(model.module)
        if not unused:
            return ""
        kinds = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in unused))
        more = f" and {len(kinds) - _NAMED} more kinds" if len(kinds) > _NAMED else ""
        which = f"{', '.join(kinds[:_NAMED])}{more}"
        some = f"{len(unused)} stored tensor{'s' if len(unused) > 1 else ''}"
        if not model.allow_unused_weights:
            raise MismatchError(
                f"{model.path}: {model.architecture} as config.json describes it has no place for {some} ({which}), "
                "which would be neither trained nor exported; mend config.json, or leave them out with ssdplan profile "
                "--allow-unused-weights"
            )
        return f"{model.name}: {some} without a place in the model, neither trained nor exported: {which}"

    def stored(self, tensor: str) -> tuple[Stored, ...]:
        """Where the checkpoint keeps a tensor (one of the model's `TensorSpec.name`s), from its first element to its
        last."""
        return self._stored[tensor]

    def _look_up(self, tensor: TensorSpec, checkpoint: Checkpoint) -> tuple[Stored, ...]:
        names = self._aliases[tensor.name]
        entries = checkpoint.find(names)
        if parts := checkpoint.parts(names):
            if entries:
                raise MismatchError(
                    f"{self._model.path}: the checkpoint has {tensor.name} whole and in parts ({parts[0].stored}); "
                    "remove what is not meant"
                )
            for part in parts:
                self._check(part.stored, part.shape, checkpoint.stored[part.stored])
            return tuple(Stored(part.start, part.stop, tuple(checkpoint.stored[part.stored])) for part in parts)
        for entry in entries:
            if entry.name in checkpoint.split:
                raise MismatchError(
                    f"{entry.file}: transformers makes several tensors of {entry.name} "
                    f"({checkpoint.split[entry.name]}), which is not streamed; load the model by "
                    "from_pretrained, and save it by save_pretrained with save_original_format=False"
                )
        self._check(tensor.name, tensor.shape, entries)
        return (Stored(0, tensor.elements, tuple(entries)),)

    def _check(self, name: str, shape: tuple[int, ...], entries: Sequence[Entry]) -> None:
        if not entries:
            raise MismatchError(f"{self._model.path}: the checkpoint has no tensor {name} (shape {list(shape)})")
        for entry in entries:
            if entry.shape != shape:
                raise MismatchError(
                    f"{entry.file}: {entry.name} has shape {list(entry.shape)}, the model's {name} has {list(shape)}"
                )
            if entry.dtype not in FLOAT_DTYPES:
                raise MismatchError(
                    f"{entry.file}: {entry.name} is {entry.dtype}, not one of {', '.join(FLOAT_DTYPES)}"
                )

    def read(self, state: int, out: torch.Tensor, first: int = 0) -> None:
        """Fills `out` [n], any float dtype, with elements [first, first + n) of a state; gaps and padding become zero.

        A tensor that is stored under two tied names must be the same in both: MismatchError otherwise, by whoever reads
        its first element.
        """
        assert self._checkpoint is not None, "the weights are closed"
        spec = self._model.states[state]
        stop = first + len(out)
        assert 0 <= first <= stop <= spec.elements, f"{spec.name} has {spec.elements} elements, not [{first}, {stop})"
        end = first
        for tensor in spec.tensors:
            start, tensor_end = max(tensor.offset, first), min(tensor.offset + tensor.elements, stop)
            if start >= tensor_end:
                continue
            out[end - first : start - first].zero_()
            end = tensor_end
            self._read_tensor(tensor, out[start - first : end - first], start - tensor.offset)
            for zeros in self._model.zeroed:
                if zeros.name == tensor.name:
                    low, high = (tensor.offset + place - first for place in (zeros.start, zeros.stop))
                    out[max(low, start - first) : max(min(high, end - first), 0)].zero_()
        out[end - first :].zero_()

    def _read_tensor(self, tensor: TensorSpec, out: torch.Tensor, first: int) -> None:
        """Fills `out` with elements from `first` on of a tensor, from wherever they are."""
        assert self._checkpoint is not None
        places = self._stored[tensor.name]
        stop = first + len(out)
        for place in places[bisect_right(places, first, key=lambda each: each.start) - 1 :]:
            start, end = max(place.start, first), min(place.stop, stop)
            if start >= end:
                return
            one, *twins = place.entries
            self._checkpoint.read(one, out[start - first : end - first], start - place.start)
            for twin in twins if start == place.start else ():
                self._checkpoint.require_equal(one, twin, tied=len(self._aliases[tensor.name]) > 1)

    def close(self) -> None:
        """Ends the use of the checkpoint; closing twice is fine."""
        self._checkpoint = None


def _aliases(model: StreamedModel) -> dict[str, tuple[str, ...]]:
    """For each parameter all names under which the model's state dict has it, its own name first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {aliases[0]: tuple(aliases) for aliases in names.values()}
