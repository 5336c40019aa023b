"""State layout: what a training state consists of, in which formats, and at which byte each part of it lies.

Owns the formats of parameters, gradients and optimizer states as data, the grain at which a state may be cut, and the
order in which the optimizer states of a range of elements lie side by side. Planner, schedule, executor and profiler
ask here, and write no such number themselves. It knows no tier, no buffer and no operation.

**A state** is a flat vector of elements that streams, is updated and is snapshotted as one: tensors of a layer one
after the other, each at a multiple of `TENSOR_ALIGNMENT` elements, padded to a multiple of `GRAIN`. All of a state is
trained, or all of it is frozen. Each state has parameters; a trained one also has gradients and optimizer states.

**A layer has one state or several**: those of its own, then those that it shares with another layer (a tied embedding).
Its forward and its backward use all of them, one region of weights for each. A block shares none. A layer of which a
part is frozen, or is kept in fp32 and the rest is not, or is matrices that Muon updates, has a state of its own for
that part; one that is cut into pieces has one for each piece. Of a state of matrices each begins at a multiple of
`GRAIN`, and none is ever cut (`matrices.py`).

**A state in fp32** in a model of bf16 or fp16 (routers, decays) has parameters of four bytes and whole masters, as all
states have in fp32 training, whatever the others have; its moments are in the plan's format.

**Masters** are what an update changes and rounds to parameters. In fp32 they are a part of the optimizer states. As
*residual* only the 16 bits are that the bf16 parameters lack, which are then the masters rounded with ties away from
zero, so that both together are the master exactly. With *none* the bf16 parameters are the masters. In either case the
parameters themselves are a state that nothing else can be made into again (`OptimizerFormats.takes_copy`).

A format that is new is a `Format` here and a name in `OPTIMIZER_FORMATS` or `PARAMETERS`; the kernel that computes with
it is native, and `executor/optimizer/adamw.py` binds that to addresses.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..units import whole_pages

Precision = Literal["bf16", "fp16", "fp32"]
"""The format of parameters and of activations."""
OptimizerStates = Literal["fp32", "bf16", "int8"]
"""The format of both moments."""
Masters = Literal["fp32", "residual", "none"]
"""The format of masters: whole, what the bf16 parameters lack of them, or nothing but these."""
What = Literal["master", "first moment", "second moment"]

GRAIN = 2048
"""Elements. States, homes and updates begin and end at multiples of it. Parameters and gradients of so many elements
are whole pages. The squares of a gradient are summed by as many; `native/src/squares.hpp` has the same number."""
SCALED = 64
"""Elements of a moment in int8 that share a scale; `native/src/eight_bits.hpp` has the same number. As each tensor
begins at a multiple of it, none shares a scale with another."""
SUMMED = 256
"""Bytes. Each part of a range's optimizer states begins at a multiple of it, in which checksums are taken."""
TENSOR_ALIGNMENT = 64
"""Elements. Each tensor begins at a multiple of it within its state; the gaps are zero."""


