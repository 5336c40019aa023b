"""What the processor that runs the tests has instructions for."""

import torch

PRECISION = "bf16" if "AVX512" in torch.backends.cpu.get_cpu_capability() else "fp32"
"""Of parameters, where a test computes enough to wait for it: without instructions bf16 takes twenty times as long."""
