"""What would be faster, said of plans that were found where memory is scarce: by the estimate nothing fits, or the
leanest placement alone does."""

from typing import Any

import pytest

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.explain.sensitivity import scaled_compute
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.profile import Profile
from tests.made.profiles import MIB


def profile(model: str, **changes: Any) -> Profile:
    usual: dict[str, Any] = {"gpu": "rtx-4090", "ssds": ("samsung-990-pro",), "host_memory_bytes": 1024 * MIB}
    return estimate(WhatIf(model=model, **(usual | changes)))


def test_a_device_with_just_enough_memory() -> None:
    """By the estimate nothing fits: the plan was found with nothing kept on the device. Before, this ended in an
    assertion."""
    named = profile("smollm2-135m", sequence_length=1024, micro_batch_sizes=(1,))
    request = SolveRequest(1024 * MIB, device_memory_bytes=850 * MIB, micro_batches=1)
    plan = solve(named, request)
    (alternative,) = plan.alternatives
    assert alternative.io_tokens_per_second >= alternative.tokens_per_second
    gains = {row.resource: row.throughput_gain for row in plan.sensitivity}
    assert min(gains.values()) >= -1e-5
    assert 0.1 < gains["drives"] < 1.01


def test_a_faster_part_does_not_bring_what_scarce_memory_costs() -> None:
    """Beside so little host memory only the leanest placement fits, whose step is longer than the program's best. A GPU
    twice as fast was said to bring 38%, and twice as many SSDs 162%."""
    named = profile("llama-3.1-8b", ssds=("samsung-990-pro*2",), sequence_length=2048, micro_batch_sizes=(4,))
    request = SolveRequest(1024 * MIB, micro_batches=4)
    plan = solve(named, request, told="screen")
    gains = {row.resource: row.throughput_gain for row in plan.sensitivity}
    faster = named.model_copy(update={"model": scaled_compute(named.model, 0.5)})
    found = solve(faster, request, told="step").prediction.tokens_per_second / plan.prediction.tokens_per_second - 1
    assert gains["compute"] == pytest.approx(found, abs=0.01)
    assert 0.5 < gains["drives"] < 1.01


def test_a_batch_that_is_placed_very_differently_on_a_faster_gpu() -> None:
    """Its plan waits for other things than the plan as it is, by which a GPU twice as fast was said to bring 78%."""
    named = profile("llama-3.2-3b", host_memory_bytes=512 << 30, sequence_length=512, micro_batch_sizes=(1,))
    request = SolveRequest(512 << 30, micro_batches=12)
    plan = solve(named, request, told="screen")
    (gain,) = (row.throughput_gain for row in plan.sensitivity if row.resource == "compute")
    faster = named.model_copy(update={"model": scaled_compute(named.model, 0.5)})
    found = solve(faster, request, told="step").prediction.tokens_per_second / plan.prediction.tokens_per_second - 1
    assert gain == pytest.approx(found, abs=0.1)


@pytest.mark.parametrize(
    ("model", "ssd", "gib", "micro_batch"),
    [("llama-3.2-3b", "samsung-990-pro", 64, (1, 8, 2048)), ("qwen3-8b", "micron-9550-max", 48, (1, 8, 4096))],
    ids=["all-on-the-device", "shorter-chunks"],
)
def test_a_very_different_plan_is_the_one_that_solve_finds(
    model: str, ssd: str, gib: int, micro_batch: tuple[int, int, int]
) -> None:
    """On a GPU twice as fast the first keeps everything on the device, and the second hides more by shorter chunks:
    61% and 45% were said, where 96% and 69% are found."""
    count, size, length = micro_batch
    gpu, host = "a100-80gb", gib << 30
    named = profile(model, gpu=gpu, ssds=(ssd,), host_memory_bytes=host, sequence_length=length)
    request = SolveRequest(host, micro_batches=count, micro_batch_size=size)
    plan = solve(named, request, told="screen")
    (gain,) = (row.throughput_gain for row in plan.sensitivity if row.resource == "compute")
    faster = named.model_copy(update={"model": scaled_compute(named.model, 0.5)})
    found = solve(faster, request, told="step").prediction.tokens_per_second / plan.prediction.tokens_per_second - 1
    assert gain == pytest.approx(found, abs=0.05)
