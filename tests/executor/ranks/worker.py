"""One rank of a test's run, in a process of its own, whose environment is as torchrun makes it.

The specification is a JSON object: a directory as `tests.executor.runs.prepare` makes it, the run's directory, and the
choices of plan and recipe. What rank 0 found is written beside the run as `found.json`.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ssdplan import native
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.device.tensors import DTYPES
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.optimizer.zeroth_order import MeZO
from ssdplan.executor.ranks.group import joined
from ssdplan.executor.ranks.place import directory_of, place_of
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.snapshots.agreement import settle, settle_log
from ssdplan.executor.snapshots.resume import reopened
from ssdplan.executor.train import train
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.errors import SsdplanError
from tests.executor.runs import LENGTH
from tests.made.plans import make_plan


def main(spec: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    place = place_of(os.environ)
    directory, out = Path(spec["directory"]), Path(spec["out"])
    rank = place.rank if place else 0
    if fault := spec["faults"].get(str(rank)):
        real = native.Engine
        native.Engine = lambda *arguments, **options: real(*arguments, faults=[tuple(fault)], **options)
    optimizer: AdamW | MeZO = AdamW(lr=1e-3, weight_decay=0.1, eps=spec["eps"])
    if zeroth := spec["plan"].get("zeroth_order"):
        spec["plan"]["zeroth_order"] = ZerothOrder(**zeroth)
        optimizer = MeZO(lr=1e-2, eps=1e-2, weight_decay=0.1)
    recipe = Recipe(optimizer=optimizer, **spec["recipe"] | spec["of_ranks"].get(str(rank), {}))
    try:
        with joined(place, "cpu", spec["patience"]) as ranks:
            model = open_model(directory / spec["name"], DTYPES[spec["plan"].get("precision", "fp32")])
            mine = directory_of(out, rank)
            with contextlib.ExitStack() as stack:
                kept = None
                if spec["resumes"]:
                    (settle_log if zeroth else settle)(mine, ranks, lambda text: None)
                    kept = stack.enter_context(reopened(mine))
                result = train(
                    make_plan(model, sequence_length=LENGTH, ranks=ranks.size, **spec["plan"]),
                    model,
                    EmulatedDevice(),
                    data=directory / spec["data"],
                    out=mine,
                    recipe=recipe,
                    eval_data=directory / "held-out.txt",
                    resume=kept,
                    ranks=ranks,
                )
    except SsdplanError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    if rank == 0:
        found = {"losses": result.losses, "eval": result.eval_losses}
        out.with_name(f"{out.name}.json").write_text(json.dumps(found))
    return 0
