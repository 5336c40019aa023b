"""What tests of whole runs share: a tiny model, a text, and the micro-batches that a run takes from it."""

import functools
import json
from pathlib import Path

import torch

from ssdplan import native
from ssdplan.executor.data.text_data import TextData
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.executor.memory.migration import Snapshotted
from ssdplan.executor.memory.store_records import Records
from ssdplan.executor.model.layers import MicroBatch
from ssdplan.executor.model.model import StreamedModel, open_model
from ssdplan.executor.snapshots.resume import reopened
from ssdplan.executor.store import Store
from ssdplan.plans.schedule.build import build_schedule
from tests.made.models import make_model, make_tokenizer

LENGTH = 16


@functools.lru_cache(maxsize=4)
def opened(directory: Path, dtype: torch.dtype, freeze: tuple[str, ...] = (), muon: bool = False) -> StreamedModel:
    """`open_model`, once for all runs of a test: what lies in the directory must not change meanwhile."""
    return open_model(directory, dtype, freeze=freeze, muon=muon)


def texts(path: Path) -> Path:
    """Rows, one text, and one that is held out, in `path`; returns that."""
    rows = [f"row {i}: " + "the quick brown fox jumps over the lazy dog " * (1 + i % 3) for i in range(60)]
    rows = [row[: 20 + 7 * (i % 9)] for i, row in enumerate(rows)]
    (path / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    (path / "text.txt").write_text(" ".join(rows))
    (path / "held-out.txt").write_text(rows[0] * 4)
    return path


def prepare(path: Path, family: str = "llama", **odd: object) -> Path:
    """A directory with a tiny model of a family, its tokenizer, and texts; returns `path`."""
    make_model(family, path / family, vocab=320, **{"layers": 3, "tied": True, **odd})
    make_tokenizer(path / family)
    return texts(path)


def micro_batches_of(
    directory: Path,
    step: int,
    *,
    micro_batches: int,
    family: str = "llama",
    pack: bool = True,
    data: str | None = None,
) -> list[MicroBatch]:
    """The micro-batches of two rows that step `step` of a run with seed 0 trains on; of `data`, or of one
    long text when packed, of rows otherwise."""
    text = TextData(
        directory / (data or ("text.txt" if pack else "rows.jsonl")),
        load_tokenizer(directory / family),
        sequence_length=LENGTH,
        pack=pack,
    )
    return [
        MicroBatch(
            torch.from_numpy(batch.input_ids),
            torch.from_numpy(batch.labels),
            None if batch.attention_mask is None else torch.from_numpy(batch.attention_mask),
            None if batch.position_ids is None else torch.from_numpy(batch.position_ids),
        )
        for batch in text.micro_batches(step, micro_batches=micro_batches, micro_batch_size=2, seed=0)
    ]


def states_of(out: Path, model: StreamedModel) -> dict[str, torch.Tensor]:
    """Master, first and second moment of each tensor of a run's last snapshot: fp32, three rows of its elements."""
    found = {t.name: torch.full((3, t.elements), torch.nan) for state in model.states for t in state.tensors}
    with reopened(out) as kept:
        schedule = build_schedule(kept.plan.model, kept.plan.decision)
        records = Records.of(schedule, snapshots=True)
        store = Store.open(kept.volumes, records.records)
        try:
            held = Snapshotted(schedule, records.places(schedule), store)
            for home in schedule.homes:
                assert home.optimizer
                scratch = torch.from_dlpack(native.Arena(home.optimizer.nbytes, lock=False))
                forms = held.get(home.optimizer, scratch).view(torch.float32).view(3, home.stop - home.start)
                for tensor in model.states[home.state].tensors:
                    start, stop = max(tensor.offset, home.start), min(tensor.offset + tensor.elements, home.stop)
                    if start < stop:
                        into = slice(start - tensor.offset, stop - tensor.offset)
                        found[tensor.name][:, into] = forms[:, start - home.start : stop - home.start]
        finally:
            store.close()
    return found
