"""Emulation: the profile of a small stand-in that lasts, operation by operation, as a larger model on a machine of the
catalogue (DESIGN 11).

Owns how a model is made smaller: every width, the vocabulary and the rows become a `smaller`-th, so that parameters and
activations alike become its square, and what each moves takes the same time at rates of as small a part. It measures
nothing and makes no model; a run makes each operation last as the profile says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ssdplan.plans.documents.emulation import MOST_SLOWER, Emulation
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
    logits_chunk_tokens,
)
from ssdplan.plans.documents.state_layout import Precision
from ssdplan.plans.documents.table import Table
from ssdplan.plans.errors import UsageError

from .catalogue import find
from .catalogue.models import MODELS
from .catalogue.parts import NO_GPU
from .catalogue.shapes import Shape
from .catalogue.whatif import WhatIf, estimate
from .predict.drive import combined_frontier

FAMILIES = ("llama", "mistral")
"""Of which a stand-in can be made: those whose tensors a Llama has."""
SMALLER, SLOWER = 16, 4.0
WORKSPACES = ("forward_workspace_bytes", "backward_workspace_bytes")
"""Of a layer, which its code takes beside what it keeps."""
LEAST_VOCABULARY = 257
"""Of a tokenizer with a token for each byte."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be emulated, by names of the catalogue."""

    like: str
    gpu: str
    ssds: tuple[str, ...]
    link: str | None = None
    cpu: str | None = None
    slower: float = SLOWER
    smaller: int = SMALLER
    precision: Precision = "bf16"
    sequence_length: int = 2048
    micro_batch_sizes: Sequence[int] = (1, 2, 4)


def parse(text: str) -> dict[str, Any]:
    """`like=MODEL,gpu=NAME,ssd=NAME[,link=NAME][,cpu=NAME][,slower=K][,smaller=S]` -> fields of a `Request`. Raises
    UsageError."""
    known = ("like", "gpu", "ssd", "link", "cpu", "slower", "smaller")
    given: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in known or not equals or not value or name in given:
            raise UsageError(
                f"{part!r}: write like=MODEL,gpu=NAME,ssd=NAME, and link, cpu, slower or smaller, once each"
            )
        given[name] = value
    lacking = [name for name in ("like", "gpu", "ssd") if name not in given]
    if lacking:
        raise UsageError(f"emulation needs {' and '.join(f'{name}=NAME' for name in lacking)} too")
    found: dict[str, Any] = {name: given[name] for name in ("like", "gpu", "link", "cpu") if name in given}
    try:
        slower, smaller = float(given.get("slower", SLOWER)), int(given.get("smaller", SMALLER))
    except ValueError:
        written = ", ".join(f"{name}={given[name]}" for name in ("slower", "smaller") if name in given)
        raise UsageError(f"{written}: slower is a number, smaller a whole number") from None
    if not 0.0 < slower < MOST_SLOWER:
        raise UsageError(f"slower={given['slower']}: a number above 0 and below {MOST_SLOWER:,}")
    if not 2 <= smaller <= 256:
        raise UsageError(f"smaller={smaller}: a whole number from 2 to 256, by which every width is divided")
    return found | {"ssds": (given["ssd"],), "slower": slower, "smaller": smaller}


