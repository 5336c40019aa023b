"""Where the largest micro-batch that was measured gained much, the batch's reason says how to measure larger ones."""

from typing import Any

import pytest

from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.profile import Profile
from tests.made.profiles import MIB, made_model, made_profile


def profile(gain: float, **changes: Any) -> Profile:
    """In micro-batches of four a row takes so much less of a block's compute than in those of two."""
    made = made_profile(model=made_model(blocks=4, micro_batch_sizes=(1, 2, 4)))
    part = {4: 1 - gain}
    classes = [
        each.model_copy(
            update={
                "timings": tuple(
                    timing.model_copy(
                        update={
                            name: getattr(timing, name) * part.get(timing.micro_batch_size, 1.0)
                            for name in ("forward_seconds", "backward_seconds")
                        }
                    )
                    for timing in each.timings
                )
            }
        )
        for each in made.model.classes
    ]
    model = made.model.model_copy(update={"classes": tuple(classes), **changes})
    return made.model_copy(update={"model": model})


def batch_reason(given: Profile, size: int) -> str:
    request = SolveRequest(400 * MIB, micro_batch_size=size, micro_batches=2)
    return next(reason.text for reason in solve(given, request).reasons if reason.topic == "batch")


@pytest.mark.parametrize(("gain", "size", "says"), [(0.1, 4, True), (0.02, 4, False), (0.1, 2, False)])
def test_larger_ones_are_worth_measuring(gain: float, size: int, says: bool) -> None:
    words = "A row took 10% less compute in micro-batches of 4 than of 2, and larger ones were not measured: "
    words += "ssdplan profile --micro-batch-sizes 4,8 tells."
    assert batch_reason(profile(gain), size).endswith(words) == says
    assert ("tells" in batch_reason(profile(gain), size)) == says


def test_a_what_if_has_larger_ones_itself() -> None:
    assert "tells" not in batch_reason(profile(0.1, figures="estimated"), 4)
