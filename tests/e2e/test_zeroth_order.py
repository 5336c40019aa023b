"""Training without gradients as a user runs it, on a tiny model: planned, shown, trained, replayed; and what is
refused."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_commands import QUICK, refused, ssdplan
from tests.made.models import make_model, make_tokenizer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, texts, a profile and a plan for mezo that has its parameters on ssd."""
    path = tmp_path_factory.mktemp("home")
    make_model("llama", path / "model", layers=4, vocab=320, hidden=64, tied=True)
    make_tokenizer(path / "model")
    (path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (path / "held-out.txt").write_text("over the lazy dog jumps the quick brown fox. " * 8)
    ssdplan(
        "profile", "--model", "model", "--sequence-length", 32, "--micro-batch-sizes", 1, "--precision", "fp32",
        *QUICK, cwd=path,
    )  # fmt: skip
    mezo = ("solve", "profile.json", "--optimizer", "mezo", "--directions", 2, "--micro-batches", 2)
    ssdplan(*mezo, "--host-memory", "16MiB", "--residency", "parameters=0", cwd=path)
    return path


def test_a_plan_without_gradients_is_shown_trained_and_replayed(home: Path, tmp_path: Path) -> None:
    shown = ssdplan(
        "show", "plan.json", "--plots", tmp_path / "plots", "--html", tmp_path / "plan.html", cwd=home
    ).stdout  # fmt: skip
    assert "mezo, 2 random directions a step; no gradients, no states" in shown
    assert "a log of 48 bytes a step, which with the first weights is the state" in shown
    assert "first-order" in shown and "\n  first order " in shown, "the name of the reason is not cut"
    out = tmp_path / "run"
    ssdplan(
        "run", "plan.json", "--data", "text.txt", "--steps", 3, "--out", out, "--eval-data", "held-out.txt", cwd=home
    )
    report = json.loads((out / "report.json").read_text())
    measured = {row["quantity"]: (row["predicted"], row["measured"]) for row in report["predictions"]}
    assert measured["ssd_read_bytes"][0] == measured["ssd_read_bytes"][1] > 0
    assert measured["host_arena_bytes"][0] == measured["host_arena_bytes"][1]
    ssdplan("show", out, "--html", tmp_path / "run.html", cwd=home)
    ssdplan("run", "--resume", out, "--steps", 5, cwd=home)
    ssdplan("solve", "profile.json", "--host-memory", "64MiB", "--micro-batches", 2, "-o", "adamw.json", cwd=home)
    other = refused("run", "adamw.json", "--resume", out, "--steps", 7, cwd=home, code=8)
    assert "the run trains by mezo, and this plan by adamw" in other
    ssdplan("replay", out, "--to", tmp_path / "last", cwd=home)
    weights = [(place / "model.safetensors").read_bytes() for place in (tmp_path / "last", out / "model")]
    assert weights[0] == weights[1]
    told = ssdplan("replay", out, "--step", 3, "--to", tmp_path / "third", "--json", cwd=home)
    assert json.loads(told.stdout)["step"] == 3
    assert (tmp_path / "third" / "model.safetensors").read_bytes() == next(
        (out / name / "model.safetensors").read_bytes() for name in ("model-3",)
    )


def test_what_says_nothing_without_gradients_is_refused(home: Path, tmp_path: Path) -> None:
    mezo = ("solve", "profile.json", "--host-memory", "16MiB", "--optimizer", "mezo")
    for option in (("--clip-grad-norm", 1), ("--optimizer-states", "fp32"), ("--delay-ratio", 0.5)):
        assert f"{option[0]}: optimizer mezo has no gradients" in refused(*mezo, *option, cwd=home, code=2)
    assert "only --optimizer mezo" in refused(*mezo[:4], "--directions", 2, cwd=home, code=2)
    for masters in ("fp32", "none"):
        assert "--masters: this profile is of fp32" in refused(*mezo, "--masters", masters, cwd=home, code=2)
    run = ("run", "plan.json", "--data", "text.txt", "--steps", 3, "--out", tmp_path / "run")
    for option in (("--beta1", 0.8), ("--replan",), ("--keep", 1), ("--keep", 1, "--snapshot-every", 2)):
        assert f"{option[0]}: the plan is for mezo" in refused(*run, *option, cwd=home, code=2)
    assert not (tmp_path / "run").exists()
