"""Epochs in the place of steps: how many steps they are, and what a run says of its length."""

import math
from datetime import datetime
from pathlib import Path

import pytest
import torch

from ssdplan.executor.batches import Texts
from ssdplan.executor.data.epochs import Epochs
from ssdplan.executor.data.text_data import HoldOut
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.optimizer.learning_rate import LearningRate
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.executor.train import Result, train
from ssdplan.plans.documents.run import Run
from tests.executor.runs import LENGTH, opened, prepare
from tests.made.plans import make_plan


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"), layers=2)


def recipe_of(count: float, **more: object) -> Recipe:
    return Recipe(steps=0, optimizer=AdamW(lr=1e-3), epochs=Epochs(count), **more)


@pytest.mark.parametrize(
    ("rows", "a_step", "count", "steps"),
    [(40, 8, 1, 5), (43, 8, 1, 6), (43, 8, 3, 17), (43, 8, 0.5, 3), (3, 8, 0.1, 1), (10, 1, 0.7, 7), (30, 3, 0.1, 1)],
)
def test_epochs_are_the_fewest_steps_that_take_every_row_so_often(
    rows: int, a_step: int, count: float, steps: int
) -> None:
    assert recipe_of(count).lasting(rows, a_step).steps == steps


@pytest.mark.parametrize("count", range(1, 5))
def test_the_steps_of_an_epoch_take_every_row_once(directory: Path, count: int) -> None:
    """By force: the rows of all steps but the last are fewer than so many epochs, and those of all are enough."""
    texts = texts_of(directory, recipe_of(count), notes=[])
    steps = recipe_of(count).lasting(texts.rows, 4).steps
    taken = [sum(len(batch.input_ids) for batch in texts.step(step)) for step in range(steps)]
    assert sum(taken[:-1]) < count * texts.rows <= sum(taken)


def test_shares_of_the_learning_rate_are_of_the_steps_that_the_epochs_are() -> None:
    rate = LearningRate("cosine", min_lr=1e-5)
    recipe = Recipe(steps=0, optimizer=AdamW(lr=1e-3), learning_rate=rate, epochs=Epochs(2, warmup=0.1))
    found = recipe.lasting(100, 4)
    assert found == Recipe(
        steps=50,
        optimizer=AdamW(lr=1e-3),
        learning_rate=LearningRate("cosine", steps=50, warmup_steps=5, min_lr=1e-5),
    )
    assert found.deciding().keys() == Recipe(steps=50, optimizer=AdamW(lr=1e-3)).deciding().keys()


def texts_of(directory: Path, recipe: Recipe, notes: list[str], rows: int = 4) -> Texts:
    model = opened(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, micro_batches=rows // 2, micro_batch_size=2)
    tokenizer = load_tokenizer(model.path)
    watch = Watch(note=notes.append)
    return Texts(plan, recipe, directory / "rows.jsonl", None, tokenizer, model, watch, datetime(2024, 1, 1))


def test_a_run_says_its_samples_rows_steps_an_epoch_epochs_and_what_is_held_out(directory: Path) -> None:
    recipe = recipe_of(2, hold_out=HoldOut(samples=9))
    texts = texts_of(directory, recipe, notes := [])
    rows, steps = texts.rows, recipe.lasting(texts.rows, 4).steps
    assert any("51 sample(s), " in note and f"{rows} row(s) of {LENGTH}" in note for note in notes)
    said = texts.describe_length(steps)
    assert said.startswith(f"a step takes 4 row(s), an epoch of {rows} row(s) is ")
    assert f"the run is {steps} step(s), " in said and "epoch(s); " in said
    assert "row(s) are held out" in said and "of the data" not in said
    assert "nothing is held out" in texts_of(directory, recipe_of(1), notes=[]).describe_length(1)


def test_a_step_that_takes_most_of_the_data_is_warned_of(directory: Path) -> None:
    few = texts_of(directory, recipe_of(1, pack=False), notes=[])
    assert few.rows == 60
    assert "of the data" not in few.describe_length(4)
    many = texts_of(directory, recipe_of(1, pack=False), notes=[], rows=50)
    assert "A step takes 83% of the data, so an epoch is but 1.2 update(s)" in many.describe_length(4)
    assert "--global-batch" in many.describe_length(4)


def test_a_run_of_epochs_is_the_run_of_as_many_steps(directory: Path, tmp_path: Path) -> None:
    model = opened(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, micro_batches=4, micro_batch_size=2)
    lengths: list[int] = []

    def run(name: str, recipe: Recipe) -> Result:
        watch = Watch(length=lengths.append)
        data = directory / "rows.jsonl"
        return train(plan, model, EmulatedDevice(), data=data, out=tmp_path / name, recipe=recipe, watch=watch)

    rate = LearningRate("linear", min_lr=1e-6)
    by_epochs = run("epochs", Recipe(0, AdamW(lr=1e-3), rate, epochs=Epochs(0.5, warmup=0.5)))
    steps = len(by_epochs.losses)
    rate = LearningRate("linear", steps=steps, warmup_steps=math.ceil(steps / 2), min_lr=1e-6)
    assert steps > 1 and run("steps", Recipe(steps, AdamW(lr=1e-3), rate)).losses == by_epochs.losses
    assert lengths == [steps, steps] and Run.load(tmp_path / "epochs" / "run.json").steps == steps
