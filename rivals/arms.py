"""The arms of a comparison: what each is, what it would take, and the commands that run it.

Owns what a user can name with --arms, and guesses of memory, which keep an arm from driving a machine into swapping.
An arm's own work is in `torch_arm.py` and `deepspeed_arm.py`; ours are the public commands.
"""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from ssdplan.plans.documents.plan import Recompute
from ssdplan.plans.errors import UsageError
from ssdplan.plans.units import format_bytes

from .job import EPS, LEARNING_RATE, SEED, WEIGHT_DECAY, ZEROTH_ORDER_LEARNING_RATE
from .shapes import ModelFacts

OURS = "ssdplan"
ARM_NAMES = ("torch", "torch-checkpointing", "deepspeed-fast", "deepspeed-lean", OURS)
MOST_ARMS = 8
_WORDS = {
    "torch": "plain PyTorch, everything in the device's memory",
    "torch-checkpointing": "the same with gradient checkpointing",
    "deepspeed-fast": "DeepSpeed ZeRO-Infinity on NVMe, its fastest settings",
    "deepspeed-lean": "DeepSpeed ZeRO-Infinity on NVMe, its least memory",
}
_SETTINGS = {
    "torch": "plain",
    "torch-checkpointing": "checkpointing",
    "deepspeed-fast": "fast",
    "deepspeed-lean": "lean",
}
_BASE_BYTES = 600 << 20
"""Interpreter, PyTorch and transformers."""
_CUDA_BYTES = 3 << 30
"""An assumption: what a process takes on host besides, when it uses a GPU."""
_DEEPSPEED = {"deepspeed-fast": (3_600_000_000, 14.7), "deepspeed-lean": (1_660_000_000, 7.0)}
"""Bytes, and bytes a parameter, in bf16: the line through what 134 and 589 million took (docs/benchmarks.md)."""


AUTO = "auto"
RECOMPUTES: tuple[str, ...] = get_args(Recompute)
"""What the blocks' backward recomputes, as `ssdplan solve --recompute` names it."""


@dataclass(frozen=True)
class Arm:
    """One way to train. Ours are `budget`, the host memory that it is planned for, or None for what solve takes, and
    `recompute`, as in `ssdplan solve`."""

    name: str
    kind: str
    """Its name in ARM_NAMES."""
    budget: int | None = None
    recompute: str = AUTO

    @property
    def ours(self) -> bool:
        return self.kind == OURS

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def words(self) -> str:
        if not self.ours:
            return _WORDS[self.kind]
        budget = format_bytes(self.budget) if self.budget else "a half of free"
        asked = "" if self.recompute == AUTO else f", with --recompute {self.recompute}"
        return f"ssdplan, planned for {budget} host memory{asked}"

    @property
    def settings(self) -> str:
        return _SETTINGS[self.kind]

    def module(self, batch: "Batch") -> str:
        """What runs it, of the arms that are not ours."""
        if batch.directions:
            return "ssdplan.rivals.estimator_arm"
        return f"ssdplan.rivals.{self.kind.partition('-')[0]}_arm"


@dataclass(frozen=True)
class Batch:
    """The batch of every arm, what it is computed in, and on: cpu or cuda; and how a step finds its updates."""

    sequence_length: int
    micro_batch_size: int
    micro_batches: int
    precision: str
    device: str = "cpu"
    directions: int = 0
    """Along which a step without gradients estimates one; 0: it is by gradients."""

    @property
    def rows(self) -> int:
        return self.micro_batch_size * self.micro_batches

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence_length


def arms_of(names: tuple[str, ...], budgets: tuple[int, ...], recomputes: tuple[str, ...] = (AUTO,)) -> tuple[Arm, ...]:
    """The arms that are asked for, ours once for each budget and each of `recomputes`. Raises UsageError."""
    if not names or not set(names) <= set(ARM_NAMES) or len(set(names)) < len(names):
        raise UsageError(f"--arms {','.join(names)}: name some of {', '.join(ARM_NAMES)}, each once")
    if len(set(budgets)) < len(budgets):
        raise UsageError("--host-memory names a budget twice")
    if not recomputes or not set(recomputes) <= set(RECOMPUTES) or len(set(recomputes)) < len(recomputes):
        raise UsageError(f"--recompute {','.join(recomputes)}: name some of {', '.join(RECOMPUTES)}, each once")
    if recomputes != (AUTO,) and OURS not in names:
        raise UsageError(f"--recompute is for the arm {OURS}, which --arms leaves out")
    if budgets and OURS not in names:
        raise UsageError(f"--host-memory is the budget of the arm {OURS}, which --arms leaves out")
    arms: list[Arm] = []
    for name in names:
        if name != OURS:
            arms.append(Arm(name, name))
        else:
            arms += [
                _ours(budget, recompute, budgets, recomputes)
                for budget in budgets or [None]
                for recompute in recomputes
            ]
    if len(arms) > MOST_ARMS:
        raise UsageError(f"{len(arms)} arms; at most {MOST_ARMS} fit beside each other: name fewer of ours")
    if len({arm.name for arm in arms}) < len(arms):
        raise UsageError("--host-memory: two budgets look the same in the tables; let them differ by more")
    return tuple(arms)


