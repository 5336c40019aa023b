"""A device that is not the processor, of fake tensors: a process of its own, as torch knows one such device for ever.

`python fake_device.py DIR FAMILY...` runs each family's layers forward and backward on it, by autograd, in full and in
padded rows, and prints a line of JSON for each: what went wrong, or nothing. Tensors of two devices in one operation
raise. Nothing is computed.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # as of torch 2.9

from ssdplan.executor.model.attention import by_spans
from ssdplan.executor.model.layers import Layers, MicroBatch
from ssdplan.executor.model.model import open_model
from tests.made.models import make_model

ROWS, LENGTH = 2, 16
ELSEWHERE = "made"


def main(directory: Path, families: Sequence[str]) -> None:
    _setup_privateuseone_for_python_backend(ELSEWHERE)
    torch._C._set_only_lift_cpu_tensors(True)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty_strided", _constant, "PrivateUse1")
    # What these ask of their inputs has no answer without numbers.
    MicroBatch.label_tokens = lambda self: ROWS * (LENGTH - 1)  # type: ignore[method-assign]
    Layers._check = lambda self, index, micro_batch: None  # type: ignore[method-assign]
    Layers._needs_mask = lambda self, micro_batch: True  # type: ignore[method-assign]
    by_spans.works_on = lambda device, dtype: True  # type: ignore[attr-defined]
    for family in families:
        for padded in (False, True):
            found = {"family": family, "padded": padded, "error": ""}
            try:
                step(make_model(family, directory / family), torch.device(ELSEWHERE, 0), padded=padded)
            except Exception as error:
                found["error"] = f"{type(error).__name__}: {str(error)[:500]}"
            print(json.dumps(found), flush=True)
    try:
        step(directory / families[0], torch.device(ELSEWHERE, 0), padded=False, weights=torch.device("cpu"))
    except RuntimeError as error:
        print(json.dumps({"family": "mixed", "padded": False, "error": str(error)[:500]}), flush=True)


def _constant(size: Any, stride: Any, *, dtype: Any = None, **where: Any) -> torch.Tensor:
    """A small constant there, of which fake tensors keep a real one: on the processor."""
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def step(directory: Path, device: torch.device, *, padded: bool, weights: torch.device | None = None) -> None:
    """All layers forward and backward for one micro-batch."""
    model = open_model(directory, torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        for module in model.module.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else mode.from_tensor(buffer)
        layers = Layers(model, device)
        ids = torch.randint(3, 97, (ROWS, LENGTH))
        layers.begin_step(0, [MicroBatch(ids, ids, torch.ones_like(ids) if padded else None)])
        count, head = ROWS * LENGTH * model.hidden_size, len(model.layers) - 1
        flats = [torch.zeros(state.elements, device=weights or device) for state in model.states]
        places = [[flats[index] for index in layer.states] for layer in model.layers]
        hidden = [torch.zeros(count, device=device) for _ in range(head)]
        for layer in range(head):
            layers.forward(layer, 0, places[layer], hidden[layer - 1] if layer else None, hidden[layer])
        above = None
        for layer in range(head, -1, -1):
            below = torch.zeros(count, device=device) if layer else None
            sums = [torch.zeros(model.states[index].elements, device=device) for index in model.trained(layer)]
            layers.backward(layer, 0, places[layer], hidden[layer - 1] if layer else None, above, below, sums)
            above = below


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
