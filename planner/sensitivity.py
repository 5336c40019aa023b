"""Sensitivity: what a little more of each thing that a plan depends on would bring.

Owns the units that people think in. A dual is the slope of the optimum at a point, and a GiB is far from it on most
machines; so each row solves the program again with one unit more, and the difference is what that unit really brings.
"""

from collections.abc import Callable
from dataclasses import replace

from ssdplan.plans.plan import Sensitivity
from ssdplan.plans.profile import Machine, Model, OptimizerStates

from .drive import combined_frontier
from .fit import Branch, Candidate
from .program import Limits, program_bound

GIB = 1 << 30
FASTER = 1.1


def sensitivities(model: Model, machine: Machine, candidate: Candidate, branch: Branch) -> tuple[Sensitivity, ...]:
    """One row each for host memory, drive, compute, updates, links and, for fp32 ones, the format of optimizer states;
    negative seconds are saved ones."""

    limits = branch.limits

    def seconds(
        model: Model = model,
        machine: Machine = machine,
        limits: Limits = limits,
        optimizer_states: OptimizerStates = branch.fixed.optimizer_states,
    ) -> float:
        found = program_bound(
            model,
            machine,
            micro_batch_size=candidate.micro_batch_size,
            micro_batches=candidate.micro_batches,
            limits=limits,
            fixed=replace(branch.fixed, optimizer_states=optimizer_states),
        )
        assert found is not None, "more of something has made a program infeasible"
        return found.seconds

    def with_more(**update: float) -> Callable[[], float]:
        return lambda: seconds(machine=machine.model_copy(update=update))

    rows: list[tuple[str, str, Callable[[], float]]] = [
        ("host memory", "GiB", lambda: seconds(limits=replace(limits, host_bytes=limits.host_bytes + GIB))),
        ("ssd bandwidth", "GB/s", lambda: seconds(machine=_faster_drive(machine, 1e9))),
        ("compute", "10%", lambda: seconds(model=scaled_compute(model, 1 / FASTER))),
        ("update rate", "10%", lambda: seconds(machine=_faster_updates(machine))),
        ("link to device", "GB/s", with_more(h2d_bandwidth=machine.h2d_bandwidth + 1e9)),
        ("link from device", "GB/s", with_more(d2h_bandwidth=machine.d2h_bandwidth + 1e9)),
    ]
    if branch.fixed.optimizer_states == "fp32":
        rows.append(("optimizer states in bf16", "instead of fp32", lambda: seconds(optimizer_states="bf16")))
    base = seconds()
    return tuple(
        Sensitivity(resource=resource, unit=unit, seconds_per_unit=more - base, throughput_gain=base / more - 1)
        for resource, unit, more in ((resource, unit, again()) for resource, unit, again in rows)
    )


def scaled_compute(model: Model, factor: float) -> Model:
    """`model` on a device that takes `factor` times as long for every forward and backward."""
    return model.model_copy(
        update={
            "classes": tuple(
                entry.model_copy(
                    update={
                        "timings": tuple(
                            timing.model_copy(
                                update={
                                    "forward_seconds": timing.forward_seconds * factor,
                                    "backward_seconds": timing.backward_seconds * factor,
                                }
                            )
                            for timing in entry.timings
                        )
                    }
                )
                for entry in model.classes
            )
        }
    )


def _faster_updates(machine: Machine) -> Machine:
    """`machine` with a faster optimizer, whatever the format of its states."""
    rates = {"update_rate": machine.update_rate, "update_rate_bf16": machine.update_rate_bf16}
    return machine.model_copy(update={name: rate and rate * FASTER for name, rate in rates.items()})


def _faster_drive(machine: Machine, more: float) -> Machine:
    """`machine` with drives that read `more` bytes/s faster together, and do all else faster in proportion."""
    read = combined_frontier(machine.volumes)[0][0]
    factor = (read + more) / read
    return machine.model_copy(
        update={
            "volumes": tuple(
                volume.model_copy(
                    update={
                        "frontier": tuple(
                            point.model_copy(update={"read": point.read * factor, "write": point.write * factor})
                            for point in volume.frontier
                        )
                    }
                )
                for volume in machine.volumes
            )
        }
    )
