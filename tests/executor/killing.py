"""A campaign of kill -9: `python -m tests.executor.killing DIRECTORY KILLS SEED`.

Trains a tiny model that commits a generation every step, in a forked child that is killed at a random moment, again and
again. Each time the store must open at a generation whose extents are those of the same step of a run that nobody
killed, and every checksum must be right. Prints one line of JSON.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ssdplan.executor.device import EmulatedDevice
from ssdplan.executor.model import open_model
from ssdplan.executor.optimizer import AdamW
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.executor.records import Records
from ssdplan.executor.store import Store, check
from ssdplan.executor.train import train
from ssdplan.plans.build import build_schedule
from tests.executor.planned import make_plan
from tests.executor.runs import LENGTH, prepare

STEPS = 12
CHOICES: dict[str, Any] = {
    "micro_batches": 2,
    "micro_batch_size": 1,
    "alpha": 0.3,
    "optimizer": 0.37,
    "parameters": 0.5,
}
Contents = dict[tuple[str, int], int]
"""(tensor, offset) -> checksum."""


def training(directory: Path, out: Path, watch: Watch) -> None:
    model = open_model(directory / "llama", torch.float32)
    recipe = Recipe(steps=STEPS, optimizer=AdamW(lr=1e-3), snapshot_every=1)
    plan = make_plan(model, sequence_length=LENGTH, **CHOICES)
    train(plan, model, EmulatedDevice(), data=directory / "text.txt", out=out, recipe=recipe, watch=watch)


def contents(store: Store) -> Contents:
    table = store._table({})
    return {(table.tensors[row["tensor"]], int(row["offset"])): int(row["checksum"]) for row in table.extents}


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


def uninterrupted(directory: Path) -> tuple[dict[int, Contents], float]:
    """Step -> what its generation holds, from a run that nobody kills; and the seconds that the run took."""
    found = directory / "reference.json"

    def work() -> None:
        seen: dict[int, list[tuple[str, int, int]]] = {}
        commit = Store.commit

        def recording(store: Store, metadata: dict[str, Any]) -> None:
            commit(store, metadata)
            seen[metadata["step"]] = [(*key, value) for key, value in contents(store).items()]

        Store.commit = recording  # type: ignore[method-assign]
        start = time.monotonic()
        training(directory, directory / "reference", Watch())
        found.write_text(json.dumps({"steps": seen, "seconds": time.monotonic() - start}))

    _, status = os.waitpid(in_child(work), 0)
    assert status == 0, "the reference run failed"
    data = json.loads(found.read_text())
    steps = {int(step): {(row[0], row[1]): row[2] for row in rows} for step, rows in data["steps"].items()}
    return steps, data["seconds"]


def campaign(directory: Path, kills: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    prepare(directory)
    steps, seconds = uninterrupted(directory)
    model = open_model(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, **CHOICES)
    records = Records.of(build_schedule(plan.model, plan.decision), snapshots=True).records
    rng = random.Random(seed)
    reached: dict[int, int] = {}
    for number in range(kills):
        out = directory / f"run-{number}"
        pid = in_child(lambda out=out: training(directory, out, Watch()))  # type: ignore[misc]
        # From the first byte of the store on, for as long as the run lasts.
        volume = out / "volume-0.ssdplan"
        deadline = time.monotonic() + 60
        while not (volume.exists() and b"SSDPLAN" in volume.read_bytes()[:8]):
            assert time.monotonic() < deadline, "the run made no store"
            time.sleep(0.001)
        time.sleep(rng.random() * seconds)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if not volume.exists():  # the run had ended well
            reached[STEPS] = reached.get(STEPS, 0) + 1
            continue
        result = check([volume], lambda share: None)
        assert not result.damaged, result.damages
        store = Store.open([volume], records)
        step = store.metadata.get("step", 0)
        assert contents(store) == steps.get(step, {}), f"generation {store.generation} is not step {step}"
        store.close()
        volume.unlink()
        reached[step] = reached.get(step, 0) + 1
    return {"kills": kills, "reached": dict(sorted(reached.items()))}


if __name__ == "__main__":
    print(json.dumps(campaign(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
