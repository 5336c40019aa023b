"""After a crash at any moment the store opens at the last committed generation, or at the one being committed.

Every prefix of what a store writes and flushes is replayed, with writes between flushes lost, torn or reordered. The
oracle is a plain dictionary of what each generation held. SSDPLAN_CRASH_HISTORIES raises the number of stores whose
every prefix is tried (docs/store-format.md says how many states that makes).
"""

import os
import random
from dataclasses import dataclass, field

import pytest

from ssdplan.executor.store import Record, Store
from ssdplan.executor.store.generations import Generations
from ssdplan.executor.store.layout import Layout
from ssdplan.executor.store.store import required_bytes
from ssdplan.executor.store.striping import Striping
from ssdplan.executor.store.volumes import Staging
from ssdplan.plans.documents.stripe_shares import deal
from ssdplan.plans.errors import StoreError
from tests.executor.store.disks import Flush, SimulatedDisk, Write, crashes
from tests.extent import short_or_full

PAGE = 4096
TABLE_BYTES = 2 * PAGE
HISTORIES = int(os.environ.get("SSDPLAN_CRASH_HISTORIES", short_or_full("1", "3")))
VARIANTS = 16
"""Of each prefix: what became of the writes that no flush had made durable."""
RECORDS = (
    Record("optimizer/a", 0, 3 * PAGE, True, (PAGE,)),
    Record("checkpoint", 3 * PAGE, PAGE, False),
    Record("optimizer/b", 4 * PAGE, 2 * PAGE, True),
)
DURABLE = ((0, PAGE), (PAGE, 2 * PAGE), (4 * PAGE, 2 * PAGE))
"""(offset, bytes) of what generations hold."""


@dataclass
class History:
    """What was done to a disk, and what a crash may lead back to."""

    disk: SimulatedDisk
    images: list[bytes]
    contents: list[dict[int, bytes]] = field(default_factory=list)
    """Generation -> what it holds, by offset."""
    began: list[int] = field(default_factory=list)
    """Generation -> events of the log before its commit began."""
    ended: list[int] = field(default_factory=list)


def put(store: Store, offset: int, data: bytes) -> None:
    memory = Staging(len(data))
    memory.put(data)
    store.write(offset, len(data), memory.address)


def get(store: Store, offset: int, nbytes: int) -> bytes:
    memory = Staging(nbytes)
    store.read(offset, nbytes, memory.address)
    return memory.get(0, nbytes)


def blank_disk(volumes: int, keep: int) -> tuple[SimulatedDisk, Layout, Striping]:
    layout = Layout.of(RECORDS, durable=True, keep=keep)
    striping = Striping(deal([1.0] * volumes), PAGE)
    return SimulatedDisk([bytes(size) for size in required_bytes(layout, striping, TABLE_BYTES)]), layout, striping


def formatted(volumes: int, keep: int) -> tuple[SimulatedDisk, Store]:
    disk, layout, striping = blank_disk(volumes, keep)
    store = Store.format(disk, disk.volumes(), layout, striping, TABLE_BYTES, "ab" * 32, durable=True, keep=keep)
    return disk, store


def trained(volumes: int, generations: int, seed: int, skip: float, keep: int = 2) -> History:
    """A store that is written and committed again and again, as training does: each time most extents, some twice."""
    rng = random.Random(seed)
    disk, store = formatted(volumes, keep)
    history = History(disk, [bytes(image) for image in disk.images], [{}], [0], [0])
    disk.log.clear()
    content: dict[int, bytes] = {}
    for generation in range(1, generations + 1):
        for offset, nbytes in (*DURABLE, *rng.sample(DURABLE, 1), (3 * PAGE, PAGE)):
            if rng.random() < skip and offset in content:
                continue
            data = rng.randbytes(nbytes)
            put(store, offset, data)
            if offset != 3 * PAGE:
                content[offset] = data
        history.began.append(len(disk.log))
        store.commit({"step": generation})
        history.ended.append(len(disk.log))
        history.contents.append(dict(content))
    return history


def verify(history: History, happened: int, images: list[bytes]) -> tuple[SimulatedDisk, Store]:
    """The store opens, at a generation that it may be at, with every byte of it."""
    disk = SimulatedDisk(images)
    store = Store.recover(disk, disk.volumes(), RECORDS)
    last = max(generation for generation, end in enumerate(history.ended) if end <= happened)
    possible = {last}
    if last + 1 < len(history.began) and happened > history.began[last + 1]:
        possible.add(last + 1)
    assert store.generation in possible, f"opened at {store.generation}, not at one of {possible}"
    assert store.metadata == ({"step": store.generation} if store.generation else {})
    assert {offset: get(store, offset, nbytes) for offset, nbytes in DURABLE if offset in _held(history, store)} == (
        _held(history, store)
    )
    return disk, store


