"""Campaigns of kills: `python -m tests.executor.snapshots.killing DIRECTORY KILLS STRIDE SEED`.

`campaign` trains a tiny model that takes a snapshot every step, in a forked child that is killed at a random moment,
lets it go on, under the same plan or another, and kills it again, until it ends. `boundaries` kills it once before
every STRIDE-th operation and transfer of one step with its snapshot, and of a move to another plan. Losses and weights
must be those of a run that nobody killed, and each store that is found that of the same step of it. Prints one line of
JSON. SSDPLAN_KILL_FREEZE are patterns of parameters that these runs freeze; SSDPLAN_KILL_OPTIMIZER=muon has them
train by Muon.
"""

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ssdplan import native
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.device.interface import Action, Rest
from ssdplan.executor.memory.store_records import Records
from ssdplan.executor.model.model import StreamedModel
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.optimizer.muon import Muon
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.runtime.operations import Operations
from ssdplan.executor.runtime.session import Session
from ssdplan.executor.snapshots.keeper import Keeper
from ssdplan.executor.snapshots.resume import reopened
from ssdplan.executor.snapshots.run_directory import RunDirectory
from ssdplan.executor.store import Store, check
from ssdplan.executor.train import train
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.files import Folder
from ssdplan.plans.graph.ops import Graph
from ssdplan.plans.schedule.build import build_schedule
from tests.bounds import HANG_SECONDS
from tests.executor.runs import LENGTH, opened, prepare
from tests.made.plans import make_plan

STEPS, FEW_STEPS = 12, 3
MUON = os.environ.get("SSDPLAN_KILL_OPTIMIZER") == "muon"
FREEZE = tuple(os.environ.get("SSDPLAN_KILL_FREEZE", "").split())
FIRST: dict[str, Any] = {"alpha": 0.3, "optimizer": 0.37, "parameters": 0.5}
ON_DEVICE: dict[str, Any] = {"alpha": 0.2, "on_device": 1.0, "updated": 1.0, "inputs": 1.0}
PLANS: tuple[dict[str, Any], ...] = (
    FIRST,
    {"alpha": 1.0, "optimizer": 1.0, "parameters": 1.0},
    {"alpha": 0.0},
    ON_DEVICE,
)
Contents = dict[tuple[str, int], int]
"""(tensor, offset) -> checksum."""


def plan_of(model: StreamedModel, choices: dict[str, Any]) -> Plan:
    return make_plan(model, sequence_length=LENGTH, micro_batches=2, micro_batch_size=1, **choices)


def recipe_of(directory: Path, *, steps: int, serial: bool) -> Recipe:
    """With tokens that are kept from run to run: another process makes them, once."""
    cache = directory / "tokens"
    optimizer = Muon(lr=1e-3) if MUON else AdamW(lr=1e-3)
    return Recipe(steps=steps, optimizer=optimizer, snapshot_every=1, serial=serial, token_cache=cache)


def training(directory: Path, out: Path, *, steps: int = STEPS, serial: bool = False) -> None:
    model = opened(directory / "llama", torch.float32, FREEZE, MUON)
    recipe = recipe_of(directory, steps=steps, serial=serial)
    train(plan_of(model, FIRST), model, EmulatedDevice(), data=directory / "text.txt", out=out, recipe=recipe)


def going_on(
    directory: Path, out: Path, choices: dict[str, Any] | None, *, steps: int = STEPS, serial: bool = False
) -> None:
    """Resume; under the plan that the run has, unless `choices`."""
    model = opened(directory / "llama", torch.float32, FREEZE, MUON)
    recipe = recipe_of(directory, steps=steps, serial=serial)
    with reopened(out) as kept:
        train(
            plan_of(model, choices) if choices else kept.plan,
            model,
            EmulatedDevice(),
            data=directory / "text.txt",
            out=out,
            recipe=recipe,
            resume=kept,
        )


def contents(store: Store) -> Contents:
    table = store._table({})
    return {(table.tensors[row["tensor"]], int(row["offset"])): int(row["checksum"]) for row in table.extents}


def outcome(out: Path) -> str:
    """The digest of what a run that ended has found: weights, and the losses of all steps, one line each."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
    weights = (out / "model" / "model.safetensors").read_bytes()
    return hashlib.sha256(weights + repr(losses).encode()).hexdigest()


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; returns its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    """Wait for a child; its exit code, negative for the signal that killed it. One that hangs fails here."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("a run hangs")


