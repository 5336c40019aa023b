"""A drive's health, as its own records (SMART) tell it.

Owns the reading of what smartctl and nvme print as JSON, and the asking of them within a bound on time. What they print
comes from the drive's firmware, and is hostile until checked: a figure that cannot be is not there.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
SECONDS = 10.0
"""How long a tool may take to ask a drive."""
NVME_UNIT_BYTES = 512_000
"""What one of an NVMe drive's data units is: a thousand blocks of 512 bytes (NVMe base specification, SMART log)."""
KELVIN = 273
SPARE, TEMPERATURE, RELIABILITY, READ_ONLY = 1, 2, 4, 8
"""Bits of an NVMe drive's critical warning."""


@dataclass(frozen=True, slots=True)
class Health:
    """What a drive tells of itself; None: it does not."""

    passed: bool | None = None
    """Its own judgement."""
    critical_warning: int | None = None
    """NVMe: bits, of which those above are named."""
    used_percent: int | None = None
    """How much of its rated life is used up; may exceed 100."""
    spare_percent: int | None = None
    spare_threshold_percent: int | None = None
    written_bytes: int | None = None
    media_errors: int | None = None
    celsius: int | None = None

    @property
    def rated_bytes(self) -> int | None:
        """About what it is rated to have written, where what is written and used up tell it."""
        if self.written_bytes is None or not self.used_percent or not 3 <= self.used_percent <= 100:
            return None  # the drive rounds to whole percents
        return self.written_bytes * 100 // self.used_percent


def ask(device: Path) -> Health | str:
    """The health of the drive at `device`, by the first tool that knows it; or in a few words why it is not known."""
    why = "neither smartctl nor nvme is installed"
    for name, arguments, read in (
        ("smartctl", ("--json", "--all"), from_smartctl),
        ("nvme", ("smart-log", "--output-format=json"), from_nvme),
    ):
        tool = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
        if tool is None or (name == "nvme" and not device.name.startswith("nvme")):
            continue
        try:
            done = subprocess.run(
                [tool, *arguments, str(device)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            why = f"{name} had no answer within {SECONDS:.0f} s"
            continue
        except OSError as error:
            why = f"{name} does not start: {error.strerror}"
            continue
        health = read(done.stdout)  # smartctl ends with bits of what it found, not with whether it worked
        if health is not None:
            return health
        refused = b"ermission denied" in done.stdout + done.stderr
        why = f"{name} may not read it as this user" if refused else f"the drive tells {name} nothing of its health"
    return why


def from_smartctl(text: bytes) -> Health | None:
    """What `smartctl --json --all` printed; None where it says nothing of health."""
    raw = _parsed(text)
    log = _inside(raw, "nvme_smart_health_information_log")
    passed = _inside(raw, "smart_status").get("passed")
    return _something(
        Health(
            passed=passed if isinstance(passed, bool) else None,
            critical_warning=_whole(log.get("critical_warning"), 255),
            used_percent=_first(
                _whole(log.get("percentage_used"), 255),
                _whole(_inside(raw, "endurance_used").get("current_percent"), 255),
            ),
            spare_percent=_whole(log.get("available_spare"), 100),
            spare_threshold_percent=_whole(log.get("available_spare_threshold"), 100),
            written_bytes=_units(log.get("data_units_written")),
            media_errors=_whole(log.get("media_errors"), 1 << 128),
            celsius=_first(
                _whole(log.get("temperature"), 200), _whole(_inside(raw, "temperature").get("current"), 200)
            ),
        )
    )


def from_nvme(text: bytes) -> Health | None:
    """What `nvme smart-log --output-format=json` printed; None where it says nothing of health."""
    log = _parsed(text)
    warning = log.get("critical_warning")
    kelvin = _whole(log.get("temperature"), 500)
    return _something(
        Health(
            critical_warning=_whole(warning.get("value") if isinstance(warning, dict) else warning, 255),
            used_percent=_first(_whole(log.get("percent_used"), 255), _whole(log.get("percentage_used"), 255)),
            spare_percent=_whole(log.get("avail_spare"), 100),
            spare_threshold_percent=_whole(log.get("spare_thresh"), 100),
            written_bytes=_units(log.get("data_units_written")),
            media_errors=_whole(log.get("media_errors"), 1 << 128),
            celsius=kelvin - KELVIN if kelvin and kelvin > KELVIN else None,
        )
    )


def _something(health: Health) -> Health | None:
    return None if health == Health() else health


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(text) if len(text) <= MOST_BYTES else None
    except (ValueError, RecursionError):
        raw = None
    return raw if isinstance(raw, dict) else {}


def _inside(raw: dict[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def _whole(value: object, most: int) -> int | None:
    """A whole number from 0 to `most`; the tools write those beyond 64 bits as text."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 60:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None


def _units(value: object) -> int | None:
    units = _whole(value, 1 << 128)
    return None if units is None else units * NVME_UNIT_BYTES


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
