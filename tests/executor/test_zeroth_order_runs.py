"""Runs without gradients, whole: their weights against the estimator in memory, going on after an end at any place,
replay of any step, and what is refused."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.loop import Loop
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.zeroth_order import MeZO
from ssdplan.executor.optimizer.zeroth_order_log import CHECKSUM_BYTES, LOG, MAGIC
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.executor.runtime.session import Session
from ssdplan.executor.snapshots import kept_weights
from ssdplan.executor.snapshots.export_run import export_run
from ssdplan.executor.snapshots.replay import replay
from ssdplan.executor.snapshots.resume import reopened
from ssdplan.executor.stepping import ZerothOrder as Stepping
from ssdplan.executor.train import train
from ssdplan.plans.documents.metrics import METRICS
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.errors import MismatchError, NumericalError, StoppedWithSnapshot, UsageError
from ssdplan.plans.files import LinkError
from tests.executor.runs import LENGTH, micro_batches_of, opened, prepare
from tests.executor.test_zeroth_order import InMemory
from tests.made.plans import make_plan

STEPS = 6
OPTIMIZER = MeZO(lr=1e-2, eps=1e-2, weight_decay=0.1, decay_all=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"))


def run(
    directory: Path,
    out: Path,
    *,
    steps: int = STEPS,
    eval_every: int = 0,
    snapshot_every: int = 0,
    resume: bool = False,
    optimizer: MeZO = OPTIMIZER,
    precision: torch.dtype = torch.float32,
    every: int = 1,
    directions: int = 2,
    masters: bool = False,
    by_rows: bool = False,
    freeze: tuple[str, ...] = (),
    anyway: bool = False,
    evaluated: bool = True,
    watch: Watch | None = None,
    **choices: Any,
) -> list[float]:
    """The losses of all its steps."""
    model = opened(directory / "llama", precision, freeze)
    zeroth_order = ZerothOrder(directions=directions, written_every=every, masters=masters, by_rows=by_rows)
    names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    plan = make_plan(
        model,
        sequence_length=LENGTH,
        micro_batches=2,
        zeroth_order=zeroth_order,
        precision=names[precision],
        **{"parameters": 0.4, "on_device": 0.3, **choices},
    )
    recipe = Recipe(steps=steps, optimizer=optimizer, eval_every=eval_every, snapshot_every=snapshot_every)
    arguments: dict[str, Any] = {"data": directory / "text.txt", "eval_data": directory / "held-out.txt"}
    if not evaluated:
        del arguments["eval_data"]
    arguments |= {"recipe": recipe, "watch": watch, "options": {"model": str(directory / "llama")}}
    if not resume:
        return train(plan, model, EmulatedDevice(), out=out, **arguments).losses
    with reopened(out) as kept:
        return train(plan, model, EmulatedDevice(), out=out, resume=kept, anyway=anyway, **arguments).losses


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    run(directory, out)
    return out


def losses_of(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_has_the_weights_of_the_estimator_in_memory(directory: Path, whole: Path) -> None:
    oracle = InMemory(directory / "llama", OPTIMIZER, 2)
    expected = [oracle.step(step, micro_batches_of(directory, step, micro_batches=2)) for step in range(STEPS)]
    assert losses_of(whole) == [sum(map(sum, step)) / 4 for step in expected]
    for name, tensor in weights(whole / "model").items():
        assert torch.equal(tensor, oracle.weights()[name].detach()), name
    assert not same(weights(whole / "model"), load_file(directory / "llama" / "model.safetensors"))


@pytest.mark.parametrize(
    "choices", [{"every": 4}, {"eval_every": 1}, {"unified": True, "parameters": 0.0}, {"every": 3, "eval_every": 2}]
)
def test_writes_evaluations_and_places_change_no_bit(
    directory: Path, whole: Path, tmp_path: Path, choices: dict[str, Any]
) -> None:
    assert run(directory, tmp_path / "run", **choices) == losses_of(whole)
    assert same(weights(tmp_path / "run" / "model"), weights(whole / "model"))


class _Killed(BaseException):
    """As if the process ended there."""


@pytest.mark.parametrize("place", ["in a step", "between log and metrics", "in a record", "before the first step"])
@pytest.mark.parametrize("every", [1, 4])
def test_a_run_goes_on_to_the_bit_after_a_kill_anywhere(
    directory: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, every: int
) -> None:
    out, steps = tmp_path / "run", []
    step = Stepping.step

    def killed(self: Any, session: Any, number: int, batches: Any) -> Any:
        if place == "before the first step" or (place == "in a step" and number == 3):
            raise _Killed
        found = step(self, session, number, batches)
        if place == "between log and metrics" and number == 3:
            raise _Killed
        return found

    def metrics(_: Any) -> None:
        steps.append(None)
        if place == "in a record" and len(steps) == 4:
            raise _Killed

    monkeypatch.setattr(Stepping, "step", killed)
    with pytest.raises(_Killed):
        run(directory, out, every=every, watch=Watch(step=metrics))
    monkeypatch.setattr(Stepping, "step", step)
    if place == "in a record":
        log = out / LOG
        log.write_bytes(log.read_bytes()[:-5])
    assert run(directory, out, every=every, resume=True) == losses_of(whole) == losses_of(out)
    assert same(weights(out / "model"), weights(whole / "model"))
    assert (out / LOG).read_bytes() == (whole / LOG).read_bytes()


def test_a_run_that_is_asked_to_stop_goes_on_by_another_plan(
    directory: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    between = Loop._between

    def asked(self: Loop, steps: int) -> None:
        self.interruption.asked = steps == 3
        between(self, steps)

    monkeypatch.setattr(Loop, "_between", asked)
    notes: list[str] = []
    with pytest.raises(StoppedWithSnapshot):
        run(directory, out, watch=Watch(note=notes.append))
    assert f"its log has 3 step(s); go on with ssdplan run --resume {out}" in notes
    monkeypatch.setattr(Loop, "_between", between)
    assert run(directory, out, resume=True, unified=True, parameters=0.0, every=2) == losses_of(whole)
    assert same(weights(out / "model"), weights(whole / "model"))


@pytest.mark.parametrize(
    ("precision", "masters"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_replay_rebuilds_the_weights_of_any_step(
    directory: Path, tmp_path: Path, precision: torch.dtype, masters: bool
) -> None:
    out = tmp_path / "run"
    run(directory, out, precision=precision, masters=masters, every=2)
    assert replay(out, tmp_path / "last") == STEPS
    assert same(weights(tmp_path / "last"), weights(out / "model"))
    run(directory, tmp_path / "shorter", steps=4, precision=precision, masters=masters)
    assert replay(out, tmp_path / "fourth", step=4) == 4
    assert same(weights(tmp_path / "fourth"), weights(tmp_path / "shorter" / "model"))
    export_run(out, tmp_path / "exported")
    assert same(weights(tmp_path / "exported"), weights(out / "model"))
    with pytest.raises(UsageError, match=r"the log of .* has 6 steps"):
        replay(out, tmp_path / "seventh", step=7)
    if masters:  # another plan without them would train another model
        with pytest.raises(MismatchError, match="masters"):
            run(directory, out, steps=STEPS + 1, precision=precision, resume=True)
    assert not (tmp_path / "seventh").exists()


def test_a_log_of_other_weights_or_that_was_changed_is_refused(directory: Path, whole: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(whole, out)
    prepare(other, layers=2)
    with pytest.raises(MismatchError, match="is not the model that the log begins with"):
        replay(out, tmp_path / "to", model=other / "llama")
    log = bytearray((out / LOG).read_bytes())
    log[-60] ^= 1
    (out / LOG).write_bytes(log)
    with pytest.raises(MismatchError, match="is not what was written there"):
        replay(out, tmp_path / "to")
    with pytest.raises(MismatchError, match="is not what was written there"):
        run(directory, out, steps=STEPS + 1, resume=True)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"optimizer": replace(OPTIMIZER, lr=2e-2)}, "optimizer.lr was 0.01 and is 0.02"),
        ({"optimizer": replace(OPTIMIZER, eps=1e-3)}, "optimizer.eps was 0.01 and is 0.001"),
        ({"directions": 3}, "directions was 2 and is 3"),
    ],
)
def test_going_on_otherwise_is_refused(
    directory: Path, whole: Path, tmp_path: Path, changes: dict[str, Any], difference: str
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(MismatchError, match=difference):
        run(directory, tmp_path / "run", steps=STEPS + 1, resume=True, **changes)


def test_a_run_that_was_shared_is_replayed_though_its_store_lay_elsewhere(
    directory: Path, whole: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shutil.copytree(whole, shared, ignore=shutil.ignore_patterns("model", "*.ssdplan", METRICS))
    document = json.loads((shared / "run.json").read_text())
    document |= {"volumes": ["/no/such/drive"], "identity": "0" * len(document.get("identity") or "0" * 32)}
    (shared / "run.json").write_text(json.dumps(document))
    assert replay(shared, tmp_path / "replayed", model=directory / "llama") == STEPS
    assert same(weights(tmp_path / "replayed"), weights(whole / "model"))


def test_eps_that_the_weights_lose_is_refused(directory: Path, tmp_path: Path) -> None:
    lost = r"--eps 1e-06: \d+% of the weights would not change by it, in bf16; .* --precision fp32$"
    with pytest.raises(UsageError, match=lost):
        run(directory, tmp_path / "run", precision=torch.bfloat16, optimizer=MeZO(eps=1e-6))
    with pytest.raises(UsageError, match=r"in fp32; take a larger --eps$"):
        run(directory, tmp_path / "run", optimizer=MeZO(eps=1e-20))
    for eps in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="must be positive and finite"):
            MeZO(eps=eps)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_direction(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(NumericalError, match=r"step 1: the losses along direction 0 are .* lower --lr or --eps"):
        run(directory, tmp_path / "run", optimizer=MeZO(eps=1e30))


def test_a_run_of_which_a_file_is_gone_is_not_begun_again(directory: Path, whole: Path, tmp_path: Path) -> None:
    for name, words in ((LOG, f"and {METRICS} tells of 6 steps"), (METRICS, "the log beside it has 6")):
        out = tmp_path / name
        shutil.copytree(whole, out)
        (out / name).unlink()
        with pytest.raises(MismatchError, match=words):
            run(directory, out, steps=STEPS + 1, resume=True)
        assert (out / METRICS).exists() != (out / LOG).exists()
    assert replay(tmp_path / METRICS, tmp_path / "replayed") == STEPS
    assert same(weights(tmp_path / "replayed"), weights(whole / "model"))


def test_a_log_that_lost_its_end_is_told_and_its_steps_are_made_again(
    directory: Path, whole: Path, tmp_path: Path
) -> None:
    notes: list[str] = []
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    records = (out / LOG).read_bytes()
    (length,) = struct.unpack_from("<I", records, len(MAGIC))
    header = len(MAGIC) + 4 + length + CHECKSUM_BYTES
    each = (len(records) - header) // STEPS
    (out / LOG).write_bytes(records[: len(records) - 2 * each])
    losses = run(directory, out, steps=STEPS, resume=True, watch=Watch(note=notes.append))
    assert losses == losses_of(whole) and same(weights(out / "model"), weights(whole / "model"))
    assert [note for note in notes if note.startswith("the log has 4 of 6 steps; the others are made again")]

    shutil.copytree(whole, tmp_path / "none")
    (tmp_path / "none" / LOG).write_bytes(records[: len(records) - STEPS * each])
    with pytest.raises(MismatchError, match=f"has no step, and {METRICS} tells of 6; bring it back"):
        run(directory, tmp_path / "none", steps=STEPS, resume=True)


def test_a_seed_below_zero_is_its_bits(directory: Path, tmp_path: Path) -> None:
    for name, seed in (("below", -3), ("above", 2**64 - 3)):
        run(directory, tmp_path / name, steps=2, optimizer=replace(OPTIMIZER, seed=seed))
    assert same(weights(tmp_path / "below" / "model"), weights(tmp_path / "above" / "model"))
    assert replay(tmp_path / "below", tmp_path / "replayed") == 2
    assert same(weights(tmp_path / "replayed"), weights(tmp_path / "below" / "model"))


def test_what_may_change_does_and_a_refusal_changes_nothing(directory: Path, whole: Path, tmp_path: Path) -> None:
    """Held-out text may come and go; another rate only when asked for twice, and then the log goes on with it."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    before = (out / "run.json").read_bytes(), (out / LOG).read_bytes()
    other = replace(OPTIMIZER, lr=2e-2)
    with pytest.raises(MismatchError, match=r"optimizer\.lr was 0\.01 and is 0\.02"):
        run(directory, out, steps=STEPS + 1, resume=True, optimizer=other)
    with pytest.raises(MismatchError, match=r"--decay-all cannot change"):
        run(directory, out, steps=STEPS + 1, resume=True, anyway=True, optimizer=replace(OPTIMIZER, decay_all=False))
    assert before == ((out / "run.json").read_bytes(), (out / LOG).read_bytes())
    assert len(run(directory, out, steps=STEPS + 1, resume=True, evaluated=False)) == STEPS + 1
    losses = run(directory, out, steps=STEPS + 2, resume=True, anyway=True, optimizer=other)
    assert losses[:STEPS] == losses_of(whole) and len(losses) == STEPS + 2
    assert replay(out, tmp_path / "last") == STEPS + 2
    assert same(weights(tmp_path / "last"), weights(out / "model"))


