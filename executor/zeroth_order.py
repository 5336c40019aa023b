"""Zeroth-order runs: what a run without gradients needs before its first step.

Owns the log that a run begins or goes on with, the refusal of perturbations that the weights' precision loses, and what
is asked of a model whose table of token embeddings comes by rows.
"""

import contextlib

import torch
from torch import nn

from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.table import ROW_GRAIN, Table
from ssdplan.plans.errors import MismatchError, UsageError
from ssdplan.plans.files import Folder

from .device.interface import Device
from .device.tensors import DTYPE_NAMES
from .model.inspection.table import reads_rows
from .model.model import StreamedModel
from .model.template import TableRows
from .model.weights import Weights
from .optimizer.zeroth_order import MeZO, Move, require_distinct_keys
from .optimizer.zeroth_order_log import LOG, Header, LogFile, read_log, require_own
from .recipe import Recipe
from .snapshots.snapshots import Origin

SAMPLED = 1 << 20
"""Parameters that are looked at, of the largest state."""
MOST_LOST = 0.5
"""Of these, the share that may be no other number when they are perturbed."""


def opened_log(
    folder: Folder, plan: Plan, origin: Origin, recipe: Recipe, steps: int, since: int = 0
) -> tuple[LogFile, tuple[Move, ...]]:
    """The log of a run that has `steps` behind it, and the updates of these but the first `since`. Raises MismatchError
    for another's log."""
    header = _header(plan, origin, recipe)
    if not steps:
        return LogFile.create(folder, header), ()
    log, moves = LogFile.go_on(folder, header, steps)
    return log, tuple(move for step in moves[since:] for move in step)


def require_own_log(folder: Folder, plan: Plan, origin: Origin, recipe: Recipe) -> None:
    """Raise MismatchError where a stopped run cannot go on with its log: before anything of the run changes."""
    there, header = read_log(folder).header, _header(plan, origin, recipe)
    require_own(folder, there, header)
    before, now = (each.origin.get("recipe", {}).get("optimizer.decay_all") for each in (there, header))
    if before != now:  # a log says by how much a step's decay was, and not of which tensors
        raise MismatchError(f"{folder.path / LOG}: --decay-all cannot change in a run without gradients")


def _header(plan: Plan, origin: Origin, recipe: Recipe) -> Header:
    zeroth_order, optimizer = plan.decision.zeroth_order, recipe.optimizer
    assert zeroth_order is not None and isinstance(optimizer, MeZO)
    return Header(
        model=origin.model,
        weights=origin.weights,
        seed=optimizer.seed,
        directions=zeroth_order.directions,
        precision=plan.decision.precision,
        origin=origin.model_dump(mode="json"),
        masters=zeroth_order.masters,
    )


def require_perturbed(model: StreamedModel, recipe: Recipe) -> None:
    """Raise UsageError where eps is too small for the weights: in their precision most of them would stay as they are
    at plus and at minus eps, so the losses there would say nothing. And where two tensors share a direction."""
    optimizer = recipe.optimizer
    assert isinstance(optimizer, MeZO)
    require_distinct_keys(model.states)
    index = max(
        (number for number in range(len(model.states)) if not model.states[number].frozen),
        key=lambda number: model.states[number].elements,
    )
    sample = torch.empty(min(SAMPLED, model.states[index].elements), dtype=model.dtypes[index])
    with contextlib.closing(Weights(model)) as weights:
        weights.read(index, sample, 0)
    lost = float((sample + optimizer.eps == sample).float().mean())
    if lost > MOST_LOST:
        finer = "" if model.dtype == torch.float32 else ", or profile with --precision fp32"
        raise UsageError(
            f"--eps {optimizer.eps:g}: {lost:.0%} of the weights would not change by it, in "
            f"{DTYPE_NAMES[model.dtype]}; take a larger --eps{finer}"
        )


def table_of(model: StreamedModel) -> tuple[int, Table] | None:
    """The state that is a table of token embeddings and nothing else, of which forwards read their tokens' rows alone,
    and its form; None where no state is.

    Tied models have none: their head needs the whole table. Nor have models whose rows are not whole groups of 64
    elements.
    """
    weight = getattr(model.module.get_input_embeddings(), "weight", None)
    name = next((name for name, each in model.module.named_parameters() if each is weight), None)
    index = next((i for i in model.layers[0].states if [t.name for t in model.states[i].tensors] == [name]), None)
    if index is None or any(index in layer.states for layer in model.layers[1:]):
        return None
    assert isinstance(weight, nn.Parameter)
    rows, row_elements = model.states[index].tensors[0].shape
    plain = reads_rows(model.module, model.blocks, weight, returned=model.anatomy.returned)
    return (index, Table(rows=rows, row_elements=row_elements)) if plain and row_elements % ROW_GRAIN == 0 else None


def table_rows(plan: Plan, model: StreamedModel, device: Device) -> TableRows | None:
    """What is needed of a table that comes by rows; None where none does. Raises MismatchError where the plan says so
    of a model whose code reads its table otherwise."""
    if not (plan.decision.zeroth_order and plan.decision.zeroth_order.by_rows):
        return None
    found, stated = table_of(model), plan.model.table
    if found is None or stated != found[0] or plan.model.states[stated].table != found[1]:
        raise MismatchError(
            f"{model.name}: the plan moves rows of a table of token embeddings that {model.architecture} does not read "
            "so; profile it, and solve again"
        )
    state, table = found
    most = table.most_elements(plan.decision.rank_tokens) // table.row_elements
    return TableRows(state, model.states[state].tensors[0].name, table.row_elements, most, device.torch_device)
