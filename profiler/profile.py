"""Measures this machine and a model together, and writes down what a planner needs to know of them: a Profile.

Owns the order of measurements, their limits, and the naming of state classes. It decides nothing and imports neither
planner nor executor: the model, its layers and the device are handed in.
"""

import gc
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import combinations, cycle
from pathlib import Path
from types import MappingProxyType

import torch

from ssdplan.native import Engine, process
from ssdplan.plans.documents import profile as document
from ssdplan.plans.documents.matrices import MatrixUpdate
from ssdplan.plans.documents.state_layout import ELEMENT_BYTES, GRADIENT_BYTES, training_bytes
from ssdplan.plans.documents.table import Table
from ssdplan.plans.errors import UsageError

from .contention import Work, measure_beside_updates, measure_contention
from .device_updates import measure_device_updates, measure_matrix_updates
from .machine import (
    UPDATE_CHUNK,
    UpdateBench,
    measure_dram,
    measure_link,
    measure_network,
    measure_update,
    slower_ranks,
)
from .measure import FEWEST, Limits, Progress, portion
from .model import measure_model
from .parts import (
    Blank,
    Device,
    MakeDeviceUpdate,
    MakeLayers,
    MakeMatrixUpdate,
    MakeMicroBatch,
    Model,
    Perturb,
    Ranks,
    Weights,
)
from .passes import Passes, measure_passes, measure_rows
from .processor import cores, cpu_name
from .products import DEFAULT_PRECISION, FORMATS, product_costs, slow_precision
from .storage import MOST_WRITTEN, measure_volume

DTYPES = {dtype: precision for precision, dtype in FORMATS.items()}


STEAL_WORTH_A_NOTE = 0.02
"""Of the processors' time."""
FP32, MATRICES, FROZEN, FORWARD = ".fp32", ".matrices", ".frozen", ".forward"
"""How the names of classes of states end: of those in fp32 where others are not; of those that Muon updates; of frozen
ones that a backward uses, and of those that none does."""


@dataclass(frozen=True, slots=True)
class ProfileLimits:
    """How long each part may repeat its measurements, in seconds."""

    volume_seconds: float = 6.0
    """Of each volume; so is `contention_seconds`."""
    link_seconds: float = 1.0
    update_seconds: float = 3.0
    passes_seconds: float = 1.5
    rows_seconds: float = 0.5
    model_seconds: float = 18.0
    activation_seconds: float = 12.0
    """For times; what rungs take of memory is looked at besides, for about as long."""
    beside_seconds: float = 8.0
    contention_seconds: float = 32.0

    @classmethod
    def within(cls, seconds: float, *, volumes: int = 1) -> "ProfileLimits":
        """The same shares of another time for all of them, with so many volumes."""
        usual = asdict(cls())
        factor = seconds / cls().in_all(volumes)
        return cls(**{part: share * factor for part, share in usual.items()})

    def in_all(self, volumes: int) -> float:
        """Seconds of all measurements together."""
        return sum(asdict(self).values()) + (volumes - 1) * (self.volume_seconds + self.contention_seconds)


