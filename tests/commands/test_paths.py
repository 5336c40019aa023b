"""A path that a user gives is one: an empty one, as of a variable that is not set, is no directory."""

from pathlib import Path
from typing import Any

import click
import pytest

from ssdplan import cli
from ssdplan.commands import run
from ssdplan.commands.configuration import read_configuration
from ssdplan.commands.resolved import as_kept, restored
from ssdplan.executor.data.reading.files import find_files
from tests.commands.test_help import CONTEXTS, params

PATHS = ("DIR", "FILE", "PATH", "RUN", "PLAN", "PROFILE", "CONFIG")


def of_paths() -> list[tuple[str, click.Parameter]]:
    return [
        (name, param)
        for name in CONTEXTS
        for param in params(name)
        if set((param.metavar or "").strip("[]").split("|")) & set(PATHS) and param.metavar != "NAME|PATH"
    ]


def test_no_option_takes_an_empty_path() -> None:
    taken = []
    for name, param in of_paths():
        try:
            taken.append((name, param.name, param.type("", param, CONTEXTS[name])))
        except click.BadParameter as error:
            assert "empty" in str(error)
    assert len(of_paths()) > 25 and taken == [
        ("ssdplan train", "eval_data", ""),
        ("ssdplan run", "eval_data", ""),
    ], "where it means none"


def test_an_empty_name_of_a_model_is_no_directory(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["solve", "--model", "", "--gpu", "rtx-4090"])
    assert "argument --model: is empty; name what is meant" in capsys.readouterr().err


def test_no_option_that_takes_a_path_is_forgotten() -> None:
    known = {(name, param.name) for name, param in of_paths()}
    for name in CONTEXTS:
        for param in params(name):
            assert type(param.type) is not click.Path, f"{name} {param.name}: type=PATH"
            assert isinstance(param.type, click.Path) == ((name, param.name) in known), f"{name} {param.name}"
            assert not isinstance(param.default, Path) or (name, param.name) in known


RUN = run.command()


def options(*words: str) -> dict[str, Any]:
    return RUN.values(RUN.parse(words))


def given(*words: str) -> dict[str, Any]:
    return RUN.given(RUN.parse(words))


def test_held_out_data_of_a_run_can_be_ended() -> None:
    started = options("plan.json", "--data", "a", "--eval-data", "b", "--eval-every", "2")
    kept = as_kept(started, run._NOT_KEPT)
    ended = given("--resume", "run", "--eval-data", "")
    said = {**restored(RUN, kept, Path("run.json")), **ended}
    assert said["eval_data"] == "" and said["eval_every"] == 2
    again = as_kept(said, run._NOT_KEPT)
    assert restored(RUN, again, Path("run.json"))["eval_data"] == ""


def test_a_pattern_is_found_from_elsewhere_whatever_directories_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "a[1]*"
    (here / "set").mkdir(parents=True)
    for name in ("set/x.txt", "set/y[1].txt"):
        (here / name).write_text("text")
    monkeypatch.chdir(here)
    patterns = {"set/*.txt": 2, "set/y[1].txt": 1, "set/[x].txt": 1, "set": 2}
    for pattern, count in patterns.items():
        told = options("plan.json", "--data", pattern, "--eval-data", pattern, "--token-cache", "t*")
        kept = as_kept(told, run._NOT_KEPT)
        (here / "config.yaml").write_text(f"data: '{pattern}'\neval-data: '{pattern}'\n")
        monkeypatch.chdir(tmp_path)
        for said in (
            restored(RUN, kept, Path("run.json")),
            read_configuration(here / "config.yaml", RUN),
        ):
            assert [len(find_files(said[name]).files) for name in ("data", "eval_data")] == [count, count]
        assert kept["token_cache"] == str(here / "t*")
        monkeypatch.chdir(here)
