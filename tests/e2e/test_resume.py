"""Runs that are stopped, go on and are exported, as a user does it: options, exit codes and what is said."""

import json
import signal
from functools import partial

import pytest
import torch

from ssdplan.executor.model.model import open_model
from tests.e2e.test_commands import QUICK, briefly, home, refused, ssdplan
from tests.made.plans import make_plan
from tests.warm import Started, run

__all__ = ["home"]
TRAIN = ["--data", "rows.jsonl", "--eval-data", "held-out.txt", "--lr", "3e-3", "--seed", 3, "--no-pack"]


def wait_for(process: Started, text: str) -> None:
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"never said: {text}")


def test_a_stopped_run_goes_on_from_anywhere_with_no_option_repeated(home, tmp_path):
    """SIGTERM, then kill -9, then to the end; the same model as that of a run that nobody stopped."""
    out = tmp_path / "run"
    run = ["run", "plan.json", *TRAIN]
    process = Started(*run, "--out", out, "--steps", 100000, "--snapshot-every", 1000, cwd=home)
    try:
        wait_for(process, "step 3/")
        assert "in use by another run" in refused("run", "--resume", out, cwd=home, code=7)
        assert "in use by another run" in refused("export", out, "--to", tmp_path / "e", cwd=home, code=7)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and "error:" not in said and "Traceback" not in said
    assert f"go on with ssdplan run --resume {out}" in said and "stops with a snapshot" in said
    step = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    again = ["run", "--resume", out]
    assert f"has {step} behind it" in refused(*again, "--steps", 1, cwd=tmp_path, code=2)
    goal = step + 4
    ssdplan(*run, "--steps", goal, "--out", tmp_path / "goal", cwd=home)
    process = Started(*again, "--steps", goal, "--snapshot-every", 1, cwd=tmp_path)
    wait_for(process, f"snapshot after {step + 1} steps")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    shown = ssdplan("show", out, "--plots", tmp_path / "plots", "--html", tmp_path / "killed.html", cwd=tmp_path).stdout
    assert f" of {goal} steps; no process trains it now." in shown and "Loss over steps" in shown
    assert f"It goes on with: ssdplan run --resume {out}" in shown
    assert (tmp_path / "plots" / "training.png").exists()
    assert "Training loss over" in (tmp_path / "killed.html").read_text()
    # From here on nothing is repeated, not even --steps.
    done = ssdplan(*again, cwd=tmp_path)
    assert "training loss" in done.stdout and f"step {goal}/{goal}" in done.stderr
    one, other = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "goal"))
    assert one == other
    kept = json.loads((out / "run.json").read_text())
    assert kept["options"]["steps"] == str(goal) and kept["options"]["pack"] is False
    assert kept["options"]["data"] == str(home / "rows.jsonl")
    assert "are done" in refused(*again, cwd=tmp_path, code=2)
    ssdplan("show", out, cwd=tmp_path)


def test_what_is_another_run_is_named(home, tmp_path):
    out = tmp_path / "run"
    ssdplan("run", "plan.json", *TRAIN, "--steps", 2, "--snapshot-every", 1, "--keep", 1, "--out", out, cwd=home)
    again = ["run", "--resume", out, "--steps", 3]
    error = refused(*again, "--lr", "1e-5", cwd=home, code=8)
    assert "optimizer.lr was 0.003 and is 1e-05" in error and "--resume-anyway" in error
    assert "training data changed" in refused(*again, "--data", "text.txt", cwd=home, code=8)
    done = ssdplan(*again, "--lr", "1e-5", "--resume-anyway", cwd=home)
    assert "goes on as another run" in done.stderr
    assert json.loads((out / "run.json").read_text())["options"]["lr"] == "1e-05"


def test_a_run_whose_log_is_full_ends_as_ever_and_its_store_goes_when_told(home, tmp_path):
    """Standard error on a full disk; a closed terminal says the same by another number."""
    out = tmp_path / "run"
    training = ["run", "plan.json", *TRAIN, "--steps", 2, "--snapshot-every", 1, "--out", out]
    done = ssdplan(*training, cwd=home, start=partial(run, stderr="/dev/full"))
    assert "training loss" in done.stdout
    assert (out / "report.json").exists() and (out / "model" / "model.safetensors").exists()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    for line in lines:
        if "loss" in line:
            assert line["computed_tokens"] == 4 * 32 > line["tokens"]  # four rows of 32, and no row is all text
            assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(line["computed_tokens"])
            assert line["learnt_tokens_per_second"] * line["step_seconds"] == pytest.approx(line["tokens"])
    shown = " ".join(ssdplan("show", out, cwd=home).stdout.split())
    assert (
        f"the states of its last snapshots: {out / 'volume-0.ssdplan'} " in shown
        and f"ssdplan volume drop {out}" in shown
    )
    assert "give --yes" in refused("volume", "drop", out, cwd=home, code=2)
    ssdplan("volume", "drop", out, "--yes", cwd=home)
    assert not list(out.glob("*.ssdplan"))
    assert "was dropped" in refused("run", "--resume", out, "--steps", 3, cwd=home, code=7)
    assert "was dropped with the states after step 2" in " ".join(ssdplan("show", out, cwd=home).stdout.split())