def profile(
    model: Model,
    make_layers: MakeLayers,
    make_micro_batch: MakeMicroBatch,
    weights: Weights,
    device: Device,
    volumes: Sequence[Path],
    *,
    sequence_length: int,
    micro_batch_sizes: Sequence[int],
    progress: Progress,
    blanks: Mapping[Path, Blank | None] = MappingProxyType({}),
    endurance: Sequence[int] = (),
    limits: ProfileLimits = ProfileLimits(),
    open_engine: Callable[[], Engine] = Engine,
    int8: bool = False,
    perturb: Perturb | None = None,
    make_device_update: MakeDeviceUpdate | None = None,
    make_matrix_update: MakeMatrixUpdate | None = None,
    ranks: Ranks | None = None,
    local_ranks: int = 1,
    table: tuple[int, Table] | None = None,
    whole_rows: bool = False,
) -> document.Profile:
    """Measure everything; about a minute and a half for a small model.

    Of `volumes`, directories or blank volumes, `blanks` has the blank volume that a run would take there, if any, which
    is then what is measured. `endurance` is what drives are rated to have written in their lives, in bytes, which
    nobody can measure: one for all volumes, one for each, or none. With `int8` it also measures what blocks can keep of
    their activations in int8, and how far off that puts gradients, for which the model is read once.
    With `perturb` it measures zeroth-order passes, with `make_device_update` updates on a GPU, and with
    `make_matrix_update` those of matrices, which a model that has states of these needs. `table`: the state that is a
    table of token embeddings which may come by rows; then what that takes of host is measured too.
    With `whole_rows` runs will have rows of one sequence without padding alone, and masks are not measured.

    With `ranks` all of them measure at once, each what it has beside the others, and then what they exchange; each gets
    a profile, in which memory, and of volumes that are directories the free space and the rating, are divided between
    the `local_ranks` of this machine.

    Errors: UsageError for arguments that cannot be meant, MismatchError where the model is too short for
    `sequence_length`, DiskFullError and IoFailure of a volume, MemoryBudgetError where a layer does not fit.
    """
    _check(volumes, endurance, sequence_length, micro_batch_sizes)
    of_gpu = 0 if device.kind == "cpu" else device.memory_bytes()
    chunk = document.logits_chunk_tokens(model.vocab_size, of_gpu) if model.head_is_position_wise else None
    layers, ids = make_layers(chunk), torch.zeros(1, sequence_length, dtype=torch.int64)
    layers.begin_step(0, [make_micro_batch(ids, ids, None, None)])  # refuses what the model cannot take
    threads, memory = cores(), process.host_memory()
    several = ranks if ranks and ranks.size > 1 else None
    if several:
        several.tell(b"")  # all begin at once
    begun, stolen = time.perf_counter(), process.stolen_seconds()
    precision = DTYPES[model.dtype]
    notes: list[str] = []
    if chunk is None:
        notes.append(f"{model.name}: its head is not position-wise, so all logits of a micro-batch are made at once")
    measured_volumes = []
    store_bytes = training_bytes(model.states, precision) // len(volumes)  # at most, about
    reach = max(store_bytes, MOST_WRITTEN)
    for index, directory in enumerate(volumes):
        part = portion(progress, 0.3 * index / len(volumes), 0.3 * (index + 1) / len(volumes))
        time_limit = Limits(limits.volume_seconds)
        blank = blanks.get(directory)
        volume, remarks = measure_volume(
            directory.resolve(), time_limit, part, blank=blank, reach=reach, open_engine=open_engine
        )
        if blank:
            notes.append(f"{directory}: measured on the blank volume {blank.path.name}")
        rating = endurance[index if len(endurance) > 1 else 0] if endurance else None
        if directory.is_dir() and local_ranks > 1:  # of a directory each rank of this machine has a part
            rating = rating // local_ranks if rating else None
            volume = volume.model_copy(update={"free_bytes": volume.free_bytes // local_ranks})
        measured_volumes.append(volume.model_copy(update={"endurance_bytes": rating}))
        notes += remarks
    if device.kind == "cpu" and precision != "fp32":
        notes += slow_precision(precision, product_costs(tuple(dict.fromkeys((precision, DEFAULT_PRECISION)))))
    for one, other in combinations(volumes, 2):
        if _drive(one) == _drive(other):
            notes.append(f"{one} and {other} are on one file system: together they are no faster than one")

    h2d, d2h, remarks = measure_link(device, Limits(limits.link_seconds), portion(progress, 0.3, 0.35))
    notes += remarks
    time_limit, part = Limits(limits.update_seconds), portion(progress, 0.35, 0.4)
    updates, remarks = measure_update(UpdateBench(precision, threads, memory.available), time_limit, part)
    notes += remarks
    device_rate: float | None = None
    if make_device_update:
        device_rate, remarks = measure_device_updates(
            make_device_update, device, precision, Limits(limits.update_seconds), portion(progress, 0.4, 0.4)
        )
        notes += remarks
    dram: float | None = None
    if device.kind != "cpu":
        rates = (updates.fp32.rate, h2d.rate, d2h.rate)
        bench, time_limit = UpdateBench(precision, threads, memory.available), Limits(limits.update_seconds)
        dram, remarks = measure_dram(bench, device, rates, time_limit, portion(progress, 0.4, 0.4))
        notes += remarks
    matrix_updates: tuple[MatrixUpdate, ...] = ()
    if shapes := {matrix.shape for state in model.states for matrix in state.matrices}:
        assert make_matrix_update is not None, "matrices whose updates nobody can make"
        matrix_updates, remarks = measure_matrix_updates(
            make_matrix_update,
            device,
            precision,
            shapes,
            Limits(limits.update_seconds, least=FEWEST),
            portion(progress, 0.4, 0.4),
        )
        notes += remarks
    passes: Passes | None = None
    over_masters: Passes | None = None
    if perturb:
        passes, over_masters, remarks = measure_passes(
            perturb, device, precision, threads, Limits(limits.passes_seconds), portion(progress, 0.4, 0.41)
        )
        notes += remarks
    host_rate: float | None = None
    rows_bandwidth: float | None = None
    if perturb and table:
        host_rate, rows_bandwidth, remarks = measure_rows(
            perturb, precision, threads, Limits(limits.rows_seconds), portion(progress, 0.41, 0.41)
        )
        notes += remarks
    together: tuple[float | None, float | None] = (None, None)
    network: document.Network | None = None

    def beside_compute(work: Work) -> None:
        nonlocal network
        if several:
            elements = max(state.elements for state in model.states) // several.size
            sizes = elements * ELEMENT_BYTES[precision], elements * GRADIENT_BYTES
            part = portion(progress, 0.7, 0.7)
            network = measure_network(several, device, *sizes, limits.link_seconds, part, work=work)
        if device.kind == "cpu":
            beside_on_cores(work)

    def beside_on_cores(work: Work) -> None:
        nonlocal together
        updating = UpdateBench(precision, threads, memory.available)
        chunks = cycle(range(0, updating.count, UPDATE_CHUNK))
        time_limit, part = Limits(limits.beside_seconds, least=FEWEST), portion(progress, 0.7, 0.75)
        together, remarks = measure_beside_updates(
            work, lambda: updating.seconds_of_a_chunk(next(chunks), "fp32", summed=True), time_limit, part
        )
        notes.extend(remarks)
        for index, (directory, volume) in enumerate(zip(volumes, measured_volumes, strict=True)):
            time_limit = Limits(limits.contention_seconds, least=FEWEST)
            part = portion(progress, 0.75 + 0.25 * index / len(volumes), 0.75 + 0.25 * (index + 1) / len(volumes))
            found, remarks = measure_contention(
                Path(volume.path),
                work,
                threads,
                time_limit,
                part,
                blank=blanks.get(directory),
                reach=reach,
                open_engine=open_engine,
            )
            measured_volumes[index] = volume.model_copy(update=asdict(found))
            notes.extend(remarks)

    costs = measure_model(
        model,
        layers,
        make_micro_batch,
        weights,
        device,
        sequence_length=sequence_length,
        micro_batch_sizes=micro_batch_sizes,
        limits=Limits(limits.model_seconds),
        progress=portion(progress, 0.41, 0.7),
        beside=beside_compute if device.kind == "cpu" or several else None,
        bandwidth=min(h2d.rate, d2h.rate),
        activations=Limits(limits.activation_seconds * (2 if int8 else 1)),
        int8=int8,
        whole_rows=whole_rows,
    )
    if several:
        notes += slower_ranks(several, {"copies to the device": h2d.rate, "updates": updates.fp32.rate})
    kernels_bytes = sum(kernels.kept_bytes for kernels in costs.kernels)
    process_bytes = _process_bytes() - kernels_bytes - costs.choosing_bytes
    share = (process.stolen_seconds() - stolen) / ((time.perf_counter() - begun) * threads)
    if share >= STEAL_WORTH_A_NOTE:
        notes.append(
            f"the host gave {share:.0%} of the processors' time to others meanwhile (steal), among them, it may be, "
            "what it runs for this machine's own drive: steps will be slower or quicker than predicted as they are "
            "disturbed more or less"
        )
    return document.Profile(
        schema="ssdplan.profile/1",
        measuring_seconds=time.perf_counter() - begun,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=document.Machine(
            name=cpu_name(),
            cores=threads,
            device="cpu" if device.kind == "cpu" else "cuda",
            device_name=device.name,
            device_index=device.index,
            host_memory_bytes=memory.total // local_ranks,
            host_available_bytes=memory.available // local_ranks,
            device_memory_bytes=device.memory_bytes(),
            process_bytes=process_bytes,
            compute_shares_cpu=device.kind == "cpu",
            h2d_bandwidth=h2d.rate,
            d2h_bandwidth=d2h.rate,
            update_rate=updates.fp32.rate,
            update_rate_bf16=updates.bf16.rate,
            update_rate_int8=updates.int8.rate,
            checksum_rate=updates.checksum_rate,
            perturb_rate=passes.copies if passes else None,
            pending_rate=passes.pending if passes else None,
            perturb_rate_masters=over_masters.copies if over_masters else None,
            pending_rate_masters=over_masters.pending if over_masters else None,
            pending_rate_host=host_rate,
            rows_bandwidth=rows_bandwidth,
            device_update_rate=device_rate,
            dram_bandwidth=dram,
            compute_beside_updates=together[0],
            updates_beside_compute=together[1],
            update_threads=threads,
            compute_threads=torch.get_num_threads(),
            volumes=tuple(measured_volumes),
            network=network,
        ),
        model=document.Model(
            name=model.name,
            path=str(model.path.resolve()),
            architecture=model.architecture,
            fingerprint=model.fingerprint,
            parameters=sum(torch.Size(t.shape).numel() for state in model.states for t in state.tensors),
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            precision=precision,
            sequence_length=sequence_length,
            context_bytes=costs.context_bytes,
            states=tuple(
                document.State(
                    name=state.name,
                    state_class=state_class,
                    elements=state.elements,
                    frozen=state.frozen,
                    precision=state.precision,
                    table=table[1] if table and table[0] == index else None,
                    matrices=tuple(state.matrices),
                )
                for index, (state, state_class) in enumerate(zip(model.states, state_classes(model), strict=True))
            ),
            layers=tuple(
                document.Layer(name=layer.name, layer_class=layer.layer_class, states=layer.states)
                for layer in model.layers
            ),
            classes=costs.classes,
            head_chunk_tokens=chunk,
            freeze=model.freeze,
            allow_unused_weights=model.allow_unused_weights,
            kernels=costs.kernels,
            compression=costs.compression,
            busiest_expert=costs.busiest_expert,
            matrix_updates=matrix_updates,
            rows="whole" if whole_rows else None,
        ),
        notes=tuple(notes + costs.notes),
    )


def _drive(volume: Path) -> int:
    """The number of the device that it is, or that it lies on."""
    status = volume.stat()
    return status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev


def _process_bytes() -> int:
    """What is resident when all that was measured is gone: every layer has run on rows of every length that a run has,
    so what kernels keep for them is there."""
    gc.collect()
    return process.kept_bytes()


def state_classes(model: Model) -> list[str]:
    """For each state the class that shares a placement: `embedding`, `head`, `tied` for what both use, and for a
    block's states its layer class, with `.matrices` of those that Muon updates. Of frozen states those are told apart
    that a backward uses (`.frozen`) and those that only forwards use (`.forward`). Those that are kept in fp32, and
    others are not, have classes of their own."""
    last = len(model.layers) - 1
    classes = []
    for state, spec in enumerate(model.states):
        users = [index for index, layer in enumerate(model.layers) if state in layer.states]
        match users:
            case [0]:
                name = "embedding"
            case [index] if index == last:
                name = "head"
            case [index]:
                name = model.layers[index].layer_class
            case _:
                assert users == [0, last], f"state {spec.name} belongs to layers {users}"
                name = "tied"
        if spec.frozen or spec.precision:
            name = name.removesuffix(FROZEN) + (FP32 if spec.precision else "")
        if spec.muon:
            name += MATRICES
        if spec.frozen:
            name += FROZEN if users[-1] >= model.first_trained else FORWARD
        classes.append(name)
    return classes


def _check(
    volumes: Sequence[Path], endurance: Sequence[int], sequence_length: int, micro_batch_sizes: Sequence[int]
) -> None:
    if not volumes:
        raise UsageError("no volume to measure; name a directory on the drive to use (--volume)")
    if len({volume.resolve() for volume in volumes}) < len(volumes):
        raise UsageError(f"a volume is named twice: {', '.join(map(str, volumes))}")
    if len(endurance) not in (0, 1, len(volumes)):
        raise UsageError(
            f"{len(endurance)} endurances for {len(volumes)} volumes: give --endurance once for each, or once for all"
        )
    if sequence_length < 2:
        raise UsageError(f"sequence length {sequence_length}: there is a token to predict only from 2 on")
    if not micro_batch_sizes or min(micro_batch_sizes) < 1 or len(set(micro_batch_sizes)) < len(micro_batch_sizes):
        raise UsageError(f"micro-batch sizes {list(micro_batch_sizes)}: must be one or more different positive numbers")
