"""`ssdplan train` as a user has it: from a model and data to a model, a stop, and the same command again."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.preparation import Preparation
from ssdplan.plans.documents.run import Run
from tests.bounds import HANG_SECONDS
from tests.made.models import make_model, make_tokenizer
from tests.warm import ENVIRONMENT

TRAIN = ("train", "--model", "model", "--data", "rows.jsonl", "--seconds", "1", "--host-memory", "2MiB", "--out", "run")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_model("llama", tmp_path / "model", layers=3, vocab=320, hidden=64, tied=True)
    make_tokenizer(tmp_path / "model")
    rows = [{"prompt": f"fox {i}", "completion": " over" * (1 + i % 4)} for i in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def started(home: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ssdplan", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=home, env=ENVIRONMENT, text=True, **pipes)


def trained(home: Path, *words: str, expect: int = 0) -> str:
    out, err = started(home, *words).communicate(timeout=HANG_SECONDS)
    assert "Traceback" not in err, err
    return err + out if not expect else err


def test_one_command_trains_stops_goes_on_and_repeats_nothing(home: Path) -> None:
    process = started(home, *TRAIN, "--epochs", "40")
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "step 2/" in line:
            process.send_signal(signal.SIGINT)
            break
    said += process.communicate(timeout=HANG_SECONDS)[1]
    assert process.returncode == 130, said
    run = home / "run"
    plan, kept, prepared = (
        Plan.load(run / "plan.json"),
        Run.load(run / "run.json"),
        Preparation.load(run / "train.json"),
    )
    rows = int(said.split(" row(s) of ")[0].rsplit(" ", 1)[1])
    assert kept.steps == -(-40 * rows // plan.decision.rows)
    assert plan.prediction.ssd_write_bytes, "the budget holds not all"
    assert plan.decision.host_budget_bytes == 2 << 20 and prepared.given == ("host_memory", "model", "seconds")
    assert prepared.planned["global_batch"] == str(plan.decision.rows)
    for words in (
        "train: chosen: --global-batch ", "--device cpu", "--snapshot-minutes 10", "tokens/s", "a step takes ",
        "host memory for training ", "a step to the drive", "--endurance SIZE", "nothing is held out",
    ):  # fmt: skip
        assert words in said, words
    profile = (run / "profile.json").read_bytes()
    told = trained(home, *TRAIN, "--global-batch", "2", expect=2)
    assert "was not planned with --global-batch 2" in told and "ssdplan run PLAN --resume RUN" in told
    told = trained(home, *TRAIN, "--steps", str(kept.steps // 10))
    assert "goes on from its last snapshot" in told and "the model is in" in told
    assert "measures" not in told and (run / "profile.json").read_bytes() == profile
    assert (run / "model" / "config.json").is_file()


def test_what_is_valid_is_kept_and_what_is_not_is_said(home: Path) -> None:
    assert "no plan fits" in (told := trained(home, *TRAIN[:-4], "--host-memory", "64KiB", *TRAIN[-2:], expect=3)) or (
        "would do is" in told
    )
    run = home / "run"
    assert (run / "profile.json").is_file() and not (run / "run.json").exists()
    told = trained(home, *TRAIN, "--steps", "1")
    assert "profile.json is still valid" in told and "measures this machine" not in told
    assert Run.load(run / "run.json").options["steps"] == "1"
    again = trained(home, *TRAIN[:-2], "--from-profile", "run/profile.json", "--steps", "1", "--out", "second")
    assert "takes run/profile.json, and measures nothing" in again and (home / "second" / "model").is_dir()
    told = trained(
        home, *TRAIN[:-2], "--from-profile", "run/profile.json", "--precision", "fp32", "--out", "third", expect=2
    )
    assert "--from-profile run/profile.json: the precision is another (bf16, now fp32)" in told
