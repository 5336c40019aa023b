"""What a training takes, in words: hours, money, and the life of the drives. Owns these words."""

from ...analysis.cost import Cost, Training, cost_of
from ...analysis.wear import lifetime
from ...documents.plan import Plan
from ..quantities import count, decimal, money, number, percent
from ..tables import aligned, page, spread

Facts = list[tuple[str, str]]


def describe_cost(plan: Plan, training: Training) -> str:
    """A section of its own, for `ssdplan show`. Raises UsageError as `cost_of` does."""
    pairs = [(f"  {name}", value) for name, value in cost_facts(plan, training)]
    return page("What a training takes", aligned(pairs, least=20))


def cost_facts(plan: Plan, training: Training, within: tuple[float, float] | None = None) -> Facts:
    """A (name, value) for each thing that a training takes. `within`: the least and the most of the plan's tokens a
    second that are likely, where that is known. Raises UsageError as `cost_of` does."""
    found = cost_of(plan, training)
    facts = spread("training", f"{count(training.tokens)} tokens: {_hours(plan, found, within)}")
    if words := _money(training, found):
        facts += spread("cost", words)
    if found.written_bytes:
        facts += spread("drive life", _life(found))
    return facts


def _hours(plan: Plan, found: Cost, within: tuple[float, float] | None) -> str:
    words = f"{number(found.hours)} hours"
    if within:
        least, most = (found.hours * plan.prediction.tokens_per_second / rate for rate in reversed(within))
        words += f" ({number(least)} to {number(most)})"
    return words + (f", or {lifetime(found.hours / 24)}" if found.hours >= 48 else "")


def _money(training: Training, found: Cost) -> str:
    parts = []
    if training.price is not None and found.for_machine is not None:
        what = f"{number(found.hours)} hours at {training.price.amount:g}" if training.price.hourly else "the machine"
        parts.append(f"{money(found.for_machine)} for {what}")
    if found.kwh is not None:
        energy = f"{number(found.kwh)} kWh"
        parts.append(energy if found.for_energy is None else f"{money(found.for_energy)} for {energy}")
    whole = "" if found.money is None else f"{money(found.money)} in {_of(training)}'s currency: "
    return whole + ", ".join(parts)


def _of(training: Training) -> str:
    return "--price" if training.price else "--power-price"


def _life(found: Cost) -> str:
    writes = f"training writes {decimal(found.written_bytes)}"
    if found.worn is None or found.lasts_hours is None:
        return f"{writes}; profile --endurance SIZE says how much of its life that is"
    lasts = f"lasts {lifetime(found.lasts_hours / 24)}"
    if found.worn <= 1:
        return f"{lasts} without a pause; {writes}, {percent(found.worn)} of the rating"
    return f"too short: {lasts}; training writes {number(found.worn)} times the rating"
