"""Who chooses downloads and places to write: the command line does, and no plan, no run.json and no cache of others."""

import json
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch

from ssdplan import cli
from ssdplan.executor.data import token_cache
from ssdplan.executor.data.token_cache import open_cache, write_cache
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import train
from ssdplan.plans.errors import UsageError
from tests.executor.runs import LENGTH, prepare
from tests.made.plans import make_plan

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks the hub, by its library or by the network, fails the test."""

    def asked(*arguments: object, **named: object) -> None:
        pytest.fail(f"the hub was asked: {arguments} {named}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", asked)
    monkeypatch.setattr(socket, "getaddrinfo", asked)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a snapshot, and its plan beside it."""
    path = prepare(tmp_path_factory.mktemp("home"), layers=2)
    model = open_model(path / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, alpha=0.3, optimizer=0.4, parameters=0.5)
    plan.save(path / "plan.json")
    train(
        plan,
        model,
        EmulatedDevice(),
        data=path / "text.txt",
        out=path / "run",
        recipe=Recipe(steps=1, optimizer=AdamW(lr=1e-3, decay_all=False), snapshot_every=1),
        options={"data": str(path / "text.txt"), "steps": "1", "lr": "0.001", "snapshot_every": "1",
                 "model": str(path / "llama")},
    )  # fmt: skip
    return path / "run"


def received(finished: Path, tmp_path: Path, **options: object) -> Path:
    """A copy of the run, as from somebody else, whose run.json says these options besides."""
    there = tmp_path / "received"
    shutil.copytree(finished, there)
    document = json.loads((there / "run.json").read_text())
    document["options"].update(options)
    (there / "run.json").write_text(json.dumps(document))
    return there


