"""Findings: what the doctor found, whether training can run, and how that reads.

Owns no judgement: those are in `doctor.py` and `storage.py`.
"""

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Literal

from .facts import Facts

Status = Literal["ok", "warn", "bad"]
TEXT_COLUMNS, WHAT_COLUMNS = 100, 16


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    status: Status
    found: str
    means: str = ""
    """Of what is not ok: what it costs."""
    mend: str = ""
    """A command or a setting that mends it; empty where none does."""
    exit_code: int = 0
    """Of what is bad: what a run would end with."""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings."""

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 where ssdplan can run, else the code that a run would end with, of the first thing in its way."""
        return next((finding.exit_code for finding in self.findings if finding.status == "bad"), 0)

    def json(self) -> str:
        document = {
            "can_run": self.exit_code == 0,
            "findings": [asdict(finding) for finding in self.findings],
            "facts": {**asdict(self.facts), "obtainable_bytes": self.facts.obtainable_bytes},
        }
        return json.dumps(document, indent=1) + "\n"


def describe(report: Report) -> str:
    """For people: a block a finding, and what they come to."""
    lines: list[str] = []
    for finding in report.findings:
        head = f"{finding.status:<6}{finding.what:<{WHAT_COLUMNS}}"
        lines += textwrap.wrap(
            finding.found, TEXT_COLUMNS, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
        )
        if finding.means:
            indent = " " * len(head)
            lines += textwrap.wrap(
                finding.means, TEXT_COLUMNS, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )
        if finding.mend:
            lines.append(f"{' ' * len(head)}-> {finding.mend}")  # never wrapped: to be copied
    counts = {status: sum(finding.status == status for finding in report.findings) for status in ("warn", "bad")}
    better = f"{counts['warn']} could be better" if counts["warn"] else ""
    if counts["bad"]:
        lines += ["", f"ssdplan cannot run here: {counts['bad']} in its way" + (f", {better}" if better else "")]
    else:
        lines += ["", "ssdplan can run here" + (f"; {better}" if better else "")]
    return "\n".join(lines)
