"""Streams a model's weights from its safetensors shards into flat states.

Owns which stored tensor fills which place of a state, and the checks that each is there, once, of the right shape. It
holds a few MiB beyond the caller's buffer and knows nothing of training.
"""

from __future__ import annotations

import torch

from ssdplan.executor.checkpoint import FLOAT_DTYPES, Checkpoint, Entry
from ssdplan.executor.model import StreamedModel, TensorSpec
from ssdplan.plans.errors import MismatchError


class Weights:
    """The checkpoint of an opened model. Opening reads the headers of all shards and checks the whole table.

    `unused` names stored tensors that the model has no place for; plain loading leaves them out too.
    Errors: MismatchError naming file, tensor and both shapes where the checkpoint is not this model's.
    """

    def __init__(self, model: StreamedModel) -> None:
        self._model = model
        self._checkpoint: Checkpoint | None = Checkpoint(model.path, model.module)
        self._entries: dict[str, list[Entry]] = {}
        aliases = _aliases(model)
        taken: set[str] = set()
        for state in model.states:
            for tensor in state.tensors:
                entries = self._checkpoint.find(aliases[tensor.name])
                self._check(tensor, entries)
                self._entries[tensor.name] = entries
                taken.update(entry.name for entry in entries)
        stored = {entry.name for entry in self._checkpoint.entries.values()}
        self.unused = tuple(sorted(stored - taken))

    def stored(self, tensor: str) -> tuple[Entry, ...]:
        """Where the checkpoint keeps a tensor (one of the model's `TensorSpec.name`s); two entries if stored twice."""
        return tuple(self._entries[tensor])

    def _check(self, tensor: TensorSpec, entries: list[Entry]) -> None:
        if not entries:
            raise MismatchError(
                f"{self._model.path}: the checkpoint has no tensor {tensor.name} (shape {list(tensor.shape)})"
            )
        for entry in entries:
            if entry.shape != tensor.shape:
                raise MismatchError(
                    f"{entry.file}: {entry.name} has shape {list(entry.shape)}, "
                    f"the model's {tensor.name} has {list(tensor.shape)}"
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
            entries = self._entries[tensor.name]
            self._checkpoint.read(entries[0], out[start - first : end - first], start - tensor.offset)
            for twin in entries[1:] if start == tensor.offset else ():
                self._checkpoint.require_equal(entries[0], twin)
        out[end - first :].zero_()

    def close(self) -> None:
        """Ends the use of the checkpoint; closing twice is fine."""
        self._checkpoint = None


def _aliases(model: StreamedModel) -> dict[str, tuple[str, ...]]:
    """For each parameter all names under which the model's state dict has it, its own name first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {aliases[0]: tuple(aliases) for aliases in names.values()}