@dataclass(frozen=True, slots=True)
class Format:
    """How numbers are kept: so many bytes for each element and, in a format of blocks, side data for each block (such
    as a scale). The side data of all blocks follow the elements."""

    name: str
    element_bytes: int
    block_elements: int = 0
    """Elements that share side data; 0 in a format without."""
    side_bytes: int = 0
    """Bytes of side data for each block."""

    def __post_init__(self) -> None:
        assert bool(self.block_elements) == bool(self.side_bytes), f"{self.name}: blocks and side data go together"
        assert not self.block_elements or GRAIN % self.block_elements == 0, f"{self.name}: a grain is whole blocks"

    def bytes_of(self, elements: int) -> int:
        """What so many elements take, exactly. The last block may be cut short; its side data are whole."""
        blocks = -(-elements // self.block_elements) if self.block_elements else 0
        return elements * self.element_bytes + blocks * self.side_bytes

    @property
    def mean_bytes(self) -> float:
        """Bytes an element in whole blocks, side data included; an int in a format without blocks."""
        if not self.block_elements:
            return self.element_bytes
        return self.element_bytes + self.side_bytes / self.block_elements


@dataclass(frozen=True, slots=True)
class Part:
    """The masters, or the first or the second moments, of a range of elements. Offsets are bytes from the start of the
    range's optimizer states."""

    what: What
    format: Format
    elements: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.format.bytes_of(self.elements)

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes

    def places(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """The bytes [first, end) that hold elements [start, stop) of the range: the elements' own, then, in a format of
        blocks, their side data. There, both must be multiples of a block."""
        own = self.format.element_bytes
        places = [(self.offset + start * own, self.offset + stop * own)]
        if block := self.format.block_elements:
            assert start % block == 0 == stop % block, f"{self.format.name}: a block is not cut"
            side, behind = self.format.side_bytes, self.offset + self.elements * own
            places.append((behind + start // block * side, behind + stop // block * side))
        return tuple(places)


@dataclass(frozen=True, slots=True)
class OptimizerFormats:
    """The formats of a state's optimizer states. One that takes no bytes is not there, and is no part."""

    masters: Masters
    moments: OptimizerStates
    master: Format
    first_moment: Format
    second_moment: Format

    @property
    def takes_copy(self) -> bool:
        """Whether an update reads the parameters that it writes, since no master has all of their bits."""
        return self.masters != "fp32"

    @property
    def usual(self) -> bool:
        """Whether training is that of fp32 masters and moments."""
        return (self.masters, self.moments) == ("fp32", "fp32")

    def parts(self, elements: int) -> tuple[Part, ...]:
        """How the optimizer states of a range of so many elements lie: each part whole, one after the other."""
        named: tuple[tuple[What, Format], ...] = (
            ("master", self.master),
            ("first moment", self.first_moment),
            ("second moment", self.second_moment),
        )
        parts: list[Part] = []
        offset = 0
        for what, form in named:
            if form.element_bytes:
                parts.append(Part(what, form, elements, offset))
                offset = -(-parts[-1].stop // SUMMED) * SUMMED
        return tuple(parts)

    def range_bytes(self, elements: int) -> int:
        """What they take: all parts, up to a whole page, as each range is read and written by itself. Formats without
        side data leave nothing to pad in ranges of whole grains."""
        return whole_pages(self.parts(elements)[-1].stop)

    @property
    def mean_bytes(self) -> float:
        """Bytes an element, without padding."""
        return self.master.mean_bytes + self.first_moment.mean_bytes + self.second_moment.mean_bytes


FP32, BF16, FP16 = Format("fp32", 4), Format("bf16", 2), Format("fp16", 2)
INT8 = Format("int8", 1, SCALED, FP32.element_bytes)
RESIDUAL, NONE = Format("residual", 2), Format("none", 0)

PARAMETERS: dict[Precision, Format] = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
ELEMENT_BYTES: dict[str, int] = {name: form.element_bytes for name, form in PARAMETERS.items()}
"""An element of parameters, or of an activation, by its precision."""

GRADIENT = FP32
GRADIENT_BYTES = GRADIENT.element_bytes
"""An element of a gradient, wherever it is added up or waits."""

_MASTERS: dict[Masters, Format] = {"fp32": FP32, "residual": RESIDUAL, "none": NONE}
_MOMENTS: dict[OptimizerStates, Format] = {"fp32": FP32, "bf16": BF16, "int8": INT8}
MOMENTUM: dict[Masters, OptimizerFormats] = {
    masters: OptimizerFormats(masters, "fp32", master, FP32, NONE) for masters, master in _MASTERS.items()
}
"""Of a state of matrices, which Muon updates: one moment."""
OPTIMIZER_FORMATS: dict[tuple[Masters, OptimizerStates], OptimizerFormats] = {
    (masters, moments): OptimizerFormats(masters, moments, master, moment, moment)
    for masters, master in _MASTERS.items()
    for moments, moment in _MOMENTS.items()
}
"""Of each choice of a user's. `mean_bytes` of one is for what is counted in fractions of a state."""
USUAL = OPTIMIZER_FORMATS["fp32", "fp32"]


def unfit_masters(masters: Masters, precision: Precision) -> str:
    """Why training in a precision cannot have such masters, and what can be done; empty where it can."""
    if masters == "fp32" or precision == "bf16":
        return ""
    why = (
        "in which weights are their own masters" if precision == "fp32" else "whose range masters need to be wider than"
    )
    return f"masters {masters} are for bf16, and this is {precision}, {why}; leave it out"


class Elements(Protocol):
    """`State` of `documents/profile.py`, or what a model tells of one."""

    @property
    def elements(self) -> int: ...
    @property
    def frozen(self) -> bool: ...
    @property
    def precision(self) -> Precision | None: ...
    @property
    def muon(self) -> bool: ...


def precision_of(state: Elements, precision: Precision) -> Precision:
    """Of a state's parameters in a model of `precision`."""
    return state.precision or precision


def formats_in(precision: Precision, formats: OptimizerFormats, *, muon: bool = False) -> OptimizerFormats:
    """Of the optimizer states of a state in `precision`, where those of the plan are `formats`: in fp32 masters are
    whole. `muon`: Muon updates it, with one moment."""
    masters: Masters = "fp32" if precision == "fp32" else formats.masters
    if muon:
        return MOMENTUM[masters]
    return formats if masters == formats.masters else OPTIMIZER_FORMATS[masters, formats.moments]


def parameters_bytes(states: Iterable[Elements], precision: Precision) -> int:
    """Bytes of the parameters of a model's states."""
    return sum(state.elements * ELEMENT_BYTES[precision_of(state, precision)] for state in states)


def optimizer_bytes(states: Iterable[Elements], precision: Precision, formats: OptimizerFormats) -> int:
    """Bytes of the optimizer states of a model's states, all of one format as one range."""
    elements: dict[OptimizerFormats, int] = {}
    for state in states:
        if not state.frozen:
            form = formats_in(precision_of(state, precision), formats, muon=state.muon)
            elements[form] = elements.get(form, 0) + state.elements
    return sum(form.range_bytes(count) for form, count in elements.items())


def training_bytes(states: Sequence[Elements], precision: Precision) -> int:
    """Bytes of weights, and of the fp32 optimizer states of those that are trained."""
    return parameters_bytes(states, precision) + optimizer_bytes(states, precision, USUAL)


class Hidden(Protocol):
    """`Model` of `documents/profile.py`: what decides how large a hidden state is."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def precision(self) -> Precision: ...


def checkpoint_bytes(model: Hidden, micro_batch_size: int) -> int:
    """Bytes of an activation checkpoint: a layer's input for one micro-batch, in whole pages."""
    elements = micro_batch_size * model.sequence_length * model.hidden_size
    return whole_pages(PARAMETERS[model.precision].bytes_of(elements))
