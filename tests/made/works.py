"""What forms are made for, in tests."""

from ssdplan.planner.program.stages import Work
from ssdplan.plans.documents.plan import ScheduleName


def work_of(micro_batch_size: int, micro_batches: int, schedule: ScheduleName = "vertical") -> Work:
    """Training by gradients with states in fp32."""
    return Work(
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        schedule=schedule,
    )