def test_another_runs_log_is_not_replayed(directory: Path, whole: Path, tmp_path: Path) -> None:
    run(directory, tmp_path / "three", steps=2, directions=3)
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.copy(tmp_path / "three" / LOG, out / LOG)
    with pytest.raises(MismatchError, match="its directions is 3, and the run's is 2"):
        replay(out, tmp_path / "to")
    run(directory, tmp_path / "faster", steps=2, optimizer=replace(OPTIMIZER, eps=2 * OPTIMIZER.eps))
    shutil.copy(tmp_path / "faster" / LOG, out / LOG)
    with pytest.raises(MismatchError, match=r"at step 1 its projected gradient is .*, and metrics\.jsonl tells of"):
        replay(out, tmp_path / "to")


def kept_in(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("*weights-*"))


@pytest.mark.parametrize("place", ["in a step", "in the weights", "before their document", "after their document"])
@pytest.mark.parametrize(
    ("precision", "masters", "every"),
    [(torch.float32, False, 4), (torch.bfloat16, False, 1), (torch.bfloat16, True, 3)],
)
def test_a_run_goes_on_from_the_weights_that_it_kept(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    precision: torch.dtype,
    masters: bool,
    every: int,
) -> None:
    """To the same bits wherever it is killed; and what it goes on from is what the weights say, not the log."""
    out, choices = tmp_path / "run", {"precision": precision, "masters": masters}
    run(directory, tmp_path / "whole", **choices)
    at, clear = kept_weights.export_model, kept_weights.clear

    def write(destination: Path, **arguments: Any) -> None:
        at(destination, **arguments)
        if destination.name == "weights-4" and place == "before their document":
            raise _Killed

    def cut(tensors: Any) -> Any:
        for number, tensor in enumerate(tensors):
            if number == 3:
                raise _Killed
            yield tensor

    def half(destination: Path, **arguments: Any) -> None:
        if destination.name == "weights-4" and place == "in the weights":
            arguments["tensors"] = cut(arguments["tensors"])
        write(destination, **arguments)

    def cleared(folder: Any, *, spared: str = "") -> None:
        if spared == "weights-4" and place == "after their document":
            raise _Killed
        clear(folder, spared=spared)

    step = Stepping.step

    def killed(self: Any, session: Any, number: int, batches: Any) -> Any:
        if place == "in a step" and number == 5:
            raise _Killed
        return step(self, session, number, batches)

    monkeypatch.setattr(kept_weights, "export_model", half)
    monkeypatch.setattr(kept_weights, "clear", cleared)
    monkeypatch.setattr(Stepping, "step", killed)
    with pytest.raises(_Killed):
        run(directory, out, every=every, snapshot_every=2, **choices)
    monkeypatch.undo()
    begins = {"in a step": 4, "in the weights": 2, "before their document": 2, "after their document": 4}[place]
    with reopened(out, reading=True) as kept:
        assert kept.weights and kept.weights.step == begins
        assert kept.step == (5 if place == "in a step" else 4)
    moved: list[int] = []
    move = Session.move
    monkeypatch.setattr(
        Session, "move", lambda self, optimizer, moves: (moved.append(len(moves)), move(self, optimizer, moves))
    )
    assert run(directory, out, every=every, resume=True, snapshot_every=2, **choices) == losses_of(tmp_path / "whole")
    assert moved[0] == 2 * (kept.step - begins)  # two directions a step
    assert same(weights(out / "model"), weights(tmp_path / "whole" / "model"))
    assert kept_in(out) == ["weights-6", "weights-6.json"]
    export_run(out, tmp_path / "exported")
    assert same(weights(tmp_path / "exported"), weights(out / "model"))
    assert replay(out, tmp_path / "first", step=3) == 3


