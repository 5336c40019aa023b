"""The prediction of a plan: what one steady step will take of time, memory and traffic, and what it waits for.

Owns how a fitted decision and its simulated step become that part of plan.json. It decides nothing.
"""

from collections.abc import Mapping

from ssdplan.plans.documents.plan import Decision, Prediction
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.graph.timeline import Timeline

from ..predict.critical_path import find_causes, loads
from ..predict.peaks import process_peak_bytes
from ..predict.simulator import simulate
from .fit import Solved


def prediction_of(
    solved: Solved,
    timeline: Timeline,
    tokens_per_second: float,
    model: Model,
    machine: Machine,
    step_seconds: float | None = None,
) -> Prediction:
    """What a simulated plan's step will take. `step_seconds`: on average, where steps differ; the traffic, and what
    bounds steps, is then on average too, and the rest that of the step which writes."""
    fitted = solved.fitted
    traffic = fitted.schedule.traffic("steady")
    seconds, spent = timeline.seconds, loads(timeline, machine)
    if fitted.decision.zeroth_order:
        every, unwritten = fitted.decision.zeroth_order.written_every, fitted.schedule.traffic("unwritten")
        traffic = {kind: (moved + (every - 1) * unwritten[kind]) // every for kind, moved in traffic.items()}
        if every > 1:
            other = simulate(fitted.schedule.unwritten, model, machine, fitted.decision.micro_batch_size)
            spent = {name: spent[name] + (every - 1) * more for name, more in loads(other, machine).items()}
    causes = find_causes(timeline)
    busy: dict[str, float] = {resource: min(spent / seconds, 1.0) for resource, spent in timeline.busy().items()}
    return Prediction(
        step_seconds=seconds if step_seconds is None else step_seconds,
        tokens_per_second=tokens_per_second,
        peak_host_bytes=fitted.peaks.host,
        peak_device_bytes=fitted.peaks.device,
        host_arena_bytes=fitted.peaks.host_arena,
        device_arena_bytes=fitted.peaks.device_arena,
        peak_process_bytes=process_peak_bytes(fitted.peaks, model, machine, fitted.decision),
        ssd_bytes=fitted.peaks.ssd,
        ssd_read_bytes=traffic["read"],
        ssd_write_bytes=traffic["write"],
        h2d_bytes=traffic["h2d"],
        d2h_bytes=traffic["d2h"],
        bound_by=max(spent, key=lambda name: spent[name]),
        busy=busy,
        program_seconds=solved.program.seconds,
        critical_path={str(resource): seconds for resource, seconds in causes.path_seconds.items()},
        idle={str(resource): _of_memory(seconds, fitted.decision) for resource, seconds in causes.idle.items()},
    )


def _of_memory(seconds: Mapping[str, float], decision: Decision) -> dict[str, float]:
    """Causes to idle -> seconds. Where compute works on host memory, what waits for a buffer waits for one of host."""
    found = dict(seconds)
    if decision.unified_memory and "device buffer" in found:
        found["host buffer"] = found.get("host buffer", 0.0) + found.pop("device buffer")
    return found