def shape_of(request: Request) -> Shape:
    """What the stand-in is to be: as many layers, every width a part. Raises UsageError for what cannot be emulated."""
    shape, s = find("model", request.like, MODELS), request.smaller
    if shape.family not in FAMILIES:
        raise UsageError(
            f"like={shape.name}: a stand-in is made of {' or '.join(FAMILIES)} models, and it is {shape.family}"
        )
    if request.gpu.lower() == NO_GPU:
        raise UsageError("gpu=none: there is nothing to emulate; profile this machine")
    wanted = {"hidden size": shape.hidden, "intermediate size": shape.intermediate, "rows": request.sequence_length}
    for what, width in wanted.items():
        if width % s or width // s < 2:
            raise UsageError(f"smaller={s} does not divide the {what} of {width:,}; take another")
    if (shape.hidden // s) % (2 * shape.heads):
        raise UsageError(f"smaller={s} leaves the {shape.heads} heads of {shape.name} no even width; take less")
    if shape.vocab // s < LEAST_VOCABULARY:
        raise UsageError(
            f"smaller={s} leaves {shape.vocab // s} tokens, and {LEAST_VOCABULARY} are the least; take less"
        )
    return replace(
        shape,
        name=f"{shape.name} / {s}",
        hidden=shape.hidden // s,
        intermediate=shape.intermediate // s,
        vocab=shape.vocab // s,
    )


class StandIn(Protocol):
    """`StreamedModel` of `executor/model/model.py`."""

    @property
    def path(self) -> Any: ...
    @property
    def name(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def states(self) -> Sequence[Any]: ...
    @property
    def layers(self) -> Sequence[Any]: ...


def emulated(
    request: Request,
    stand_in: StandIn,
    volume: Volume,
    here: Machine,
    table: tuple[int, Table] | None = None,
    measured: Profile | None = None,
) -> Profile:
    """The profile of `stand_in`, made by `shape_of`, whose states lie on `volume` of the machine `here`; of these two
    only places, memory and cores count. `table`: the state that is a table of token embeddings which may come by
    rows. `measured`: a profile of the stand-in itself, which says what its blocks could keep; None: nothing. Raises
    UsageError where that is of something else."""
    what_if = WhatIf(
        model=request.like,
        gpu=request.gpu,
        ssds=request.ssds,
        host_memory_bytes=1,
        cpu=request.cpu,
        link=request.link,
        precision=request.precision,
        sequence_length=request.sequence_length,
        micro_batch_sizes=tuple(request.micro_batch_sizes),
        rows="any",
    )
    its = estimate(what_if)
    part = request.smaller**2
    return Profile(
        schema="ssdplan.profile/1",
        created="never: emulated",
        machine=_machine(request, its.machine, volume, here),
        model=_model(request, its.model, stand_in, part, table, _measured(measured, stand_in, request)),
        notes=(
            f"emulated: {stand_in.name} stands for {request.like} on {its.machine.name}; it has a {part:,}th of its "
            f"bytes and of the machine's memory, and each operation lasts {request.slower:g} times as long as there",
            *its.notes[1:],
        ),
    )


def _machine(request: Request, its: Machine, volume: Volume, here: Machine) -> Machine:
    part = request.smaller**2

    def rate(value: float | None) -> float | None:
        """So small a part of the bytes takes `slower` times as long."""
        return None if value is None else value / part / request.slower

    frontier = tuple(
        MixedBandwidth(read=read / part / request.slower, write=write / part / request.slower)
        for read, write in combined_frontier(its.volumes)
    )
    return here.model_copy(
        update={
            "name": f"{its.name}, emulated",
            "device": "cpu",
            "device_name": f"{its.device_name}, emulated in DRAM",
            "device_memory_bytes": its.device_memory_bytes // part,
            "compute_shares_cpu": False,
            "h2d_bandwidth": rate(its.h2d_bandwidth),
            "d2h_bandwidth": rate(its.d2h_bandwidth),
            "update_rate": rate(its.update_rate),
            "update_rate_bf16": rate(its.update_rate_bf16),
            "update_rate_int8": rate(its.update_rate_int8),
            "device_update_rate": rate(its.device_update_rate),
            "perturb_rate": rate(its.perturb_rate),
            "pending_rate": rate(its.pending_rate),
            "perturb_rate_masters": rate(its.perturb_rate_masters),
            "pending_rate_masters": rate(its.pending_rate_masters),
            "pending_rate_host": rate(its.pending_rate_host),
            "rows_bandwidth": rate(its.rows_bandwidth),
            "volumes": (volume.model_copy(update={"frontier": frontier}),),
            "dram_bandwidth": None,  # no paced run makes what runs beside another slower by it
            "figures": "emulated",
            "emulation": Emulation(
                like=request.like,
                gpu=request.gpu,
                ssd=request.ssds[0],
                smaller=request.smaller,
                slower=request.slower,
            ),
        }
    )


Measured = Callable[[str, int], Timing | None]
"""Class of layers (embedding, block, head), rows of a micro-batch -> what a profile says of the stand-in's own."""


def _measured(profile: Profile | None, stand_in: StandIn, request: Request) -> Measured:
    if profile is None:
        return lambda _, __: None
    its = profile.model
    length, sizes = request.sequence_length // request.smaller, ",".join(map(str, request.micro_batch_sizes))
    right = its.fingerprint == stand_in.fingerprint and its.figures == "measured"
    same = (its.precision, its.sequence_length) == (request.precision, length)
    if not (right and same and set(request.micro_batch_sizes) <= set(its.micro_batch_sizes)):
        raise UsageError(
            f"--rungs-of: it is no profile of this stand-in; make one: ssdplan profile --model {stand_in.path} "
            f"--sequence-length {length} --micro-batch-sizes {sizes} --precision {request.precision}"
        )
    layers = {"embedding": its.layers[0], "block": its.layers[1], "head": its.layers[-1]}
    return lambda name, size: its.timing(layers[name].layer_class, size)


def _model(
    request: Request,
    its: Model,
    stand_in: StandIn,
    part: int,
    table: tuple[int, Table] | None,
    measured: Measured,
) -> Model:
    last = len(stand_in.layers) - 1
    roles = ["embedding", *["block"] * (last - 1), "head"]
    users = [
        [number for number, layer in enumerate(stand_in.layers) if state in layer.states]
        for state in range(len(stand_in.states))
    ]
    classes = ["tied" if len(layers) > 1 else roles[layers[0]] for layers in users]
    return Model(
        name=stand_in.name,
        path=str(stand_in.path.resolve()),
        architecture=stand_in.architecture,
        fingerprint=stand_in.fingerprint,
        parameters=sum(state.elements for state in stand_in.states),
        hidden_size=stand_in.hidden_size,
        vocab_size=stand_in.vocab_size,
        precision=request.precision,
        sequence_length=request.sequence_length // request.smaller,
        context_bytes={size: nbytes // part for size, nbytes in its.context_bytes.items()},
        states=tuple(
            State(
                name=state.name,
                state_class=name,
                elements=state.elements,
                table=table[1] if table and table[0] == index else None,
            )
            for index, (state, name) in enumerate(zip(stand_in.states, classes, strict=True))
        ),
        layers=tuple(
            Layer(name=layer.name, layer_class=role, states=layer.states)
            for layer, role in zip(stand_in.layers, roles, strict=True)
        ),
        classes=tuple(
            LayerClass(
                name=entry.name,
                timings=tuple(
                    _timing(timing, part, request.slower, measured(entry.name, timing.micro_batch_size))
                    for timing in entry.timings
                ),
            )
            for entry in its.classes
        ),
        figures="emulated",
        head_chunk_tokens=logits_chunk_tokens(stand_in.vocab_size),
    )


def _timing(timing: Timing, part: int, slower: float, own: Timing | None) -> Timing:
    """What a layer of the stand-in takes. `own`: what was measured of it, which says by which rungs it can save, and
    what its code takes beside that, where that is more than so small a part."""
    seconds = {name: slower * value for name, value in timing if name.endswith("_seconds") and isinstance(value, float)}
    nbytes = {name: value // part for name, value in timing if name.endswith("_bytes") and isinstance(value, int)}
    rungs: tuple[Rung, ...] = ()
    if own is not None:
        nbytes |= {name: max(nbytes[name], getattr(own, name)) for name in WORKSPACES}
        rungs = tuple(_rung(rung, timing, part, slower) for rung in own.rungs if rung.format is None)
    return timing.model_copy(update={**seconds, **nbytes, "rungs": rungs})


def _rung(rung: Rung, timing: Timing, part: int, slower: float) -> Rung:
    """`rung` of the stand-in with the seconds that `timing`, of the original, has of a block which keeps as many bytes:
    between two of its rungs they are on a straight line, and beyond the last they are its own."""
    points = [(0, timing.forward_seconds, timing.backward_seconds)]
    points += [(each.kept_bytes, each.forward_seconds, each.backward_seconds) for each in timing.rungs]
    kept, forward, backward = zip(*sorted(points), strict=True)
    there = rung.kept_bytes * part
    return rung.model_copy(
        update={
            "forward_seconds": slower * float(np.interp(there, kept, forward)),
            "backward_seconds": slower * float(np.interp(there, kept, backward)),
        }
    )
