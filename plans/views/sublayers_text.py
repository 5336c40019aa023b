"""What could be kept of a block's activations, in words: its sub-layers, and the rungs between nothing and all.

Owns these tables of a profile, and what it says of blocks whose rungs nobody measured. PyAO's rule is
`analysis/sublayers.py`'s.
"""

from statistics import median

from ..analysis.sublayers import blocks_with_backward, bound_of, could_gain, fence, outliers, throughput
from ..documents.profile import CompressionError, Machine, Model, Profile, SubLayer, Timing
from ..units import format_bytes
from .quantities import amount, duration, percent, rate, times
from .tables import NAME_COLUMNS, Row, short, table, wrapped

SUBLAYER_COLUMNS = 40
MOST_SUBLAYERS = 64
"""Shown of one class; `--csv` writes all."""


def sections_of_activations(profile: Profile) -> list[tuple[str, list[str]]]:
    """A section of sub-layers and one of rungs for each class of blocks that has them, at the largest micro-batch size;
    and one of the classes without rungs."""
    model = profile.model
    sections: list[tuple[str, list[str]]] = []
    without: list[str] = []
    for name in blocks_with_backward(model):
        timing = model.timing(name, max(model.micro_batch_sizes))
        where = f"{short(name, NAME_COLUMNS)}, a micro-batch of {times(timing.micro_batch_size, 'row')}"
        if timing.sublayers:
            lines = _sublayers(timing.sublayers, profile.machine)
            sections.append((f"Sub-layers of {where}, in order: what autograd saves of each", lines))
        if timing.rungs:
            sections.append((f"Rungs of {where}: what can be kept for its backward", _rungs(timing)))
            if errors := _errors(name, model):
                title = f"Compression error of {short(name, NAME_COLUMNS)}: gradients by rungs in int8"
                sections.append((title, errors))
        elif not _is_noted(profile, name):
            without += _without(name, timing, model)
    return [*sections, ("Blocks without rungs", without)]


def _sublayers(sublayers: tuple[SubLayer, ...], machine: Machine) -> list[str]:
    bandwidth = bound_of(machine)
    which = outliers(sublayers, bandwidth)
    rows: list[Row] = [
        (
            short(each.name, SUBLAYER_COLUMNS),
            amount(each.saved_bytes),
            duration(each.forward_seconds),
            rate(throughput(each)) if each.saved_bytes else "-",
            "outlier" if outlier else "",
        )
        for each, outlier in zip(sublayers, which, strict=True)
    ]
    saved = sum(each.saved_bytes for each in sublayers)
    total: Row = ("all", amount(saved), duration(sum(each.forward_seconds for each in sublayers)), "", "")
    left_out = len(rows) - MOST_SUBLAYERS
    rest = [f"  and {left_out} more, which --csv FILE writes"] if left_out > 0 else []
    recomputed = sum(each.saved_bytes for each, outlier in zip(sublayers, which, strict=True) if outlier)
    if any(which):
        rule = f"PyAO's rule recomputes {times(sum(which), 'outlier')}, {format_bytes(recomputed)}, and keeps the rest"
    else:
        rule = "none lies above both, so PyAO's rule keeps all of them"
    noted = (
        f"Forwards are medians of {times(sublayers[0].samples, 'round')}; each operation is waited for, so together "
        "they take longer than the block."
    )
    bounds = (
        f"The fence, Q3 + 1.5 IQR, is at {rate(fence(sublayers))}; the slower way of the link moves {rate(bandwidth)}: "
        f"{rule}."
    )
    head: Row = ("", "saved", "forward", "a second", "")
    rows = rows[:MOST_SUBLAYERS]
    return [*table([head], [*rows, total], left=(0, 4)), *rest, *_indented(noted), *_indented(bounds)]


def _rungs(timing: Timing) -> list[str]:
    """What each rung keeps, takes, and leaves of the recomputation."""
    whole, forward = timing.saved_activation_bytes, timing.forward_seconds
    rows: list[Row] = [("nothing", "-", "-", duration(forward), duration(timing.backward_seconds), "100%")]
    for rung in timing.rungs:
        left = rung.backward_seconds - (timing.backward_seconds - forward)
        rows.append(
            (
                short(rung.name, NAME_COLUMNS),
                format_bytes(rung.kept_bytes),
                percent(rung.kept_bytes / whole) if whole else "?",
                duration(rung.forward_seconds),
                duration(rung.backward_seconds),
                f"{left / forward:.0%}" if forward else "?",
            )
        )
    head: Row = ("", "kept", "of all", "forward", "backward", "recomputed")
    of_all = f"of all: of the {format_bytes(whole)} that autograd would keep."
    left_words = (
        "recomputed: what is left of the recomputation, which is counted as one forward; below 0% where a backward "
        "gains more than that."
    )
    return [*table([head], rows, left=(0,)), *_indented(of_all), *_indented(left_words)]


def _errors(name: str, model: Model) -> list[str]:
    """How far off the gradients of a class's blocks are by each int8 rung: in the median block and in the worst."""
    layers = {layer.name for layer in model.layers if layer.layer_class == name}
    of_rung: dict[str, list[CompressionError]] = {}
    for each in model.compression:
        if each.layer in layers:
            of_rung.setdefault(each.rung, []).append(each)
    rows: list[Row] = []
    for rung, errors in of_rung.items():
        worst = max(errors, key=lambda each: each.parameters)
        rows.append(
            (
                short(rung, NAME_COLUMNS),
                percent(median(each.parameters for each in errors)),
                percent(worst.parameters),
                short(worst.layer, NAME_COLUMNS),
                percent(median(each.hidden for each in errors)),
            )
        )
    head: Row = ("", "of parameters", "at most", "in", "handed on")
    words = (
        "The norm of the difference from exact gradients, over their norm, for random tokens and a random gradient of "
        "the output; medians over blocks."
    )
    return [*table([head], rows, left=(0, 3)), *_indented(words)] if rows else []


def _without(name: str, timing: Timing, model: Model) -> list[str]:
    if model.figures != "measured" or not timing.forward_seconds:
        return []
    gain = percent(could_gain(timing))
    return _indented(
        f"{short(name, NAME_COLUMNS)}: backward recomputes all of its forward; a new profile could bring rungs, and "
        f"these up to about {gain} of its time"
    )


def _is_noted(profile: Profile, name: str) -> bool:
    """Whether the profile says why nothing was measured of the class: what it says begins with the class's name."""
    return any(note.startswith(f"{name}: ") for note in profile.notes)


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in wrapped(text)]
