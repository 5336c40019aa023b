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

BUDGET = ("--host-memory", "2MiB")
SMALL = ("--seconds", "1", "--sequence-length", "64", "--micro-batch-sizes", "1,2")
TRAIN = ("train", "--model", "model", "--data", "rows.jsonl", *SMALL, "--out", "run")


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
    """A budget that is too small costs no second measurement; of other options the same command says which they are."""
    assert "the least that would do is" in trained(home, *TRAIN, "--host-memory", "64KiB", expect=3)
    run = home / "run"
    profile = (run / "profile.json").read_bytes()
    assert not (run / "run.json").exists()
    process = started(home, *TRAIN, *BUDGET, "--epochs", "40")
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "step 2/" in line:
            process.send_signal(signal.SIGINT)
            break
    said += process.communicate(timeout=HANG_SECONDS)[1]
    assert process.returncode == 130, said
    assert "profile.json is still valid" in said and "measures this machine" not in said
    plan, kept, prepared = (
        Plan.load(run / "plan.json"),
        Run.load(run / "run.json"),
        Preparation.load(run / "train.json"),
    )
    rows = int(said.split(" row(s) of ")[0].rsplit(" ", 1)[1])
    assert kept.steps == -(-40 * rows // plan.decision.rows)
    assert plan.prediction.ssd_write_bytes, "the budget holds not all"
    assert plan.decision.host_budget_bytes == 2 << 20 and prepared.given == (
        "host_memory", "micro_batch_sizes", "model", "seconds", "sequence_length"
    )  # fmt: skip
    assert prepared.planned["global_batch"] == str(plan.decision.rows)
    for words in (
        "train: chosen: --global-batch ", "--device cpu", "--snapshot-minutes 10", "tokens/s", "a step takes ",
        "host memory for training ", "a step to the drive", "--endurance SIZE", "nothing is held out",
    ):  # fmt: skip
        assert words in said, words
    told = trained(home, *TRAIN, *BUDGET, "--global-batch", "2", expect=2)
    assert "was not planned with --global-batch 2" in told and "ssdplan run PLAN --resume RUN" in told
    words = [word if word != "model" else "other" for word in TRAIN]
    make_model("llama", home / "other", layers=3, vocab=320, hidden=64, tied=True, seed=1)
    told = trained(home, *words, *BUDGET, expect=2)
    assert f"a run is there, which trains {home / 'model'}, and --model other has other weights" in told
    (home / "model").rename(home / "moved")
    words = [word if word != "model" else "moved" for word in TRAIN]
    told = trained(home, *words, *BUDGET, "--steps", str(kept.steps // 10))
    assert "goes on from its last snapshot" in told and "the model is in" in told
    assert "measures" not in told and (run / "profile.json").read_bytes() == profile
    assert (run / "model" / "config.json").is_file()
    assert Run.load(run / "run.json").options["steps"] == str(kept.steps // 10)
    (home / "moved").rename(home / "model")
    told = trained(
        home, *TRAIN[:-2], *BUDGET, "--from-profile", "run/profile.json", "--precision", "fp32", "--out", "second",
        expect=2,
    )  # fmt: skip
    assert "--from-profile run/profile.json: the precision is another (bf16, now fp32)" in told
