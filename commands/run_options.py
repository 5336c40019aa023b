"""The options of `ssdplan run`.

Owns each option's name, heading, type and default. `run.py` says what a run does with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import click

from .parsing import options as of
from .parsing.command import Argument, Section
from .parsing.types import (
    BELOW_ONE,
    COUNT,
    DIRECTORY,
    MODEL,
    NEW_DIRECTORY,
    NONNEGATIVE,
    PATH,
    PATH_OR_NONE,
    POSITIVE,
    SEED,
    SHARE,
    STEPS_OR_SHARE,
    Choice,
)


@dataclass(frozen=True)
class Options:
    """All options of a run; `given` names those that the user gave on the command line."""

    plan: Path | None
    data: Path | None
    steps: int | None
    epochs: float | None
    out: Path | None
    model: str | None
    volume: Sequence[Path]
    pack: bool
    attend_across: bool
    data_format: str | None
    append_eos: bool
    token_cache: Path | None
    seed: int
    lr: float | None
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"]
    warmup_steps: float
    decay_steps: float | None
    min_lr: float
    beta1: float
    beta2: float
    eps: float | None
    weight_decay: float | None
    decay_all: bool
    muon_lr: float | None
    muon_momentum: float | None
    muon_adjust_lr: Literal["match_rms_adamw", "original"] | None
    loss_scale: float | None
    loss_scale_growth: int | None
    eval_data: Path | Literal[""] | None
    eval_split: float | None
    eval_samples: int | None
    eval_every: int | None
    snapshot_every: int | None
    snapshot_minutes: float | None
    keep: int
    resume: Path | None
    resume_anyway: bool
    adopt: bool
    ranks: int | None
    serial: bool
    replan: bool
    stall_after: float | None
    stall_abort: float | None
    tensorboard: Path | bool | None
    wandb: str | None
    json: bool
    given: frozenset[str] = frozenset()

    def values(self) -> dict[str, Any]:
        """All options by name, without `given`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "given"}


EXCLUSIVE = (("steps", "epochs"), ("eval_data", "eval_split", "eval_samples"))


def plan_argument() -> Argument:
    return Argument(
        ["plan"],
        type=PATH,
        default=None,
        metavar="PLAN|CONFIG",
        help="the plan that ssdplan solve wrote. A file whose name ends in .yaml or .yml is a configuration instead: "
        "lines of `option: value`, with the long names of these options and `plan`; options on the command line count "
        "over it",
    )


def sections() -> tuple[Section, ...]:
    return (
        Section("What to train, and for how long", _trained()),
        Section("How data are read", _read()),
        Section("Learning rate", _learning_rate()),
        Section("Optimizer", _optimizer()),
        Section("Evaluation, before the first step, after the last, and between", _evaluation()),
        Section("Snapshots, and going on from them", _snapshots()),
        Section("How steps run", _steps()),
        Section("Output", _output()),
    )


def _trained() -> tuple[click.Option, ...]:
    return (
        click.Option(
            ["--data"], type=PATH, metavar="PATH", help="a .txt, .jsonl, .parquet or .arrow file, or a directory"
        ),
        click.Option(["--steps"], type=COUNT, metavar="N", help="how many updates the optimizer makes"),
        click.Option(
            ["--epochs"],
            type=POSITIVE,
            metavar="N",
            help="instead of --steps, how many times every row of the data is taken; the last step may reach into the "
            "next epoch, and 0.5 is half of the rows",
        ),
        click.Option(["--out"], type=DIRECTORY, metavar="RUN", help="a new directory for the run"),
        click.Option(
            ["--model"],
            type=MODEL,
            metavar="DIR|NAME",
            help="the model, if it moved since it was profiled [the plan's]",
        ),
        click.Option(
            ["--volume"],
            type=PATH,
            multiple=True,
            metavar="PATH",
            help="where the store lies; repeatable [RUN]",
        ),
    )


def _read() -> tuple[click.Option, ...]:
    return (
        click.Option(["--pack/--no-pack"], default=True, help="let samples share rows, or give each a row of its own"),
        click.Option(
            ["--attend-across/--no-attend-across"],
            default=False,
            help="let samples that share a row attend to each other, as one long text",
        ),
        *of.data_options(),
        click.Option(
            ["--seed"], type=SEED, default=0, metavar="N", help="seed of the order of samples, and of dropout"
        ),
    )


def _learning_rate() -> tuple[click.Option, ...]:
    return (
        click.Option(
            ["--lr"], type=POSITIVE, metavar="X", help="the learning rate at its peak [1e-05; without gradients 1e-06]"
        ),
        click.Option(
            ["--lr-schedule"],
            type=Choice(["constant", "linear", "cosine", "wsd"]),
            default="constant",
            help="what the learning rate does after its peak; with wsd it stays there, and decays at the end",
        ),
        click.Option(
            ["--warmup-steps"],
            type=STEPS_OR_SHARE,
            default=0,
            metavar="N|F",
            help="steps in which the learning rate rises to its peak; below 1, a share of all steps",
        ),
        click.Option(
            ["--decay-steps"],
            type=STEPS_OR_SHARE,
            metavar="N|F",
            help="steps in which wsd decays; below 1, a share of all steps [0.1]",
        ),
        click.Option(["--min-lr"], type=NONNEGATIVE, default=0.0, metavar="X", help="the learning rate at the end"),
    )


