"""A plan that needs more memory than there is: the refusal names what is set, and nothing else."""

import re

import pytest

from ssdplan.executor.checks import require_memory
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.native import process
from ssdplan.native.process import Memory
from ssdplan.planner.request import SolveRequest
from ssdplan.plans.errors import MemoryBudgetError
from tests.made.profiles import made_profile, planned

GIB = 1 << 30


@pytest.mark.parametrize(
    ("group", "limits", "says"),
    [
        (64 * GIB, {}, "this machine leaves 1 MiB: .* are missing; free some, or solve"),
        (64 * GIB, {"-d": 2 << 40, "-v": 2 << 40}, "this machine leaves 1 MiB"),
        (8 * GIB, {}, "its control group leaves 1 MiB: .* are missing; raise the group's limit, or solve"),
        (64 * GIB, {"-d": 1 << 19}, "ulimit -d leaves 512 KiB: .* raise it .ulimit -d unlimited., or solve"),
        (8 * GIB, {"-d": 1 << 19, "-v": 1 << 18}, "ulimit -d and -v leave 256 KiB"),
    ],
)
def test_what_is_missing_is_blamed_on_what_is_set(group, limits, says, monkeypatch):
    plan = planned(made_profile(blocks=2), SolveRequest(host_memory_bytes=GIB, global_batch=2))
    monkeypatch.setattr(process, "host_memory", lambda: Memory(group, 1 << 20))
    monkeypatch.setattr(process, "hardware_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(process, "own_limits", lambda: limits)
    with pytest.raises(MemoryBudgetError, match=says) as caught:
        require_memory(plan, EmulatedDevice())
    named = set(re.findall("ulimit|control group|this machine", str(caught.value)))
    assert len(named) == 1
