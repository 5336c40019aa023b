"""Snapshots: the document that a snapshot carries beside the states.

Owns the document that a generation of the store carries, and what in a run's origin decides its losses, so that a run
which goes on is known to be the one that was stopped. The states themselves are the store's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, ValidationError

from ssdplan.plans.documents.base import Name, Part, describe
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import StoreError

from ..device.numerics import of_this_process
from ..model.directory.weight_files import weights_fingerprint
from ..model.model import StreamedModel
from ..optimizer.loss_scale import LossScale
from ..recipe import Recipe, Scalar

SCHEMA: Literal["ssdplan.snapshot/1"] = "ssdplan.snapshot/1"


def batch_of(plan: Plan) -> dict[str, Scalar]:
    """What `Origin.batch` has of a plan."""
    decision = plan.decision
    batch: dict[str, Scalar] = {
        "micro_batches": decision.micro_batches,
        "micro_batch_size": decision.micro_batch_size,
        "sequence_length": decision.sequence_length,
        "precision": decision.precision,
        "optimizer": decision.optimizer,
        "optimizer_states": decision.optimizer_states,
        "clip_grad_norm": decision.clip_grad_norm,
        # With one micro-batch there is one order.
        "schedule": decision.schedule if decision.micro_batches > 1 else "any",
        "head_chunk_tokens": plan.model.head_chunk_tokens,
        "device": plan.machine.device,
        "compute_threads": plan.machine.compute_threads,
    }
    if decision.ranks > 1:
        batch["ranks"] = decision.ranks
    if decision.matrices_on_device:  # host's products may be rounded otherwise
        batch["matrices_on_device"] = True
    if decision.masters != "fp32":
        batch["masters"] = decision.masters
    if decision.zeroth_order:
        batch["directions"] = decision.zeroth_order.directions
        batch["masters"] = "fp32" if decision.zeroth_order.masters else "none"
    return batch


class Origin(Part):
    """What decides a run's losses and weights, to the bit, besides the number of steps."""

    model: str
    """The fingerprint of its configuration and tensors."""
    weights: str
    """sha256 of its files' names and lengths, and of their headers and 256 pages spread over each: two checkpoints of
    one model differ everywhere, and nobody waits for a hash of hundreds of gigabytes."""
    data: dict[Name, str]
    """What the training text is, and the tokenizer (`data.text_data.TextData.content`). `times` and `made_by` may be
    others as long as the tokens are the same."""
    held_out: dict[Name, str] = Field(default_factory=dict)
    """The same of held-out text with a place of its own: no weight depends on it, but losses before and after would not
    be of the same text. Empty: there is none, or the snapshot is of a version that did not look."""
    batch: dict[Name, Scalar]
    """What of the plan changes numbers: micro-batches, their order, precision, threads. Residencies, delay ratio and
    volumes do not."""
    recipe: dict[Name, Scalar]
    numerics: dict[Name, Scalar] = Field(default_factory=dict)
    """What rounds the same sums otherwise (`numerics.of_this_process`). Empty: the snapshot is of a version that did
    not look."""

    @classmethod
    def of(
        cls, plan: Plan, model: StreamedModel, data: dict[str, str], held_out: dict[str, str], recipe: Recipe
    ) -> Self:
        return cls(
            model=model.fingerprint,
            weights=weights_fingerprint(model.path),
            data=data,
            held_out=held_out,
            batch=batch_of(plan),
            recipe=recipe.deciding(),
            numerics=dict(of_this_process(plan.machine)),
        )

    def differences(self, now: "Origin") -> list[str]:
        """What is another in `now`, each in words."""
        found = [
            f"the {what} changed"
            for what, before, after in (
                ("model's configuration", self.model, now.model),
                ("model's weights", self.weights, now.weights),
                ("training data", _read(self.data), _read(now.data)),
            )
            if before != after
        ]
        found += _other_tokenizer(self.data, now.data)
        if self.held_out and now.held_out and _read(self.held_out) != _read(now.held_out):
            found.append("the held-out data changed")
        for what, first, then in (("training", self.data, now.data), ("held-out", self.held_out, now.held_out)):
            found += _other_tokens(what, first, then)
        found_alike = {"data_format"} if self.data.get("format") == now.data.get("format") else set()
        numerics = (self.numerics, now.numerics) if self.numerics else ({}, {})
        for before, after in ((self.batch, now.batch), (self.recipe, now.recipe), numerics):
            found += [
                f"{name} was {_told(before, name)} and is {_told(after, name)}{_WHY.get(name, '')}"
                for name in sorted({*before, *after} - found_alike)
                if before.get(name) != after.get(name) or (name in before) != (name in after)
            ]
        return found


