"""`python -m ssdplan.rivals.fsdp_arm`: PyTorch's FSDP2 as one rank of several, in the environment of a launcher.

A process of its own, as the other arms. Each block and the whole are sharded with `fully_shard`; parameters are
gathered in the precision, gradients reduced in fp32; AdamW, no checkpointing. `--reshard` frees parameters after each
forward and reduces gradients of each micro-batch, as a model needs that does not fit; without it they stay until the
step's last micro-batch, which alone reduces. It prints a line of JSON a step.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--reshard", action="store_true")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--precision", choices=sorted(DTYPES), default="bf16")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(given)
    finally:
        dist.destroy_process_group()


def train(given: argparse.Namespace) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[given.precision], reduce_dtype=torch.float32)
    for block in (*model.model.layers, model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=given.reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    rows = torch.Generator().manual_seed(rank)
    for step in range(given.steps):
        ids = torch.randint(model.config.vocab_size, (given.micro_batches, 1, given.sequence_length), generator=rows)
        dist.barrier()
        begun = time.perf_counter()
        for number, each in enumerate(ids):
            last = number == given.micro_batches - 1
            model.set_requires_gradient_sync(last or given.reshard)
            model.set_reshard_after_backward(last or given.reshard)
            (model(input_ids=each, labels=each).loss / given.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(json.dumps({"step": step, "step_seconds": time.perf_counter() - begun}), flush=True)


if __name__ == "__main__":
    main()
