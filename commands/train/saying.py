"""What `ssdplan train` says before it trains: what it chose, and what that will take. Owns the words."""

from collections.abc import Mapping

from ssdplan.plans.analysis.wear import lifetime, share_of_rating, wear
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.units import format_bytes, format_enough
from ssdplan.plans.views.quantities import count, decimal, duration, number, percent

from .choosing import Data


def of_data(data: Data, path: object) -> str:
    words = (
        f"{path}: {data.samples:,} sample(s) of `{data.format}`, {data.rows:,} row(s) of {data.sequence_length} tokens"
    )
    return words + (f"; {data.cut:,} longer sample(s) are cut (--sequence-length)" if data.cut else "")


def of_choice(chosen: Mapping[str, str]) -> str:
    """What nobody gave, as one would write it."""
    words = ", ".join(f"{flag} {value}".rstrip() for flag, value in chosen.items())
    return f"chosen: {words}" if words else "everything is as given"


def of_plan(plan: Plan, *, steps: int, store_bytes: int, snapshot_bytes: int | None, exact: bool) -> list[str]:
    """What the plan takes. `steps`: of the run, `exact` where no epochs had to be guessed; `store_bytes`: on the drive,
    with snapshots if there are any; `snapshot_bytes`: that each of these writes."""
    p, d = plan.prediction, plan.decision
    about = "" if exact else "about "
    lines = [
        f"{plan.model.name}, {count(plan.model.parameters)} parameters: {d.rows} row(s) a step in "
        f"{d.micro_batches} micro-batch(es) of {d.micro_batch_size}{_on_each(d.ranks)}, {d.precision}, "
        f"{d.optimizer}{_formats(plan)}",
        f"a step takes {duration(p.step_seconds)}, {number(p.tokens_per_second)} tokens/s; {about}{steps:,} step(s) "
        f"take {about or 'about '}{duration(steps * p.step_seconds)}; bound by: {p.bound_by}",
        _memory(plan) + (f"; the store takes {format_bytes(store_bytes)} of the drive" if store_bytes else ""),
    ]
    if d.ranks > 1:
        lines.append(f"memory, the store and what is written are of each of the {d.ranks} ranks")
    if p.ssd_write_bytes:
        lines.append(_writing(plan, steps, snapshot_bytes))
    else:
        lines.append(
            "you do not need ssdplan here: all training state fits in memory, and nothing is read from or written to "
            "the drive in a step"
            + (f" (but {format_bytes(snapshot_bytes)} a snapshot)" if snapshot_bytes else "")
            + "; plain PyTorch or TRL trains it as well"
        )
    return lines


def _formats(plan: Plan) -> str:
    """What of the optimizer states is kept in another format than fp32."""
    d = plan.decision
    masters = f", masters {d.masters}" if d.masters != "fp32" else ""
    return masters + (f", moments in {d.optimizer_states}" if d.optimizer_states != "fp32" else "")


def _on_each(ranks: int) -> str:
    return f" on each of {ranks} ranks" if ranks > 1 else ""


def _memory(plan: Plan) -> str:
    p, d = plan.prediction, plan.decision
    words = f"host memory for training {format_enough(p.peak_host_bytes)} of {format_bytes(d.host_budget_bytes)}"
    if not d.unified_memory:
        words += f", device memory {format_enough(p.peak_device_bytes)} of {format_bytes(d.device_budget_bytes)}"
    if p.peak_process_bytes is not None:
        words += f"; the whole process {format_enough(p.peak_process_bytes)}"
    return words


def _writing(plan: Plan, steps: int, snapshot_bytes: int | None) -> str:
    p = plan.prediction
    worn = wear(plan.machine, p.ssd_write_bytes, p.step_seconds)
    share = share_of_rating(plan.machine, p.ssd_write_bytes * steps)
    snapshots = f" and {format_bytes(snapshot_bytes)} a snapshot" if snapshot_bytes else ""
    words = (
        f"writes {format_bytes(p.ssd_write_bytes)} a step to the drive{snapshots}, "
        f"{decimal(p.ssd_write_bytes * steps)} in all steps, {decimal(worn.bytes_a_day)} a day"
    )
    if share is None or worn.days is None:
        return f"{words} (--endurance SIZE, the drive's rating, says how much of it that is)"
    return f"{words}: {percent(share)} of its rating, which lasts {lifetime(worn.days)} of such writing"
