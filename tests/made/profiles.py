"""Profiles made up for tests: plausible machines and models of any size, without measuring anything; and plans of them.

Every figure follows from the arguments by simple arithmetic, so a test can say what it expects. It never touches disk.
"""

from collections.abc import Sequence

from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import (
    Layer,
    LayerClass,
    Machine,
    MixedBandwidth,
    Model,
    Profile,
    Rung,
    State,
    Timing,
    Volume,
)
from ssdplan.plans.documents.state_layout import ELEMENT_BYTES, Precision
from ssdplan.plans.documents.table import ROW_GRAIN, Table

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


def padded(elements: int) -> int:
    """Elements rounded up to the 2048 that every state is padded to."""
    return -(-elements // 2048) * 2048


def made_volume(
    *,
    read: float = 3e9,
    write: float = 2e9,
    mixed: tuple[tuple[float, float], ...] = (),
    free_bytes: int = 4 * TIB,
    path: str = "/tmp/ssdplan-volume",
) -> Volume:
    """A volume of `read` and `write` bytes/s; `mixed` are frontier points between reads only and writes only."""
    points = ((read, 0.0), *mixed, (0.0, write))
    return Volume(
        path=path,
        free_bytes=free_bytes,
        engine="threads",
        frontier=tuple(MixedBandwidth(read=r, write=w) for r, w in points),
    )


def made_machine(
    *,
    host_memory: int = 64 * GIB,
    device_memory: int = 24 * GIB,
    cores: int = 16,
    shared: bool = False,
    link: float = 20e9,
    d2h: float | None = None,
    update_rate: float = 1e9,
    device_update_rate: float | None = None,
    volumes: tuple[Volume, ...] | None = None,
) -> Machine:
    """A machine with a GPU, or with an emulated device when `shared` (compute, updates and copies share the cores)."""
    return Machine(
        name="made",
        cores=cores,
        device="cpu" if shared else "cuda",
        device_name="emulated" if shared else "made GPU",
        host_memory_bytes=host_memory,
        host_available_bytes=host_memory,
        device_memory_bytes=device_memory,
        compute_shares_cpu=shared,
        h2d_bandwidth=link,
        d2h_bandwidth=link if d2h is None else d2h,
        update_rate=update_rate,
        device_update_rate=device_update_rate,
        update_threads=cores,
        compute_threads=cores,
        volumes=volumes if volumes is not None else (made_volume(),),
    )


def made_model(
    *,
    blocks: int = 4,
    tied: bool = False,
    hidden: int = 64,
    vocab: int = 512,
    sequence: int = 32,
    precision: Precision = "bf16",
    micro_batch_sizes: tuple[int, ...] = (1, 2, 4),
    flops: float = 1e11,
    cold: float = 0.0,
    workspace_bytes_per_token: int = 256,
    context_bytes_per_token: int = 16,
    rungs: tuple[tuple[float, float], ...] = (),
) -> Model:
    """A transformer: embedding, `blocks` blocks of 12 hidden^2 elements, a head (a final norm, and vocab x hidden).

    With `tied`, the head uses the embedding's state and owns only its norm. A forward takes 2 x elements x tokens /
    flops seconds, a backward (recomputation included) three times that; the embedding takes a hundredth of the head.
    The first micro-batch of a stage takes `cold` times one row longer. `rungs` of a block, in rising order: what each
    keeps, of all that autograd would save, and what it leaves of the recomputation.
    """
    element = ELEMENT_BYTES[precision]
    embedding, block, norm = vocab * hidden, 12 * hidden * hidden, hidden
    table = None if tied or hidden % ROW_GRAIN else Table(rows=vocab, row_elements=hidden)
    states = [State(name="embedding", state_class="embedding", elements=padded(embedding), table=table)]
    layers = [Layer(name="embedding", layer_class="embedding", states=(0,))]
    for index in range(blocks):
        layers.append(Layer(name=f"block.{index}", layer_class="block", states=(len(states),)))
        states.append(State(name=f"block.{index}", state_class="block", elements=padded(block)))
    own = len(states)
    states.append(State(name="head", state_class="head", elements=padded(norm if tied else norm + embedding)))
    layers.append(Layer(name="head", layer_class="head", states=(own, 0) if tied else (own,)))
    work = {"embedding": embedding / 100, "block": float(block), "head": float(embedding)}
    classes = []
    for name, elements in work.items():
        timings = []
        for size in micro_batch_sizes:
            tokens = size * sequence
            forward = 2 * elements * tokens / flops
            timings.append(
                Timing(
                    micro_batch_size=size,
                    forward_seconds=forward,
                    backward_seconds=3 * forward,
                    forward_cold_seconds=cold * forward / size,
                    backward_cold_seconds=3 * cold * forward / size,
                    forward_workspace_bytes=tokens * workspace_bytes_per_token,
                    backward_workspace_bytes=2 * tokens * workspace_bytes_per_token,
                    saved_activation_bytes=34 * tokens * hidden * element,
                    rungs=tuple(
                        Rung(
                            name=f"rung-{number}",
                            values=(f"value-{number}",),
                            kept_bytes=max(round(kept * 34 * tokens * hidden * element), 1),
                            forward_seconds=forward,
                            backward_seconds=(2 + left) * forward,
                            forward_workspace_bytes=tokens * workspace_bytes_per_token,
                            backward_workspace_bytes=2 * tokens * workspace_bytes_per_token,
                        )
                        for number, (kept, left) in enumerate(rungs if name == "block" else (), 1)
                    ),
                )
            )
        classes.append(LayerClass(name=name, timings=tuple(timings)))
    return Model(
        name="made",
        architecture="MadeForCausalLM",
        fingerprint="0" * 64,
        parameters=embedding * (1 if tied else 2) + blocks * block + norm,
        hidden_size=hidden,
        vocab_size=vocab,
        precision=precision,
        sequence_length=sequence,
        context_bytes={size: size * sequence * context_bytes_per_token for size in micro_batch_sizes},
        states=tuple(states),
        layers=tuple(layers),
        classes=tuple(classes),
    )


def made_profile(
    *,
    machine: Machine | None = None,
    model: Model | None = None,
    blocks: int = 4,
    tied: bool = False,
    hidden: int = 64,
    vocab: int = 512,
    sequence: int = 32,
    precision: Precision = "bf16",
    micro_batch_sizes: tuple[int, ...] = (1, 2, 4),
) -> Profile:
    """A profile of a made machine and a made model; give either whole when its defaults do not do."""
    return Profile(
        schema="ssdplan.profile/1",
        created="2025-01-01T00:00:00Z",
        machine=machine or made_machine(),
        model=model
        or made_model(
            blocks=blocks,
            tied=tied,
            hidden=hidden,
            vocab=vocab,
            sequence=sequence,
            precision=precision,
            micro_batch_sizes=micro_batch_sizes,
        ),
    )


def with_fp32(model: Model, shares: Sequence[float]) -> Model:
    """`model`, which is not in fp32, with a share of each of its states kept in fp32: 1 all of it, 0 none, and between
    them it becomes two states. Classes follow as the profiler makes them; timings are of whole layers and stay."""
    states: list[State] = []
    parts: list[tuple[int, ...]] = []
    for state, share in zip(model.states, shares, strict=True):
        wide = round(share * state.elements / 2048) * 2048
        mine = []
        for elements, precision in ((state.elements - wide, None), (wide, "fp32")):
            if elements:
                mine.append(len(states))
                suffix = ".fp32" if precision else ""
                table = state.table if elements == state.elements and not precision else None
                made = {"name": f"{state.name}{suffix}", "state_class": f"{state.state_class}{suffix}"}
                states.append(
                    state.model_copy(update={**made, "elements": elements, "precision": precision, "table": table})
                )
        parts.append(tuple(mine))
    layers = [
        layer.model_copy(update={"states": tuple(part for index in layer.states for part in parts[index])})
        for layer in model.layers
    ]
    return Model(**{**dict(model), "states": tuple(states), "layers": tuple(layers)})


def with_frozen(model: Model, shares: Sequence[float]) -> Model:
    """`model` with a share of each of its states frozen: 1 all of it, 0 none, and between them it becomes two states,
    the trained one first. Classes follow as the profiler makes them; timings are of whole layers and stay."""
    states: list[State] = []
    parts: list[tuple[int, ...]] = []
    for state, share in zip(model.states, shares, strict=True):
        frozen = round(share * state.elements / 2048) * 2048
        mine = []
        for elements, is_frozen in ((state.elements - frozen, False), (frozen, True)):
            if elements:
                mine.append(len(states))
                name = f"{state.name}.frozen" if is_frozen else state.name
                table = state.table if elements == state.elements else None
                made = {"name": name, "elements": elements, "frozen": is_frozen, "table": table}
                states.append(state.model_copy(update=made))
        parts.append(tuple(mine))
    layers = [
        layer.model_copy(update={"states": tuple(part for index in layer.states for part in parts[index])})
        for layer in model.layers
    ]
    first = min(
        number for number, layer in enumerate(layers) if not all(states[index].frozen for index in layer.states)
    )
    used = {index: number for number, layer in enumerate(layers) for index in layer.states}
    for index, state in enumerate(states):
        if state.frozen:
            suffix = "frozen" if used[index] >= first else "forward"
            states[index] = state.model_copy(update={"state_class": f"{state.state_class}.{suffix}"})
    return Model(**{**dict(model), "states": tuple(states), "layers": tuple(layers)})


def planned(profile: Profile, request: SolveRequest) -> Plan:
    """What `solve` finds, but for the rows of other schedules, which take a good part of its time."""
    return solve(profile, request, compared=False)
