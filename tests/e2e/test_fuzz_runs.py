"""A run's directory that was edited, damaged or cut: what reads one shows it, or refuses it with a code of ours.

The run is a finished one with snapshots, so that `--resume` has nothing to train even where the damage is harmless.
"""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssdplan import cli
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import train
from tests.executor.data.test_fuzz_preview import DAMAGES, damaged
from tests.executor.runs import LENGTH, prepare
from tests.extent import examples
from tests.made.plans import make_plan

CODES = (0, 2, 3, 4, 5, 6, 7, 8)
JSON = ("metrics.jsonl", "report.json", "run.json", "trace.json")
HOSTILE = st.sampled_from(
    [None, True, -1, 0.5, "", "x", "9" * 30, "\x1b[31m", [], {}, [[]], {"": None}, float("nan"), 1e308, 1 << 80]
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = prepare(tmp_path_factory.mktemp("home"), layers=2)
    model = open_model(path / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, alpha=0.3, optimizer=0.4, parameters=0.5)
    train(
        plan,
        model,
        EmulatedDevice(),
        data=path / "text.txt",
        eval_data=path / "held-out.txt",
        out=path / "run",
        recipe=Recipe(steps=4, optimizer=AdamW(lr=1e-3), eval_every=2, snapshot_every=2),
        options={"data": str(path / "text.txt"), "eval_data": str(path / "held-out.txt"), "steps": "4", "lr": "0.001",
                 "snapshot_every": "2", "eval_every": "2", "model": str(path / "llama")},
    )  # fmt: skip
    yield path / "run"
    torch.set_num_threads(threads)


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[list[float], str, Any]]:
    """Where to go down in a document, by shares of its keys, and what to do there."""
    where = st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4)
    how = st.sampled_from(["put", "take away", "rename"])
    return draw(st.lists(st.tuples(where, how, HOSTILE), min_size=1, max_size=2))


def edited(document: Any, changes: list[tuple[list[float], str, Any]]) -> Any:
    for where, how, value in changes:
        at = document
        for share in where:
            if not isinstance(at, dict | list) or not at:
                break
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = keys[int(share * len(keys))]
            if share is where[-1] or not isinstance(at[key], dict | list):
                if how == "put":
                    at[key] = copy.deepcopy(value)
                elif how == "take away":
                    del at[key]
                elif isinstance(at, dict):
                    at[f"{key}s"] = at.pop(key)
                break
            at = at[key]
    return document


def attempt(capsys: pytest.CaptureFixture[str], *arguments: object) -> int:
    capsys.readouterr()
    code = cli.main([str(argument) for argument in arguments])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ssdplan: error:")]
    assert code in CODES and len(errors) == (code != 0), (code, errors)
    return code


def fuzz(count: int) -> settings:
    return settings(
        max_examples=examples(count),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def rewritten(path: Path, changes: list[tuple[list[float], str, Any]]) -> None:
    """The document with these changes; of lines, one of them."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    at = int(changes[0][0][0] * len(lines))
    lines[at] = json.dumps(edited(json.loads(lines[at]), changes))
    path.write_text("\n".join(lines) + "\n")


def copied(finished: Path, *, whole: bool) -> Path:
    """A copy to damage; without `whole`, without store and model, which `show` never reads."""
    target = finished.with_name("copy")
    shutil.rmtree(target, ignore_errors=True)
    leave_out = None if whole else shutil.ignore_patterns("*.ssdplan", "*.safetensors")
    shutil.copytree(finished, target, ignore=leave_out)
    return target


@fuzz(60)
@given(name=st.sampled_from(JSON), changes=edits())
def test_an_edited_run_is_shown_or_refused(finished, capsys, name, changes) -> None:
    run = copied(finished, whole=False)
    rewritten(run / name, changes)
    attempt(capsys, "show", run)
    attempt(capsys, "show", run, "--json")


@fuzz(60)
@given(name=st.sampled_from(JSON), damages=st.lists(DAMAGES, min_size=1, max_size=2))
def test_a_damaged_run_is_shown_or_refused(finished, capsys, name, damages) -> None:
    run = copied(finished, whole=False)
    (run / name).write_bytes(damaged((run / name).read_bytes(), damages))
    attempt(capsys, "show", run)


@fuzz(6)
@given(name=st.sampled_from(("metrics.jsonl", "report.json")), changes=edits())
def test_an_edited_run_is_drawn_or_refused(finished, capsys, name, changes) -> None:
    run = copied(finished, whole=False)
    rewritten(run / name, changes)
    attempt(capsys, "show", run, "--html", run / "page.html", "--plots", run / "plots")


@fuzz(12)
@given(name=st.sampled_from(("metrics.jsonl", "run.json")), changes=edits())
def test_an_edited_run_goes_on_or_is_refused(finished, capsys, name, changes) -> None:
    run = copied(finished, whole=True)
    rewritten(run / name, changes)
    assert attempt(capsys, "run", "--resume", run) != 0, "its steps are done"


@pytest.mark.parametrize("step", [None, "4", 4.5, []])
def test_a_snapshot_line_whose_step_is_no_number_is_a_broken_one(finished, capsys, step) -> None:
    run = copied(finished, whole=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    snapshots = [line for line in lines if "snapshot_seconds" in line]
    assert snapshots
    for line in snapshots:
        line["step"] = step
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert attempt(capsys, "run", "--resume", run) != 0


@pytest.mark.parametrize("option", ["data", "steps"])
def test_a_run_that_does_not_say_what_it_was_started_with_is_refused(finished, capsys, option) -> None:
    run = copied(finished, whole=True)
    document = json.loads((run / "run.json").read_text())
    del document["options"][option]
    (run / "run.json").write_text(json.dumps(document))
    assert cli.main(["run", "--resume", str(run)]) == 2
    words = "--steps or --epochs" if option == "steps" else f"--{option}"
    assert f"run.json: it does not say {words}; give it again" in capsys.readouterr().err


@fuzz(10)
@given(damages=st.lists(DAMAGES, min_size=1, max_size=2))
def test_a_run_with_damaged_lines_goes_on_or_is_refused(finished, capsys, damages) -> None:
    run = copied(finished, whole=True)
    (run / "metrics.jsonl").write_bytes(damaged((run / "metrics.jsonl").read_bytes(), damages))
    attempt(capsys, "run", "--resume", run, "--steps", 5)


@fuzz(10)
@given(name=st.sampled_from(("metrics.jsonl", "run.json")), changes=edits())
def test_an_edited_run_is_exported_or_refused(finished, capsys, name, changes) -> None:
    run = copied(finished, whole=True)
    rewritten(run / name, changes)
    if attempt(capsys, "export", run, "--to", run / "exported") == 0:
        ours = (run / "exported" / "model.safetensors").read_bytes()
        assert ours == (finished / "model" / "model.safetensors").read_bytes()
