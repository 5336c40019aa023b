"""A step that stands still is told of by name: operation, tensor, bytes, volume. It ends only where that is asked."""

import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from ssdplan import native
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.executor.runtime.runner import OverlappedRunner, SerialRunner, Standing
from ssdplan.executor.runtime.watchdog import Patience, Watchdog, Words
from ssdplan.executor.store import Record, Store
from ssdplan.executor.train import train
from ssdplan.plans.errors import StallError, UsageError
from ssdplan.plans.graph.ops import Update
from ssdplan.plans.schedule.build import build_schedule
from tests import warm
from tests.bounds import HANG_SECONDS
from tests.executor.runs import LENGTH, prepare
from tests.executor.runtime.devices import in_place
from tests.executor.runtime.test_runner import chain
from tests.made.plans import make_plan

MIB = 1 << 20
TRIES = 50
"""To look at a transfer while its 20 ms of delay last: a busy machine may wake who looks after them."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plan(directory):
    return make_plan(open_model(directory / "llama", torch.float32), sequence_length=LENGTH)


@pytest.fixture(params=["serial", "overlapped"])
def runner(request):
    made = SerialRunner(in_place) if request.param == "serial" else OverlappedRunner(in_place)
    yield made
    made.close()


def never(error: StallError) -> None:
    raise AssertionError(error)


def test_patience_follows_the_plan_unless_told(plan):
    slow = plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"step_seconds": 40.0})})
    assert Patience.of(plan) == Patience(60.0, None)
    assert Patience.of(slow) == Patience(200.0, None)
    assert Patience.of(slow, 3.0, 9.0) == Patience(3.0, 9.0)


def test_a_stall_is_told_at_doubling_intervals():
    """Looks every quarter of a second of a clock of the test's own."""
    graph, told = chain(("read", ()), ("write", (0,))), []
    dog = Watchdog(Patience(2.0), lambda: None, lambda standing, now: f"{standing.ended}", told.append, never)
    moments: list[tuple[float, str]] = []

    def looks(standing: Standing | None, since: float, until: float) -> None:
        moments.clear()
        for quarter in range(int(4 * since), int(4 * until)):
            dog.look(standing, quarter / 4)
            moments.extend((quarter / 4, text) for text in told)
            told.clear()

    looks(Standing(graph, 0, 50.0, ((0, 50.0),)), 50.0, 69.0)
    assert moments == [(52.0, "0"), (54.0, "0"), (58.0, "0"), (66.0, "0")]
    looks(Standing(graph, 1, 69.0, ((1, 69.0),)), 69.0, 72.0)
    assert moments == [(71.0, "1")], "from the last end on"
    looks(None, 72.0, 600.0)
    assert not moments, "a runner at rest is no stall"
    dog.look(Standing(graph, 1, 600.0, ()), 615.0)
    dog.look(Standing(graph, 1, 600.0, ()), 615.75)
    assert told == ["1"], "a late look tells once what several would have told"


def test_a_stall_ends_a_run_once_and_is_told_on():
    graph, told, ended = (
        chain(
            ("read", ()),
        ),
        [],
        [],
    )
    dog = Watchdog(Patience(1.0, 2.5), lambda: None, lambda standing, now: f"{now}", told.append, ended.append)
    for moment in (0.5, 1.0, 2.0, 2.4, 2.5, 3.0, 4.0):
        dog.look(Standing(graph, 0, 0.0, ()), moment)
    assert [str(error) for error in ended] == ["2.5"] and told == ["1.0", "2.0", "4.0"]


def test_an_action_that_hangs_is_named(plan, runner):
    schedule = build_schedule(plan.model, plan.decision)
    graph = schedule.steady
    hanging = next(op for op in graph.ops if isinstance(op, Update))
    notes: list[str] = []

    def hang() -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while not any(str(hanging) in text for text in notes) and time.monotonic() < deadline:
            time.sleep(0.01)

    actions = [hang if op is hanging else (lambda: None) for op in graph.ops]
    with Watchdog(Patience(0.2), runner.standing, Words(plan, schedule, None), notes.append, never):
        runner.run(graph, actions)
    text = next(text for text in notes if str(hanging) in text)
    assert str(hanging) in text and f"of {len(graph.ops)} of the steady step" in text
    assert f"{hanging.elements:,} elements of {plan.model.states[hanging.state].name}" in text
    follower = next(op for op in graph.ops if hanging.index in op.waits)
    assert f"waiting for it: {follower}" in text


def test_a_step_that_goes_on_is_left_alone(plan, runner):
    """Slow in all, but never without an operation that ends: looked at in each, a little before it would be a stall."""
    schedule = build_schedule(plan.model, plan.decision)
    ops = len(schedule.steady.ops)
    dog = Watchdog(Patience(0.5), lambda: None, Words(plan, schedule, None), pytest.fail, never)
    ends = []

    def look() -> None:
        standing = runner.standing()
        assert standing is not None
        ends.append((standing.ended, standing.last_end))
        dog.look(standing, standing.last_end + 0.49)

    runner.run(schedule.steady, [look] * ops)
    assert len(ends) == ops and max(ends)[0] >= ops - 5 and max(ends)[1] > min(ends)[1]


