"""The optimizer's recipe and its arithmetic on a range: native AdamW on addresses, one fused pass.

Owns hyper-parameters and the count of steps. Which ranges, and when, is the schedule's business.
"""

from dataclasses import dataclass

import torch

from ssdplan import native
from ssdplan.plans.errors import NumericalError
from ssdplan.plans.homes import OPTIMIZER_BYTES
from ssdplan.plans.profile import OptimizerStates

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
        self,
        states: torch.Tensor,
        optimizer_states: OptimizerStates,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        *,
        step: int,
        gradient_scale: float,
        threads: int,
        statistics: bool = False,
    ) -> int:
        """Update one range in place. `states` uint8: fp32 masters [n], then first and second moments [n] each in the
        format `optimizer_states`; `gradient` fp32 [n]; `parameters` [n] takes the copy in its dtype.

        `step` counts from 1. Gradients count times `gradient_scale`, rounded to fp32. Moments in bf16 are rounded once
        the masters are updated, to the nearest, ties to even. With `statistics`, returns the sum of squares of the
        gradient before it is scaled, taken in the same pass: an integer in units of 2**-1074 that adds up over ranges
        as that of `Device.copy_d2h_gradient` does; without, 0. Raises NumericalError on a gradient that is not finite.
        """
        elements = gradient.numel()
        assert states.dtype == torch.uint8 and gradient.dtype == torch.float32
        assert states.numel() == OPTIMIZER_BYTES[optimizer_states] * elements and parameters.numel() == elements
        master = states.data_ptr()
        exp_avg = master + 4 * elements
        result = (native.adamw_statistics if statistics else native.adamw)(
            master,
            exp_avg,
            exp_avg + (OPTIMIZER_BYTES[optimizer_states] - 4) // 2 * elements,
            gradient.data_ptr(),
            parameters.data_ptr(),
            DTYPE_NAMES[parameters.dtype],
            elements,
            moment_dtype=optimizer_states,
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            step=step,
            gradient_scale=gradient_scale,
            threads=threads,
        )
        finite, squares = result if isinstance(result, tuple) else (result, 0)
        if not finite:
            raise NumericalError(
                f"step {step}: a gradient is not finite; the run stops here. Lower --lr, or train with --precision fp32"
            )
        return squares
