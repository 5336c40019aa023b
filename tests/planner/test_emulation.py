"""Stand-ins for larger models on other machines: their steps are as long as the catalogue says of the original."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from ssdplan.planner.catalogue import MODELS, find
from ssdplan.planner.catalogue.costs import Compute
from ssdplan.planner.catalogue.whatif import WhatIf, estimate, estimate_model
from ssdplan.planner.emulation import Request, emulated, parse, shape_of
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.emulation import Emulation
from ssdplan.plans.documents.profile import MixedBandwidth, Profile, Rung, Volume
from ssdplan.plans.errors import UsageError
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.plan_text import describe_plan
from tests.made.profiles import GIB, MIB, made_machine

REQUEST = Request(like="llama-2-7b", gpu="rtx-4090", ssds=("samsung-990-pro",), slower=3.0, micro_batch_sizes=(1, 4))


@dataclass(frozen=True)
class Small:
    """What the executor opens of a stand-in, laid out as the catalogue lays out its shape."""

    request: Request

    def __getattr__(self, name: str):
        shape = shape_of(self.request)
        model = estimate_model(
            shape, Compute(1e12, 1e12, 1e12, 0.0), precision="bf16",
            sequence_length=self.request.sequence_length // self.request.smaller, micro_batch_sizes=(1,),
        )  # fmt: skip
        return Path("/stand-in") if name == "path" else getattr(model, name)


def profile_of(request: Request, measured: Profile | None = None):
    ends = (MixedBandwidth(read=1.0, write=0.0), MixedBandwidth(read=0.0, write=1.0))
    volume = Volume(path="/here", free_bytes=1 << 40, engine="io_uring", frontier=ends)
    return emulated(request, Small(request), volume, made_machine(shared=True, cores=2), measured=measured)


@pytest.mark.parametrize(("host", "size", "n"), [(128 * GIB, 4, 4), (32 * GIB, 4, 2), (16 * GIB, 1, 3)])
def test_a_step_is_as_many_times_as_long(host: int, size: int, n: int) -> None:
    """Whether all fits in DRAM or the drive is the slowest, by plans that are made apart. A stand-in's updates go by
    fewer chunks, so what the drive's lanes wait for at both ends of a step is a larger part of it. Where host memory is
    little beside these chunks a stand-in updates nothing on its device (docs/emulation.md), so neither does."""
    little = {} if host == 128 * GIB else {"updates": 0.0}
    asked = SolveRequest(host, micro_batch_size=size, micro_batches=n, recompute="all", residency=little)
    what_if = WhatIf(
        model=REQUEST.like, gpu=REQUEST.gpu, ssds=REQUEST.ssds, host_memory_bytes=host,
        sequence_length=REQUEST.sequence_length, micro_batch_sizes=REQUEST.micro_batch_sizes,
    )  # fmt: skip
    its = solve(estimate(what_if), asked).prediction
    part = REQUEST.smaller**2
    ours = solve(profile_of(REQUEST), replace(asked, host_memory_bytes=host // part)).prediction
    assert ours.step_seconds == pytest.approx(
        REQUEST.slower * its.step_seconds, rel=0.03 if not its.ssd_bytes else 0.12
    )
    assert ours.ssd_write_bytes * part == pytest.approx(its.ssd_write_bytes, rel=0.12)
    assert ours.bound_by == its.bound_by


def test_every_class_is_as_small_a_part() -> None:
    """But for norms, whose bytes are a part by one width alone, and padding."""
    shape, small = find("model", REQUEST.like, MODELS), shape_of(REQUEST)
    for whole, part in ((shape.block(), small.block()), (shape.embedding(), small.embedding())):
        matrices, of = ([t for t in tensors if len(t) == 2] for tensors in (whole, part))
        assert [a * b for a, b in matrices] == [REQUEST.smaller**2 * a * b for a, b in of]
    profile = profile_of(REQUEST)
    assert profile.machine.emulation and profile.machine.figures == "emulated" == profile.model.figures
    assert profile.model.sequence_length == 128 and profile.machine.device == "cpu"
    assert {state.state_class for state in profile.model.states} == {"embedding", "block", "head"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("like=a,gpu=b", "ssd=NAME too"),
        ("", "write like=MODEL"),
        ("like=a,gpu=b,ssd=c,like=d", "once each"),
        ("like=a,gpu=b,ssd=c,slower=0", "above 0"),
        ("like=a,gpu=b,ssd=c,slower=nan", "above 0"),
        ("like=a,gpu=b,ssd=c,slower=fast", "is a number"),
        ("like=a,gpu=b,ssd=c,smaller=1", "2 to 256"),
        ("like=a,gpu=b,ssd=c,faster=2", "write like=MODEL"),
    ],
)
def test_what_cannot_be_read(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse(text)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"like": "llama-2-7bb"}, "did you mean"),
        ({"like": "opt-30b"}, "a stand-in is made of llama"),
        ({"gpu": "none"}, "nothing to emulate"),
        ({"smaller": 17}, "does not divide"),
        ({"smaller": 256}, "no even width|tokens"),
        ({"sequence_length": 100}, "does not divide the rows"),
    ],
)
def test_what_cannot_be_emulated(changes: dict, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        shape_of(replace(REQUEST, **changes))


def test_parsed() -> None:
    found = parse("like=llama-2-7b, gpu=rtx-4090,ssd=samsung-990-pro*2,slower=2.5,link=pcie-3-x16")
    assert found == {
        "like": "llama-2-7b", "gpu": "rtx-4090", "link": "pcie-3-x16", "ssds": ("samsung-990-pro*2",), "slower": 2.5,
        "smaller": 16,
    }  # fmt: skip


def test_what_more_would_bring_is_told_by_the_workstation_s_sizes() -> None:
    """A drive 1 GB/s faster there brings the stand-in what it brings the original."""
    asked = SolveRequest(32 * GIB, micro_batch_size=4, micro_batches=2, recompute="all")
    what_if = WhatIf(
        model=REQUEST.like, gpu=REQUEST.gpu, ssds=REQUEST.ssds, host_memory_bytes=asked.host_memory_bytes,
        sequence_length=REQUEST.sequence_length, micro_batch_sizes=REQUEST.micro_batch_sizes,
    )  # fmt: skip
    its = {row.words: row for row in solve(estimate(what_if), asked, compared=False).sensitivity}
    small = replace(asked, host_memory_bytes=asked.host_memory_bytes // REQUEST.smaller**2)
    plan = solve(profile_of(REQUEST), small, compared=False)
    ours = {row.words: row for row in plan.sensitivity}
    assert set(ours) == set(its) and "8 GiB more device memory" in ours
    faster = "an SSD 1 GB/s faster"
    assert ours[faster].throughput_gain == pytest.approx(its[faster].throughput_gain, rel=0.1)
    assert "at this batch: sizes there, seconds here" in describe_plan(plan, build_schedule(plan.model, plan.decision))


@pytest.mark.parametrize("slower", [0.0, -2.0, float("nan"), float("inf"), 1e6])
def test_documents_name_what_no_operation_could_last(slower: float) -> None:
    with pytest.raises(ValidationError, match="slower"):
        Emulation(like="llama-2-7b", gpu="rtx-4090", ssd="samsung-990-pro", smaller=16, slower=slower)


def measured_of(request: Request, *kept: int) -> Profile:
    """A profile of the stand-in, whose blocks could keep so many bytes of four rows, and take a MiB beside."""
    profile = profile_of(request)
    rungs = tuple(
        Rung(
            name=f"rung-{number}", values=("value",), kept_bytes=nbytes, forward_seconds=9.0, backward_seconds=9.0,
            forward_workspace_bytes=7, backward_workspace_bytes=8,
        )
        for number, nbytes in enumerate(kept, 1)
    )  # fmt: skip
    classes = tuple(
        entry.model_copy(
            update={
                "timings": tuple(
                    timing.model_copy(
                        update={"rungs": rungs if entry.name == "block" else (), "forward_workspace_bytes": MIB}
                    )
                    for timing in entry.timings
                )
            }
        )
        for entry in profile.model.classes
    )
    return profile.model_copy(
        update={"model": profile.model.model_copy(update={"classes": classes, "figures": "measured"})}
    )


def test_rungs_are_the_stand_ins_and_their_seconds_the_originals() -> None:
    """Between two rungs of the original seconds are on a straight line; bytes and values are those that the stand-in
    really keeps, and what its code takes counts where it is more."""
    what_if = WhatIf(
        model=REQUEST.like, gpu=REQUEST.gpu, ssds=REQUEST.ssds, host_memory_bytes=GIB,
        sequence_length=REQUEST.sequence_length, micro_batch_sizes=(1, 4), rows="any",
    )  # fmt: skip
    its = estimate(what_if).model.timing("block", 4)
    first, second, part = *its.rungs[:2], REQUEST.smaller**2
    between = (first.kept_bytes + second.kept_bytes) // 2 // part
    most = 2 * its.rungs[-1].kept_bytes // part
    timing = profile_of(REQUEST, measured_of(REQUEST, first.kept_bytes // part, between, most)).model.timing("block", 4)
    assert [rung.kept_bytes for rung in timing.rungs] == [first.kept_bytes // part, between, most]
    assert {rung.values for rung in timing.rungs} == {("value",)}
    wanted = [
        (first.forward_seconds, first.backward_seconds),
        ((first.forward_seconds + second.forward_seconds) / 2, (first.backward_seconds + second.backward_seconds) / 2),
        (its.rungs[-1].forward_seconds, its.rungs[-1].backward_seconds),
    ]
    for rung, (forward, backward) in zip(timing.rungs, wanted, strict=True):
        assert rung.forward_seconds == pytest.approx(3 * forward, rel=1e-4)
        assert rung.backward_seconds == pytest.approx(3 * backward, rel=1e-4)
        assert (rung.forward_workspace_bytes, rung.backward_workspace_bytes) == (7, 8)
    plain = profile_of(REQUEST).model.timing("block", 4)
    assert timing.forward_workspace_bytes == max(MIB, plain.forward_workspace_bytes)
    assert timing.backward_workspace_bytes == plain.backward_workspace_bytes and plain.rungs == ()


@pytest.mark.parametrize(
    "changes", [{"precision": "fp32"}, {"sequence_length": 64}, {"fingerprint": "0" * 64}, {"figures": "emulated"}]
)
def test_rungs_of_something_else_are_refused(changes: dict) -> None:
    measured = measured_of(REQUEST, 1 << 16)
    other = measured.model_copy(update={"model": measured.model.model_copy(update=changes)})
    with pytest.raises(UsageError, match=r"--rungs-of: .* ssdplan profile --model /stand-in --sequence-length 128 "):
        profile_of(REQUEST, other)
    with pytest.raises(UsageError, match="--rungs-of"):
        profile_of(replace(REQUEST, micro_batch_sizes=(1, 2)), measured)
