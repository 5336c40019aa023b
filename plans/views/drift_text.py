"""Drift in words: which figures of a machine a run measured otherwise than its profile, and what another plan changes.

Owns the words. The figures are `analysis/drift.py`'s.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from ..analysis.drift import Drift, Figure, FigureKind
from ..documents.plan import Plan
from ..documents.rates import update_rate
from .quantities import duration, number, rate
from .tables import NAME_COLUMNS, short


def describe_drift(plan: Plan, drift: Drift) -> str:
    """Which figures, and by how much, in a sentence."""
    each = "; ".join(_describe(plan, figure, times) for figure, times in drift.slowdowns.items())
    return (
        f"the machine is not as its profile says: {each}. With what was measured a step of this plan takes "
        f"{duration(drift.step_seconds)}, not {duration(plan.prediction.step_seconds)}"
    )


def describe_change(old: Plan, new: Plan) -> str:
    """What another plan of the same batch does otherwise, in a few words."""
    both = [(name, before, after) for (name, before), (_, after) in zip(_choices(old), _choices(new), strict=True)]
    earlier, later = _saved(old), _saved(new)
    for way in sorted({*earlier, *later}):
        rung, tier = way
        words = f"activations saved by {short(rung, NAME_COLUMNS)} on {tier}"
        both.append((words, earlier.get(way, 0.0), later.get(way, 0.0)))
    changes = [
        f"{name} {100 * before:.1f}% -> {100 * after:.1f}%"
        for name, before, after in both
        if abs(before - after) >= 0.005
    ]
    return ", ".join(changes) or "the same"


def _describe(plan: Plan, figure: Figure, times: float) -> str:
    machine, size = plan.machine, plan.decision.micro_batch_size
    speeds: dict[FigureKind, tuple[str, float, Callable[[float], str]]] = {
        "read": ("ssd read", sum(volume.frontier[0].read for volume in machine.volumes), rate),
        "write": ("ssd write", sum(volume.frontier[-1].write for volume in machine.volumes), rate),
        "h2d": ("copies to the device", machine.h2d_bandwidth, rate),
        "d2h": ("copies from the device", machine.d2h_bandwidth, rate),
        "update": (
            "optimizer updates",
            update_rate(machine, plan.decision.formats),
            lambda value: f"{number(value)} elements/s",
        ),
    }
    if figure.kind in ("read beside writes", "write beside reads"):
        return f"ssd {figure.kind} {number(1 / times)} times its bandwidth"
    if figure.kind in speeds:
        name, planned, words = speeds[figure.kind]
        return f"{name} {words(planned / times)} instead of {words(planned)}"
    timing = plan.model.timing(figure.layer_class, size)
    seconds = timing.forward_seconds if figure.kind == "forward" else timing.backward_seconds
    return f"{figure.kind} of {figure.layer_class} {duration(seconds * times)} instead of {duration(seconds)}"


def _saved(plan: Plan) -> dict[tuple[str, str], float]:
    """Rung and tier -> the share of all pairs of block and micro-batch whose activations it saves there."""
    layers = Counter(layer.layer_class for layer in plan.model.layers[max(plan.model.first_trained, 1) : -1])
    found: dict[tuple[str, str], float] = {}
    for name, shares in plan.decision.saved.items():
        for each in shares:
            way = each.rung, each.tier
            found[way] = found.get(way, 0.0) + each.share * layers[name] / layers.total()
    return found


def _choices(plan: Plan) -> list[tuple[str, float]]:
    """The fractions that a solve decides, over all elements."""
    decision = plan.decision

    def share(parts: Iterable[str], *, of_updates: bool = False) -> float:
        states = [state for state in plan.model.states if not (of_updates and state.frozen)]
        return sum(
            state.elements * sum(getattr(decision.placement[state.state_class], part) for part in parts)
            for state in states
        ) / sum(state.elements for state in states)

    return [
        ("delay ratio", decision.delay_ratio),
        ("optimizer states on host", share(("optimizer_prompt_host", "optimizer_delayed_host"), of_updates=True)),
        ("parameters on host", share(("parameters_prompt_host", "parameters_delayed_host"))),
        ("parameters kept for compute", share(("parameters_device",))),
        ("parameters kept across the turn", share(("parameters_turn",))),
        ("delayed gradients on host", share(("delayed_gradient_host",), of_updates=True)),
        ("checkpoints on host", decision.checkpoint_host),
    ]
