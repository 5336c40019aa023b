"""Steps of a run: what becomes of losses that are not finite, by gradients or without."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ssdplan.executor.optimizer.zeroth_order import MeZO
from ssdplan.executor.optimizer.zeroth_order_log import Header, LogFile, read_log
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.stepping import ZerothOrder
from ssdplan.plans.documents.state_layout import Precision
from ssdplan.plans.errors import NumericalError
from ssdplan.plans.files import Folder

HEADER = Header(model="", weights="", seed=0, directions=2, precision="fp16", origin={})


def session(losses: list[tuple[float, float]], moved: list[Any]) -> Any:
    """One whose step finds these losses, and that notes what it is told to move by."""
    return SimpleNamespace(
        zeroth_order_step=lambda step, batches, optimizer: (losses, 7, None),
        move=lambda optimizer, moves: moved.append(moves),
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_loss_that_is_not_finite_is_skipped_and_logged_or_ends_the_run(tmp_path: Path, bad: float) -> None:
    recipe = Recipe(steps=2, optimizer=MeZO(lr=0.5, eps=0.25))
    moved: list[Any] = []
    with Folder(tmp_path) as folder, LogFile.create(folder, HEADER) as log:
        skipping = ZerothOrder(recipe, log, "fp16")
        found = skipping.step(session([(2.0, 1.0), (1.0, bad)], moved), 0, [])
        assert found.skipped and found.tokens == 7
        assert all(move.scale == 0.0 and move.keep == 1.0 for move in moved[0]) and len(moved[0]) == 2
        found = skipping.step(session([(2.0, 1.0), (1.0, 3.0)], moved), 1, [])
        assert not found.skipped and found.loss == 7 / 4
        # (2 - 1) / 0.5 and (1 - 3) / 0.5, each by half of the learning rate.
        assert [move.scale for move in moved[1]] == [0.5, -1.0]
        assert found.grad_norm == pytest.approx(((2.0**2 + 4.0**2) / 2) ** 0.5)
        cases: list[tuple[Precision, str]] = [
            ("bf16", "lower --lr or --eps, or train with --precision fp32"),
            ("fp32", "--eps"),
        ]
        for precision, advice in cases:
            ending = ZerothOrder(recipe, log, precision)
            with pytest.raises(NumericalError, match=rf"step 3: the losses along direction 1 are 1\.0 and .*{advice}$"):
                ending.step(session([(2.0, 1.0), (1.0, bad)], moved), 2, [])
        assert len(moved) == 2
        logged = read_log(folder)
        assert (logged.header, logged.moves) == (HEADER, moved)
