"""Where a command is told to write: what is no regular file there stays, and is refused before any work."""

import errno
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ssdplan import cli
from ssdplan.commands.parsing import kinds, outputs
from ssdplan.commands.parsing.types import PathValue
from ssdplan.plans.analysis.frames import prefetch_frame, sublayers_frame, sweep_frame
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.documents.run import Run
from ssdplan.plans.errors import UsageError
from ssdplan.profiler.bench.report import rows_frame
from ssdplan.rivals.comparison_text import arms_frame
from tests.commands.test_help import CONTEXTS, params
from tests.made.plans import small_plan
from tests.made.profiles import made_profile
from tests.plans.read_csv import write_csv

WHAT_IF = ("solve", "--model", "smollm2-135m", "--gpu", "rtx-4090", "--ssd", "samsung-990-pro", "--host-memory", "8GiB",
           "--micro-batch-sizes", "1", "--micro-batches", "2", "--sequence-length", "256")  # fmt: skip
PROFILE = ("profile", "--model", "model")
EMULATED = (*PROFILE, "--emulate", "like=llama-3.1-8b,gpu=rtx-4090,ssd=samsung-990-pro")
FILES = (
    (*WHAT_IF, "-o"),
    (*WHAT_IF, "--sweep", "micro-batches=2,4", "--csv"),
    (*PROFILE, "-o"),
    (*EMULATED, "-o"),
    ("show", "plan.json", "--csv"),
    ("show", "plan.json", "--html"),
    ("show", "plan.json", "--trace"),
    ("bench", "--csv"),
    ("compare", "--shape", "small", "--csv"),
)
"""Commands that end with an option for a file that they write."""
TRAIN = ("train", "--model", "model", "--data", "text.txt")
RUN = ("run", "plan.json", "--data", "text.txt", "--steps", "1")
DIRECTORIES = (
    (*WHAT_IF, "--write-lp"),
    (*WHAT_IF, "--sweep", "micro-batches=2,4", "--plots"),
    ("show", "plan.json", "--plots"),
    ("compare", "--shape", "small", "--plots"),
    ("compare", "--shape", "small", "--work"),
    (*TRAIN, "--out"),
    (*TRAIN, "--out", "run", "--tensorboard"),
    (*TRAIN, "--out", "run", "--write-lp"),
    (*RUN, "--out"),
    (*RUN, "--out", "run", "--tensorboard"),
    ("export", "run", "--to"),
    ("replay", "run", "--to"),
)
"""The same for a directory that they write to."""
NEW_VOLUME = ("volume", "init", "--size", "64MiB")
"""A file, device or directory stands at its end, without an option."""
READ = {
    "checkpoint", "configuration", "data", "directory", "document", "eval_data", "from_profile", "model", "places",
    "plan", "profile", "resume", "run", "rungs_of", "token_cache", "volume",
}  # fmt: skip
"""Paths by the names of their options that are read, or that keep states and tokens for ssdplan alone."""


def said(words: tuple[str, ...], to: Path | str, capsys: pytest.CaptureFixture[str]) -> str:
    """The line of a refusal."""
    try:
        code = cli.main([*words, str(to)])
    except SystemExit as refused:
        code = int(refused.code or 0)
    printed, told = capsys.readouterr()
    assert code == UsageError.exit_code and not printed and told.count("\n") == 1
    return told


def shortly(words: tuple[str, ...]) -> str:
    return " ".join((words[0], *(word for word in words[1:] if word in ("--sweep", "--emulate")), words[-1]))