def _ours(budget: int | None, recompute: str, budgets: tuple[int, ...], recomputes: tuple[str, ...]) -> Arm:
    """Named by what tells it from our others."""
    words = [OURS]
    if budget is not None and len(budgets) > 1:
        words.append(format_bytes(budget).replace(" ", ""))
    if len(recomputes) > 1:
        words.append(recompute)
    return Arm(" ".join(words), OURS, budget, recompute)


def missing(arm: Arm, batch: Batch) -> str:
    """Why the arm cannot be here, and what would help; empty where nothing is known against it."""
    device, without_gradients = batch.device, batch.directions > 0
    if without_gradients and not (arm.ours or arm.kind == "torch"):
        return "it has no training without gradients; leave --optimizer out"
    if without_gradients and not arm.ours and device != "cpu":
        return "its directions are drawn by a kernel for the CPU; leave --device out"
    if arm.kind.startswith("deepspeed") and device != "cpu":
        return "its settings were tried on the CPU only; leave --device out"
    if arm.kind.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed (pip install deepspeed; it needs a compiler, ninja and libaio's headers)"
    return ""


def memory_bytes(arm: Arm, model: ModelFacts, batch: Batch) -> int:
    """About what the arm's process will take; 0 for ours without a budget, since solve keeps to what is free."""
    on_gpu = batch.device != "cpu"
    if arm.ours:
        return arm.budget + _BASE_BYTES + on_gpu * _CUDA_BYTES if arm.budget else 0
    if on_gpu:  # all but the weights on their way is on the device
        return _BASE_BYTES + _CUDA_BYTES + (4 if batch.precision == "fp32" else 2) * model.parameters
    tokens = batch.micro_batch_size * batch.sequence_length
    wide = 2 if batch.precision == "fp32" else 1
    logits = 14 * tokens * model.vocab
    if batch.directions:  # masters, and copies at plus and minus eps
        return _BASE_BYTES + (4 + 4 * wide) * model.parameters + logits
    if arm.kind in _DEEPSPEED:
        base, each = _DEEPSPEED[arm.kind]
        return int(base + each * model.parameters) + logits
    saved = wide * (2 if arm.kind == "torch-checkpointing" else 40)
    return _BASE_BYTES + 18 * model.parameters + logits + saved * tokens * model.hidden * model.layers


def drive_bytes(arm: Arm, model: ModelFacts, batch: Batch) -> int:
    """About the most that the arm puts on the drive at once: parameters, masters, moments and gradients with some air,
    and ours the checkpoints, and the profile's file and the trained model besides."""
    if arm.kind.startswith("torch"):
        return 0
    states = 20 * model.parameters
    if not arm.ours:
        return states
    return states + 2 * model.parameters + 4 * batch.tokens * model.hidden * model.layers + (512 << 20)


def ours(*arguments: object) -> list[str]:
    """A command as a user would give it, run by this interpreter."""
    return [sys.executable, "-m", "ssdplan.cli", *map(str, arguments)]


def profile_command(model: Path, volume: Path, batch: Batch, output: Path) -> list[str]:
    return ours(
        *("profile", "--model", model, "--volume", volume, "--sequence-length", batch.sequence_length),
        *("--device", batch.device),
        *("--micro-batch-sizes", batch.micro_batch_size, "--precision", batch.precision, "-o", output),
    )


def solve_command(
    profile: Path,
    arm: Arm,
    batch: Batch,
    device_memory: int | None,
    output: Path,
    residency: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:
    budget: tuple[object, ...] = ("--host-memory", f"{arm.budget}B") if arm.budget else ()
    if device_memory is not None:
        budget += ("--device-memory", f"{device_memory}B")
    if residency:
        budget += ("--residency", ",".join(f"{what}={share:g}" for what, share in residency.items()))
    optimizer: tuple[object, ...] = ("--recompute", arm.recompute)
    if batch.directions:
        optimizer = ("--optimizer", "mezo", "--directions", batch.directions)
    return ours(
        *("solve", profile, *budget, "--micro-batch-size", batch.micro_batch_size),
        *("--micro-batches", batch.micro_batches, *optimizer, "-o", output),
    )


def run_command(plan: Path, text: Path, volume: Path, batch: Batch, steps: int, output: Path) -> list[str]:
    optimizer: tuple[object, ...] = ("--lr", LEARNING_RATE, "--weight-decay", WEIGHT_DECAY, "--decay-all")
    if batch.directions:
        optimizer = ("--lr", ZEROTH_ORDER_LEARNING_RATE, "--eps", EPS)
    return ours(
        *("run", plan, "--data", text, "--steps", steps, "--volume", volume, *optimizer),
        *("--seed", SEED, "--out", output),
    )