def test_a_run_is_exported(home, tmp_path):
    out = tmp_path / "run"
    ssdplan("run", "plan.json", *TRAIN, "--steps", 2, "--snapshot-every", 1, "--out", out, cwd=home)
    done = ssdplan("export", out, "--to", tmp_path / "exported", cwd=tmp_path)
    assert "the model after 2 steps is in" in done.stderr
    for path in (out / "model").iterdir():
        assert (tmp_path / "exported" / path.name).read_bytes() == path.read_bytes()
    assert "not an empty directory" in refused("export", out, "--to", tmp_path / "exported", cwd=home, code=2)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")


def test_wrong_usage_is_named(home, tmp_path):
    run = ["run", "plan.json", "--data", "text.txt", "--steps", 1]
    for arguments, says in (
        (["run"], "PLAN, --data, --steps or --epochs, --out"),
        (run, "needs --out"),
        ([*run, "--out", tmp_path / "run", "--keep", 3, "--snapshot-every", 1], "--keep 3"),
        ([*run, "--out", tmp_path / "run", "--keep", 1], "--keep 1: "),
        ([*run, "--out", tmp_path / "run", "--resume-anyway"], "--resume-anyway"),
        (["run", "--resume", tmp_path], "no run that could go on"),
        (["run", "--resume", tmp_path, "--out", tmp_path / "run"], "--out"),
        (["export", tmp_path, "--to", tmp_path / "e"], "no run"),
    ):
        assert says in refused(*arguments, cwd=home, code=2), arguments
    out = tmp_path / "run"
    ssdplan(*run, "--snapshot-every", 1, "--out", out, cwd=home)
    kept = json.loads((out / "run.json").read_text())
    for change, says in (
        ({"options": {**kept["options"], "snapshot_evry": "2"}}, "did you mean snapshot_every?"),
        ({"options": {**kept["options"], "lr": "fast"}}, "'fast' is not a number"),
        ({"schema": "ssdplan.run/2"}, "schema"),
    ):
        (out / "run.json").write_text(json.dumps({**kept, **change}))
        error = refused("run", "--resume", out, "--steps", 2, cwd=home, code=2)
        assert says in error and "run.json" in error


def test_a_part_of_a_model_is_trained_stopped_and_exported(home, tmp_path):
    """From --freeze to a model of which that part has the bits that it had; another --freeze is refused."""
    from safetensors.torch import load_file

    freeze = ["--freeze", "model.layers.[01].*", "--freeze", "*.2.mlp.*", "--freeze", "*embed_tokens*"]
    shape = ["--model", home / "model", "--sequence-length", 32, "--micro-batch-sizes", 1, "--precision", "fp32"]
    profile = ssdplan("profile", *shape, *freeze, *QUICK, "-o", "p.json", cwd=tmp_path, start=briefly)
    assert "of them frozen" in profile.stdout and "model.layers.[01].* *.2.mlp.* *embed_tokens*" in profile.stdout
    said = refused("profile", *shape, "--freeze", "layers.9.*", "-o", "q.json", cwd=tmp_path, code=2)
    assert "--freeze layers.9.*: matches no parameter of model; near it are model.layers." in said
    assert "nothing to train" in refused("profile", *shape, "--freeze", "*", "-o", "q.json", cwd=tmp_path, code=2)

    residency = ["--residency", "optimizer=0.5,parameters=0", "--delay-ratio", 0.4]
    solve = ["solve", "p.json", "--host-memory", "64MiB", "--global-batch", 4]
    plan = ssdplan(*solve, *residency, "--full", "-o", "plan.json", cwd=tmp_path)
    assert "no layer below block.2 runs backward" in plan.stdout
    assert "of all elements: model.layers.[01].* *.2.mlp.* *embed_tokens*" in plan.stdout
    train = ["--data", home / "rows.jsonl", "--lr", "3e-3", "--seed", 3]
    ssdplan("run", "plan.json", *train, "--out", "whole", "--steps", 6, cwd=tmp_path)
    ssdplan("run", "plan.json", *train, "--out", "run", "--steps", 4, "--snapshot-every", 2, cwd=tmp_path)
    ssdplan("export", "run", "--to", "halfway", cwd=tmp_path)
    ssdplan(*solve, "--delay-ratio", 1, "-o", "other.json", cwd=tmp_path)
    other = open_model(home / "model", torch.float32, freeze=("*embed_tokens*",))
    make_plan(other, sequence_length=32, micro_batches=4, micro_batch_size=1).save(tmp_path / "wrong.json")
    said = refused("run", "wrong.json", "--resume", "run", "--steps", 6, "--resume-anyway", cwd=tmp_path, code=8)
    assert "the run froze model.layers.[01].* *.2.mlp.* *embed_tokens*, and this plan freezes *embed_tokens*" in said
    ssdplan("run", "other.json", "--resume", "run", "--steps", 6, cwd=tmp_path)
    names = ("whole/model", "run/model", "halfway")
    whole, resumed, halfway = (load_file(tmp_path / name / "model.safetensors") for name in names)
    start = load_file(home / "model" / "model.safetensors")
    for name, tensor in start.items():
        frozen = "embed_tokens" in name or ".layers.0." in name or ".layers.1." in name or ".2.mlp." in name
        assert whole[name].equal(resumed[name]), name
        assert all(found[name].equal(tensor) == frozen for found in (whole, halfway)), name
    report = json.loads((tmp_path / "whole" / "report.json").read_text())
    exact = {row["quantity"]: row["relative_error"] for row in report["predictions"]}
    assert exact["ssd_read_bytes"] == exact["ssd_write_bytes"] == exact["host_arena_bytes"] == 0.0
