"""What an estimate rests on: which of its figures are measured, and how near such estimates have been to trainings.

Owns these judgements. Figures and their sources are the catalogue's; docs/catalogue.md has the table of trainings.
"""

from textwrap import wrap

from ssdplan.plans.documents.profile import Profile

from .catalogue.figure import Kind
from .catalogue.parts import NO_GPU
from .catalogue.whatif import WhatIf, figures_of

TEXT_COLUMNS = 100
COMPARED, MEDIAN_ERROR, MOST_ERROR = 23, 0.06, 0.19
"""Published trainings, by other programs, that chose no figure. By how much of what was measured half of the estimates
were off at most, and by how much the farthest was."""
WHERE = "A100, H100"
_OF_COMPUTE = ("gpu.flops", "gpu.efficiency", "gpu.passes", "gpu.launch", "gpu.memory-bandwidth")
_KINDS: tuple[Kind, ...] = ("given", "measured", "data sheet", "assumed")


def kinds_of(what_if: WhatIf) -> dict[str, tuple[str, ...]]:
    """Kind of figure -> the names of those that are of it, without the names of drives. Raises UsageError."""
    found: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for name, figure in figures_of(what_if).items():
        names = found[figure.kind]
        if (short := name.partition(" of ")[0]) not in names:
            names.append(short)
    return {kind: tuple(names) for kind, names in found.items()}


def error_of(what_if: WhatIf) -> tuple[float | None, str]:
    """By how much of it the estimate of compute may well be off, and what says so; None, and why, where nothing does.
    Raises UsageError."""
    if what_if.gpu.lower() == NO_GPU:
        return None, "no published training on a processor alone was compared"
    figures = figures_of(what_if)
    if given := [name for name in _OF_COMPUTE if figures[name].kind == "given"]:
        return None, f"{given[0]} is given, and no published training was compared with that"
    if not figures["gpu.flops"].measured:
        return None, "gpu.flops is assumed, for nobody is known to have measured such products on this GPU"
    if what_if.shape.experts:
        return None, "no published training of a mixture of experts was compared"
    return MEDIAN_ERROR, (
        f"as in half of {COMPARED} published trainings ({WHERE}); the farthest estimate was {MOST_ERROR:.0%} too fast"
    )


def describe_notes(profile: Profile) -> str:
    """What an estimate rests on, as text: its notes, a list of figures and their sources."""
    lines = ["", "What this estimate rests on"]
    for note in profile.notes:
        lines += wrap(note, TEXT_COLUMNS, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"