_WHY = {
    "learning_rate.steps": " (a schedule is made for --steps, which may grow only with --lr-schedule constant)",
    "learning_rate.warmup_steps": " (a share of --steps grows with them; a number of steps stays)",
    "learning_rate.decay_steps": " (a share of --steps grows with them)",
}
"""What of a recipe follows from an option of another name."""


class Scaling(Part):
    """The loss scale of the next step in fp16, as `LossScale` of `executor/optimizer/loss_scale.py` has it."""

    scale: float = Field(gt=0.0, allow_inf_nan=False)
    growth_interval: int = Field(ge=1, lt=1 << 40)
    good_steps: int = Field(ge=0, lt=1 << 40)
    skipped: int = Field(ge=0, lt=1 << 40)


class Snapshot(Part):
    """What a generation of a run's store says of itself (docs/snapshots.md). All random numbers follow from the
    recipe's seed and the step, the learning rate from the step and how many were skipped."""

    schema_: Literal["ssdplan.snapshot/1"] = Field(alias="schema")
    step: int = Field(ge=0, lt=1 << 40)
    """Updates that the states have seen; none is pending."""
    samples: int = Field(ge=0, lt=1 << 60)
    """Rows of the training data that were used, over all epochs: the next step begins with this one."""
    origin: Origin
    scaling: Scaling | None = None
    """In fp16; None in the other precisions, which have none."""
    made: tuple[bool, ...]
    """For each volume whether it is a file that the run made, and may delete."""

    def loss_scale(self, asked: LossScale) -> LossScale | None:
        """The loss scale of the next step; None in precisions that have none. Where `asked` is another than the run was
        started with, which makes another run of it, that counts from here on."""
        if self.scaling is None:
            return None
        scaling, before = LossScale(**self.scaling.model_dump()), self.origin.recipe
        if before.get("loss_scale.scale") != asked.scale:
            scaling = replace(scaling, scale=asked.scale, good_steps=0)
        return replace(scaling, growth_interval=asked.growth_interval)

    @classmethod
    def read(cls, metadata: Mapping[str, Any], store: str) -> Self:
        """Raises StoreError when a store's metadata is not that of a snapshot; `store` names it."""
        try:
            return cls.model_validate(metadata)
        except ValidationError as error:
            raise StoreError(f"{store}: its snapshot cannot be read: {describe(error, cls)}") from error

    def with_files(self, made: tuple[bool, ...]) -> Self:
        """The same in a store that was made of these."""
        return self.model_copy(update={"made": made})

    def metadata(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)


_OF_TOKENIZER = {
    "tokenizer_files": "tokenizer",
    "chat_template": "chat template",
    "end_tokens": "end tokens (generation_config.json)",
}
"""What makes up the digest `tokenizer` of data, each by its own, and what it is called."""


def _other_tokenizer(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """In words, that the tokenizer is another, and what of it."""
    if before.get("tokenizer") == now.get("tokenizer"):
        return []
    kept = all(name in each for name in _OF_TOKENIZER for each in (before, now))
    changed = [what for name, what in _OF_TOKENIZER.items() if before.get(name) != now.get(name)] if kept else []
    return [f"the {what} changed" for what in changed or ["tokenizer, its chat template or its end tokens"]]


def _other_tokens(what: str, before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """In words, that the same files became other tokens with the same tokenizer, and by which of the causes that are
    known of."""
    same = all(before.get(name) == now.get(name) for name in ("files", "format", "tokenizer"))
    if not (same and before.get("tokens") and now.get("tokens")) or before["tokens"] == now["tokens"]:
        return []
    causes = [
        f"{cause} {before.get(name, 'not kept')} and {verb} {now.get(name, 'not known')}"
        for name, cause, verb in (
            ("times", "the times that the chat template writes were", "are"),
            ("made_by", "they were made by", "now by"),
        )
        if before.get(name) != now.get(name)
    ]
    return [f"the tokens of the {what} data changed" + (f" ({'; '.join(causes)})" if causes else "")]


def _read(data: Mapping[str, str]) -> list[str | None]:
    """Of what data are, what does not depend on the tokenizer."""
    return [data.get("files"), data.get("format")]


def _told(values: Mapping[str, Scalar], name: str) -> str:
    value = values.get(name)
    if isinstance(value, float):
        return f"{value:g}"
    return "not given" if value is None else str(value)
