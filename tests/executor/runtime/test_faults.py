"""A fault in any transfer or flush of a training run is a typed error or changes nothing; never a wrong byte or a hang.

The faults lie under the engine (`native.Engine(faults=...)`), in every transfer of a run of two steps that commits
after each. What failed goes on, on a drive that works again, to the same bits. Shortened: SSDPLAN_FAULT_STRIDE=1 tries
every kind at every transfer (docs/store-format.md).
"""

import concurrent.futures
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdplan import native
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.executor.snapshots.resume import Kept, reopened
from ssdplan.executor.store import Store
from ssdplan.executor.store.volumes import Staging
from ssdplan.executor.train import train
from ssdplan.plans.documents.metrics import StepMetrics
from ssdplan.plans.errors import DiskFullError, IoFailure, SsdplanError, StoreError
from tests.bounds import HANG_SECONDS
from tests.executor.runs import LENGTH, prepare
from tests.extent import short_or_full
from tests.made.plans import make_plan

STRIDE = int(os.environ.get("SSDPLAN_FAULT_STRIDE", short_or_full("36", "12")))
KINDS = ("EIO", "ENOSPC", "short", "delay")


class Campaign:
    """One tiny training, run again and again with an engine that fails where it is told."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
        self._directory, self._engine = prepare(directory, layers=2), engine
        self._model = open_model(directory / "llama", torch.float32)
        self._plan = make_plan(
            self._model,
            sequence_length=LENGTH,
            micro_batches=2,
            micro_batch_size=1,
            alpha=0.3,
            optimizer=0.37,
            checkpoints=0.5,
            gradient=0.5,
        )
        self._runs = self.went_on = 0
        self._faults: list[tuple[int, str]] = []
        self.engines: list[native.Engine] = []
        real = native.Engine

        def make(*arguments: Any, **options: Any) -> native.Engine:
            self.engines.append(real(engine, *arguments, faults=self._faults, **options))
            return self.engines[-1]

        monkeypatch.setattr(native, "Engine", make)

    def run(self, *faults: tuple[int, str]) -> str:
        """The digest of the weights and of the losses."""
        self._runs += 1
        return self._train(list(faults), None)

    def resumed(self) -> str:
        """The same of the run that failed last, when it goes on, or when there is nothing of it, of a new one."""
        if not self._out.exists():
            return self.run()
        with reopened(self._out) as kept:
            self.went_on += bool(kept.step)
            return self._train([], kept)

    @property
    def _out(self) -> Path:
        return self._directory / f"run-{self._runs}"

    def _train(self, faults: list[tuple[int, str]], kept: Kept | None) -> str:
        self._faults = faults
        out = self._out
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            # Bounded: what hangs fails here, by name.
            result = pool.submit(
                train,
                self._plan,
                self._model,
                EmulatedDevice(),
                data=self._directory / "text.txt",
                out=out,
                recipe=Recipe(steps=2, optimizer=AdamW(lr=1e-3), snapshot_every=1),
                resume=kept,
            ).result(timeout=HANG_SECONDS)
        weights = (out / "model" / "model.safetensors").read_bytes()
        return hashlib.sha256(weights + repr(result.losses).encode()).hexdigest()


@pytest.fixture(params=["io_uring", "threads"])
def campaign(request, tmp_path, monkeypatch) -> Iterator[Campaign]:
    try:
        native.Engine(request.param).close()
    except native.IoError as error:
        pytest.skip(f"no {request.param} here: {error}")
    threads = torch.get_num_threads()
    yield Campaign(tmp_path, monkeypatch, request.param)
    torch.set_num_threads(threads)


def test_a_fault_in_any_transfer_is_an_error_or_changes_nothing(campaign):
    expected = campaign.run()
    transfers = campaign.engines[-1].transfers
    assert transfers > 100
    refused = dict.fromkeys(KINDS, 0)
    whole = dict.fromkeys(KINDS, 0)
    for number, kind in enumerate(KINDS):
        for index in range(number % STRIDE, transfers, STRIDE):
            try:
                assert campaign.run((index, kind)) == expected, f"{kind} at transfer {index} changed the result"
                whole[kind] += 1
            except SsdplanError as error:
                assert isinstance(error, DiskFullError if kind == "ENOSPC" else IoFailure), f"{index}: {error!r}"
                words = os.strerror(errno.ENOSPC if kind == "ENOSPC" else errno.EIO)
                assert kind in ("EIO", "ENOSPC") and words in str(error) and ".ssdplan" in str(error)
                refused[kind] += 1
                assert campaign.resumed() == expected, f"{kind} at transfer {index} changed how the run goes on"
    tries = {kind: len(range(number % STRIDE, transfers, STRIDE)) for number, kind in enumerate(KINDS)}
    print(f"{sum(tries.values())} faults in {transfers} transfers; {campaign.went_on} went on from a snapshot")
    assert campaign.went_on >= 2
    assert whole["short"] == tries["short"] and whole["delay"] == tries["delay"]
    # Every transfer of the run is waited for, so every failed one is noticed.
    assert refused["EIO"] == tries["EIO"] and refused["ENOSPC"] == tries["ENOSPC"]


def test_a_failed_flush_ends_the_run(campaign):
    expected = campaign.run()
    flushes = 0
    while True:
        try:
            digest = campaign.run((flushes, "flush"))
        except IoFailure as error:
            assert "flush" in str(error)
            flushes += 1
            assert flushes < 100 and campaign.resumed() == expected
            continue
        assert digest == expected
        break
    assert flushes >= 6, "two when the volume is made, two for each of the commits"


@pytest.mark.parametrize("role", ["optimizer", "parameters"])
@pytest.mark.parametrize("keep_moments", ["fp32", "bf16"])
def test_states_that_the_drive_changed_end_the_run_before_anything_is_written_of_them(tmp_path, role, keep_moments):
    """Whether the transfer sums them or, in passing, the update: named, with nothing durable lost."""
    model = open_model(prepare(tmp_path, layers=2) / "llama", torch.float32)
    plan = make_plan(
        model, sequence_length=LENGTH, optimizer=0.0, parameters=0.0, alpha=0.3, optimizer_states=keep_moments
    )
    out = tmp_path / "run"

    def damage(metrics: StepMetrics) -> None:
        """Of the extents that the store would read next, one byte of the first of this role."""
        if metrics.step != 2:
            return
        store = stores[-1]
        index = next(
            index
            for index, extent in enumerate(store._layout.extents)
            if store._layout.records[extent.record].name.startswith(role)
        )
        extent = store._layout.extents[index]
        (file, start, _, _), *_ = store._on_volumes(extent.places[store._generations.place[index]], extent.nbytes, 0)
        page = Staging(4096)
        store._disk.read([(file, start, page.address, 4096)]).wait()
        page.put(bytes([page.get(0, 1)[0] ^ 16]))
        store._disk.write([(file, start, page.address, 4096)]).wait()

    stores: list[Store] = []
    create = Store.create

    def made(*arguments: Any, **options: Any) -> Store:
        stores.append(create(*arguments, **options))
        return stores[-1]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoreError, match=f"of {role}.* is not what was written"):
        patch.setattr(Store, "create", made)
        train(
            plan,
            model,
            EmulatedDevice(),
            data=tmp_path / "text.txt",
            out=out,
            recipe=Recipe(steps=4, optimizer=AdamW(lr=1e-3), snapshot_every=1),
            watch=Watch(step=damage),
        )
    assert not (out / "model").exists()
    with reopened(out) as kept:
        assert kept.step == 2
