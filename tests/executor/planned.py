"""Plans made by hand for tiny models: any fractions, no profile, no solver. The predictions are the schedule's own."""

from typing import Literal

from ssdplan.executor.model.model import StreamedModel
from ssdplan.plans.documents.plan import Plan, Prediction
from ssdplan.plans.documents.profile import Layer, LayerClass, Machine, MixedBandwidth, Model, State, Timing, Volume
from ssdplan.plans.documents.state_layout import OptimizerStates, Precision
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.profiler.profile import state_classes
from tests.plans.decided import decide

GIB = 1 << 30


def describe(model: StreamedModel, *, sequence_length: int, micro_batch_size: int, precision: Precision) -> Model:
    """The plan's view of a model, with timings that were never measured."""

    timing = Timing(
        micro_batch_size=micro_batch_size,
        forward_seconds=0.001,
        backward_seconds=0.003,
        forward_workspace_bytes=0,
        backward_workspace_bytes=0,
        saved_activation_bytes=0,
    )
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
            State(name=state.name, state_class=state_class, elements=state.elements, frozen=state.frozen)
            for state, state_class in zip(model.states, state_classes(model), strict=True)
        ),
        layers=tuple(
            Layer(name=layer.name, layer_class=layer.layer_class, states=layer.states) for layer in model.layers
        ),
        classes=tuple(LayerClass(name=name, timings=(timing,)) for name in classes),
        freeze=model.freeze,
        allow_unused_weights=model.allow_unused_weights,
    )


def machine(device: Literal["cpu", "cuda"] = "cpu") -> Machine:
    """Round figures."""
    frontier = (MixedBandwidth(read=2e9, write=0), MixedBandwidth(read=0, write=1e9))
    return Machine(
        name="made",
        cores=2,
        device=device,
        device_name="made",
        host_memory_bytes=GIB,
        host_available_bytes=GIB,
        device_memory_bytes=GIB,
        compute_shares_cpu=device == "cpu",
        h2d_bandwidth=1e10,
        d2h_bandwidth=1e10,
        update_rate=1e8,
        update_threads=2,
        compute_threads=1,  # torch's threads spin while they wait, and tests run beside each other
        volumes=(Volume(path=".", free_bytes=GIB, engine="threads", frontier=frontier),),
    )


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
    schedule: Literal["vertical", "horizontal"] = "vertical",
    device: Literal["cpu", "cuda"] = "cpu",
    optimizer_states: OptimizerStates = "fp32",
    clip_grad_norm: float | None = None,
    unified: bool = False,
) -> Plan:
    """A plan with these fractions on host, `on_device` and `across_turn` on the device."""
    shape = describe(model, sequence_length=sequence_length, micro_batch_size=micro_batch_size, precision=precision)
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
        schedule=schedule,
        optimizer_states=optimizer_states,
        clip_grad_norm=clip_grad_norm,
        unified=unified,
    )
    built = build_schedule(shape, decision)
    traffic = built.traffic("steady")
    prediction = Prediction(
        step_seconds=1.0,
        tokens_per_second=1.0,
        peak_host_bytes=built.arenas["host"],
        peak_device_bytes=built.arenas["device"],
        host_arena_bytes=built.arenas["host"],
        device_arena_bytes=built.arenas["device"],
        ssd_bytes=built.arenas["ssd"],
        ssd_read_bytes=traffic["read"],
        ssd_write_bytes=traffic["write"],
        h2d_bytes=traffic["h2d"],
        d2h_bytes=traffic["d2h"],
        bound_by="nothing measured",
        busy={},
        program_seconds=0.0,
    )
    return Plan(
        profile_sha256="0" * 64,
        model=shape,
        machine=machine(device),
        decision=decision,
        prediction=prediction,
        alternatives=(),
        sensitivity=(),
    )
