"""What `ssdplan train` chooses where nobody says: device, length of rows, rows a step, and snapshots.

Owns the rules, each of which docs/training.md has in a table. They look at the data and the machine, never at results.
"""

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssdplan.executor.data.preview import Preview

USUAL_LENGTH = 1024
"""Tokens a row at most, unless the user says more: as `ssdplan profile` has it, and TRL."""
LEAST_LENGTH = 128
FEWEST_ROWS = 32
"""Of long texts, which can be cut anywhere: with fewer, rows are made shorter."""
MOST_ROWS_A_STEP = 32
STEPS_AN_EPOCH = 8
"""At least so many, as long as a step has more than one row: fewer updates learn little."""
USUAL_SIZES = (1, 2, 4)
SNAPSHOT_MINUTES = 10.0
FREE_SHARE = 0.8
"""Of what is free on the drive, what a store with snapshots may take."""
_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Data:
    """What there is to train on, by a preview of it."""

    format: str
    samples: int
    tokens: int
    longest_of_99: int
    """Tokens that 99 of 100 samples do not exceed."""
    rows: int
    sequence_length: int
    most_length: int
    """Tokens a row that the model takes, at most `USUAL_LENGTH`."""
    refusal: str
    cut: int = 0
    """Samples that lose what is longer than a row."""

    @classmethod
    def of(cls, preview: "Preview", most_length: int) -> "Data":
        return cls(
            preview.format,
            preview.samples,
            preview.tokens,
            int(preview.lengths["99%"]),
            preview.rows,
            preview.sequence_length,
            most_length,
            preview.refusal,
            preview.cut,
        )


def device_here(gpus: Path = _GPUS, torch: str | None = None) -> str:
    """A GPU where the driver has one and torch was built for it, else the processor. `torch`: its version."""
    found = importlib.metadata.version("torch") if torch is None else torch
    there = gpus.is_dir() and any(gpus.iterdir())
    return "cuda" if there and not found.endswith("+cpu") else "cpu"


def row_length(data: Data) -> int:
    """The power of two in which 99 of 100 samples are whole, or for texts the longest of which there are some; at least
    `LEAST_LENGTH` and at most what the model takes."""
    length = min(LEAST_LENGTH, data.most_length)
    while length * 2 <= data.most_length and _wants_more(data, length):
        length *= 2
    return data.most_length if length < data.most_length < 2 * length and _wants_more(data, length) else length


def _wants_more(data: Data, length: int) -> bool:
    if data.format == "text":
        return data.tokens // (2 * length) >= FEWEST_ROWS
    return length < data.longest_of_99


def rows_to_train_on(data: Data, *, held_out_share: float | None, held_out_samples: int | None) -> int:
    """Rows of an epoch, as far as is known before it is settled which samples are held out: so many, or a share."""
    held_out = data.rows * (held_out_share or 0.0)
    if held_out_samples:
        held_out = data.rows * min(held_out_samples / max(data.samples, 1), 1.0)
    return max(data.rows - round(held_out), 1)


def rows_a_step(rows: int, *, micro_batch_size: int | None, ranks: int) -> int:
    """A power of two, at most `MOST_ROWS_A_STEP`, of which an epoch of `rows` has `STEPS_AN_EPOCH`; as many for each
    rank, in whole micro-batches where their size is given."""
    most = min(rows // STEPS_AN_EPOCH, MOST_ROWS_A_STEP)
    batch = 1 << most.bit_length() - 1 if most > 1 else 1
    unit = (micro_batch_size or 1) * ranks
    return max(batch // unit, 1) * unit


def sizes_to_measure(batch: int | None, ranks: int, *, most: int | None = None) -> tuple[int, ...]:
    """Micro-batch sizes that can make that batch; all of the usual ones where it is not known. None is above `most`."""
    fit = [size for size in USUAL_SIZES if batch is None or (batch // ranks) % size == 0]
    return tuple(size for size in fit if most is None or size <= most) or (1,)
