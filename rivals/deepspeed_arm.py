"""`python -m ssdplan.rivals.deepspeed_arm JOB`: DeepSpeed ZeRO-Infinity on the CPU, parameters and optimizer on NVMe.

`--build` instead of a job compiles what it needs, so that no step and no peak contains a compiler. Settings are those
that were found to be its best, `fast` for speed and `lean` for memory; docs/benchmarks.md says which and why.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from .job import LEARNING_RATE, WEIGHT_DECAY, Job, batches, write_step

PIPELINED_BUFFERS = 12
"""Three steps of the pipeline (read, update, write) of a sub-group's four states."""
SUB_GROUP_ELEMENTS = {"fast": 50_000_000, "lean": 25_000_000}


def build() -> None:
    """Compile the extensions, where that was not done before; an error of the compiler is raised."""
    from deepspeed.accelerator import get_accelerator

    for name in ("AsyncIOBuilder", "CPUAdamBuilder", "ShareMemCommBuilder"):
        builder = get_accelerator().create_op_builder(name)
        if not builder.is_compatible(verbose=True):
            raise SystemExit(f"deepspeed's {builder.name} needs a compiler, ninja and the headers of libaio")
        builder.load()


def configuration(job: Job, largest_parameter: int) -> dict[str, Any]:
    """DeepSpeed's own: ZeRO stage 3 with both states on NVMe; nothing of parameters is kept between uses."""
    pipelined = job.settings == "fast"
    return {
        "train_micro_batch_size_per_gpu": job.micro_batch_size,
        "gradient_accumulation_steps": job.micro_batches,
        "bf16": {"enabled": job.precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        "steps_per_print": 1 << 30,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SUB_GROUP_ELEMENTS[job.settings],
            "stage3_max_reuse_distance": 0,
            "offload_param": {
                "device": "nvme",
                "nvme_path": job.swap,
                "buffer_count": 5,
                "buffer_size": largest_parameter,
                "max_in_cpu": 0,
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": job.swap,
                "buffer_count": PIPELINED_BUFFERS if pipelined else 4,
                "pipeline_read": pipelined,
                "pipeline_write": pipelined,
            },
        },
    }


def train(job: Job) -> None:
    """Train; a line a step goes to `job.metrics`. `job.settings` is `fast` or `lean`."""
    import deepspeed

    torch.set_num_threads(job.threads)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, init_method=f"file://{job.swap}/meeting", rank=0, world_size=1
    )
    config = AutoConfig.from_pretrained(job.model, trust_remote_code=False, local_files_only=True)
    dtype: torch.dtype = getattr(torch, job.dtype_name)
    with init_empty_weights(include_buffers=False):
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    buffers = dict(plain.named_buffers())
    settings = configuration(job, max(parameter.numel() for parameter in plain.parameters()))
    # Of its own argument for the type it makes bf16 on every CPU without fp16; without it, it reads the settings.
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert all(parameter.dtype == dtype for parameter in model.parameters()), f"not all is {dtype}"
    _load(model, Path(job.model))
    model.config.use_cache = False
    model.train()
    # The other kind saves tensors that alias swap buffers: with parameters on NVMe its gradients are wrong on a CPU.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name]  # zero.Init makes them in bf16: rotary frequencies would be up to 0.4% off
    for step, micro_batches in enumerate(batches(job), 1):
        tokens = [torch.from_numpy(rows) for rows in micro_batches]
        started = time.perf_counter()
        total = 0.0
        for rows in tokens:
            loss = engine(input_ids=rows, labels=rows).loss
            engine.backward(loss)
            engine.step()  # it updates behind the last micro-batch only
            total += float(loss.detach()) / len(tokens)
        write_step(job, step, total, time.perf_counter() - started)


def _load(model: torch.nn.Module, directory: Path) -> None:
    """The model's weights, a tensor at a time, into parameters that lie on NVMe."""
    import deepspeed

    parameters = dict(model.named_parameters())
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - it is no dictionary
                parameter = parameters.pop(name)
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                    parameter.copy_(shard.get_tensor(name))
    assert not parameters, f"{directory}: no weights of {', '.join(parameters)}"


if __name__ == "__main__":
    if sys.argv[1] == "--build":
        build()
    else:
        train(Job.load(Path(sys.argv[1])))
