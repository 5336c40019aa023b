"""What-if: a profile of a machine that nobody measured and a model whose weights nobody has, from the catalogue.

Owns the formulas that turn data sheets and shapes into what the profiler would have measured (docs/catalogue.md states
each), and the note that every figure is an estimate. It decides nothing, and it never touches a drive or a device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ssdplan.plans.documents.matrices import MatrixUpdate
from ssdplan.plans.documents.profile import (
    LayerClass,
    Machine,
    MixedBandwidth,
    Model,
    Profile,
    Volume,
    logits_chunk_tokens,
)
from ssdplan.plans.documents.state_layout import (
    ELEMENT_BYTES,
    GRADIENT_BYTES,
    OPTIMIZER_FORMATS,
    USUAL,
    OptimizerFormats,
    Precision,
)
from ssdplan.plans.documents.stripe_shares import CYCLE
from ssdplan.plans.errors import UsageError
from ssdplan.plans.units import MOST_BYTES, parse_bytes

from . import (
    ATTENTION_TOKENS,
    CHIPSET,
    COMPUTE_EFFICIENCY,
    DRIVE_A_CORE,
    FRAGMENTATION,
    IN_DRAM,
    LAUNCH,
    MEMORY_EFFICIENCY,
    MODELS,
    PASSES,
    RESERVE,
    TRAINING,
    Figure,
    Shape,
    find,
    nearest,
)
from .costs import USUAL_SIZES, Compute, Costs, matrix_seconds, usual_sizes
from .figure import GIVEN
from .parts import NO_GPU, Drive, Lanes, behind_chipset, drives_of, gpu_of, held_up, link_of, memory_of, processor
from .ranks import ONE_RANK, Ranks, network, network_figures, networks_of
from .shapes import fingerprint, laid_out, remarks_of

Rows = Literal["whole", "any"]
MOST_TOKENS = 1 << 26
"""Of a micro-batch; more than any device holds."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A machine and a model by their names in the catalogue."""

    model: str | Shape
    """A name, or what `configs.py` made of a config.json."""
    gpu: str
    """A GPU, or `none`: an emulated device in DRAM."""
    ssds: Sequence[str]
    """Each NAME, NAME:SIZE, NAME*COUNT or NAME:SIZE*COUNT; all are striped over."""
    host_memory_bytes: int
    """What training may have of DRAM; without a GPU the emulated device has as much again."""
    cpu: str | None = None
    link: str | None = None
    """None: the GPU's own."""
    precision: Precision = "bf16"
    sequence_length: int = 1024
    micro_batch_sizes: Sequence[int] | None = None
    """None: 1, 2, 4, and larger ones where they are quicker (`usual_sizes`)."""
    several: Ranks = ONE_RANK
    """Ranks that train together; each has a GPU. Drives, processor and DRAM's bandwidth are of a machine, which its
    ranks share; `host_memory_bytes` is of a rank."""
    rows: Rows = "whole"
    """Whole: every row is one sequence without padding. Any: sequences may share rows, or rows be padded, for which
    some models take a mask of each row."""
    networks: Sequence[str] = ()
    """Names of what they exchange over; between GPUs of a machine their links where none is named."""
    muon: bool = False
    """Muon updates the matrices of blocks, and AdamW the rest."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Name of a figure (`gpu.flops`) -> the value to take instead."""

    @property
    def shape(self) -> Shape:
        """The model's. Raises UsageError for a name that the catalogue lacks."""
        return self.model if isinstance(self.model, Shape) else find("model", self.model, MODELS)


def estimate(what_if: WhatIf) -> Profile:
    """The profile of a what-if. Raises UsageError for names that the catalogue lacks and sizes that cannot be."""
    shape = what_if.shape
    _check(what_if, shape)
    drives = [drive for text in what_if.ssds for drive in drives_of(text)]
    if len(drives) > CYCLE:
        raise UsageError(f"{len(drives)} SSDs: a store stripes over at most {CYCLE}")
    figures = _figures(what_if)
    machine = _machine(what_if, drives, figures)
    return Profile(
        schema="ssdplan.profile/1",
        created="never: estimated",
        machine=machine,
        model=estimate_model(
            shape,
            _compute(figures),
            precision=what_if.precision,
            sequence_length=what_if.sequence_length,
            micro_batch_sizes=usual_sizes(lambda rows: costs_of(what_if, rows), machine.device_memory_bytes)
            if what_if.micro_batch_sizes is None
            else what_if.micro_batch_sizes,
            head_chunk_tokens=logits_chunk_tokens(
                shape.vocab, round(figures["gpu.memory"].value) if "gpu.memory" in figures else 0
            ),
            workspace_margin=_workspace_margin(figures),
            host=_host_compute(figures) if what_if.muon else None,
            rows=what_if.rows,
        ),
        notes=tuple(_notes(what_if, shape, drives, figures)),
    )


