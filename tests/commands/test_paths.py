"""A path that a user gives is one: an empty one, as of a variable that is not set, is no directory."""

import argparse
from pathlib import Path

import pytest

from ssdplan.commands import run
from ssdplan.commands.configuration import read_configuration
from ssdplan.commands.resolved import as_kept, given, resolved, restored
from ssdplan.executor.data.files import find_files
from tests.commands.test_help import PARSERS

PATHS = ("DIR", "FILE", "PATH", "RUN", "PLAN", "PROFILE")


def of_paths() -> list[tuple[str, argparse.Action]]:
    return [
        (name, action)
        for name, parser in PARSERS.items()
        for action in parser._actions
        if isinstance(action.metavar, str) and set(action.metavar.split("|")) & set(PATHS)
    ]


def test_no_option_takes_an_empty_path() -> None:
    taken = []
    for name, action in of_paths():
        try:
            taken.append((name, action.dest, PARSERS[name]._get_value(action, "")))
        except argparse.ArgumentError as error:
            assert "empty" in str(error)
    assert len(of_paths()) > 25 and taken == [("ssdplan run", "eval_data", "")], "where it means none"


def test_no_option_that_takes_a_path_is_forgotten() -> None:
    known = {(name, action.dest) for name, action in of_paths()}
    for name, parser in PARSERS.items():
        for action in parser._actions:
            assert action.type is not Path, f"{name} {action.dest}: type=of.path"
            assert not isinstance(action.default, Path) or (name, action.dest) in known


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run.add_options(parser)
    return parser.parse_args(words)


def test_held_out_data_of_a_run_can_be_ended() -> None:
    started = resolved(options("plan.json", "--data", "a", "--eval-data", "b", "--eval-every", "2"))
    kept = as_kept(started, run._NOT_KEPT)
    ended = given(options("--resume", "run", "--eval-data", ""))
    said = {**restored(run.add_options, kept, Path("run.json")), **ended}
    assert said["eval_data"] == "" and said["eval_every"] == 2
    again = as_kept(argparse.Namespace(**said), run._NOT_KEPT)
    assert restored(run.add_options, again, Path("run.json"))["eval_data"] == ""


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
        told = resolved(options("plan.json", "--data", pattern, "--eval-data", pattern, "--token-cache", "t*"))
        kept = as_kept(told, run._NOT_KEPT)
        (here / "config.yaml").write_text(f"data: '{pattern}'\neval-data: '{pattern}'\n")
        monkeypatch.chdir(tmp_path)
        for said in (
            restored(run.add_options, kept, Path("run.json")),
            read_configuration(here / "config.yaml", run.add_options),
        ):
            assert [len(find_files(said[name]).files) for name in ("data", "eval_data")] == [count, count]
        assert kept["token_cache"] == str(here / "t*")
        monkeypatch.chdir(here)
