"""Saved activations in the linear program: what a stage gains by them, moves of them and keeps of them (DESIGN 7).

Owns these terms. For every class of blocks, rung and tier there is a share of the class's pairs of layer and
micro-batch; of the rest everything is recomputed. Of an order it knows how many micro-batches a stage has, and of how
many something is kept at once.
"""

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
    compute, write, d2h = dict(stage.compute_seconds), dict(stage.write_bytes), dict(stage.d2h_bytes)
    for rung in rungs_of(group, timing):
        for tier in TIERS:
            share, nbytes = saved_by(group.layer_class, rung.name, tier), float(n * saved_bytes(rung))
            compute[share] = n * (rung.forward_seconds - timing.forward_seconds)
            if tier != "device":
                d2h[share] = nbytes
            if tier == "ssd":
                write[share] = nbytes
    return replace(stage, compute_seconds=compute, write_bytes=write, d2h_bytes=d2h)


def rebuilding(stage: Stage, group: LayerGroup, timing: Timing, n: int) -> Stage:
    """A backward stage of `n` micro-batches, with what it finds and need not recompute."""
    compute, read, h2d = dict(stage.compute_seconds), dict(stage.read_bytes), dict(stage.h2d_bytes)
    for rung in rungs_of(group, timing):
        for tier in TIERS:
            share, nbytes = saved_by(group.layer_class, rung.name, tier), float(n * saved_bytes(rung))
            compute[share] = n * (rung.backward_seconds - timing.backward_seconds)
            if tier != "device":
                h2d[share] = nbytes
            if tier == "ssd":
                read[share] = nbytes
    return replace(stage, compute_seconds=compute, read_bytes=read, h2d_bytes=h2d)


def kept_bytes(group: LayerGroup, timing: Timing, tier: SavedTier) -> Linear:
    """What a tier keeps for one layer and micro-batch."""
    found: dict[Variable, float] = {}
    for rung in rungs_of(group, timing):
        found[saved_by(group.layer_class, rung.name, tier)] = float(saved_bytes(rung))
    return found
