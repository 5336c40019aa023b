"""ssdplan from Python: what is loaded, what options mean, a callback that ends a run, and the notebook of the docs."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import ssdplan
from ssdplan import api
from ssdplan.plans.errors import InfeasibleError, UsageError
from ssdplan.plans.views.page.board import MOST_LINES, Board
from tests.bounds import HANG_SECONDS
from tests.made.models import make_model, make_tokenizer
from tests.made.profiles import made_profile
from tests.warm import ENVIRONMENT

NOTEBOOK = Path(__file__).parents[2] / "docs" / "train.ipynb"
OPTIONS: dict[str, Any] = {"host_memory": "3MiB", "seconds": 1, "micro_batch_sizes": [1], "sequence_length": 64}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("home")
    make_model("llama", path / "model", layers=3, vocab=320, hidden=64, tied=True)
    make_tokenizer(path / "model")
    rows = [{"prompt": f"fox {i}", "completion": " over" * (1 + i % 4)} for i in range(200)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def notebook(home: Path) -> str:
    """What the docs' notebook prints; it leaves its run in the directory "run".

    Its code as it is, but for what it trains; without jupyter, and with pictures that nobody sees.
    """
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    given = f'MODEL, DATA, OUT, OPTIONS = "model", "rows.jsonl", "run", {dict(OPTIONS, steps=3)!r}'
    sources = ["".join(cell["source"]) for cell in cells]
    (chosen,) = [number for number, cell in enumerate(cells) if "parameters" in cell["metadata"].get("tags", ())]
    sources[chosen] = given
    assert all(not cell["outputs"] for cell in cells), "as it is committed it has no output"
    return python(
        "import matplotlib\nmatplotlib.use('agg')\n" + "\n".join(sources) + "\nprint('steps', len(metrics))", home
    )


def python(code: str, cwd: Path) -> str:
    """What code in a process of its own prints; it uses torch, which has settings for each process."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_the_package_is_imported_without_what_trains() -> None:
    code = """
        import sys, ssdplan
        assert not {"pydantic", "click", "ssdplan.api"} & set(sys.modules)
        for name in ssdplan.__all__:
            assert getattr(ssdplan, name).__doc__ and name in dir(ssdplan)
        assert not {"torch", "transformers", "pandas", "matplotlib", "highspy"} & set(sys.modules)
    """
    python(textwrap.dedent(code), Path.cwd())
    assert sorted(ssdplan.__all__) == sorted(api.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        ssdplan.trian  # noqa: B018


def test_a_plan_is_the_command_lines_own_and_options_are_checked(tmp_path: Path) -> None:
    profile = made_profile()
    lines: list[str] = []
    plan = ssdplan.solve(
        profile, host_memory="8GiB", micro_batches=2, residency={"optimizer": 0.5}, output=tmp_path / "plan.json"
    )
    assert ssdplan.Plan.load(tmp_path / "plan.json") == plan and plan.decision.micro_batches == 2
    assert plan.decision.host_budget_bytes == 8 << 30 and plan.asked is not None
    assert plan == ssdplan.solve(profile, host_memory=8 << 30, micro_batches=2, residency={"optimizer": 0.5})
    shown = ssdplan.show(plan)
    assert repr(shown) == str(shown) and shown.startswith("Plan: ")
    with pytest.raises(InfeasibleError, match="the least that would do is"):
        ssdplan.solve(profile, host_memory="64KiB", progress=lambda board: lines.append(board.text))
    with pytest.raises(UsageError, match=r"solve\(host_memry=...\): unknown key; did you mean host_memory\?"):
        ssdplan.solve(profile, host_memry="1GiB")
    with pytest.raises(UsageError, match=r"solve\(host_memory=...\): '1' has no unit"):
        ssdplan.solve(profile, host_memory="1")
    with pytest.raises(UsageError, match="ssdplan train --ranks R"):
        ssdplan.train("m", "d", "o", ranks=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": 1}, "train(model=...): takes a path: text or a pathlib.Path, not 1, which is of type int"),
        ({"data": ["rows.jsonl"]}, "train(data=...): takes a path: text or a pathlib.Path, not ['rows.jsonl']"),
        ({"out": None}, "train(out=...): takes a path: text or a pathlib.Path, not None"),
        ({"pack": "no"}, "train(pack=...): takes True or False, not 'no'"),
        ({"lr": [1e-4, 1e-5]}, "train(lr=...): takes a number, not [0.0001, 1e-05]"),
        ({"lr": True}, "train(lr=...): takes a number, not True"),
        ({"learning_rate": {}}, "train(lr=...): takes a number, not {}"),
        ({"steps": 2.5}, "train(steps=...): takes a whole number, not 2.5"),
        ({"host_memory": 2.5}, 'train(host_memory=...): takes a size: text such as "8GiB", or a whole number of bytes'),
        ({"freeze": [5]}, "train(freeze=...): takes text (or a list of such), not 5"),
        (
            {"micro_batch_sizes": [1, None]},
            "train(micro_batch_sizes=...): takes whole numbers, such as [1, 2], not None",
        ),
        ({"residency": 3}, "train(residency=...): takes fractions by name"),
        ({"precision": 16}, "train(precision=...): takes one of 'bf16', 'fp16', 'fp32', not 16"),
        ({"tensorboard": 3}, "train(tensorboard=...): takes a path: text or a pathlib.Path, or True, not 3"),
        ({"on_step": 3}, "train(on_step=...): takes a function, not 3"),
        ({"progress": "p"}, "train(progress=...): takes a function, not 'p'"),
        ({"lr": 1e-4, "learning_rate": 1e-5}, "train(learning_rate=...): is another name of lr, which is given too"),
        ({"num_epochs": 3}, "train(num_epochs=...): unknown key; did you mean epochs?"),
        ({"json": True}, "train(json=...): it changes what the command prints"),
        ({"configuration": "none.yaml"}, "none.yaml: cannot read this configuration"),
    ],
)
def test_what_an_argument_cannot_be_is_refused_by_its_name(options: dict[str, Any], says: str) -> None:
    """Both as an error of Python for it and as one of the command line."""
    given = {"model": "m", "data": "d", "out": "o", **options}
    with pytest.raises(UsageError) as refused:
        ssdplan.train(**given)
    assert str(refused.value).startswith(says)
    assert isinstance(refused.value, TypeError) == ("takes" in says)


