"""Checks before a run begins: plan, model and device belong together; memory and disk space suffice.

Owns these refusals. It changes nothing but the process's own heap.
"""

import gc
import shutil
from collections.abc import Sequence
from pathlib import Path

from ssdplan.native import process
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import DiskFullError, MemoryBudgetError, MismatchError
from ssdplan.plans.graph.ops import Schedule
from ssdplan.plans.graph.verify import verify
from ssdplan.plans.room import file_size_limit
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import format_bytes

from .device.interface import Device
from .device.tensors import DTYPES
from .model.directory.export import MAX_SHARD_BYTES
from .model.model import StreamedModel
from .ranks.group import ALONE, Ranks
from .recipe import Recipe, Watch
from .snapshots.run_directory import on_planned_drives


def check(plan: Plan, model: StreamedModel, device: Device, ranks: Ranks = ALONE) -> Schedule:
    """Refuse a plan that is for another model, device, number of ranks or version of ours; else this rank's schedule.

    Raises MismatchError, and MemoryBudgetError when the machine has not the memory that the plan's budgets promise.
    """
    schedule = schedule_of(plan, model, device, ranks)
    free = device.memory_bytes() + device.reserve_bytes // 2  # others may have drawn on their half since the profile
    if plan.prediction.peak_device_bytes > free:
        raise MemoryBudgetError(
            f"the plan needs {plan.prediction.peak_device_bytes} bytes of device memory, {free} are free; solve again "
            "with a smaller --device-memory"
        )
    return schedule


def schedule_of(plan: Plan, model: StreamedModel, device: Device, ranks: Ranks = ALONE) -> Schedule:
    """What `check` refuses and returns, whatever memory is free at the moment."""
    if plan.decision.ranks != ranks.size:
        raise MismatchError(
            f"the plan is for {plan.decision.ranks} rank(s), and {ranks.size} run here; start as many, or solve again "
            f"with --ranks {ranks.size}"
        )
    if plan.model.fingerprint != model.fingerprint:
        raise MismatchError(
            f"the plan is for {plan.model.name} ({plan.model.architecture}), {model.path} is another model "
            f"({model.architecture}); profile and solve for it"
        )
    ours = [(state.name, state.elements, state.frozen, state.matrices) for state in model.states]
    theirs = [(state.name, state.elements, state.frozen, state.matrices) for state in plan.model.states]
    layers = [(layer.name, tuple(layer.states)) for layer in model.layers]
    if ours != theirs or layers != [(layer.name, tuple(layer.states)) for layer in plan.model.layers]:
        raise MismatchError("the plan's layers and states are not this model's; solve again from a new profile")
    if plan.machine.device != device.kind:
        raise MismatchError(f"the plan is for --device {plan.machine.device}, this run has {device.kind}; solve again")
    schedule = build_schedule(plan.model, plan.decision, ranks.rank)
    arenas = (schedule.arenas["host"], schedule.arenas["device"], schedule.arenas["ssd"])
    predicted = plan.prediction
    told = (predicted.host_arena_bytes, predicted.device_arena_bytes, predicted.ssd_bytes)
    exactly = ranks.size == 1  # of several ranks a plan tells the most that any of them needs
    if arenas != told if exactly else any(mine > most for mine, most in zip(arenas, told, strict=True)):
        raise MismatchError(
            f"the plan predicts arenas of {predicted.host_arena_bytes}, {predicted.device_arena_bytes} and "
            f"{predicted.ssd_bytes} bytes (host, device, ssd), its decision needs "
            f"{arenas[0]}, {arenas[1]} and {arenas[2]}; it was edited or made by another version: solve again"
        )
    for what, needed, budget in (
        ("host", predicted.peak_host_bytes, plan.decision.host_budget_bytes),
        ("device", predicted.peak_device_bytes, plan.decision.device_budget_bytes),
    ):
        if needed > budget:
            raise MemoryBudgetError(
                f"the plan needs {needed} bytes of {what} memory, its budget is {budget}; solve again"
            )
    verify(schedule)
    return schedule


def require_memory(plan: Plan, device: Device) -> None:
    """MemoryBudgetError when this process cannot have the memory that the plan predicts beyond what it has now."""
    predicted = plan.prediction
    needed = predicted.host_arena_bytes + (predicted.peak_device_bytes if device.kind == "cpu" else 0)
    if predicted.peak_process_bytes is not None:
        needed = max(needed, predicted.peak_process_bytes - process.resident_bytes())
    obtainable = process.obtainable_bytes()
    if needed > obtainable:
        bound, way_out = _what_bounds()
        raise MemoryBudgetError(
            f"the plan needs {format_bytes(needed)} beyond what the process has, and {bound} "
            f"{format_bytes(obtainable)}: {format_bytes(needed - obtainable)} are missing; {way_out}, or solve again "
            "with a smaller --host-memory"
        )


def _what_bounds() -> tuple[str, str]:
    """What bounds the memory that this process can have, of all that may be set, and how to have more."""
    memory = process.host_memory()
    binding = sorted(option for option, left in process.own_limits().items() if left < memory.available)
    if binding:
        leave = "leave" if len(binding) > 1 else "leaves"
        return (
            f"ulimit {' and '.join(binding)} {leave}",
            f"raise it ({'; '.join(f'ulimit {o} unlimited' for o in binding)})",
        )
    if memory.total < process.hardware_bytes():
        return "its control group leaves", "raise the group's limit"
    return "this machine leaves", "free some"


def look_ahead(
    plan: Plan,
    model: StreamedModel,
    run: Path,
    volumes: Sequence[Path],
    store_bytes: int,
    recipe: Recipe,
    watch: Watch,
) -> None:
    """What would only come to light at the end of the run: no space for the model, another drive than the plan's."""
    states = zip(model.states, model.dtypes, strict=True)
    sizes = [dtype.itemsize * tensor.elements for state, dtype in states for tensor in state.tensors]
    needed = sum(sizes)
    limit, file_bytes = file_size_limit(), max(min(needed, MAX_SHARD_BYTES), *sizes)
    if limit is not None and limit < file_bytes:
        raise DiskFullError(
            f"{run}: the model needs files of {format_bytes(file_bytes)}, and a file's size is limited to "
            f"{format_bytes(limit)} (ulimit -f); raise that limit"
        )
    if not volumes:
        needed += store_bytes
    if recipe.snapshots and not recipe.durable_store:  # weights, and those before them until they are durable
        needed += 2 * sum(
            DTYPES[plan.decision.parameters_of(state).name].itemsize * state.elements for state in model.states
        )
    usage = shutil.disk_usage(run)
    if usage.total and usage.free < needed:
        raise DiskFullError(
            f"{run}: the run needs {format_bytes(needed)} here, {format_bytes(usage.free)} are free; free some space, "
            "choose another --out, or put the store elsewhere with --volume"
        )
    if store_bytes and not on_planned_drives(plan, volumes or [run]):
        names = " ".join(f"--volume {volume.path}" for volume in plan.machine.volumes)
        watch.note(f"the store is not on the drive that was measured, so times may differ; the plan is for {names}")


def compact() -> None:
    """Give back what tokenising or loading left; a tokenizer has cycles of references."""
    gc.collect()
    process.give_back()
