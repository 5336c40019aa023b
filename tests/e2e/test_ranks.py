"""Several ranks as a user runs them, on a tiny model: profiled together, planned, shown, trained; what is refused."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ssdplan.executor.store import survey, withdraw
from tests.bounds import HANG_SECONDS
from tests.e2e.test_commands import QUICK, refused, ssdplan
from tests.made.models import make_model, make_tokenizer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, texts, and a profile of two ranks."""
    path = tmp_path_factory.mktemp("home")
    make_model("llama", path / "model", layers=4, vocab=320, hidden=64, tied=True)
    make_tokenizer(path / "model")
    (path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (path / "held-out.txt").write_text("over the lazy dog jumps the quick brown fox. " * 8)
    ssdplan(
        "profile", "--ranks", 2, "--model", "model", "--sequence-length", 32, "--micro-batch-sizes", 1, "--precision",
        "fp32", *QUICK, cwd=path,
    )  # fmt: skip
    solve = ("solve", "profile.json", "--host-memory", "16MiB", "--global-batch", 4)
    ssdplan(*solve, "--residency", "optimizer=0,parameters=0", cwd=path)
    return path


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """The directory of a run of two ranks that nothing stops: four steps, and then what it loses on held-out texts.
    Their stores are on a drive that is named."""
    (home / "drive").mkdir()
    out, run = home / "whole", ("run", "plan.json", "--data", "text.txt", "--eval-data", "held-out.txt")
    run = (*run, "--steps", 4, "--ranks", 2, "--volume", "drive", "--out", out)
    assert ssdplan(*run, cwd=home).stdout.count("4 steps of model") == 1, "rank 0 speaks for all"
    return out


def test_ranks_are_planned_shown_and_trained(home: Path, whole: Path, tmp_path: Path) -> None:
    network = json.loads((home / "profile.json").read_text())["machine"]["network"]
    assert network["ranks"] == 2 and min(network.values()) > 0
    shown = ssdplan("show", "plan.json", "--html", tmp_path / "plan.html", "--trace", tmp_path / "plan.trace", cwd=home)
    assert "of all ranks" in shown.stdout and "\n  network " in shown.stdout
    out, drive = whole, home / "drive"
    for place, store in ((out, drive), (out / "rank-1", drive / "rank-1")):
        assert json.loads((place / "run.json").read_text())["volumes"] == [str(store)]
        report = json.loads((place / "report.json").read_text())
        measured = {row["quantity"]: (row["predicted"], row["measured"]) for row in report["predictions"]}
        predicted, read = measured["ssd_read_bytes"]  # of rank 0, whose shares are the largest
        assert 0.9 * predicted < read < predicted if place != out else predicted == read
        assert len(report["losses"]) == 4 and len(report["eval_losses"]) >= 1
    assert (out / "model" / "model.safetensors").exists() and not (out / "rank-1" / "model").exists()
    shown = ssdplan("show", out, "--trace", tmp_path / "ranks.trace", cwd=home).stdout
    assert "all ranks" in shown and "was the slowest" in shown
    events = json.loads((tmp_path / "ranks.trace").read_text())["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {name.partition(":")[0] for name in processes} == {"rank 0", "rank 1"}
    ends = {rank: [] for rank in (0, 1)}
    for event in events:
        if event["ph"] == "X" and event["name"].startswith(("gather", "exchange")):
            ends[event["pid"] // 3].append((event["ts"], event["ts"] + event["dur"]))
    pairs = list(zip(*(sorted(each) for each in ends.values()), strict=True))
    late = 2e5  # microseconds by which a busy machine may tell ranks of the instant that they share
    apart = [max(mine[0] - other[1], other[0] - mine[1]) for mine, other in pairs]
    assert len(pairs) > 4 and max(apart) < late, "on one clock"
    report = json.loads((out / "report.json").read_text())
    assert len(report["ranks"]) == 2 and all(rank["ssd_written_bytes"] > 0 for rank in report["ranks"])


def test_what_does_not_go_together_is_refused(home: Path, tmp_path: Path) -> None:
    run = ("run", "plan.json", "--data", "text.txt", "--steps", 3, "--out", tmp_path / "run")
    assert "the plan is for 2 rank(s), and 1 are to run: give --ranks 2" in refused(*run, cwd=home, code=8)
    assert "and 3 are to run" in refused(*run, "--ranks", 3, cwd=home, code=8)
    for option in (("--snapshot-every", 1, "--keep", 1), ("--replan",)):
        said = refused(*run, "--ranks", 2, *option, cwd=home, code=2)
        assert f"{' '.join(map(str, option[-2:]))}: is for runs of one rank; leave it out" in said
    said = refused(*run, "--ranks", 2, "--volume", "text.txt", cwd=home, code=2)
    assert "--volume text.txt: is one rank's alone, and 2 ranks" in said
    assert "is not there" in refused(*run, "--ranks", 2, "--volume", "nowhere", cwd=home, code=2)
    nowhere = ("run", "plan.json", "--data", "nowhere.txt", "--steps", 3, "--out", tmp_path / "run")
    assert "nowhere.txt" in refused(*nowhere, "--ranks", 2, cwd=home, code=2), "rank 0 speaks for all"
    solve = ("solve", "profile.json", "--host-memory", "16MiB")
    assert "2 ranks cannot share it evenly" in refused(*solve, "--global-batch", 3, cwd=home, code=2)
    assert "the profile is of 2 ranks" in refused(*solve, "--ranks", 4, cwd=home, code=2)
    assert not (tmp_path / "run").exists()


def test_ranks_go_on_from_the_newest_snapshot_that_all_have(home: Path, whole: Path, tmp_path: Path) -> None:
    """To the same bits; one that a single rank has is taken back. Of no file is more there than of that snapshot."""
    run, out = ("run", "plan.json", "--data", "text.txt", "--ranks", 2), tmp_path / "stopped"
    drive = tmp_path / "drive"
    drive.mkdir()
    ssdplan(*run, "--steps", 2, "--out", out, "--snapshot-every", 1, "--volume", drive, cwd=home)
    drives = {out: drive, out / "rank-1": drive / "rank-1"}
    stores = {place: [each for each in survey([on]) if each.generation] for place, on in drives.items()}
    assert all([each.metadata["step"] for each in stores[place]] == [2] for place in stores)
    for place in stores:  # as a kill between two commits leaves it: rank 0 is one snapshot behind
        metrics = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
        snapshots = [number for number, line in enumerate(metrics) if "snapshot_seconds" in line]
        (place / "metrics.jsonl").write_text("".join(metrics[: snapshots[-1]]))
    withdraw(stores[out][0])
    told = ssdplan("run", "--resume", out, "--steps", 4, cwd=home).stderr
    assert "Traceback" not in told and "goes on with the 2 ranks that the run has" in told
    weights = [(place / "model" / "model.safetensors").read_bytes() for place in (whole, out)]
    assert weights[0] == weights[1]
    twice = refused(*run, "--steps", 2, "--out", out, cwd=home, code=2)
    assert twice.count("error:") == 1 and f"go on with it: ssdplan run --resume {out}" in twice
    losses = [json.loads((place / "report.json").read_text())["losses"] for place in (whole, out)]
    assert losses[0] == losses[1]
    again = [each.metadata["step"] for on in drives.values() for each in survey([on]) if each.generation]
    assert again == [4, 4]
    (out / "rank-1").rename(tmp_path / "elsewhere")
    said = refused("run", "--resume", out, "--ranks", 2, "--steps", 6, cwd=home, code=2)
    assert f"is a run of 2 ranks, and {out / 'rank-1'} is not there" in said
    (tmp_path / "elsewhere").rename(out / "rank-1")
    assert f"ssdplan run --resume {out} --steps" in told, "what it says of going on can be typed as it is"
    (store,) = (drive / "rank-1").glob("volume-*")
    store.rename(tmp_path / "store")
    lost = ssdplan("run", "--resume", out, "--ranks", 2, "--steps", 6, cwd=home, expect=7).stderr
    assert lost.count("error:") == 1 and "no snapshot is on all ranks" in lost and "4 on rank 0, none on rank 1" in lost
    assert f"; rank 1: {drive / 'rank-1'} holds no volume; bring that volume back, or name where it is" in lost
    (tmp_path / "store").rename(store)
    ssdplan("export", out, "--to", tmp_path / "model", cwd=home)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights[1]


def test_a_run_goes_on_with_another_number_of_ranks(home: Path, whole: Path, tmp_path: Path) -> None:
    """From one rank to two and back, by a plan that is made for them, of what they are measured to exchange; to the
    losses of two ranks that nothing stops."""
    alone = json.loads((home / "profile.json").read_text())
    alone["machine"]["network"] = None
    (tmp_path / "profile.json").write_text(json.dumps(alone))
    solve = ("solve", tmp_path / "profile.json", "--host-memory", "32MiB", "--global-batch", 4)
    ssdplan(*solve, "-o", tmp_path / "plan.json", cwd=home)
    run = ("run", tmp_path / "plan.json", "--data", "text.txt", "--eval-data", "held-out.txt")
    out, drive = tmp_path / "run", tmp_path / "drive"
    drive.mkdir()
    ssdplan(*run, "--steps", 1, "--out", out, "--snapshot-every", 1, "--keep", 1, "--volume", drive, cwd=home)
    told = ssdplan("run", "--resume", out, "--ranks", 2, "--steps", 3, cwd=home).stderr
    assert "goes on with 2 rank(s) instead of 1" in told and "bits may differ" in told and "--keep 1 is for" in told
    plan = json.loads((out / "plan.json").read_text())
    assert plan["decision"]["ranks"] == 2 == plan["machine"]["network"]["ranks"]
    assert plan["decision"]["host_budget_bytes"] == 16 << 20
    assert len(list(drive.glob("volume-*"))) == 1 == len(list((drive / "rank-1").glob("volume-*")))
    assert not list(out.rglob("volume-*"))
    told = ssdplan("run", "--resume", out, "--ranks", 1, "--steps", 4, cwd=home).stderr
    assert "goes on with 1 rank(s) instead of 2" in told and not (out / "rank-1").exists()
    losses, expected = (json.loads((path / "report.json").read_text()) for path in (out, whole))
    assert losses["losses"] == pytest.approx(expected["losses"], rel=5e-6)
    assert losses["eval_losses"]["4"] == pytest.approx(expected["eval_losses"]["4"], rel=5e-6)
    assert "evenly" in refused("run", "--resume", out, "--ranks", 3, "--steps", 5, cwd=home, code=2)
    ssdplan("show", out, cwd=home)


def test_a_run_without_gradients_goes_on_with_another_number_of_ranks(home: Path, tmp_path: Path) -> None:
    """From one rank to two and back, by plans that are made for them."""
    alone = json.loads((home / "profile.json").read_text())
    alone["machine"]["network"] = None
    (tmp_path / "profile.json").write_text(json.dumps(alone))
    solve = ("solve", tmp_path / "profile.json", "--host-memory", "32MiB", "--global-batch", 4, "--optimizer", "mezo")
    ssdplan(*solve, "-o", tmp_path / "plan.json", cwd=home)
    out, run = tmp_path / "run", ("run", tmp_path / "plan.json", "--data", "text.txt")
    ssdplan(*run, "--steps", 4, "--out", tmp_path / "whole", cwd=home)
    ssdplan(*run, "--steps", 2, "--out", out, "--snapshot-every", 1, cwd=home)
    told = ssdplan("run", "--resume", out, "--ranks", 2, "--steps", 3, cwd=home).stderr
    assert "goes on with 2 rank(s) instead of 1" in told and "Bits may differ" in told
    assert (out / "weights-3").is_dir() and (out / "rank-1" / "weights-3").is_dir()
    told = ssdplan("run", "--resume", out, "--ranks", 1, "--steps", 4, cwd=home).stderr
    assert "goes on with 1 rank(s) instead of 2" in told and not (out / "rank-1").exists()
    losses, expected = (json.loads((path / "report.json").read_text())["losses"] for path in (out, tmp_path / "whole"))
    assert losses == pytest.approx(expected, rel=5e-6)


def test_ranks_end_with_a_launcher_that_is_killed(home: Path, tmp_path: Path) -> None:
    """With a snapshot, from which they go on."""
    out = tmp_path / "run"
    words = ("run", "plan.json", "--data", "text.txt", "--ranks", 2, "--steps", 100000, "--snapshot-every", 100000)
    command = [sys.executable, "-m", "ssdplan", *map(str, words), "--out", str(out)]
    said = tmp_path / "said.txt"
    with said.open("w") as log, subprocess.Popen(command, cwd=home, stdout=log, stderr=log) as launcher:
        deadline, metrics = time.monotonic() + HANG_SECONDS, out / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("loss")):
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        assert len(children) >= 2
        launcher.kill()
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    steps = {each.metadata["step"] for place in (out, out / "rank-1") for each in survey([place])}
    assert len(steps) == 1 and min(steps) >= 1, said.read_text()