def costs_of(what_if: WhatIf, rows: int) -> Costs:
    """What a micro-batch of so many rows takes of a what-if's device, its logits made all at once. Raises UsageError as
    `estimate` does."""
    shape, figures = what_if.shape, _figures(what_if)
    return Costs(
        shape,
        what_if.precision,
        rows,
        what_if.sequence_length,
        _compute(figures),
        None,
        _workspace_margin(figures),
        what_if.rows == "whole",
    )


def _workspace_margin(figures: Mapping[str, Figure]) -> float:
    return figures["gpu.fragmentation"].value if "gpu.fragmentation" in figures else 0.0


def parse_figure(text: str) -> tuple[str, float]:
    """`gpu.flops=1.2e14` or `gpu.memory=20GiB` -> name and value. Raises UsageError."""
    name, _, value = text.partition("=")
    name = name.strip().lower()
    return name, parse_value(name, value, f"--figure {text}")


def parse_value(name: str, text: str, where: str) -> float:
    """The value of a figure: a size with its unit, what is counted in bytes a second also with /s behind that or as a
    number of them, and all else as a number. Raises UsageError, `where` saying what was written."""
    if name.endswith(SIZES):
        try:
            return float(parse_bytes(text))
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    try:
        number = float(text)
    except ValueError:
        if not name.endswith(_RATES):
            raise UsageError(f"{where}: write NAME=NUMBER, such as gpu.flops=1.2e14, or a size") from None
        return parse_value(SIZES[0], text.strip().removesuffix("/s"), where)
    if name.endswith(_RATES) and 0 < number < 1e6:
        raise UsageError(f"{where}: {text} bytes a second; write a unit, such as {text}GB")
    if not LEAST_FIGURE < number < (MOST_BYTES if name.endswith(_RATES) else MOST_FIGURE):
        raise UsageError(f"{where}: {text} is out of range")
    return number


SIZES = ("memory", "reserve", "capacity", "endurance")
"""How the names end of what is counted in bytes."""
LEAST_FIGURE, MOST_FIGURE = 1e-30, 1e30
"""Of what no machine is near. Beyond them seconds, which are quotients of figures, need not be finite."""
MOST_CORES = 1 << 20
_RATES = ("bandwidth", "h2d", "d2h", "chipset", ".read", ".write")
"""Of what is counted in bytes a second."""


def _check(what_if: WhatIf, shape: Shape) -> None:
    if what_if.sequence_length < 2:
        raise UsageError(f"sequence length {what_if.sequence_length}: there is a token to predict only from 2 on")
    if 0 < shape.max_positions < what_if.sequence_length:
        raise UsageError(
            f"sequence length {what_if.sequence_length}: {shape.name} has {shape.max_positions} positions, no more"
        )
    sizes = USUAL_SIZES if what_if.micro_batch_sizes is None else what_if.micro_batch_sizes
    if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise UsageError(f"micro-batch sizes {list(sizes)}: must be one or more different positive numbers")
    if (tokens := max(sizes) * what_if.sequence_length) > MOST_TOKENS:
        raise UsageError(
            f"{max(sizes):,} rows of {what_if.sequence_length:,} tokens are {tokens:,}: a micro-batch has at most "
            f"{MOST_TOKENS:,}"
        )
    if not what_if.ssds:
        raise UsageError("no SSD; name one or more (--ssd samsung-990-pro)")


# Figures: what the catalogue says and what the user says instead.