def uninterrupted(directory: Path) -> tuple[dict[int, Contents], float]:
    """Step -> what its generation holds, from a run that nobody kills, `reference`; and the seconds that it took."""
    found = directory / "reference.json"

    def work() -> None:
        seen: dict[int, list[tuple[str, int, int]]] = {}
        commit = Store.commit

        def recording(store: Store, metadata: dict[str, Any]) -> None:
            commit(store, metadata)
            seen[metadata["step"]] = [(*key, value) for key, value in contents(store).items()]

        Store.commit = recording  # type: ignore[method-assign]
        start = time.monotonic()
        training(directory, directory / "reference")
        found.write_text(json.dumps({"steps": seen, "seconds": time.monotonic() - start}))

    assert ended(in_child(work)) == 0, "the reference run failed"
    data = json.loads(found.read_text())
    steps = {int(step): {(row[0], row[1]): row[2] for row in rows} for step, rows in data["steps"].items()}
    return steps, data["seconds"]


def found_at(out: Path, first: Plan, steps: dict[int, Contents]) -> int:
    """The step that a killed run would go on from. What its store holds must be that of the run that nobody killed."""
    with reopened(out) as kept:
        if kept.snapshot is None:
            return 0
        assert not (result := check(kept.volumes, lambda share: None)).damaged, result.damages
        records = Records.of(build_schedule(kept.plan.model, kept.plan.decision), snapshots=True).records
        store = Store.open(kept.volumes, records)
        step: int = store.metadata["step"]
        if kept.plan == first:
            assert contents(store) == steps[step], f"generation {store.generation} is not step {step}"
        store.close()
        return step


