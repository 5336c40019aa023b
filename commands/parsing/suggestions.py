"""Suggestions: the option that was probably meant by a name that a command does not know.

Owns the names that users of TRL and transformers know, which of them are taken for ours, and how near a misspelt name
must be. It suggests only what means the same: a name that merely looks alike would be believed.
"""

from collections.abc import Callable, Collection, Mapping

import click

NEAR = 0.85
"""Of difflib's ratio, without dashes: `sed` is `seed`, `epochs` is not `eps`."""
MOST_NAMED = 2
ALL_IN_ONE = "train"
"""The command that has the options of others: these are named."""
UNLIKE = ("force", "gpu")
"""What other commands call something else: nothing is named for it."""

SAME: dict[str, tuple[str, str]] = {
    "learning-rate": ("run", "lr"),
    "lr-scheduler-type": ("run", "lr-schedule"),
    "lr-scheduler": ("run", "lr-schedule"),
    "warmup-ratio": ("run", "warmup-steps"),
    "adam-beta1": ("run", "beta1"),
    "adam-beta2": ("run", "beta2"),
    "adam-epsilon": ("run", "eps"),
    "output-dir": ("run", "out"),
    "output": ("run", "out"),
    "max-steps": ("run", "steps"),
    "num-train-epochs": ("run", "epochs"),
    "num-epochs": ("run", "epochs"),
    "epoch": ("run", "epochs"),
    "save-steps": ("run", "snapshot-every"),
    "checkpoint-every": ("run", "snapshot-every"),
    "save-total-limit": ("run", "keep"),
    "eval-steps": ("run", "eval-every"),
    "resume-from-checkpoint": ("run", "resume"),
    "eval-file": ("run", "eval-data"),
    "validation-file": ("run", "eval-data"),
    "dataset": ("run", "data"),
    "dataset-name": ("run", "data"),
    "train-file": ("run", "data"),
    "train-data": ("run", "data"),
    "packing": ("run", "pack"),
    "per-device-train-batch-size": ("solve", "micro-batch-size"),
    "micro-batch": ("solve", "micro-batch-size"),
    "gradient-accumulation-steps": ("solve", "micro-batches"),
    "batch-size": ("solve", "global-batch"),
    "train-batch-size": ("solve", "global-batch"),
    "max-grad-norm": ("solve", "clip-grad-norm"),
    "optim": ("solve", "optimizer"),
    "model-name-or-path": ("profile", "model"),
    "model-name": ("profile", "model"),
    "base-model": ("profile", "model"),
    "max-length": ("profile", "sequence-length"),
    "max-seq-length": ("profile", "sequence-length"),
    "max-seq-len": ("profile", "sequence-length"),
    "seq-len": ("profile", "sequence-length"),
    "seq-length": ("profile", "sequence-length"),
    "cutoff-len": ("profile", "sequence-length"),
    "bf16": ("profile", "precision"),
    "fp16": ("profile", "precision"),
    "dtype": ("profile", "precision"),
    "torch-dtype": ("profile", "precision"),
}
"""What others call it -> the command that has it here, and its name there."""
ALIASES = frozenset(
    {
        *("learning-rate", "lr-scheduler-type", "adam-beta1", "adam-beta2", "adam-epsilon"),
        *("output-dir", "max-steps", "num-train-epochs", "save-steps", "eval-steps"),
        *("per-device-train-batch-size", "gradient-accumulation-steps", "max-grad-norm"),
        *("model-name-or-path", "max-length", "max-seq-length", "train-file", "validation-file"),
    }
)
"""Of these the names that mean the very same, with the same values: a command takes them for its own, and help leaves
them out. The others are only suggested: `warmup-ratio` is one of our `warmup-steps` below 1 alone, and `batch-size` is
many things."""


def aliases(own: Collection[str]) -> dict[str, str]:
    """What a command with the long options `own` takes besides: others' name -> its own, without dashes."""
    return {name: SAME[name][1] for name in sorted(ALIASES) if SAME[name][1] in own and name not in own}


_WHOLE = "adapters and quantised weights are not trained; --freeze of ssdplan profile trains a part of a model"
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(
        ("lora", "qlora", "use-peft", "peft", "lora-r", "lora-rank", "lora-alpha", "load-in-4bit", "load-in-8bit"),
        _WHOLE,
    ),
    "report-to": "--tensorboard and --wandb of ssdplan run send what metrics.jsonl gets",
    "logging-steps": "metrics.jsonl in the run's directory has a line for every step",
    "gradient-checkpointing": "the plan decides what backward recomputes: --recompute of ssdplan solve",
}
"""What others call what no option here is, and what there is instead."""


def long_names(command: click.Command) -> list[str]:
    """The long options of a command, without dashes and without --help."""
    flags = [flag for param in command.params for flag in (*param.opts, *param.secondary_opts)]
    return [flag[2:] for flag in flags if flag.startswith("--")]


def hint(
    name: str,
    command: str,
    options: Mapping[str, Collection[str]],
    own_name: Callable[[str], str] = lambda name: f"--{name}",
) -> str:
    """What to say of `name` (without leading dashes), which is no option of `command`; empty where nothing is known.

    `options`: the long names of every command's options, without leading dashes. `own_name`: how those of `command`
    are written where `name` was.
    """
    name = name.replace("_", "-").lower()
    own = options.get(command, ())
    if name in own:
        return f"did you mean {own_name(name)}?"
    if name in UNLIKE:
        return ""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    if name in SAME:
        there, called = SAME[name]
        return f"did you mean {own_name(called)}?" if called in own else f"that is --{called} of ssdplan {there}"
    if others := [other for other, names in options.items() if name in names and other != ALL_IN_ONE]:
        return f"that is an option of {_listed([f'ssdplan {other}' for other in others])}"
    if near := _near(name, own):
        return f"did you mean {_listed([own_name(each) for each in near])}?"
    for other, names in options.items():
        if other != ALL_IN_ONE and (near := _near(name, names)):
            return f"did you mean --{near[0]} of ssdplan {other}?"
    return ""


def _near(name: str, known: Collection[str]) -> list[str]:
    """Those that `name` is short for or misspells, the nearest first."""
    begun = [each for each in known if each.startswith(f"{name}-")]
    if begun:
        ended = [each for each in known if each.endswith(f"-{name}")]
        return [*begun[:MOST_NAMED], *ended[:1]]
    from difflib import SequenceMatcher  # here: help does without

    ratios = {each: SequenceMatcher(None, name, each).ratio() for each in known}
    return sorted((each for each in known if ratios[each] >= NEAR), key=lambda each: -ratios[each])[:MOST_NAMED]


def _listed(words: Collection[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
