"""ZO-Offloading's table 1 beside what the exact model of a plan without gradients takes, row by row, and its table 2.

`python -m tests.planner.zeroth_order_table` prints what docs/papers.md has; test_papers.py holds both to the bounds.
Memory is the peak of the device for one row of 2048 tokens, all parameters in host memory; the throughput that of the
simulator for an A100 of 80 GB by the catalogue. MiB here, "MB" of nvidia-smi, which are MiB, in the paper.
"""

from dataclasses import dataclass
from functools import cache

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.predict.peaks import predict_peaks
from ssdplan.planner.predict.simulator import simulate, simulated_seconds
from ssdplan.planner.solve import piece_elements
from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.documents.state_layout import Precision
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.schedule.build import build_schedule
from tests.made.decisions import decide

MIB, GB = 1 << 20, 10**9
LENGTH = 2048
HOME_ELEMENTS = 1 << 24
"""Of the ranges in which parameters live: finer ones are more to build, and take the same bytes."""


@dataclass(frozen=True, slots=True)
class Row:
    """Of the paper's table 1: MB and tokens a second, in fp32 and fp16; and GB that the public implementation takes in
    fp16, where it says so."""

    model: str
    fp32: tuple[float, float]
    fp16: tuple[float, float]
    public: float | None = None


ROWS = (
    Row("opt-125m", (2941, 13074), (1661, 31058)),
    Row("opt-1.3b", (4413, 1954), (2651, 6788)),
    Row("opt-2.7b", (5261, 1087), (3111, 4227)),
    Row("opt-6.7b", (8329, 499), (4539, 2455)),
    Row("opt-13b", (12113, 270), (6445, 1340), 6.2),
    Row("opt-30b", (18879, 122), (10369, 597), 8.9),
    Row("opt-66b", (29937, 40), (14143, 273), 12.1),
    Row("opt-175b", (49203, 14), (24667, 37), 18.0),
)


ABLATION = {"opt-1.3b": (0.57, 0.80), "opt-2.7b": (0.52, 0.78), "opt-6.7b": (0.45, 0.74)}
"""Of the paper's table 2, in fp32: the throughput without overlap, and without the efficient update, in proportion."""


@cache
def profile_of(model: str, precision: Precision) -> Profile:
    """The model on an A100, by the catalogue."""
    return estimate(
        WhatIf(
            model=model,
            rows="any",  # samples of the paper's data are as long as they are
            gpu="a100-80gb",
            ssds=("samsung-990-pro:4TB",),
            host_memory_bytes=1 << 40,
            precision=precision,
            sequence_length=LENGTH,
            micro_batch_sizes=(1,),
        )
    )


def decision_of(
    profile: Profile,
    *,
    in_turns: bool = False,
    pieces: bool = False,
    by_rows: bool = False,
    on_host: float = 1.0,
    written_every: int = 1,
) -> Decision:
    """One row, one direction, nothing kept on the device between its uses."""
    piece = piece_elements(profile.model) if pieces else 0
    return decide(
        profile.model,
        micro_batches=1,
        parameters=on_host,
        zeroth_order=ZerothOrder(in_turns=in_turns, written_every=written_every, piece_elements=piece, by_rows=by_rows),
        checkpoints=1.0,
        chunk=HOME_ELEMENTS,
    )


def device_mib(
    model: str, precision: Precision, *, in_turns: bool = False, pieces: bool = False, by_rows: bool = False
) -> float:
    """The peak of the device."""
    profile = profile_of(model, precision)
    decision = decision_of(profile, in_turns=in_turns, pieces=pieces, by_rows=by_rows)
    return predict_peaks(build_schedule(profile.model, decision), profile.model, decision).device / MIB


def host_gib(model: str, precision: Precision, *, pieces: bool = False) -> float:
    """The peak of host memory where all parameters live on SSD."""
    profile = profile_of(model, precision)
    decision = decision_of(profile, in_turns=not pieces, pieces=pieces, on_host=0.0)
    peaks = predict_peaks(build_schedule(profile.model, decision), profile.model, decision)
    return (peaks.host + peaks.bookkeeping) / (1 << 30)


def tokens_per_second(
    model: str, precision: Precision, *, in_turns: bool = False, pieces: bool = False, by_rows: bool = False
) -> float:
    """Of the simulator, with both copies at once unless told otherwise."""
    profile = profile_of(model, precision)
    decision = decision_of(profile, in_turns=in_turns, pieces=pieces, by_rows=by_rows)
    schedule = build_schedule(profile.model, decision)
    return LENGTH / simulated_seconds(schedule, profile.model, profile.machine, decision)


