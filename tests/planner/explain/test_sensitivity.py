"""What would be faster is said of a plan whose program has no room on the device by the estimate too."""

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from tests.made.profiles import MIB


def test_a_device_with_just_enough_memory() -> None:
    """By the estimate nothing fits: the plan was found with nothing kept on the device. Before, this ended in an
    assertion."""
    named = WhatIf(
        model="smollm2-135m",
        gpu="rtx-4090",
        ssds=("samsung-990-pro",),
        host_memory_bytes=1024 * MIB,
        sequence_length=1024,
        micro_batch_sizes=(1,),
    )
    request = SolveRequest(1024 * MIB, device_memory_bytes=850 * MIB, micro_batches=1)
    plan = solve(estimate(named), request, told="screen")
    gains = {row.resource: row.throughput_gain for row in plan.sensitivity}
    assert min(gains.values()) >= -1e-5
    assert 0.1 < gains["drives"] < 1.01
