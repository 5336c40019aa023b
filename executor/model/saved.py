"""Blocks run as explicit graphs: a forward that keeps what a rung says, and a backward that rebuilds the rest.

Owns the graphs of a model's blocks, made when rows of a kind are first met, and what each pair of layer and micro-batch
was run by. The mechanism is the first of the two that were weighed (docs/architecture.md): PyTorch's own trace of a
block, cut by `traced.py` and run as it is, without a compiler, so that every kernel is the one that eager code calls.
What cannot be run so (code that looks at values, other code than the traced layer's, too little room) is recomputed
whole from the block's input, to the same bits. Where kept values lie, and what moves them, it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .inspection.standins import LayerCall
from .traced import Cut, Take, Traced, UntraceableError, labelled, trace
from .values import Value

TRACED_AT_ONCE = 2
"""Graphs that are not cut yet take a MiB each."""
ALIGNMENT = 64
"""Each kept value begins at a multiple of so many bytes."""


@dataclass(frozen=True)
class _Inputs:
    """All that a block is called with, as a graph takes it."""

    others: list[torch.Tensor]
    """Beside the hidden state: what the model calls the block with, the block's buffers, then its parameters."""
    parameters: int
    """How many of `others`, from the end, are parameters."""
    places: tuple[int, ...]
    """Where among the leaves of the call its tensors are, the hidden state first."""
    leaves: list[Any]
    spec: TreeSpec
    names: tuple[str, ...]
    """Of buffers and parameters."""

    def kind(self, hidden: torch.Tensor) -> Hashable:
        """What a graph is made for. Raises TypeError where a value that is no tensor cannot be compared."""
        fixed = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves)
        shapes = tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in (hidden, *self.others))
        key = (shapes, fixed, self.places, str(self.spec))
        hash(key)
        return key


@dataclass(frozen=True)
class Keeping:
    """What a rung keeps: values of the traced block by name, and whether in int8 those that may be."""

    values: frozenset[str]
    packed: bool = False


