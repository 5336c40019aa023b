"""Numerics: the facts of this machine and its libraries that decide how sums are rounded, whatever a plan says.

Owns the list. The same plan, model and data give the same bits only where all of it is the same.
"""

import os

import torch
import transformers

from ssdplan.plans.documents.profile import Machine

from .device import visible_gpus

_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Of the environment, by which the libraries beneath PyTorch choose other code or other formats."""


def of_this_process(machine: Machine) -> dict[str, str]:
    """By names for people: versions, what computes, and those of the variables that are set. `machine`: the plan's,
    which says on what kind of device."""
    found = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    if machine.device == "cpu":
        found["instruction_set"] = torch.backends.cpu.get_cpu_capability()
    else:
        found["device"] = visible_gpus()[machine.device_index][0]
    return found | {name: os.environ[name] for name in _VARIABLES if name in os.environ}
