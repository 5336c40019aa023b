"""What the parts of a step take of each other: steps with some kinds of operations only, beside what is simulated.

It profiles, solves one plan of one micro-batch and runs it with most of each step left out, in turns: compute alone,
updates alone, reads, writes, two or three of them, everything. The simulator gets the seconds that each kind took
alone, in the same minutes, so that what it gives for the others tells how well it knows what they leave each other, and
not how far the machine has gone from its profile. What such steps compute means nothing, and nobody checks it.

    python benchmarks/ablation.py --work DIR [--only small] [--host-memory 2GiB] [--precision fp32] [--shorten 2]
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

from one_plan import OnePlan, add_options, one_plan

from commands import end_on_sigterm
from ssdplan.executor.device.interface import Action
from ssdplan.executor.model.layers import Layers
from ssdplan.executor.runtime.operations import Operations
from ssdplan.executor.runtime.runner import OverlappedRunner
from ssdplan.executor.store import Store
from ssdplan.planner.predict import simulator
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.graph.ops import Graph, Op
from ssdplan.plans.graph.timeline import Timeline

KINDS = {"compute": "compute", "cpu": "updates", "read": "reads", "write": "writes"}
"""Resource -> what runs there. Copies to and from a device are part of every step."""
ALL = tuple(KINDS.values())
PARTS = (
    *((kind,) for kind in ALL),
    ("reads", "writes"),
    ("compute", "updates"),
    ("compute", "reads"),
    ("compute", "writes"),
    ("compute", "reads", "writes"),
    ("updates", "reads"),
    ("updates", "writes"),
    ("updates", "reads", "writes"),
    ALL,
)
Parts = tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, shape="small", host_memory="900MiB")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="steps of each part, in turns [3]")
    given = parser.parse_args()
    end_on_sigterm()
    with one_plan(given, micro_batches=1) as one:
        steps = Ablated(given.rounds)
        steps.run(one)
        print(table(one.plan, steps.graph, steps.seconds))


class Ablated:
    """A run of which each step does some kinds of operations only, but those before its graph comes a second time."""

    graph: Graph

    def __init__(self, rounds: int) -> None:
        self._left = [parts for _ in range(rounds) for parts in PARTS]
        self._steps = 2 + len(self._left)
        self._last = ""
        self.seconds: dict[Parts, list[float]] = defaultdict(list)

    def run(self, one: OnePlan) -> None:
        run, ended = OverlappedRunner.run, Layers.end_step

        def some(runner: OverlappedRunner, graph: Graph, actions: Sequence[Action]) -> Timeline:
            again, self._last = graph.name == self._last, graph.name
            if not again or not self._left:
                return run(runner, graph, actions)
            self.graph, parts = graph, self._left.pop(0)
            chosen = [action if is_of(op, parts) else _nothing for op, action in zip(graph.ops, actions, strict=True)]
            timeline = run(runner, graph, chosen)
            self.seconds[parts].append(timeline.seconds)
            return timeline

        def write(operations: Any, on_host: Any, offset: int, nbytes: int, address: int) -> None:
            store = operations._storage()
            store.write(offset, nbytes, address, [0] * len(store.extents(offset, nbytes)))

        def loss(layers: Any) -> float:
            layers._losses = dict.fromkeys(range(len(layers._micro_batches)), 1.0)
            return ended(layers)

        one.run(
            self._steps,
            (OverlappedRunner, "run", some),
            (Operations, "_write_summed", write),
            (Operations, "_overflowed", _nothing),
            (Store, "require", _nothing),
            (Store, "_require", _nothing),
            (Layers, "end_step", loss),
        )


def _nothing(*_: object) -> None:
    pass


def is_of(op: Op, parts: Iterable[str]) -> bool:
    """Whether a step of these parts runs `op`."""
    return KINDS.get(op.resource, "copies") in (*parts, "copies")


def simulated(plan: Plan, graph: Graph, parts: Parts, times: Mapping[str, float]) -> float:
    """Seconds of a step of these parts, when each kind takes so many times as long as the profile says."""
    seconds_alone = simulator._seconds_alone

    def some(ops: tuple[Op, ...], *others: Any) -> tuple[list[float], list[float]]:
        alone, longer = seconds_alone(ops, *others)
        factors = [times.get(KINDS.get(op.resource, ""), 1.0) if is_of(op, parts) else 0.0 for op in ops]
        return (
            [a * b for a, b in zip(alone, factors, strict=True)],
            [a * b for a, b in zip(longer, factors, strict=True)],
        )

    with patch.object(simulator, "_seconds_alone", some):
        return simulator.simulate(graph, plan.model, plan.machine, plan.decision.micro_batch_size).seconds


def table(plan: Plan, graph: Graph, seconds: Mapping[Parts, Sequence[float]]) -> str:
    """A line for each part: the median of its steps beside what is simulated."""
    times: dict[str, float] = {}
    lines = []
    present = {KINDS.get(op.resource) for op in graph.ops}
    for parts in PARTS:
        if not present.issuperset(parts):
            continue
        median = statistics.median(seconds[parts])
        expected = simulated(plan, graph, parts, times)
        if len(parts) == 1:
            times[parts[0]] = median / expected
        what = "by the profile" if len(parts) == 1 else "simulated"
        lines.append(
            f"{' + '.join(parts):36} {median:7.2f} s  {what:14} {expected:7.2f} s  {median / expected - 1:+.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
