"""Timeline: when each operation of a graph ran, predicted by the simulator or measured by the executor.

Predicted and measured timelines are one type, so that they lie over each other op by op. What is read off a single
timeline is here: how long each resource works, and which wait of an operation ended last.
"""

from dataclasses import dataclass, field

from .ops import RESOURCES, Graph, Resource

CLOCK_SECONDS = 1e-8
"""What times are good to: a trace rounds a start and a length each to a nanosecond."""


def lanes_of(graph: Graph) -> tuple[Resource, ...]:
    """The resources to tell of a graph: all, but for a network that it does not use."""
    uses_network = any(op.resource == "network" for op in graph.ops)
    return tuple(resource for resource in RESOURCES if resource != "network" or uses_network)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of every op of `graph`, in seconds from the start of the step; index i is graph.ops[i]."""

    graph: Graph
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    began: float = field(default=0.0, compare=False)
    """When the step began, of the clock of who measured it (time.perf_counter)."""
    met: float | None = None
    """When all of several ranks had ended the step, in seconds from its start."""

    @property
    def seconds(self) -> float:
        return max(self.ends, default=0.0)

    def busy(self) -> dict[Resource, float]:
        """Resource -> seconds in which at least one of its ops was running."""
        """Of the network only where there is one."""
        spans: dict[Resource, list[tuple[float, float]]] = {resource: [] for resource in lanes_of(self.graph)}
        for op, start, end in zip(self.graph.ops, self.starts, self.ends, strict=True):
            spans[op.resource].append((start, end))
        total: dict[Resource, float] = {}
        for resource, pieces in spans.items():
            covered, until = 0.0, 0.0
            for start, end in sorted(pieces):
                if end > until:
                    covered += end - max(start, until)
                    until = end
            total[resource] = covered
        return total

    def last_wait(self, index: int) -> int | None:
        """Of the ops that op `index` waits for, the one that ended last; None for one that waits for nothing."""
        waits = self.graph.ops[index].waits
        return max(waits, key=lambda wait: (self.ends[wait], wait)) if waits else None
