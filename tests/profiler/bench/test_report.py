"""What people and programs read of a benchmark: frozen fields, no missed target that is not told, lines that fit."""

import json
import re
from pathlib import Path

from rich.cells import cell_len

from ssdplan.profiler.bench.report import Bench, Row, Surroundings, Target, describe_bench, rows_frame
from ssdplan.profiler.bench.turns import Ratio
from tests.plans.read_csv import cell, written_and_read

GIB = 1 << 30
ROWS = (
    Row("engine", "read, fio", "B/s", 3.21e9, 3.3e9, Ratio(0.973, 0.9551, 0.99), Target(0.95)),
    Row("engine", "write, fio", "B/s", 2e9, 3e9, Ratio(0.667, 0.6, 0.7), Target(0.95), note="a neighbour wrote too"),
    Row("adam", "DeepSpeed", "elements/s", ours=1.25e9, target=Target(1.15), missing="not installed; pip install it"),
    Row("overflow", "memory", "B", ours=0, rival=80 << 20),
    Row(
        "page-lock", "beyond", "B", ours=4095, rival=GIB, ratio=Ratio(0.9998, 0.9998, 0.9998), target=Target(1.0, True)
    ),
)
MACHINE = Surroundings(
    processor="Made CPU",
    cores=8,
    isa="x86-64-v3",
    host_memory_bytes=64 * GIB,
    kernel="6.1.0",
    huge_pages="madvise",
    python="3.11.2",
    torch="2.13.0",
    load=0.02,
)


def _bench(rows: tuple[Row, ...] = ROWS, machine: Surroundings = MACHINE) -> Bench:
    return Bench("2026-01-02T03:04:05+00:00", machine, ("one", "two"), GIB, 10, rows)


def _line(page: str, start: str) -> str:
    found = [line for line in (" ".join(line.split()) for line in page.splitlines()) if line.startswith(start)]
    assert len(found) == 1, found
    return found[0]


def test_a_row_is_told_with_its_target_met_or_missed() -> None:
    page = describe_bench(_bench())
    assert _line(page, "read, fio") == "read, fio 3.21 GB/s 3.3 GB/s 0.97 0.96 to 0.99 >= 0.95 met"
    assert _line(page, "write, fio 2") == "write, fio 2 GB/s 3 GB/s 0.67 0.60 to 0.70 >= 0.95 MISSED"
    assert _line(page, "write, fio:") == "write, fio: a neighbour wrote too"
    assert _line(page, "memory") == "memory 0 B 80 MiB -"
    assert _line(page, "beyond") == "beyond 4 KiB 1 GiB 1.00 1.00 to 1.00 <= 1 met"
    assert "Targets: 2 met, 1 missed, 1 not measured." in page


def test_what_was_not_measured_says_why() -> None:
    page = describe_bench(_bench())
    assert _line(page, "DeepSpeed 1") == "DeepSpeed 1,250 M/s - - >= 1.15"
    assert _line(page, "DeepSpeed:") == "DeepSpeed: not measured: not installed; pip install it"


def test_the_machine_is_named() -> None:
    page = describe_bench(_bench())
    for said in (
        "Made CPU, 8 cores, x86-64-v3",
        "64 GiB, huge pages: madvise",
        "Linux 6.1.0, Python 3.11.2, torch 2.13.0",
    ):
        assert said in page
    assert "two" in page and "10 pairs of runs, in turns" in page
    assert "something else was running" not in page
    busy = Surroundings(**{**{name: getattr(MACHINE, name) for name in MACHINE.__slots__}, "load": 1.7})
    assert "1.70; something else was running" in describe_bench(_bench(machine=busy))


def test_targets_are_met_at_their_very_value() -> None:
    assert Target(0.95).met(0.95) and not Target(0.95).met(0.9499)
    assert Target(1.0, at_most=True).met(1.0) and not Target(1.0, at_most=True).met(1.0001)
    assert Row("g", "n", "B", target=Target(1.0)).met is None and Row("g", "n", "B", ratio=Ratio(1, 1, 1)).met is None


def test_the_json_is_this() -> None:
    """Fields are added, not renamed."""
    document = json.loads(_bench().json())
    assert list(document) == ["schema", "created", "machine", "volumes", "size_bytes", "pairs", "rows"]
    assert document["schema"] == "ssdplan.bench/1"
    assert (document["volumes"], document["size_bytes"], document["pairs"]) == (["one", "two"], GIB, 10)
    assert document["machine"] == {
        "processor": "Made CPU",
        "cores": 8,
        "isa": "x86-64-v3",
        "host_memory_bytes": 64 * GIB,
        "kernel": "6.1.0",
        "huge_pages": "madvise",
        "python": "3.11.2",
        "torch": "2.13.0",
        "load": 0.02,
    }
    rows = document["rows"]
    assert rows[0] == {
        "group": "engine",
        "name": "read, fio",
        "unit": "B/s",
        "ours": 3.21e9,
        "rival": 3.3e9,
        "ratio": 0.973,
        "ratio_low": 0.9551,
        "ratio_high": 0.99,
        "target": 0.95,
        "target_is": "at least",
        "met": True,
        "missing": "",
        "note": "",
    }
    assert [row["met"] for row in rows] == [True, False, None, None, True]
    assert rows[2]["rival"] is None and rows[2]["ratio"] is None and rows[2]["missing"] == ROWS[2].missing
    assert rows[3]["target"] is None and rows[3]["target_is"] is None
    assert rows[4]["target_is"] == "at most"


def test_the_table_has_the_rows_of_the_document(tmp_path: Path) -> None:
    found = written_and_read(rows_frame(ROWS), tmp_path / "bench.csv")
    rows = json.loads(_bench().json())["rows"]
    assert [list(line) for line in found] == [list(row) for row in rows]
    for line, row in zip(found, rows, strict=True):
        for name, value in row.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            assert float(line[name]) == value if number else line[name] == cell(value), name


def test_the_fields_are_explained() -> None:
    """docs/benchmarks.md has a row for each field, in the order of the document."""
    text = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    text = text[text.index("## `ssdplan bench`") : text.index("## Figures")]
    tables = re.findall(r"^\| field \|.*\n\|[-| ]+\n((?:\|.*\n)*)", text, re.MULTILINE)
    named = [re.findall(r"^\| `(\w+)`", body, re.MULTILINE) for body in tables]
    document = json.loads(_bench().json())
    assert named == [list(document), list(document["machine"]), list(document["rows"][0])]


def test_no_line_is_too_long() -> None:
    wide = Row("engine", "n" * 36, "B/s", 123.4e9, 123.4e9, Ratio(123, 120, 130), Target(0.95), "w " * 200, "n " * 200)
    lines = describe_bench(_bench(rows=(wide,))).splitlines()
    assert max(map(cell_len, lines)) <= 100
    (row,) = [line for line in lines if line.startswith("  nnn") and "GB/s" in line]
    assert row.endswith(">= 0.95  met"), "nothing of it is cut off"
