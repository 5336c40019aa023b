"""`python -m ssdplan.rivals.torch_arm JOB`: plain PyTorch, everything in the memory of one device, as fast as we know
how to write it.

bf16 weights in forward and backward, fp32 masters and moments in torch's fused AdamW, gradients summed over
micro-batches in fp32 as they come, so that a bf16 gradient lives no longer than its layer's backward. In fp32 the
weights are their own masters.
"""

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from .job import LEARNING_RATE, WEIGHT_DECAY, Job, batches, write_step


def train(job: Job) -> None:
    """Train; a line a step goes to `job.metrics`. `job.settings` is `plain` or `checkpointing` (of activations)."""
    torch.set_num_threads(job.threads)
    device = torch.device(job.device)
    accelerator = torch.get_device_module(device)
    model: Any = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=job.dtype_name, trust_remote_code=False, local_files_only=True
    )
    model.to(device)
    model.config.use_cache = False
    model.train()
    if job.settings == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parameters: list[torch.Tensor] = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]  # in fp32 the same memory
    gradients = [torch.zeros_like(master) for master in masters]  # once: memory that is new each step costs seconds
    for parameter, master, gradient in zip(parameters, masters, gradients, strict=True):
        master.grad = gradient
        parameter.register_post_accumulate_grad_hook(partial(_add, gradient))
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    for step, micro_batches in enumerate(batches(job), 1):
        tokens = [torch.from_numpy(rows).to(device) for rows in micro_batches]
        started = time.perf_counter()
        total = 0.0
        for rows in tokens:
            loss = model(input_ids=rows, labels=rows).loss / len(tokens)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        with torch.no_grad():
            if job.precision != "fp32":
                torch._foreach_copy_(parameters, masters)
            torch._foreach_zero_(gradients)
        accelerator.synchronize(device)
        seconds = time.perf_counter() - started
        peak = None if device.type == "cpu" else accelerator.max_memory_allocated(device)
        write_step(job, step, total, seconds, peak)


def _add(total: torch.Tensor, parameter: torch.Tensor) -> None:
    """Adds a parameter's gradient to the fp32 sum, and lets go of it."""
    assert parameter.grad is not None
    total.add_(parameter.grad)
    parameter.grad = None


if __name__ == "__main__":
    train(Job.load(Path(sys.argv[1])))
