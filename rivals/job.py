"""What one arm is to train, as a file that passes from the command to the arm's process; and what the arm says back.

Owns the order of the rows, so that every arm sees the batches that `ssdplan run` sees. It imports nothing that counts
in an arm's memory: numpy and no more.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
ZEROTH_ORDER_LEARNING_RATE = 1e-6
EPS = 1e-3
"""Without gradients: how far along a direction losses are taken. Weights do not decay then."""
SEED = 0
"""Of the order of rows: what `ssdplan run` is given as --seed."""
PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}
"""What all arms can compute in, as `ssdplan profile` calls it and as torch does."""


@dataclass(frozen=True)
class Job:
    """One arm's training. Paths are absolute; the model and the rows are there already."""

    model: str
    """A model directory; its weights are read in `precision`."""
    rows: str
    """An .npy file, uint32 [rows, tokens a row]."""
    metrics: str
    """Where a line a step goes: `step`, `loss`, `step_seconds`; on a GPU `device_peak_bytes` too."""
    swap: str
    """A directory on the drive, for an arm that keeps states there."""
    micro_batch_size: int
    micro_batches: int
    steps: int
    threads: int
    settings: str
    """Which of its ways the arm takes."""
    precision: str
    """Of weights and activations, one of PRECISIONS; masters and moments are fp32."""
    device: str = "cpu"
    """As torch calls it."""
    directions: int = 0
    """Of a step without gradients; 0: it is by gradients."""

    @property
    def dtype_name(self) -> str:
        """The precision, as torch calls it."""
        return PRECISIONS[self.precision]

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def batches(job: Job) -> Iterator[list[npt.NDArray[np.int64]]]:
    """Of each step its micro-batches of token ids, int64 [rows, tokens a row], in the order of `ssdplan run`.

    Rows are shuffled anew each epoch by the raw output of Philox, keyed by the seed and the epoch, as the executor does
    it; a test holds the two to each other, and the losses of the first step would tell.
    """
    rows = np.load(job.rows, mmap_mode="r")
    count = len(rows)
    orders: dict[int, npt.NDArray[np.int64]] = {}

    def row(index: int) -> npt.NDArray[np.uint32]:
        epoch, position = divmod(index, count)
        if epoch not in orders:
            raw = np.random.Philox(key=np.array([SEED, epoch], np.uint64)).random_raw(count)
            orders[epoch] = np.argsort(raw, kind="stable")
        chosen: npt.NDArray[np.uint32] = rows[orders[epoch][position]]
        return chosen

    size = job.micro_batch_size
    for step in range(job.steps):
        first = step * size * job.micro_batches
        yield [
            np.stack([row(index) for index in range(start, start + size)]).astype(np.int64)
            for start in range(first, first + size * job.micro_batches, size)
        ]


def write_step(job: Job, step: int, loss: float, step_seconds: float, device_peak_bytes: int | None = None) -> None:
    """One line of metrics.jsonl, with the names that a run of ours has; `step` counts from 1."""
    line = {"step": step, "loss": loss, "step_seconds": step_seconds}
    if device_peak_bytes is not None:
        line["device_peak_bytes"] = device_peak_bytes
    with Path(job.metrics).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
