"""The arrows between the parts go one way (docs/architecture.md)."""

import ast
import subprocess
import sys
from collections.abc import Sequence
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
MOST_FILES, MOST_LINES = 17, 500
RIVAL_PROCESSES = {"torch_arm.py", "estimator_arm.py", "deepspeed_arm.py", "fsdp_arm.py", "making.py"}
"""Run as processes of their own: the command that starts them stays small, and counts in nobody's memory."""


ROOMS = {
    "plans": (
        ("views/page", "views/plots", "views/screen"),
        ("views",),
        ("analysis", "schedule"),
        ("graph",),
        ("documents",),
        (".",),
    ),
    "planner": ((".",), ("explain",), ("fit",), ("program",), ("predict", "catalogue")),
    "executor": (
        (".",),
        ("snapshots",),
        ("recipe.py",),
        ("runtime",),
        ("memory", "optimizer"),
        ("model",),
        ("model/inspection", "model/directory"),
        ("model/attention",),
        ("data",),
        ("data/samples",),
        ("data/reading",),
        ("store", "metrics", "device", "ranks"),
    ),
    "profiler": (("doctor", "bench"), (".",)),
    "commands": (("train",), (".",), ("ranks",), ("parsing",)),
}
"""The rooms of each part from top to ground, `.` for its own folder. A room imports only from rooms that stand below;
rooms on one floor never meet."""
FEWEST_WORDS = 40
"""Characters of the docstring by which a room says what it owns, at least."""


