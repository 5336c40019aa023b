"""Kinds of work: what an operation does, in a person's words, and the colours that mean it in every picture.

Owns the words and the colours, which are the same in the plots, on the page and in tables, and are told apart by people
who are colour-blind. It draws nothing.
"""

from collections.abc import Iterable

from .schedule import Backward, Forward, Op, Schedule, Transfer, Update

# Paul Tol's muted colours, and lighter ones for what is only passing through.
WORK_COLOURS = {
    "parameters": "#332288",
    "optimizer states": "#DDCC77",
    "hidden states, checkpoints, their gradients": "#44AA99",
    "gradients of parameters": "#882255",
    "forward": "#88CCEE",
    "backward": "#CC6677",
    "update": "#117733",
    "delayed update": "#999933",
}
ROLE_COLOURS = {
    "parameters": "#332288",
    "optimizer": "#DDCC77",
    "checkpoints": "#44AA99",
    "delayed gradient": "#AA4499",
    "accumulated gradients": "#C488BC",
    "parameters in transit": "#8C83C9",
    "optimizer in transit": "#EEE5B8",
    "hidden states": "#88CCEE",
    "gradients": "#882255",
}
"""From the bottom of the stack to its top: what stays, then what comes and goes."""
SIZE_COLOURS = ("#332288", "#CC6677", "#117733", "#88CCEE", "#AA4499", "#DDCC77", "#44AA99", "#882255", "#999933")
"""Of micro-batch sizes, in order."""
OTHER_COLOUR = "#BBBBBB"
_ROLES_OF_WORK = (
    ({"optimizer", "optimizer in transit"}, "optimizer states"),
    ({"gradients", "delayed gradient", "accumulated gradients"}, "gradients of parameters"),
    ({"parameters", "parameters in transit"}, "parameters"),
)


def work_of(schedule: Schedule, op: Op) -> str:
    """The kind of work that `op`, of one of `schedule`'s graphs, does: a key of WORK_COLOURS where it has a colour."""
    if isinstance(op, Forward):
        return "forward"
    if isinstance(op, Backward):
        return "backward"
    if isinstance(op, Update):
        return "delayed update" if op.delayed else "update"
    if isinstance(op, Transfer):
        roles = {schedule.buffers[region.buffer].role for region in (op.source, op.target)}
        passing = "hidden states, checkpoints, their gradients"
        return next((work for mine, work in _ROLES_OF_WORK if roles & mine), passing)
    return type(op).__name__.lower()


def roles_in_order(roles: Iterable[str]) -> list[str]:
    """`roles` from the bottom of a stack to its top."""
    known = list(ROLE_COLOURS)
    return sorted(roles, key=lambda role: (known.index(role) if role in known else len(known), role))