@pytest.mark.parametrize("words", FILES, ids=shortly)
def test_no_fifo_device_or_link_is_replaced(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("precious").write_text("mine")
    Path("link").symlink_to("precious")
    Path("out").symlink_to("/proc/self/fd/1")  # as /dev/stdout is
    assert "fifo: cannot be written: it is a FIFO; name a regular file" in said(words, "fifo", capsys)
    for name in ("link", "out"):
        assert f"{name}: is a symbolic link, which is neither followed nor replaced" in said(words, name, capsys)
        assert Path(name).is_symlink()
    assert stat.S_ISFIFO(os.lstat("fifo").st_mode) and Path("precious").read_text() == "mine"
    assert sorted(os.listdir()) == ["fifo", "link", "out", "precious"]


@pytest.mark.parametrize("words", (*FILES, *DIRECTORIES, NEW_VOLUME), ids=shortly)
def test_where_no_file_can_be_made_nothing_is_begun(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor for root, who is told that all may be written in /proc."""
    monkeypatch.chdir(tmp_path)
    assert "/proc/ssdplan: cannot be written: " in said(words, "/proc/ssdplan", capsys)
    Path("file").write_text("mine")
    said(words, "file/below", capsys)
    assert os.listdir() == ["file"] and Path("file").read_text() == "mine"


@pytest.mark.parametrize("words", DIRECTORIES, ids=shortly)
def test_what_is_no_directory_is_refused_as_one(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    assert "fifo" in said(words, "fifo", capsys)
    assert Path("fifo").is_fifo()


def test_every_option_for_an_output_is_here() -> None:
    """Each path that a command takes is an output that is tried here, or is said to be read."""
    listed = {(f"ssdplan {words[0]}", words[-1]) for words in (*FILES, *DIRECTORIES)}
    listed |= {("ssdplan volume init", "PATH")}
    outputs_of = set()
    for name in CONTEXTS:
        for param in params(name):
            if isinstance(param.type, PathValue):
                flags = {(name, flag) for flag in (*param.opts, param.metavar or "")} & listed
                assert bool(flags) != (param.name in READ), f"{name} {param.opts}: is it an output?"
                outputs_of |= flags
    assert outputs_of == listed, "what is listed is an option"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a profile, a plan and a run that has ended."""
    monkeypatch.chdir(tmp_path)
    plan = small_plan()
    plan.save(Path("plan.json"))
    made_profile(blocks=2, micro_batch_sizes=(1,)).save(Path("profile.json"))
    Path("run").mkdir()
    plan.save(Path("run/plan.json"))
    Run(schema="ssdplan.run/1", options={"steps": "9"}).save(Path("run/run.json"))
    line = {"step": 1, "loss": 4.0, "tokens": 96, "ssd_written_bytes": 10}
    Path("run/metrics.jsonl").write_text(json.dumps(line) + "\n")
    Path("run/config.yaml").write_text("steps: 9\n")
    Path("run/model").mkdir()
    Path("run/model/model.safetensors").write_text("weights")
    return tmp_path


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


OTHERS = {
    "data.txt": "step,loss\n1,2\n",
    "config.json": json.dumps({"model_type": "llama", "of": "ssdplan.plan/1"}),
    "page.html": '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>mine</title></head></html>',
    "torch.json": json.dumps({"traceEvents": [], "otherData": {"format": "of torch"}}, separators=(",", ":")),
    "volume": "\0" * 5000,
    "cut.json": '{"schema": "ssdplan.plan/1", "mod',
}
"""What somebody has, and no output replaces."""


KINDS = {"--csv": "table", "--html": "page", "--trace": "trace", "solve": "plan", "profile": "profile"}
"""What an option may replace, or else what its command may."""


@pytest.mark.parametrize("words", FILES, ids=shortly)
def test_no_file_is_replaced_but_by_one_of_its_kind(
    words: tuple[str, ...], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be the very one that is read: `show plan.json --html plan.json` left no plan."""
    option = words[-1]
    kind = KINDS.get(option) or KINDS[words[0]]
    for name, content in OTHERS.items():
        Path(name).write_text(content)
    for name in ("plan", "profile"):  # of which the schema stands behind what would be looked at
        content = json.loads(Path(f"{name}.json").read_text())
        Path(f"sorted-{name}.json").write_text(json.dumps({"a" * 5000: 0, **content}))
    before = contents(home)
    names = {*OTHERS, "plan.json", "profile.json", "sorted-plan.json", "sorted-profile.json"}
    for name in names - {f"{kind}.json", f"sorted-{kind}.json"}:
        told = said(words, name, capsys)
        assert f"{name}: exists and is not a {kind} of ssdplan; name another file with {option}" in told
    assert contents(home) == before


@pytest.mark.parametrize("words", FILES, ids=shortly)
def test_what_a_run_has_for_itself_is_not_replaced(
    words: tuple[str, ...], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor begun where the run has not written it yet: `show` would take it for the run's."""
    before = contents(home)
    for name in ("plan.json", "plan-0.json", "run.json", "metrics.jsonl", "report.json", "trace.json", "config.yaml",
                 "model/model.safetensors", "model/new", "rank-1/trace.json", "rank-2", "model-20/new",
                 "zeroth-order.log", "volume-0.ssdplan"):  # fmt: skip
        told = said(words, f"run/{name}", capsys)
        assert f"run/{name}: belongs to the run in {home / 'run'}; name another place with {words[-1]}" in told
    Path("link").symlink_to("run")
    assert "belongs to the run" in said(words, "link/trace.json", capsys)
    Path("link").unlink()
    assert contents(home) == before


def test_a_directory_of_outputs_is_none_that_a_run_has_for_itself(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in DIRECTORIES:
        for name in ("model", "rank-1", "zeroth-order.log", "volume-0.ssdplan"):
            assert f"run/{name}: belongs to the run" in said(words, f"run/{name}", capsys)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((*WHAT_IF, "--write-lp"), "1-step-seconds.lp"),
        ((*WHAT_IF, "--sweep", "micro-batches=2,4", "--plots"), "sweep.png"),
        (("show", "plan.json", "--plots"), "memory.png"),
        (("compare", "--shape", "small", "--plots"), "losses.png"),
    ],
)
def test_what_cannot_be_replaced_in_a_directory_of_outputs_is_found_before_the_work(
    words: tuple[str, ...], name: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "there" / name).mkdir(parents=True)
    assert f"there/{name}: cannot be written: it is a directory" in said(words, "there", capsys)
    (home / "there" / name).rmdir()
    (home / "there" / name).symlink_to("elsewhere")
    assert f"there/{name}: is a symbolic link" in said(words, "there", capsys)


def test_what_a_command_wrote_it_writes_again(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the files of a run too, and where somebody left an empty file."""
    Path("empty").touch()
    words = "--html run/page.html --trace run/predicted.json --csv run/steps.csv --plots run/plots"
    for _ in range(2):
        assert cli.main(["show", "run", *words.split()]) == 0, capsys.readouterr().err
    assert cli.main(["show", "run", "--csv", "empty"]) == 0 and Path("empty").stat().st_size


def test_every_table_is_known_by_its_columns(tmp_path: Path) -> None:
    profile = made_profile(blocks=2, micro_batch_sizes=(1,))
    none = cast(Any, SimpleNamespace(name="ssds", points=(), arms=()))
    frames = sweep_frame(none), sublayers_frame(profile), prefetch_frame([]), rows_frame([]), arms_frame(none)
    for frame in frames:
        write_csv(frame, tmp_path / "table.csv")
        assert kinds.TABLE.is_at(tmp_path / "table.csv"), list(frame)


def test_documents_are_known_by_their_schema_wherever_it_stands(home: Path) -> None:
    for kind, document in ((kinds.PLAN, Plan), (kinds.PROFILE, Profile)):
        path = Path(f"{kind.name}.json")
        path.write_text(json.dumps({"a" * 5000: 0, **json.loads(path.read_text())}))
        assert kind.is_at(path) and document.__name__.lower() == kind.name
    assert not kinds.PLAN.is_at(Path("profile.json"))


@pytest.mark.parametrize(
    "words",
    [
        "show plan.json --plots q --html q/memory.png",
        "show plan.json --plots pp --html pp",
        "show plan.json --html ./a --trace a",
        "solve profile.json --sweep micro-batches=1,2 --plots q --csv q/sweep.png",
        "solve profile.json --sweep micro-batches=1,2 --csv sw --plots sw",
        "solve profile.json -o out1 --write-lp out1",
        "compare --shape small --plots q --csv q",
        "compare --shape small --work q --plots q/plots",
        "profile --model m --emulate like=llama-3.1-8b,gpu=rtx-4090,ssd=samsung-990-pro --rungs-of p.json -o p.json",
    ],
)
def test_two_outputs_are_not_in_one_place(words: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the last would be left."""
    if words.endswith("q/sweep.png"):
        Path("q").mkdir()
    before = contents(home)
    *begin, last = words.split()
    told = said(tuple(begin), last, capsys)
    assert "is named by --" in told or "is named by -o" in told
    assert contents(home) == before


def test_programs_may_lie_beside_the_plan_that_nobody_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["solve", "profile.json", "--host-memory", "1GiB", "--write-lp", "."]) == 0, capsys.readouterr().err
    assert list(home.glob("*.lp")) and capsys.readouterr()
    Path("plan.json").unlink()
    told = said(("solve", "profile.json", "--host-memory", "1GiB", "--write-lp"), "plan.json", capsys)
    assert "plan.json: is named by --write-lp and by -o" in told


@pytest.mark.parametrize("words", (*FILES, *DIRECTORIES, NEW_VOLUME), ids=shortly)
def test_a_name_that_is_too_long_is_refused_before_the_work(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    option = words[-1] if words[-1].startswith("-") else "PATH"
    for path in ("n" * 256, "é" * 150, f"{'n' * 300}/new", f"new/{'n' * 256}"):
        told = said(words, path, capsys)
        assert told.endswith(f" with {option}\n") and "cannot be written" in told
        assert "File name too long" in told or path.startswith("new/")
    assert not os.listdir()


def test_what_is_as_long_as_a_name_may_be_is_written(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for length in (233, 234, 255):
        assert cli.main(["show", "plan.json", "--html", "h" * length, "--trace", "t" * length]) == 0
    name = "p" * 250 + ".json"
    assert cli.main(["solve", "profile.json", "--host-memory", "1GiB", "-o", name]) == 0, capsys.readouterr().err
    capsys.readouterr()
    told = said(("solve", "profile.json", "--host-memory", "2GiB", "-o"), name, capsys)
    assert f"{name}: cannot be written: File name too long" in told, "the plan before would be kept under a longer one"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a while")
def test_a_directory_that_cannot_be_entered_or_read_is_named_with_the_option(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    blind = tmp_path / "blind"
    blind.mkdir()
    blind.chmod(0o733)
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o711)
    os.seteuid(65534)
    try:
        for folder in (closed, closed / "below", blind):
            for check in (outputs.require_writable, outputs.require_place):
                with pytest.raises(UsageError, match=r"Permission denied; name another place with --html"):
                    check(folder / "page.html", "--html", kinds.PAGE)
            with pytest.raises(UsageError, match=r"Permission denied; name another place with --plots"):
                outputs.require_folder(folder / "plots", "--plots")
    finally:
        os.seteuid(0)
    assert not os.listdir(closed) and not os.listdir(blind)


def test_a_drive_without_room_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    monkeypatch.setattr(outputs, "require_room_for_files", full)
    with pytest.raises(OSError, match="No space left"):
        outputs.require_writable(tmp_path / "page.html", "--html", kinds.PAGE)
