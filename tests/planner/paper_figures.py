"""The papers' figures, each beside the function that computes it here; test_papers.py and docs/papers.md hold both.

Every constant is from the text of the paper that a figure names, or from the public shape of a model (the catalogue).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ssdplan.planner.catalogue import MODELS, find
from ssdplan.planner.catalogue.choices import Choice
from ssdplan.planner.catalogue.ranks import ONE_RANK, Ranks
from ssdplan.planner.catalogue.whatif import WhatIf, costs_of, estimate
from ssdplan.planner.explain.sensitivity import scaled_compute
from ssdplan.planner.explain.zero_infinity import (
    MEMASCEND,
    ZERO_INFINITY,
    HostNeeds,
    Ways,
    horizontal_seconds,
    horizontal_traffic,
    tensors_of_shape,
    zero_infinity_memory,
)
from ssdplan.planner.predict.peaks import Peaks, predict_peaks
from ssdplan.planner.predict.simulator import simulate
from ssdplan.planner.program.choices import FixedChoices, Limits
from ssdplan.planner.program.program import program_bound
from ssdplan.planner.program.traffic import layer_groups, stages
from ssdplan.planner.program.variables import CONSTANT
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.analysis.allocators import saved
from ssdplan.plans.documents.plan import Saved, SavedTier
from ssdplan.plans.documents.profile import PAPER, Machine, Model, Profile
from ssdplan.plans.documents.state_layout import checkpoint_bytes
from ssdplan.plans.schedule.build import build_schedule
from tests.made.decisions import decide
from tests.made.works import work_of

GIB, GB = 1 << 30, 10**9
LENGTH = 2048
"""Tokens of a row (GreedySnake, figure 10)."""
ROWS = 8
"""Of a micro-batch in GreedySnake's example (3.4), and about the most that fit (figure 4)."""
SMALL_ROWS = 2
"""Of a micro-batch of GreedySnake itself: "typically 1 or 2" (6.2). 16.4 s are then 130 TFLOP/s for GPT-65B, next to
the 128.3 that section 6.2 has for GPT-175B; with 1 they would be 65."""
COMPUTE_SECONDS, CHECKPOINT_SECONDS = 16.4, 1.1
"""One micro-batch of GPT-65B: forward and backward, and the checkpoint I/O that it adds (GreedySnake 6.4)."""
DRAM = 400 * GB
"""GreedySnake, table 1, machine 2."""
LADDER = range(1, 65)
FREE = FixedChoices(recompute="all")
EVERYTHING_ON_SSD = FixedChoices(recompute="all", parameters=0.0, optimizer=0.0, checkpoints=0.0)
MEMASCENDS_MODELS = ("llama-3.1-8b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
BF16 = Ways(overflow_copies=False)
"""ZeRO-Infinity's way in bf16, which needs no overflow check (MemAscend VI-B3)."""
LIMIT = 128 * GIB
"""The machine of MemAscend V-B and V-C."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a paper."""

    paper: str
    where: str
    what: str
    stated: float
    ours: Callable[[], float]
    form: str
    """How it is printed."""
    within: float
    """The relative difference that is reached at most."""
    reason: str

    def shown(self, number: float) -> str:
        return self.form.format(number)

    @property
    def difference(self) -> float:
        return self.ours() / self.stated - 1


FIGURES: list[Figure] = []


def figure(
    paper: str,
    where: str,
    what: str,
    stated: float,
    ours: Callable[[], float],
    form: str,
    within: float = 0.005,
    reason: str = "",
) -> None:
    FIGURES.append(Figure(paper, where, what, stated, ours, form, within, reason))


# GreedySnake.


@cache
def gpt(name: str) -> Profile:
    """A model of GreedySnake on one A100 of its machine 2 (table 1), with the drive that section 6.4 implies.

    The paper gives no bandwidth of its cloud storage. One more micro-batch writes and reads 80 checkpoints in 1.1 s, so
    they move at 2 x 80 checkpoints a 1.1 s, taken alike for reads and writes. Compute is the catalogue's.
    """
    what_if = WhatIf(
        model=name,
        gpu="a100-40gb",
        cpu="xeon-8462y",
        ssds=["samsung-pm9a3*4"],
        host_memory_bytes=DRAM,
        sequence_length=LENGTH,
        micro_batch_sizes=(1, SMALL_ROWS, ROWS),
    )
    return with_implied_drive(estimate(what_if), 1)


def with_implied_drive(profile: Profile, ranks: int) -> Profile:
    """The same with a rank's part of the drive that 1.1 s imply."""
    checkpoint = SMALL_ROWS * LENGTH * find("model", "gpt-65b", MODELS).hidden * 2
    bandwidth = 2 * 80 * checkpoint / CHECKPOINT_SECONDS / ranks
    volumes = tuple(
        volume.model_copy(
            update={
                "frontier": tuple(
                    point.model_copy(
                        update={"read": bandwidth / 4 * (point.read > 0), "write": bandwidth / 4 * (point.write > 0)}
                    )
                    for point in volume.frontier
                )
            }
        )
        for volume in profile.machine.volumes
    )
    return profile.model_copy(update={"machine": profile.machine.model_copy(update={"volumes": volumes})})


@cache
def four_gpus(name: str) -> float:
    """TFLOP/s a GPU of a model of GreedySnake's on four GPUs of its machine 1 or 2 (table 1), which share one SSD or
    the drive that section 6.4 implies, and DRAM, of which the system and four processes keep some: 8 FLOP a parameter
    and token, recomputation included, in 16 micro-batches of 2 rows for GPT-65B and of 4 for GPT-175B."""
    small = name == "gpt-65b"
    what_if = WhatIf(
        model=name,
        gpu="rtx-a5000" if small else "a100-40gb",
        cpu="epyc-7302" if small else "xeon-8462y",
        ssds=["samsung-pm9a3"] if small else ["samsung-pm9a3*4"],
        host_memory_bytes=60 * GIB if small else 95 * GB,
        sequence_length=LENGTH,
        micro_batch_sizes=(2,) if small else (4,),
        several=Ranks(4, 1),
    )
    profile = estimate(what_if) if small else with_implied_drive(estimate(what_if), 4)
    plan = solve(profile, SolveRequest(what_if.host_memory_bytes, micro_batches=16, ranks=4), told="step")
    return 8 * plan.model.parameters * plan.prediction.tokens_per_second / 4 / 1e12


@cache
def gpt_65b() -> tuple[Model, Machine]:
    """GPT-65B with the 16.4 s of section 6.4 for the compute of a micro-batch."""
    profile = gpt("gpt-65b")
    return scaled_compute(profile.model, COMPUTE_SECONDS / compute_seconds(profile.model, SMALL_ROWS)), profile.machine


def compute_seconds(model: Model, size: int) -> float:
    """Forward and backward of one micro-batch; the head does both at once."""
    timings = [model.timing(layer.layer_class, size) for layer in model.layers]
    return sum(t.backward_seconds for t in timings) + sum(t.forward_seconds for t in timings[:-1])


@cache
def step_seconds(micro_batches: int, fixed: FixedChoices = FREE) -> float:
    """The program's optimum for GPT-65B on an A100."""
    model, machine = gpt_65b()
    found = program_bound(
        model,
        machine,
        micro_batch_size=SMALL_ROWS,
        micro_batches=micro_batches,
        limits=Limits(host_bytes=DRAM),
        fixed=fixed,
    )
    assert found
    return found.seconds


def utilisation(micro_batches: int, fixed: FixedChoices = FREE) -> float:
    """Throughput relative to the computation roofline."""
    return micro_batches * COMPUTE_SECONDS / step_seconds(micro_batches, fixed)


def plateau(fixed: FixedChoices = FREE) -> float:
    return max(utilisation(n, fixed) for n in LADDER)


def saturation(fixed: FixedChoices = FREE) -> int:
    """The smallest batch, in rows, that reaches 99% of its plateau."""
    enough = 0.99 * plateau(fixed)
    return SMALL_ROWS * next(n for n in LADDER if utilisation(n, fixed) >= enough)


def over_horizontal(name: str, size: int, most: int = 512) -> float:
    """Saturated throughput of the vertical schedule over the best that ZeRO-Infinity's could reach at any overlap.

    Both are relative to compute at their own micro-batch sizes; the vertical schedule is taken to reach its roofline.
    """
    model, machine = gpt_65b() if name == "gpt-65b" else (gpt(name).model, gpt(name).machine)
    seconds = horizontal_seconds(model, machine, micro_batch_size=size, micro_batches=most)
    compute = compute_seconds(model, SMALL_ROWS) * size / SMALL_ROWS
    return seconds / (most * compute)


def vertical_parts(micro_batches: int, size: int = 1) -> tuple[float, float]:
    """Bytes to and from the device that do not grow with the rows of a micro-batch: parameters, gradients."""
    model, _ = gpt_65b()
    to, back = [], []
    for rows in (size, 2 * size):
        found = stages(model, layer_groups(model), work_of(rows, micro_batches))
        to.append(sum(stage.count * stage.h2d_bytes[CONSTANT] for stage in found))
        back.append(sum(stage.count * stage.d2h_bytes[CONSTANT] for stage in found))
    return 2 * to[0] - to[1], 2 * back[0] - back[1]


def parameter_bytes() -> int:
    """ms of the paper: a model's parameters in 16 bits."""
    return 2 * gpt_65b()[0].parameters


def _horizontal(kind: str, micro_batches: int) -> float:
    traffic = horizontal_traffic(gpt_65b()[0], micro_batch_size=ROWS, micro_batches=micro_batches)
    return float(getattr(traffic, kind).link) / parameter_bytes()


for name, billions in (("gpt-30b", 30.0), ("gpt-65b", 65.0), ("gpt-175b", 175.0)):
    figure("GreedySnake", "table 2", f"{name}: parameters, 10^9", billions,
           lambda name=name: find("model", name, MODELS).parameters / 1e9, "{:.1f}")  # fmt: skip
figure("GreedySnake", "3.4", "GPT-65B, 8 x 2048: elements of a checkpoint, 10^8", 1.34,
       lambda: checkpoint_bytes(gpt_65b()[0], ROWS) / 2 / 1e8, "{:.2f}")  # fmt: skip
figure("GreedySnake", "3.4", "GPT-65B: parameters of a block, 10^8", 8.05,
       lambda: gpt_65b()[0].states[1].elements / 1e8, "{:.2f}")  # fmt: skip
figure("GreedySnake", "3.4", "GPT-65B: block over checkpoint", 6,
       lambda: 2 * gpt_65b()[0].states[1].elements / checkpoint_bytes(gpt_65b()[0], ROWS), "{:.1f}")  # fmt: skip
figure("GreedySnake", "3.2, figure 4", "GPT-65B, one checkpoint a block, 8 rows: GiB", 20,
       lambda: 80 * checkpoint_bytes(gpt_65b()[0], ROWS) / GIB, "{:.1f}")  # fmt: skip
figure("GreedySnake", "3.2, figure 4", "two a block, 1.5 times the rows: GiB", 60,
       lambda: 2 * 80 * 1.5 * checkpoint_bytes(gpt_65b()[0], ROWS) / GIB, "{:.1f}")  # fmt: skip
figure("GreedySnake", "1", "horizontal, M = 4: parameters moved, in model sizes", 2 * 4,
       lambda: _horizontal("parameters", 4), "{:.2f}")  # fmt: skip
figure("GreedySnake", "1", "horizontal, M = 4: gradients moved, in model sizes", (2 * 4 - 1) * 2,
       lambda: _horizontal("gradients", 4), "{:.2f}")  # fmt: skip
figure("GreedySnake", "1", "vertical, any M: parameters moved, in model sizes", 2,
       lambda: (vertical_parts(4)[0] - 4 * 51200 * 8192) / parameter_bytes(), "{:.2f}", 0.01,
       "both ends use the tied table, the head once")  # fmt: skip
figure("GreedySnake", "1", "vertical, any M: gradients moved, in model sizes", 2,
       lambda: (vertical_parts(4)[1] + 4 * 51200 * 8192) / parameter_bytes(), "{:.2f}", 0.03,
       "the tied table's come from both ends, and the head's return to be added")  # fmt: skip
figure("GreedySnake", "6.4", "GPT-65B, a micro-batch on an A100: seconds of compute", COMPUTE_SECONDS,
       lambda: compute_seconds(gpt("gpt-65b").model, SMALL_ROWS), "{:.1f}", 0.36,
       "the catalogue has what a layer can reach on this GPU, the paper's system 0.5 of its products; rows are "
       "assumed")  # fmt: skip
figure("GreedySnake", "6.3", "plateau without delayed updates over that with (\"the same\")", 1,
       lambda: plateau(FixedChoices(recompute="all", delay_ratio=0.0)) / plateau(), "{:.3f}")  # fmt: skip
figure("GreedySnake", "6.4", "plateau with everything on ssd over the best (\"similar\")", 1,
       lambda: plateau(EVERYTHING_ON_SSD) / plateau(), "{:.3f}", 0.01)  # fmt: skip
_IDEAL = (
    "ours lets all of a pass overlap, in micro-batches of 2 rows; the paper does not say how many ZeRO-Infinity had: "
    "with 8, such an overlap would hide all (0.92)"
)
figure("GreedySnake", "6.2", "GPT-65B, an A100: plateau over ZeRO-Infinity's", 1.96,
       lambda: over_horizontal("gpt-65b", SMALL_ROWS), "{:.2f}", 0.15, _IDEAL)  # fmt: skip
figure("GreedySnake", "6.2", "GPT-175B, an A100: plateau over ZeRO-Infinity's", 2.53,
       lambda: over_horizontal("gpt-175b", SMALL_ROWS), "{:.2f}", 0.1,
       "as above; and compute is the catalogue's, faster than the paper's system, so that more of the I/O is "
       "seen")  # fmt: skip
figure("GreedySnake", "6.2", "GPT-65B, four A5000: TFLOP/s a GPU", 63.1, lambda: four_gpus("gpt-65b"), "{:.1f}", 0.2,
       "both fit; the catalogue's compute is faster than the paper's system, and its batch is not said")  # fmt: skip
figure("GreedySnake", "6.2", "GPT-175B, four A100: TFLOP/s a GPU", 128.3, lambda: four_gpus("gpt-175b"), "{:.1f}", 0.6,
       "as above; and the four are taken to share the drive that 6.4 implies for one, which hides behind "
       "compute")  # fmt: skip


# MemAscend.


@cache
def needs(name: str, ways: Ways = ZERO_INFINITY, tokens: int = 0, processes: int = 1) -> HostNeeds:
    """Host memory of one of MemAscend's models."""
    tensors = tensors_of_shape(find("model", name, MODELS))
    return zero_infinity_memory(tensors, ways, checkpoint_tokens=tokens, processes=processes)


def total(name: str, ways: Ways = ZERO_INFINITY, tokens: int = 0, processes: int = 1) -> float:
    return needs(name, ways, tokens, processes).total / GIB


def reduction(name: str, ways: Ways = ZERO_INFINITY) -> float:
    return saved(needs(name, MEMASCEND).total, needs(name, ways).total)


def mean_reduction(ways: Ways = ZERO_INFINITY) -> float:
    return 100 * sum(reduction(name, ways) for name in MEMASCENDS_MODELS) / len(MEMASCENDS_MODELS)


def buffers(name: str, ways: Ways = ZERO_INFINITY) -> float:
    return needs(name, ways).parameter_buffers / GIB


def pool_reduction(name: str) -> float:
    return 100 * saved(needs(name, MEMASCEND).parameter_buffers, needs(name).parameter_buffers)


def most_tokens(name: str, ways: Ways, step: int = 4096) -> int:
    """The most tokens a process, doubling, for which two GPUs' training stays below 128 GiB."""
    tokens = step
    while needs(name, ways, 2 * tokens, 2).total <= LIMIT:
        tokens *= 2
    return tokens


def io_reduction() -> float:
    """What bf16 optimizer states save of a step's ssd traffic, in percent; of any model, for all is in proportion."""
    model = gpt_65b()[0]
    each = [
        horizontal_traffic(model, micro_batch_size=1, micro_batches=1, optimizer_bytes=nbytes).total.ssd
        for nbytes in (2, 4)
    ]
    return 100 * (1 - each[0] / each[1])


_QWEN, _LLAMA, _LARGE = "qwen2.5-7b", "llama-3.1-8b", "qwen2.5-32b"
for name, where, by_class, one in ((_QWEN, "V-A", 2.46, 9.14), (_LARGE, "III-A", 3.81, 13.05)):
    note = "the paper says Llama 3 8B, of hidden size 5,120: these are Qwen2.5-32B's" if name == _LARGE else ""
    figure("MemAscend", where, f"{name}: buffers of one size, GiB", one,
           lambda name=name: buffers(name), "{:.2f}", reason=note)  # fmt: skip
    figure("MemAscend", where, f"{name}: buffers by class, GiB", by_class,
           lambda name=name: buffers(name, MEMASCEND), "{:.2f}", reason=note)  # fmt: skip
figure("MemAscend", "III-A", f"{_LLAMA}: buffers of one size, GiB", 13.05,
       lambda: buffers(_LLAMA), "{:.2f}", 0.33,
       "its 13.05 are Qwen2.5-32B's, above; this model's hidden size is 4,096")  # fmt: skip
figure("MemAscend", "III-A", f"{_LARGE}: pools smaller by, %", 70.82,
       lambda: pool_reduction(_LARGE), "{:.2f}")  # fmt: skip
figure("MemAscend", "VI-B1, figure 11", "four models: pools smaller by, %", 72.71,
       lambda: sum(map(pool_reduction, MEMASCENDS_MODELS)) / 4, "{:.2f}")  # fmt: skip
figure("MemAscend", "III-C", "8B: gradient buffer, GiB", 29.91,
       lambda: needs(_LLAMA).gradient_buffer / GIB, "{:.2f}")  # fmt: skip
figure("MemAscend", "III-C", "8B: gradient buffer in the overflow check, GiB", 67.30,
       lambda: (needs(_LLAMA).gradient_buffer + needs(_LLAMA).overflow_check) / GIB, "{:.2f}")  # fmt: skip
figure("MemAscend", "V-A", f"{_QWEN}: gradient buffer, GiB", 28.37,
       lambda: needs(_QWEN).gradient_buffer / GIB, "{:.2f}")  # fmt: skip
figure("MemAscend", "V-A", f"{_QWEN}: overflow check, GiB", 35.46,
       lambda: needs(_QWEN).overflow_check / GIB, "{:.2f}")  # fmt: skip
figure("MemAscend", "V-A", f"{_QWEN}: optimizer and swap-out buffers, GiB", 11.17,
       lambda: needs(_QWEN).optimizer_buffers / GIB, "{:.2f}",
       reason="an input: 22 bytes an element of the largest tensor")  # fmt: skip
figure("MemAscend", "V-A", f"{_QWEN}: page-locking's overhead, GiB", 24.90,
       lambda: (needs(_QWEN).page_locking + needs(_QWEN).processes) / GIB, "{:.2f}",
       reason="each buffer rounded by itself, and the 1.63 GiB that are left without rounding")  # fmt: skip
for name, theirs, mine in (
    (_LLAMA, 91.06, 44.71), (_QWEN, 109.06, 43.67), ("qwen2.5-14b", 174.5, 76.1), (_LARGE, 322.3, 143.6),
):  # fmt: skip
    figure("MemAscend", "VI-B2, figure 13", f"{name}: ZeRO-Infinity's peak, GiB", theirs,
           lambda name=name: total(name), "{:.2f}")  # fmt: skip
    figure("MemAscend", "VI-B2, figure 13", f"{name}: MemAscend's peak, GiB", mine,
           lambda name=name: total(name, MEMASCEND), "{:.2f}")  # fmt: skip
figure("MemAscend", "VI-B2", "four models in fp16: peaks lower by, %", 55.7, mean_reduction, "{:.1f}")
figure("MemAscend", "VI-B3, figure 17", "four models in bf16: peaks lower by, %", 25.19,
       lambda: mean_reduction(BF16), "{:.2f}")  # fmt: skip
figure("MemAscend", "VI-B3, figure 16", "bf16 optimizer: I/O lower by, %", 58,
       io_reduction, "{:.1f}",
       reason="16 bytes a parameter instead of 38: no master copy, and gradients that stay on host")  # fmt: skip
for name, where, way, tokens, stated in (
    (_LLAMA, "figure 14a", "ZeRO-Infinity", 4096, 94.88), (_LLAMA, "figure 14a", "ZeRO-Infinity", 131072, 156.88),
    (_LLAMA, "figure 14a", "MemAscend", 4096, 48.67), (_LLAMA, "figure 14a", "MemAscend", 131072, 110.67),
    (_LARGE, "figure 14d", "ZeRO-Infinity", 4096, 332.12), (_LARGE, "figure 14d", "ZeRO-Infinity", 131072, 580.12),
    (_LARGE, "figure 14d", "MemAscend", 4096, 150.51), (_LARGE, "figure 14d", "MemAscend", 131072, 305.5),
    (_LLAMA, "figure 15a", "ZeRO-Infinity", 96 * 4096, 348.91), (_LLAMA, "figure 15a", "MemAscend", 96 * 4096, 238.69),
):  # fmt: skip
    ways = MEMASCEND if way == "MemAscend" else ZERO_INFINITY
    what = f"{tokens // 4096} x 4096" if where == "figure 15a" else f"{tokens}"
    figure("MemAscend", f"VI-B2, {where}", f"{name}, two GPUs, {what} tokens: {way}'s peak, GiB", stated,
           lambda name=name, ways=ways, tokens=tokens: total(name, ways, tokens, 2), "{:.2f}", 0.01)  # fmt: skip
_CLOSE_TO_THE_LIMIT = "ours puts twice as much at 124.7 GiB: what else the machine holds decides"
for way, ways, stated in (("ZeRO-Infinity", ZERO_INFINITY, 16384), ("MemAscend", MEMASCEND, 131072)):
    figure("MemAscend", "V-B, figure 7", f"{_QWEN}, two GPUs in 128 GiB: {way}'s longest context", stated,
           lambda ways=ways: most_tokens(_QWEN, ways), "{:.0f}", 1.0 if ways == ZERO_INFINITY else 0.0,
           _CLOSE_TO_THE_LIMIT if ways == ZERO_INFINITY else "")  # fmt: skip
    figure("MemAscend", "V-C, figure 8", f"{_QWEN}, two GPUs in 128 GiB: {way}'s largest batch", stated // 4096,
           lambda ways=ways: most_tokens(_QWEN, ways) / 4096, "{:.0f}", 1.0 if ways == ZERO_INFINITY else 0.0,
           _CLOSE_TO_THE_LIMIT if ways == ZERO_INFINITY else "")  # fmt: skip
for name, stated, within in (("llama-3.2-1b", 39.04, 0.36), ("llama-3.2-3b", 62.97, 0.17), (_LLAMA, 91.76, 0.01)):
    figure("MemAscend", "table I", f"{name[:-1].split('-')[-1]}B: ZeRO-Infinity's peak, GiB", stated,
           lambda name=name: total(name), "{:.2f}", within,
           "" if name == _LLAMA else "the paper does not name the model; the smaller it is, the more is missing, as if "
           "more small blocks were in flight")  # fmt: skip


# PyAO.

PYAO_LENGTH, NODE = 512, 64 * GIB
"""Tokens of a row, and a node's memory (6.1)."""
EVERYTHING = "all"
"""The rung that keeps all that autograd does but the mask."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One step of one micro-batch."""

    peaks: Peaks
    seconds: float
    moved_seconds: float
    """What the saved activations take on both ways of the link."""


@cache
def rtx_4070(name: str, rows: int, several: Ranks = ONE_RANK) -> Profile:
    """A model on a node of PyAO's (6.1), whose blocks can also keep everything, and whose head makes the logits of a
    whole micro-batch at once, as PyTorch's own loss does."""
    what_if = WhatIf(
        model=name,
        rows="any",  # the paper does not say that none is padded
        gpu="rtx-4070",
        ssds=["samsung-990-pro"],
        host_memory_bytes=NODE,
        sequence_length=PYAO_LENGTH,
        micro_batch_sizes=(rows,),
        several=several,
        networks=["1gbe"] if several.nodes > 1 else [],
    )
    profile = estimate(what_if)
    costs = costs_of(what_if, rows)
    embedding, block, _ = profile.model.classes
    timing = block.timings[0]
    mask = 2 * PYAO_LENGTH
    tokens = rows * PYAO_LENGTH
    nbytes = timing.saved_activation_bytes // tokens - mask
    everything = costs.rung(Choice(EVERYTHING, {"everything": nbytes}, 0, 0, 0, 0, 0), timing)
    timing = timing.model_copy(update={"rungs": (timing.rung(PAPER), everything)})
    head = embedding.model_copy(update={"name": "head", "timings": (costs.head(),)})
    classes = (embedding, block.model_copy(update={"timings": (timing,)}), head)
    model = profile.model.model_copy(update={"classes": classes, "head_chunk_tokens": None})
    return profile.model_copy(update={"model": model})


@cache
def trained(name: str, rows: int, rung: str, tier: SavedTier) -> Trained:
    """A step of one micro-batch with all parameters on the device and all optimizer states on host (3.3, 6.1), whose
    blocks keep their activations by one rung on one tier; on host all but those of the last block, which its backward
    uses at once (4.2)."""
    profile = rtx_4070(name, rows)
    model, machine = profile.model, profile.machine
    last = 0.0 if tier == "device" else 1 / len(model.trained_blocks)
    saved = [Saved(rung=rung, tier=tier, share=1 - last)]
    saved += [Saved(rung=rung, tier="device", share=last)] if last else []
    decision = decide(
        model, optimizer=1.0, parameters=1.0, checkpoints=1.0, on_device=1.0, micro_batches=1, micro_batch_size=rows,
        saved=saved, chunk=1 << 20,
    )  # fmt: skip
    schedule = build_schedule(model, decision)
    moved = (len(model.trained_blocks) - 1) * model.timing("block", rows).rung(rung).kept_bytes if last else 0
    return Trained(
        predict_peaks(schedule, model, decision),
        simulate(schedule.steady, model, machine, rows).seconds,
        moved / machine.h2d_bandwidth + moved / machine.d2h_bandwidth,
    )


def zero_2(name: str, rows: int) -> Trained:
    """The paper's baseline: activations stay on the device."""
    return trained(name, rows, EVERYTHING, "device")


def pyao(name: str, rows: int) -> Trained:
    """The paper's way: what its rule does not recompute goes to host."""
    return trained(name, rows, PAPER, "host")


def largest(name: str, way: Callable[[str, int], Trained]) -> int:
    """The most rows of a micro-batch that the card has room for."""
    rows = 1
    while way(name, rows + 1).peaks.device <= rtx_4070(name, rows + 1).machine.device_memory_bytes:
        rows += 1
    return rows


def longer_with_everything(name: str, rows: int) -> float:
    """By how many percent a step is longer that offloads what PyAO's rule recomputes (8.3)."""
    return 100 * (trained(name, rows, EVERYTHING, "host").seconds / pyao(name, rows).seconds - 1)


def shorter_by_overlap(name: str, rows: int) -> float:
    """By how many percent a step of PyAO's is shorter than one in which no activation is copied beside compute: one
    that leaves them on the device, and the seconds of the copies (8.4)."""
    in_turn = trained(name, rows, PAPER, "device").seconds + pyao(name, rows).moved_seconds
    return 100 * (1 - pyao(name, rows).seconds / in_turn)


_OPT_1, _GPT_2, _LLAMA_1 = "opt-1.3b", "gpt2-large", "llama-3.2-1b"
_ON_DEVICE = "ours has the gradients of one layer at a time on the device, and no buffers of DeepSpeed's"
_ROWS = "as above; and ours fills the card but for 1 GiB"
for name, rows, baseline, way, stated, within in (
    (_OPT_1, 4, True, "ZeRO-2", 8.7, 0.2), (_OPT_1, 8, False, "PyAO", 8.0, 0.4),
    (_GPT_2, 4, True, "ZeRO-2", 10.5, 0.2), (_GPT_2, 4, False, "PyAO", 5.4, 0.4),
):  # fmt: skip
    figure("PyAO", "6.2", f"{name}, {rows} rows: {way}'s peak of device memory, GB", stated,
           lambda name=name, rows=rows, way=zero_2 if baseline else pyao: way(name, rows).peaks.device / GB,
           "{:.1f}", within, _ON_DEVICE)  # fmt: skip
figure("PyAO", "6.2", f"{_GPT_2}, 4 rows: ZeRO-2's peak of device memory over PyAO's", 1.94,
       lambda: zero_2(_GPT_2, 4).peaks.device / pyao(_GPT_2, 4).peaks.device, "{:.2f}", 0.3,
       "as above: what both of the paper's systems have beside activations makes its ratio smaller")  # fmt: skip
for name, baseline_rows, pyao_rows in ((_OPT_1, 4, 10), (_GPT_2, 3, 10), (_LLAMA_1, 2, 5)):
    for way, stated in (("ZeRO-2", baseline_rows), ("PyAO", pyao_rows)):
        figure("PyAO", "6.2", f"{name}: {way}'s largest micro-batch, rows", stated,
               lambda name=name, way=zero_2 if way == "ZeRO-2" else pyao: largest(name, way), "{:.0f}", 1.5,
               _ROWS)  # fmt: skip
figure("PyAO", "8.1", f"{_OPT_1}, 8 rows: PyAO's host memory, GB", 28.66,
       lambda: pyao(_OPT_1, 8).peaks.host / GB, "{:.2f}", 0.4,
       "ours, alone, has all optimizer states, 15.8 GB, of which each of the paper's five nodes has a fifth; what else "
       "fills its memory (the text at hand lacks its table 1) ours does not have")  # fmt: skip
figure("PyAO", "6.3", f"{_GPT_2}, 4 rows: PyAO's host memory over ZeRO-2's", 1.32,
       lambda: pyao(_GPT_2, 4).peaks.host / zero_2(_GPT_2, 4).peaks.host, "{:.2f}", 0.15,
       "ours, alone, has all optimizer states, so what it starts from is larger")  # fmt: skip
_OF_WHICH = "the paper does not say of which model"
_GELU = "as above; GELU by its formula keeps five values for one, and their copies cannot be hidden"
for name, rows, gap in ((_OPT_1, 10, 0.15), (_GPT_2, 10, 8.0), (_LLAMA_1, 5, 0.75)):
    figure("PyAO", "8.3", f"{name}, {rows} rows: a step longer where everything is offloaded, %", 7,
           lambda name=name, rows=rows: longer_with_everything(name, rows), "{:.1f}", gap,
           _GELU if name == _GPT_2 else _OF_WHICH)  # fmt: skip
for name, rows, gap in ((_OPT_1, 10, 0.5), (_GPT_2, 10, 0.45), (_LLAMA_1, 5, 0.5)):
    figure("PyAO", "8.4", f"{name}, {rows} rows: a step shorter by copies beside compute, %", 19,
           lambda name=name, rows=rows: shorter_by_overlap(name, rows), "{:.1f}", gap,
           f"{_OF_WHICH}; ours has two copy engines, its card one")  # fmt: skip


# 10Cache.

figure("10Cache", "1", "GPT-175B in 16 bits: GiB", 326,
       lambda: 2 * find("model", "gpt-175b", MODELS).parameters / GIB, "{:.0f}")  # fmt: skip


FIVE, ENOUGH_ROWS = Ranks(5, 5), 256
"""PyAO's cluster (6.1), and what each of its nodes has done at the end of figure 6, taken as rows of 512 tokens."""


def zero_2_seconds(name: str, rows: int, way: Callable[[str, int], Trained]) -> float:
    """ENOUGH_ROWS on each node, exchanging behind each micro-batch as ZeRO-2 does: 2 elements of 16 bits a parameter,
    for its gradients and its parameters, but for a node's own fifth (6.1)."""
    profile = rtx_4070(name, rows, FIVE)
    assert profile.machine.network
    moved = 2 * 2 * profile.model.parameters * 4 / 5 / profile.machine.network.gather_bandwidth
    return ENOUGH_ROWS / rows * (way(name, rows).seconds + moved)


@cache
def vertical_seconds(name: str) -> float:
    """The same in one step of this planner's best plan, of micro-batches of 8 rows."""
    profile = rtx_4070(name, 8, FIVE)
    request = SolveRequest(NODE // 2, micro_batches=ENOUGH_ROWS // 8, ranks=5)
    return solve(profile, request, told="step").prediction.step_seconds


_ONCE = "ours exchanges once, for one update of 5 x 256 rows, beside compute; ZeRO-2 for an update of each micro-batch"
for name, stated, rows, most in ((_OPT_1, 2.0, 4, 10), (_GPT_2, 3.63, 3, 10), (_LLAMA_1, 2.24, 2, 5)):
    figure("PyAO", "6.4, figure 6", f"{name}, five nodes on 1 GbE: ZeRO-2's time to 256 over PyAO's", stated,
           lambda name=name, rows=rows, most=most: zero_2_seconds(name, rows, zero_2)
           / zero_2_seconds(name, most, pyao),
           "{:.2f}", 0.3, "the rows of a micro-batch, and the seconds of moving them, decide; what else the paper's "
           "step has we do not know")  # fmt: skip
    figure("PyAO", "6.4, figure 6", f"{name}, five nodes on 1 GbE: ZeRO-2's time to 256 over this planner's", stated,
           lambda name=name, rows=rows: zero_2_seconds(name, rows, zero_2) / vertical_seconds(name), "{:.1f}", 30.0,
           _ONCE)  # fmt: skip
