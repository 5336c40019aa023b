"""Peaks: the bytes that a schedule takes of each tier, exactly, and those of the process that runs it, closely.

Owns the sum of what buffer assignment and the profile know; it assigns nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ssdplan.plans.documents.plan import Decision, Saved
from ssdplan.plans.documents.profile import Machine, Model, Rung, Timing, quickest
from ssdplan.plans.documents.state_layout import (
    FP32,
)
from ssdplan.plans.graph.ops import GraphName, Schedule
from ssdplan.plans.units import whole_pages

OP_BYTES = 1536
"""What a run keeps of an operation: the graph's object, its action with the tensors that it is bound to, its times.
Measured: 1430 bytes on Python 3.11, of 20577 operations in the four graphs of a schedule."""
PIECE_ELEMENTS, STORED_BYTES = 1 << 20, 8
"""Weights are read in pieces of as many elements, at most as many bytes each."""
HEAP_BYTES, HEAP_DOUBLED_BYTES = 60 << 20, 8 << 20
"""Holes that malloc leaves between the tensors of a layer and what grows while a run warms up; and how much more with
each doubling of the micro-batches, which follow each other through one layer, where no profile says. A model of 134M
parameters took 15, 36 and 53 MiB with 1, 4 and 16 of them, one of 34M took 58 with 2; and a run differs from the next
by ten."""
WARMING_BYTES, WARMING_DOUBLED_BYTES = 16 << 20, 4 << 20
"""The same beside what a profile found the process to grow by: holes change from step to step, so the most of many
steps is more than that of a few. Models of 134M and of 551M parameters took 6 to 20 MiB with 1 to 8 micro-batches while
a head left holes, and since it does not at most 6 in fp32, 8 to 13 with 1 to 16 of them in bf16 (36 runs)."""
HOLES_DIFFER = 4
"""A run's holes may be more than a profile's by one part in so many. Where they are largest they differ most: a block
of hidden size 2560 left 118 to 154 MiB in four runs; three rounds together, in six processes each, found 86 to 127."""
NUMBER_BYTES = 8
"""Of the number of a row."""
PROCESS_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
"""An assumption of what a process takes before a plan's first byte, by device, where nobody measured it."""

SavedOf = Mapping[str, tuple[Saved, ...]]
"""Class of blocks -> what is kept of their activations."""
NOTHING_SAVED: SavedOf = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes that a run takes of each tier."""

    host_arena: int
    """Every buffer on host."""
    host: int
    """The host arena, and what is the device's where memory is separate."""
    device_arena: int
    device: int
    """The device arena, the largest compute workspace and what every micro-batch keeps for the whole step; nothing
    where compute works on host memory."""
    ssd: int
    """The store."""
    holes: int | None
    """What the process grows by for compute beyond its workspace; None: no profile says."""
    kept: int
    """Of host memory beside the arena: what the run keeps of its operations."""
    passing: int
    """And what states of the device pass through for a snapshot."""
    loading: int
    """The same while weights are loaded, which is over before operations are bound."""
    residents: int
    """The part of the host arena that states, activation checkpoints and waiting gradients keep for the whole run."""

    def most(self, other: "Peaks") -> "Peaks":
        """The larger of each figure."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return Peaks(*(mine if theirs is None else max(mine, theirs) for mine, theirs in pairs))

    @property
    def bookkeeping(self) -> int:
        """What a run takes of host memory beside the arena and compute."""
        return max(self.kept + self.passing, self.loading)


def predict_peaks(schedule: Schedule, model: Model, decision: Decision) -> Peaks:
    """The peaks of a run of `schedule`, evaluation included. `decision` is the one it was built from."""
    size = decision.micro_batch_size
    workspace = workspace_bytes(model, size, decision.saved, backward=decision.optimizer != "mezo")
    stay: dict[int, int] = {}
    for buffer in schedule.buffers:
        if buffer.tier == "host" and not buffer.pool:
            stay[buffer.zone] = max(stay.get(buffer.zone, 0), buffer.offset + buffer.nbytes - buffer.zone)
    beside = workspace + decision.micro_batches * model.context_bytes[size] + _numbers_bytes(model, decision)
    arena = schedule.arenas["device"]
    return Peaks(
        host_arena=schedule.arenas["host"],
        host=schedule.arenas["host"] + (beside if decision.unified_memory else 0),
        device_arena=arena,
        device=0 if decision.unified_memory else arena + beside,
        ssd=schedule.arenas["ssd"],
        holes=_holes_bytes(model, size, workspace, decision.saved),
        kept=kept_bytes(schedule, unwritten=bool(decision.zeroth_order and decision.zeroth_order.written_every > 1)),
        passing=_passing_bytes(schedule),
        loading=max(
            (home.optimizer.nbytes if home.optimizer else 0)
            + home.parameters.nbytes
            + (FP32.bytes_of(home.elements) if home.trained and home.formats.masters == "residual" else 0)
            + STORED_BYTES * min(home.stop - home.start, PIECE_ELEMENTS)
            for home in schedule.homes
        ),
        residents=sum(map(whole_pages, stay.values())),
    )


def _numbers_bytes(model: Model, decision: Decision) -> int:
    """What the numbers of a table's rows take of the device, where it comes by rows."""
    if not (decision.zeroth_order and decision.zeroth_order.by_rows):
        return 0
    table = next(state.table for state in model.states if state.table)
    return NUMBER_BYTES * table.most_elements(decision.rank_tokens) // table.row_elements


