"""Profile: what was measured of one machine and one model. The profiler writes it, the planner reads it.

Owns the fields and their units: bytes, seconds, bytes a second, elements a second. It measures and decides nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .base import Bytes, Count, Document, Fraction, Index, Kept, Name, Part, Positive, Seconds, Sparing
from .emulation import Emulation
from .matrices import Matrix, MatrixUpdate, badly_laid
from .rows import row_lengths
from .state_layout import GRAIN, Precision
from .table import Table

Origin = Literal["measured", "estimated", "emulated"]
"""Emulated: as estimated, for a small stand-in whose operations are made to last so (`Machine.emulation`)."""
LOGITS_CHUNK_BYTES = 512 << 20
"""The most that a chunk's fp32 logits take; the loss and its gradient take about three times as much."""
LEAST_CHUNK_TOKENS = 512
"""Fewer would spend their time on the head's weights and gradient, which every chunk reads, or writes and adds."""


def logits_chunk_tokens(vocab_size: int, gpu_bytes: int = 0) -> int:
    """How many tokens the head of a model takes at a time: a power of two, as micro-batches' lengths often are. On a
    GPU of more than 20 GiB logits may take a fortieth of its memory, at most four times the usual."""
    most = max(LOGITS_CHUNK_BYTES, min(gpu_bytes // 40, 4 * LOGITS_CHUNK_BYTES)) // (4 * vocab_size)
    return max(1 << most.bit_length() >> 1, LEAST_CHUNK_TOKENS)


class MixedBandwidth(Part):
    """What a volume sustains when it reads and writes at once, bytes/s each; (r, 0) reads only, (0, w) writes only."""

    read: float = Field(ge=0.0, allow_inf_nan=False)
    write: float = Field(ge=0.0, allow_inf_nan=False)


class Volume(Part):
    """One place that a store may stripe over."""

    path: str
    free_bytes: Bytes
    """On its file system, or of the blank volume that was measured, if that is more."""
    engine: Literal["io_uring", "threads"]
    frontier: tuple[MixedBandwidth, ...] = Field(min_length=2)
    """From reads only to writes only; the two ends are required, points between them are optional."""
    read_cores: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Cores that compute does without while the volume reads at full bandwidth, checksums included; it matters where
    they are shared."""
    write_cores: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    read_cores_unsummed: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """The same of what an update sums in passing. None: nobody measured it, and plans count on `read_cores`."""
    write_cores_unsummed: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    bandwidth_kept: Kept = 1.0
    """The fraction of its bandwidth that the volume keeps while compute runs on the same cores."""
    endurance_bytes: Annotated[int, Field(ge=1, lt=1 << 60)] | None = None
    """What may be written to the drive in its life, by its maker's rating; None when nobody said."""

    @model_validator(mode="after")
    def _ends(self) -> Self:
        first, last = self.frontier[0], self.frontier[-1]
        if not (first.read > 0 and first.write == 0 and last.write > 0 and last.read == 0):
            raise ValueError("frontier must start at reads only and end at writes only")
        return self


class Network(Part):
    """What ranks that train together, this machine's among them, were measured to exchange while all of them did."""

    ranks: Annotated[int, Field(ge=2, le=1024)]
    gather_bandwidth: Positive
    """Bytes a second that each rank receives of the others' shares of parameters."""
    exchange_bandwidth: Positive
    """The same of gradients."""
    latency_seconds: Seconds = 0.0
    """What a collective takes however little it moves."""
    add_rate: Positive
    """Bytes a second of received gradients that compute adds up."""
    compute_kept: Kept | None = None
    """The fraction of its pace that compute keeps while collectives run one after the other. None, as in what follows:
    nobody measured it, and plans count on no loss."""
    kept_beside_compute: Kept | None = None
    """The same of collectives while compute runs."""
    copies_kept: Kept | None = None
    """The fraction of their pace that copies to and from the device keep while collectives run."""
    kept_beside_copies: Kept | None = None
    """The same of collectives while copies run."""


class Machine(Part):
    """Rates and memory of the machine that a plan is for."""

    name: str
    cores: Count
    device: Literal["cpu", "cuda"]
    device_name: str
    device_index: Index = 0
    """Which of several GPUs, as torch numbers them."""
    host_memory_bytes: Bytes
    host_available_bytes: Bytes
    device_memory_bytes: Bytes
    """For the emulated device, a share of DRAM."""
    process_bytes: Bytes | None = None
    """What a process of ours takes, as the kernel counts it, before a plan's first byte: Python, torch and its
    libraries, the opened model, what these keep once its layers ran, without the model's `kernels`. None: nobody
    measured it."""
    compute_shares_cpu: bool
    """True when compute, updates and link copies run on the same cores (no GPU)."""
    h2d_bandwidth: Positive
    d2h_bandwidth: Positive
    update_rate: Positive
    """Elements a second of the fused optimizer on all threads, fp32 states, low-precision copy included."""
    update_rate_bf16: Positive | None = None
    """The same with both moments in bf16. None: nobody measured it, and plans count on `update_rate`."""
    update_rate_int8: Positive | None = None
    """The same with both moments in int8. None: nobody measured it, and no plan has them."""
    checksum_rate: Positive | None = None
    """Bytes a second of optimizer states of which an update takes the checksums, before and after, in passing. None:
    nobody measured it, and plans count on nothing for it."""
    perturb_rate: Positive | None = None
    """Elements a second of a pass that draws a direction and writes both perturbed copies, in the profile's precision
    (ZO-Offloading section 2.3). None: nobody measured it, and there are no zeroth-order plans."""
    pending_rate: Positive | None = None
    """Elements a second by which a pass takes longer for each update that is pending: it draws one direction more."""
    perturb_rate_masters: Positive | None = None
    """`perturb_rate` over fp32 masters, which a pass rounds first. None: as in fp32; plans count on `perturb_rate`."""
    pending_rate_masters: Positive | None = None
    """`pending_rate` over fp32 masters."""
    pending_rate_host: Positive | None = None
    """`pending_rate` of host, over what lives there. None: nobody measured it, and no table comes by rows."""
    rows_bandwidth: Positive | None = None
    """Bytes a second of rows of a table on host that are packed side by side there."""
    device_update_rate: Positive | None = None
    """Elements a second of the optimizer on the device, of states that stay there, the norm of their gradient included.
    None: nobody measured it, and no plan for a GPU has any stay there; the emulated device counts on `update_rate`."""
    dram_bandwidth: Positive | None = None
    """Bytes a second that drives, links and updates move through DRAM together. None: each has what it has alone."""
    compute_beside_updates: Kept | None = None
    """The fraction of its pace that compute keeps while updates run one after the other on the same cores."""
    updates_beside_compute: Kept | None = None
    """The same of updates while compute runs. None: nobody measured it, and plans count on no loss, a quarter for
    compute and three for updates."""
    update_threads: Count
    compute_threads: Count
    volumes: tuple[Volume, ...] = Field(min_length=1)
    figures: Origin = "measured"
    """Estimated: from data sheets, for a machine that was not there."""
    emulation: Emulation | None = None
    """Of an emulated machine alone: each operation of a run is made to last as these figures say."""
    network: Network | None = None
    """None: nobody measured any, and plans are for one rank."""

    @model_validator(mode="after")
    def _emulated(self) -> Self:
        if (self.emulation is not None) != (self.figures == "emulated"):
            raise ValueError("figures = emulated and emulation belong together")
        return self


class State(Sparing):
    """A flat vector of parameters that streams as one (`state_layout.py`): its elements, and the class that shares a
    placement."""

    _SPARED = ("precision", "table", "matrices")

    name: Name
    state_class: Name
    elements: Count
    """Padded to a multiple of `GRAIN`."""
    frozen: bool = False
    """Its parameters stay what they are: no gradient, no optimizer states, no update. All states of a class agree."""
    precision: Literal["fp32"] | None = None
    """Of its parameters, where the model keeps these in fp32 and others not; None: the model's. All states of a class
    agree."""
    table: Table | None = None
    """What it is, if it is a table of token embeddings and no more, of which the model reads its tokens' rows alone."""
    matrices: tuple[Matrix, ...] = Field(default=(), max_length=1 << 16)
    """What it is, if Muon updates it; empty of all that AdamW does. All states of a class agree."""

    @property
    def muon(self) -> bool:
        """Whether Muon updates it, whole matrices at a time."""
        return bool(self.matrices)

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        if self.elements % GRAIN:
            raise ValueError(f"elements = {self.elements} is not a multiple of {GRAIN}")
        if self.table and not 0 <= self.elements - self.table.elements < GRAIN:
            raise ValueError(f"table: {self.table.rows} rows of {self.table.row_elements} are not its elements")
        other = "a state that is frozen or a table has none" if self.frozen or self.table else ""
        if self.matrices and (why := other or badly_laid(self.matrices, self.elements)):
            raise ValueError(f"matrices: {why}")
        return self


class Layer(Part):
    """A unit of streaming; `states` are indices into the model's states, own first, tied ones after."""

    name: Name
    layer_class: Name
    states: tuple[Index, ...] = Field(min_length=1)


class SubLayer(Part):
    """A leaf module of a block, or a stretch of functional code between two of them, in order of execution (PyAO
    section 3.4)."""

    name: Name
    saved_bytes: Bytes
    """What autograd saves of what is computed there, each storage once; weights and the block's input are not
    counted."""
    forward_seconds: Seconds
    """The median of `samples` rounds, each operation waited for: together they take longer than the block does."""
    samples: Count


MAX_RUNGS = 64
"""Of a class at a micro-batch size; a profile has about five."""
PAPER = "paper"
"""The name of the rung that keeps what PyAO's rule does."""


class Rung(Sparing):
    """One choice of what a block's forward keeps for its backward, beside the block's input (PyAO sections 4 and 5).

    The rungs of a class go from little that is kept to all of it. That nothing is kept is no rung: it is the `Timing`.
    """

    _SPARED = ("format",)

    name: Name
    """The same at every micro-batch size."""
    format: Literal["int8"] | None = None
    """Of the values that may be kept so (`executor/model/packed.py`); None: as they are. With int8 gradients are not
    exact, so only users who allow it get such rungs."""
    values: tuple[Name, ...] = Field(min_length=1, max_length=4096)
    """What is kept, by the names that the traced block has for it (`executor/model/traced.py`)."""
    kept_bytes: Count
    """Of one micro-batch of whole rows."""
    forward_seconds: Seconds
    """With nothing of what is kept leaving the device's memory: of a warm micro-batch, as in `Timing`."""
    backward_seconds: Seconds
    forward_workspace_bytes: Bytes
    backward_workspace_bytes: Bytes
    process_growth_bytes: Bytes | None = None

    def longer(self, forward: float, backward: float) -> Self:
        """The same where a forward and a backward take so many times as long."""
        update = {
            "forward_seconds": self.forward_seconds * forward,
            "backward_seconds": self.backward_seconds * backward,
        }
        return self.model_copy(update=update)


def quickest(rungs: Iterable[Rung]) -> Rung | None:
    """The exact rung whose forward and backward take least together; None of none."""
    exact = (rung for rung in rungs if rung.format is None)
    return min(exact, key=lambda rung: rung.forward_seconds + rung.backward_seconds, default=None)


def rungs_to_save_by(rungs: Sequence[Rung], *, by_paper: bool) -> tuple[Rung, ...]:
    """The rungs by which all pairs of a class save where the user asks for PyAO's rule, or for the quickest: the exact
    one, and those that keep the same values in another format. None where there is no such rung."""
    best = next((rung for rung in rungs if rung.name == PAPER), None) if by_paper else quickest(rungs)
    return tuple(rung for rung in rungs if best and rung.values == best.values)


class CompressionError(Part):
    """How far off a block's gradients are where a rung keeps its values in int8: the norm of the difference from the
    exact ones, over the norm of these. Measured with real weights, on hidden states that the model makes of random
    tokens, and for a random gradient of the output."""

    layer: Name
    rung: Name
    parameters: float = Field(ge=0.0, allow_inf_nan=False)
    """Of the gradients of all its parameters together."""
    hidden: float = Field(ge=0.0, allow_inf_nan=False)
    """Of the gradient that goes on to the layer below; 0 where none does."""


class Timing(Sparing):
    """One layer class at one micro-batch size. Backward includes the recomputation of the layer's forward."""

    _SPARED = ("sublayers", "rungs")

    micro_batch_size: Count
    forward_seconds: Seconds
    """Of a micro-batch after another one: the layer's weights are in caches, as far as these hold them."""
    backward_seconds: Seconds
    forward_cold_seconds: Seconds = 0.0
    """How much longer the first micro-batch of a stage takes, which finds nothing of the layer in caches."""
    backward_cold_seconds: Seconds = 0.0
    forward_workspace_bytes: Bytes
    """Peak device bytes that compute itself takes beyond weights, hidden states and gradients."""
    backward_workspace_bytes: Bytes
    saved_activation_bytes: Bytes
    """What autograd would keep if nothing were recomputed."""
    process_growth_bytes: Bytes | None = None
    """By how much the process grew, as the kernel counts it, while micro-batches followed each other through the layer:
    the workspace and what malloc leaves between its tensors. None: not measured, as where the device has its memory."""
    sublayers: tuple[SubLayer, ...] = Field(default=(), max_length=4096)
    """Of blocks that could be traced."""
    rungs: tuple[Rung, ...] = Field(default=(), max_length=MAX_RUNGS)
    """In rising order of bytes; only blocks that run backward have any, and only where they could be traced."""

    @model_validator(mode="after")
    def _climbs(self) -> Self:
        names = [rung.name for rung in self.rungs]
        if len(set(names)) != len(names):
            raise ValueError("two rungs have one name")
        sizes = [rung.kept_bytes for rung in self.rungs]
        if sizes != sorted(sizes):
            raise ValueError("the rungs are not in rising order of bytes")
        return self

    def rung(self, name: str) -> Rung:
        """The rung of that name. Raises KeyError when there is none."""
        for rung in self.rungs:
            if rung.name == name:
                return rung
        raise KeyError(name)

    def by_rung(self, name: str) -> "Rung | Timing":
        """Seconds and bytes of a block by that rung; with an empty name, of one that keeps nothing but its input."""
        return self.rung(name) if name else self

    def forward_stage_seconds(self, micro_batches: int) -> float:
        """A stage's forwards, of so many micro-batches one after the other."""
        return self.forward_cold_seconds + micro_batches * self.forward_seconds

    def backward_stage_seconds(self, micro_batches: int) -> float:
        """A stage's backwards."""
        return self.backward_cold_seconds + micro_batches * self.backward_seconds


class LayerClass(Part):
    """Layers of one shape."""

    name: Name
    timings: tuple[Timing, ...] = Field(min_length=1)


class Kernels(Part):
    """What libraries keep, whatever becomes of the tensors, once layers ran on micro-batches of so many tokens."""

    tokens: Count
    kept_bytes: Bytes


class Model(Sparing):
    """The model as the planner sees it: layers, states and what each class costs."""

    _SPARED = ("compression", "matrix_updates", "busiest_expert", "rows")

    name: str
    path: str = ""
    """The directory that was profiled; empty when there was none."""
    architecture: str
    fingerprint: str
    parameters: Count
    """Distinct parameters, padding not counted."""
    hidden_size: Count
    vocab_size: Count
    precision: Precision
    sequence_length: Count
    context_bytes: dict[int, Bytes]
    """Micro-batch size -> device bytes a micro-batch keeps for the whole step (masks, rotary tables, token ids)."""
    states: tuple[State, ...] = Field(min_length=1)
    layers: tuple[Layer, ...] = Field(min_length=3)
    """embedding, blocks in order, head."""
    classes: tuple[LayerClass, ...] = Field(min_length=3)
    figures: Origin = "measured"
    """Estimated: seconds and bytes of the classes follow from the model's shape by formulas."""
    head_chunk_tokens: Count | None = None
    """Tokens whose logits the head makes at a time; None: a whole micro-batch's. A run keeps to it."""
    workspace_margin: Fraction = 0.0
    """What estimated workspaces were raised by for the allocator's fragmentation; measured ones have it in them."""
    freeze: tuple[str, ...] = ()
    """The patterns of parameter names that froze its frozen states; a run opens the model by them."""
    allow_unused_weights: bool = False
    """Whether stored tensors that the model has no place for may be left out; a run opens the model so."""
    kernels: tuple[Kernels, ...] = ()
    """For every number of tokens that a micro-batch can have, as far as a process keeps anything for it."""
    compression: tuple[CompressionError, ...] = Field(default=(), max_length=1 << 16)
    """Of each block and each of its int8 rungs; empty where nobody measured it."""
    matrix_updates: tuple[MatrixUpdate, ...] = Field(default=(), max_length=1 << 16)
    """Of each shape of the matrices that Muon updates."""
    busiest_expert: Positive | None = None
    """Tokens of the busiest expert over those of a mean one, of the blocks that were measured, on made hidden states;
    None where none was counted."""
    rows: Literal["whole"] | None = None
    """Whole: every row is one sequence without padding, and needs no mask; a run takes no others. None: any rows."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        classes = {entry.name for entry in self.classes}
        for layer in self.layers:
            if layer.layer_class not in classes:
                raise ValueError(f"layer {layer.name} has unknown class {layer.layer_class}")
            if any(index >= len(self.states) for index in layer.states):
                raise ValueError(f"layer {layer.name} names a state that does not exist")
        used = {index for layer in self.layers for index in layer.states}
        if used != set(range(len(self.states))):
            raise ValueError("a state belongs to no layer")
        if all(state.frozen for state in self.states):
            raise ValueError("every state is frozen, so there is nothing to train")
        for what in ("frozen", "muon"):
            alike = {each.state_class for each in self.states if getattr(each, what)}
            for each in self.states:
                if each.state_class in alike and not getattr(each, what):
                    raise ValueError(f"state {each.name} is not {what}, and others of its class {each.state_class} are")
        if self.precision == "fp32" and any(state.precision for state in self.states):
            raise ValueError("a state's precision is fp32 in a model in fp32; leave it out")
        kinds = {(state.state_class, state.precision) for state in self.states}
        if len(kinds) > len({state.state_class for state in self.states}):
            raise ValueError("states of one class differ in precision")
        measured = {(update.rows, update.columns) for update in self.matrix_updates}
        for index, state in enumerate(self.states):
            if state.muon and not 0 < self.uses(index)[0] <= self.uses(index)[-1] < len(self.layers) - 1:
                raise ValueError(f"state {state.name} has matrices, and is not a block's")
            if lacking := {matrix.shape for matrix in state.matrices} - measured:
                raise ValueError(f"matrix_updates say nothing of a matrix of {' x '.join(map(str, min(lacking)))}")
        if any(state.table and self.uses(index) != (0,) for index, state in enumerate(self.states)):
            raise ValueError("a table of token embeddings is of another layer than the embedding")
        for layer in self.layers[1:-1]:
            if any(len(self.uses(index)) != 1 for index in layer.states):
                raise ValueError(f"block {layer.name} shares a state with another layer")
        sizes = [tuple(timing.micro_batch_size for timing in entry.timings) for entry in self.classes]
        if len(set(sizes)) != 1 or len(set(sizes[0])) != len(sizes[0]):
            raise ValueError("every class must be measured once at the same micro-batch sizes")
        if set(self.context_bytes) != set(sizes[0]):
            raise ValueError("context_bytes must name the measured micro-batch sizes")
        return self

    def uses(self, state: int) -> tuple[int, ...]:
        """The layers that use a state, in order; two for tied embeddings."""
        return tuple(index for index, layer in enumerate(self.layers) if state in layer.states)

    @property
    def muon(self) -> bool:
        """Whether it was profiled to be trained by Muon, with AdamW for the rest."""
        return any(state.muon for state in self.states)

    @property
    def table(self) -> int | None:
        """The state that is a table of token embeddings and may come by rows."""
        return next((index for index, state in enumerate(self.states) if state.table), None)

    def trained(self, layer: int) -> tuple[int, ...]:
        """The states of a layer that are trained."""
        return tuple(index for index in self.layers[layer].states if not self.states[index].frozen)

    @property
    def first_trained(self) -> int:
        """The lowest layer that trains anything. No gradient is wanted below it, so no layer there runs backward."""
        return next(index for index in range(len(self.layers)) if self.trained(index))

    @property
    def trained_blocks(self) -> range:
        """The blocks that run backward, by their numbers as layers: none below all that is trained."""
        return range(max(self.first_trained, 1), len(self.layers) - 1)

    def kernel_bytes(self, micro_batch_size: int, *, full_rows: bool = False) -> int:
        """What a run on such micro-batches keeps of `kernels`; with `full_rows` it meets no row that is shorter than
        the sequence length."""
        lengths = (self.sequence_length,) if full_rows else row_lengths(self.sequence_length)
        met = {micro_batch_size * length for length in lengths}
        return sum(kernels.kept_bytes for kernels in self.kernels if kernels.tokens in met)

    def timing(self, layer_class: str, micro_batch_size: int) -> Timing:
        """The measurement of a class at a micro-batch size. Raises KeyError when it was not measured."""
        for entry in self.classes:
            if entry.name == layer_class:
                for timing in entry.timings:
                    if timing.micro_batch_size == micro_batch_size:
                        return timing
        raise KeyError((layer_class, micro_batch_size))

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        return tuple(timing.micro_batch_size for timing in self.classes[0].timings)


class Profile(Document):
    """profile.json: one machine, one model, measured together."""

    schema_: Literal["ssdplan.profile/1"] = Field("ssdplan.profile/1", alias="schema")
    created: str
    machine: Machine
    model: Model
    notes: tuple[str, ...] = ()
    """What a reader should know: fallbacks taken, unstable measurements."""
    measuring_seconds: Seconds | None = None
    """What measuring took (10Cache, table 8); None where nobody measured."""
