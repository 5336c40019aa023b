"""Matrices that are updated whole: what a state of Muon's consists of, and what the update of one takes.

Owns the shape and place of a matrix within its state, where a state may be cut, the layout of the memory that an
orthogonalisation works in, and how long an update of each shape takes. It knows no tier and no operation; the
arithmetic is in `executor/optimizer/muon.py`.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple, Protocol

from pydantic import Field

from ..units import whole_pages
from .base import Count, Part, Positive
from .state_layout import BF16, FP32, GRAIN

PIECE = 1 << 20
"""Elements of a matrix that are in fp32 at once beside what is kept of it; of a longer row, the row."""


class Matrix(Part):
    """A weight of two dimensions, as its model has it, within a state of such."""

    rows: Count
    columns: Count
    start: Annotated[int, Field(ge=0, lt=1 << 40)]
    """Its first element in the state."""

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        """Where the next one begins: an update of it, and a home, can end there."""
        return self.start + -(-self.elements // GRAIN) * GRAIN

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns


class MatrixUpdate(Part):
    """What Muon's whole update of a matrix of one shape takes: momentum, orthogonalisation, weights."""

    rows: Count
    columns: Count
    seconds: Positive
    """On host, with the threads that compute has."""
    device_seconds: Positive | None = None
    """On the device. None: nobody measured it, and no plan for a GPU has a device update such a matrix."""


def badly_laid(matrices: Sequence[Matrix], elements: int) -> str:
    """Why these are not the matrices of a state of so many elements, one behind the other; empty where they are."""
    at = 0
    for matrix in matrices:
        if matrix.start != at:
            return f"one of {matrix.rows} x {matrix.columns} begins at element {matrix.start}, not {at}"
        at = matrix.stop
    return "" if at == elements else f"they are {at} elements, and the state has {elements}"


def unfit_muon(optimizer_states: str, ranks: int) -> str:
    """Why Muon cannot have moments of such a format, or so many ranks; empty where it can."""
    if optimizer_states != "fp32":
        return f"optimizer states {optimizer_states}: optimizer muon has its momentum in fp32; take fp32"
    if ranks > 1:
        return f"ranks = {ranks}: optimizer muon updates whole matrices, which shares of several ranks cut; take 1 rank"
    return ""


class Decided(Protocol):
    """`Decision` of `documents/plan.py`."""

    @property
    def optimizer(self) -> str: ...
    @property
    def optimizer_states(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def matrices_on_device(self) -> bool | None: ...
    @property
    def unified_memory(self) -> bool: ...
    @property
    def schedule(self) -> str: ...
    @property
    def masters(self) -> str: ...


def unfit_plan(decision: Decided, *, muon: bool, there: bool) -> str:
    """Why a decision does not go with its model, which has states of matrices if `muon`, and its machine, whose device
    can update them if `there`; empty where it does."""
    if (decision.optimizer == "muon") != muon:
        return f"decision.optimizer is {decision.optimizer}, the model has {'' if muon else 'no '}states of matrices"
    if not decision.matrices_on_device:
        return unfit_muon(decision.optimizer_states, decision.ranks) if muon else ""
    if not (muon and there) or decision.unified_memory or decision.schedule != "vertical" or decision.masters != "fp32":
        return (
            "decision.matrices_on_device: only of muon, on a device that can, with schedule vertical and masters fp32"
        )
    return unfit_muon(decision.optimizer_states, decision.ranks)


class Workspace(NamedTuple):
    """Where the parts of the memory lie that the update of a matrix works in: bytes [start, stop)."""

    first: tuple[int, int]
    """The matrix in bf16, and every other step of the iteration."""
    second: tuple[int, int]
    """The other steps."""
    gram: tuple[int, int]
    """The products of its shorter side with itself, in bf16."""
    square: tuple[int, int]
    piece: tuple[int, int]
    """A piece of it in fp32."""
    master: tuple[int, int]
    """The same of its masters, where no master is in fp32."""


def workspace_of(matrix: Matrix) -> Workspace:
    """Each part begins at a page."""
    short, piece = min(matrix.shape), max(min(matrix.elements, PIECE), matrix.columns)
    sizes = (matrix.elements, matrix.elements, short * short, short * short)
    places, at = [], 0
    for nbytes in (*(BF16.bytes_of(size) for size in sizes), FP32.bytes_of(piece), FP32.bytes_of(piece)):
        places.append((at, at + nbytes))
        at = whole_pages(at + nbytes)
    return Workspace(*places)


def workspace_bytes(matrices: Iterable[Matrix]) -> int:
    """What the updates of these take one after the other; 0 of none."""
    return max((whole_pages(workspace_of(matrix).master[1]) for matrix in matrices), default=0)


def longer(updates: Iterable[MatrixUpdate], factor: float, *, device: float = 1.0) -> tuple[MatrixUpdate, ...]:
    """The same where those on host take `factor` times as long, and those on the device `device` times."""
    return tuple(
        each.model_copy(
            update={
                "seconds": each.seconds * factor,
                "device_seconds": each.device_seconds and each.device_seconds * device,
            }
        )
        for each in updates
    )


def seconds_of(updates: Iterable[MatrixUpdate], matrices: Iterable[Matrix], *, on_device: bool = False) -> float | None:
    """Of the updates of these matrices, one after the other; None where one of them has none on the device. Raises
    KeyError for a shape that `updates` lack."""
    of = {(each.rows, each.columns): each.device_seconds if on_device else each.seconds for each in updates}
    each = [of[matrix.shape] for matrix in matrices]
    return None if None in each else sum(seconds for seconds in each if seconds is not None)