UNTIED = ("llama-3.1-8b", "qwen2.5-7b", "mistral-7b", "llama-3.1-70b")
"""Whose table of token embeddings may come by rows."""


def uploaded_gb(model: str, *, by_rows: bool) -> float:
    """GB that a step moves to the device, in fp16."""
    profile = profile_of(model, "fp16")
    return build_schedule(profile.model, decision_of(profile, by_rows=by_rows)).traffic("steady")["h2d"] / GB


def host_seconds(model: str) -> float:
    """That host works in a step for a table by rows, in fp16."""
    profile = profile_of(model, "fp16")
    steady = build_schedule(profile.model, decision_of(profile, by_rows=True)).steady
    return simulate(steady, profile.model, profile.machine, 1).busy()["cpu"]


def row_by_rows(model: str) -> str:
    """Of the table of models whose token embeddings come whole or by rows, as docs/papers.md has it."""
    cells = [f"{uploaded_gb(model, by_rows=way):.2f}" for way in (False, True)]
    cells += [f"{device_mib(model, 'fp16', by_rows=way):,.0f}" for way in (False, True)]
    cells += [f"{tokens_per_second(model, 'fp16', by_rows=way):,.0f}" for way in (False, True)]
    return f"| `{model}` | {' | '.join(cells)} | {host_seconds(model):.2f} |"


def ablation(model: str, precision: Precision) -> tuple[float, float]:
    """The share of the throughput that stays without overlap, where one operation runs at a time; and where updates
    have a pass of their own, which uploads each block once more and sends it back (table 2 of the paper)."""
    profile = profile_of(model, precision)
    fused = build_schedule(profile.model, decision_of(profile, in_turns=False))
    apart = build_schedule(profile.model, decision_of(profile, in_turns=False, written_every=2))
    whole, forwards, updates = (
        simulate(graph, profile.model, profile.machine, 1) for graph in (fused.steady, apart.unwritten, fused.flush)
    )
    return whole.seconds / sum(whole.busy().values()), whole.seconds / (forwards.seconds + updates.seconds)


def main() -> None:
    ways: tuple[dict[str, bool], ...] = ({}, {"in_turns": True}, {"pieces": True})
    both = "both copies | in turns | in pieces"
    print(f"| | fp32: paper | {both} | fp16: paper | public | {both} | tokens/s | in turns, in pieces, fp16 |")
    print("|---" * 12 + "|")
    for row in ROWS:
        cells = [f"`{row.model}`"]
        for precision, (mib, _) in (("fp32", row.fp32), ("fp16", row.fp16)):
            cells.append(f"{mib:,.0f}")
            if precision == "fp16":
                cells.append(f"{row.public * GB / MIB:,.0f}" if row.public else "-")
            cells += [f"{device_mib(row.model, precision, **way):,.0f}" for way in ways]
        rates = [f"{tokens_per_second(row.model, precision):,.0f} ({paper:,.0f})"
                 for precision, (_, paper) in (("fp32", row.fp32), ("fp16", row.fp16))]  # fmt: skip
        cells.append(", ".join(rates))
        whole, *leaner = (tokens_per_second(row.model, "fp16", **way) for way in ways)
        cells.append(", ".join(f"{each / whole:.2f}" for each in leaner))
        print(f"| {' | '.join(cells)} |")
    print("| | no overlap: paper | fp32 | fp16 | no fused update: paper | fp32 | fp16 |")
    print("|---|---|---|---|---|---|---|")
    for name, (overlap, update) in ABLATION.items():
        (first, second), (third, fourth) = (ablation(name, precision) for precision in ("fp32", "fp16"))
        print(f"| `{name}` | {overlap} | {first:.2f} | {third:.2f} | {update} | {second:.2f} | {fourth:.2f} |")
    print("| | uploaded, GB: whole | by rows | device, MiB: whole | by rows | tokens/s: whole | by rows | host, s |")
    print("|---|---|---|---|---|---|---|---|")
    for model in UNTIED:
        print(row_by_rows(model))
    print(f"opt-175b in fp16 from ssd: {host_gib('opt-175b', 'fp16'):.1f} GiB of host memory")


if __name__ == "__main__":
    main()