def _figures(what_if: WhatIf) -> dict[str, Figure]:
    """Every figure that is not a drive's, by the name under which it can be given."""
    ordinary = what_if.precision == "fp32"
    cpu = processor(what_if.gpu, what_if.cpu)
    figures = {
        "cpu.cores": cpu.cores,
        "cpu.memory-bandwidth": cpu.memory_bandwidth,
        "cpu.memory-efficiency": MEMORY_EFFICIENCY,
    }
    if what_if.gpu.lower() == NO_GPU or what_if.muon:
        figures |= {"cpu.flops": cpu.flops, "cpu.efficiency": COMPUTE_EFFICIENCY}
    if what_if.gpu.lower() == NO_GPU:
        if what_if.link is not None:
            raise UsageError(f"--link {what_if.link}: without a GPU there is no link; leave it out")
        figures["cpu.drive-bandwidth"], link = DRIVE_A_CORE, IN_DRAM
    else:
        gpu = gpu_of(what_if.gpu)
        figures |= {
            "gpu.memory": memory_of(gpu, what_if.precision, what_if.host_memory_bytes, what_if.several),
            "gpu.reserve": RESERVE,
            "gpu.fragmentation": FRAGMENTATION,
            "gpu.flops": gpu.products_fp32 if ordinary else gpu.products,
            "gpu.memory-bandwidth": gpu.memory_bandwidth,
            "gpu.efficiency": TRAINING,
            "gpu.passes": PASSES,
            "gpu.launch": LAUNCH,
            "gpu.attention-efficiency": gpu.attention,
            "gpu.attention-tokens": ATTENTION_TOKENS,
        }
        link = link_of(gpu, what_if.link)
    figures |= {"link.h2d": link.h2d, "link.d2h": link.d2h}
    gpus = what_if.gpu.lower() != NO_GPU
    between = networks_of(what_if.networks, what_if.several, gpu_of(what_if.gpu).name if gpus else "")
    figures |= network_figures(between, what_if.several, (link.h2d, link.d2h) if gpus else None)
    lanes = {"cpu.drives": cpu.drives, "cpu.chipset": CHIPSET} if cpu.drives else {}
    drives = sum(len(drives_of(text)) for text in what_if.ssds)
    if cpu.drives and drives > what_if.figures.get("cpu.drives", cpu.drives.value):
        figures |= lanes
    known = {*figures, *lanes, *_OF_DRIVES}
    for name, value in what_if.figures.items():
        if name not in known:
            raise UsageError(nearest(f"--figure {name}: there is no such figure", name, known))
        if name in figures:
            figures[name] = Figure(value, figures[name].unit, GIVEN)
    for name in _FRACTIONS:
        if name in figures and figures[name].value > 1:
            raise UsageError(f"--figure {name}={figures[name].value:g}: it is a fraction, at most 1")
    if (direct := what_if.figures.get("cpu.drives", 0.0)) % 1:
        raise UsageError(f"--figure cpu.drives={direct:g}: drives are counted whole")
    if not 1 <= (cores := figures["cpu.cores"].value) <= MOST_CORES or cores % 1:
        raise UsageError(f"--figure cpu.cores={cores:g}: a processor has whole cores, 1 to {MOST_CORES:,}")
    if "gpu.memory" in figures and figures["gpu.memory"].value <= figures["gpu.reserve"].value:
        raise UsageError("--figure gpu.memory: no more than gpu.reserve, so nothing is left for a plan")
    return figures


_FRACTIONS = (
    "cpu.memory-efficiency",
    "cpu.efficiency",
    "gpu.efficiency",
    "gpu.attention-efficiency",
    "gpu.fragmentation",
)
_OF_DRIVES = ("ssd.read", "ssd.write", "ssd.capacity", "ssd.endurance")
"""Given, they are those of every drive."""


# The machine.


