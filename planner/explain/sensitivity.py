"""Sensitivity: what a little more of each thing that a plan depends on would bring.

Owns the units that people buy. A dual is the slope of the optimum at a point, and a drive is far from it on most
machines; so each row solves the program again on the changed machine, and the difference is what that really brings.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ssdplan.plans.documents.matrices import longer
from ssdplan.plans.documents.plan import Sensitivity
from ssdplan.plans.documents.profile import Machine, Model, Network
from ssdplan.plans.documents.state_layout import OPTIMIZER_FORMATS
from ssdplan.plans.units import format_bytes

from ..fit.budgets import Candidate
from ..fit.fit import Fitter
from ..fit.found import Branch, Solved
from ..predict.drive import combined_frontier
from ..program.program import program_bound

GIB = 1 << 30
MOST_HOST_MEMORY, MORE_DEVICE_MEMORY = 16 * GIB, 8 * GIB


@dataclass(frozen=True, slots=True)
class _Change:
    """One unit more of a resource, in words, and the step's seconds with it."""

    resource: str
    unit: str
    words: str
    seconds: Callable[[], float]
    tokens: float = 1.0
    """Of a step with it, to those without."""


OF_UPDATES = ("update rate",)
"""What is of no use without gradients."""


def sensitivities(fitter: Fitter, solved: Solved) -> tuple[Sensitivity, ...]:
    """One row for each thing that one could buy, for the candidate of `solved`; negative seconds are saved ones. Of an
    emulated machine sizes and bandwidths are the workstation's, seconds the stand-in's."""
    model, machine, branch, candidate = fitter.model, fitter.machine, solved.branch, solved.fitted.candidate

    def seconds(model: Model = model, machine: Machine = machine, branch: Branch = branch) -> float:
        found = _seconds(model, machine, candidate, branch)
        assert found is not None, "more of something has made a program infeasible"
        return found

    part, slower = (machine.emulation.smaller**2, machine.emulation.slower) if machine.emulation else (1, 1.0)
    host_there, gpu = more_host_memory(fitter.budget.host * part), "a device" if machine.compute_shares_cpu else "a GPU"
    host, device = host_there // part, MORE_DEVICE_MEMORY // part
    faster = "compute" if branch.fixed.unified_memory else gpu
    more_host = replace(branch, limits=replace(branch.limits, host_bytes=branch.limits.host_bytes + host))
    one = len(machine.volumes) == 1
    second = "a second SSD like the first" if one else "twice as many SSDs"
    space = branch.limits.ssd_bytes
    more_drives = replace(branch, limits=replace(branch.limits, ssd_bytes=None if space is None else 2 * space))
    read = combined_frontier(machine.volumes)[0][0] * part * slower
    link = {"h2d_bandwidth": 2 * machine.h2d_bandwidth, "d2h_bandwidth": 2 * machine.d2h_bandwidth}
    base = seconds()
    changes = [
        _Change(
            "host memory",
            format_bytes(host_there),
            f"{format_bytes(host_there)} more host memory",
            lambda: seconds(branch=more_host),
        ),
        _Change(
            "device memory",
            format_bytes(MORE_DEVICE_MEMORY),
            f"{format_bytes(MORE_DEVICE_MEMORY)} more device memory",
            lambda: min([base, *_with_device_memory(fitter, solved, device)]),
        ),
        _Change("drives", "2x", second, lambda: seconds(machine=_faster_drives(machine, 2.0), branch=more_drives)),
        _Change(
            "ssd bandwidth",
            "GB/s",
            f"{'an SSD' if one else 'SSDs'} 1 GB/s faster",
            lambda: seconds(machine=_faster_drives(machine, (read + 1e9) / read)),
        ),
        _Change("compute", "2x", f"{faster} twice as fast", lambda: seconds(model=scaled_compute(model, 0.5))),
        _Change("link", "2x", "a link twice as fast", lambda: seconds(machine=machine.model_copy(update=link))),
        _Change(
            "update rate",
            "2x",
            "updates twice as fast" if machine.compute_shares_cpu else "twice the cores for updates",
            lambda: seconds(machine=_faster_updates(machine, 2.0), model=_faster_matrices(model, 2.0)),
        ),
    ]
    if branch.fixed.formats.moments == "fp32" and not branch.fixed.zeroth_order and not model.muon:
        halved = replace(
            branch, fixed=replace(branch.fixed, formats=OPTIMIZER_FORMATS[branch.fixed.formats.masters, "bf16"])
        )
        changes.append(
            _Change(
                "optimizer states in bf16",
                "instead of fp32",
                "both moments in bf16 (--optimizer-states bf16)",
                lambda: seconds(branch=halved),
            )
        )
    if machine.network and branch.fixed.ranks > 1:
        faster_network, ranks = _faster_network(machine, machine.network, 2.0), branch.fixed.ranks
        more_ranks = machine.model_copy(update={"network": machine.network.model_copy(update={"ranks": ranks + 1})})
        of_more = replace(branch, fixed=replace(branch.fixed, ranks=ranks + 1))
        changes += [
            _Change("network", "2x", "a network twice as fast", lambda: seconds(machine=faster_network)),
            _Change(
                "ranks",
                "rank",
                "another rank like these",
                lambda: seconds(machine=more_ranks, branch=of_more),
                (ranks + 1) / ranks,
            ),
        ]
    if branch.fixed.shares == 1:
        changes = [change for change in changes if change.resource != "network"]
    if branch.fixed.zeroth_order:
        changes = [change for change in changes if change.resource not in OF_UPDATES]
    if branch.fixed.unified_memory:
        changes = [change for change in changes if change.resource not in ("device memory", "link")]
    rows = []
    for change in changes:
        more = change.seconds()
        rows.append(
            Sensitivity(
                resource=change.resource,
                unit=change.unit,
                seconds_per_unit=more - base,
                throughput_gain=change.tokens * base / more - 1,
                words=change.words,
            )
        )
    return tuple(rows)


