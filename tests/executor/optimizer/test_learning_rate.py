"""Learning-rate schedules: the rate of every step is that of transformers' scheduler of the same name."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ssdplan import cli
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.optimizer.learning_rate import SHAPES, LearningRate, steps_of
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import train
from ssdplan.plans.errors import UsageError
from tests import reference
from tests.executor.runs import LENGTH, micro_batches_of, prepare
from tests.made.plans import make_plan


def theirs(rate: LearningRate, peak: float, count: int) -> list[float]:
    """The rates of the first `count` updates by `transformers.get_scheduler`."""
    name, more = {
        "constant": ("constant_with_warmup", {}),
        "linear": ("polynomial", {"lr_end": rate.min_lr, "power": 1.0}) if rate.min_lr else ("linear", {}),
        "cosine": ("cosine_with_min_lr", {"min_lr": rate.min_lr}) if rate.min_lr else ("cosine", {}),
        "wsd": ("warmup_stable_decay", {"num_decay_steps": rate.decay_steps, "min_lr_ratio": rate.min_lr / peak}),
    }[rate.shape]
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=peak)
    scheduler = transformers.get_scheduler(
        name, optimizer, rate.warmup_steps, rate.steps, scheduler_specific_kwargs=more
    )
    rates = scheduler.get_last_lr()
    while len(rates) < count:
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()
    return rates


@given(
    shape=st.sampled_from(SHAPES),
    steps=st.integers(1, 40),
    warmup=st.integers(0, 45),
    decay=st.integers(0, 40),
    peak=st.floats(1e-6, 1.0),
    least=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_every_rate_is_that_of_transformers(shape, steps, warmup, decay, peak, least):
    if shape == "wsd":
        warmup = min(warmup, steps)
        decay = min(decay, steps - warmup)
    rate = LearningRate(
        shape,
        steps=steps,
        warmup_steps=warmup,
        decay_steps=decay if shape == "wsd" else 0,
        min_lr=0.0 if shape == "constant" else least * peak,
    )
    if shape == "constant" or warmup <= steps:
        rate.require_sense(peak)
    ours = [rate.at(number, peak=peak) for number in range(steps)]
    assert ours == pytest.approx(theirs(rate, peak, steps), rel=1e-12, abs=1e-12 * peak)


def test_each_schedule_has_the_shape_of_its_name():
    def rates(rate: LearningRate) -> list[float]:
        return [rate.at(number, peak=1.0) for number in range(10)]

    assert rates(LearningRate()) == [1.0] * 10
    linear = LearningRate("linear", steps=10, warmup_steps=2)
    assert rates(linear) == [0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    wsd = rates(LearningRate("wsd", steps=10, warmup_steps=2, decay_steps=4, min_lr=0.1))
    assert wsd[:7] == pytest.approx([0.1, 0.55, 1, 1, 1, 1, 1]) and wsd[8] == pytest.approx(0.55)
    assert wsd[7:] == sorted(wsd[7:], reverse=True) and wsd[-1] > 0.1


@pytest.mark.parametrize("shape", ["linear", "cosine", "wsd"])
def test_beyond_its_end_a_schedule_stays_where_it_ended(shape):
    rate = LearningRate(shape, steps=10, decay_steps=3 if shape == "wsd" else 0, min_lr=0.25)
    assert [rate.at(number, peak=1.0) for number in (10, 11, 40)] == pytest.approx([0.25] * 3)


@pytest.mark.parametrize(
    ("given_steps", "steps", "count"), [(3, 100, 3), (0.03, 100, 3), (0.031, 100, 4), (0.0, 100, 0), (1, 100, 1)]
)
def test_a_number_below_one_is_a_share_of_the_steps(given_steps, steps, count):
    assert steps_of(given_steps, steps) == count
    their_arguments = transformers.TrainingArguments(output_dir="unused", use_cpu=True, warmup_steps=given_steps)
    assert their_arguments.get_warmup_steps(steps) == count


@pytest.mark.parametrize(
    ("rate", "named"),
    [
        (LearningRate("constant", min_lr=1e-6), "--min-lr"),
        (LearningRate("linear", steps=10, min_lr=1e-3), "less than --lr"),
        (LearningRate("cosine", steps=10, decay_steps=2), "--decay-steps"),
        (LearningRate("wsd", steps=10, warmup_steps=6, decay_steps=5), "more than the 10 steps"),
        (LearningRate("cosine", steps=10, warmup_steps=11), "--warmup-steps 11: the run ends after 10"),
        (LearningRate("linear", steps=5, warmup_steps=50), "never be at its peak"),
    ],
)
def test_what_would_say_nothing_is_refused(rate, named):
    with pytest.raises(UsageError, match=named):
        rate.require_sense(1e-3)


def test_a_run_with_a_schedule_equals_plain_pytorch_with_transformers_own(tmp_path: Path):
    """Delayed updates use the rate of the step that made their gradients."""
    steps, rate = 8, LearningRate("cosine", steps=8, warmup_steps=3, min_lr=1e-4)
    prepare(tmp_path)
    model = open_model(tmp_path / "llama", torch.float32)
    result = train(
        make_plan(model, sequence_length=LENGTH, alpha=0.4, optimizer=0.5, parameters=0.2, chunk=4096),
        model,
        EmulatedDevice(),
        data=tmp_path / "text.txt",
        out=tmp_path / "run",
        recipe=Recipe(steps=steps, optimizer=AdamW(lr=3e-3, weight_decay=0.1, beta2=0.95), learning_rate=rate),
    )
    expected = theirs(rate, 3e-3, steps)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in lines] == pytest.approx(expected, rel=1e-12)

    batches = [micro_batches_of(tmp_path, step, micro_batches=2) for step in range(steps)]
    settings = reference.AdamW(betas=(0.9, 0.95), weight_decay=0.1, rates=tuple(expected))
    losses, weights = reference.train(tmp_path / "llama", batches, settings)
    assert result.losses == pytest.approx(losses, rel=5e-6)
    for name, tensor in load_file(result.model_directory / "model.safetensors").items():
        assert torch.linalg.vector_norm(tensor - weights[name]) <= 1e-3 * torch.linalg.vector_norm(weights[name]), name


def test_the_command_line_refuses_a_schedule_without_sense(tmp_path, capsys):
    prepare(tmp_path)
    make_plan(open_model(tmp_path / "llama", torch.float32), sequence_length=LENGTH).save(tmp_path / "plan.json")
    run = ["run", str(tmp_path / "plan.json"), "--data", str(tmp_path / "text.txt"), "--steps", "10"]
    assert cli.main([*run, "--out", str(tmp_path / "run"), "--min-lr", "1e-6"]) == UsageError.exit_code
    assert "--lr-schedule" in capsys.readouterr().err and not (tmp_path / "run").exists()
