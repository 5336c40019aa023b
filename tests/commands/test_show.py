"""`ssdplan show --csv`: the steps of a run as a table, and why there is none."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from ssdplan import cli
from ssdplan.commands import show
from ssdplan.plans.analysis.curves import read_curves
from ssdplan.plans.documents.run import Run
from ssdplan.plans.errors import UsageError
from tests.made.plans import small_plan
from tests.made.profiles import made_model, made_profile
from tests.plans.read_csv import read_csv

LINES = (
    {"step": 0, "eval_loss": 5.5},
    *({"step": step, "loss": 4.0 / step, "tokens": 96, "ssd_written_bytes": 10 * step} for step in (1, 2, 3)),
    {"step": 2, "resume_seconds": 0.5},
    {"step": 3, "loss": None, "tokens": 97, "ssd_written_bytes": 40, "stolen_seconds": 0.1},
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a profile, a plan and two runs, one of which has done no step."""
    monkeypatch.chdir(tmp_path)
    plan = small_plan()
    made_profile(blocks=2, micro_batch_sizes=(1,)).save(tmp_path / "profile.json")
    for run in ("run", "begun"):
        (tmp_path / run).mkdir()
        plan.save(tmp_path / run / "plan.json")
        Run(schema="ssdplan.run/1", options={"steps": "9"}).save(tmp_path / run / "run.json")
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path


def test_a_run_has_a_row_for_each_step(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "run"]) == 0
    shown = capsys.readouterr().out
    assert cli.main(["show", "run", "--csv", "steps.csv"]) == 0
    printed, told = capsys.readouterr()
    assert printed.splitlines()[:5] == shown.splitlines()[:5] and told == "written to steps.csv\n"
    names = ("step", "loss", "tokens", "ssd_written_bytes", "stolen_seconds", "eval_loss", "resumed")
    assert [tuple(row[name] for name in names) for row in read_csv(home / "steps.csv")] == [
        ("0", "", "", "", "", "5.5", "False"),
        ("1", "4.0", "96", "10", "", "", "False"),
        ("2", "2.0", "96", "20", "", "", "True"),
        ("3", "", "97", "40", "0.1", "", "False"),
    ]


