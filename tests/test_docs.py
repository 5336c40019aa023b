"""The documents say what the code does: fields, options, exit codes, bytes on ssd; and their links resolve."""

import importlib.util
import json
import re
import struct
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel

from ssdplan import cli, native
from ssdplan.executor.store import Store
from ssdplan.plans import errors, plan, profile
from ssdplan.plans.documents import Document, Part

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = (README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
MODELS = {
    found.__name__: found
    for module in (profile, plan)
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, Part) and found not in (Part, Document)
}
OTHER_OPTIONS = {"--directory", "--only-assets"}
"""Options of the demo."""
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


def usage(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def options_of(capsys: pytest.CaptureFixture[str], *command: str) -> set[str]:
    """What the command's parser takes, from the usage that argparse writes."""
    return {"--help", *re.findall(r"--[a-z][a-z-]*", usage(capsys, *command).split("\n\n")[0])}


def commands_of(capsys: pytest.CaptureFixture[str]) -> set[str]:
    return set(re.findall(r"^    ([a-z]+) +\S", usage(capsys), re.MULTILINE))


def test_commands_and_options_in_the_documents_exist(capsys: pytest.CaptureFixture[str]) -> None:
    commands = commands_of(capsys)
    options = {command: options_of(capsys, command) for command in commands} | {"": options_of(capsys)}
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
    named = {row[0].removeprefix("ssdplan ") for table in tables(read(README)) for row in table}
    assert commands <= named, "README's table of commands lacks some"


def exit_codes() -> dict[str, int]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SsdplanError)]
    return {kind.__name__: kind.exit_code for kind in kinds}


def test_exit_codes_are_the_errors() -> None:
    (rows,) = [table for table in tables(read(ROOT / "docs" / "architecture.md")) if table[0][0] == "0"]
    without_error = {int(row[0]) for row in rows if not row[1]}
    assert {row[1]: int(row[0]) for row in rows if row[1]} == exit_codes()
    assert without_error == {0, cli.INTERRUPTED}
    (short,) = [table for table in tables(read(README)) if table[0][0] == "0"]
    assert [int(row[0]) for row in short] == sorted({*exit_codes().values(), 0, cli.INTERRUPTED})


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(path)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), f"{path.name}: no {target}"
        if anchor:
            assert anchor in {slug(heading) for heading in re.findall(r"^#+ (.+)$", read(file), re.MULTILINE)}


def test_files_named_in_the_architecture_exist() -> None:
    for name in re.findall(r"`([\w/]+\.(?:py|cpp))`", read(ROOT / "docs" / "architecture.md")):
        assert (ROOT / name).is_file(), f"architecture.md names {name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_path_of_a_machine(path: Path) -> None:
    for number, line in enumerate(read(path).splitlines(), 1):
        assert not MACHINE_PATH.search(line), f"{path.name}:{number}: {line}"


def test_volumes_lie_on_ssd_as_the_document_says(tmp_path: Path) -> None:
    """A store of two volumes, read back by the offsets and the formula of store-format.md."""
    text = read(ROOT / "docs" / "store-format.md")
    layout, superblock = tables(text)
    data_start = int(layout[-1][0])
    fields = [(int(offset), int(nbytes), name.split("`")[0]) for offset, nbytes, name in superblock]
    assert all(offset + nbytes == following for (offset, nbytes, _), (following, _, _) in pairwise(fields))
    sha256, stripe_bytes, stripes = "5c" * 32, 1 << 20, 40
    directories = [tmp_path / "one", tmp_path / "other"]
    store = Store.create(directories, stripes * stripe_bytes, sha256, [3.0, 1.0])
    try:
        memory = torch.from_dlpack(native.Arena(stripe_bytes, lock=False))
        for number in range(stripes):
            store.write(number * stripe_bytes, stripe_bytes, memory.fill_(100 + number).data_ptr())
        volumes = [(where / f"volume-{number}.ssdplan").read_bytes() for number, where in enumerate(directories)]
    finally:
        store.remove()
    found = [{name: volume[offset : offset + nbytes] for offset, nbytes, name in fields} for volume in volumes]
    for number, (volume, block) in enumerate(zip(volumes, found, strict=True)):
        assert block["magic"] == b"SSDPLAN\x01"
        assert [struct.unpack("<I", block[name])[0] for name in ("volume", "volumes")] == [number, 2]
        assert struct.unpack("<Q", block["data_bytes"])[0] == len(volume) - data_start
        assert block["plan_sha256"].hex() == sha256
        assert block["crc32"] == struct.pack("<I", zlib.crc32(volume[: fields[-1][0]]))
        assert not any(volume[fields[-1][0] + 4 : 4096])
        assert sorted(block["dealing"]) == [0] * 12 + [1] * 4
    assert found[0]["store"] == found[1]["store"] and any(found[0]["store"])
    dealing = found[0]["dealing"]
    for number in range(stripes):
        cycle, position = divmod(number, len(dealing))
        count, rank = (dealing[:end].count(dealing[position]) for end in (len(dealing), position))
        place = data_start + (cycle * count + rank) * stripe_bytes
        held = volumes[dealing[position]][place : place + stripe_bytes]
        assert held == bytes([100 + number]) * stripe_bytes


def test_the_picture_is_of_the_schedule_as_it_is() -> None:
    """docs/plan.svg is what docs/draw_plan.py draws of today's schedule; run that when this fails, and look at it."""
    spec = importlib.util.spec_from_file_location("draw_plan", ROOT / "docs" / "draw_plan.py")
    assert spec and spec.loader
    drawer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawer)
    assert drawer.draw(drawer.timeline()) == (ROOT / "docs" / "plan.svg").read_text()
