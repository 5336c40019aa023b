"""Whole runs that save activations: the bits of recomputing everything, wherever these wait, and the planned bytes."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from ssdplan import cli
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.executor.train import train
from ssdplan.plans.documents.plan import Saved, SavedTier
from ssdplan.plans.errors import UsageError
from tests.executor.model.test_saved import PRICES, values_at
from tests.executor.model.test_saved import opened as in_memory
from tests.executor.runs import LENGTH, opened, prepare
from tests.executor.test_train import digest
from tests.extent import short_or_full
from tests.made.plans import make_plan

NAMES = ("little", "much", "all")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = prepare(tmp_path_factory.mktemp("models"))
    return prepare(path, "gpt2", layers=2, resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)


@pytest.fixture(scope="module")
def rungs(directory) -> dict[str, dict[str, tuple[str, ...]]]:
    """Model -> what its blocks keep by each rung."""
    return {
        name: {
            rung: tuple(sorted(values))
            for rung, values in zip(NAMES, values_at(in_memory(directory / name), *PRICES), strict=True)
        }
        for name in ("llama", "gpt2")
    }


def run(directory, out, name, *, recipe: Recipe | None = None, data="text.txt", watch: Watch | None = None, **choices):
    model = opened(directory / name, torch.bfloat16 if choices.get("precision") == "bf16" else torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, **choices)
    usual = Recipe(steps=3, optimizer=AdamW(lr=1e-3, weight_decay=0.1), eval_every=2)
    result = train(
        plan,
        model,
        EmulatedDevice(),
        data=directory / data,
        out=out,
        recipe=recipe or usual,
        eval_data=directory / "held-out.txt",
        watch=watch or Watch(),
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    norms = tuple(line["grad_norm"] for line in lines if "grad_norm" in line)
    return digest(out), tuple(result.losses), tuple(result.eval_losses.values()), norms


def shares(tiers: tuple[SavedTier, ...], *, all_of_them: bool) -> list[Saved]:
    """Every rung on every tier, of all pairs or of two thirds of them."""
    pairs = list(itertools.product(NAMES, tiers))
    whole = len(pairs) if all_of_them else 1.5 * len(pairs)
    return [Saved(rung=rung, tier=tier, share=1 / whole) for rung, tier in pairs]


@pytest.mark.parametrize(("name", "precision"), [("llama", "fp32"), ("gpt2", "bf16")])
def test_saving_changes_no_bit(directory, rungs, tmp_path, name, precision):
    """Dropout, bf16, delay, both schedules, both kinds of memory, every tier: as where everything is recomputed.
    Each schedule meets each kind of memory, in one of the models or, in full, in both."""
    common = {"precision": precision, "micro_batches": 3, "micro_batch_size": 1, "chunk": 4096, "rungs": rungs[name]}
    for schedule in ("vertical", "horizontal"):
        alpha = 0.4 if schedule == "vertical" else 0.0
        expected = run(directory, tmp_path / schedule, name, schedule=schedule, alpha=alpha, **common)
        crossed = (schedule == "vertical") == (name == "llama")
        for unified in short_or_full((crossed,), (False, True)):
            tiers: tuple[SavedTier, ...] = ("host", "ssd") if unified else ("device", "host", "ssd")
            saved = shares(tiers, all_of_them=unified)
            out = tmp_path / f"{schedule}-{unified}"
            found = run(directory, out, name, schedule=schedule, alpha=alpha, unified=unified, saved=saved, **common)
            assert found == expected, (schedule, unified)


def test_clipping_accumulation_padding_and_packing(directory, rungs, tmp_path):
    """Rows of their own length, or packed; every update delayed by clipping."""
    for pack in (False, True):
        recipe = Recipe(steps=3, optimizer=AdamW(lr=1e-3), pack=pack, eval_every=2)
        choices = {"alpha": 1.0, "clip_grad_norm": 0.1, "micro_batches": 2, "data": "rows.jsonl", "recipe": recipe}
        expected = run(directory, tmp_path / f"all-{pack}", "llama", rungs=rungs["llama"], **choices)
        saved = shares(("host", "ssd"), all_of_them=True)
        found = run(
            directory, tmp_path / f"{pack}", "llama", rungs=rungs["llama"], unified=True, saved=saved, **choices
        )
        assert found == expected


def test_snapshots_and_delayed_updates(directory, rungs, tmp_path):
    """Nothing of an activation outlives a step, so a snapshot has none of them."""
    recipe = Recipe(steps=4, optimizer=AdamW(lr=1e-3), snapshot_every=2)
    saved = shares(("host", "ssd"), all_of_them=True)
    choices = {"unified": True, "micro_batches": 2, "alpha": 0.5, "rungs": rungs["llama"]}
    expected = run(directory, tmp_path / "all", "llama", recipe=recipe, **choices)
    found = run(directory, tmp_path / "saved", "llama", recipe=recipe, saved=saved, **choices)
    assert found == expected


def test_a_fp16_run_that_overflows_skips_as_it_would(directory, rungs, tmp_path):
    recipe = Recipe(steps=4, optimizer=AdamW(lr=1e-3))
    choices = {"precision": "fp16", "alpha": 1.0, "micro_batches": 2, "recipe": recipe, "rungs": rungs["llama"]}
    model = opened(directory / "llama", torch.float16)
    assert model.dtype == torch.float16
    results = []
    for number, saved in enumerate([(), shares(("host", "ssd"), all_of_them=True)]):
        plan = make_plan(
            model if number == 0 else opened(directory / "llama", torch.float16),
            sequence_length=LENGTH,
            saved=saved,
            unified=True,
            **{key: value for key, value in choices.items() if key != "recipe"},
        )
        out = tmp_path / str(number)
        result = train(
            plan,
            opened(directory / "llama", torch.float16),
            EmulatedDevice(),
            data=directory / "text.txt",
            out=out,
            recipe=recipe,
        )
        results.append((digest(out), tuple(result.losses)))
    assert results[0] == results[1]


def test_rungs_that_cannot_be_kept_to_are_told_and_change_nothing(directory, rungs, tmp_path):
    """Values that the traced block does not have, as where another version of torch names them otherwise."""
    choices = {"micro_batches": 2, "unified": True}
    expected = run(directory, tmp_path / "all", "llama", rungs=rungs["llama"], **choices)
    plan_of = {"rungs": {"much": ("nothing_of_that_name",)}, "saved": [Saved(rung="much", tier="host", share=1.0)]}
    notes: list[str] = []
    found = run(
        directory, tmp_path / "other", "llama", watch=Watch(note=lambda note: notes.append(note)), **choices, **plan_of
    )
    assert found == expected
    told = [note for note in notes if "recomputed their block whole" in note]
    assert len(told) == 1 and "profile again" in told[0]


def test_the_run_keeps_to_the_planned_bytes(directory, rungs, tmp_path):
    out = tmp_path / "run"
    model = opened(directory / "llama", torch.float32)
    plan = make_plan(
        model,
        sequence_length=LENGTH,
        micro_batches=2,
        unified=True,
        saved=shares(("host", "ssd"), all_of_them=True),
        rungs=rungs["llama"],
    )
    recipe = Recipe(steps=3, optimizer=AdamW(lr=1e-3))
    train(plan, model, EmulatedDevice(), data=directory / "text.txt", out=out, recipe=recipe)
    steady = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
    for line in steady:
        assert line["ssd_read_bytes"] == plan.prediction.ssd_read_bytes
        assert line["ssd_write_bytes"] == plan.prediction.ssd_write_bytes


IN_INT8 = tuple(f"{rung}-int8" for rung in NAMES)


def in_int8(rungs: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return rungs | {f"{rung}-int8": values for rung, values in rungs.items()}


@pytest.mark.parametrize(("name", "precision"), [("llama", "fp32"), ("gpt2", "bf16"), ("llama", "fp16")])
def test_int8_has_the_same_bits_on_every_tier(directory, rungs, tmp_path, name, precision):
    """The rung decides the bits, and nothing else: tier, schedule, memory and runner do not. Forwards are exact."""
    common = {
        "micro_batches": 2,
        "micro_batch_size": 1,
        "precision": precision,
        "rungs": in_int8(rungs[name]),
        "alpha": 1.0,
    }
    if precision == "fp16":
        model = opened(directory / name, torch.float16)
        seen = []
        for number, tier in enumerate((None, "host", "ssd")):
            saved = [] if tier is None else [Saved(rung="all-int8", tier=tier, share=1.0)]
            plan = make_plan(model, sequence_length=LENGTH, saved=saved, unified=True, **common)
            out = tmp_path / str(number)
            recipe = Recipe(steps=4, optimizer=AdamW(lr=1e-3))
            result = train(
                plan,
                opened(directory / name, torch.float16),
                EmulatedDevice(),
                data=directory / "text.txt",
                out=out,
                recipe=recipe,
            )
            seen.append((digest(out), tuple(result.losses)))
        assert seen[1] == seen[2] and seen[0][1][0] == seen[1][1][0] and seen[0] != seen[1]
        return
    exact = run(directory, tmp_path / "exact", name, **common)
    for rung in short_or_full(IN_INT8[-1:] if name == "llama" else IN_INT8[:1], IN_INT8):
        found = set()
        for number, (tier, unified, serial) in enumerate(
            [("device", False, True), ("host", False, False), ("ssd", True, False), ("ssd", False, True)]
        ):
            recipe = Recipe(steps=3, optimizer=AdamW(lr=1e-3, weight_decay=0.1), eval_every=2, serial=serial)
            out = tmp_path / f"{rung}-{number}"
            saved = [Saved(rung=rung, tier=tier, share=1.0)]
            found.add(run(directory, out, name, recipe=recipe, unified=unified, saved=saved, **common))
        assert len(found) == 1
        weights, losses, _, norms = found.pop()
        assert losses[0] == exact[1][0], "the first forward is exact"
        assert weights != exact[0], "something was kept in int8"
        assert losses == pytest.approx(exact[1], rel=1e-3)
        assert norms == pytest.approx(exact[3], rel=2e-2)


def test_what_is_saved_in_int8_is_told(directory, rungs, tmp_path):
    notes: list[str] = []
    choices = {"micro_batches": 2, "unified": True, "rungs": in_int8(rungs["llama"])}
    watch = Watch(note=lambda note: notes.append(note))
    saved = [Saved(rung="much-int8", tier="host", share=0.5)]
    run(directory, tmp_path / "lossy", "llama", watch=watch, saved=saved, **choices)
    told = [note for note in notes if "int8" in note]
    assert len(told) == 1 and "not exact" in told[0]
    assert json.loads((tmp_path / "lossy" / "report.json").read_text())["activations"] == "int8"
    notes.clear()
    exactly = [Saved(rung="much", tier="host", share=0.5)]
    run(directory, tmp_path / "exact", "llama", watch=watch, saved=exactly, **choices)
    assert not any("int8" in note for note in notes)
    assert "activations" not in json.loads((tmp_path / "exact" / "report.json").read_text())


def test_int8_asks_for_the_devices_kernels_before_anything_is_made(directory, rungs, tmp_path, monkeypatch):
    asked: list[torch.device] = []

    def missing(device: torch.device) -> None:
        asked.append(device)
        raise UsageError("no kernels here")

    monkeypatch.setattr("ssdplan.executor.train.require_kernels", missing)
    choices = {"micro_batches": 2, "unified": True, "rungs": in_int8(rungs["llama"])}
    with pytest.raises(UsageError, match="no kernels here"):
        run(directory, tmp_path / "lossy", "llama", saved=[Saved(rung="much-int8", tier="host", share=0.5)], **choices)
    assert asked == [torch.device("cpu")] and not (tmp_path / "lossy").exists()
    run(directory, tmp_path / "exact", "llama", saved=[Saved(rung="much", tier="host", share=0.5)], **choices)
    assert len(asked) == 1
    model = str(directory / "llama")
    monkeypatch.setattr("ssdplan.executor.model.packed.require_kernels", missing)
    profile = ["profile", "--model", model, "--compression-error", "-o", str(tmp_path / "profile.json")]
    assert cli.main(profile) == UsageError.exit_code
    assert len(asked) == 2 and not (tmp_path / "profile.json").exists()