def ssdplan(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """What the command says on standard error, and it ends with `code`."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == code
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["someone/repo", "gpt2", "/nowhere/model"])
def test_a_plan_starts_no_download(finished, tmp_path, capsys, name):
    document = json.loads((finished.parent / "plan.json").read_text())
    document["model"]["path"] = name
    (tmp_path / "plan.json").write_text(json.dumps(document))
    data = finished.parent / "text.txt"
    told = ssdplan(capsys, 2, "run", tmp_path / "plan.json", "--data", data, "--steps", 1, "--out", tmp_path / "run")
    assert f"plan.json: its model is not at {name}; name it by --model DIR, or --model NAME" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("known", [True, False])
def test_a_runs_document_starts_no_download(finished, tmp_path, capsys, known):
    """Not even that of a run of one's own: it keeps a directory, and a name there is somebody's edit."""
    there = received(finished, tmp_path, model="someone/repo")
    told = ssdplan(capsys, 2, "run", "--resume", there, "--steps", 2, *([] if known else ["--adopt"]))
    assert "run.json: its model is not at someone/repo" in told
    assert "not at someone/repo" in ssdplan(capsys, 2, "export", there, "--to", tmp_path / "exported")


def test_only_a_name_that_was_given_is_looked_up(finished, tmp_path, capsys, monkeypatch):
    asked: list[str] = []

    def download(name: str, **_: object) -> str:
        asked.append(name)
        return str(finished.parent / "llama")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "run.yaml").write_text(
        f"plan: {finished.parent / 'plan.json'}\nmodel: someone/configured\ndata: {finished.parent / 'text.txt'}\n"
    )
    plan, data = finished.parent / "plan.json", finished.parent / "text.txt"
    given = ["--model", "someone/given", "--data", data]
    ssdplan(capsys, 0, "run", plan, *given, "--steps", 1, "--out", tmp_path / "given")
    ssdplan(capsys, 0, "run", tmp_path / "run.yaml", "--steps", 1, "--out", tmp_path / "configured")
    assert asked == ["someone/given", "someone/configured"]


@pytest.mark.parametrize(
    ("option", "flag"), [("token_cache", "--token-cache"), ("tensorboard", "--tensorboard"), ("wandb", "--wandb")]
)
def test_a_received_run_chooses_no_place_to_write(finished, tmp_path, capsys, option, flag):
    place = "team/project" if option == "wandb" else tmp_path / "elsewhere"
    there = received(finished, tmp_path, **{option: str(place)})
    told = ssdplan(capsys, 2, "run", "--resume", there, "--steps", 2)
    assert f"has it write outside of it: {flag} {place}; give what is right" in told
    assert not (tmp_path / "elsewhere").exists()
    if option == "token_cache":
        ssdplan(capsys, 0, "run", "--resume", there, "--steps", 2, flag, tmp_path / "mine")
        assert not (tmp_path / "elsewhere").exists()
    if option == "tensorboard":
        ssdplan(capsys, 0, "run", "--resume", there, "--steps", 2, "--adopt")
        assert list(place.iterdir()), "whoever says that it is theirs gets what it says"


@pytest.mark.parametrize(
    ("option", "value"),
    [("volume", ["/tmp"]), ("out", "/tmp/x"), ("plan", "/tmp/p"), ("resume_anyway", True), ("adopt", True)],
)
def test_options_that_no_run_keeps_are_none_in_its_document(finished, tmp_path, capsys, option, value):
    there = received(finished, tmp_path, **{option: value})
    told = ssdplan(capsys, 2, "run", "--resume", there, "--steps", 2, "--adopt")
    assert f"run.json: options.{option}: is no option that a run keeps; take it out" in told


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_reports_do_not_leave_a_run_by_a_link(finished, tmp_path, capsys, monkeypatch, name):
    there = received(finished, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (there / name).symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr("ssdplan.executor.metrics.reporting.require_wandb", lambda: None)
    asked = ["--wandb", "mine"] if name == "wandb" else ["--tensorboard"]
    told = ssdplan(capsys, 2, "run", "--resume", there, "--steps", 2, *asked)
    assert f"{there / name}: is a symbolic link" in told
    assert not list((tmp_path / "elsewhere").iterdir())


# Permissions


@pytest.fixture
def open_to_all() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def private(*places: Path) -> bool:
    return not any(stat.S_IMODE(path.lstat().st_mode) & 0o077 for path in places)


def test_what_libraries_write_is_private_too(tmp_path, capsys, open_to_all):
    cli.main(["show", str(tmp_path / "nothing")])
    (tmp_path / "by-a-library").mkdir()
    (tmp_path / "by-a-library" / "file").write_text("")
    assert private(*tmp_path.rglob("*"))


def test_a_stricter_umask_stays(tmp_path):
    before = os.umask(0o277)
    try:
        cli.main(["show", str(tmp_path / "nothing")])
    finally:
        assert os.umask(before) == 0o277


def test_a_run_in_a_directory_that_was_there_is_private_and_so_are_its_events(finished, tmp_path, capsys, open_to_all):
    (tmp_path / "run").mkdir()
    data = finished.parent / "text.txt"
    ssdplan(
        capsys, 0, "run", finished.parent / "plan.json", "--data", data, "--steps", 1, "--out", tmp_path / "run",
        "--tensorboard",
    )  # fmt: skip
    assert (tmp_path / "run" / "tensorboard").is_dir()
    assert private(tmp_path / "run", *(tmp_path / "run").rglob("*"))


def made_cache(folder: Path) -> Path:
    file = folder / f"{'a' * 64}.tokens"
    write_cache(file, [(np.arange(5, dtype=np.uint32), True)])
    return file


def test_a_token_cache_is_private(tmp_path, open_to_all, monkeypatch):
    file = made_cache(tmp_path / "new" / "cache")
    monkeypatch.setenv("SSDPLAN_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    token_cache.default_directory()
    monkeypatch.delenv("SSDPLAN_CACHE")
    token_cache.default_directory()
    assert private(*tmp_path.rglob("*")) and {"own", "user"} < {path.name for path in tmp_path.iterdir()}
    found = open_cache(file)
    assert found is not None and found.tokens.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("mode", [0o722, 0o777, 0o720])
@pytest.mark.parametrize("of", ["file", "directory"])
def test_a_token_cache_that_others_may_write_is_refused(tmp_path, monkeypatch, of, mode):
    file = made_cache(tmp_path / "cache")
    (file if of == "file" else file.parent).chmod(mode)
    with pytest.raises(UsageError, match=r"others may write here, .*chmod 700 .*or .*--token-cache"):
        open_cache(file)
    if of == "directory":
        monkeypatch.setenv("SSDPLAN_CACHE", str(file.parent))
        for use in (token_cache.default_directory, lambda: made_cache(file.parent)):
            with pytest.raises(UsageError, match="others may write here"):
                use()


@needs_root
@pytest.mark.parametrize("of", ["file", "directory"])
def test_a_token_cache_of_another_user_is_refused(tmp_path, of):
    file = made_cache(tmp_path / "cache")
    os.chown(file if of == "file" else file.parent, 65534, 65534)
    with pytest.raises(UsageError, match=r"belongs to another user \(uid 65534\), so it is not believed"):
        open_cache(file)


def test_a_token_cache_is_no_link_and_no_pipe(tmp_path):
    file = made_cache(tmp_path / "cache")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is a symbolic link, and no token cache"):
        open_cache(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UsageError, match="is not a regular file"):
        open_cache(file)
