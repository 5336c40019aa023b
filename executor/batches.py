"""Batches: the texts that a run trains on and is evaluated on, in batches of its plan's size.

Owns how recipe and model decide the reading of data, and which rows a model refuses. `data/` knows what a sample is,
and which row comes when.
"""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import torch

from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import MismatchError, UsageError

from .data.preview import Preview
from .data.text_data import Batch, HoldOut, TextData
from .model.model import StreamedModel, open_model
from .recipe import Recipe, Watch

MOST_OF_DATA = 0.25
"""The share of an epoch's rows above which one step takes most of them: few updates, and none of them small."""


class Texts:
    """The training text, and the held-out text if there is one, as batches of the plan's size.

    `tokenizer`: the one that they are read by, or a reader by one. `instant`: when it is for a chat template that
    writes the time. Raises the errors of `TextData`, and UsageError where the two were read by different tokenizers."""

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        data: Path,
        eval_data: Path | None,
        tokenizer: object,
        model: StreamedModel,
        watch: Watch,
        instant: datetime,
    ) -> None:
        self._decision, self._seed = plan.decision, recipe.seed
        length = plan.decision.sequence_length

        def text(path: Path, hold_out: HoldOut | None = None) -> TextData:
            found = TextData(
                path,
                tokenizer,
                sequence_length=length,
                pack=recipe.pack,
                attend_across=recipe.attend_across,
                format=recipe.data_format,
                append_eos=recipe.append_eos,
                hold_out=hold_out,
                cache=recipe.token_cache,
                vocab_size=model.vocab_size,
                progress=lambda done, total: watch.loading(done / total, f"tokenising {path}"),
                instant=instant,
            )
            shared = found.has_borders and not recipe.attend_across
            if shared:
                model.require_apart(length)
            padded = not (found.full_rows and (found.held_out is None or found.held_out.full_rows))
            if padded:
                model.require_alike(length)
            if plan.model.rows == "whole" and (shared or padded):
                raise MismatchError(
                    f"{path}: some rows are {'shared by samples' if shared else 'padded'}, and the plan has no memory "
                    "for their masks, as its profile was made with --rows whole; profile with --rows any"
                    + (", or run with --attend-across" if shared and not padded else "")
                )
            for remark in (found.what_was_read(), *found.remarks()):
                watch.note(remark)
            return found

        if eval_data and recipe.hold_out:
            raise UsageError("held-out data of their own and a share of the training data: give one of the two")
        self._shared = eval_data is None
        self._training = text(data, recipe.hold_out)
        self._held_out = text(eval_data) if eval_data else self._training.held_out
        if self._held_out and self._tokenizers_differ():
            raise UsageError(f"{model.path}: the tokenizer changed while it was read; start again")
        if eval_data and self._held_out and (shared := self._held_out.shared(self._training)):
            watch.note(
                f"{eval_data}: {shared} of its {self._held_out.documents} sample(s) are in the training data too, so "
                "the held-out loss is in part of what is learnt"
            )
        elif self._held_out and not eval_data:
            watch.note(
                f"{data}: held out of that are {self._held_out.documents:,} sample(s) besides, "
                f"{self._held_out.samples:,} row(s)"
            )

    def _tokenizers_differ(self) -> bool:
        """Whether held-out text was read by another tokenizer: someone wrote to the model's directory meanwhile."""
        return (
            self._held_out is not None
            and len({each.content["tokenizer_files"] for each in (self._training, self._held_out)}) > 1
        )

    @property
    def content(self) -> dict[str, str]:
        """What the training text is (`TextData.content`)."""
        return self._training.content

    @property
    def held_out_content(self) -> dict[str, str]:
        """The same of held-out text that is no share of the training text; empty where there is none."""
        return {} if self._held_out is None or self._shared else self._held_out.content

    @property
    def rows(self) -> int:
        """Of an epoch, of all ranks."""
        return self._training.samples

    def describe_length(self, steps: int) -> str:
        """How far so many steps go through the data, in words; with a warning where one takes most of them."""
        rows, taken, held_out = self.rows, self._decision.rows, self._held_out
        words = (
            f"a step takes {taken:,} row(s), an epoch of {rows:,} row(s) is {_few(rows / taken)} step(s), and the run "
            f"is {steps:,} step(s), {_few(steps * taken / rows)} epoch(s); "
            + (f"{held_out.samples:,} row(s) are held out" if held_out else "nothing is held out (--eval-split 0.05)")
        )
        if taken > rows * MOST_OF_DATA:
            words += (
                f". A step takes {taken / rows:.0%} of the data, so an epoch is but {_few(rows / taken)} update(s): "
                "solve for a smaller --global-batch to make more of them"
            )
        return words

    def step(self, step: int) -> list[Batch]:
        """Of all ranks, those of rank 0 first."""
        decision = self._decision
        return self._training.micro_batches(
            step,
            micro_batches=decision.micro_batches * decision.ranks,
            micro_batch_size=decision.micro_batch_size,
            seed=self._seed,
        )

    @property
    def full_rows(self) -> bool:
        """Whether no micro-batch, of training or held-out text, has rows shorter than the sequence length."""
        return self._training.full_rows and (self._held_out is None or self._held_out.full_rows)

    @property
    def evaluated(self) -> bool:
        """Whether there is held-out text."""
        return self._held_out is not None

    def held_out(self) -> Iterator[list[Batch]] | None:
        if self._held_out is None:
            return None
        return self._held_out.eval_batches(
            self._decision.micro_batch_size, micro_batches=self._decision.micro_batches * self._decision.ranks
        )


def _few(number: float) -> str:
    """A number of steps or epochs, which need not be whole."""
    return f"{number:,.0f}" if number == int(number) or number >= 1000 else f"{number:,.2f}".rstrip("0").rstrip(".")


def why_refused(model_dir: Path, preview: Preview) -> str:
    """Why a run refuses the model in a directory, or rows for it that are as `preview` has them, in the run's words.

    Empty where it refuses neither, and where the directory lacks what a model needs: that is for `ssdplan profile`.
    """
    length = preview.sequence_length
    try:
        model = open_model(model_dir, torch.float32)
        if model.max_sequence_length is not None and length > model.max_sequence_length:
            return f"{model.name} takes rows of {model.max_sequence_length} tokens, not of {length}"
        if preview.packed and preview.samples > 1:
            model.require_apart(length)
        if not (preview.packed and preview.format == "text"):
            model.require_alike(length)
    except MismatchError as error:
        return str(error)
    except UsageError:
        return ""
    return ""
