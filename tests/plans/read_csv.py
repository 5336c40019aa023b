"""What a table is for other programs: the CSV file that was written, read by Python's own reader."""

import csv
from pathlib import Path
from typing import Any

from ssdplan.plans.analysis.csv_file import write_csv


def read_csv(path: Path) -> list[dict[str, str]]:
    """A dictionary for each row; names must differ, and each row have a cell for each."""
    with path.open(newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file, strict=True)
    assert len(set(names)) == len(names) and {len(row) for row in rows} <= {len(names)}
    return [dict(zip(names, row, strict=True)) for row in rows]


def written_and_read(table: Any, path: Path) -> list[dict[str, str]]:
    write_csv(table, path)
    return read_csv(path)


def cell(value: object) -> str:
    """A value of a document as a cell: nothing where it is missing, and digits that read back as the same float."""
    return "" if value is None else str(value)
