"""The documents say what the code does: fields, options, exit codes, bytes on ssd; and their links resolve."""

import ast
import importlib.util
import json
import re
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from pydantic import BaseModel

from ssdplan import cli, native
from ssdplan.executor.snapshots import snapshots
from ssdplan.executor.store import Record, Store
from ssdplan.plans import errors
from ssdplan.plans.analysis.curves import Curves
from ssdplan.plans.analysis.wear import lifetime, wear
from ssdplan.plans.documents import plan, profile, run
from ssdplan.plans.documents.base import Document, Part, Sparing
from ssdplan.plans.documents.metrics import SnapshotCost, StepMetrics
from ssdplan.plans.views import quantities
from tests.test_arrows import PARTS, ROOMS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
COMMANDS = ROOT / "docs" / "commands.md"
INDEX = ROOT / "docs" / "README.md"
MOST_LINES_OF_README = 200
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = (README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES)
MODELS = {
    found.__name__: found
    for module in (profile, plan)
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, Part) and found not in (Part, Document, Sparing)
}
OTHER_OPTIONS = {
    "--commands",
    "--directory",
    "--only-assets",
    "--hidden",
    "--layers",
    "--process-memory",
    "--shorten",
    "--limit",
    "--no-deps",
    "--only-binary",
    "--platform",
    "--python-version",
    "--user",
    "--scope",
    "--rival",
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--nodes",
    "--ntasks-per-node",
    "--gpus-per-node",
}
"""Options of the demo, of the scripts that benchmarks use, of pip, systemd-run, torchrun and Slurm."""
MACHINE_PATH = re.compile(r"(?<![\w./~])/(?:bin|data|etc|home|media|mnt|nvme|opt|root|srv|tmp|usr|var|work|Users)\b")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table below its head, code marks removed."""
    found: list[list[list[str]]] = []
    for block in re.findall(r"^\|.*\n\|[-| ]+\n((?:\|.*\n)*)", text, re.MULTILINE):
        rows = [line.strip().strip("|").split("|") for line in block.splitlines()]
        found.append([[cell.strip().strip("`") for cell in row] for row in rows])
    return found


def field_names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


@pytest.mark.parametrize("name", MODELS)
def test_every_field_is_explained_under_its_model(name: str) -> None:
    text = read(ROOT / "docs" / "plan-format.md")
    sections = re.findall(rf"^### `{name}`.*?(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(sections) == 1, f"plan-format.md has {len(sections)} sections on {name}"
    (rows,) = tables(sections[0])
    assert [row[0] for row in rows] == field_names(MODELS[name])
    assert all(len(row) == 3 and row[2] for row in rows), f"a field of {name} has no meaning"


def test_what_a_run_keeps_is_explained() -> None:
    found = tables(read(ROOT / "docs" / "snapshots.md"))
    listed = [[row[0] for row in rows] for rows in found]
    for model in (run.Run, snapshots.Snapshot, snapshots.Origin):
        assert field_names(model) in listed, model.__name__
    assert ["step", *SnapshotCost.__dataclass_fields__] in listed
    text = read(ROOT / "docs" / "snapshots.md")
    assert f"`{run.SCHEMA}`" in text and f"`{snapshots.SCHEMA}`" in text


def test_what_a_line_of_the_metrics_has_is_explained() -> None:
    fields, *_, columns = [[row[0] for row in rows] for rows in tables(read(ROOT / "docs" / "metrics.md"))]
    assert fields == list(StepMetrics.__dataclass_fields__)
    named = re.findall(r"\w+", " ".join(columns[2:]))
    assert named == [name for name in Curves().table() if name not in fields]


def test_the_schemas_in_the_documents_are_the_codes() -> None:
    text = read(ROOT / "docs" / "plan-format.md")
    for model in (profile.Profile, plan.Plan):
        assert f"`{model.model_fields['schema_'].default}`" in text


def test_the_plan_that_is_shown_is_one() -> None:
    (shown,) = re.findall(r"```json\n(.*?)```", read(ROOT / "docs" / "plan-format.md"), re.DOTALL)
    raw = json.loads(shown)
    plan.Decision.model_validate(raw["decision"])
    plan.Prediction.model_validate(raw["prediction"])
    assert [plan.Sensitivity.model_validate(row) for row in raw["sensitivity"]]


def usage(*arguments: str) -> str:
    said = CliRunner().invoke(cli.make_command_line(), [*arguments, "--help"])
    assert said.exit_code == 0
    return said.stdout


def listed(written: str, kind: str) -> list[str]:
    """The commands or actions that a help lists."""
    return re.findall(r"^  ([a-z]+) +\S", written.partition(f"\n{kind}:\n")[2], re.MULTILINE)


def options_of(*command: str) -> set[str]:
    """The options of a command and of its actions, from the help that click writes."""
    written = usage(*command)
    lines = re.findall(r"^  (-.*?)(?:  .*)?$", written, re.MULTILINE)
    taken = set(re.findall(r"--[a-z][a-z-]*", " ".join(lines)))
    return taken.union(*(options_of(*command, action) for action in listed(written, "Actions")))


def test_commands_and_options_in_the_documents_exist() -> None:
    commands = listed(usage(), "Commands")
    options = {command: options_of(command) for command in commands} | {"": options_of()}
    options = {command: taken | {"--output"} for command, taken in options.items()}
    known = set().union(*options.values()) | OTHER_OPTIONS
    for path in DOCUMENTS:
        text = read(path)
        # In code, a command's own options; in prose, anyone's.
        code = [line.strip() for line in re.findall(r"^ {4,}(?:\$ )?(ssdplan .*)$", text, re.MULTILINE)]
        code += re.findall(r"`(ssdplan [^`\n]*)`", text)
        for line in code:
            command = line.removeprefix("ssdplan ").split()[0]
            assert command in commands, f"{path.name}: {line}"
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", line.split("`")[0]):
                assert option in options[command], f"{path.name}: {line}"
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text):
            assert option in known, f"{path.name} names {option}"
    named = {row[0].removeprefix("ssdplan ") for table in tables(read(COMMANDS)) for row in table}
    assert set(commands) <= named, "the table of commands lacks some"


def exit_codes() -> dict[str, int]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SsdplanError)]
    return {kind.__name__: kind.exit_code for kind in kinds}


def test_exit_codes_are_the_errors() -> None:
    (rows,) = [table for table in tables(read(ROOT / "docs" / "architecture.md")) if table[0][0] == "0"]
    without_error = {int(row[0]) for row in rows if not row[1]}
    assert {row[1]: int(row[0]) for row in rows if row[1]} == exit_codes()
    assert without_error == {0, cli.INTERRUPTED}
    (short,) = [table for table in tables(read(COMMANDS)) if table[0][0] == "0"]
    assert [int(row[0]) for row in short] == sorted({*exit_codes().values(), 0, cli.INTERRUPTED})


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(path)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), f"{path.name}: no {target}"
        if anchor:
            assert anchor in {slug(heading) for heading in re.findall(r"^#+ (.+)$", read(file), re.MULTILINE)}


def test_the_readme_is_short_and_the_index_has_every_page() -> None:
    assert len(read(README).splitlines()) <= MOST_LINES_OF_README
    assert "](docs/README.md)" in read(README)
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", read(INDEX)))
    assert linked == {path.name for path in PAGES if path != INDEX}


def test_the_estimates_in_the_readme_are_the_example_plans() -> None:
    """Drives, a step, tokens a second and wear of each plan in plans/examples, as `ssdplan show` has them."""
    found = []
    for path in (ROOT / "plans" / "examples").glob("*.json"):
        shown = plan.Plan.load(path)
        p = shown.prediction
        worn = wear(shown.machine, p.ssd_write_bytes, p.step_seconds)
        speed, step = quantities.number(p.tokens_per_second), quantities.duration(p.step_seconds)
        a_day = f"{quantities.decimal(worn.bytes_a_day)} a day"
        (drive,) = {volume.path.partition(" ")[0] for volume in shown.machine.volumes}
        found.append([drive, speed, step, a_day, lifetime(worn.days) if worn.days else ""])
    (rows,) = [table for table in tables(read(README)) if len(table[0]) == 6]
    written = [[row[1].split()[-1].strip("`"), *(cell.strip("*") for cell in row[2:])] for row in rows]
    assert sorted(written) == sorted(found)


@pytest.mark.parametrize("path", [README, ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda path: path.name)
def test_files_of_code_that_a_document_names_exist(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", read(path), flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"(?<![\w./-])[\w./-]+\.(?:py|cpp)\b", text):
        assert (ROOT / name).is_file(), f"{path.name} names {name}"


def test_files_that_a_docstring_names_exist() -> None:
    """By their path from the folder of the module, from its part or from the root."""
    named = 0
    for part in (*PARTS, "tests"):
        for module in (ROOT / part).rglob("*.py"):
            for text in docstrings(module):
                for name in re.findall(r"`([\w/]+\.(?:py|cpp|hpp))`", text):
                    named += 1
                    found = (base / name for base in (module.parent, ROOT / part, ROOT))
                    assert any(file.is_file() for file in found), f"{module.relative_to(ROOT)} names {name}"
    assert named, "nothing was looked at"


def docstrings(module: Path) -> list[str]:
    """Of a module, its classes, functions and attributes: all strings that stand alone."""
    nodes = [node.value for node in ast.walk(ast.parse(read(module))) if isinstance(node, ast.Expr)]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_the_rooms_are_drawn_as_they_are() -> None:
    """The drawing in architecture.md has every room of every part on its floor, from top to ground."""
    (drawing,) = re.findall(r"^```\n(.*?)^```", read(ROOT / "docs" / "architecture.md"), re.MULTILINE | re.DOTALL)
    drawn = {
        part: [(int(floor), room) for floor, room in re.findall(r"^  (\d+) +(\S+)", lines, re.MULTILINE)]
        for part, lines in re.findall(r"^(\w+)/\n((?:  .*\n)+)", drawing, re.MULTILINE)
    }
    built = {
        part: [
            (len(floors) - 1 - number, room if room.endswith(".py") else f"{room}/")
            for number, rooms in enumerate(floors)
            for room in rooms
        ]
        for part, floors in ROOMS.items()
    }
    assert drawn == built


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_path_of_a_machine(path: Path) -> None:
    for number, line in enumerate(read(path).splitlines(), 1):
        assert not MACHINE_PATH.search(line), f"{path.name}:{number}: {line}"


def test_volumes_lie_on_ssd_as_the_document_says(tmp_path: Path) -> None:
    """A store of two volumes, read back by the offsets and the formula of store-format.md alone."""
    (superblock,) = [rows for rows in tables(read(ROOT / "docs" / "store-format.md")) if "magic" in rows[0][-1]]
    fields = {row[2].split("`")[0]: (int(row[0]), int(row[1])) for row in superblock}
    assert all(sum(left) == right[0] for left, right in pairwise(list(fields.values())[:-1])), (
        "fields follow each other"
    )
    sha256, stripe_bytes, stripes = "5c" * 32, 1 << 20, 40
    directories = [tmp_path / "one", tmp_path / "other"]
    cuts = tuple(range(stripe_bytes, stripes * stripe_bytes, stripe_bytes))
    records = [Record("optimizer/all", 0, stripes * stripe_bytes, True, cuts)]
    store = Store.create(directories, records, sha256, [3.0, 1.0], durable=True)
    try:
        memory = torch.from_dlpack(native.Arena(stripe_bytes, lock=False))
        for generation in (1, 2):
            for number in range(stripes):
                store.write(number * stripe_bytes, stripe_bytes, memory.fill_(generation + number).data_ptr())
            store.commit({"step": generation})
        volumes = [(where / f"volume-{number}.ssdplan").read_bytes() for number, where in enumerate(directories)]
    finally:
        store.remove()
    for generation in (1, 2):
        blocks = []
        for volume in volumes:
            page = volume[generation % 2 * 4096 :][:4096]
            blocks.append({name: page[offset : offset + nbytes] for name, (offset, nbytes) in fields.items()})
            assert page[4088:] == struct.pack("<Q", checksum(page[:4088] + bytes(8)))
            assert not any(page[sum(list(fields.values())[-2]) : 4088])
        dealing = blocks[0]["dealing"]
        for number, (volume, block) in enumerate(zip(volumes, blocks, strict=True)):
            numbers = {name: int.from_bytes(value, "little") for name, value in block.items()}
            assert block["magic"] == b"SSDPLAN\x02" and numbers["kind"] == 1 and numbers["volume"] == number
            assert (numbers["generation"], numbers["capacity_bytes"]) == (generation, len(volume))
            assert numbers["stripe_bytes"] == stripe_bytes and numbers["length of the dealing"] == 16
            assert block["plan_sha256"].hex() == sha256 and sorted(block["dealing"]) == [0] * 12 + [1] * 4
            table = volume[8192 + generation % 2 * numbers["table_bytes"] :][: numbers["table_length"]]
            assert checksum(table) == numbers["table_checksum"]
        assert blocks[0]["store"] == blocks[1]["store"] and any(blocks[0]["store"])
        length, count = struct.unpack_from("<QQ", table, 8)
        names = json.loads(table[24 : 24 + length])
        assert table[:8] == b"SSDTABLE" and names["metadata"] == {"step": generation} and count == stripes
        assert names["volumes"] == [str(where / f"volume-{number}.ssdplan") for number, where in enumerate(directories)]
        data_start = -(-(8192 + 2 * numbers["table_bytes"]) // stripe_bytes) * stripe_bytes
        for tensor, nbytes, offset, place, expected, written in struct.iter_unpack(
            "<IIQQQQ", table[24 + length :][: 40 * count]
        ):
            assert (names["tensors"][tensor], nbytes, written) == ("optimizer/all", stripe_bytes, generation)
            cycle, position = divmod(place // stripe_bytes, len(dealing))
            share, rank = (dealing[:end].count(dealing[position]) for end in (len(dealing), position))
            begin = data_start + (cycle * share + rank) * stripe_bytes
            held = volumes[dealing[position]][begin : begin + nbytes]
            assert held == bytes([generation + offset // stripe_bytes]) * nbytes and checksum(held) == expected


def checksum(data: bytes) -> int:
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return native.checksum(memory.data_ptr(), len(data))


def test_the_picture_is_of_the_schedule_as_it_is() -> None:
    """docs/plan.svg is what docs/draw_plan.py draws of today's schedule; run that when this fails, and look at it."""
    spec = importlib.util.spec_from_file_location("draw_plan", ROOT / "docs" / "draw_plan.py")
    assert spec and spec.loader
    drawer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawer)
    assert drawer.draw(drawer.timeline()) == (ROOT / "docs" / "plan.svg").read_text()


def test_what_the_what_ifs_print_is_found_and_written_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m docs.printed` takes minutes; here its commands print what the documents say already."""
    spec = importlib.util.spec_from_file_location("printed", ROOT / "docs" / "printed.py")
    assert spec and spec.loader
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    text = (ROOT / "docs" / "catalogue.md").read_text(encoding="utf-8")
    called = []

    def prints(command: str, first: str) -> str:
        called.append((" ".join(command.split()), first.split()))
        block = text[text.index(first) :].split("\n\n", 1 + first.startswith("    hours:"))
        return "\n\n".join(block[:-1]) + "\n"

    monkeypatch.setattr(writer, "printed", prints)
    assert writer.renewed(text) == (text, 5)
    assert [first[0] for _, first in called] == ["Plan:", "ssds", "gpu", "hours:", "model"]
    models = [command.split()[3] for command, _ in called]
    assert models == ["llama-3.1-8b"] * 4 + ["mixtral-8x7b"]
