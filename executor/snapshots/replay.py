"""Replay: the weights of any step of a zeroth-order run, from its first weights and its log.

Owns that it is the run's own arithmetic, tensor by tensor, and that log and weights belong together. Weights stream, a
piece of a state at a time; of the run nothing is written.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from ssdplan.plans.errors import MismatchError, UsageError

from ..device.tensors import DTYPES
from ..memory.states import saved_entries
from ..metrics.metrics import METRICS, lines
from ..model.directory.export import export_model
from ..model.directory.weight_files import weights_fingerprint
from ..model.kinds import spared_parameters
from ..model.model import StreamedModel, open_model
from ..model.saved_form import SavedForm
from ..model.weights import Weights
from ..optimizer.passes import Pending, perturb
from ..optimizer.zeroth_order import Move, tensor_key
from ..optimizer.zeroth_order_log import LOG, Header, read_log
from .kept_weights import KeptReader, KeptWeights
from .resume import Kept, reopened

Progress = Callable[[float, str], None]
PIECE = 1 << 24
"""Elements of a state at once."""


def replay(
    run: Path,
    to: Path,
    *,
    step: int | None = None,
    model: Path | None = None,
    progress: Progress = lambda share, what: None,
) -> int:
    """Write the model of a zeroth-order run after `step` steps (None: all that its log has) to the new directory `to`,
    and return that number. `model`: the directory of the first weights, if it is another than the run was told.

    Raises UsageError for a run by gradients, a step that it has not made, or where no first weights are; MismatchError
    for a log that was changed, or other first weights; and as `export.export_model`.
    """
    with reopened(run, reading=True) as kept:
        if not kept.plan.decision.zeroth_order:
            raise UsageError(
                f"{run}: trained by gradients, so it has no log to replay; ssdplan export writes its model"
            )
        return replayed(kept, to, step, model or source_of(kept), None, progress)


def replayed(
    kept: Kept, to: Path, step: int | None, source: Path, since: KeptWeights | None, progress: Progress
) -> int:
    """`replay` of a run that is open; `since`: weights of an earlier step, to begin with instead of the first."""
    path, trained = kept.directory.path, kept.plan.model
    if not kept.step:
        raise UsageError(f"{path}: has made no step yet, so its model is the first one")
    logged = read_log(kept.directory.folder)
    header, log = logged.header, logged.moves
    _require_own(kept, header)
    _require_told(kept, log)
    steps = kept.step if step is None else step
    if not 0 <= steps <= len(log):
        raise UsageError(f"--step {steps}: the log of {path} has {len(log)} steps")
    dtype = DTYPES[kept.plan.decision.precision]
    model = open_model(source, dtype, freeze=trained.freeze, allow_unused_weights=trained.allow_unused_weights)
    if model.fingerprint != header.model or weights_fingerprint(source) != header.weights:
        raise MismatchError(
            f"{source}: is not the model that the log begins with; name the run's first weights by --model"
        )
    decays_all = bool(header.origin.get("recipe", {}).get("optimizer.decay_all"))
    spared = frozenset[str]() if decays_all else spared_parameters(model.module)
    moves = [move for of_step in log[since.step if since else 0 : steps] for move in of_step]
    decaying = [(move.step, move.direction, move.scale, move.keep) for move in moves]
    lasting = [(*move[:3], 1.0) for move in decaying]
    threads = kept.plan.machine.update_threads
    lives = torch.float32 if header.masters else dtype
    weights = since.open(model) if since else Weights(model)
    tensors = _tensors(model, weights, lives, header.seed, decaying, lasting, spared, threads, progress)
    form = SavedForm(model)
    entries = form.entries(saved_entries(model))
    export_model(to, source=source, entries=entries, tensors=form.tensors(tensors), files=form.files)
    return steps


def _require_own(kept: Kept, header: Header) -> None:
    """Raise MismatchError for the log of a run by another plan or seed."""
    decision, seed = kept.plan.decision, kept.directory.run.options.get("seed")
    assert decision.zeroth_order is not None
    for name, log, run in (
        ("directions", header.directions, decision.zeroth_order.directions),
        ("masters", header.masters, decision.zeroth_order.masters),
        ("precision", header.precision, decision.precision),
        ("seed", str(header.seed), header.seed if seed is None else seed),
    ):
        if str(log) != str(run):
            raise MismatchError(
                f"{kept.directory.path / LOG}: is not this run's log: its {name} is {log}, and the run's is {run}"
            )


def _require_told(kept: Kept, log: Sequence[Sequence[Move]]) -> None:
    """Raise MismatchError where the log moves weights by another amount than a step that metrics.jsonl tells of. A run
    that is shared as its log has no metrics."""
    folder = kept.directory.folder
    told_of = list[tuple[int, float, float]]()
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # what a kill has torn tells of nothing
        for line in lines(folder) if folder.has_file(METRICS) else ():
            if "loss" in line and line["grad_norm"] and line["lr"] and not line.get("skipped"):
                told_of.append((int(line["step"]), float(line["grad_norm"]), float(line["lr"])))
    for number, told, lr in told_of:
        if not 0 < number <= len(log):
            continue
        moves = log[number - 1]
        logged = math.sqrt(sum(move.scale**2 for move in moves) * len(moves)) / lr
        if not math.isclose(logged, told, rel_tol=1e-4):
            raise MismatchError(
                f"{folder.path / LOG}: is not this run's log: at step {number} its projected gradient is {logged:.6g}, "
                f"and {METRICS} tells of {told:.6g}"
            )


def source_of(kept: Kept) -> Path:
    """The directory of the model that was trained: as the run was told, or as its plan has it. Raises UsageError."""
    told = kept.directory.run.options.get("model", kept.plan.model.path)
    if not isinstance(told, str) or not Path(told).is_dir():
        raise UsageError(
            f"{kept.directory.path / 'run.json'}: the model that was trained is not at {told}; name it by --model"
        )
    return Path(told)


def _tensors(
    model: StreamedModel,
    source: Weights | KeptReader,
    lives: torch.dtype,
    seed: int,
    decaying: list[Pending],
    lasting: list[Pending],
    spared: frozenset[str],
    threads: int,
    progress: Progress,
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `States.tensors`: (name, piece), a piece of a tensor at a time, which is gone when the next is asked for.
    `lives`: what trained weights are updated in."""
    done, total = 0, sum(state.elements for state in model.states)
    with contextlib.closing(source) as weights:
        for index, state in enumerate(model.states):
            for start in range(0, state.elements, PIECE):
                dtype = model.dtypes[index] if state.frozen or state.precision else lives
                values = torch.empty(min(PIECE, state.elements - start), dtype=dtype)
                weights.read(index, values, start)
                for tensor in state.tensors:
                    first = max(start - tensor.offset, 0)
                    stop = min(start + values.numel() - tensor.offset, tensor.elements)
                    if first >= stop:
                        continue
                    piece = values[tensor.offset + first - start : tensor.offset + stop - start]
                    if not state.frozen:
                        perturb(
                            piece,
                            None,
                            None,
                            seed=seed,
                            tensor=tensor_key(tensor.name),
                            step=0,
                            direction=0,
                            eps=1.0,
                            pending=lasting if tensor.name in spared else decaying,
                            threads=threads,
                            first=first,
                        )
                    yield tensor.name, piece.to(model.dtypes[index])
                done += values.numel()
                progress(done / total, f"replaying {state.name}")
    yield from model.persistent_buffers.items()