def test_a_run_that_goes_on_shows_what_its_steps_found(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside what is predicted; a run of a version that measured none of it shows as ever."""
    assert cli.main(["show", "run"]) == 0
    before = capsys.readouterr().out
    assert "What a steady step finds in time, as predicted" in before and "What its steps found" not in before
    line = {"step": 4, "loss": 1.0, "optimizer_miss_rate": 0.125, "device_hit_rate": None}
    with (home / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert cli.main(["show", "run", "--html", "run.html"]) == 0
    table = capsys.readouterr().out.split("What its steps found in time")[1]
    assert [row.split()[-1] for row in table.splitlines() if "optimizer misses" in row] == ["12.5%"]
    row = (home / "run.html").read_text().split('id="cache"')[1].split("optimizer misses")[1].split("</tr>")[0]
    assert ">12.5%<" in row


@pytest.mark.parametrize(
    ("logs", "words"), [(False, "the states of its last snapshots"), (True, "of use only while it runs")]
)
def test_what_a_store_is_for(home: Path, logs: bool, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without gradients has its log for a state."""
    path, identity = home / "run", "ab" * 16
    volume = Namespace(
        superblock=Namespace(store=bytes.fromhex(identity)), capacity_bytes=5 << 20, path=path / "volume-0.ssdplan"
    )
    monkeypatch.setattr("ssdplan.executor.store.inspect", lambda places: [volume])
    kept = Run(schema="ssdplan.run/1", snapshots=True, stores=(identity,))
    plan = Namespace(decision=Namespace(zeroth_order=logs or None))
    lines = show._store(path, kept, plan)  # type: ignore[arg-type]
    assert lines == (f"Its store takes 5 MiB, {words}:", f"  {path / 'volume-0.ssdplan'}")


@pytest.mark.parametrize(
    ("document", "file", "why"),
    [
        ("run/plan.json", "t.csv", "run/plan.json: --csv writes the steps of a run, and a plan has none"),
        ("profile.json", "t.csv", "profile.json: --csv is of sub-layers, and this profile has none"),
        ("begun", "t.csv", "begun: no step is done yet, so --csv has no table to write"),
        ("run", "none/t.csv", "none/t.csv: cannot be written; name a file in a directory that exists with --csv"),
        ("run", "begun", "begun: cannot be written"),
    ],
)
def test_where_there_is_no_table_to_write_it_says_why(
    home: Path, document: str, file: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", document, "--csv", file]) == UsageError.exit_code
    printed, told = capsys.readouterr()
    assert why in told and not printed and not list(home.glob("**/*.csv"))


def test_a_plan_has_a_row_for_the_parameters_and_the_optimizer_states_of_each_state(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for document in ("run", "run/plan.json"):
        assert cli.main(["show", document, "--prefetch-table", "--csv", "t.csv"]) == 0
        printed, told = capsys.readouterr()
        rows = read_csv(home / "t.csv")
        assert told == "written to t.csv\n" and max(map(len, printed.splitlines())) <= 100
        assert printed.splitlines()[0] == f"Prefetch table: {made_model().name}, {len(rows)} rows"
        assert [row["order"] for row in rows] == [str(number) for number in range(1, len(rows) + 1)]
        assert {row["state"] for row in rows if row["what"] == "optimizer states"} == {row["state"] for row in rows}
        for row in rows:
            assert float(row["first_seconds"]) < float(row["last_seconds"]) and int(row["uses"]) > 0
            for stay in row["stays"].split():
                tier, _, times = stay.partition(":")
                start, end = map(float, times.split("-"))
                assert tier in ("device", "host") and start < end


@pytest.mark.parametrize(
    ("document", "more", "why"),
    [
        ("profile.json", [], "--prefetch-table is of a plan's states, and a profile places none"),
        ("run", ["--json"], "leave out --json"),
        ("run", ["--html", "a.html", "--trace", "t.json"], "leave out --html --trace"),
    ],
)
def test_a_prefetch_table_that_cannot_be_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str], document: str, more: list[str], why: str
) -> None:
    assert cli.main(["show", document, "--prefetch-table", *more]) == 2
    assert why in capsys.readouterr().err


def test_a_directory_without_a_plan_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(tmp_path)]) == UsageError.exit_code
    assert f"{tmp_path}: holds no plan.json, so no run has begun here" in capsys.readouterr().err


def test_a_stopped_run_goes_on_from_the_newest_of_store_and_metrics(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill may come between a snapshot and its line of metrics; of a run without gradients the log is the state."""
    path, identity = home / "run", "ab" * 16
    line = {"step": 1, "snapshot_seconds": 0.1, "snapshot_bytes": 5, "ssd_written_bytes": 15}
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (LINES[1], line, LINES[2])))
    plan = Namespace(decision=Namespace(zeroth_order=None))
    kept = Run(schema="ssdplan.run/1", snapshots=True, stores=(identity,))
    curves = read_curves(path / "metrics.jsonl")
    for stores, newest in (
        ([], 1),
        ([Namespace(store=identity, refused="", metadata={"step": 2})], 2),
        ([Namespace(store="cd" * 16, refused="", metadata={"step": 2})], 1),
        ([Namespace(store=identity, refused="damaged", metadata={"step": 2})], 1),
    ):
        monkeypatch.setattr("ssdplan.executor.store.survey", lambda places, stores=stores: stores)
        assert show._newest(path, kept, curves, plan) == newest  # type: ignore[arg-type]
    plan.decision.zeroth_order = True
    assert show._newest(path, kept, curves, plan) is None  # type: ignore[arg-type]