def _passing_bytes(schedule: Schedule) -> int:
    """What states that stay on the device pass through on host for a snapshot, two homes at once."""
    regions = (region for home in schedule.homes for region in home.durable)
    return 2 * max((each.nbytes for each in regions if schedule.buffers[each.buffer].tier == "device"), default=0)


def workspace_bytes(
    model: Model, micro_batch_size: int, saved: SavedOf = NOTHING_SAVED, *, backward: bool = True
) -> int:
    """The most that compute of a layer takes: each runs forward in an evaluation, if not in a step, and where there are
    gradients those that are not below all that is trained run `backward`. By a rung or not: rows that cannot be run by
    it are run without."""
    lowest = model.first_trained
    forwards = {layer.layer_class for layer in model.layers}
    backwards = {layer.layer_class for layer in model.layers[lowest:]} if backward else set[str]()
    most = max(
        *(model.timing(name, micro_batch_size).forward_workspace_bytes for name in forwards),
        *(model.timing(name, micro_batch_size).backward_workspace_bytes for name in backwards),
    )
    rungs = _rungs(model, micro_batch_size, saved)
    return max([most, *(max(rung.forward_workspace_bytes, rung.backward_workspace_bytes) for rung in rungs)])


def _rungs(model: Model, micro_batch_size: int, saved: SavedOf) -> list[Rung]:
    return [model.timing(name, micro_batch_size).rung(each.rung) for name, shares in saved.items() for each in shares]


def _holes_bytes(model: Model, micro_batch_size: int, workspace: int, saved: SavedOf) -> int | None:
    """What the process grows by beyond the workspace while the class that takes most runs: what others left is given
    back, or is used again."""
    most = 0
    timings: list[Timing | Rung] = [model.timing(entry.name, micro_batch_size) for entry in model.classes]
    for timing in (*timings, *_rungs(model, micro_batch_size, saved)):
        if timing.process_growth_bytes is None:
            return None
        holes = timing.process_growth_bytes - max(timing.forward_workspace_bytes, timing.backward_workspace_bytes)
        most = max(most, timing.process_growth_bytes + max(holes, 0) // HOLES_DIFFER)
    return max(most - workspace, 0)


def forward_seconds(model: Model, micro_batch_size: int, forwards: int) -> float:
    """So many forwards of each layer, the head's loss included, one layer after the other."""
    timings = (model.timing(layer.layer_class, micro_batch_size) for layer in model.layers)
    return sum(timing.forward_stage_seconds(forwards) for timing in timings)


def compute_seconds(model: Model, micro_batch_size: int, micro_batches: int, *, saves: bool = False) -> float:
    """All forwards and backwards of a vertical step, one after the other. The head's backward is all of its work.
    Everything is recomputed, or with `saves` as little as can be."""
    timings = [model.timing(layer.layer_class, micro_batch_size) for layer in model.layers]
    forward = sum(timing.forward_stage_seconds(micro_batches) for timing in timings[:-1])
    backward = sum(timing.backward_stage_seconds(micro_batches) for timing in timings[model.first_trained :])
    gained = 0.0
    for block in model.trained_blocks if saves else ():
        if best := quickest(timings[block].rungs):
            whole = timings[block].forward_seconds + timings[block].backward_seconds
            gained += max(whole - best.forward_seconds - best.backward_seconds, 0.0)
    return forward + backward - micro_batches * gained


def kept_bytes(schedule: Schedule, *, unwritten: bool = False) -> int:
    """What a run keeps of the operations of a schedule's graphs; `unwritten`: it has steps that write no parameters."""
    names: tuple[GraphName, ...] = ("first", "steady", "flush", "evaluate")
    return OP_BYTES * sum(len(schedule.emitted(name)) for name in (*names, *(("unwritten",) if unwritten else ())))


def process_peak_bytes(peaks: Peaks, model: Model, machine: Machine, decision: Decision) -> int:
    """Resident memory of the process that runs a schedule on rows of any length, as the kernel counts it; a device in
    DRAM is a part of it. Loading is over before the first compute."""
    base = PROCESS_BYTES[machine.device] if machine.process_bytes is None else machine.process_bytes
    kernels = model.kernel_bytes(decision.micro_batch_size)
    arena, compute = (peaks.device_arena, peaks.device - peaks.device_arena) if machine.device == "cpu" else (0, 0)
    doublings = (decision.micro_batches - 1).bit_length()
    heap = HEAP_BYTES + HEAP_DOUBLED_BYTES * doublings
    if peaks.holes is not None:
        heap = peaks.holes + WARMING_BYTES + WARMING_DOUBLED_BYTES * doublings
    return base + peaks.host + arena + max(peaks.loading, peaks.kept + peaks.passing + kernels + compute + heap)