def _machine(what_if: WhatIf, drives: Sequence[Drive], figures: Mapping[str, Figure]) -> Machine:
    emulated = what_if.gpu.lower() == NO_GPU
    cpu = processor(what_if.gpu, what_if.cpu).name
    gpu = NO_GPU if emulated else gpu_of(what_if.gpu).name
    each = what_if.several.each
    cores = max(round(figures["cpu.cores"].value / each), 1)
    memory = (
        what_if.host_memory_bytes if emulated else round(figures["gpu.memory"].value - figures["gpu.reserve"].value)
    )
    moved = figures["cpu.memory-bandwidth"].value * figures["cpu.memory-efficiency"].value / each
    copy = ELEMENT_BYTES[what_if.precision]
    passing = moved if emulated else figures["gpu.memory-bandwidth"].value
    a_byte = 1 / figures["cpu.drive-bandwidth"].value if emulated else 0.0
    """Core-seconds that compute goes without while drives move one."""
    return Machine(
        name=what_if.several.name(cpu if emulated else f"{gpu}, {cpu}"),
        cores=cores,
        device="cpu" if emulated else "cuda",
        device_name="emulated device in DRAM" if emulated else gpu,
        host_memory_bytes=what_if.host_memory_bytes * (2 if emulated else 1),
        host_available_bytes=what_if.host_memory_bytes * (2 if emulated else 1),
        device_memory_bytes=memory,
        compute_shares_cpu=emulated,
        h2d_bandwidth=figures["link.h2d"].value,
        d2h_bandwidth=figures["link.d2h"].value,
        update_rate=moved / (_updated_bytes(USUAL) + copy),
        update_rate_bf16=moved / (_updated_bytes(OPTIMIZER_FORMATS["fp32", "bf16"]) + copy),
        update_rate_int8=min(
            cores * IN_INT8_A_CORE, moved / (_updated_bytes(OPTIMIZER_FORMATS["fp32", "int8"]) + copy)
        ),
        perturb_rate=passing / (3 * copy + DRAWN_BYTES),
        pending_rate=passing / DRAWN_BYTES,
        perturb_rate_masters=None
        if copy == ELEMENT_BYTES["fp32"]
        else passing / (ELEMENT_BYTES["fp32"] + 2 * copy + DRAWN_BYTES),
        pending_rate_masters=None if copy == ELEMENT_BYTES["fp32"] else passing / DRAWN_BYTES,
        pending_rate_host=min(cores * DRAWN_A_CORE, moved / (2 * ELEMENT_BYTES["fp32"])),
        rows_bandwidth=moved / 2,
        dram_bandwidth=None if emulated else moved,
        device_update_rate=None if emulated else passing / (_updated_bytes(USUAL) + copy + GRADIENT_BYTES),
        update_threads=cores,
        compute_threads=cores,
        volumes=tuple(
            Volume(
                path=f"{drive.name} ({number})",
                free_bytes=round(what_if.figures.get("ssd.capacity", drive.size.capacity) / each),
                engine="io_uring",
                frontier=(
                    MixedBandwidth(read=read / each, write=0.0),
                    MixedBandwidth(read=0.0, write=write / each),
                ),
                read_cores=read / each * a_byte,
                write_cores=write / each * a_byte,
                endurance_bytes=round(what_if.figures.get("ssd.endurance", drive.size.endurance.value) / each),
            )
            for number, (drive, read, write) in enumerate(
                zip(drives, *behind_chipset(*_own_rates(what_if, drives), _lanes(figures)), strict=True)
            )
        ),
        network=network(figures, what_if.several, passing),
        figures="estimated",
    )


def _own_rates(what_if: WhatIf, drives: Sequence[Drive]) -> tuple[list[float], list[float]]:
    """Bytes/s that each drive reads, and writes, where it has lanes of its own."""
    return (
        [what_if.figures.get("ssd.read", drive.size.read.value) for drive in drives],
        [what_if.figures.get("ssd.write", drive.size.sustained_write.value) for drive in drives],
    )


def _lanes(figures: Mapping[str, Figure]) -> Lanes | None:
    """None where each drive has its own."""
    if "cpu.chipset" not in figures:
        return None
    return Lanes(round(figures["cpu.drives"].value), figures["cpu.chipset"].value)


DRAWN_BYTES = 8.0
"""To draw an element of a random direction takes about as long as to move so many bytes of memory."""
DRAWN_A_CORE = 2e8
"""What a core of host draws a second; two cores made 0.22 billion together while others used them, and 0.78 alone."""


IN_INT8_A_CORE = 2.5e8
"""Elements a second whose moments a core of host keeps in int8: it looks four of each up in tables. Two cores of an AMD
EPYC with AVX-512 updated 0.52 billion together."""


def _updated_bytes(formats: OptimizerFormats) -> float:
    """Bytes that the fused update moves an element: it reads master, two moments and gradient, and writes all but the
    gradient. The copy that compute uses comes on top."""
    return 2 * formats.mean_bytes + GRADIENT_BYTES


# The model.


def _compute(figures: Mapping[str, Figure]) -> Compute:
    value = {name: figure.value for name, figure in figures.items()}
    if "gpu.flops" in value:
        return Compute(
            value["gpu.flops"] * value["gpu.efficiency"],
            value["gpu.memory-bandwidth"],
            value["gpu.flops"] * value["gpu.attention-efficiency"],
            value["gpu.attention-tokens"],
            value["gpu.passes"],
            value["gpu.launch"],
        )
    return _host_compute(figures)


