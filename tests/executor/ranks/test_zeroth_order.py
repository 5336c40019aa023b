"""Ranks without gradients: each has all of the model and takes its part of the batch, and they exchange losses. The
weights have the bits of one rank's, whatever the number of ranks."""

import hashlib
import json
from pathlib import Path

import pytest

from ssdplan.executor.optimizer.zeroth_order_log import read_log
from ssdplan.executor.ranks.ended import sums_of_all
from ssdplan.executor.ranks.group import ALONE
from ssdplan.executor.snapshots.agreement import settle_log
from ssdplan.plans.errors import RankError
from ssdplan.plans.files import Folder
from tests.executor.ranks.processes import ended, run, started
from tests.executor.runs import prepare
from tests.extent import short_or_full


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = prepare(tmp_path_factory.mktemp("models"))
    return prepare(path, "gpt2", layers=2, resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "ranks", "precision", "zeroth_order"),
    short_or_full(
        [("gpt2", 2, "fp32", {"directions": 2})],
        [
            ("gpt2", 2, "fp32", {"directions": 2}),
            ("gpt2", 4, "fp32", {"directions": 3, "in_turns": True}),
            ("llama", 4, "bf16", {"masters": True, "written_every": 4}),
            ("llama", 2, "bf16", {"piece_elements": 1 << 11}),
        ],
    ),
)
def test_weights_are_one_ranks_to_the_bit(
    directory: Path, tmp_path: Path, name: str, ranks: int, precision: str, zeroth_order: dict[str, object]
) -> None:
    """Dropout included; and the logs of all ranks are one rank's, step by step."""
    of_all = {
        "name": name, "precision": precision, "zeroth_order": zeroth_order, "parameters": 0.5, "micro_batch_size": 1,
        "recipe": {"steps": 4, "eval_every": 2},
    }  # fmt: skip
    one = run(directory, tmp_path / "one", 1, micro_batches=4, **of_all)
    several = run(directory, tmp_path / "several", ranks, micro_batches=4 // ranks, **of_all)
    assert several["losses"] == one["losses"] and digest(tmp_path / "several") == digest(tmp_path / "one")
    assert list(several["eval"].values()) == pytest.approx(list(one["eval"].values()), rel=1e-6)
    logs = [tmp_path / "one", tmp_path / "several"]
    logs += [tmp_path / "several" / f"rank-{rank}" for rank in range(1, ranks)]
    moves = []
    for path in logs:
        with Folder(path) as folder:
            moves.append(read_log(folder).moves)
    assert len(moves[0]) == 4 and all(each == moves[0] for each in moves)


def test_a_log_that_is_ahead_is_taken_back(directory: Path, tmp_path: Path) -> None:
    """As after a kill between two ranks' logs of one step: the run goes on to the bits of one that nobody killed."""
    plan = {"zeroth_order": {"directions": 1}, "parameters": 0.5}
    whole = run(directory, tmp_path / "whole", 2, recipe={"steps": 4}, **plan)
    out = tmp_path / "out"
    run(directory, out, 2, recipe={"steps": 3}, **plan)
    behind = out / "rank-1"
    lines = (behind / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if "loss" in json.loads(line) and "step" in json.loads(line))
    (behind / "metrics.jsonl").write_text("".join(lines[:last]))  # its log's last step is no step of it then
    said: list[str] = []

    class Ahead:
        """Rank 0 of two, of which the other has two steps."""

        rank, size = 0, 2

        def tell(self, words: bytes) -> list[bytes]:
            return [words, b"2" if words.isdigit() else words]

    settle_log(out, Ahead(), said.append)  # type: ignore[arg-type]
    assert said == ["takes back 1 step(s) of its log, which not all ranks have"]
    with Folder(out) as folder:
        assert len(read_log(folder).moves) == 2
    with started(directory, out, 2, recipe={"steps": 4}, resumes=True, **plan) as processes:
        assert [code for code, _ in ended(processes)] == [0, 0]
    assert json.loads(out.with_name("out.json").read_text())["losses"] == whole["losses"]
    assert digest(out) == digest(tmp_path / "whole")


class Told:
    """Rank 1 of two, which both tell what they are given."""

    rank, size = 1, 2

    def __init__(self, other: bytes | None = None) -> None:
        self.other, self.times = other, 0

    def tell(self, words: bytes) -> list[bytes]:
        self.times += 1
        return [words if self.other is None else self.other, words]


def test_losses_add_up_micro_batch_by_micro_batch() -> None:
    parts = [[0.1, 0.2, 0.3], [1e16, 1.0, -1e16]]
    assert sums_of_all(ALONE, parts) == [sum(part) for part in parts]
    assert sums_of_all(Told(), parts) == [sum(part + part) for part in parts]  # type: ignore[arg-type]
    many = [[float(number)] * 7 for number in range(100)]
    told = Told()
    assert sums_of_all(told, many) == [14.0 * number for number in range(100)]  # type: ignore[arg-type]
    assert told.times == 6, "700 numbers, at most 127 at once"
    with pytest.raises(RankError, match="rank 0 says 3 bytes"):
        sums_of_all(Told(b"abc"), parts)  # type: ignore[arg-type]
