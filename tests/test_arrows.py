"""The arrows between the parts go one way (docs/architecture.md)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bounds import HANG_SECONDS

ROOT = Path(__file__).parents[1]
PARTS = ("plans", "profiler", "planner", "executor", "native", "rivals", "commands")
ALLOWED = {
    "plans": set(),
    "native": set(),
    "planner": {"plans"},
    "profiler": {"plans", "native"},
    "executor": {"plans", "native"},
    "rivals": {"plans"},
    "commands": {"plans", "native", "planner", "profiler", "executor", "rivals"},
}
TRAINERS = {"torch", "transformers", "deepspeed"}
RIVAL_PROCESSES = {"torch_arm.py", "deepspeed_arm.py", "making.py"}
"""Run as processes of their own: the command that starts them stays small, and counts in nobody's memory."""


def imports(file: Path, part: str) -> set[str]:
    """What a file imports, absolute: `ssdplan.plans.errors`, `torch.cuda`. Relative imports stay within the part."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1, f"{file}: imports from outside of {part} by a relative path"
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_what_it_may(part):
    files = list((ROOT / part).rglob("*.py"))
    assert files
    for file in files:
        for name in imports(file, part):
            top, *rest = name.split(".")
            assert top not in PARTS, f"{file}: import ssdplan.{name}, not {name}"
            if top == "ssdplan" and rest[0] in PARTS:
                assert rest[0] in ALLOWED[part] | {part}, f"{file} imports {name}"
            if part in ("plans", "planner", "commands"):
                assert top != "torch", f"{file} imports torch"
            if part == "rivals" and file.name not in RIVAL_PROCESSES:
                assert top not in TRAINERS, f"{file} imports {name}"


@pytest.mark.parametrize("room", ["data", "store"])
def test_a_room_of_the_executor_stands_alone(room):
    """Its folder knows nothing of the executor around it, and nothing of torch."""
    files = list((ROOT / "executor" / room).glob("*.py"))
    assert files
    for file in files:
        for name in imports(file, room):
            assert not name.startswith(("ssdplan.executor", "torch")), f"{file} imports {name}"


def test_cuda_is_touched_in_one_module():
    touching = [
        file.relative_to(ROOT).as_posix()
        for part in PARTS
        for file in (ROOT / part).rglob("*.py")
        if "torch.cuda" in file.read_text()
    ]
    assert touching == ["executor/device/device.py"]


def test_planning_loads_no_torch():
    code = (
        "import sys, ssdplan.cli, ssdplan.planner.solve, ssdplan.planner.predict.simulator\n"
        "import ssdplan.plans.views.plan_text\n"
        "import ssdplan.plans.schedule.build, ssdplan.plans.views.plan_plots, ssdplan.plans.graph.verify\n"
        "import ssdplan.rivals.compare, ssdplan.rivals.picture\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "tests")


def test_the_package_leaks_nothing_to_the_top_level(tmp_path):
    code = "import importlib.util as u; assert not [n for n in " + repr((*PARTS, "cli")) + " if u.find_spec(n)]"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=tmp_path)


def test_a_run_that_may_replan_does_not_load_a_solver() -> None:
    """It would be in the run's memory to its end."""
    code = "import sys, ssdplan.planner.replan; print([m for m in ('pulp', 'highspy', 'torch') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_SECONDS
    )
    assert done.stdout == "[]\n"


def test_tests_are_collected_without_what_only_some_of_them_need() -> None:
    """`pytest -m gpu` runs where GGUF and its like are not installed: tests import them where they use them."""
    optional = {"gguf", "tensorboard", "wandb", "deepspeed", "datasets", "sentencepiece"}
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & optional, f"{file} imports {names} at once"
