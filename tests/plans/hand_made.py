"""Operations and buffers made by hand, for tests that say what matters of each and leave the rest."""

from ssdplan.plans.documents.state_layout import USUAL
from ssdplan.plans.graph.contents import Content, Role
from ssdplan.plans.graph.ops import Backward, Buffer, Forward, Region, Resource, Tier, Transfer, Update

Waits = tuple[int, ...]


def made_buffer(
    index: int,
    nbytes: int,
    role: Role,
    *,
    name: str = "",
    tier: Tier = "host",
    pool: str = "",
    shared_by: int = -1,
    offset: int = -1,
    zone: int = -1,
) -> Buffer:
    return Buffer(
        index=index,
        name=name or f"buffer {index}",
        tier=tier,
        nbytes=nbytes,
        role=role,
        pool=pool,
        shared_by=shared_by,
        offset=offset,
        zone=zone,
    )


def made_transfer(
    index: int,
    kind: Resource,
    source: Region,
    target: Region,
    *,
    waits: Waits = (),
    stage: int = 0,
    content: Content = Content.PARAMETERS,
    state: int | None = None,
    state_name: str = "something",
    summed_by_update: bool = False,
) -> Transfer:
    return Transfer(
        index=index,
        stage=stage,
        waits=waits,
        kind=kind,
        source=source,
        target=target,
        content=content,
        state=state,
        state_name=state_name,
        summed_by_update=summed_by_update,
    )


def made_forward(
    index: int,
    *,
    waits: Waits = (),
    layer: int = 1,
    stage: int = 0,
    weights: tuple[Region, ...] = (),
    hidden: Region | None = None,
    out: Region | None = None,
) -> Forward:
    return Forward(
        index=index,
        stage=stage,
        waits=waits,
        layer=layer,
        layer_class="block",
        micro_batch=0,
        weights=weights,
        hidden=hidden,
        out=out,
    )


def made_backward(index: int, *, waits: Waits = (), in_gradient: Region | None = None) -> Backward:
    return Backward(
        index=index,
        stage=0,
        waits=waits,
        layer=1,
        layer_class="block",
        micro_batch=0,
        weights=(),
        hidden=None,
        out_gradient=None,
        in_gradient=in_gradient,
        gradients=(),
        fresh=(),
    )


def made_update(
    index: int,
    elements: int,
    optimizer: Region,
    gradient: Region,
    parameters: Region,
    *,
    waits: Waits = (),
    stored: Region | None = None,
) -> Update:
    return Update(
        index=index,
        stage=0,
        waits=waits,
        state=0,
        start=0,
        stop=elements,
        delayed=False,
        optimizer=optimizer,
        gradient=gradient,
        parameters=parameters,
        formats=USUAL,
        stored=stored,
    )
