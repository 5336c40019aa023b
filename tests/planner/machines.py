"""Random machines and models for hypothesis: every shape that the planner must handle, small enough to be quick."""

from hypothesis import strategies as st

from ssdplan.plans.documents.profile import Machine, Model, Volume
from tests.made.profiles import MIB, made_machine, made_model, made_volume

RATES = st.floats(0.05, 20.0)
"""Of a drive, link or device, relative to what makes it about as slow as the others."""


@st.composite
def volumes(draw: st.DrawFn) -> tuple[Volume, ...]:
    """One or two volumes with two to four frontier points, concave or not."""
    made = []
    for number in range(draw(st.integers(1, 2))):
        read, write = draw(RATES) * 1e8, draw(RATES) * 1e8
        mixed = []
        for share in draw(st.sampled_from(((), (0.5,), (0.3, 0.7)))):
            gain = draw(st.floats(0.7, 1.3))
            mixed.append((read * (1 - share) * gain, write * share * gain))
        made.append(made_volume(read=read, write=write, mixed=tuple(mixed), path=f"/volume{number}"))
    return tuple(made)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    return made_machine(
        cores=draw(st.integers(1, 4)),
        shared=draw(st.booleans()),
        link=draw(RATES) * 1e9,
        d2h=draw(RATES) * 1e9,
        update_rate=draw(RATES) * 1e8,
        volumes=draw(volumes()),
        device_update_rate=draw(st.none() | st.floats(1e8, 1e11)),
        device_memory=512 * MIB,
    )


@st.composite
def models(draw: st.DrawFn) -> Model:
    return made_model(
        blocks=draw(st.integers(1, 9)),
        tied=draw(st.booleans()),
        hidden=draw(st.sampled_from((32, 64, 128))),
        vocab=draw(st.sampled_from((64, 512, 4096))),
        sequence=draw(st.sampled_from((16, 128))),
        precision=draw(st.sampled_from(("bf16", "fp32"))),
        flops=draw(RATES) * 1e11,
    )
