"""Measures how far off gradients are where a block keeps its activations in int8 (`ssdplan profile
--compression-error`).

Owns what is compared: for each block, with its real weights, on the hidden state that the model makes of random tokens
and for a random gradient of its output, the gradients by each int8 rung against those of recomputing everything.
"""

from collections.abc import Mapping, Sequence

import torch

from ssdplan.plans.documents.profile import CompressionError, Rung
from ssdplan.plans.errors import MemoryBudgetError

from .layer_bench import Bench
from .measure import Progress
from .parts import Model


def measure_compression(
    bench: Bench, model: Model, rungs: Mapping[str, Sequence[Rung]], *, micro_batch: int, progress: Progress
) -> tuple[tuple[CompressionError, ...], list[str]]:
    """The errors of each block that runs backward by each int8 rung of its class (`rungs`), on one micro-batch of whole
    rows; and notes. It passes through the model once, so it reads all of its blocks' weights."""
    found: list[CompressionError] = []
    blocks = range(1, len(model.layers) - 1)
    try:
        with bench.lane():
            bench.enter(micro_batch)
            for layer in blocks:
                progress((layer - 1) / len(blocks), f"compression error of block {layer - 1}")
                bench.load(layer)
                lossy = [rung for rung in rungs.get(model.layers[layer].layer_class, ()) if rung.format is not None]
                if lossy and True in bench.directions(layer):
                    found += _errors_of(bench, model, layer, lossy, micro_batch)
                bench.go_on(layer, micro_batch)
    except (MemoryBudgetError, torch.OutOfMemoryError):
        return tuple(found), ["too little memory to measure the compression error of all blocks"]
    progress(1.0, "compression error")
    return tuple(found), []


def _errors_of(
    bench: Bench, model: Model, layer: int, lossy: Sequence[Rung], micro_batch: int
) -> list[CompressionError]:
    exact = [gradient.clone() for gradient in bench.gradients(layer, micro_batch)]
    found = []
    for rung in lossy:
        errors = [
            _relative(gradient, true)
            for gradient, true in zip(bench.gradients(layer, micro_batch, rung.name), exact, strict=True)
        ]
        handed_on = layer > model.first_trained
        found.append(
            CompressionError(
                layer=model.layers[layer].name,
                rung=rung.name,
                parameters=errors[0],
                hidden=errors[1] if handed_on else 0.0,
            )
        )
    return found


def _relative(found: torch.Tensor, true: torch.Tensor) -> float:
    """The norm of the difference over the norm, in fp32 and more where that is summed."""
    difference = torch.linalg.vector_norm(found.float() - true.float(), dtype=torch.float64)
    return float(difference / torch.linalg.vector_norm(true.float(), dtype=torch.float64).clamp_min(1e-300))
