"""Plain PyTorch training of a whole model in memory: the oracle that streamed training is compared with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel, Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ssdplan.executor.model.layers import MicroBatch
from tests import eight_bits


@dataclass(frozen=True)
class AdamW:
    """The optimizer's settings, as torch.optim.AdamW has them."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_grad_norm: float | None = None
    bf16_moments: bool = False
    """Both moments are rounded to bf16 after each update."""
    int8_moments: bool = False
    """Both moments go through `eight_bits.rounded` after each update."""
    masters: str = "fp32"
    """none: they are rounded to the model's copies after each update. residual: its bf16 copies are rounded with ties
    away from zero. Copies that the model keeps in fp32 are never rounded."""
    rates: tuple[float, ...] = ()
    """The learning rate of each update, instead of `lr`."""
    decay_all: bool = True
    """Else those parameters decay that transformers.Trainer lets decay."""
    muon: Collection[str] = ()
    """The parameters that torch.optim.Muon updates instead."""
    muon_lr: float = 1e-3
    muon_adjust: str = "match_rms_adamw"


@dataclass(frozen=True)
class Scaling:
    """The settings of a torch.amp.GradScaler, and what it did: the scale of each step, and whether it was skipped."""

    scale: float
    growth_interval: int
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)


def load(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A whole model in memory, with sdpa where the family has it."""
    takes_images = type(AutoConfig.from_pretrained(path)) not in MODEL_FOR_CAUSAL_LM_MAPPING
    kind = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=dtype)
    model.config.use_cache = False
    if dtype == torch.float64 and model._can_set_experts_implementation():  # grouped products know no float64
        model.set_experts_implementation("eager")
    return model


def alone(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The same micro-batches, but that each sequence of a row that several share is a micro-batch of its own."""
    result = []
    for m in micro_batches:
        if m.position_ids is None:
            result.append(m)
            continue
        for ids, labels, positions in zip(m.input_ids, m.labels, m.position_ids, strict=True):
            starts = torch.nonzero(positions == 0).flatten().tolist()
            for start, stop in pairwise([*starts, len(ids)]):
                if (labels[start + 1 : stop] != -100).any():
                    result.append(MicroBatch(ids[None, start:stop], labels[None, start:stop]))
    return result


def ties_away(masters: torch.Tensor) -> torch.Tensor:
    """The nearest bf16, as fp32; of two, that which is farther from zero."""
    bits = masters.detach().view(torch.int32) & -0x10000
    below, above = bits.view(torch.float32), (bits + 0x10000).view(torch.float32)
    exact = masters.detach().double()
    return torch.where((above - exact).abs() <= (exact - below).abs(), above, below)


def step_loss(model: PreTrainedModel, micro_batches: Sequence[MicroBatch], *, backward: bool) -> float:
    """The mean loss over a step's valid tokens by the model's own loss; with `backward`, its gradients accumulate."""
    tokens = torch.tensor(sum(int((m.labels[:, 1:] != -100).sum()) for m in micro_batches))
    total = 0.0
    for m in alone(micro_batches):
        out = model(input_ids=m.input_ids, attention_mask=m.attention_mask, labels=m.labels, num_items_in_batch=tokens)
        if backward:
            out.loss.backward()
        total += float(out.loss.detach())
    return total


def step_gradients(path: Path, micro_batches: Sequence[MicroBatch], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The gradients of one step's loss from the weights on disk, computed in `dtype`; in fp64, by parameter."""
    model = load(path, dtype).train()
    step_loss(model, micro_batches, backward=True)
    given = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {name: gradient.double() for name, gradient in given if gradient is not None}


def train(
    path: Path,
    steps: Sequence[Sequence[MicroBatch]],
    optimizer: AdamW = AdamW(),
    dtype: torch.dtype = torch.float32,
    norms: list[float] | None = None,
    scaling: Scaling | None = None,
    frozen: Collection[str] = (),
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains the model in `path` on `steps` (the micro-batches of each); its losses and its final state dict.

    The weights, the optimizer and its states are in fp32; with another `dtype` forward and backward run in a model of
    that dtype, which gets a copy of the weights before each step, and its gradients go to the fp32 weights summed over
    micro-batches in fp32. `norms` takes the norm of all gradients of each step, before clipping. With `scaling` the
    loss is scaled, and a step that overflows is skipped, by torch's GradScaler. Of parameters `frozen`, by name, torch
    is told that they require no gradient.
    """
    model = load(path, dtype).train()
    masters = {name: p.detach().float().clone().requires_grad_() for name, p in load(path).named_parameters()}
    parameters = dict(model.named_parameters())
    for name in frozen:
        parameters[name].requires_grad_(False)
    trained = [name for name in masters if name not in frozen]
    decaying = set(masters if optimizer.decay_all else Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    by_adamw = [name for name in trained if name not in optimizer.muon]
    groups = [
        {"params": [masters[name] for name in by_adamw if name in decaying], "weight_decay": optimizer.weight_decay},
        {"params": [masters[name] for name in by_adamw if name not in decaying], "weight_decay": 0.0},
    ]
    update = torch.optim.AdamW([g for g in groups if g["params"]], optimizer.lr, optimizer.betas, optimizer.eps)
    every: list[torch.optim.Optimizer] = [update]
    if optimizer.muon:
        matrices = [masters[name] for name in trained if name in optimizer.muon]
        every.append(
            torch.optim.Muon(matrices, optimizer.muon_lr, optimizer.weight_decay, adjust_lr_fn=optimizer.muon_adjust)
        )
    given = scaling or Scaling(1.0, 1)
    scaler = torch.amp.GradScaler(
        "cpu", given.scale, growth_interval=given.growth_interval, enabled=scaling is not None
    )
    updates = 0
    losses = []
    for micro_batches in steps:
        with torch.no_grad():
            for name, parameter in parameters.items():
                away = optimizer.masters == "residual" and parameter.dtype == torch.bfloat16
                parameter.copy_(ties_away(masters[name]) if away else masters[name])
        for each in every:
            each.zero_grad()
        for group in update.param_groups if optimizer.rates else ():
            group["lr"] = optimizer.rates[updates]
        tokens = torch.tensor(sum(int((m.labels[:, 1:] != -100).sum()) for m in micro_batches))
        total = 0.0
        for m in alone(micro_batches):
            model.zero_grad()
            out = model(
                input_ids=m.input_ids, attention_mask=m.attention_mask, labels=m.labels, num_items_in_batch=tokens
            )
            scaler.scale(out.loss).backward()
            total += float(out.loss.detach())
            for name in trained:
                if parameters[name].grad is None:  # as torch's optimizers leave it alone
                    continue
                gradient = parameters[name].grad.float()
                masters[name].grad = gradient if masters[name].grad is None else masters[name].grad + gradient
        most = float("inf") if optimizer.clip_grad_norm is None else optimizer.clip_grad_norm
        for each in every:
            scaler.unscale_(each)
        norm = torch.nn.utils.clip_grad_norm_([masters[name] for name in trained], most)
        if norms is not None:
            norms.append(float(norm))
        scale = scaler.get_scale()
        for each in every:
            scaler.step(each)
        scaler.update()
        skipped = scaler.get_scale() < scale
        updates += not skipped
        given.scales.append(scale)
        given.skipped.append(skipped)
        if optimizer.bf16_moments:
            for states in update.state.values():
                for moment in ("exp_avg", "exp_avg_sq"):
                    states[moment].copy_(states[moment].bfloat16().float())
        if optimizer.int8_moments:
            for states in update.state.values():
                for moment in ("exp_avg", "exp_avg_sq"):
                    states[moment].copy_(eight_bits.rounded(states[moment], signed=moment == "exp_avg"))
        if optimizer.masters == "none":
            with torch.no_grad():
                for name, master in masters.items():
                    master.copy_(master.to(parameters[name].dtype))
        losses.append(total)
    return losses, {name: master.detach() for name, master in masters.items()}