class SavedBlocks:
    """The graphs of a model's blocks on one device. Steps follow each other; `begin_step` forgets the last one."""

    def __init__(self, rungs: Mapping[tuple[str, str], Keeping]) -> None:
        """`rungs`: (class of layers, name) -> what it keeps."""
        self._rungs = dict(rungs)
        self._traced: dict[Hashable, Traced | None] = {}
        """Of the kinds of rows that were met last, for cuts by other rungs."""
        self._cuts: dict[Hashable, Cut | None] = {}
        self._proven: dict[Hashable, bool] = {}
        """Of each layer and each of its cuts, whether that computed what the layer's own code does."""
        self._apart: set[int] = set()
        """Layers whose code is not that of the layer of their class that was traced first: each has its own graphs."""
        self._of: dict[tuple[int, int], Cut | None] = {}
        """(layer, micro-batch) -> what this step's forward ran by."""
        self.by_graph = self.whole = 0
        """Backwards so far that rebuilt from what was kept, and that recomputed the block whole."""

    def learn(self, layer_class: str, rung: str, keeping: Keeping) -> None:
        """Take one more rung, for whoever measures it."""
        self._rungs[layer_class, rung] = keeping

    def begin_step(self) -> None:
        self._of.clear()

    def forward(
        self,
        where: tuple[int, int],
        layer_class: str,
        rung: str,
        block: nn.Module,
        call: LayerCall,
        parameters: Mapping[str, torch.Tensor],
        hidden: torch.Tensor,
        saved: torch.Tensor,
        seed: Callable[[], None],
        eager: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """A block's output, and in `saved`, bytes, what the rung keeps.

        `where` is (layer, micro-batch), `parameters` says by `requires_grad` what is trained, `seed` seeds the
        generators as for a first run, and `eager` runs the block's own code. The first time that a layer is run by a
        graph, its own code is run too, and has to compute the same bits: another layer of the class may do other
        things than the one that was traced, and then has a graph of its own.
        """
        layer = where[0]
        inputs = _inputs(block, call, parameters, hidden)
        given = [hidden.detach(), *(each.detach() for each in inputs.others)]
        while True:
            kind, cut = self._cut_for(layer, layer_class, rung, block, inputs, hidden, saved.numel())
            proof: Hashable = (layer, kind)
            if cut is None or self._proven.get(proof) is False:
                self._of[where] = None
                return eager()
            result: torch.Tensor = cut.forward(*given, *_places(cut, saved))
            if proof not in self._proven:
                seed()
                self._proven[proof] = _same(result, eager())
                seed()
            if self._proven[proof]:
                self._of[where] = cut
                return result
            if layer not in self._apart:
                self._apart.add(layer)

    def kept(self, where: tuple[int, int]) -> bool:
        """Whether the forward of a pair has left in its place what its rung keeps."""
        return self._of.get(where) is not None

    def runs_by_graph(self, where: tuple[int, int]) -> bool:
        """Whether the backward of a pair finds in its place what it needs; counted, once for each backward."""
        assert where in self._of, "the forward of this pair has not run in this step"
        found = self._of[where] is not None
        self.by_graph += found
        self.whole += not found
        return found

    def backward(
        self,
        where: tuple[int, int],
        block: nn.Module,
        call: LayerCall,
        parameters: Mapping[str, torch.Tensor],
        hidden: torch.Tensor,
        saved: torch.Tensor,
        gradient: torch.Tensor,
        take: Callable[[str, torch.Tensor], None],
    ) -> torch.Tensor | None:
        """The gradient of a block's input, None where none is wanted; `take` is called with each parameter's name and
        gradient, as soon as it is there."""
        cut = self._of.pop(where)
        assert cut is not None
        inputs = _inputs(block, call, parameters, hidden)
        names = list(parameters)
        first = len(inputs.others) - inputs.parameters

        def took(number: int, found: torch.Tensor) -> None:
            take(names[number - first], found)

        taken: Take = took
        given = [each.detach() for each in inputs.others]
        kept = [*_places(cut, saved), *([hidden.detach()] if cut.keeps_hidden else [])]
        result: torch.Tensor | None = cut.backward(*kept, *given, gradient, taken)
        return result

    def _cut_for(
        self,
        layer: int,
        layer_class: str,
        rung: str,
        block: nn.Module,
        inputs: _Inputs,
        hidden: torch.Tensor,
        room: int,
    ) -> tuple[Hashable, Cut | None]:
        """The graphs for rows of this kind, or None where there are none; and what they are kept by."""
        try:
            kind = (layer_class, layer if layer in self._apart else -1, block.training, inputs.kind(hidden))
        except TypeError:
            return None, None
        key = (kind, rung, room)
        if key not in self._cuts:
            if kind not in self._traced:
                while len(self._traced) >= TRACED_AT_ONCE:
                    del self._traced[next(iter(self._traced))]
                self._traced[kind] = _traced(block, inputs, hidden)
            self._cuts[key] = _cut(self._traced[kind], self._rungs[layer_class, rung], room)
        return key, self._cuts[key]


def _traced(block: nn.Module, inputs: _Inputs, hidden: torch.Tensor) -> Traced | None:
    """A block's graph on inputs like these, or None where its code cannot be traced."""

    def run(hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        leaves = list(inputs.leaves)
        called = len(inputs.places)
        for place, tensor in zip(inputs.places, (hidden, *others), strict=False):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, inputs.spec)
        result = functional_call(block, dict(zip(inputs.names, others[called - 1 :], strict=True)), args, kwargs)
        return result if isinstance(result, torch.Tensor) else result[0]

    try:
        return trace(run, hidden, inputs.others)
    except UntraceableError:
        return None


@dataclass(frozen=True)
class TracedCall:
    """A block's graph, and what to run it on."""

    traced: Traced
    inputs: list[torch.Tensor]
    """Of a forward, but for the places of what is kept: the hidden state, then all else."""

    def kept_bytes(self, values: Collection[str], *, packed: bool = False) -> int:
        """What these take, one behind the other; with `packed` in int8 where they may be."""
        return laid_bytes(self.traced.kept(values, packed=packed))

    def operation_seconds(self, clock: Callable[[], float]) -> dict[str, float]:
        """Seconds of each operation of one forward, by its name; `clock` waits for the device."""
        found: dict[str, float] = {}

        class Timed(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                began = clock()
                result = super().run_node(n)
                found[n.name] = clock() - began
                return result

        with torch.no_grad():
            Timed(self.traced.forward).run(*self.inputs)
        return found


def traced_call(
    block: nn.Module, call: LayerCall, parameters: Mapping[str, torch.Tensor], hidden: torch.Tensor
) -> TracedCall | None:
    """A block's graph for whoever measures it; None where its code cannot be traced."""
    inputs = _inputs(block, call, parameters, hidden)
    with labelled(block):
        traced = _traced(block, inputs, hidden)
    return None if traced is None else TracedCall(traced, [hidden.detach(), *(each.detach() for each in inputs.others)])


def _inputs(block: nn.Module, call: LayerCall, parameters: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> _Inputs:
    leaves, spec = tree_flatten(call.arguments(hidden))
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf is not hidden]
    first = next(place for place, leaf in enumerate(leaves) if leaf is hidden)
    buffers = dict(block.named_buffers())
    others = [*(leaves[place] for place in tensors), *buffers.values(), *parameters.values()]
    return _Inputs(others, len(parameters), (first, *tensors), leaves, spec, (*buffers, *parameters))


def _cut(traced: Traced | None, keeping: Keeping, room: int) -> Cut | None:
    """The graphs that keep as much of what is wanted as there is room for; None where nothing can be kept."""
    if traced is None:
        return None
    kept: list[Value] = []
    for value in traced.kept(keeping.values, packed=keeping.packed):
        if laid_bytes([*kept, value]) <= room:
            kept.append(value)
    names = [value.name for value in kept]
    return traced.cut(names, packed=keeping.packed) if kept and traced.can_be_kept(names) else None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all numbers are the same; a NaN is the same as a NaN, as fp16 may have them."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _laid(values: Iterable[Value]) -> Iterator[tuple[Value, int, int]]:
    """Each value with its first byte and its end, one behind the other."""
    end = 0
    for value in values:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + value.nbytes
        yield value, start, end


def laid_bytes(values: Iterable[Value]) -> int:
    """What kept values take, one behind the other."""
    return max((end for _, _, end in _laid(values)), default=0)


def _places(cut: Cut, saved: torch.Tensor) -> list[torch.Tensor]:
    """Where in `saved`, bytes, the kept values lie."""
    return [value.laid(saved.data[start:end]) for value, start, end in _laid(cut.kept)]
