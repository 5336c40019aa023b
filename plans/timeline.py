"""Timeline: when each operation of a graph ran, predicted by the simulator or measured by the executor; and traces.

Owns the Chrome trace format (trace.json, opens in Perfetto). Predicted and measured timelines are one type, so that
they lie over each other op by op.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from .schedule import RESOURCES, Graph, Resource


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of every op of `graph`, in seconds from the start of the step; index i is graph.ops[i]."""

    graph: Graph
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return max(self.ends, default=0.0)

    def busy(self) -> dict[Resource, float]:
        """Resource -> seconds in which at least one of its ops was running."""
        spans: dict[Resource, list[tuple[float, float]]] = {resource: [] for resource in RESOURCES}
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


def write_trace(timeline: Timeline, path: Path, *, name: str) -> None:
    """Write `timeline` as a Chrome trace: one track a resource, microseconds."""
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name}},
        *(
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": resource}}
            for tid, resource in enumerate(RESOURCES, 1)
        ),
    ]
    for op, start, end in zip(timeline.graph.ops, timeline.starts, timeline.ends, strict=True):
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": RESOURCES.index(op.resource) + 1,
                "name": str(op),
                "ts": round(start * 1e6, 3),
                "dur": round((end - start) * 1e6, 3),
                "args": {"op": op.index, "stage": op.stage},
            }
        )
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    temporary.replace(path)
