"""The optimizer's recipe and its arithmetic on a range: native AdamW on addresses, one fused pass.

Owns hyper-parameters and the count of steps. Which ranges, and when, is the schedule's business.
"""

from dataclasses import dataclass

import torch

from ssdplan import native
from ssdplan.plans.errors import NumericalError

DTYPE_NAMES: dict[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class AdamW:
    """AdamW as torch.optim.AdamW defines it (decoupled weight decay, bias correction, no amsgrad)."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    def update(
        self, states: torch.Tensor, gradient: torch.Tensor, parameters: torch.Tensor, *, step: int, threads: int
    ) -> None:
        """Update one range in place. `states` fp32 [3 n]: master, first, second moment; `gradient` fp32 [n];
        `parameters` [n] takes the copy in its dtype. `step` counts from 1. Raises NumericalError on a gradient that is
        not finite.
        """
        elements = gradient.numel()
        assert states.dtype == gradient.dtype == torch.float32
        assert states.numel() == 3 * elements and parameters.numel() == elements
        base = states.data_ptr()
        finite = native.adamw(
            base,
            base + 4 * elements,
            base + 8 * elements,
            gradient.data_ptr(),
            parameters.data_ptr(),
            DTYPE_NAMES[parameters.dtype],
            elements,
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            step=step,
            threads=threads,
        )
        if not finite:
            raise NumericalError(
                f"step {step}: a gradient is not finite; the run stops here. Lower --lr, or train with --precision fp32"
            )
