"""A disk of the tests' own: files in memory, a log of what was written and flushed, and what a crash would leave."""

import ctypes
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssdplan import native
from ssdplan.executor.store.volumes import Volume, open_volume

SECTOR = 512
Segments = Sequence[tuple[int, int, int, int]]


@dataclass(frozen=True)
class Write:
    """Bytes that went to a file at once; durable after the file's next flush, in any part before."""

    file: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Flush:
    file: int


class Finished:
    """A request that has ended."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def wait(self) -> int:
        return self._nbytes


class SimulatedDisk:
    """What the store needs of an engine, over bytes in memory; every write and flush is logged."""

    description = "simulated"

    def __init__(self, images: Sequence[bytes]) -> None:
        self.images = [bytearray(image) for image in images]
        self.log: list[Write | Flush] = []

    def volumes(self) -> list[Volume]:
        """As `open_volume` finds them, by number for a name."""
        return [open_volume(self, Path(str(number))) for number in range(len(self.images))]

    def open(self, path: str, *, create_bytes: int | None = None, read_only: bool = False) -> int:
        assert create_bytes is None, "volumes are made with the disk"
        return int(path)

    def size(self, file: int) -> int:
        return len(self.images[file])

    def read(self, segments: Segments) -> Finished:
        for file, offset, address, nbytes in segments:
            assert offset + nbytes <= len(self.images[file])
            part = (ctypes.c_char * nbytes).from_buffer(self.images[file], offset)
            ctypes.memmove(address, part, nbytes)
            del part
        return Finished(sum(segment[3] for segment in segments))

    def write(self, segments: Segments) -> Finished:
        for file, offset, address, nbytes in segments:
            assert offset + nbytes <= len(self.images[file])
            data = ctypes.string_at(address, nbytes)
            self.images[file][offset : offset + nbytes] = data
            self.log.append(Write(file, offset, data))
        return Finished(sum(segment[3] for segment in segments))

    def read_summed(self, ranges: Sequence[Segments]) -> list[int]:
        return [self._summed(self.read, segments) for segments in ranges]

    def write_summed(self, ranges: Sequence[Segments]) -> list[int]:
        return [self._summed(self.write, segments) for segments in ranges]

    @staticmethod
    def _summed(move: Callable[[Segments], Finished], segments: Segments) -> int:
        move(segments)
        data = b"".join(ctypes.string_at(address, nbytes) for _, _, address, nbytes in segments)
        return native.checksum(ctypes.cast(data, ctypes.c_void_p).value or 0, len(data))

    def flush(self, file: int) -> None:
        self.log.append(Flush(file))

    def register(self, address: int, nbytes: int) -> str:
        return "nothing to register"

    def unregister(self, address: int) -> None:
        pass

    def close_file(self, file: int) -> None:
        pass

    def close(self) -> None:
        pass


def crashes(
    images: Sequence[bytes], log: Sequence[Write | Flush], seed: int, variants: int
) -> Iterator[tuple[int, list[bytes]]]:
    """(events of `log` that had happened, images after the crash), for every prefix of the log.

    What was flushed is there. Of each write since its file's last flush there is all, nothing, or some of its sectors;
    which, differs from variant to variant: nothing of any, all of each, each one alone torn or lost, then at random.
    """
    rng = random.Random(seed)
    durable = [bytearray(image) for image in images]
    waiting: list[Write] = []
    for count in range(len(log) + 1):
        if count:
            event = log[count - 1]
            if isinstance(event, Flush):
                for write in waiting:
                    if write.file == event.file:
                        durable[write.file][write.offset : write.offset + len(write.data)] = write.data
                waiting = [write for write in waiting if write.file != event.file]
            else:
                waiting.append(event)
        fates: list[tuple[str, ...]] = [("none",) * len(waiting), ("all",) * len(waiting)]
        for place, fate in itertools.product(range(len(waiting)), ("none", "torn")):
            fates.append(tuple(fate if place == other else "all" for other in range(len(waiting))))
        while len(fates) < variants and waiting:
            fates.append(tuple(rng.choice(("none", "all", "torn")) for _ in waiting))
        for fate in dict.fromkeys(fates[: max(variants, 2)]):
            crashed = [bytearray(image) for image in durable]
            # Writes that no flush divides may reach the medium in any order: where two meet, either may be the last.
            for write, part in rng.sample(list(zip(waiting, fate, strict=True)), len(waiting)):
                _apply(crashed[write.file], write, part, rng)
            yield count, [bytes(image) for image in crashed]


def _apply(image: bytearray, write: Write, part: str, rng: random.Random) -> None:
    if part == "none":
        return
    for start in range(0, len(write.data), SECTOR):
        if part == "all" or rng.random() < 0.5:
            image[write.offset + start : write.offset + start + SECTOR] = write.data[start : start + SECTOR]
