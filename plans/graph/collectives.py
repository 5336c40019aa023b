"""Collectives: the operations in which several ranks take part, and what each rank does with what it got.

Owns them beside the vocabulary of `ops.py` (GreedySnake on several GPUs; docs/architecture.md, "Several ranks"). Every
rank has the same collectives in the same order; `waits.py` has each wait for the one before it, so that no two ranks
run them in another order.
"""

from .ops import Op, Region, Resource, operation


@operation
class Collective(Op):
    """What all have: every rank sends and receives the others' parts of what it writes."""

    state: int
    state_name: str
    ranks: int

    @property
    def resource(self) -> Resource:
        return "network"

    @property
    def nbytes(self) -> int:
        """That a rank receives, and sends."""
        (written,) = self.writes
        return written.nbytes // self.ranks * (self.ranks - 1)


@operation
class Gather(Collective):
    """An all-gather: every rank's share of a state's parameters to every rank, side by side in rank order."""

    shares: tuple[Region, ...]
    """What this rank has of it, in the order of elements; none where its share is padding."""
    whole: Region
    """Where all shares come to lie; this rank's may lie there already."""
    own: tuple[int, int]
    """[start, stop) in bytes of `whole` that `shares` are."""

    @property
    def reads(self) -> tuple[Region, ...]:
        return self.shares

    @property
    def writes(self) -> tuple[Region, ...]:
        return (self.whole,)

    def __str__(self) -> str:
        return f"gather {self.state_name}"


@operation
class Exchange(Collective):
    """An all-to-all of a state's gradients, fp32: to each rank, from every rank, what that has summed for its share."""

    gradient: Region
    """This rank's sum over its micro-batches, of the whole state. Behind it in its buffer is the last ranks' padding,
    which goes with it and is whatever it is."""
    received: Region
    """The ranks' sums for this rank's share, side by side in rank order."""

    @property
    def sent(self) -> Region:
        """The gradient and its padding."""
        return Region(self.gradient.buffer, 0, self.received.nbytes)

    @property
    def reads(self) -> tuple[Region, ...]:
        return (self.gradient,)

    @property
    def writes(self) -> tuple[Region, ...]:
        return (self.received,)

    def __str__(self) -> str:
        return f"exchange gradient of {self.state_name}"


@operation
class AddShares(Op):
    """Adds what `Exchange` received, one rank after the other in rank order, in fp32: bits depend on the number of
    ranks alone, and on no library's algorithm. It runs behind its exchange and not among what compute does, which would
    wait for the exchange there."""

    state: int
    state_name: str
    received: Region
    total: Region
    """The gradient of this rank's share: where the first rank's part was, or where it waits for the next step."""
    ranks: int

    @property
    def resource(self) -> Resource:
        return "network"

    @property
    def reads(self) -> tuple[Region, ...]:
        return (self.received,)

    @property
    def writes(self) -> tuple[Region, ...]:
        return (self.total,)

    def __str__(self) -> str:
        return f"add gradients of {self.state_name}"
