"""Quantities in words: seconds, rates, shares, bytes; and the names of resources.

Owns how a figure looks. It knows no document but what says whether a figure was measured.
"""

from ..analysis.memory_usage import device_alone_bytes
from ..documents.plan import Plan
from ..documents.profile import Machine, Model
from ..schedule.shards import Shards
from ..units import format_bytes, format_seconds

BAR_COLUMNS = 30


def estimated(machine: Machine, model: Model) -> list[str]:
    """A warning when a machine or a model was not there to be measured, or is emulated; nothing for a measured one."""
    if machine.emulation:
        e, part = machine.emulation, machine.emulation.smaller**2
        return [
            f"Emulated: a stand-in for {e.like} on {e.gpu}: a {part:,}th of its bytes, {e.slower:g} times its seconds."
        ]
    if "estimated" not in (machine.figures, model.figures):
        return []
    return ["Estimated from data sheets and the model's shape: a what-if; nothing was measured."]


def duration(seconds: float) -> str:
    """Seconds for people: from microseconds to hours, never more than a dozen characters."""
    if 0 < seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} us"
    if 60 <= seconds < 999.5:
        return f"{seconds:.0f} s"
    return format_seconds(seconds) if seconds < 1e7 else f"{seconds:.2e} s"


def number(value: float) -> str:
    """A rate or a count with at least three digits: `0.0123`, `12.3`, `12,345`, `1.23e+15`."""
    if value == 0:
        return "0"
    if 100 <= value < 1e12:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def loss_figure(value: float) -> str:
    """A loss with the digits that people compare: `2.3456`; `1e+30`."""
    return f"{value + 0.0:.4f}" if not abs(value) >= 1e5 else f"{value:.4g}"  # -0.0 is 0


def count(value: int) -> str:
    """A large count in words: `1.34 billion`."""
    for words, scale in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if value >= 0.9995 * scale:
            return f"{value / scale:.3g} {words}"
    return f"{value:,}"


def percent(share: float) -> str:
    """`12.3%`; a share that is not quite none or all never looks as if it were; none is `-`."""
    if share <= 0:
        return "-"
    if share < 0.0005:
        return "<0.1%"
    if 0.9995 <= share < 1:
        return ">99.9%"
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def exact_percent(share: float) -> str:
    """All digits that a decision has: `31.2547%`."""
    return f"{100 * share:.4f}".rstrip("0").rstrip(".") + "%"


def money(amount: float) -> str:
    """`1,235`, `12.35`; no currency, for none is known."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.2f}"


def bar(value: float, most: float, columns: int = BAR_COLUMNS) -> str:
    """`value` of `most` as `[####....]`; more than `most` fills it."""
    share = min(value / most, 1.0) if most > 0 else 1.0
    full = round(share * columns)
    if share > 0:
        full = max(full, 1)
    return f"[{'#' * full}{'.' * (columns - full)}]"


def amount(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def signed(value: float) -> str:
    return f"{value:+.2f}" if abs(value) < 1e6 else f"{value:+.2e}"


def decimal(nbytes: float) -> str:
    """In powers of 1000, as makers of drives and links count."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * scale:
            return f"{number(nbytes / scale)} {unit}"
    return f"{number(nbytes)} B"


def rate(bytes_per_second: float) -> str:
    """`3.2 GB/s`, in powers of 1000."""
    return f"{decimal(bytes_per_second)}/s"


def times(number_of: int, one: str, many: str = "") -> str:
    return f"{number_of:,} {one if number_of == 1 else many or one + 's'}"


def without_ssd(plan: Plan) -> str:
    """What is said first of a plan that uses no ssd; empty of others."""
    if plan.prediction.ssd_bytes:
        return ""
    states = plan.decision.placement.values()
    on_device = all(each.parameters_device == 1.0 and (each.frozen or each.optimizer_device == 1.0) for each in states)
    if _could_be_on_device(plan) and not on_device:
        return "You do not need ssdplan here: the device alone has memory for this training, and a step uses no ssd. "
    needless = "ssdplan" if on_device or plan.decision.unified_memory else "an ssd"
    return f"You do not need {needless} here: all training state fits in memory, and a step uses no ssd. "


def _could_be_on_device(plan: Plan) -> bool:
    """Whether the model could be trained on the device alone, with gradients; a device in DRAM is none."""
    decision = plan.decision
    if decision.unified_memory or plan.machine.device == "cpu":
        return False
    owned = Shards(decision.shares).owned(plan.model)
    return device_alone_bytes(owned, decision.micro_batch_size, decision.formats) <= decision.device_budget_bytes
