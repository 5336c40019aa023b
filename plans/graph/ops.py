"""Operations: the one graph of a step that the simulator times, the executor runs and the plots draw.

Owns the vocabulary (buffers, regions, operations) and nothing else: `contents.py` lists what buffers hold and
transfers move, `schedule/build.py` has operations emitted, `allocation.py` gives buffers their places, `waits.py`
derives what waits for what, `verify.py` refuses a graph that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, Literal, Self, TypeVar, dataclass_transform

from ..documents.matrices import Matrix
from ..documents.state_layout import GRADIENT_BYTES, OptimizerFormats, Part
from .contents import Content, Role, title_of

Tier = Literal["device", "host", "ssd"]
TIERS: tuple[Tier, ...] = ("device", "host", "ssd")
Resource = Literal["read", "write", "h2d", "d2h", "compute", "cpu", "network"]
RESOURCES: tuple[Resource, ...] = ("read", "write", "h2d", "d2h", "compute", "cpu", "network")
"""One worker each in the executor, one lane each in the simulator; read and write share the drive. The network is a
resource of plans for several ranks alone."""

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def record(cls: type[_T]) -> type[_T]:
    """A dataclass that nobody changes. The type checker holds that, and not the class itself: to make an object of a
    frozen dataclass takes four times as long, and that was a quarter of a solve."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def operation(cls: type[_T]) -> type[_T]:
    """A record that is made by keyword, so that one more field shifts no other. The type checker holds that, and a test
    does where nobody checks types; only `Op.placed` goes by position, since every operation of a graph passes there."""
    return record(cls)


@record
class Buffer:
    """A block of one tier's memory, for part of a step or for the whole run."""

    index: int
    name: str
    tier: Tier
    nbytes: int
    role: Role
    """What it holds; `show` sums memory by it."""
    pool: str
    """Buffers of one pool follow each other in slots of one size; empty for a buffer that keeps its place for the whole
    run."""
    shared_by: int = -1
    """The layer whose activation checkpoints and delayed gradients share one block, because they are never alive
    together; -1 for a buffer that is neither."""
    offset: int = -1
    """Byte offset in the tier's arena (or store); -1 before assignment."""
    zone: int = -1
    """Byte offset of the bytes that the buffer shares with others: only buffers of one zone can overlap."""


@record
class Region:
    """A byte range of a buffer."""

    buffer: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@operation
class Op:
    """What every operation has. `stage` numbers the stages of a step from 0; `waits` are indices of earlier ops."""

    index: int
    stage: int
    waits: tuple[int, ...]

    @property
    def resource(self) -> Resource:
        raise AssertionError("abstract")

    @property
    def reads(self) -> tuple[Region, ...]:
        raise AssertionError("abstract")

    @property
    def writes(self) -> tuple[Region, ...]:
        raise AssertionError("abstract")

    def placed(self, index: int, waits: tuple[int, ...]) -> Self:
        """The same operation there; `dataclasses.replace` takes three times as long, and every graph needs its own."""
        kind: Any = type(self)
        made: Self = kind(index, self.stage, waits, *_beyond_op(kind)(self))
        return made


@cache
def _beyond_op(kind: type[Op]) -> Callable[[Op], tuple[Any, ...]]:
    """What a kind of operation has besides what every operation has, in order."""
    own = (each for each in reversed(kind.__mro__) if issubclass(each, Op) and each is not Op)
    return attrgetter(*(name for each in own for name in vars(each)["__slots__"]))


