"""What a comparison found, as a document with the fields of docs/benchmarks.md.

Owns the figures that are made of what was measured; `comparison_text.py` has them as text and as a table. It runs
nothing.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field

from ssdplan.plans.documents.base import Bytes, Count, Document, Part, Positive, Seconds

AGREEMENT = 2e-3
"""The most by which losses of the first step may differ. bf16 rounds otherwise in another order of additions, which
moved them by up to 3e-4; other batches move them by more than ten times this."""
MEMORY_COUNTED = "VmHWM"
LETTERS = "ABCDEFGH"
"""Of the arms, in tables and pictures."""


class Round(Part):
    """One process of an arm, from its start to its end."""

    round: Count
    process_seconds: Positive
    """From its start to its end, loading and all."""
    peak_memory_bytes: Bytes
    peak_device_bytes: Bytes | None = None
    """Of a GPU's memory, as the process says: its allocator's peak, ours with the arena; None on the CPU."""
    others_cores: Seconds
    """Cores that anything else on the machine kept busy meanwhile."""
    step_seconds: tuple[Positive, ...]
    """Of all its steps; the first does not count."""
    losses: tuple[float, ...]
    kernel_read_bytes: Bytes | None
    """A step, as the kernel counts; None where it does not tell."""
    kernel_write_bytes: Bytes | None
    ssd_read_bytes: Bytes | None
    """A step, as the run's own metrics say; None for rivals."""
    ssd_write_bytes: Bytes | None

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.step_seconds[1:])


class ArmResult(Part):
    """What one arm did; all figures None when it was not measured, and `missing` says why."""

    name: str
    about: str
    tokens_per_second: Positive | None = None
    step_seconds: Positive | None = None
    """The median of all counted steps of all rounds."""
    step_seconds_low: Positive | None = None
    step_seconds_high: Positive | None = None
    predicted_step_seconds: Positive | None = None
    peak_memory_bytes: Bytes | None = None
    """The most of all rounds."""
    peak_device_bytes: Bytes | None = None
    """The same of a GPU's memory; None on the CPU."""
    ssd_read_bytes: Bytes | None = None
    """A step: ours by the run's metrics, rivals' by the kernel."""
    ssd_write_bytes: Bytes | None = None
    kernel_read_bytes: Bytes | None = None
    kernel_write_bytes: Bytes | None = None
    losses: tuple[float, ...] = ()
    """Of the first round, one a step."""
    loss_difference: float | None = None
    """The largest from the reference, over all steps."""
    same_training: bool | None = None
    """Whether the first step's loss is the reference's, but for rounding."""
    missing: str = ""
    failed: bool = False
    """It was run, and ended with an error."""
    rounds: tuple[Round, ...] = ()


class Ratio(Part):
    """One of our arms beside one rival, round by round."""

    ours: str
    rival: str
    speed: Positive
    """How many times as many tokens a second ours trains: the median of the rounds' own ratios."""
    speed_low: Positive
    speed_high: Positive
    memory: Positive
    """Our peak memory as a fraction of the rival's."""


class Surroundings(Part):
    """What a figure must not be quoted without."""

    processor: str
    cores: Count
    threads: Count
    """Of every arm."""
    device_name: str = ""
    """The GPU, as the profile calls it; empty where there is none, or none of our arms was planned."""
    host_memory_bytes: Bytes
    kernel: str
    python: str
    versions: dict[str, str]
    load: float
    """Processes that ran or waited to, over the minute before."""


class Comparison(Document):
    """A whole run of `ssdplan compare`."""

    schema_: Literal["ssdplan.compare/1"] = Field("ssdplan.compare/1", alias="schema")
    created: str
    model: str
    parameters: Count
    sequence_length: Count
    micro_batch_size: Count
    micro_batches: Count
    precision: str = "bf16"
    device: str = "cpu"
    directions: int = 0
    """Of a step without gradients (mezo); 0: steps are by gradients (adamw)."""
    steps: Count
    rounds: Count
    volume: str
    machine: Surroundings
    memory_counted: str
    reference: str
    """The arm that losses are held against; empty when none was measured."""
    arms: tuple[ArmResult, ...]
    ratios: tuple[Ratio, ...]

    @property
    def failed(self) -> bool:
        """Whether an arm ended with an error, or trained something else."""
        return any(arm.failed or arm.same_training is False for arm in self.arms)


def arm_result(
    name: str,
    about: str,
    rounds: Sequence[Round],
    *,
    tokens: int,
    predicted_step_seconds: float | None = None,
    missing: str = "",
    failed: bool = False,
) -> ArmResult:
    """The figures of an arm, `tokens` a step. An arm that failed in any round has rounds, and no figures."""
    if missing or not rounds:
        return ArmResult(name=name, about=about, missing=missing, failed=failed, rounds=tuple(rounds))
    seconds = [each for one in rounds for each in one.step_seconds[1:]]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    kernel_read = _median(one.kernel_read_bytes for one in rounds)
    kernel_write = _median(one.kernel_write_bytes for one in rounds)
    own_read = _median(one.ssd_read_bytes for one in rounds)
    own_write = _median(one.ssd_write_bytes for one in rounds)
    median = statistics.median(seconds)
    return ArmResult(
        name=name,
        about=about,
        tokens_per_second=tokens / median,
        step_seconds=median,
        step_seconds_low=low,
        step_seconds_high=high,
        predicted_step_seconds=predicted_step_seconds,
        peak_memory_bytes=max(one.peak_memory_bytes for one in rounds),
        peak_device_bytes=max(one.peak_device_bytes or 0 for one in rounds) or None,
        ssd_read_bytes=kernel_read if own_read is None else own_read,
        ssd_write_bytes=kernel_write if own_write is None else own_write,
        kernel_read_bytes=kernel_read,
        kernel_write_bytes=kernel_write,
        losses=rounds[0].losses,
        rounds=tuple(rounds),
    )


def _median(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known)) if known else None


def held_together(arms: Sequence[ArmResult]) -> tuple[str, tuple[ArmResult, ...]]:
    """The arm that the others' losses are held against (the first that was measured), and all arms with the result."""
    reference = next((arm for arm in arms if arm.losses), None)
    if reference is None:
        return "", tuple(arms)
    held = []
    for arm in arms:
        if arm.losses:
            difference = max(
                abs(a - b) for one in arm.rounds for a, b in zip(one.losses, reference.losses, strict=True)
            )
            first = max(abs(one.losses[0] - reference.losses[0]) for one in arm.rounds)
            same = first <= AGREEMENT
            arm = arm.model_copy(update={"loss_difference": difference, "same_training": same})
        held.append(arm)
    return reference.name, tuple(held)


def ratios(arms: Sequence[ArmResult], ours: set[str]) -> tuple[Ratio, ...]:
    """Each of our arms beside each rival; both measured."""
    measured = [arm for arm in arms if arm.step_seconds]
    found = []
    for mine in (arm for arm in measured if arm.name in ours):
        for rival in (arm for arm in measured if arm.name not in ours):
            each = [b.median_seconds / a.median_seconds for a, b in zip(mine.rounds, rival.rounds, strict=True)]
            low, _, high = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
            assert mine.peak_memory_bytes and rival.peak_memory_bytes
            found.append(
                Ratio(
                    ours=mine.name,
                    rival=rival.name,
                    speed=statistics.median(each),
                    speed_low=low,
                    speed_high=high,
                    memory=mine.peak_memory_bytes / rival.peak_memory_bytes,
                )
            )
    return tuple(found)
