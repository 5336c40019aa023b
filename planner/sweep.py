"""Sweeps: solves for several values of one thing, and keeps of each what it decides and predicts, or why it cannot be.

Owns the values and what each of them changes: a budget, the batch, the number of drives, or a figure of the catalogue.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.documents.sweep import Sweep, SweepPoint, result_of
from ssdplan.plans.errors import InfeasibleError, UsageError
from ssdplan.plans.units import format_bytes

from .catalogue import nearest
from .catalogue.whatif import SIZES, WhatIf, estimate, parse_value
from .request import SolveRequest, beyond_available
from .solve import solve

MOST_POINTS = 32
SSDS = "ssds"
REQUESTED = ("host-memory", "device-memory", "micro-batches", "micro-batch-size", "global-batch")
FIGURE = "a figure such as gpu.flops=1e14..4e14"
FORM = "write NAME=FROM..TO, which doubles, or NAME=FROM..TO:STEP, such as host-memory=32GiB..256GiB"
COUNTS = ("micro-batches", "micro-batch-size", "global-batch", SSDS)


@dataclass(frozen=True, slots=True)
class Range:
    """What is swept, and the values that it takes."""

    name: str
    values: tuple[float, ...]

    def label(self, value: float) -> str:
        """A value as a person reads it."""
        return format_bytes(value) if self.name.endswith(SIZES) else f"{value:g}"


def parse_range(text: str) -> Range:
    """`host-memory=32GiB..256GiB` doubles from the first to the last; `ssds=1..4:1` adds. Raises UsageError."""
    name, equals, values = text.partition("=")
    name = name.strip().lower()
    first, dots, rest = values.partition("..")
    last, colon, step = rest.partition(":")
    if not (equals and dots and first and last and (step or not colon)):
        raise UsageError(f"--sweep {text!r}: {FORM}")
    if name not in (*REQUESTED, SSDS) and "." not in name:
        raise UsageError(
            nearest(f"--sweep {name}: that cannot be swept; {FORM}, or of {FIGURE}", name, [*REQUESTED, SSDS])
        )
    start, stop = (parse_value(name, end, f"--sweep {text}") for end in (first, last))
    by = parse_value(name, step, f"--sweep {text}") if colon else None
    if name in COUNTS and any(number is not None and number != round(number) for number in (start, by)):
        raise UsageError(f"--sweep {text}: {name} are whole numbers")
    if stop < start:
        raise UsageError(f"--sweep {text}: from {first} to {last} there is nothing")
    found = [start]
    while (following := found[-1] + by if by else 2 * found[-1]) <= stop * (1 + 1e-9):
        found.append(following)
        if len(found) > MOST_POINTS:
            raise UsageError(f"--sweep {text}: more than {MOST_POINTS} points")
    return Range(name, tuple(found))


def sweep(
    source: WhatIf | Profile, request: SolveRequest, values: Range, progress: Callable[[float, str], None]
) -> Sweep:
    """Solve at each value; where one cannot be meant, or nothing fits, the point says why. Raises UsageError for a name
    that cannot be swept, and where no value can be meant."""
    profile = source if isinstance(source, Profile) else estimate(source)
    points: list[SweepPoint] = []
    unmeant: list[UsageError] = []
    for number, value in enumerate(values.values):
        progress(number / len(values.values), f"{values.name} {values.label(value)}")
        changed, asked = _at(source, request, values.name, value)
        try:
            plan = solve(changed if isinstance(changed, Profile) else estimate(changed), asked, compared=False)
        except (InfeasibleError, UsageError) as error:
            if isinstance(error, UsageError):
                unmeant.append(error)
            points.append(SweepPoint(value=value, label=values.label(value), result=None, refusal=str(error)))
        else:
            points.append(SweepPoint(value=value, label=values.label(value), result=result_of(plan)))
    if len(unmeant) == len(points):
        raise unmeant[0]
    return Sweep(
        schema="ssdplan.sweep/1",
        name=values.name,
        title=f"{profile.model.name} on {profile.machine.name}",
        estimated="estimated" in (profile.machine.figures, profile.model.figures),
        points=tuple(points),
    )


def first_beyond_available(profile: Profile, request: SolveRequest, values: Range) -> str:
    """From which value on a sweep has more memory than the profiled machine had available; empty where none has."""
    for value in values.values:
        _, asked = _at(profile, request, values.name, value)
        if words := beyond_available(profile.machine, asked):
            return f"from {values.name} {values.label(value)} on, {words}"
    return ""


def _at(
    source: WhatIf | Profile, request: SolveRequest, name: str, value: float
) -> tuple[WhatIf | Profile, SolveRequest]:
    """Source and request with one thing changed."""
    whole = round(value)
    requests: Mapping[str, Callable[[], SolveRequest]] = {
        "host-memory": lambda: replace(request, host_memory_bytes=whole),
        "device-memory": lambda: replace(request, device_memory_bytes=whole, unified_memory=False),
        "micro-batches": lambda: replace(request, micro_batches=whole),
        "micro-batch-size": lambda: replace(request, micro_batch_size=whole),
        "global-batch": lambda: replace(request, global_batch=whole),
    }
    if isinstance(source, Profile):
        if name not in requests:
            raise UsageError(nearest(f"--sweep {name}: with a profile that cannot be swept", name, requests))
        return source, requests[name]()
    if name == "host-memory":
        return replace(source, host_memory_bytes=whole), requests[name]()
    if name == "micro-batch-size":
        return replace(source, micro_batch_sizes=(whole,)), requests[name]()
    if name in requests:
        return source, requests[name]()
    if name == SSDS:
        return replace(source, ssds=[f"{ssd.partition('*')[0]}*{whole}" for ssd in source.ssds]), request
    return replace(source, figures={**source.figures, name: value}), request
