"""A plan around any decision, for tests of what shows plans: its prediction is what the simulator says."""

from ssdplan.planner.predict.simulator import simulate
from ssdplan.plans.documents.plan import Alternative, Decision, Plan, Prediction, Sensitivity
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.graph.ops import Schedule


def planned(model: Model, machine: Machine, decision: Decision, schedule: Schedule) -> Plan:
    """The plan of `decision`, whose `schedule` is given; alternatives and sensitivities are made up."""
    timeline = simulate(schedule.steady, model, machine, decision.micro_batch_size)
    traffic, seconds = schedule.traffic("steady"), timeline.seconds
    n, size = decision.micro_batches, decision.micro_batch_size
    speed = n * size * decision.sequence_length / seconds
    prediction = Prediction(
        step_seconds=seconds,
        tokens_per_second=speed,
        peak_host_bytes=schedule.arenas["host"],
        peak_device_bytes=schedule.arenas["device"] + (1 << 20),
        host_arena_bytes=schedule.arenas["host"],
        device_arena_bytes=schedule.arenas["device"],
        ssd_bytes=schedule.arenas["ssd"],
        ssd_read_bytes=traffic["read"],
        ssd_write_bytes=traffic["write"],
        h2d_bytes=traffic["h2d"],
        d2h_bytes=traffic["d2h"],
        bound_by="ssd",
        busy={name: min(spent / seconds, 1.0) for name, spent in timeline.busy().items()},
        program_seconds=seconds,
    )
    alternatives = tuple(
        Alternative(
            micro_batch_size=rows,
            micro_batches=count,
            tokens_per_second=speed * min(count / n, 1.5),
            delay_ratio=0.0,
            program_seconds=1.0,
            compute_tokens_per_second=speed * 2,
            io_tokens_per_second=speed * count / n,
            simulated=(rows, count) == (size, n),
        )
        for rows in (1, 2)
        for count in (1, 2, 4, 8, 16)
    )
    sensitivity = (
        Sensitivity(resource="host memory", unit="GiB", seconds_per_unit=-0.01, throughput_gain=0.09),
        Sensitivity(resource="compute", unit="10%", seconds_per_unit=0.0, throughput_gain=0.0),
    )
    return Plan(
        schema="ssdplan.plan/1",
        profile_sha256="0" * 64,
        model=model,
        machine=machine,
        decision=decision,
        prediction=prediction,
        alternatives=alternatives,
        sensitivity=sensitivity,
    )
