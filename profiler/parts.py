"""What the profiler needs of a model, its layers, its weights and a device.

Owns these protocols and nothing else. The executor has what satisfies them, and its docstrings say what each method
does; the cli hands it in, as the profiler never imports the executor.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch

from ssdplan.plans.documents.matrices import Matrix
from ssdplan.plans.graph.ops import Resource

Result = TypeVar("Result")


class Ranks(Protocol):
    """`Ranks` of `executor/ranks/group.py`"""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, whole: torch.Tensor) -> None: ...
    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None: ...
    def tell(self, words: bytes) -> list[bytes]: ...


class TensorSpec(Protocol):
    """`TensorSpec` of `executor/model/model.py`"""

    @property
    def shape(self) -> tuple[int, ...]: ...


class StateSpec(Protocol):
    """`StateSpec` of `executor/model/model.py`"""

    @property
    def name(self) -> str: ...
    @property
    def elements(self) -> int: ...
    @property
    def tensors(self) -> Sequence[TensorSpec]: ...
    @property
    def frozen(self) -> bool: ...
    @property
    def precision(self) -> Literal["fp32"] | None: ...
    @property
    def muon(self) -> bool: ...
    @property
    def matrices(self) -> Sequence[Matrix]: ...


class LayerSpec(Protocol):
    """`LayerSpec` of `executor/model/model.py`"""

    @property
    def name(self) -> str: ...
    @property
    def layer_class(self) -> str: ...
    @property
    def states(self) -> tuple[int, ...]: ...


class Spread(Protocol):
    """`Spread` of `executor/model/inspection/routing.py`"""

    @property
    def times(self) -> float: ...


class Routing(Protocol):
    """`Routing` of `executor/model/inspection/routing.py`"""

    def begin(self) -> None: ...
    def end(self) -> Spread | None: ...


class Model(Protocol):
    """`StreamedModel` of `executor/model/model.py`: `layers` are the embedding, the blocks and the head."""

    @property
    def path(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def dtypes(self) -> Sequence[torch.dtype]: ...
    @property
    def head_is_position_wise(self) -> bool: ...
    def keeps_apart(self, sequence_length: int, /) -> bool: ...
    def least_row(self, width: int, /) -> int: ...
    def remarks(self, sequence_length: int, /) -> Sequence[str]: ...
    @property
    def routing(self) -> Routing: ...
    @property
    def layers(self) -> Sequence[LayerSpec]: ...
    @property
    def states(self) -> Sequence[StateSpec]: ...
    @property
    def freeze(self) -> tuple[str, ...]: ...
    @property
    def allow_unused_weights(self) -> bool: ...
    def trained(self, layer: int, /) -> tuple[int, ...]: ...
    @property
    def first_trained(self) -> int: ...


class Head(Protocol):
    def clear(self) -> None: ...


class Layers(Protocol):
    """`Layers` of `executor/model/layers.py`"""

    @property
    def head(self) -> Head: ...
    @property
    def lacks_spans(self) -> bool: ...

    def begin_step(self, step: int, micro_batches: Sequence[Any], /) -> int: ...
    def context_bytes(self) -> int: ...
    def forward(
        self,
        layer: int,
        micro_batch: int,
        weights: Sequence[torch.Tensor],
        hidden: torch.Tensor | None,
        out: torch.Tensor,
        rung: str = "",
        saved: torch.Tensor | None = None,
        /,
    ) -> None: ...
    def loss(self, micro_batch: int, weights: Sequence[torch.Tensor], hidden: torch.Tensor, /) -> None: ...
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
        /,
    ) -> None: ...
    def trace_block(
        self, layer: int, micro_batch: int, weights: Sequence[torch.Tensor], hidden: torch.Tensor, /
    ) -> "TracedCall | None": ...
    def learn(self, layer_class: str, rung: str, values: Sequence[str], packed: bool = False, /) -> None: ...
    def keeps(self, layer: int, micro_batch: int, /) -> bool: ...


class SubLayer(Protocol):
    """`SubLayer` of `executor/model/traced.py`"""

    @property
    def name(self) -> str: ...
    @property
    def operations(self) -> tuple[str, ...]: ...
    @property
    def saved(self) -> tuple[str, ...]: ...
    @property
    def saved_bytes(self) -> int: ...


class Cut(Protocol):
    """`Cut` of `executor/model/traced.py`"""

    @property
    def rebuilt(self) -> tuple[str, ...]: ...


class Traced(Protocol):
    """`Traced` of `executor/model/traced.py`"""

    @property
    def sublayers(self) -> Sequence[SubLayer]: ...
    def can_be_kept(self, kept: Iterable[str], /) -> bool: ...
    def cheapest(self, seconds: Mapping[str, float], price: float, /) -> frozenset[str] | None: ...
    def cut(self, kept: Collection[str], /) -> Cut: ...


class TracedCall(Protocol):
    """`TracedCall` of `executor/model/saved.py`"""

    @property
    def traced(self) -> Traced: ...
    def kept_bytes(self, values: Collection[str], /, *, packed: bool = False) -> int: ...
    def operation_seconds(self, clock: Callable[[], float], /) -> Mapping[str, float]: ...


class Weights(Protocol):
    """`Weights` of `executor/model/weights.py`"""

    @property
    def notes(self) -> Sequence[str]: ...
    def read(self, state: int, out: torch.Tensor, /) -> None: ...


MakeLayers = Callable[[int | None], Layers]
"""`Layers` of `executor/model/layers.py` of the profiled model: from `head_chunk_tokens`."""

MakeMicroBatch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], Any]
"""`MicroBatch` of `executor/model/template.py`: from input_ids, labels (int64 [b, s]), attention_mask and position_ids
(each the same, or None)."""


class HostArena(Protocol):
    """`HostArena` of `executor/device/host_arena.py`: `bytes` is a uint8 tensor; `note` says why it is not page-locked,
    if it is not."""

    bytes: torch.Tensor
    note: str


class Device(Protocol):
    """`Device` of `executor/device/interface.py`"""

    @property
    def kind(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    def lane(self, resource: Resource, /) -> AbstractContextManager[None]: ...
    def memory_bytes(self) -> int: ...
    def allocate(self, nbytes: int, /) -> torch.Tensor: ...
    def host_arena(self, nbytes: int, /) -> HostArena: ...
    def release(self, arena: Any, /) -> None: ...
    def copy_h2d(self, target: torch.Tensor, source: torch.Tensor, /) -> None: ...
    def copy_d2h(self, target: torch.Tensor, source: torch.Tensor, /) -> None: ...
    def squares(self, gradient: torch.Tensor, threads: int, /) -> Callable[[], tuple[bool, int]]: ...
    def synchronize(self) -> None: ...
    def peak_bytes(self, work: Callable[[], Result], /) -> tuple[Result, int]: ...


class Blank(Protocol):
    """`Blank` of `executor/store/volumes.py`"""

    @property
    def path(self) -> Path: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class MakeDeviceUpdate(Protocol):
    """An update of a range on the device by `executor/optimizer/adamw_on_device.py`, ready to run."""

    def __call__(
        self, states: torch.Tensor, gradient: torch.Tensor, parameters: torch.Tensor, form: torch.dtype, /
    ) -> Callable[[], None]:
        """uint8 each: optimizer states in fp32, the gradient in fp32, parameters in `form`."""


class MakeMatrixUpdate(Protocol):
    """Muon's update of a matrix by `executor/optimizer/muon.py`, ready to run."""

    def __call__(
        self,
        matrix: Matrix,
        states: torch.Tensor,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        workspace: torch.Tensor,
        form: torch.dtype,
        /,
    ) -> Callable[[], object]:
        """uint8 each: optimizer states and the gradient in fp32, parameters in `form`, what the update works in."""


class Perturb(Protocol):
    """`perturb` of `executor/optimizer/passes.py`"""

    def __call__(
        self,
        parameters: torch.Tensor,
        plus: torch.Tensor | None,
        minus: torch.Tensor | None,
        /,
        *,
        seed: int,
        tensor: int,
        step: int,
        direction: int,
        eps: float,
        pending: Sequence[tuple[int, int, float, float]],
        threads: int,
    ) -> None: ...
