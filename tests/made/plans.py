"""Plans for tests: of a streamed model with any fractions, without a profile or a solver (`make_plan`), and around any
decision, with what the simulator says of it (`planned`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from ssdplan.planner.predict.simulator import simulate
from ssdplan.plans.documents.matrices import MatrixUpdate
from ssdplan.plans.documents.overlap import Overlap
from ssdplan.plans.documents.plan import Alternative, Decision, Plan, Prediction, Saved, Sensitivity
from ssdplan.plans.documents.profile import Layer, LayerClass, Machine, Model, Network, Rung, State, Timing
from ssdplan.plans.documents.state_layout import Masters, OptimizerStates, Precision
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.graph.ops import Schedule
from ssdplan.plans.schedule.build import build_schedule
from tests.made.decisions import decide
from tests.made.profiles import GIB, made_machine, made_model, made_volume

if TYPE_CHECKING:
    from ssdplan.executor.model.model import StreamedModel


def describe(
    model: StreamedModel,
    *,
    sequence_length: int,
    micro_batch_size: int,
    precision: Precision,
    rungs: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Model:
    """The plan's view of a model, with timings that were never measured. `rungs` of its blocks -> what they keep, which
    is taken to be a MiB; in int8 by those whose names say so."""
    from ssdplan.executor.zeroth_order import table_of
    from ssdplan.profiler.activations import IN_INT8
    from ssdplan.profiler.profile import state_classes

    found = table_of(model)
    timing = Timing(
        micro_batch_size=micro_batch_size,
        forward_seconds=0.001,
        backward_seconds=0.003,
        forward_workspace_bytes=0,
        backward_workspace_bytes=0,
        saved_activation_bytes=0,
    )
    made = tuple(
        Rung(
            name=name,
            format="int8" if name.endswith(IN_INT8) else None,
            values=tuple(values),
            kept_bytes=1 << 20,
            forward_seconds=0.001,
            backward_seconds=0.002,
            forward_workspace_bytes=0,
            backward_workspace_bytes=0,
        )
        for name, values in rungs.items()
    )
    blocks = {layer.layer_class for layer in model.layers[1:-1]}
    classes = sorted({layer.layer_class for layer in model.layers})
    return Model(
        name=model.name,
        path=str(model.path),
        architecture=model.architecture,
        fingerprint=model.fingerprint,
        parameters=sum(state.elements for state in model.states),
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        precision=precision,
        sequence_length=sequence_length,
        context_bytes={micro_batch_size: 0},
        states=tuple(
            State(
                name=state.name,
                state_class=state_class,
                elements=state.elements,
                frozen=state.frozen,
                precision=state.precision,
                table=found[1] if found and found[0] == number else None,
                matrices=state.matrices,
            )
            for number, (state, state_class) in enumerate(zip(model.states, state_classes(model), strict=True))
        ),
        layers=tuple(
            Layer(name=layer.name, layer_class=layer.layer_class, states=layer.states) for layer in model.layers
        ),
        classes=tuple(
            LayerClass(name=name, timings=(timing.model_copy(update={"rungs": made if name in blocks else ()}),))
            for name in classes
        ),
        freeze=model.freeze,
        allow_unused_weights=model.allow_unused_weights,
        matrix_updates=tuple(
            MatrixUpdate(rows=rows, columns=columns, seconds=1e-3, device_seconds=1e-3)
            for rows, columns in sorted({matrix.shape for state in model.states for matrix in state.matrices})
        ),
    )


def machine(device: Literal["cpu", "cuda"] = "cpu") -> Machine:
    """Round figures. One thread computes: torch's threads spin while they wait, and tests run beside each other."""
    volume = made_volume(read=2e9, write=1e9, free_bytes=GIB, path=".")
    shape = made_machine(
        host_memory=GIB,
        device_memory=GIB,
        cores=2,
        shared=device == "cpu",
        link=1e10,
        update_rate=1e8,
        volumes=(volume,),
    )
    rates = {"update_rate_int8": 5e7, "pending_rate_host": 1e9, "rows_bandwidth": 1e10}
    return shape.model_copy(update={"compute_threads": 1, **rates})