def _optimizer() -> tuple[click.Option, ...]:
    return (
        click.Option(["--beta1"], type=BELOW_ONE, default=0.9, metavar="X", help="decay of AdamW's first moment"),
        click.Option(["--beta2"], type=BELOW_ONE, default=0.999, metavar="X", help="decay of AdamW's second moment"),
        click.Option(
            ["--eps"],
            type=POSITIVE,
            metavar="X",
            help="the number that AdamW adds to its divisor [1e-08]; of a plan for mezo, how far along a direction the "
            "two losses are taken [0.001]",
        ),
        click.Option(
            ["--weight-decay"],
            type=NONNEGATIVE,
            metavar="X",
            help="decoupled weight decay [0.01; without gradients 0]",
        ),
        click.Option(
            ["--decay-all/--no-decay-all"],
            default=False,
            help="decay biases and the weights of norms too; without it they do not decay",
        ),
        click.Option(
            ["--muon-lr"],
            type=POSITIVE,
            metavar="X",
            help="of a plan for muon, the learning rate of matrices at its peak, before their shapes adjust it; it "
            "follows the schedule of --lr in proportion [--lr]",
        ),
        click.Option(
            ["--muon-momentum"], type=BELOW_ONE, metavar="X", help="of a plan for muon, the momentum of matrices [0.95]"
        ),
        click.Option(
            ["--muon-adjust-lr"],
            type=Choice(["match_rms_adamw", "original"]),
            help="of a plan for muon, how the rate of a matrix follows from its shape, as adjust_lr_fn of "
            "torch.optim.Muon says: match_rms_adamw makes steps as large as AdamW's at the same rate [match_rms_adamw]",
        ),
        click.Option(
            ["--loss-scale"],
            type=POSITIVE,
            metavar="X",
            help="the loss scale that a plan in fp16 begins with: a power of two [65536]",
        ),
        click.Option(
            ["--loss-scale-growth"],
            type=COUNT,
            metavar="N",
            help="steps without overflow that double the loss scale [2000]",
        ),
    )


def _evaluation() -> tuple[click.Option, ...]:
    return (
        click.Option(
            ["--eval-data"],
            type=PATH_OR_NONE,
            metavar="PATH",
            help="held-out data; '' takes back those of a run; not with --eval-split or --eval-samples [none]",
        ),
        click.Option(
            ["--eval-split"],
            type=SHARE,
            metavar="F",
            help="hold a fraction of the data out of training, and evaluate it [none]",
        ),
        click.Option(["--eval-samples"], type=COUNT, metavar="N", help="hold N samples out, and evaluate them [none]"),
        click.Option(
            ["--eval-every"], type=COUNT, metavar="N", help="evaluate after every N steps too [only first and last]"
        ),
    )


def _snapshots() -> tuple[click.Option, ...]:
    return (
        click.Option(
            ["--snapshot-every"],
            type=COUNT,
            metavar="N",
            help="make the states durable every N steps; of a plan for mezo, whose log is durable at every step, keep "
            "the weights, from which the run then goes on sooner [never]",
        ),
        click.Option(
            ["--snapshot-minutes"],
            type=POSITIVE,
            metavar="M",
            help="make them durable every M minutes too, when the step ends [never]",
        ),
        click.Option(
            ["--keep"],
            type=COUNT,
            default=2,
            metavar="K",
            help="snapshots that the store holds: 2, or 1 in less space",
        ),
        click.Option(
            ["--resume"],
            type=DIRECTORY,
            metavar="RUN",
            help="go on with a run that was stopped, to the same bits; the options that it was started with need not "
            "be repeated",
        ),
        click.Option(
            ["--resume-anyway"],
            is_flag=True,
            help="go on even when model, data, batch or recipe are not what they were",
        ),
        click.Option(
            ["--adopt"],
            is_flag=True,
            help="take over a run whose directory was moved or comes from somebody else: the volumes outside of it "
            "that --volume names are this run's, and it may write where its run.json says",
        ),
    )


def _steps() -> tuple[click.Option, ...]:
    return (
        click.Option(
            ["--ranks"],
            type=COUNT,
            metavar="R",
            help="start so many ranks on this machine, as the plan was solved for; on several machines torchrun starts "
            "them; with --resume, the number of them to go on with [1, or as many as the run has]",
        ),
        click.Option(
            ["--serial/--no-serial"],
            default=False,
            help="run one operation at a time: slow, and easy to believe",
        ),
        click.Option(
            ["--replan/--no-replan"],
            default=False,
            help="move to the plan that solve would choose, when the first steps show another machine than the "
            "profile's",
        ),
        click.Option(
            ["--stall-after"],
            type=POSITIVE,
            metavar="SECONDS",
            help="tell what a step waits for when none of its operations ends for so long [60, or 5 predicted steps]",
        ),
        click.Option(
            ["--stall-abort"],
            type=POSITIVE,
            metavar="SECONDS",
            help="end the run when no operation ends for so long [never]",
        ),
    )


def _output() -> tuple[click.Option, ...]:
    return (
        click.Option(
            ["--tensorboard"],
            type=NEW_DIRECTORY,
            is_flag=False,
            flag_value=True,
            metavar="[DIR]",
            help="also write what metrics.jsonl has as events for TensorBoard, into DIR [RUN/tensorboard]",
        ),
        click.Option(
            ["--wandb"],
            metavar="PROJECT",
            help="also send it to Weights & Biases; ENTITY/PROJECT for a team's project",
        ),
        click.Option(["--json"], is_flag=True, help="print the report as JSON"),
    )
