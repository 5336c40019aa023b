"""Emission: the list of operations of a step while it is being made, and the buffers that they name.

Owns what all verbs of a schedule share: a transfer, an operation and the steps it belongs to, a buffer by name. It
knows no layer and no order: `parameters.py`, `activations.py`, `compute.py` and `updates.py` are the verbs,
`vertical.py` and `horizontal.py` the orders in which they are said.
"""

from enum import Enum

from ..documents.plan import Decision
from ..documents.profile import Model
from ..graph.contents import Content, Role
from ..graph.ops import Home, Op, Region, Resource, Tier, Transfer
from .homes import Buffers, device_tier
from .shards import Shards

NOWHERE = -1
"""The index of an op that has none yet; `graph/waits.py` numbers them."""


class When(Enum):
    """Which steps an operation belongs to."""

    ALWAYS = "always"
    PENDING = "pending"
    """Only after a step that left delayed updates."""
    NOT_PENDING = "not pending"
    """Only after a step that left none."""
    WRITTEN = "written"
    """Only in a zeroth-order step that writes parameters."""
    UNWRITTEN = "unwritten"
    """Only in one that does not."""


class Emission:
    """Operations in an order in which they could run one by one."""

    def __init__(
        self,
        model: Model,
        decision: Decision,
        homes: tuple[Home, ...],
        buffers: Buffers,
        shards: Shards,
        *,
        prefix: str = "",
    ) -> None:
        self.shards = shards
        self.model, self.decision, self.homes, self.buffers = model, decision, homes, buffers
        self.parameter_bytes = tuple(decision.parameters_of(state).element_bytes for state in model.states)
        """Of each state, an element as it lives and moves."""
        self.copy_bytes = tuple(decision.computed_of(state).element_bytes for state in model.states)
        """The same of what compute takes."""
        self.unified = decision.unified_memory
        self.device: Tier = device_tier(decision)
        """Where compute finds what it works on, and leaves it."""
        self.stage = 0
        """The stage that the operations to come belong to."""
        self.ops: list[Op] = []
        self.whens: list[When] = []
        """Of each of `ops`."""
        self._prefix = prefix
        self._names = tuple(state.name for state in model.states)

    @property
    def stages(self) -> int:
        """How many stages there have been."""
        return self.stage + 1

    @property
    def leaves_at_once(self) -> bool:
        """Whether a layer's gradient leaves the device before the next layer runs backward."""
        return self.decision.overlap != "all"

    def passing(self, name: str, tier: Tier, nbytes: int, role: Role, pool: str) -> int:
        """The buffer of that name in this program, which shares slots with the others of its pool."""
        assert tier != "ssd"
        return self.buffers.get(self._prefix + name, tier, nbytes, role, pool)

    def tier(self, region: Region) -> Tier:
        return self.buffers.all[region.buffer].tier

    def name(self, state: int) -> str:
        return self._names[state]

    def move_state(
        self,
        kind: Resource,
        source: Region,
        target: Region,
        content: Content,
        state: int,
        when: When = When.ALWAYS,
        *,
        final_gradient: bool = False,
        summed_by_update: bool = False,
    ) -> None:
        """Copy something of a state from `source` to `target`, unless it is there."""
        if _is_there(source, target):
            return
        self.ops.append(
            Transfer(
                index=NOWHERE,
                stage=self.stage,
                waits=(),
                kind=kind,
                source=source,
                target=target,
                content=content,
                state=state,
                state_name=self._names[state],
                final_gradient=final_gradient,
                summed_by_update=summed_by_update,
            )
        )
        self.whens.append(when)

    def move_activation(
        self, kind: Resource, source: Region, target: Region, content: Content, *, layer: int, micro_batch: int
    ) -> None:
        """Copy a layer's input, or the gradient of that input, from `source` to `target`, unless it is there."""
        if _is_there(source, target):
            return
        self.emit(
            Transfer(
                index=NOWHERE,
                stage=self.stage,
                waits=(),
                kind=kind,
                source=source,
                target=target,
                content=content,
                layer=layer,
                micro_batch=micro_batch,
            )
        )

    def emit(self, op: Op, when: When = When.ALWAYS) -> None:
        self.ops.append(op)
        self.whens.append(when)


def _is_there(source: Region, target: Region) -> bool:
    """Whether there is nothing to copy: with unified memory, what compute wants often lies where it wants it."""
    assert source.stop - source.start == target.stop - target.start > 0
    return source.buffer == target.buffer and source.start == target.start


def parts(nbytes: int, most: int) -> list[tuple[int, int]]:
    """[0, nbytes) in ranges of `most` bytes, the last of what is left."""
    return [(start, min(start + most, nbytes)) for start in range(0, nbytes, most)]


def cut(region: Region, part: tuple[int, int]) -> Region:
    """The bytes [start, stop) of a region."""
    start, stop = part
    nbytes = region.stop - region.start
    assert 0 <= start < stop <= nbytes
    if stop - start == nbytes:
        return region
    return Region(region.buffer, region.start + start, region.start + stop)


def bytes_of(home: Home, each: int) -> tuple[int, int]:
    """Where a home's elements lie in a buffer of its whole state, `each` bytes an element."""
    return home.start * each, home.stop * each
