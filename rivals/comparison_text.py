"""What a comparison found, as text for a person and as a table for programs.

Owns the layout. The figures are the document's (`comparison.py`). It needs pandas: import it when all is measured.
"""

from typing import Any

import pandas as pd

from ssdplan.plans.analysis.frames import NUMBER, columns_of, frame_of
from ssdplan.plans.units import format_bytes, format_seconds
from ssdplan.plans.views.quantities import count, duration, number, times
from ssdplan.plans.views.tables import facts, page, table, wrapped

from .comparison import LETTERS, ArmResult, Comparison

BUSY_CORES = 0.1
SHOWN_STEPS = 12


def arms_frame(found: Comparison) -> pd.DataFrame:
    """A row for each arm: the figures of `ArmResult`, without the losses and the rounds."""
    return frame_of(columns_of(ArmResult), (arm.model_dump(exclude={"losses", "rounds"}) for arm in found.arms))


def describe_comparison(found: Comparison) -> str:
    """For a person, in at most 100 columns."""
    machine = found.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    rows = f"{found.micro_batches} x {found.micro_batch_size} rows of {found.sequence_length} tokens a step"
    opening = (
        f"Each arm trained the same weights on the same batches, {times(found.steps, 'step')} in a process of its own, "
        f"{times(found.rounds, 'round')} in turns, the next round in the opposite order. A process's first step does "
        "not count."
    )
    if found.directions:
        opening += f" Without gradients: a step takes the losses along {times(found.directions, 'direction')}."
    return page(
        f"Comparison: {found.model}, {count(found.parameters)} parameters, {found.precision}, {found.device}, {rows}",
        wrapped(opening),
        (
            "Machine",
            facts(
                ("processor", f"{machine.processor}, {machine.cores} cores, {times(machine.threads, 'thread')} an arm"),
                *([("device", machine.device_name)] if machine.device_name else []),
                ("host memory", format_bytes(machine.host_memory_bytes)),
                ("software", f"Linux {machine.kernel}, Python {machine.python}"),
                ("", versions),
                ("volume", found.volume),
                ("load before", f"{machine.load:.2f}"),
                *_others(found),
            ),
        ),
        ("Arms", _arms(found)),
        ("Ours beside each rival: the median of the rounds' own ratios, and their quartiles", _ratios(found)),
        ("Losses, step by step", _losses(found)),
    )


def _others(found: Comparison) -> list[tuple[str, str]]:
    """How busy others kept the cores: threads that spin while they wait, as PyTorch's do, suffer most from it."""
    cores = pd.Series([one.others_cores for arm in found.arms for one in arm.rounds], dtype=NUMBER)
    if cores.empty:
        return []
    words = f"{cores.median():.2f} cores while the arms ran, {cores.max():.2f} at the most"
    busy = "; compare on a quiet machine" if cores.max() > BUSY_CORES else ""
    return [("others took", words + busy)]


def _arms(found: Comparison) -> list[str]:
    on_gpu = found.device != "cpu"
    heads = ("peak memory", *(("on device",) if on_gpu else ()), "ssd read", "written")
    cells = [("", "", "tokens/s", "step", "quartiles", *heads)]
    for letter, arm in zip(LETTERS, arms_frame(found).itertuples(), strict=False):
        if pd.isna(arm.step_seconds):
            cells.append((letter, arm.name, *"---", *"-" * len(heads)))
            continue
        cells.append(
            (
                letter,
                arm.name,
                number(arm.tokens_per_second),
                duration(arm.step_seconds),
                f"{duration(arm.step_seconds_low)} to {duration(arm.step_seconds_high)}",
                format_bytes(arm.peak_memory_bytes),
                *((format_bytes(0 if pd.isna(arm.peak_device_bytes) else arm.peak_device_bytes),) if on_gpu else ()),
                *(
                    "?" if pd.isna(nbytes) else format_bytes(nbytes)
                    for nbytes in (arm.ssd_read_bytes, arm.ssd_write_bytes)
                ),
            )
        )
    remarks = [
        f"  {line}"
        for letter, arm in zip(LETTERS, found.arms, strict=False)
        for line in wrapped(f"{letter}: {arm.about}{_remark(arm)}")
    ]
    counted = (
        f"Peak memory is the high-water mark of the process's resident memory, {found.memory_counted}, as the kernel "
        "counts it: interpreter and libraries included. Bytes are a step's; ours are the run's metrics, "
        "rivals' are what the kernel counts of the process."
    )
    if on_gpu:
        counted += " On the device, the peak of its allocator, ours with the arena."
    return [*table(cells, [], left=(0, 1)), *remarks, *(f"  {line}" for line in wrapped(counted))]


def _bytes(nbytes: Any, missing: str) -> str:
    return missing if pd.isna(nbytes) else format_bytes(nbytes)


def _remark(arm: ArmResult) -> str:
    if arm.missing:
        return f"; {'failed' if arm.failed else 'not measured'}: {arm.missing}"
    words = ""
    if arm.predicted_step_seconds:
        words += f"; the plan predicted {format_seconds(arm.predicted_step_seconds)} a step"
    if arm.rounds[0].ssd_read_bytes is not None and arm.kernel_read_bytes is not None:
        words += (
            f"; the kernel counts {format_bytes(arm.kernel_read_bytes)} read and "
            f"{format_bytes(arm.kernel_write_bytes or 0)} written"
        )
    return words


def _ratios(found: Comparison) -> list[str]:
    if not found.ratios:
        return []
    cells = [("", "", "tokens/s", "quartiles", "peak memory")]
    cells += [
        (
            ratio.ours,
            f"against {ratio.rival}",
            f"{ratio.speed:.2f} times",
            f"{ratio.speed_low:.2f} to {ratio.speed_high:.2f}",
            f"{ratio.memory:.2f} times",
        )
        for ratio in found.ratios
    ]
    return table(cells, [])


def _losses(found: Comparison) -> list[str]:
    measured = {letter: arm for letter, arm in zip(LETTERS, found.arms, strict=False) if arm.losses}
    if not measured:
        return []
    losses = pd.DataFrame({letter: arm.losses for letter, arm in measured.items()}, index=range(1, found.steps + 1))
    rows = [(str(step), *(f"{loss:.5f}" for loss in each)) for step, *each in losses.itertuples()]
    if found.steps > SHOWN_STEPS:
        rows[SHOWN_STEPS // 2 : -SHOWN_STEPS // 2] = [("...", *("" for _ in measured))]
    letter = next(letter for letter, arm in measured.items() if arm.name == found.reference)
    differences = (f"most from {letter}", *(f"{arm.loss_difference or 0:.1e}" for arm in measured.values()))
    others = [letter for letter, arm in measured.items() if arm.same_training is False]
    remark = f"{', '.join(others)}: not the same training: the first loss is not {letter}'s. Compare nothing with it."
    cells = [("step", *measured), *rows, differences]
    return [*table(cells, [], left=(0,)), *([f"  {line}" for line in wrapped(remark)] if others else [])]
