"""A CSV file holds what the document holds: to the bit, for any program, whole or not at all."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.plans.analysis.csv_file import write_csv
from ssdplan.plans.analysis.frames import INTEGER, NUMBER, TEXT, TRUTH, columns_of, frame_of, sweep_frame
from ssdplan.plans.documents.sweep import Sweep, SweepPoint, SweepResult
from ssdplan.plans.errors import UsageError
from ssdplan.plans.views.sweep_text import describe_sweep
from tests.extent import examples
from tests.plans.read_csv import cell, written_and_read

COLUMNS = {"whole": INTEGER, "number": NUMBER, "truth": TRUTH, "text": TEXT}
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "whole": st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
            "number": st.none() | st.floats(allow_nan=False),
            "truth": st.none() | st.booleans(),
            "text": TEXTS,
            "left_out": st.just("it is no column"),
        }
    ),
    max_size=8,
)


@settings(max_examples=examples(200), deadline=None)
@given(ROWS)
def test_a_table_reads_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]]) -> None:
    path = tmp_path_factory.mktemp("csv") / "table.csv"
    found = written_and_read(frame_of(COLUMNS, rows), path)
    assert len(found) == len(rows)
    for line, row in zip(found, rows, strict=True):
        assert list(line) == list(COLUMNS)
        assert line["whole"] == cell(row["whole"]) and line["truth"] == cell(row["truth"])
        assert line["text"] == row["text"]
        number = row["number"]
        assert (line["number"] == "") == (number is None)
        if isinstance(number, float):
            assert float(line["number"]).hex() == number.hex()


def test_a_file_is_written_whole_or_not_at_all_and_through_no_link(tmp_path: Path) -> None:
    table = frame_of({"a": INTEGER}, [{"a": 1}])
    write_csv(table, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_bytes() == b"a\r\n1\r\n"
    assert (tmp_path / "table.csv").stat().st_mode & 0o777 == 0o600
    (tmp_path / "other").write_text("another's")
    (tmp_path / "link.csv").symlink_to(tmp_path / "other")
    (tmp_path / "folder").mkdir()
    for name in ("link.csv", "folder"):
        with pytest.raises(UsageError, match=f"{name}: "):
            write_csv(table, tmp_path / name)
    assert (tmp_path / "link.csv").is_symlink() and (tmp_path / "other").read_text() == "another's"
    assert sorted(os.listdir(tmp_path)) == ["folder", "link.csv", "other", "table.csv"]
    assert not os.listdir(tmp_path / "folder")


def test_columns_are_the_plain_fields_of_a_document() -> None:
    assert columns_of(SweepResult) == {
        "tokens_per_second": NUMBER, "step_seconds": NUMBER, "micro_batch_size": INTEGER, "micro_batches": INTEGER,
        "delay_ratio": NUMBER, "peak_host_bytes": INTEGER, "peak_device_bytes": INTEGER, "ssd_read_bytes": INTEGER,
        "ssd_write_bytes": INTEGER, "bound_by": TEXT, "hours": NUMBER, "cost": NUMBER, "worn": NUMBER,
    }  # fmt: skip
    assert columns_of(SweepPoint) == {"value": NUMBER, "label": TEXT, "refusal": TEXT}


BYTES = st.integers(0, (1 << 60) - 1)
RESULTS = st.builds(
    SweepResult,
    **{name: st.floats(1e-9, 1e12) for name in ("tokens_per_second", "step_seconds")},
    **{name: st.integers(1, 1 << 39) for name in ("micro_batch_size", "micro_batches")},
    delay_ratio=st.floats(0, 1),
    **{
        f"{name}_bytes": st.integers(0, (1 << 60) - 1) for name in ("peak_host", "peak_device", "ssd_read", "ssd_write")
    },
    bound_by=TEXTS,
)
SWEEPS = st.builds(
    Sweep,
    schema=st.just("ssdplan.sweep/1"),
    name=TEXTS,
    title=TEXTS,
    estimated=st.booleans(),
    points=st.lists(
        st.builds(SweepPoint, value=st.floats(1e-9, 1e12), label=TEXTS, result=st.none() | RESULTS, refusal=TEXTS),
        min_size=1,
        max_size=6,
    ),
)


@settings(max_examples=examples(60), deadline=None)
@given(SWEEPS)
def test_a_sweep_has_a_row_for_each_point(tmp_path_factory: pytest.TempPathFactory, sweep: Sweep) -> None:
    lines = written_and_read(sweep_frame(sweep), tmp_path_factory.mktemp("csv") / "sweep.csv")
    for line, point in zip(lines, sweep.points, strict=True):
        result = point.result.model_dump() if point.result else dict.fromkeys(SweepResult.model_fields)
        value = int(point.value) if all(each.value % 1 == 0 for each in sweep.points) else point.value
        whole = {"swept": sweep.name, "label": point.label, "value": value, **result, "refusal": point.refusal}
        assert line == {name: cell(value) for name, value in whole.items()} and list(line) == list(whole)
    text = describe_sweep(sweep).splitlines()
    assert sum(line.count("[") for line in text) >= sum(point.result is not None for point in sweep.points)


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ((1.0, 2.0, 4.0), ["1", "2", "4"]),
        ((32.0 * (1 << 30), 64.0 * (1 << 30)), ["34359738368", "68719476736"]),
        ((0.5, 1.0), ["0.5", "1.0"]),
        ((1e12, 2.0**80), ["1000000000000.0", "1.2089258196146292e+24"]),
    ],
)
def test_values_that_are_all_whole_are_written_as_integers(
    tmp_path: Path, values: tuple[float, ...], written: list[str]
) -> None:
    points = tuple(SweepPoint(value=value, label=f"{value:g}", result=None, refusal="no") for value in values)
    sweep = Sweep(schema="ssdplan.sweep/1", name="x", title="a title", estimated=False, points=points)
    assert [line["value"] for line in written_and_read(sweep_frame(sweep), tmp_path / "sweep.csv")] == written
