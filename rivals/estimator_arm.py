"""`python -m ssdplan.rivals.estimator_arm JOB`: training without gradients, everything in the memory of a CPU.

The estimator of `ssdplan run` by a plan for mezo, without a plan: plain PyTorch runs the model forward on copies of all
parameters at plus and at minus eps. One pass of our kernel makes both copies and the last step's updates, along the
directions that a run draws, so that the losses can be compared (MeZO; ZO-Offloading section 2.3). In half precision the
parameters are fp32 masters, and the copies are rounded.
"""

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ssdplan import native

from .job import EPS, SEED, ZEROTH_ORDER_LEARNING_RATE, Job, batches, write_step

Sides = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
Pending = list[tuple[int, int, float, float]]


@torch.no_grad()
def train(job: Job) -> None:
    """Train; a line a step goes to `job.metrics`, its loss the mean of all that the step took."""
    torch.set_num_threads(job.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=job.dtype_name, trust_remote_code=False, local_files_only=True
    )
    model.config.use_cache = False
    model.train()
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    masters = {name: parameter.detach().float() for name, parameter in parameters.items()}  # in fp32 the same memory
    plus, minus = ({name: torch.empty_like(each) for name, each in parameters.items()} for _ in range(2))
    pending: Pending = []
    for step, micro_batches in enumerate(batches(job)):
        tokens = [torch.from_numpy(rows) for rows in micro_batches]
        started = time.perf_counter()
        losses = []
        for direction in range(job.directions):
            _perturb(job, masters, (plus, minus), step, direction, pending)
            pending = []
            losses.append(tuple(_loss(model, parameters, side, tokens) for side in (plus, minus)))
        for direction, (above, below) in enumerate(losses):
            projected = (above - below) / (2 * EPS)
            pending.append((step, direction, ZEROTH_ORDER_LEARNING_RATE / job.directions * projected, 1.0))
        seconds = time.perf_counter() - started
        write_step(job, step + 1, sum(map(sum, losses)) / (2 * len(losses)), seconds)


def _perturb(
    job: Job, masters: dict[str, torch.Tensor], sides: Sides, step: int, direction: int, pending: Pending
) -> None:
    """Update the masters by what is pending, and make the copies of a direction."""
    for name, master in masters.items():
        plus, minus = (side[name] for side in sides)
        native.zeroth_order(
            master.data_ptr(),
            plus.data_ptr(),
            minus.data_ptr(),
            job.precision,
            master.numel(),
            seed=SEED,
            tensor=int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little"),
            step=step,
            eps=EPS,
            direction=direction,
            pending=pending,
            masters=None if plus.dtype == master.dtype else "fp32",
            threads=job.threads,
        )


def _loss(
    model: Any, parameters: dict[str, torch.Tensor], side: dict[str, torch.Tensor], tokens: list[torch.Tensor]
) -> float:
    """The mean loss of the micro-batches with one side's copies."""
    for name, parameter in parameters.items():
        parameter.data = side[name]
    return sum(float(model(input_ids=rows, labels=rows).loss) / len(tokens) for rows in tokens)


if __name__ == "__main__":
    train(Job.load(Path(sys.argv[1])))