def _host_compute(figures: Mapping[str, Figure]) -> Compute:
    value = {name: figure.value for name, figure in figures.items()}
    flops = value["cpu.flops"] * value["cpu.efficiency"]
    return Compute(flops, value["cpu.memory-bandwidth"] * value["cpu.memory-efficiency"], flops, 0.0)


def estimate_model(
    shape: Shape,
    compute: Compute,
    *,
    precision: Precision,
    sequence_length: int,
    micro_batch_sizes: Sequence[int],
    head_chunk_tokens: int | None = None,
    workspace_margin: float = 0.0,
    host: Compute | None = None,
    rows: Rows = "any",
) -> Model:
    """A model as the profiler would write it down, without weights. `host`: what the processor reaches, for a model
    whose matrices Muon updates there, or on the device.

    `head_chunk_tokens`: whose logits the head makes at a time, None: a whole micro-batch's. `workspace_margin`: the
    fraction by which workspaces are raised for the allocator's fragmentation.
    """
    states, layers = laid_out(shape, muon=host is not None)
    sizes, whole = sorted(micro_batch_sizes), rows == "whole"
    costs = {
        size: Costs(shape, precision, size, sequence_length, compute, head_chunk_tokens, workspace_margin, whole)
        for size in sizes
    }
    return Model(
        name=shape.name,
        architecture=shape.architecture,
        fingerprint=fingerprint(shape),
        parameters=shape.parameters,
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        precision=precision,
        sequence_length=sequence_length,
        context_bytes={size: costs[size].context_bytes() for size in sizes},
        states=states,
        layers=layers,
        classes=(
            LayerClass(name="embedding", timings=tuple(costs[size].embedding() for size in sizes)),
            LayerClass(name="block", timings=tuple(costs[size].block() for size in sizes)),
            LayerClass(name="head", timings=tuple(costs[size].head() for size in sizes)),
        ),
        figures="estimated",
        head_chunk_tokens=head_chunk_tokens,
        workspace_margin=workspace_margin,
        matrix_updates=tuple(
            MatrixUpdate(
                rows=rows,
                columns=columns,
                seconds=matrix_seconds(rows, columns, host),
                device_seconds=matrix_seconds(rows, columns, compute),
            )
            for rows, columns in sorted(set(shape.matrices()))
        )
        if host
        else (),
        rows="whole" if whole else None,
    )


# What a reader should know.


def figures_of(what_if: WhatIf) -> dict[str, Figure]:
    """Every figure that a what-if uses, by its name; those of a drive `ssd.read of NAME`. Raises UsageError."""
    return _figures(what_if) | _of_drives(what_if, [drive for text in what_if.ssds for drive in drives_of(text)])


def _of_drives(what_if: WhatIf, drives: Sequence[Drive]) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    for drive in dict.fromkeys(drives):
        size = drive.size
        own = {"read": size.read, "write": size.sustained_write, "capacity": None, "endurance": size.endurance}
        for what, figure in own.items():
            given = what_if.figures.get(f"ssd.{what}")
            if given is not None:
                figure = Figure(given, "bytes" if what in ("capacity", "endurance") else "bytes/s", GIVEN)
            if figure is not None:
                found[f"ssd.{what} of {drive.name}"] = figure
    return found


def _notes(what_if: WhatIf, shape: Shape, drives: Sequence[Drive], figures: dict[str, Figure]) -> list[str]:
    lines = ["nothing was measured: every figure is an estimate from the catalogue (docs/catalogue.md)"]
    lines.append(f"model {shape.name}: {shape.source}")
    lines += [f"model {shape.name}: {remark}" for remark in remarks_of(shape, what_if.sequence_length)]
    lines += [_line(name, figure) for name, figure in (figures | _of_drives(what_if, drives)).items()]
    if told := held_up(*_own_rates(what_if, drives), _lanes(figures)):
        lines.append(told)
    if what_if.rows == "whole":
        lines.append("every row is one sequence without padding, so most models need no mask; --rows any counts masks")
    lines.append(
        "workspaces, activations and the rungs by which blocks can save them are those of PyTorch's eager layers with "
        "fused attention, by formula; of a GPU's workspaces gpu.fragmentation is margin on top"
    )
    return lines


def _line(name: str, figure: Figure) -> str:
    return f"{name} = {figure.value:.6g} {figure.unit}: {'assumed: ' if figure.assumed else ''}{figure.source}"
