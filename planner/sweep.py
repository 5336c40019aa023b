"""Sweeps: solves for several values of one thing, and keeps of each what it decides and predicts, or why it cannot be.

Owns the values and what each of them changes: a budget, the batch, the length of rows, the number of drives, a figure
of the catalogue, or a part of the machine or the model by its name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ssdplan.plans.analysis.cost import Training, cost_of
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.documents.sweep import Sweep, SweepPoint, SweepResult, result_of
from ssdplan.plans.errors import InfeasibleError, UsageError
from ssdplan.plans.units import format_bytes

from .catalogue import nearest
from .catalogue.configs import is_path, shape_of_path
from .catalogue.networks import NETWORKS
from .catalogue.whatif import SIZES, WhatIf, estimate, parse_value
from .request import SolveRequest, beyond_available
from .solve import solve

MOST_POINTS = 32
SSDS, SEQUENCE_LENGTH = "ssds", "sequence-length"
REQUESTED = ("host-memory", "device-memory", "micro-batches", "micro-batch-size", "global-batch")
NAMED = ("model", "gpu", "ssd", "cpu", "link", "network")
"""What is swept by names; a value is what the option of that name takes."""
SWEPT = (*REQUESTED, SSDS, SEQUENCE_LENGTH, *NAMED)
FIGURE = "a figure such as gpu.flops=1e14..4e14"
FORM = (
    "write NAME=FROM..TO, which doubles, NAME=FROM..TO:STEP, or NAME=VALUE,VALUE, such as host-memory=32GiB..256GiB or "
    "gpu=rtx-3090,rtx-4090"
)
COUNTS = ("micro-batches", "micro-batch-size", "global-batch", SSDS, SEQUENCE_LENGTH)


@dataclass(frozen=True, slots=True)
class Values:
    """What is swept, and the values that it takes: numbers, or names."""

    name: str
    values: tuple[float | str, ...]

    def label(self, value: float | str) -> str:
        """A value as a person reads it."""
        if isinstance(value, str):
            return value
        return format_bytes(value) if self.name.endswith(SIZES) else f"{value:g}"


def parse_values(text: str) -> Values:
    """`host-memory=32GiB..256GiB` doubles from the first to the last; `ssds=1..4:1` adds; `sequence-length=1024,4096`
    and `gpu=rtx-3090,rtx-4090` are lists. Raises UsageError."""
    name, equals, written = text.partition("=")
    name = name.strip().lower()
    listed = [part.strip() for part in written.split(",")]
    if not equals or not all(listed):
        raise UsageError(f"--sweep {text!r}: {FORM}")
    if name not in SWEPT and "." not in name:
        raise UsageError(nearest(f"--sweep {name}: that cannot be swept; {FORM}, or of {FIGURE}", name, SWEPT))
    found: list[float | str]
    if name in NAMED:
        found = [*listed]
    elif len(listed) > 1:
        found = [_number(name, each, text) for each in listed]
    else:
        found = [*_range(name, written, text)]
    if len(found) > MOST_POINTS:
        raise UsageError(f"--sweep {text}: more than {MOST_POINTS} points")
    if twice := [each for each, value in zip(listed, found, strict=False) if found.count(value) > 1]:
        raise UsageError(f"--sweep {text}: {twice[-1]} is there twice")
    return Values(name, tuple(found))


def _number(name: str, written: str, text: str) -> float:
    number = parse_value(name, written, f"--sweep {text}")
    if name in COUNTS and number != round(number):
        raise UsageError(f"--sweep {text}: {name} are whole numbers")
    return number


def _range(name: str, written: str, text: str) -> list[float]:
    first, dots, rest = written.partition("..")
    last, colon, step = rest.partition(":")
    if not (dots and first and last and (step or not colon)):
        raise UsageError(f"--sweep {text!r}: {FORM}")
    start, stop = _number(name, first, text), parse_value(name, last, f"--sweep {text}")
    by = _number(name, step, text) if colon else None
    if stop < start:
        raise UsageError(f"--sweep {text}: from {first} to {last} there is nothing")
    found = [start]
    while len(found) <= MOST_POINTS and (following := found[-1] + by if by else 2 * found[-1]) <= stop * (1 + 1e-9):
        found.append(following)
    return found


def first_meant(source: WhatIf | Profile, values: Values) -> Profile:
    """The profile at the first value that can be meant. Raises UsageError where none can, of the first."""
    errors: list[UsageError] = []
    for value in values.values:
        try:
            return _profile_at(source, values.name, value)
        except UsageError as error:
            errors.append(error)
    raise errors[0]


def sweep(
    source: WhatIf | Profile,
    request: SolveRequest,
    values: Values,
    progress: Callable[[float, str], None],
    trainings: Sequence[Training] = (),
) -> Sweep:
    """Solve at each value; where one cannot be meant, or nothing fits, the point says why. Raises UsageError for a name
    that cannot be swept, and where no value can be meant.

    `trainings`: what is asked of each value's plan, all of as many tokens; none where nothing is.
    """
    profile = first_meant(source, values)
    points: list[SweepPoint] = []
    unmeant: list[UsageError] = []
    for number, value in enumerate(values.values):
        label, of_number = values.label(value), None if isinstance(value, str) else value
        progress(number / len(values.values), f"{values.name} {label}")
        try:
            changed = _profile_at(source, values.name, value)
            plan = solve(changed, _request_at(request, changed, values.name, value), told="step")
        except (InfeasibleError, UsageError) as error:
            if isinstance(error, UsageError):
                unmeant.append(error)
            points.append(SweepPoint(value=of_number, label=label, result=None, refusal=str(error)))
        else:
            result = _paid(plan, trainings[number]) if trainings else result_of(plan)
            points.append(SweepPoint(value=of_number, label=label, result=result))
    if len(unmeant) == len(points):
        raise unmeant[0]
    return Sweep(
        schema="ssdplan.sweep/1",
        name=values.name,
        title=_title(profile, values.name),
        estimated="estimated" in (profile.machine.figures, profile.model.figures),
        tokens=trainings[0].tokens if trainings else None,
        points=tuple(points),
    )


def _paid(plan: Plan, training: Training) -> SweepResult:
    found = cost_of(plan, training)
    return result_of(plan, hours=found.hours, cost=found.money, worn=found.worn)


def _title(profile: Profile, swept: str) -> str:
    """The model and the machine, but for what is swept of them."""
    if swept == "model":
        return profile.machine.name
    return profile.model.name if swept in ("gpu", "cpu") else f"{profile.model.name} on {profile.machine.name}"


def first_beyond_available(profile: Profile, request: SolveRequest, values: Values) -> str:
    """From which value on a sweep has more memory than the profiled machine had available; empty where none has."""
    for value in values.values:
        asked = _request_at(request, profile, values.name, value)
        if words := beyond_available(profile.machine, asked):
            return f"from {values.name} {values.label(value)} on, {words}"
    return ""


def _profile_at(source: WhatIf | Profile, name: str, value: float | str) -> Profile:
    """The profile with one thing changed. Raises UsageError."""
    if isinstance(source, Profile):
        if name not in REQUESTED:
            raise UsageError(nearest(f"--sweep {name}: with a profile that cannot be swept", name, REQUESTED))
        return source
    return estimate(_named(source, name, value) if isinstance(value, str) else _numbered(source, name, value))


def _named(source: WhatIf, name: str, value: str) -> WhatIf:
    changed: Mapping[str, Callable[[], WhatIf]] = {
        "model": lambda: replace(source, model=shape_of_path(Path(value)) if is_path(value) else value),
        "gpu": lambda: replace(source, gpu=value),
        "ssd": lambda: replace(source, ssds=[value]),
        "cpu": lambda: replace(source, cpu=value),
        "link": lambda: replace(source, link=value),
        "network": lambda: replace(source, networks=_networks(source.networks, value)),
    }
    return changed[name]()


def _networks(named: Sequence[str], value: str) -> list[str]:
    """`value` in the place of what is between the same things."""
    between = {network.name: network.between for network in NETWORKS}
    own = between.get(value.lower())
    return [*(name for name in named if own is None or between.get(name.lower()) != own), value]


def _numbered(source: WhatIf, name: str, value: float) -> WhatIf:
    whole = round(value)
    if name == "host-memory":
        return replace(source, host_memory_bytes=whole)
    if name == "micro-batch-size":
        return replace(source, micro_batch_sizes=(whole,))
    if name == SEQUENCE_LENGTH:
        return replace(source, sequence_length=whole)
    if name == SSDS:
        return replace(source, ssds=[f"{ssd.partition('*')[0]}*{whole}" for ssd in source.ssds])
    return source if name in REQUESTED else replace(source, figures={**source.figures, name: value})


def _request_at(request: SolveRequest, profile: Profile, name: str, value: float | str) -> SolveRequest:
    """What is asked of the `profile` at a value."""
    if isinstance(value, str):  # of a machine without a GPU another memory is meant
        unified = profile.machine.compute_shares_cpu and request.device_memory_bytes is None
        return replace(request, unified_memory=unified)
    whole = round(value)
    changed: Mapping[str, Callable[[], SolveRequest]] = {
        "host-memory": lambda: replace(request, host_memory_bytes=whole),
        "device-memory": lambda: replace(request, device_memory_bytes=whole, unified_memory=False),
        "micro-batches": lambda: replace(request, micro_batches=whole),
        "micro-batch-size": lambda: replace(request, micro_batch_size=whole),
        "global-batch": lambda: replace(request, global_batch=whole),
    }
    return changed[name]() if name in changed else request
