"""How ranks of this machine end together by torchrun's launcher, and which one error the user is told. Each rank is a
shell here."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext

from ssdplan.executor.ranks import place
from ssdplan.executor.ranks.launcher import clear_left, launch
from ssdplan.executor.ranks.place import Place, Told, told_to_launcher
from ssdplan.plans.errors import (
    DiskFullError,
    IoFailure,
    RankError,
    SsdplanError,
    StoppedWithSnapshot,
    UsageError,
)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LOST = "tells 9 'rank {0}, gather tied: rank {1} has ended' 'rank {0}, gather tied,'; exit 9"
WAITS = "while :; do sleep 0.05; done"
THERE = "echo > up; "
AFTER = "cat up; "
"""When the other is there."""


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Launches a rank for each of the scripts, in which `tells CODE MESSAGE [AT]` tells the launcher of an error."""
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "GLOO_SOCKET_IFNAME", "SSDPLAN_LAUNCHED"):
        monkeypatch.setenv(name, "1")  # to be put back as it was
        monkeypatch.delenv(name)
    os.mkfifo("up")

    def launched(*scripts: str) -> int:
        rank = tmp_path / "rank"
        cases = "\n".join(f"{number}) {script};;" for number, script in enumerate(scripts))
        word = """'{"exit_code": %s, "message": "%s", "at": "%s"}' "$1" "$2" "$3" > "$SSDPLAN_LAUNCHED/told-$RANK\""""
        tells = f"printf {word}"
        rank.write_text(f"#!/bin/bash\ntells() {{ {tells}; }}\ncase $RANK in\n{cases}\nesac\n")
        rank.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(rank))
        return launch(len(scripts), ["run"], way_on="; the way on")

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield launched
    for number, handler in handlers.items():  # torchrun's are for good
        signal.signal(number, handler)


