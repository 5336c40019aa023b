"""What of an earlier try is still valid: a profile by its own fields, a plan by what it was solved from.

Owns the reasons for which a profile is measured again. It changes nothing.
"""

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ssdplan.plans.documents.profile import Profile


@dataclass(frozen=True)
class Wanted:
    """What a profile has to be of."""

    model: Path
    sequence_length: int
    micro_batch_sizes: tuple[int, ...]
    precision: str
    freeze: tuple[str, ...]
    allow_unused_weights: bool
    compression_error: bool
    muon: bool
    rows: str
    device: str
    volumes: tuple[Path, ...]
    endurance: tuple[int, ...]
    ranks: int


def why_stale(profile: Profile, wanted: Wanted) -> str:
    """Why that profile does not do for what is wanted now, on the machine that is here; empty where it does."""
    from ssdplan.executor.snapshots.run_directory import on_drives
    from ssdplan.native.engines import ENGINE_VARIABLE
    from ssdplan.native.process import host_memory
    from ssdplan.profiler.processor import cores, cpu_name

    machine, model = profile.machine, profile.model
    of_ranks = machine.network.ranks if machine.network else 1
    kind, _, index = wanted.device.partition(":")
    engine = os.environ.get(ENGINE_VARIABLE) or "auto"
    if machine.figures != "measured":
        return f"its figures are {machine.figures}"
    if changed := _changed_since(wanted.model, profile.created):
        return f"{changed} changed since"
    int8 = any(rung.format for entry in model.classes for timing in entry.timings for rung in timing.rungs)
    engines = {volume.engine for volume in machine.volumes}
    of_volumes = [volume.endurance_bytes for volume in machine.volumes]
    ratings = list(wanted.endurance) if len(wanted.endurance) > 1 else list(wanted.endurance) * len(of_volumes)
    by = {False: "adamw", True: "muon"}
    if of_ranks > 1:  # of a directory each has a part
        paths = [Path(volume.path) for volume in machine.volumes]
        ratings = [rating // (of_ranks if path.is_dir() else 1) for rating, path in zip(ratings, paths, strict=False)]
    differences: dict[str, tuple[Any, Any]] = {
        "the processor": (machine.name, cpu_name()),
        "the number of cores": (machine.cores, cores() if of_ranks == 1 else machine.cores),  # ranks share them out
        "the host memory": (machine.host_memory_bytes, host_memory().total // of_ranks),
        "the device": (machine.device, kind),
        "the number of the device": (machine.device_index, int(index) if index.isdecimal() else machine.device_index),
        "the I/O engine": (engines, engines if engine == "auto" else {engine}),
        "the model": (model.path, str(wanted.model.resolve())),
        "the precision": (model.precision, wanted.precision),
        "the row length": (model.sequence_length, wanted.sequence_length),
        "the optimizer": (by[model.muon], by[wanted.muon]),
        "which rows it is for": (model.rows or "any", wanted.rows),
        "what is frozen": (tuple(model.freeze), wanted.freeze),
        "whether weights may be left out": (model.allow_unused_weights, wanted.allow_unused_weights),
        "the number of ranks": (of_ranks, wanted.ranks),
    }
    for what, (was, is_now) in differences.items():
        if was != is_now:
            return f"{what} is another ({_shown(was)}, now {_shown(is_now)})"
    if lacking := set(wanted.micro_batch_sizes) - set(model.micro_batch_sizes):
        return f"it has no micro-batches of {', '.join(map(str, sorted(lacking)))}"
    if wanted.compression_error and not int8:
        return "it has nothing of activations in int8"
    if wanted.endurance and ratings != of_volumes:
        return "it has another rating of the drives"
    if not on_drives([Path(volume.path) for volume in machine.volumes], wanted.volumes):
        return "it is of other drives"
    return ""


def _changed_since(model: Path, created: str) -> str:
    """A file of the model that is newer than a profile; empty where none is."""
    then = datetime.fromisoformat(created).timestamp() + 1.0  # it names whole seconds
    for file in sorted((model / "config.json", *model.glob("*.safetensors"))):
        if file.exists() and file.stat().st_mtime > then:
            return file.name
    return ""


def _shown(value: object) -> str:
    return " ".join(map(str, sorted(value))) if isinstance(value, (set, tuple)) else str(value)