def imports(file: Path) -> set[str]:
    """What a file imports, absolute: `ssdplan.plans.errors.UsageError`, `torch.cuda`."""
    package = ("ssdplan", *file.relative_to(ROOT).parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            within = ".".join([*base, *([node.module] if node.module else [])])
            assert not node.level or len(base) > 1, f"{file}: imports from outside of its part by a relative path"
            found |= {f"{within}.{alias.name}" for alias in node.names}
    return found


def room_of(part: str, names: Sequence[str]) -> str:
    """The room of a module, or of a name in one, from its path behind the part."""
    for end in range(len(names), 0, -1):
        path = ROOT.joinpath(part, *names[:end])
        if path.with_suffix(".py").exists():
            module = f"{'/'.join(names[:end])}.py"
            return module if any(module in floor for floor in ROOMS[part]) else "/".join(names[: end - 1]) or "."
        if path.is_dir():
            return "/".join(names[:end])
    return "."


def wrong_way(part: str, here: str, there: str) -> bool:
    """Whether an arrow between two rooms of a part does not go down."""
    floor = {room: number for number, rooms in enumerate(ROOMS[part]) for room in rooms}
    return here != there and floor[there] <= floor[here]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_what_it_may(part):
    files = list((ROOT / part).rglob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            top, *rest = name.split(".")
            assert top not in PARTS, f"{file}: import ssdplan.{name}, not {name}"
            if top == "ssdplan" and rest[0] in PARTS:
                kernels = {"native"} if file.name in RIVAL_PROCESSES else set()
                assert rest[0] in ALLOWED[part] | {part} | kernels, f"{file} imports {name}"
            assert part != "planner" or not name.startswith("ssdplan.plans.views"), f"{file} imports {name}"
            if part in ("plans", "planner", "commands"):
                assert top != "torch", f"{file} imports torch"
            if part == "rivals" and file.name not in RIVAL_PROCESSES:
                assert top not in TRAINERS, f"{file} imports {name}"


@pytest.mark.parametrize("part", ROOMS)
def test_arrows_between_rooms_go_down(part):
    crossed = 0
    for file in (ROOT / part).rglob("*.py"):
        here = room_of(part, file.relative_to(ROOT / part).with_suffix("").parts)
        for name in imports(file):
            top, *rest = name.split(".")
            if top == "ssdplan" and rest[0] == part:
                there = room_of(part, rest[1:])
                crossed += here != there
                assert not wrong_way(part, here, there), f"{file} imports {name}: {here} stands below {there}"
    assert crossed, "nothing was looked at"


@pytest.mark.parametrize("part", ROOMS)
def test_an_arrow_that_goes_up_is_seen(part):
    """For every pair of rooms: an import is allowed one way at most, and never between rooms on one floor."""
    floors = ROOMS[part]
    for number, floor in enumerate(floors):
        for room in floor:
            below = {each for rooms in floors[number + 1 :] for each in rooms}
            for other in (each for rooms in floors for each in rooms if each != room):
                assert wrong_way(part, room, other) == (other not in below), (room, other)


@pytest.mark.parametrize("part", ROOMS)
def test_every_folder_is_a_room_that_says_what_it_owns_and_none_is_crowded(part):
    named = {room for floor in ROOMS[part] for room in floor}
    for folder in {file.parent for file in (ROOT / part).rglob("*.py")}:
        room = folder.relative_to(ROOT / part).as_posix()
        assert room in named, f"{folder}: which floor of {part} is it on?"
        said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert len(said) >= FEWEST_WORDS, f"{folder}/__init__.py does not say what the folder is for"
        assert len(list(folder.glob("*.py"))) <= MOST_FILES, f"{folder} holds more than {MOST_FILES} files"


def test_no_file_is_too_long():
    for file in (found for part in PARTS for found in (ROOT / part).rglob("*.py")):
        assert len(file.read_text().splitlines()) <= MOST_LINES, f"{file} has more than {MOST_LINES} lines"


@pytest.mark.parametrize("room", ["data", "store"])
def test_a_room_of_the_executor_stands_alone(room):
    """Its folder knows nothing of the executor around it, and nothing of torch."""
    files = list((ROOT / "executor" / room).rglob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            within = name.startswith(f"ssdplan.executor.{room}.")
            assert within or not name.startswith(("ssdplan.executor", "torch")), f"{file} imports {name}"


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
        "import ssdplan.plans.schedule.build, ssdplan.plans.views.plots.plan_plots, ssdplan.plans.graph.verify\n"
        "import ssdplan.rivals.compare, ssdplan.rivals.picture\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "tests")


def test_the_package_leaks_nothing_to_the_top_level(tmp_path):
    code = "import importlib.util as u; assert not [n for n in " + repr((*PARTS, "cli", "api")) + " if u.find_spec(n)]"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=tmp_path)


def loaded_by(code: str, *modules: str) -> str:
    """Which of `modules` a process has loaded after `code`."""
    code = f"import sys\n{code}\nprint('loaded:', *(name for name in {modules} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_SECONDS
    )
    return done.stdout.rpartition("loaded:")[2].strip()


def test_a_run_loads_neither_a_solver_nor_tables_nor_graphs(tmp_path) -> None:
    """They would be in the run's memory to its end. All of the executor is loaded, a replanner, and a table is read;
    but for the kernels of a GPU, which need Triton."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": pyarrow.array(["a", "b"]).dictionary_encode(), "other": [[1], [2]]})
    parquet.write_table(table, tmp_path / "table.parquet")
    names = [
        ".".join(["ssdplan", *file.relative_to(ROOT).with_suffix("").parts])
        for file in (ROOT / "executor").rglob("*.py")
        if file.name not in ("__init__.py", "packed_triton.py", "passes_triton.py", "adamw_triton.py")
    ]
    assert "ssdplan.executor.train" in names
    code = (
        f"import ssdplan.commands.run, ssdplan.planner.replan, {', '.join(names)}\n"
        "from pathlib import Path\n"
        "from ssdplan.executor.data.reading.columns import rows\n"
        f"assert len(list(rows(Path({str(tmp_path / 'table.parquet')!r}), ['text', 'other']))) == 2"
    )
    assert loaded_by(code, "pulp", "highspy", "pandas", "networkx") == ""
    assert loaded_by("import ssdplan.planner.replan", "torch") == ""


def test_tables_are_loaded_where_one_is_made() -> None:
    """Planning, showing a plan and --help do without pandas, which takes as long to load as a plan to make."""
    command = "from ssdplan.cli import main\nfrom contextlib import suppress\nwith suppress(SystemExit): main({})"
    plan = ROOT / "plans" / "examples" / "llama-3.2-1b-laptop.json"
    what_if = "solve --model smollm2-135m --gpu rtx-4090 --ssd samsung-990-pro --host-memory 1GiB"
    for words in ("--help", "solve --help", f"{what_if} --sequence-length 256 --micro-batches 1", f"show {plan}"):
        assert not loaded_by(command.format(words.split()), "pandas", "networkx"), words


def test_tests_are_collected_without_what_only_some_of_them_need() -> None:
    """`pytest -m gpu` runs where GGUF and its like are not installed: tests import them where they use them."""
    optional = {"gguf", "tensorboard", "wandb", "deepspeed", "datasets", "sentencepiece"}
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & optional, f"{file} imports {names} at once"
