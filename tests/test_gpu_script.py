"""`benchmarks/gpu.py` runs whole without a GPU, at tiny sizes, and loses nothing when it is cut off."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.extent import FULL

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SECONDS = 1800


def script(out: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Its exit code, and the lines of its results."""
    call = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--out", str(out), *options]
    done = subprocess.run(call, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the steps."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("commands", "gpu", "gpu_steps"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import gpu_steps

    yield gpu_steps
    for name in ("commands", "gpu", "gpu_steps"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_every_step_but_the_tests_runs_without_a_gpu(
    steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of many commands in this process, with commands that are forked, unless all is asked for."""
    out, apart = tmp_path / "out", [] if FULL else ["layers", "train", "sanitizer"]
    named = [name for name in ("build", "probes", "layers", "train", "sanitizer") if name not in apart]
    code, lines = script(out, "--steps", ",".join(named), "--limit", str(SECONDS - 60))
    assert code == 0 and [line["status"] for line in lines] == ["ok"] * len(named), lines
    figures = {line["step"]: line["figures"] for line in lines}

    def forked(call: list[Any]) -> str:
        python, option, module, *arguments = map(str, call)
        assert (python, option) == (sys.executable, "-m")
        code = f"import runpy, sys; sys.argv[1:] = {arguments}; runpy.run_module({module!r}, run_name='__main__')"
        cli = module == "ssdplan.cli"
        done = warm.run(*arguments, cwd=tmp_path, activations=kept) if cli else warm.python(code, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    monkeypatch.setattr(steps, "_call", forked)
    for name in apart:
        from gpu import _merged

        kept = name == "train"
        given = steps.Given(out, "cpu", out / f"{name}.figures.jsonl", tmp_path / "target", out, SECONDS, None)
        getattr(steps, name)(given)
        figures[name] = _merged(given.figures)
    build, probes, layers, train, sanitizer = figures.values()
    assert build["ssdplan"] and not build["missing"] and build["doctor"]["findings"] and build["versions"]["torch"]
    assert probes["attention: math, deterministic"]["same bits"] is True
    assert probes["copies: registered, 1024 KiB"]["h2d+d2h"] > 0 and probes["waits: asleep"]["waiters"] == 3
    assert set(layers["backward of hidden 64, 1 x 32"]) == {"pipelined", "begun", "synchronised"}
    rows = {row["quantity"]: row for row in train["report"]["predictions"]}
    assert rows["ssd_read_bytes"]["measured"] == rows["ssd_read_bytes"]["predicted"] > 0
    assert sanitizer["losses"]["serial"] == sanitizer["losses"]["overlapped"]
    kept = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"profile.json", "plan.json", "report.json", "trace.json", "overlay.json", "doctor.json"} <= kept
    assert not [name for name in kept if name.startswith("ssdplan-gpu-")], "what was trained is gone"


def test_a_step_that_is_cut_off_is_told_and_leaves_what_it_had(tmp_path: Path) -> None:
    code, lines = script(tmp_path, "--steps", "probes,layers", "--limit", "0.2")
    assert code == 1
    assert [(line["step"], line["status"]) for line in lines] == [("probes", "timeout"), ("layers", "skipped")]
    assert lines[0]["error"].startswith("not done after 0 s") and "no time is left" in lines[1]["error"]
    assert lines[0]["figures"] == {} and (tmp_path / "probes.log").exists()


def test_findings_of_a_step_that_was_killed_are_read_as_far_as_they_are_whole(steps: Any, tmp_path: Path) -> None:
    from gpu import _merged

    (tmp_path / "figures").write_text('{"a": 1}\n{"a": 2, "b": 3}\n{"c": ')
    assert _merged(tmp_path / "figures") == {"a": 2, "b": 3}
    assert _merged(tmp_path / "none") == {}


def test_missing_packages_are_named_with_the_command_that_brings_them(
    steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = {"pydantic", "highspy", "gguf"}
    monkeypatch.setattr(steps, "_there", lambda module: module not in lacks)
    given = steps.Given(tmp_path, "cpu", tmp_path / "figures", tmp_path / "target", tmp_path, 1.0, None)
    with pytest.raises(SystemExit) as ended:
        steps.build(given)
    words = str(ended.value)
    assert words.startswith("ssdplan needs pydantic, highspy, which this Python lacks.") and "\n" not in words
    assert "pip download" in words and words.count("pydantic highspy gguf") == 1 and "WHEELS=wheels" in words
    assert json.loads((tmp_path / "figures").read_text().splitlines()[0])["lacking_for_tests"] == ["gguf"]


def test_a_folder_of_wheels_is_where_they_come_from(
    steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network: pip gets no index, and what only tests need may be absent from the folder."""
    there = {"highspy": False, "gguf": False}
    ran: list[list[str]] = []

    def run(call: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        ran.append(call)
        if call[-1] == "highspy":
            there["highspy"] = True
        code = int(call[-1] == "gguf")
        return subprocess.CompletedProcess(call, code, stdout="{}", stderr="")

    monkeypatch.setattr(steps, "_there", lambda module: there.get(module, True))
    monkeypatch.setattr(steps.subprocess, "run", run)
    monkeypatch.setattr(sys, "path", list(sys.path))
    steps.build(steps.Given(tmp_path, "cpu", tmp_path / "figures", tmp_path / "t", tmp_path, 1.0, tmp_path / "wheels"))
    installed = [call for call in ran if "install" in call]
    assert [call[-1] for call in installed] == ["highspy", "gguf"]
    for call in installed:
        assert "--no-index" in call and call[call.index("--find-links") + 1] == str(tmp_path / "wheels")
        assert call[call.index("--target") + 1] == str(tmp_path / "t")
