"""Kinds of work: what an operation does, in a person's words, and the colours that mean it in every picture.

Owns the words and the colours, which are the same in the plots, on the page and in tables, and are told apart by people
who are colour-blind. It draws nothing.
"""

from collections.abc import Collection

from ..graph.collectives import AddShares, Exchange, Gather
from ..graph.contents import BETWEEN_LAYERS, CONTENTS, Role
from ..graph.ops import Backward, Forward, Op, Perturb, SumSquares, TakeRows, Transfer, Update

RESOURCE_LABELS = {
    "read": "ssd read",
    "write": "ssd write",
    "h2d": "host to device",
    "d2h": "device to host",
    "compute": "compute",
    "cpu": "cpu updates",
    "network": "network",
}

# Paul Tol's muted colours, and lighter ones for what is only passing through.
WORK_COLOURS = {
    "parameters": "#332288",
    "optimizer states": "#DDCC77",
    BETWEEN_LAYERS: "#44AA99",
    "gradients of parameters": "#882255",
    "forward": "#88CCEE",
    "backward": "#CC6677",
    "update": "#117733",
    "delayed update": "#999933",
    "perturb": "#882255",
}
ROLE_COLOURS = {
    Role.PARAMETERS: "#332288",
    Role.OWN_MASTERS: "#1B1464",
    Role.OPTIMIZER: "#DDCC77",
    Role.CHECKPOINTS: "#44AA99",
    Role.SAVED_ACTIVATIONS: "#117733",
    Role.DELAYED_GRADIENT: "#AA4499",
    Role.ACCUMULATED_GRADIENTS: "#C488BC",
    Role.PARAMETERS_IN_TRANSIT: "#8C83C9",
    Role.OPTIMIZER_IN_TRANSIT: "#EEE5B8",
    Role.HIDDEN_STATES: "#88CCEE",
    Role.GRADIENTS: "#882255",
    Role.PERTURBED_PARAMETERS: "#D89BB5",
    Role.ORTHOGONALISATION: "#661100",
}
"""From the bottom of the stack to its top: what stays, then what comes and goes."""
SIZE_COLOURS = ("#332288", "#CC6677", "#117733", "#88CCEE", "#AA4499", "#DDCC77", "#44AA99", "#882255", "#999933")
"""Of micro-batch sizes, in order."""
OTHER_COLOUR = "#BBBBBB"


def work_of(op: Op) -> str:
    """The kind of work that `op` does: a key of WORK_COLOURS where it has a colour."""
    if isinstance(op, Forward):
        return "forward"
    if isinstance(op, Backward):
        return "backward"
    if isinstance(op, Update):
        return "delayed update" if op.delayed else "update"
    if isinstance(op, Perturb):
        return "perturb" if op.copies or op.rounded else "update"
    if isinstance(op, TakeRows):
        return "take rows"
    if isinstance(op, SumSquares):
        return "norm"
    if isinstance(op, Gather):
        return "parameters"
    if isinstance(op, Exchange):
        return "gradients of parameters"
    if isinstance(op, AddShares):
        return "add gradients"
    if isinstance(op, Transfer):
        return CONTENTS[op.content].work
    return type(op).__name__.lower()


def roles_in_order(roles: Collection[Role]) -> list[Role]:
    """`roles` from the bottom of a stack to its top."""
    return [role for role in ROLE_COLOURS if role in roles]