def test_the_other_functions_check_theirs(tmp_path: Path) -> None:
    for call in (
        lambda: ssdplan.profile(3),
        lambda: ssdplan.profile("m", output=3),
        lambda: ssdplan.solve(3),
        lambda: ssdplan.solve(made_profile(), progress=3),
        lambda: ssdplan.show(None),
        lambda: ssdplan.show("m", plots=3),
        lambda: ssdplan.Trained(3),
    ):
        with pytest.raises(TypeError, match=r"\(\w+=\.\.\.\): takes "):
            call()
    with pytest.raises(UsageError, match="a sweep is a table"):
        ssdplan.solve(made_profile(), sweep="host-memory=1GiB..2GiB")
    assert ssdplan.Trained(str(tmp_path)).directory == tmp_path


@pytest.mark.usefixtures("notebook")
def test_a_callback_ends_a_run_with_its_model_and_the_run_goes_on(home: Path) -> None:
    """By the profile of the notebook's run, to the losses of that run."""
    code = """
        import json, ssdplan
        from pathlib import Path
        seen, boards = [], []
        def step(metrics):
            seen.append(metrics.step)
            return metrics.step == 3
        def draw(board):
            boards.append((board.step, board.steps, len(board.losses), board.fraction, board._repr_html_()))
        run = ssdplan.train("model", "rows.jsonl", "stopped", on_step=step, progress=draw, steps=9, host_memory="3MiB",
                            from_profile="run/profile.json")
        table, document = run.metrics, json.loads(Path("stopped/run.json").read_text())
        assert seen == [1, 2, 3] == list(table["step"]) and run.report["steps"] == 3 == document["steps"]
        whole = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
        assert list(table["loss"]) == [line["loss"] for line in whole if "loss" in line]
        assert (run.model / "config.json").is_file()
        assert boards[-1][:4] == (3, 9, 3, 3 / 9) and "step 3 of 9" in boards[-1][4] and "<svg" in boards[-1][4]
        seen.clear()
        again = ssdplan.train("model", "rows.jsonl", "stopped", on_step=step, progress=draw, steps=5)
        assert seen == [4, 5] and list(again.metrics["step"]) == [1, 2, 3, 4, 5]
        print("done", ssdplan.show(run)[:8])
    """
    assert python(textwrap.dedent(code), home).strip() == "done The run"


def test_a_board_holds_little_and_shows_what_is_safe() -> None:
    board = Board("run")
    assert board.fraction is None and board.text == "" and "<svg" not in board._repr_html_()
    for number in range(2 * MOST_LINES):
        board.tell(f"line {number} <b>\x1b[31m")
    assert len(board.lines) == MOST_LINES and board.text == f"line {2 * MOST_LINES - 1} <b>\\x1b[31m"
    board.losses += [2.0, float("nan"), 1.0]
    assert "<b>\\x1b" not in board._repr_html_() and "&lt;b&gt;" in board._repr_html_()
    assert "training loss: 2.0000 first, 1.0000 last" in board._repr_html_()


def test_the_notebook_runs(notebook: str) -> None:
    assert notebook.splitlines()[-1] == "steps 3"
