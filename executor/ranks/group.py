"""The group of ranks: collectives over torch.distributed, and errors that name who failed at what.

Owns the process group of a run (GreedySnake on several GPUs; PyAO on Ethernet), its two collectives and the words that
ranks tell each other between steps. Which collective comes when, the graph says; what a rank owns, its schedule.
Nothing that is sent is pickled: tensors, and bytes of a length that all know.
"""

import contextlib
import os
import struct
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ssdplan.plans.errors import RankError, first_line

from .place import PATIENCE_SECONDS, Place

WORDS_BYTES = 1024
"""Of what a rank tells the others at once."""


MOST_PIECE_BYTES = 4 << 30
"""Of states that a rank sends at once."""


class Ranks(Protocol):
    """The ranks that train together, as one of them has them."""

    rank: int
    size: int

    def gather(self, whole: torch.Tensor) -> None:
        """Every rank's share of `whole`, uint8, to every rank: equal parts in rank order, of which this rank's is
        there."""

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """uint8, equally long: part j of `sent` to rank j, whose part for this rank becomes part j of `received`."""

    def tell(self, words: bytes) -> list[bytes]:
        """At most WORDS_BYTES - 8 of every rank, in rank order. All ranks say something at the same time."""

    def from_each(self, pieces: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        """uint8, on host: every rank's pieces, those of rank 0 first, on every rank. Each is gone when the next is
        asked for. All ranks take them to the end at the same time."""


class Alone:
    """One rank, which has nobody to tell anything."""

    rank, size = 0, 1

    def gather(self, whole: torch.Tensor) -> None:
        raise AssertionError("a collective of one rank")

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        raise AssertionError("a collective of one rank")

    def tell(self, words: bytes) -> list[bytes]:
        return [words]

    def from_each(self, pieces: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        yield from pieces


ALONE = Alone()


class Group:
    """Ranks over a process group: one for the graph's collectives, and one for words, so that neither waits for the
    other's turn."""

    def __init__(self, rank: int, size: int, backend: str, patience: float = PATIENCE_SECONDS) -> None:
        self.rank, self.size, self._patience = rank, size, patience
        self._peers = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
        """(whom to send to, whom to receive from) in turn, so that no two ranks send to one at once."""
        self._pairwise = backend == "gloo"
        """gloo's collectives are half as fast as the same messages one by one."""
        limit = timedelta(seconds=patience)
        self._data: Any = dist.new_group(backend=backend, timeout=limit)
        self._words: Any = dist.new_group(backend="gloo", timeout=limit)

    def gather(self, whole: torch.Tensor) -> None:
        parts = whole.view(self.size, -1)
        with self._naming("gathering parameters"):
            if self._pairwise:
                self._swap(lambda to: parts[self.rank], lambda source: parts[source])
            else:
                dist.all_gather_into_tensor(whole, parts[self.rank], group=self._data)

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        mine, theirs = received.view(self.size, -1), sent.view(self.size, -1)
        with self._naming("exchanging gradients"):
            if self._pairwise:
                mine[self.rank].copy_(theirs[self.rank])
                self._swap(lambda to: theirs[to], lambda source: mine[source])
            else:
                dist.all_to_all_single(received, sent, group=self._data)

    def _swap(self, part_for: Any, place_of: Any) -> None:
        works: list[Any] = []
        for to, source in self._peers:
            works.append(dist.isend(part_for(to), to, group=self._data))
            works.append(dist.irecv(place_of(source), source, group=self._data))
        for work in works:
            work.wait()

    def tell(self, words: bytes) -> list[bytes]:
        assert len(words) <= WORDS_BYTES - 8
        mine = torch.zeros(WORDS_BYTES, dtype=torch.uint8)
        framed = struct.pack("<Q", len(words)) + words
        mine[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        with self._naming("telling the others how a step ended"):
            dist.all_gather(every, mine, group=self._words)
        return [_unframed(each.numpy().tobytes()) for each in every]

    def from_each(self, pieces: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        for source in range(self.size):
            length = torch.zeros(1, dtype=torch.int64)
            mine = iter(pieces) if source == self.rank else None
            while True:
                piece = next(mine, None) if mine is not None else None
                length[0] = 0 if piece is None else piece.numel()
                with self._naming(f"taking the states of rank {source}"):
                    dist.broadcast(length, source, group=self._words)
                    if not (nbytes := int(length)):
                        break
                    if piece is None:
                        piece = torch.empty(_believed(nbytes), dtype=torch.uint8)
                    dist.broadcast(piece, source, group=self._words)
                yield piece

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch has no narrower one
            raise RankError(
                f"rank {self.rank}, {what}: another rank has ended, or has not answered for {self._patience:g} s "
                f"({first_line(error)}); see what the other ranks say"
            ) from error


def _believed(nbytes: int) -> int:
    if not 0 < nbytes <= MOST_PIECE_BYTES:
        raise RankError(f"another rank sends {nbytes} bytes at once; are all of one version?")
    return nbytes


def _unframed(framed: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", framed)
    if length > WORDS_BYTES - 8:
        raise RankError(
            f"another rank tells {length} bytes where {WORDS_BYTES - 8} are the most; are all of one version?"
        )
    return framed[8 : 8 + length]


@contextlib.contextmanager
def joined(place: Place | None, device: str, patience: float = PATIENCE_SECONDS) -> Iterator[Ranks]:
    """The ranks that a launcher started, as long as it lasts; without one, this process alone. `device`: "cuda" takes
    NCCL, all else gloo. Raises RankError where the others do not come."""
    if place is None:
        yield ALONE
        return
    backend = "nccl" if device == "cuda" else "gloo"
    try:
        dist.init_process_group(
            "gloo", rank=place.rank, world_size=place.size, timeout=timedelta(seconds=patience), init_method="env://"
        )
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RankError(
            f"rank {place.rank} of {place.size} does not find the others at {where}: {first_line(error)}; start all of "
            "them by torchrun"
        ) from error
    try:
        yield Group(place.rank, place.size, backend, patience)
    finally:
        dist.destroy_process_group()


def agreed(ranks: Ranks, what: Mapping[str, str]) -> None:
    """Raise RankError, on every rank, where one has another value than rank 0 of something that must be the same.

    `what`: a name for people -> a value's text, at most a hash of it; the same names on every rank."""
    for name, value in what.items():
        told = ranks.tell(value.encode()[: WORDS_BYTES - 8])
        for rank, other in enumerate(told):
            if other != told[0]:
                raise RankError(
                    f"{name} of rank {rank} is {other.decode(errors='replace')}, and that of rank 0 is "
                    f"{told[0].decode(errors='replace')}; all ranks need the same"
                )