def test_a_run_ends_where_it_was_asked_to(plan):
    schedule = build_schedule(plan.model, plan.decision)
    graph = schedule.steady
    runner = OverlappedRunner(in_place)
    released = threading.Event()
    hanging = next(op for op in graph.ops if op.resource == "h2d")
    actions = [(lambda: released.wait(HANG_SECONDS)) if op is hanging else (lambda: None) for op in graph.ops]
    notes: list[str] = []
    words = Words(plan, schedule, None)
    with (
        pytest.raises(StallError, match="no operation has ended") as caught,
        Watchdog(Patience(0.1, 0.5), runner.standing, words, notes.append, runner.abandon),
    ):
        runner.run(graph, actions)
    assert str(hanging) in str(caught.value) and notes
    assert schedule.buffers[hanging.source.buffer].name in str(caught.value)
    runner.close()
    released.set()


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_the_volume_and_its_outstanding_bytes_are_named(tmp_path, monkeypatch, engine):
    """Every transfer begins 20 ms late: until then all bytes of a write, then of a read, are outstanding."""
    try:
        native.Engine(engine).close()
    except native.IoError as error:
        pytest.skip(f"no {engine} here: {error}")
    real = native.Engine
    monkeypatch.setattr(native, "Engine", lambda: real(engine, faults=[(n, "delay") for n in range(400)]))
    places = [tmp_path / "one", tmp_path / "two"]
    store = Store.create(places, [Record("state", 0, 8 * MIB, False, (0, 8 * MIB))], "0" * 64)
    arena = native.Arena(8 * MIB, lock=False)
    found: list[bool] = []
    for move in (store.write, store.read) * TRIES:
        thread = threading.Thread(target=move, args=(0, 8 * MIB, arena.address))
        thread.start()
        seen: list[dict[Path, int]] = []
        while thread.is_alive():
            seen.append(store.outstanding(0, 8 * MIB))
        thread.join()
        found.append({path: 4 * MIB for path in store.paths} in seen)
        assert all(set(left) <= set(store.paths) and max(left.values(), default=0) <= 4 * MIB for left in seen)
        assert store.outstanding(0, 8 * MIB) == {}
        if any(found[::2]) and any(found[1::2]):
            break
    assert any(found[::2]) and any(found[1::2]), "of writes, and of reads"
    store.remove()


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_a_read_that_is_late_is_told_with_its_volume(directory, plan, tmp_path, monkeypatch, engine):
    """A whole run on an engine whose every transfer is late, watched by somebody without patience."""
    try:
        native.Engine(engine).close()
    except native.IoError as error:
        pytest.skip(f"no {engine} here: {error}")
    real = native.Engine
    monkeypatch.setattr(native, "Engine", lambda: real(engine, faults=[(n, "delay") for n in range(20000)]))
    notes: list[str] = []
    train(
        plan,
        open_model(directory / "llama", torch.float32),
        EmulatedDevice(),
        data=directory / "text.txt",
        out=tmp_path / "run",
        recipe=Recipe(steps=1, optimizer=AdamW(lr=1e-3), stall_after_seconds=0.008),
        watch=Watch(note=notes.append),
    )
    stalls = [note for note in notes if "no operation has ended" in note]
    volume = tmp_path / "run" / "volume-0.ssdplan"
    assert any(f"{volume}: " in note and "outstanding" in note for note in stalls), stalls[:3]
    assert any("read optimizer states of block" in note or "read parameters of block" in note for note in stalls)
    assert any("/ssd [" in note and "on ssd to" in note for note in stalls)


def test_a_serial_run_cannot_be_ended(directory, plan, tmp_path):
    with pytest.raises(UsageError, match="--stall-abort"):
        train(
            plan,
            open_model(directory / "llama", torch.float32),
            EmulatedDevice(),
            data=directory / "text.txt",
            out=tmp_path / "run",
            recipe=Recipe(steps=1, optimizer=AdamW(lr=1e-3), serial=True, stall_abort_seconds=1.0),
        )


def test_a_command_whose_drive_hangs_ends_with_code_6(directory, plan, tmp_path):
    """In a process of its own, whose reads never return."""
    plan.save(tmp_path / "plan.json")
    run = ["run", "plan.json", "--data", str(directory / "text.txt"), "--steps", "2", "--out", "run"]
    code = textwrap.dedent(f"""
        import sys, time
        from ssdplan import cli
        from ssdplan.executor.store import Store
        Store.read = lambda self, offset, nbytes, address: time.sleep(100000)
        sys.exit(cli.main({[*run, "--stall-abort", "1"]}))
    """)
    done = warm.python(code, cwd=tmp_path)
    assert done.returncode == 6, done
    assert "ssdplan: error: no operation has ended for " in done.stderr and "read " in done.stderr