def campaign(directory: Path, kills: int, seed: int) -> dict[str, Any]:
    steps, seconds = uninterrupted(directory)
    expected = outcome(directory / "reference")
    first = plan_of(opened(directory / "llama", torch.float32, FREEZE, MUON), FIRST)
    rng = random.Random(seed)
    reached: dict[int, int] = {}
    signals = dict.fromkeys(("SIGKILL", "SIGTERM", "SIGTERM twice"), 0)
    runs = 0
    while sum(signals.values()) < kills:
        runs += 1
        out = directory / f"run-{runs}"
        begun = False
        while True:
            choices = rng.choice((None, *PLANS)) if begun else FIRST
            pid = in_child(
                (lambda: going_on(directory, out, choices))  # noqa: B023 - it is called before they change
                if begun
                else (lambda: training(directory, out))  # noqa: B023
            )
            patience = 0.8 * rng.random() * seconds
            deadline = time.monotonic() + patience
            while (waited := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
                time.sleep(0.002)
            if waited[0]:
                assert waited[1] == 0, f"a run that nobody killed failed, from seed {seed}"
                break
            name = rng.choices(list(signals), (6, 1, 1))[0]
            for number in [signal.SIGKILL] if name == "SIGKILL" else [signal.SIGTERM] * (1 + name.endswith("twice")):
                os.kill(pid, number)
            ended(pid)
            signals[name] += 1
            if not begun and not (out / "run.json").exists():
                shutil.rmtree(out, ignore_errors=True)  # killed before there was a run
                continue
            begun = True
            step = found_at(out, first, steps)
            reached[step] = reached.get(step, 0) + 1
            if step == STEPS and (out / "model").exists():
                break
        assert outcome(out) == expected, f"run {runs} of seed {seed} came to other losses or weights"
        shutil.rmtree(out)
    return {"kills": sum(signals.values()), "runs": runs, "signals": signals, "reached": dict(sorted(reached.items()))}


class Clock:
    """Counts moments, while it runs, and kills its process at one of them."""

    def __init__(self, moment: int | None) -> None:
        self._moment, self.count, self.running = moment, 0, False

    def tick(self) -> None:
        if self.running:
            if self.count == self._moment:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1

    def before(self, owner: Any, *names: str) -> None:
        """Tick before these methods of a class, or of what it makes."""
        for name in names:
            real = getattr(owner, name)

            def ticking(*arguments: Any, _real: Any = real, **options: Any) -> Any:
                self.tick()
                return _real(*arguments, **options)

            setattr(owner, name, ticking)


class TickingEngine:
    """An engine that ticks before all that changes a drive, and before reads."""

    clock: Clock
    real: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._engine = type(self).real(*arguments, **options)
        for name in ("open", "read", "write", "read_summed", "write_summed", "flush"):
            setattr(self, name, getattr(self._engine, name))
        self.clock.before(self, "open", "read", "write", "read_summed", "write_summed", "flush")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def wound(moment: int | None) -> Clock:
    """A clock of this process's operations, transfers, documents and deletions."""
    clock = Clock(moment)
    TickingEngine.clock, TickingEngine.real = clock, native.Engine
    native.Engine = TickingEngine  # type: ignore[misc,assignment]
    bind = Operations.bind

    def ticking(operations: Operations, graph: Graph) -> list[Action]:
        def before(action: Action) -> Action:
            def act() -> Rest | None:
                clock.tick()
                return action()

            return act

        return [before(action) for action in bind(operations, graph)]

    Operations.bind = ticking  # type: ignore[method-assign]
    clock.before(RunDirectory, "change", "moved", "plan_ahead")
    clock.before(Path, "unlink", "rename", "replace")
    clock.before(Folder, "write", "remove")
    return clock


def one_step(directory: Path, out: Path, moment: int | None, counted: Path) -> None:
    """Train; the clock runs through the second step and its snapshot."""
    clock = wound(moment)
    step, take = Session.train_step, Keeper.take

    def train_step(session: Session, number: int, *arguments: Any) -> Any:
        clock.running = number == 1
        return step(session, number, *arguments)

    def taken(keeper: Keeper, session: Session, number: int) -> None:
        take(keeper, session, number)
        if number == 2:
            clock.running = False

    Session.train_step = train_step  # type: ignore[method-assign]
    Keeper.take = taken  # type: ignore[method-assign]
    training(directory, out, steps=FEW_STEPS, serial=True)
    counted.write_text(str(clock.count))


def one_move(directory: Path, out: Path, moment: int | None, counted: Path) -> None:
    """Go on under another plan; the clock runs until the states are where that one keeps them."""
    clock = wound(moment)
    step = Session.train_step

    def train_step(*arguments: Any) -> Any:
        clock.running = False
        return step(*arguments)

    Session.train_step = train_step  # type: ignore[method-assign]
    clock.running = True
    going_on(directory, out, PLANS[1], steps=FEW_STEPS, serial=True)
    counted.write_text(str(clock.count))


def boundaries(directory: Path, stride: int) -> dict[str, str]:
    """What was tried of what there is."""
    reference, stopped, counted = directory / "few", directory / "stopped", directory / "count"
    assert ended(in_child(lambda: one_step(directory, reference, None, counted))) == 0
    expected = outcome(reference)
    tried = {}
    # A run that was killed in its third step.
    total = int(counted.read_text())
    for number, moment in enumerate(moments(total, stride)):
        out = directory / f"step-{number}"
        killed = in_child(lambda: one_step(directory, out, moment, counted))  # noqa: B023
        assert ended(killed) == -signal.SIGKILL
        if not stopped.exists():
            shutil.copytree(out, stopped)
        assert ended(in_child(lambda: going_on(directory, out, None, steps=FEW_STEPS))) == 0  # noqa: B023
        assert outcome(out) == expected, f"killed at moment {moment} of {total} of a step"
        shutil.rmtree(out)
        tried["step and snapshot"] = f"{number + 1} of {total}"
    out = directory / "move"
    shutil.copytree(stopped, out)
    assert ended(in_child(lambda: one_move(directory, out, None, counted))) == 0
    assert outcome(out) == expected
    total = int(counted.read_text())
    for number, moment in enumerate(moments(total, stride)):
        out = directory / f"move-{number}"
        shutil.copytree(stopped, out)
        assert ended(in_child(lambda: one_move(directory, out, moment, counted))) == -signal.SIGKILL  # noqa: B023
        choices = PLANS[1] if number % 2 else None
        assert ended(in_child(lambda: going_on(directory, out, choices, steps=FEW_STEPS))) == 0  # noqa: B023
        assert outcome(out) == expected, f"killed at moment {moment} of {total} of a move"
        assert len(list(out.glob("*.ssdplan"))) == 1 and not (out / "plan.next.json").exists()
        shutil.rmtree(out)
        tried["move to another plan"] = f"{number + 1} of {total}"
    return tried


def moments(total: int, stride: int) -> Iterator[int]:
    return itertools.islice(itertools.count(stride // 2, stride), max(0, -(-(total - stride // 2) // stride)))


def main(directory: Path, kills: int, stride: int, seed: int) -> None:
    torch.set_num_threads(1)
    opened(prepare(directory, layers=2) / "llama", torch.float32, FREEZE, MUON)  # once for all children
    print(json.dumps({**campaign(directory, kills, seed), "boundaries": boundaries(directory, stride)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