def make_plan(
    model: StreamedModel,
    *,
    sequence_length: int = 16,
    micro_batch_size: int = 2,
    micro_batches: int = 2,
    precision: Precision = "fp32",
    alpha: float = 0.0,
    optimizer: float = 0.0,
    parameters: float = 0.0,
    checkpoints: float = 0.0,
    gradient: float = 1.0,
    chunk: int = 1 << 14,
    lookahead: int = 2,
    on_device: float = 0.0,
    across_turn: float = 0.0,
    updated: float = 0.0,
    inputs: float = 0.0,
    schedule: Literal["vertical", "horizontal"] = "vertical",
    device: Literal["cpu", "cuda"] = "cpu",
    optimizer_states: OptimizerStates = "fp32",
    masters: Masters = "fp32",
    clip_grad_norm: float | None = None,
    unified: bool = False,
    saved: Sequence[Saved] = (),
    rungs: Mapping[str, Sequence[str]] = MappingProxyType({}),
    zeroth_order: ZerothOrder | None = None,
    ranks: int = 1,
    behind: bool = False,
    visiting: bool = False,
    overlap: Overlap = "all",
) -> Plan:
    """A plan for so many `ranks` (`behind`: `exchange_behind`) with these fractions on host; `on_device`,
    `across_turn`, `updated` and `inputs` on the device, `visiting`: `matrices_on_device`; `saved` of every class of
    blocks, by `rungs`."""
    shape = describe(
        model,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        precision=precision,
        rungs=rungs,
    )
    decision = decide(
        shape,
        alpha=alpha,
        optimizer=optimizer,
        parameters=parameters,
        checkpoints=checkpoints,
        gradient=gradient,
        micro_batches=micro_batches,
        micro_batch_size=micro_batch_size,
        chunk=chunk,
        lookahead=lookahead,
        on_device=on_device,
        across_turn=across_turn,
        updated=updated,
        inputs=inputs,
        schedule=schedule,
        optimizer_states=optimizer_states,
        masters=masters,
        clip_grad_norm=clip_grad_norm,
        unified=unified,
        zeroth_order=zeroth_order,
        overlap=overlap,
    )
    if saved:
        blocks = {layer.layer_class for layer in shape.layers[max(shape.first_trained, 1) : -1]}
        update = {"recompute": "part", "saved": {name: tuple(saved) for name in sorted(blocks)}}
        decision = decision.model_copy(update=update)
    decision = decision.model_copy(update={"ranks": ranks, "exchange_behind": behind})
    if visiting:
        decision = decision.model_copy(update={"matrices_on_device": True})
    each = [build_schedule(shape, decision, rank) for rank in range(ranks)]
    most = {tier: max(built.arenas[tier] for built in each) for tier in each[0].arenas}
    built = replace(each[0], arenas=most)
    network = Network(ranks=ranks, gather_bandwidth=1e9, exchange_bandwidth=1e9, add_rate=1e10) if ranks > 1 else None
    return Plan(
        profile_sha256="0" * 64,
        model=shape,
        machine=machine(device).model_copy(update={"network": network}),
        decision=decision,
        prediction=_prediction(
            built, seconds=1.0, speed=1.0, bound_by="nothing measured", busy={}, program_seconds=0.0
        ),
        alternatives=(),
        sensitivity=(),
    )


def planned(model: Model, machine: Machine, decision: Decision, schedule: Schedule) -> Plan:
    """The plan of `decision`, whose `schedule` is given; alternatives and sensitivities are made up."""
    timeline = simulate(schedule.steady, model, machine, decision.micro_batch_size)
    seconds = timeline.seconds
    n, size = decision.micro_batches, decision.micro_batch_size
    speed = n * size * decision.sequence_length / seconds
    busy = {name: min(spent / seconds, 1.0) for name, spent in timeline.busy().items()}
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
        prediction=_prediction(
            schedule,
            seconds=seconds,
            speed=speed,
            bound_by="ssd",
            busy=busy,
            program_seconds=seconds,
            workspace=1 << 20,
        ),
        alternatives=alternatives,
        sensitivity=sensitivity,
    )


def _prediction(
    schedule: Schedule,
    *,
    seconds: float,
    speed: float,
    bound_by: str,
    busy: dict[str, float] | None = None,
    program_seconds: float = 0.0,
    workspace: int = 0,
) -> Prediction:
    """Bytes are the schedule's own; `workspace` is what compute takes of the device beside its arena."""
    traffic = schedule.traffic("steady")
    return Prediction(
        step_seconds=seconds,
        tokens_per_second=speed,
        peak_host_bytes=schedule.arenas["host"],
        peak_device_bytes=schedule.arenas["device"] + workspace,
        host_arena_bytes=schedule.arenas["host"],
        device_arena_bytes=schedule.arenas["device"],
        ssd_bytes=schedule.arenas["ssd"],
        ssd_read_bytes=traffic["read"],
        ssd_write_bytes=traffic["write"],
        h2d_bytes=traffic["h2d"],
        d2h_bytes=traffic["d2h"],
        bound_by=bound_by,
        busy=busy or {},
        program_seconds=program_seconds,
    )


def small_plan() -> Plan:
    """Of two blocks, for whoever wants a plan and not what it says."""
    model = made_model(blocks=2, hidden=64)
    decision = decide(model)
    return planned(model, made_machine(), decision, build_schedule(model, decision))