def test_kept_weights_that_were_changed_are_refused_or_left(directory: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(directory, out, steps=4, snapshot_every=3)
    assert kept_in(out) == ["weights-3", "weights-3.json"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    *before, kept, after = [line for line in lines if "ssd_written_bytes" in line]
    flushed = kept["ssd_written_bytes"] - before[-1]["ssd_written_bytes"] - kept["snapshot_bytes"]
    assert flushed >= 0 and after["ssd_written_bytes"] >= kept["ssd_written_bytes"]
    document, stored = out / "weights-3.json", out / "weights-3" / "model.safetensors"
    good, data = document.read_text(), bytearray(stored.read_bytes())
    data[-5] ^= 1
    stored.write_bytes(data)
    with pytest.raises(
        MismatchError, match=r"is not what was written there; remove this directory and weights-3\.json"
    ):
        run(directory, out, resume=True)
    document.write_text(good.replace('"log": "', '"log": "0')[: len(good)])
    with pytest.raises(UsageError, match="log"):
        run(directory, out, resume=True)
    fields = json.loads(good)
    document.write_text(json.dumps(fields | {"log": "0" * 32}))
    with pytest.raises(MismatchError, match="is of another log than the one beside it"):
        run(directory, out, resume=True)
    document.unlink()  # and so the weights are nobody's
    assert run(directory, out, resume=True) == losses_of(whole)
    assert same(weights(out / "model"), weights(whole / "model"))
    assert kept_in(out) == []


def test_kept_weights_are_never_links(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(directory, out, steps=4, snapshot_every=3)
    (out / "weights-3").rename(tmp_path / "elsewhere")
    (out / "weights-3").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LinkError, match="weights-3: is a symbolic link"):
        run(directory, out, resume=True)
    assert (tmp_path / "elsewhere" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "choices",
    [
        {"precision": torch.float32},
        {"precision": torch.float32, "freeze": ("*embed_tokens*",)},
        {"precision": torch.bfloat16, "masters": True, "snapshot_every": 2},
    ],
)
@pytest.mark.parametrize("every", [1, 4])
def test_runs_with_a_table_by_rows_have_the_bits_of_those_with_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, choices: dict[str, Any]
) -> None:
    """Evaluated, killed in a step and gone on with, exported and replayed; whatever is frozen."""
    directory, out = prepare(tmp_path / "models", tied=False, hidden=64), tmp_path / "run"
    losses = run(directory, tmp_path / "whole", unified=True, parameters=0.0, on_device=0.5, **choices)
    step = Stepping.step

    def killed(self: Any, session: Any, number: int, batches: Any) -> Any:
        if number == 3:
            raise _Killed
        return step(self, session, number, batches)

    monkeypatch.setattr(Stepping, "step", killed)
    with pytest.raises(_Killed):
        run(directory, out, every=every, by_rows=True, eval_every=2, **choices)
    monkeypatch.setattr(Stepping, "step", step)
    assert run(directory, out, every=every, by_rows=True, eval_every=2, resume=True, **choices)[-3:] == losses[-3:]
    found = weights(out / "model")
    assert same(found, weights(tmp_path / "whole" / "model"))
    assert replay(out, tmp_path / "replayed") == STEPS and same(weights(tmp_path / "replayed"), found)
    begun = load_file(directory / "llama" / "model.safetensors")
    table = "model.embed_tokens.weight"
    assert torch.equal(found[table], begun[table].to(choices["precision"])) == bool(choices.get("freeze"))


def test_a_plan_by_rows_of_a_model_that_reads_its_table_otherwise_is_refused(tmp_path: Path) -> None:
    directory = prepare(tmp_path / "models", tied=False, hidden=64)
    model = open_model(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, parameters=1.0, zeroth_order=ZerothOrder(by_rows=True))
    table = model.module.get_input_embeddings()
    assert isinstance(table, torch.nn.Embedding)
    table.forward = lambda ids: table.weight[ids]  # type: ignore[method-assign]
    recipe, out = Recipe(steps=STEPS, optimizer=OPTIMIZER), tmp_path / "run"
    with pytest.raises(MismatchError, match="moves rows of a table of token embeddings that LlamaForCausalLM does not"):
        train(plan, model, EmulatedDevice(), data=directory / "text.txt", out=out, recipe=recipe)
