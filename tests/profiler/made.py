"""A device and a model made for tests: what they cost is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.nn import functional

from ssdplan.plans.documents.matrices import Matrix
from tests.profiler.made_time import MadeTime

Result = TypeVar("Result")


@dataclass
class MadeArena:
    bytes: torch.Tensor
    note: str = ""


class MadeDevice:
    """Copies at known bandwidths; `peak` is what any work takes."""

    kind = "cpu"
    index = 0
    name = "made device"

    def __init__(
        self,
        h2d: float = 20e9,
        d2h: float = 10e9,
        peak: int = 12345,
        note: str = "",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bandwidths = (h2d, d2h)
        self.sleep = sleep
        self.peak = peak
        self.note = note
        self.released: list[MadeArena] = []

    def lane(self, resource: str) -> AbstractContextManager[None]:
        return nullcontext()

    def memory_bytes(self) -> int:
        return 1 << 30

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def host_arena(self, nbytes: int) -> MadeArena:
        return MadeArena(torch.empty(nbytes, dtype=torch.uint8), self.note)

    def release(self, arena: MadeArena) -> None:
        self.released.append(arena)

    def copy_h2d(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.nbytes == source.nbytes and target.dtype == source.dtype == torch.uint8
        self.sleep(source.nbytes / self.bandwidths[0])

    def copy_d2h(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.nbytes == source.nbytes
        self.sleep(source.nbytes / self.bandwidths[1])

    def synchronize(self) -> None:
        pass

    def peak_bytes(self, work: Callable[[], Result]) -> tuple[Result, int]:
        return work(), self.peak


@dataclass(frozen=True)
class MadeTensor:
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MadeState:
    name: str
    elements: int
    tensors: tuple[MadeTensor, ...]
    frozen: bool = False
    precision: None = None
    muon: bool = False
    matrices: tuple[Matrix, ...] = ()


@dataclass(frozen=True)
class MadeLayer:
    name: str
    layer_class: str
    states: tuple[int, ...]


@dataclass
class MadeRouting:
    """Experts of which the busiest takes so many times a mean one's tokens; None where there are none."""

    times: float | None = None
    asked: list[str] = field(default_factory=list)

    def begin(self) -> None:
        self.asked.append("begin")

    def end(self) -> SimpleNamespace | None:
        self.asked.append("end")
        return None if self.times is None else SimpleNamespace(times=self.times)


@dataclass(frozen=True)
class MadeModel:
    """Three blocks of two classes; the head shares the embedding's state and has one of its own."""

    name: str = "made"
    path: Path = Path("models/made")
    architecture: str = "MadeForCausalLM"
    fingerprint: str = "f" * 64
    hidden_size: int = 32
    inner: int = 48
    vocab_size: int = 50
    dtype: torch.dtype = torch.float32
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 5
    head_is_position_wise: bool = True
    apart: bool = True
    freeze: tuple[str, ...] = ()
    allow_unused_weights: bool = False
    least: int = 1
    routing: MadeRouting = field(default_factory=MadeRouting)
    layers: tuple[MadeLayer, ...] = (
        MadeLayer("embedding", "embedding", (4,)),
        MadeLayer("block.0", "block.0", (0,)),
        MadeLayer("block.1", "block.1", (1,)),
        MadeLayer("block.2", "block.0", (2,)),
        MadeLayer("head", "head", (3, 4)),
    )
    states: tuple[MadeState, ...] = (
        *(MadeState(f"block.{i}", 4096, (MadeTensor((32, 48)), MadeTensor((48, 32)))) for i in range(3)),
        MadeState("head", 2048, (MadeTensor((32,)),)),
        MadeState("tied", 2048, (MadeTensor((50, 32)),)),
    )

    def keeps_apart(self, sequence_length: int) -> bool:
        return self.apart

    def least_row(self, width: int) -> int:
        return min(self.least, width)

    def remarks(self, sequence_length: int) -> tuple[str, ...]:
        return (f"made for {sequence_length}",) if self.least > 1 else ()

    def trained(self, layer: int) -> tuple[int, ...]:
        return tuple(index for index in self.layers[layer].states if not self.states[index].frozen)

    @property
    def first_trained(self) -> int:
        return next(layer for layer in range(len(self.layers)) if self.trained(layer))


@dataclass(frozen=True)
class MadeMicroBatch:
    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None


FORWARD_SECONDS = {"embedding": 0.001, "block.0": 0.004, "block.1": 0.006, "head": 0.012}
"""A row of tokens; backward takes three times as long."""


class MadeHead:
    """Losses of it share nothing."""

    def clear(self) -> None:
        pass


