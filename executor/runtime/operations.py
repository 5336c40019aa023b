"""Operations: what each op of a schedule does with this run's memory, store, layers and optimizer.

Owns the binding of a graph's regions to tensors in the arenas, made once before the first step, so that a step
allocates nothing and computes no addresses. It decides no order; the runners do not know what an op does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ssdplan.native import process
from ssdplan.plans.documents.profile import Machine
from ssdplan.plans.documents.state_layout import GRADIENT_BYTES
from ssdplan.plans.errors import NumericalError
from ssdplan.plans.graph.collectives import AddShares, Exchange, Gather
from ssdplan.plans.graph.ops import (
    Backward,
    Forward,
    Graph,
    Op,
    Perturb,
    Region,
    SumSquares,
    TakeRows,
    Transfer,
    Update,
)
from ssdplan.plans.schedule.shards import Shards

from ..device.interface import Action, Device, Rest
from ..memory.arenas import Memory
from ..model.kinds import spared_parameters
from ..model.layers import Layers
from ..model.model import StreamedModel
from ..optimizer.adamw import AdamW, RangeUpdate
from ..optimizer.adamw_on_device import DeviceUpdate
from ..optimizer.muon import MatrixUpdate
from ..optimizer.rows import Rows
from ..optimizer.weight_decay import Span, Window, spared_spans, windows
from ..optimizer.zeroth_order import Pass
from ..ranks.ended import Ended
from ..ranks.group import ALONE, Ranks
from ..store import Store

_GIVE_BACK_EVERY = 64
"""Compute ops: often enough that the heap hardly grows, and seldom enough that it costs a few thousandths of them."""


def _whole_gradients(graph: Graph) -> dict[int, Region]:
    """For the first copy of each gradient to host, by the op's index: all that is copied of it, side by side. The
    backward before the first copy has completed the whole."""
    copies: dict[int, list[Transfer]] = {}
    for op in graph.ops:
        if isinstance(op, Transfer) and op.kind == "d2h" and op.final_gradient:
            copies.setdefault(op.source.buffer, []).append(op)
    found = {}
    for buffer, ops in copies.items():
        start, stop = min(op.source.start for op in ops), max(op.source.stop for op in ops)
        assert sum(op.source.nbytes for op in ops) == stop - start, f"ranges of gradient {buffer} are not side by side"
        found[ops[0].index] = Region(buffer, start, stop)
    return found


def _add_shares(received: torch.Tensor, total: torch.Tensor) -> None:
    """fp32 [ranks, elements], of which each rank's first are summed to `total` in rank order; it may be the first."""
    own = total.numel()
    if total.data_ptr() != received.data_ptr():
        total.copy_(received[0, :own])
    for other in received[1:]:
        total.add_(other[:own])


