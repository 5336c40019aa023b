"""The zeroth-order optimizer (MeZO; ZO-Offloading section 2.3): directions, estimates and updates.

Owns how a step's losses become the updates that are pending, and what one pass over a state's parameters does with
them. A random direction is a function of (seed, step, number, name of the tensor, element) alone, so it is the same at
every split, on every device and in every layout of states. When a pass runs, and over what, it does not know.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ssdplan.plans.errors import UsageError

from ..model.layout import StateSpec
from .passes import Pending, perturb
from .rows import Rows


@dataclass(frozen=True, slots=True)
class Move:
    """One update along a direction: p = keep p - scale z."""

    step: int
    direction: int
    scale: float
    """The learning rate times the projected gradient, over the number of directions."""
    keep: float = 1.0
    """1 less the learning rate times the weight decay, of what decays; of a step's first direction alone."""


@dataclass(frozen=True, slots=True)
class MeZO:
    """What one step uses. Central differences: the projected gradient is (loss at +eps - loss at -eps) / 2 eps."""

    lr: float = 1e-6
    eps: float = 1e-3
    weight_decay: float = 0.0
    seed: int = 0
    decay_all: bool = False
    """Biases and the weights of norms decay too."""

    def __post_init__(self) -> None:
        if not 0.0 < self.eps < float("inf"):
            raise UsageError(f"eps = {self.eps:g}: must be positive and finite")

    def projected(self, plus: float, minus: float) -> float:
        return (plus - minus) / (2.0 * self.eps)

    def nothing(self, step: int, directions: int) -> tuple[Move, ...]:
        """The updates of a step that is skipped, which leave every parameter as it is."""
        return tuple(Move(step, number, 0.0) for number in range(directions))

    def moves(self, step: int, losses: Sequence[tuple[float, float]]) -> tuple[Move, ...]:
        """The updates that follow from the losses at plus and minus eps along each direction of a step."""
        each = self.lr / len(losses)
        decayed = 1.0 - self.lr * self.weight_decay
        return tuple(
            Move(step, number, each * self.projected(*both), decayed if number == 0 else 1.0)
            for number, both in enumerate(losses)
        )


class Pass:
    """What the passes of one step do with parameters."""

    def __init__(
        self, optimizer: MeZO, step: int, pending: Sequence[Move], threads: int, lagging: Sequence[Move] | None = None
    ) -> None:
        """`pending`: what no pass has made of parameters that are updated where they are; `lagging`: of those that go
        back to another place, where it is not the same."""
        self._optimizer, self._step, self._threads = optimizer, step, threads
        self._here, self._away = _both(pending), _both(pending if lagging is None else lagging)

    def __call__(
        self,
        state: StateSpec,
        spared: frozenset[str],
        parameters: torch.Tensor,
        plus: torch.Tensor | None,
        minus: torch.Tensor | None,
        *,
        direction: int,
        updates: bool,
        lags: bool = False,
        start: int = 0,
        rows: Rows | None = None,
    ) -> None:
        """Update a state's parameters, if it is to be, and make its copies, if they are wanted: flat tensors on one
        device, of dtypes as `perturb` takes them. They are the state's elements from `start` on, or `rows` of its only
        tensor. Tensors of the names `spared` do not decay."""
        for tensor in state.tensors:
            first = max(tensor.offset, start)
            last = min(tensor.offset + tensor.elements, start + parameters.numel())
            if first >= last:
                continue
            part = slice(first - start, last - start)
            perturb(
                parameters[part],
                None if plus is None else plus[part],
                None if minus is None else minus[part],
                seed=self._optimizer.seed,
                tensor=tensor_key(tensor.name),
                step=self._step,
                direction=direction,
                eps=self._optimizer.eps,
                pending=(self._away if lags else self._here)[tensor.name in spared] if updates else (),
                threads=self._threads,
                first=first - tensor.offset,
                rows=rows,
            )


def _both(moves: Sequence[Move]) -> tuple[list[Pending], list[Pending]]:
    """The moves as the kernels take them: of what decays, and of what does not."""
    return (
        [(move.step, move.direction, move.scale, move.keep) for move in moves],
        [(move.step, move.direction, move.scale, 1.0) for move in moves],
    )


def tensor_key(name: str) -> int:
    """32 bits of a tensor's name, by which its directions are drawn."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def require_distinct_keys(states: Sequence[StateSpec]) -> None:
    """Two tensors of one key would move along one direction. Raises UsageError."""
    seen: dict[int, str] = {}
    for state in states:
        for tensor in state.tensors:
            other = seen.setdefault(tensor_key(tensor.name), tensor.name)
            if other != tensor.name:
                raise UsageError(f"{other} and {tensor.name} would be moved along one random direction; rename one")