def more_host_memory(budget: int) -> int:
    """What one would add to a host budget: a half of it, or less, as a power of two, and no more than 16 GiB."""
    return min(1 << max((budget // 2).bit_length() - 1, 0), MOST_HOST_MEMORY)


def _with_device_memory(fitter: Fitter, solved: Solved, more: int) -> list[float]:
    """A step's seconds with `more` bytes for parameters that stay on the device, where they may, and with each larger
    micro-batch that makes the same batch and fits only then."""
    candidate, branch = solved.fitted.candidate, solved.branch
    richer = Fitter(
        fitter.model, fitter.machine, replace(fitter.budget, device=fitter.budget.device + more), fitter.fixed
    )
    richer.pipelines = fitter.pipelines  # they do not depend on what the device has
    found = []
    if branch.limits.device_bytes is not None:
        wider = replace(branch, limits=replace(branch.limits, device_bytes=branch.limits.device_bytes + more))
        bound = _seconds(fitter.model, fitter.machine, candidate, wider)
        found += [] if bound is None else [bound]
    for size in fitter.model.micro_batch_sizes:
        if size > candidate.micro_batch_size and candidate.global_batch % size == 0:
            larger = Candidate(size, candidate.global_batch // size)
            if richer.has_room(larger) and not fitter.has_room(larger):
                bounds = (_seconds(fitter.model, fitter.machine, larger, branch) for branch in richer.branches(larger))
                found += [bound for bound in bounds if bound is not None]
    return found


def _seconds(model: Model, machine: Machine, candidate: Candidate, branch: Branch) -> float | None:
    found = program_bound(
        model,
        machine,
        micro_batch_size=candidate.micro_batch_size,
        micro_batches=candidate.micro_batches,
        limits=branch.limits,
        fixed=branch.fixed,
    )
    return found.seconds if found else None


def scaled_compute(model: Model, factor: float) -> Model:
    """`model` on a device that takes `factor` times as long for every forward and backward, and its updates
    of matrices."""
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
                                    "forward_cold_seconds": timing.forward_cold_seconds * factor,
                                    "backward_cold_seconds": timing.backward_cold_seconds * factor,
                                    "rungs": tuple(rung.longer(factor, factor) for rung in timing.rungs),
                                }
                            )
                            for timing in entry.timings
                        )
                    }
                )
                for entry in model.classes
            ),
            "matrix_updates": longer(model.matrix_updates, 1.0, device=factor),
        }
    )


def _faster_network(machine: Machine, network: Network, factor: float) -> Machine:
    rates = {name: getattr(network, name) * factor for name in ("gather_bandwidth", "exchange_bandwidth")}
    return machine.model_copy(update={"network": network.model_copy(update=rates)})


def _faster_updates(machine: Machine, factor: float) -> Machine:
    """`machine` with a faster optimizer, whatever the format of its states."""
    names = ("update_rate", "update_rate_bf16", "update_rate_int8", "checksum_rate")
    rates = {name: getattr(machine, name) for name in names}
    return machine.model_copy(update={name: rate and rate * factor for name, rate in rates.items()})


def _faster_matrices(model: Model, factor: float) -> Model:
    """`model` with host's updates of matrices faster; the very same where it has none."""
    if not model.muon:
        return model
    return model.model_copy(update={"matrix_updates": longer(model.matrix_updates, 1 / factor)})


def _faster_drives(machine: Machine, factor: float) -> Machine:
    """`machine` with drives that do everything `factor` times as fast."""
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
