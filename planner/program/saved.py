"""Saved activations in the linear program: what a stage gains by them, moves of them and keeps of them (DESIGN 7).

Owns these terms. For every class of blocks, rung and tier there is a share of the class's pairs of layer and
micro-batch; of the rest everything is recomputed. Of an order it knows how many micro-batches a stage has, and of how
many something is kept at once.
"""

from collections.abc import Mapping
from dataclasses import replace

from ssdplan.plans.documents.plan import SavedTier
from ssdplan.plans.documents.profile import Rung, Timing
from ssdplan.plans.schedule.saved import saved_bytes

from .stages import LayerGroup, Stage
from .variables import Linear, Variable, saved_by

TIERS: tuple[SavedTier, ...] = ("device", "host", "ssd")


def rungs_of(group: LayerGroup, timing: Timing) -> tuple[Rung, ...]:
    """By which the layers of a group may save: blocks that run backward alone do."""
    return timing.rungs if group.role == "block" and group.backward else ()


def saving(stage: Stage, group: LayerGroup, timing: Timing, n: int) -> Stage:
    """A forward stage of `n` micro-batches, with what it keeps and sends on."""
    gains = {rung.name: rung.forward_seconds - timing.forward_seconds for rung in timing.rungs}
    compute, link, drive = _terms(group, timing, n, gains)
    return replace(
        stage,
        compute_seconds={**stage.compute_seconds, **compute},
        write_bytes={**stage.write_bytes, **drive},
        d2h_bytes={**stage.d2h_bytes, **link},
    )


def rebuilding(stage: Stage, group: LayerGroup, timing: Timing, n: int) -> Stage:
    """A backward stage of `n` micro-batches, with what it finds and need not recompute."""
    gains = {rung.name: rung.backward_seconds - timing.backward_seconds for rung in timing.rungs}
    compute, link, drive = _terms(group, timing, n, gains)
    return replace(
        stage,
        compute_seconds={**stage.compute_seconds, **compute},
        read_bytes={**stage.read_bytes, **drive},
        h2d_bytes={**stage.h2d_bytes, **link},
    )


def _terms(group: LayerGroup, timing: Timing, n: int, seconds: Mapping[str, float]) -> tuple[Linear, Linear, Linear]:
    """What each share adds to a stage: seconds of compute (`seconds` by rung, of one micro-batch), bytes on the link,
    and bytes of the drive."""
    compute: dict[Variable, float] = {}
    link: dict[Variable, float] = {}
    drive: dict[Variable, float] = {}
    for rung in rungs_of(group, timing):
        for tier in TIERS:
            share, nbytes = saved_by(group.layer_class, rung.name, tier), float(n * saved_bytes(rung))
            compute[share] = n * seconds[rung.name]
            if tier != "device":
                link[share] = nbytes
            if tier == "ssd":
                drive[share] = nbytes
    return compute, link, drive


def kept_bytes(group: LayerGroup, timing: Timing, tier: SavedTier) -> Linear:
    """What a tier keeps for one layer and micro-batch."""
    found: dict[Variable, float] = {}
    for rung in rungs_of(group, timing):
        found[saved_by(group.layer_class, rung.name, tier)] = float(saved_bytes(rung))
    return found
