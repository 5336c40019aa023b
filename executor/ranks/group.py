"""The group of ranks: collectives over torch.distributed, and errors that name who failed at what.

Owns the process group of a run (GreedySnake on several GPUs; PyAO on Ethernet), its two collectives and the words that
ranks tell each other between steps. Which collective comes when, the graph says; what a rank owns, its schedule.
Nothing that is sent is pickled: tensors, and bytes of a length that all know.
"""

import contextlib
import hashlib
import os
import struct
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ssdplan.plans.errors import RankError, SsdplanError, UsageError, first_line

from .place import PATIENCE_SECONDS, Place

WORDS_BYTES = 1024
"""Of what a rank tells the others at once."""


MOST_PIECE_BYTES = 4 << 30
"""Of states that a rank sends at once."""


class Ranks(Protocol):
    """The ranks that train together, as one of them has them."""

    rank: int
    size: int

    def gather(self, whole: torch.Tensor, what: str = "gather") -> None:
        """Every rank's share of `whole`, uint8, to every rank: equal parts in rank order, of which this rank's is
        there. `what`: the operation, for errors."""

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, what: str = "exchange") -> None:
        """uint8, equally long: part j of `sent` to rank j, whose part for this rank becomes part j of `received`."""

    def tell(self, words: bytes) -> list[bytes]:
        """At most WORDS_BYTES - 8 of every rank, in rank order. All ranks say something at the same time."""

    def from_each(self, pieces: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        """uint8, on host: every rank's pieces, those of rank 0 first, on every rank. Each is gone when the next is
        asked for. All ranks take them to the end at the same time."""


class Alone:
    """One rank, which has nobody to tell anything."""

    rank, size = 0, 1

    def gather(self, whole: torch.Tensor, what: str = "gather") -> None:
        raise AssertionError("a collective of one rank")

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, what: str = "exchange") -> None:
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

    def gather(self, whole: torch.Tensor, what: str = "gather") -> None:
        parts = whole.view(self.size, -1)
        if self._pairwise:
            self._swap(what, self._data, lambda to: parts[self.rank], lambda source: parts[source])
        else:
            with self._naming(what):
                dist.all_gather_into_tensor(whole, parts[self.rank], group=self._data)

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, what: str = "exchange") -> None:
        mine, theirs = received.view(self.size, -1), sent.view(self.size, -1)
        if self._pairwise:
            mine[self.rank].copy_(theirs[self.rank])
            self._swap(what, self._data, lambda to: theirs[to], lambda source: mine[source])
        else:
            with self._naming(what):
                dist.all_to_all_single(received, sent, group=self._data)

    def _swap(self, what: str, group: Any, part_for: Any, place_of: Any) -> None:
        """Send each other rank its part, and receive its own; an error names the rank that it waited for.

        First say what this rank is ready to receive: gloo sends that word to the other rank behind what it is sending
        there, so a rank that sends first is sent nothing until all of that has arrived."""
        works: list[tuple[int, Any]] = []
        for _, source in self._peers:
            with self._naming(what, source):
                works.append((source, dist.irecv(place_of(source), source, group=group)))
        for to, _ in self._peers:
            with self._naming(what, to):
                works.append((to, dist.isend(part_for(to), to, group=group)))
        for other, work in works:
            with self._naming(what, other):
                work.wait()

    def tell(self, words: bytes) -> list[bytes]:
        assert len(words) <= WORDS_BYTES - 8
        every = torch.zeros(self.size, WORDS_BYTES, dtype=torch.uint8)
        framed = struct.pack("<Q", len(words)) + words
        every[self.rank, : len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        what = "telling the others how a step ended"
        self._swap(what, self._words, lambda to: every[self.rank], lambda source: every[source])
        return [_unframed(each.numpy().tobytes()) for each in every]

    def from_each(self, pieces: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        for source in range(self.size):
            length = torch.zeros(1, dtype=torch.int64)
            mine = iter(pieces) if source == self.rank else None
            while True:
                piece = next(mine, None) if mine is not None else None
                length[0] = 0 if piece is None else piece.numel()
                with self._naming(f"taking the states of rank {source}", source):
                    dist.broadcast(length, source, group=self._words)
                    if not (nbytes := int(length)):
                        break
                    if piece is None:
                        piece = torch.empty(_believed(nbytes), dtype=torch.uint8)
                    dist.broadcast(piece, source, group=self._words)
                yield piece

    @contextlib.contextmanager
    def _naming(self, what: str, other: int | None = None) -> Iterator[None]:
        """`other`: the rank that is waited for, where one is."""
        try:
            yield
        except RuntimeError as error:  # torch has no narrower one
            who, which = ("another rank", "the other ranks say")
            if other not in (None, self.rank):
                who, which = f"rank {other}", f"rank {other} says"
            lost = RankError(
                f"rank {self.rank}, {what}: {who} has ended, or has not answered for {self._patience:g} s "
                f"({_short(error)}); see what {which}"
            )
            lost.at = f"rank {self.rank}, {what},"
            raise lost from error


def _short(error: BaseException) -> str:
    """What gloo says, without the line of its own that it came from and without its advice."""
    said = first_line(error).partition("] ")
    return (said[2] or said[0]).partition(". This is")[0]


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
            "gloo",
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=patience),
            init_method=place.meeting,
        )
    except ValueError as error:  # what should be in the environment is not
        raise UsageError(
            f"rank {place.rank} of {place.size}: {_short(error)}; start all of them by torchrun"
        ) from error
    except RuntimeError as error:
        where, way = place.meeting.removeprefix("file://"), ""
        if place.launcher is None:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            way = "; start all of them by torchrun"
        raise RankError(
            f"rank {place.rank} of {place.size} does not find the others at {where}: {first_line(error)}{way}"
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


_TOGETHER_SECONDS = 2.0
"""For which a rank that fails waits to hear whether all fail alike."""
_LOOK_SECONDS = 0.02
"""Between two looks whether they do."""


@contextlib.contextmanager
def told_once(place: Place | None) -> Iterator[None]:
    """An error of ours that all ranks meet, as of a file that is not there, is told by rank 0 alone. They learn of it
    by the store of torchrun's agent, which outlives each of them; where there is none each tells its own."""
    try:
        yield
    except RankError:
        raise
    except SsdplanError as error:
        if place and _all_say(place, str(error).removeprefix(f"rank {place.rank}: ")) and place.rank:
            error.said = True
        raise


def _all_say(place: Place, text: str) -> bool:
    """Whether all ranks end with the same words, within a moment."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    keys = [f"ssdplan/{again}/{rank}" for rank in range(place.size)]
    moment = timedelta(seconds=_TOGETHER_SECONDS)
    try:
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*where, is_master=False, timeout=moment)
        store.set(keys[place.rank], hashlib.sha256(text.encode()).hexdigest())
        until = time.monotonic() + _TOGETHER_SECONDS
        while not store.check(keys):  # to wait would print a warning of torch's where they do not come
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK_SECONDS)
        return len({store.get(key) for key in keys}) == 1
    except (RuntimeError, ValueError, KeyError):  # others do not fail, or fail otherwise
        return False
