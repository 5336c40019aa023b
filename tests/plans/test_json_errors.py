"""Python's reason why a text is no JSON, and ours where that one names a setting of Python."""

import json
from pathlib import Path

import pytest

from ssdplan.executor.data.reading.documents import _fields
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import UsageError
from ssdplan.plans.json_errors import json_reason
from ssdplan.plans.views.report_text import _read

LONG = b'{"a": ' + b"7" * 6000 + b"}"


def test_a_long_number_is_said_without_pythons_settings(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_bytes(LONG)
    for read in (
        lambda: Plan.parse(LONG, Path("plan.json")),
        lambda: _read(tmp_path / "report.json"),
        lambda: _fields("a.jsonl, row 1", LONG),
    ):
        with pytest.raises(UsageError, match="a number in it has more than 4,300 digits") as error:
            read()
        assert "sys." not in str(error.value)


def test_other_reasons_are_pythons() -> None:
    with pytest.raises(ValueError, match="Expecting") as error:
        json.loads("{")
    assert json_reason(error.value) == str(error.value)