@operation
class Transfer(Op):
    """read, write, h2d or d2h: copies `source` to `target`, equally long.

    What it moves is of a state, or is the input of a layer for one micro-batch, or is the gradient of that input: the
    fields that do not apply are None.
    """

    kind: Resource
    source: Region
    target: Region
    content: Content
    state: int | None = None
    state_name: str = ""
    """For people; empty when it is of no state."""
    layer: int | None = None
    micro_batch: int | None = None
    final_gradient: bool = False
    """True when it takes a whole step's gradient off the device, the moment to see its norm."""
    summed_by_update: bool = False
    """True for optimizer states on their way from ssd to an update, or back: the update has their bytes in a cache,
    before and after, so it takes their checksums, and the transfer none."""

    @property
    def resource(self) -> Resource:
        return self.kind

    @property
    def reads(self) -> tuple[Region, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[Region, ...]:
        return (self.target,)

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    def __str__(self) -> str:
        return f"{self.kind} {title_of(self.content, self.state_name)}"


Side = Literal["", "plus", "minus"]
"""Of a zeroth-order step: which of the two losses along a direction something is for."""


@operation
class Forward(Op):
    """One layer's forward of one micro-batch; in evaluation and in a zeroth-order step the head's, which yields the
    loss. By a `rung` it also leaves in `saved` what its backward then need not recompute. In a zeroth-order step its
    weights are those on one side of one direction."""

    layer: int
    layer_class: str
    micro_batch: int
    weights: tuple[Region, ...]
    hidden: Region | None
    out: Region | None
    rung: str = ""
    saved: Region | None = None
    direction: int = 0
    side: Side = ""
    by_rows: bool = False
    """Of its table of token embeddings the weights have the rows of the step's tokens alone."""

    @property
    def resource(self) -> Resource:
        return "compute"

    @property
    def reads(self) -> tuple[Region, ...]:
        return self.weights + ((self.hidden,) if self.hidden else ())

    @property
    def writes(self) -> tuple[Region, ...]:
        return tuple(region for region in (self.out, self.saved) if region)

    def __str__(self) -> str:
        return f"forward {self.layer_class} {self.layer}, micro-batch {self.micro_batch}"


@operation
class Backward(Op):
    """One layer's backward of one micro-batch, recomputing of its forward all that is not in `saved`. Adds to
    `gradients`, one for each of the layer's states that are trained, zeroing those in `fresh` first. The lowest one has
    no `in_gradient`."""

    layer: int
    layer_class: str
    micro_batch: int
    weights: tuple[Region, ...]
    hidden: Region | None
    out_gradient: Region | None
    in_gradient: Region | None
    gradients: tuple[Region, ...]
    fresh: tuple[bool, ...]
    rung: str = ""
    saved: Region | None = None

    @property
    def resource(self) -> Resource:
        return "compute"

    @property
    def reads(self) -> tuple[Region, ...]:
        given = tuple(region for region in (self.hidden, self.out_gradient, self.saved) if region)
        kept = tuple(region for region, fresh in zip(self.gradients, self.fresh, strict=True) if not fresh)
        return self.weights + given + kept

    @property
    def writes(self) -> tuple[Region, ...]:
        return self.gradients + ((self.in_gradient,) if self.in_gradient else ())

    def __str__(self) -> str:
        return f"backward {self.layer_class} {self.layer}, micro-batch {self.micro_batch}"


@operation
class Perturb(Op):
    """The zeroth-order pass over a state's parameters where compute finds them (MeZO; ZO-Offloading section 2.3): with
    `updates` the updates that are pending, in place, then the copies that are wanted: at plus and at minus eps along a
    direction, or of the parameters as they are, which are masters then."""

    state: int
    state_name: str
    direction: int
    updates: bool
    lags: bool
    """The parameters go back to where they live only in some steps, so that the updates since the last of these are
    pending; else only those of the step before."""
    waiting: float
    """How many updates that are on average; 0 without `updates`."""
    start: int
    stop: int
    """The state's elements that it is over; with `by_rows` those of its rows side by side."""
    parameters: Region
    plus: Region | None
    minus: Region | None
    masters: bool
    """`parameters` are fp32 masters of what compute takes."""
    rounded: Region | None = None
    """The copy of masters as they are, in the format that compute takes."""
    by_rows: bool = False
    """Over the rows of a table that the step's tokens name."""
    on_host: bool = False
    """Host makes it, of parameters that live there: updates alone."""

    @property
    def resource(self) -> Resource:
        return "cpu" if self.on_host else "compute"

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def copies(self) -> int:
        """How many perturbed ones it makes."""
        return (self.plus is not None) + (self.minus is not None)

    @property
    def reads(self) -> tuple[Region, ...]:
        return (self.parameters,)

    @property
    def writes(self) -> tuple[Region, ...]:
        copies = tuple(region for region in (self.plus, self.minus, self.rounded) if region)
        return ((self.parameters,) if self.updates else ()) + copies

    def __str__(self) -> str:
        if self.rounded:
            return f"round {self.state_name}"
        return f"{'perturb' if self.plus or self.minus else 'update'} {self.state_name}, direction {self.direction}"


@operation
class TakeRows(Op):
    """Packs the rows of a table on host that the step's tokens name, in rising order, side by side on host; places
    behind them get any row again."""

    state: int
    state_name: str
    table: Region
    rows: Region

    @property
    def resource(self) -> Resource:
        return "cpu"

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    @property
    def reads(self) -> tuple[Region, ...]:
        return (self.table,)

    @property
    def writes(self) -> tuple[Region, ...]:
        return (self.rows,)

    def __str__(self) -> str:
        return f"take rows of {self.state_name}"


@operation
class Update(Op):
    """The fused optimizer on elements [start, stop) of a state.

    `optimizer` holds masters, first and second moments one after the other in their `formats`; `gradient` is fp32;
    `parameters` takes the low-precision copy, and has the one before where `formats.takes_copy`. `delayed`: the
    gradient is the previous step's. `on_device`: all of these lie on the device, which makes the update itself.
    """

    state: int
    start: int
    stop: int
    delayed: bool
    optimizer: Region
    gradient: Region
    parameters: Region
    formats: OptimizerFormats
    final_gradient: bool = False
    """True when nobody has looked at a whole step's gradient before, the moment to see its norm."""
    matrices: tuple[Matrix, ...] = ()
    """Muon updates these, all of the range, each whole; of others AdamW updates every element."""
    workspace: Region | None = None
    """What Muon works in."""
    stored: Region | None = None
    """Where on ssd `optimizer` came from and goes back to, summed by the update; None when it stays in memory."""
    on_device: bool = False

    @property
    def resource(self) -> Resource:
        return "compute" if self.on_device else "cpu"

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def reads(self) -> tuple[Region, ...]:
        copy = (self.parameters,) if self.formats.takes_copy else ()
        return (self.optimizer, self.gradient, *copy)

    @property
    def writes(self) -> tuple[Region, ...]:
        return (self.optimizer, self.parameters, *((self.workspace,) if self.workspace else ()))

    def __str__(self) -> str:
        return f"{'delayed ' if self.delayed else ''}update state {self.state} [{self.start}, {self.stop})"


@operation
class SumSquares(Op):
    """Looks at a whole step's gradient of a state that is updated on the device: whether it is finite, and its sum of
    squares. Of a gradient that leaves the device, or is updated on host, the copy or the update does that."""

    state: int
    state_name: str
    gradient: Region
    """fp32, the whole state's."""

    @property
    def resource(self) -> Resource:
        return "compute"

    @property
    def elements(self) -> int:
        return self.gradient.nbytes // GRADIENT_BYTES

    @property
    def reads(self) -> tuple[Region, ...]:
        return (self.gradient,)

    @property
    def writes(self) -> tuple[Region, ...]:
        return ()

    def __str__(self) -> str:
        return f"norm of the gradient of {self.state_name}"


@record
class Home:
    """Where elements [start, stop) of a state live between uses: the unit of an update, of loading and of export.

    One of a frozen state has parameters only, which no operation writes; one of a zeroth-order plan has parameters
    only, which are updated where they are used.
    """

    state: int
    start: int
    stop: int
    delayed: bool
    optimizer: Region | None
    """Master, first moment, second moment, as `parts` says where. None: frozen, or trained without."""
    parameters: Region
    """On host, on ssd, or on the device, where the whole state lies side by side."""
    gradient: Region | None
    """Where a delayed gradient waits for the next step; None for the prompt part."""
    formats: OptimizerFormats
    """Of what `optimizer` holds."""
    trained: bool = True
    matrices: tuple[Matrix, ...] = ()
    """What it consists of, where Muon updates it."""

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def parts(self) -> tuple[Part, ...]:
        """What lies where in `optimizer`, in bytes from its start."""
        return self.formats.parts(self.elements)

    @property
    def durable(self) -> tuple[Region, ...]:
        """What all else of a trained home follows from: its optimizer states, and its parameters where no master has
        all of their bits. Nothing of a frozen home, which is in the model's own files."""
        if self.optimizer is None:
            return ()
        return (self.optimizer, self.parameters) if self.formats.takes_copy else (self.optimizer,)


@record
class Graph:
    """One run through some operations, in an order that is also valid to execute one by one."""

    name: str
    ops: tuple[Op, ...]
    stages: int


GraphName = Literal["first", "steady", "unwritten", "flush", "evaluate"]


@dataclass(frozen=True)
class Schedule:
    """Everything that a plan expands into. A graph is made when it is first asked for: planning needs only `steady`."""

    buffers: tuple[Buffer, ...]
    arenas: dict[Tier, int]
    """Tier -> bytes; for ssd, the size of the store."""
    homes: tuple[Home, ...]
    make_graph: Callable[[GraphName], Graph]
    emitted: Callable[[GraphName], Sequence[Op]]
    """The operations of a graph in their order, before their waits are known: enough to count what they move."""

    @cached_property
    def first(self) -> Graph:
        """A step with no delayed updates pending: the first one, or one after `flush`."""
        return self.make_graph("first")

    @cached_property
    def steady(self) -> Graph:
        """A step that finishes the previous step's delayed updates in its forward."""
        return self.make_graph("steady")

    @cached_property
    def unwritten(self) -> Graph:
        """A zeroth-order step that leaves parameters unwritten where they live (`ZerothOrder.written_every`). Other
        plans run none."""
        return self.make_graph("unwritten")

    @cached_property
    def flush(self) -> Graph:
        """Only the pending delayed updates. After it, parameters are those of the last step."""
        return self.make_graph("flush")

    @cached_property
    def evaluate(self) -> Graph:
        """Forward of all layers and the loss; nothing may be pending."""
        return self.make_graph("evaluate")

    def traffic(self, name: GraphName) -> dict[Resource, int]:
        """Bytes moved by each of read, write, h2d and d2h in one run of a graph."""
        total: dict[Resource, int] = {"read": 0, "write": 0, "h2d": 0, "d2h": 0}
        for op in self.emitted(name):
            if isinstance(op, Transfer):
                total[op.kind] += op.nbytes
        return total