@dataclass
class MadeLayers:
    """Takes known times of a made clock, and really runs an MLP with a residual and a mask in `backward`."""

    model: MadeModel = field(default_factory=MadeModel)
    largest: int = 1 << 30
    """Rows from which on the device's memory is too small."""
    clock: MadeTime = field(default_factory=MadeTime)
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    """Method, layer, rows."""
    head: MadeHead = field(default_factory=MadeHead)
    lacks_spans: bool = False

    def begin_step(self, step: int, micro_batches: Sequence[Any]) -> int:
        self.micro_batches = list(micro_batches)
        self.masks: dict[int, torch.Tensor] = {}
        return sum(m.labels.numel() for m in micro_batches)

    def context_bytes(self) -> int:
        return sum(mask.nbytes for mask in self.masks.values())

    def forward(
        self,
        layer: int,
        micro_batch: int,
        weights: Sequence[torch.Tensor],
        hidden: torch.Tensor | None,
        out: torch.Tensor,
        rung: str = "",
        saved: torch.Tensor | None = None,
    ) -> None:
        assert not rung and saved is None
        assert (hidden is None) == (layer == 0) and layer != len(self.model.layers) - 1
        if layer == 0:
            ids = self.micro_batches[micro_batch].input_ids
            self.masks[micro_batch] = torch.ones(*ids.shape, 1, dtype=self.model.dtype)
        self._run("forward", layer, micro_batch, weights, 1)
        out[:1] = 0

    def loss(self, micro_batch: int, weights: Sequence[torch.Tensor], hidden: torch.Tensor) -> None:
        self._run("loss", len(self.model.layers) - 1, micro_batch, weights, 1)

    def backward(
        self,
        layer: int,
        micro_batch: int,
        weights: Sequence[torch.Tensor],
        hidden: torch.Tensor | None,
        out_gradient: torch.Tensor | None,
        in_gradient: torch.Tensor | None,
        gradients: Sequence[torch.Tensor],
        fresh: Sequence[bool] = (),
        saved: torch.Tensor | None = None,
    ) -> None:
        assert not fresh and saved is None
        last = len(self.model.layers) - 1
        lowest = self.model.first_trained
        assert layer >= lowest and (hidden is None) == (layer == 0) and (in_gradient is None) == (layer == lowest)
        assert (out_gradient is None) == (layer == last)
        assert [g.numel() for g in gradients] == [self.model.states[s].elements for s in self.model.trained(layer)]
        assert all(g.dtype == torch.float32 for g in gradients)
        self._run("backward", layer, micro_batch, weights, 3)
        if hidden is not None and layer != last:
            rows, length = self.micro_batches[micro_batch].input_ids.shape
            width, inner = self.model.hidden_size, self.model.inner
            x = hidden.data[: rows * length * width].view(rows, length, width).requires_grad_()
            up = weights[0].data[: width * inner].view(width, inner).requires_grad_()
            down = weights[0].data[width * inner : 2 * width * inner].view(inner, width).requires_grad_()
            # Kept: x @ up (for gelu), gelu of it (for down) and its product with down (for the mask's factor none).
            result = x + (functional.gelu(x @ up) @ down) * self.masks[micro_batch]
            result.backward(torch.ones_like(result))

    def trace_block(self, layer: int, micro_batch: int, weights: Sequence[torch.Tensor], hidden: torch.Tensor) -> None:
        """Its blocks cannot be traced."""

    def learn(self, layer_class: str, rung: str, values: Sequence[str], packed: bool = False) -> None:
        raise AssertionError("nothing can be kept")

    def keeps(self, layer: int, micro_batch: int) -> bool:
        raise AssertionError("nothing can be kept")

    def _run(self, method: str, layer: int, micro_batch: int, weights: Sequence[torch.Tensor], factor: int) -> None:
        assert micro_batch in self.masks, "the embedding runs first"
        spec = self.model.layers[layer]
        assert [w.numel() for w in weights] == [self.model.states[s].elements for s in spec.states]
        for state, weight in zip(spec.states, weights, strict=True):
            assert weight.dtype == self.model.dtype and bool((weight == state + 1).all()), "the layer's own weights"
        rows = self.micro_batches[micro_batch].input_ids.shape[0]
        self.calls.append((method, layer, rows))
        if rows >= self.largest and layer != 0:
            raise torch.OutOfMemoryError("made to fail")
        self.clock.sleep(FORWARD_SECONDS[spec.layer_class] * rows * factor)


@dataclass
class MadeWeights:
    """State i is full of i + 1. `reads` has the state, and the address that it went to."""

    reads: list[tuple[int, int]] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def read(self, state: int, out: torch.Tensor) -> None:
        self.reads.append((state, out.data_ptr()))
        out.fill_(state + 1)