def _held(history: History, store: Store) -> dict[int, bytes]:
    return history.contents[store.generation]


def try_all(history: History, seed: int, variants: int) -> tuple[int, set[int]]:
    """Replay every crash; returns how many and the generations that the store opened at."""
    states = 0
    reached = set()
    for happened, images in crashes(history.images, history.disk.log, seed, variants):
        reached.add(verify(history, happened, images)[1].generation)
        states += 1
    return states, reached


@pytest.mark.parametrize(
    ("volumes", "generations", "skip", "keep"), [(1, 12, 0.0, 2), (2, 9, 0.3, 2), (3, 6, 0.3, 2), (2, 9, 0.3, 1)]
)
def test_every_crash_leaves_a_store_that_opens(volumes, generations, skip, keep):
    total = 0
    for seed in range(HISTORIES):
        history = trained(volumes, generations, seed=100 * volumes + seed, skip=skip, keep=keep)
        states, reached = try_all(history, seed, VARIANTS)
        assert reached == set(range(generations + 1))
        total += states
    print(f"{total} crashes of {HISTORIES} stores on {volumes} volume(s) that keep {keep} generation(s)")
    assert total > 900 * HISTORIES


@pytest.mark.parametrize(("volumes", "keep"), [(1, 2), (2, 2), (2, 1)])
def test_a_crash_while_a_crashed_store_is_mended_or_goes_on(volumes, keep):
    """Recovery itself writes; and what it recovered is trained further. Crashes within are crashes like any other."""
    rng = random.Random(volumes)
    history = trained(volumes, 3, seed=10 + volumes, skip=0.2, keep=keep)
    first = list(crashes(history.images, history.disk.log, volumes, 6))
    states = 0
    for happened, images in rng.sample(first, 60):
        disk, store = verify(history, happened, images)
        generation, held = store.generation, dict(history.contents[store.generation])
        again = History(disk, images, [{}] * generation + [held], [0] * (generation + 1), [0] * (generation + 1))
        for offset, nbytes in DURABLE:
            data = rng.randbytes(nbytes)
            put(store, offset, data)
            held = {**held, offset: data}
        again.began.append(len(disk.log))
        store.commit({"step": generation + 1})
        again.ended.append(len(disk.log))
        again.contents.append(held)
        tried, reached = try_all(again, happened, 6)
        assert reached == {generation, generation + 1}
        states += tried
    print(f"{states} crashes after a crash, {volumes} volume(s) that keep {keep} generation(s)")
    assert states > 1500


# The simulator is worth what it finds: each of these breaks one rule of the protocol, and must be noticed.


def _unflushed(history: History, which: int) -> None:
    """Take one kind of flush out of every commit: 0 the flush of data and tables, 1 that of the superblocks."""
    for began, ended in zip(history.began[1:], history.ended[1:], strict=True):
        flushes = [place for place in range(began, ended) if isinstance(history.disk.log[place], Flush)]
        volumes = len(flushes) // 2
        for place in flushes[which * volumes : (which + 1) * volumes]:
            history.disk.log[place] = Write(0, 0, b"")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("volumes", [1, 2])
def test_a_commit_without_one_of_its_flushes_is_found_out(which, volumes):
    history = trained(volumes, 6, seed=5, skip=0.0)
    _unflushed(history, which)
    with pytest.raises((AssertionError, StoreError)):
        try_all(history, 3, 40)


@pytest.mark.parametrize("volumes", [1, 2])
def test_overwriting_what_a_generation_holds_is_found_out(volumes, monkeypatch):
    monkeypatch.setattr(Generations, "free_place", lambda generations, index: 0)
    history = trained(volumes, 4, seed=5, skip=0.0)
    with pytest.raises((AssertionError, StoreError)):
        try_all(history, 3, 20)


def test_superblocks_that_overtake_the_data_are_found_out():
    """As if the superblock were written before the flush."""
    history = trained(2, 4, seed=5, skip=0.0)
    log = history.disk.log
    for began, ended in zip(history.began[1:], history.ended[1:], strict=True):
        commit = log[began:ended]
        log[began:ended] = [event for event in commit if isinstance(event, Write)] + [
            event for event in commit if isinstance(event, Flush)
        ]
    with pytest.raises((AssertionError, StoreError)):
        try_all(history, 3, 40)