def test_ranks_that_end_well_end_the_launcher_well(
    ranks,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing is left, torchrun's folders included."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert ranks('[ "$WORLD_SIZE $LOCAL_RANK" = "2 0" ]', '[ "$RANK" = 1 -a -d "$SSDPLAN_LAUNCHED" ]') == 0
    assert {place.name for place in tmp_path.iterdir()} == {"rank", "up"}


def test_what_killed_launchers_left_is_removed_by_the_next(
    ranks,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But not while one of their ranks is there, nor what is just being made or is none of ours."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    left, used, new = (tmp_path / "tmp" / f"ssdplan-ranks-{name}" for name in ("left", "used", "new"))
    for folder in (left, used, new):
        (folder / "none").mkdir(parents=True)
    for folder in (left, used):
        (folder / "launcher").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "launcher").touch()
    (tmp_path / "tmp" / "ssdplan-ranks-link").symlink_to(tmp_path / "elsewhere")
    with (used / "launcher").open() as rank:
        fcntl.flock(rank, fcntl.LOCK_SH)
        assert ranks("exit 0", "exit 0") == 0
        assert {place.name[14:] for place in (tmp_path / "tmp").iterdir()} == {"used", "new", "link"}
    assert (tmp_path / "elsewhere" / "launcher").exists()
    assert ranks("exit 0", "exit 0") == 0
    assert {place.name[14:] for place in (tmp_path / "tmp").iterdir()} == {"new", "link"}


def test_a_rank_whose_launcher_is_gone_speaks_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps the folder in use until it has ended."""
    (tmp_path / "tmp" / "ssdplan-ranks-x").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(place, "_gone", threading.Event())
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *words: asked.append(words))
    folder = tmp_path / "tmp" / "ssdplan-ranks-x"
    rank = Place(0, 2, 0, 2, folder)
    with (folder / "launcher").open("w") as launcher:
        fcntl.flock(launcher, fcntl.LOCK_EX)
        waits = threading.Thread(target=place._end_with, args=(folder,))
        waits.start()
        assert rank.tell(Told(5, "full")) and not asked
    waits.join()
    assert asked == [(os.getpid(), signal.SIGTERM)] and not rank.tell(Told(5, "full"))
    clear_left()
    assert folder.exists()


@pytest.mark.parametrize(
    ("scripts", "kind", "words"),
    [
        (("exit 0", "tells 5 'rank 1: full'; exit 5"), DiskFullError, "rank 1: full"),
        (
            (AFTER + LOST.format(0, 1), "trap \"tells 5 'full'; exit 5\" TERM; " + THERE + WAITS),
            DiskFullError,
            "rank 1: full",
        ),
        (
            (AFTER + "tells 2 'rank 0: no file'; exit 2", "trap \"tells 2 'no file'; exit 2\" TERM; " + THERE + WAITS),
            UsageError,
            "no file",
        ),
        (
            ("trap \"tells 6 'broken'; exit 6\" TERM; " + THERE + WAITS, AFTER + "tells 5 'full'; exit 5"),
            DiskFullError,
            "rank 1: full; rank 0: broken",
        ),
        ((THERE + WAITS, AFTER + "exit 6"), IoFailure, "rank 1 ended with exit code 6, for the reason said above"),
        (
            (f"tells 1 'rank 0: not finite'; {THERE} exit 1", AFTER + LOST.format(1, 0)),
            SsdplanError,
            "rank 0: not finite",
        ),
        (
            ('trap "' + LOST.format(0, 1) + '" TERM; ' + THERE + WAITS, AFTER + "kill -9 $$"),
            RankError,
            "rank 1 was ended by signal 9 (SIGKILL), as by the kernel where memory runs out; rank 0, gather tied, "
            "waited for it; the way on",
        ),
        (
            (AFTER + LOST.format(0, 1), "trap '' TERM; " + THERE + WAITS),
            RankError,
            "rank 0, gather tied: rank 1 has ended; rank 1 had not ended 1 s after it was asked to, and was killed",
        ),
    ],
)
def test_one_error_is_told_with_the_code_of_its_kind(
    ranks,  # type: ignore[no-untyped-def]
    scripts: tuple[str, ...],
    kind: type[SsdplanError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of the rank at which it began, not that of one which waited for it."""
    if scripts[-1].startswith("trap ''"):
        monkeypatch.setattr(PContext.close, "__defaults__", (None, 1))  # torchrun's patience: 30 seconds
    with pytest.raises(SsdplanError) as raised:
        ranks(*scripts)
    assert type(raised.value) is kind and str(raised.value) == words


def test_an_interruption_asks_each_rank_once(
    ranks,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that comes to a rank alone ends all of them too."""
    monitor, watching = LocalElasticAgent._monitor_workers, threading.Event()

    def watch(agent: LocalElasticAgent, *given: Any) -> Any:
        watching.set()  # before, torchrun may not know of all ranks yet, and asks those alone that it knows
        return monitor(agent, *given)

    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", watch)
    asked = "trap \"echo asked >> $RANK; tells 130 ''; exit 130\" INT; echo > up-$RANK; " + WAITS
    up = [tmp_path / f"up-{rank}" for rank in (0, 1)]
    for fifo in up:
        os.mkfifo(fifo)

    def interrupt() -> None:
        for fifo in up:
            fifo.read_text()
        watching.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(StoppedWithSnapshot):
        ranks(asked, asked)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["asked\n"] * 2
    stops = "tells 130 ''; exit 130"
    with pytest.raises(StoppedWithSnapshot):
        ranks(f'trap "{stops}" TERM; {THERE} {WAITS}', AFTER + stops)
    with pytest.raises(KeyboardInterrupt) as raised:
        ranks("tells 130 interrupted; exit 130", WAITS)
    assert type(raised.value) is KeyboardInterrupt


def test_how_long_ranks_may_take_to_end_is_a_number(ranks, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
    with pytest.raises(UsageError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT in the environment is 'soon'"):
        ranks("exit 0", "exit 0")


def test_an_error_that_a_rank_is_asked_to_end_behind_is_told(tmp_path: Path) -> None:
    """As another that lost it is gone first, and the launcher then asks all to end. Where no word can be left, the rank
    says it itself."""
    for launcher in (tmp_path, tmp_path / "gone"):
        with pytest.raises(DiskFullError) as raised, told_to_launcher(Place(1, 2, 1, 2, launcher)):
            try:
                raise DiskFullError("full")
            finally:
                raise KeyboardInterrupt
        assert raised.value.said is launcher.exists()
    assert Told.by(1, tmp_path) == Told(DiskFullError.exit_code, "full") and Told.by(0, tmp_path) is None