def _round(masters: torch.Tensor, copy: torch.Tensor) -> None:
    copy.copy_(masters)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the updates of one step use."""

    optimizer: AdamW
    step: int
    """Of the optimizer, from 1: steps that were skipped do not count."""
    gradient_scale: float
    """Of delayed updates it also clips: the norm of all gradients is known once none is left to come."""


@dataclass(frozen=True, slots=True)
class _Passing:
    """States that come from ssd for an update and go back: nothing has looked yet whether they are what was written."""

    on_host: Region
    offset: int
    """In the store."""
    nbytes: int
    extents: tuple[int, ...]


class Operations:
    """Binds graphs to a run. What the updates of a step use is set by `begin`."""

    def __init__(
        self,
        memory: Memory,
        device: Device,
        store: Store | None,
        layers: Layers,
        machine: Machine,
        model: StreamedModel,
        *,
        clip_grad_norm: float | None,
        decay_all: bool,
        dtypes: Sequence[torch.dtype] = (),
        ranks: Ranks = ALONE,
    ) -> None:
        """`clip_grad_norm`: the most that the norm of a step's gradients may be; a plan delays every update then, and
        in fp16, where a step whose gradients overflow is skipped. `decay_all`: whether biases and norms decay too.
        `dtypes`: of each state's parameters where they live, if they are not all the model's."""
        self._memory, self._device, self._store, self._layers = memory, device, store, layers
        self._ranks, self._owns = ranks, Shards(ranks.size, ranks.rank)
        self._threads = machine.update_threads
        self._model, self._dtype = model, model.dtype
        self._spared: tuple[tuple[Span, ...], ...] = ((),) * len(model.states) if decay_all else spared_spans(model)
        self._lasting = frozenset[str]() if decay_all else spared_parameters(model.module)
        """The names of the tensors that do not decay."""
        self._dtypes, self._computed = tuple(dtypes) or model.dtypes, model.dtypes
        self._pass: Pass | None = None
        self._clip_grad_norm = clip_grad_norm
        self._prompt: _Settings | None = None
        self._pending: _Settings | None = None
        self._squares: list[int] = []
        """Of the ranges of the step's gradients, in units of 2**-1074: integers add up alike in any order. A list, as
        two lanes may add to it at once."""
        self._scaled, self._overflow = False, ""
        self._checksums: dict[Region, tuple[int, ...]] = {}
        """Of states on their way to ssd: what their update summed."""
        self._sampled: set[tuple[str, str]] = set()
        self._last, self._since = ("", ""), 0
        self.workspace_bytes = 0
        """The most memory that the compute of an op has been seen to take, in DRAM."""

    def begin(self, optimizer: AdamW, update: int, loss_scale: float | None) -> None:
        """What the prompt updates from here on use (`update` counts from 1); delayed ones use what was set before.

        With a `loss_scale`, which the gradients are multiplied by, a gradient that is not finite is an overflow: the
        step's updates must not run then. Without one it is an error."""
        self.finish()
        self._prompt = _Settings(optimizer, update, 1.0 / (loss_scale or 1.0))
        self._scaled = loss_scale is not None
        self._squares = []
        self._overflow = ""

    def begin_zeroth_order(self, perturbs: Pass) -> None:
        """What the passes over parameters do from here on, in a step or in a flush."""
        self._pass = perturbs

    def finish(self) -> None:
        """From here on delayed updates are those of the step that has just ended, its gradients clipped."""
        prompt = None if self._overflow else self._prompt
        self._pending = prompt and replace(prompt, gradient_scale=prompt.gradient_scale * self._clipping())

    def _clipping(self) -> float:
        """The factor that clips the step's gradients, as torch.nn.utils.clip_grad_norm_ defines it."""
        if self._clip_grad_norm is None:
            return 1.0
        return min(1.0, self._clip_grad_norm / (self.gradient_norm() + 1e-6))

    def ended(self, loss: float) -> Ended:
        """The step that has just ended, as this rank found it."""
        return Ended(loss, sum(self._squares), self._overflow)

    def agree(self, ended: Ended) -> None:
        """From here on that step is as all ranks together found it."""
        self._squares, self._overflow = [ended.squares], ended.overflow

    @property
    def overflow(self) -> str:
        """What of the step that has just ended was not finite, in words; empty when all was."""
        return self._overflow

    def gradient_norm(self) -> float:
        """Of all gradients of the step that has just ended, over all parameters, without their loss scale and before
        any clipping; infinite when they overflowed.

        On one device the same bits whatever the residencies, delay and runner.
        """
        if self._overflow:
            return math.inf
        scale = self._prompt.gradient_scale if self._prompt else 1.0
        return math.sqrt(sum(self._squares) / (1 << 1074)) * scale

    def bind(self, graph: Graph) -> list[Action]:
        """One action an op, ready to run any number of times."""
        gradients = _whole_gradients(graph)
        return [self._bind(op, gradients.get(op.index)) for op in graph.ops]

    def _bind(self, op: Op, gradient: Region | None) -> Action:
        """`gradient`: of the op that is the first to copy a range of it, the whole of what is copied."""
        match op:
            case Transfer(kind="read"):
                store = self._storage()
                read = store.read_unchecked if op.summed_by_update else store.read
                return partial(read, *self._store_arguments(op.source, op.target))
            case Transfer(kind="write", summed_by_update=True):
                return partial(self._write_summed, op.source, *self._store_arguments(op.target, op.source))
            case Transfer(kind="write"):
                return partial(self._storage().write, *self._store_arguments(op.target, op.source))
            case Transfer(kind="h2d"):
                return partial(self._device.copy_h2d, self._memory.view(op.target), self._memory.view(op.source))
            case Transfer(kind="d2h"):
                if op.final_gradient:
                    assert op.state is not None
                    target, source = (self._memory.view(region, torch.float32) for region in (op.target, op.source))
                    whole = None if gradient is None else self._memory.view(gradient, torch.float32)
                    start = (gradient or op.source).start // GRADIENT_BYTES + self._first(op.state)
                    return partial(self._take_gradient, op.state, start, target, source, whole)
                return partial(self._device.copy_d2h, self._memory.view(op.target), self._memory.view(op.source))
            case Forward():
                return self._bind_forward(op)
            case Backward():
                return self._bind_backward(op)
            case Perturb():
                return self._bind_perturb(op)
            case TakeRows():
                assert self._layers.rows is not None
                table, rows = (self._memory.view(region, self._dtypes[op.state]) for region in (op.table, op.rows))
                return partial(self._layers.rows.take, table, rows)
            case Gather():
                return self._bind_gather(op)
            case Exchange():
                received, sent = self._memory.view(op.received), self._memory.view(op.sent)
                return partial(self._ranks.exchange, received, sent, str(op))
            case AddShares():
                shares = self._memory.view(op.received, torch.float32).view(op.ranks, -1)
                return partial(_add_shares, shares, self._memory.view(op.total, torch.float32))
            case SumSquares():
                return partial(self._sum_squares, op.state, self._memory.view(op.gradient, torch.float32))
            case Update() if op.matrices:
                return self._bind_matrix_update(op)
            case Update(on_device=True):
                return self._bind_update_on_device(op)
            case Update():
                return self._bind_update(op)
            case _:
                raise AssertionError(f"unknown op {op}")

    def _bind_gather(self, op: Gather) -> Action:
        whole = self._memory.view(op.whole)
        (place, stop), parts = op.own, []
        for share in op.shares:
            there = whole[place : place + share.nbytes]
            place += share.nbytes
            if (here := self._memory.view(share)).data_ptr() != there.data_ptr():
                parts.append((there, here))
        assert place == stop, f"{op}: its shares are not all of this rank's"

        def gather() -> None:
            for there, here in parts:
                there.copy_(here)
            self._ranks.gather(whole, str(op))

        return gather

    def _storage(self) -> Store:
        assert self._store is not None, "the plan uses ssd but the run has no store"
        return self._store

    def _store_arguments(self, on_ssd: Region, on_host: Region) -> tuple[int, int, int]:
        return self._memory.store_offset(on_ssd), on_ssd.nbytes, self._memory.view(on_host).data_ptr()

    def _passing(self, on_host: Region, on_ssd: Region) -> "_Passing":
        offset = self._memory.store_offset(on_ssd)
        return _Passing(on_host, offset, on_ssd.nbytes, self._storage().extents(offset, on_ssd.nbytes))

    def _write_summed(self, on_host: Region, offset: int, nbytes: int, address: int) -> None:
        """Write states with the checksums that their update took."""
        self._storage().write(offset, nbytes, address, self._checksums.pop(on_host))

    def _first(self, state: int) -> int:
        """The first element of a state that this rank owns, with which the gradient of its share begins."""
        return self._owns.own(self._model.states[state].elements)[0]

    def _take_gradient(
        self, state: int, start: int, target: torch.Tensor, source: torch.Tensor, whole: torch.Tensor | None
    ) -> Rest:
        """`start`: where `whole` starts in the state, or without one where `source` does."""
        found = self._device.copy_d2h_gradient(target, source, whole)
        return partial(self._looked_at, state, start, target if whole is None else whole, found)

    def _sum_squares(self, state: int, gradient: torch.Tensor) -> Rest:
        found = self._device.squares(gradient, self._threads)
        return partial(self._looked_at, state, 0, gradient, found)

    def _looked_at(self, state: int, start: int, gradient: torch.Tensor, found: Callable[[], tuple[bool, int]]) -> None:
        """Take what was `found` of a state's gradient, which begins at element `start`."""
        finite, squares = found()
        if not finite:
            self._overflowed(state, start, gradient)
        self._squares.append(squares)

    def _bind_update(self, op: Update) -> Action:
        passing = self._passing(op.optimizer, op.stored) if op.stored else None
        gradient = self._memory.view(op.gradient, torch.float32)
        update = RangeUpdate(
            self._memory.view(op.optimizer),
            op.formats,
            gradient,
            self._memory.view(op.parameters, self._dtypes[op.state]),
            threads=self._threads,
            statistics=op.final_gradient,
            windows=self._windows(op),
            extents=passing.extents if passing else (),
        )
        return partial(self._update, update, passing, op, gradient)

    def _bind_matrix_update(self, op: Update) -> Action:
        assert op.workspace is not None
        passing = self._passing(op.optimizer, op.stored) if op.stored else None
        gradient = self._memory.view(op.gradient, torch.float32)
        tensors = {tensor.offset: tensor.name for tensor in self._model.states[op.state].tensors}
        update = MatrixUpdate(
            self._memory.view(op.optimizer),
            op.formats,
            gradient,
            self._memory.view(op.parameters, self._dtypes[op.state]),
            op.matrices,
            self._memory.view(op.workspace),
            start=op.start,
            decays=[tensors[matrix.start] not in self._lasting for matrix in op.matrices],
            threads=self._threads,
            looks=not op.on_device,
            extents=passing.extents if passing else (),
        )
        return partial(self._update, update, passing, op, gradient)

    def _update(
        self, update: RangeUpdate | MatrixUpdate, passing: "_Passing | None", op: Update, gradient: torch.Tensor
    ) -> None:
        settings = self._settings(op)
        finite, squares, before, after = update(
            settings.optimizer, step=settings.step, gradient_scale=settings.gradient_scale
        )
        if passing:
            self._storage().require(passing.offset, passing.nbytes, before)
            self._checksums[passing.on_host] = after
        if not finite:
            self._overflowed(op.state, op.start, gradient)
        if op.final_gradient:
            self._squares.append(squares)

    def _settings(self, op: Update) -> _Settings:
        settings = self._pending if op.delayed else self._prompt
        assert settings is not None, "an update before the first step, or of one that is skipped"
        assert op.delayed or not (self._scaled or self._clip_grad_norm), "an update before all gradients are known"
        return settings

    def _bind_update_on_device(self, op: Update) -> Action:
        update = DeviceUpdate(
            self._memory.view(op.optimizer),
            op.formats,
            self._memory.view(op.gradient, torch.float32),
            self._memory.view(op.parameters, self._dtypes[op.state]),
            threads=self._threads,
            windows=self._windows(op),
        )

        def work() -> None:
            settings = self._settings(op)
            update(settings.optimizer, step=settings.step, gradient_scale=settings.gradient_scale)

        return work

    def _windows(self, op: Update) -> tuple[Window, ...]:
        spared = self._spared[op.state]
        return windows(op.start, op.stop, spared) if spared else ()

    def _overflowed(self, state: int, start: int, gradient: torch.Tensor) -> None:
        """Elements of a state's gradient from `start` on are not all finite: find where that began."""
        if self._overflow:
            return
        first_layer = next(at for at, layer in enumerate(self._model.layers) if state in layer.states)
        tensors = (
            tensor.name
            for tensor in self._model.states[state].tensors
            if not gradient[max(tensor.offset - start, 0) : max(tensor.offset + tensor.elements - start, 0)]
            .isfinite()
            .all()
        )
        self._overflow = self._layers.not_finite(first_layer) or f"the gradient of {next(tensors)}"
        if not self._scaled:
            finer = "" if self._dtype == torch.float32 else ", or profile with --precision fp32"
            step = self._layers.step + 1
            mend = "lower --lr" if step > 1 else "nothing was updated yet, so look for a stored weight that is not"
            raise NumericalError(f"step {step}: {self._overflow} is not finite; {mend}{finer}")

    def _bind_perturb(self, op: Perturb) -> Action:
        parameters = self._memory.view(op.parameters, self._dtypes[op.state])
        if op.rounded:
            return partial(_round, parameters, self._memory.view(op.rounded, self._computed[op.state]))
        plus, minus = (
            None if region is None else self._memory.view(region, self._computed[op.state])
            for region in (op.plus, op.minus)
        )
        return partial(self._perturb, op, parameters, plus, minus)

    def _perturb(
        self, op: Perturb, parameters: torch.Tensor, plus: torch.Tensor | None, minus: torch.Tensor | None
    ) -> None:
        assert self._pass is not None, "a pass before the first step"
        state = self._model.states[op.state]
        self._pass(
            state,
            self._lasting,
            parameters,
            plus,
            minus,
            direction=op.direction,
            updates=op.updates,
            lags=op.lags,
            start=op.start,
            rows=self._rows() if op.by_rows else None,
        )

    def _rows(self) -> Rows:
        rows = self._layers.rows
        assert rows is not None
        return Rows(rows.on_device, rows.row_elements)

    def _weights(self, op: Forward | Backward) -> list[torch.Tensor]:
        states = self._model.layers[op.layer].states
        return [
            self._memory.view(region, self._computed[state]) for region, state in zip(op.weights, states, strict=True)
        ]

    def _bind_forward(self, op: Forward) -> Action:
        weights = self._weights(op)
        hidden = self._optional(op.hidden)
        out = self._optional(op.out)
        if out is None:
            assert hidden is not None
            work = partial(self._layers.loss, op.micro_batch, weights, hidden, (op.direction, op.side))
        else:
            saved = None if op.saved is None else self._memory.view(op.saved)
            work = partial(
                self._layers.forward, op.layer, op.micro_batch, weights, hidden, out, op.rung, saved, op.by_rows
            )
        return partial(self._compute, ("forward", op.layer_class), work)

    def _bind_backward(self, op: Backward) -> Action:
        weights = self._weights(op)
        gradients = [self._memory.view(region, torch.float32) for region in op.gradients]
        hidden, out_gradient = self._optional(op.hidden), self._optional(op.out_gradient)
        in_gradient = self._optional(op.in_gradient)

        work = partial(
            self._layers.backward,
            op.layer,
            op.micro_batch,
            weights,
            hidden,
            out_gradient,
            in_gradient,
            gradients,
            op.fresh,
            None if op.saved is None else self._memory.view(op.saved),
        )
        return partial(self._compute, ("backward", op.layer_class), work)

    def _optional(self, region: Region | None) -> torch.Tensor | None:
        return None if region is None else self._memory.view(region, self._dtype)

    def _compute(self, kind: tuple[str, str], work: Callable[[], None]) -> None:
        """Run a compute op; in DRAM, the first of each kind is measured for the memory that it takes: a GPU's allocator
        keeps its own peak.

        In DRAM, what the last kind of layer left in the heap is given back first: the next one's tensors are of other
        sizes, so both would be there at once. The heap also breaks up slowly under ops of one kind.
        """
        self._since += 1
        if kind != self._last or self._since >= _GIVE_BACK_EVERY:
            self._last, self._since = kind, 0
            if self._device.kind == "cpu":
                process.give_back()
        if kind in self._sampled or self._device.kind != "cpu":
            work()
            return
        self._sampled.add(kind)
        _, peak = self._device.peak_bytes(work)
        self.workspace_bytes = max(self.workspace_bytes, peak)
