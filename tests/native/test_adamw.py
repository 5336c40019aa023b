"""AdamW against torch's, against numpy's fp32 one operation at a time (the bits that any instruction set must give),
and its formats of masters and moments against what they are made of."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from operator import xor
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import ssdplan.native as native
from tests.extent import examples

Result = TypeVar("Result")
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LR, BETAS, EPS, WEIGHT_DECAY = 3e-3, (0.9, 0.999), 1e-8, 0.1
RATES = {"lr": LR, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "weight_decay": WEIGHT_DECAY}
FORMATS = [(parameter, moments, "fp32") for parameter in TORCH_DTYPES for moments in ("fp32", "bf16")]
FORMATS += [("bf16", moments, masters) for moments in ("fp32", "bf16") for masters in ("residual", "none")]


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [n] as its bf16 copy, ties upward, and the difference of their bit patterns, by integers of 64 bits."""
    bits = master.view(torch.int32).long() & 0xFFFFFFFF
    copy = (bits + 0x8000) >> 16
    residual = bits - (copy << 16)
    assert residual.abs().max() <= 1 << 15
    return copy.to(torch.int32).to(torch.int16).view(torch.bfloat16), residual.to(torch.int16)


def joined(copy: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The fp32 masters of a bf16 copy and its residual."""
    bits = (copy.view(torch.int16).long() << 16) + residual.long()
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


@dataclass
class State:
    """What one update reads and writes. `kept` is the fp32 masters, or their residual, or of no use in int8."""

    kept: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    gradient: torch.Tensor
    parameter: torch.Tensor

    @classmethod
    def random(
        cls, elements: int, parameter_dtype: str = "bf16", moments: str = "fp32", masters: str = "fp32", seed: int = 0
    ) -> "State":
        generator = torch.Generator().manual_seed(seed)
        master, exp_avg, gradient = (torch.randn(elements, generator=generator) for _ in range(3))
        exp_avg_sq = torch.rand(elements, generator=generator)
        parameter = torch.empty(elements, dtype=TORCH_DTYPES[parameter_dtype])
        if masters == "residual":
            parameter, master = split(master)
        elif masters == "none":
            parameter, master = master.bfloat16(), torch.zeros(elements, dtype=torch.int8)
        dtype = TORCH_DTYPES[moments]
        return cls(master, exp_avg.to(dtype), exp_avg_sq.to(dtype), gradient, parameter)

    def update(
        self, step: int, begin: int = 0, end: int | None = None, gradient_scale: float = 1.0, threads: int = 2
    ) -> bool:
        return self._apply(native.adamw, step, begin, end, gradient_scale, threads)

    def update_statistics(
        self, step: int, begin: int = 0, end: int | None = None, gradient_scale: float = 1.0, threads: int = 2
    ) -> tuple[bool, int]:
        return self._apply(native.adamw_statistics, step, begin, end, gradient_scale, threads)

    def _apply(
        self,
        apply: Callable[..., Result],
        step: int,
        begin: int,
        end: int | None,
        gradient_scale: float,
        threads: int,
    ) -> Result:
        kept, exp_avg, exp_avg_sq, gradient, parameter = (
            tensor[begin:end] for tensor in (self.kept, self.exp_avg, self.exp_avg_sq, self.gradient, self.parameter)
        )
        names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
        return apply(
            elements=gradient.numel(),
            parameter=parameter.data_ptr(),
            parameter_dtype=names[parameter.dtype],
            master=kept.data_ptr() if kept.dtype == torch.float32 else None,
            residual=kept.data_ptr() if kept.dtype == torch.int16 else None,
            exp_avg=exp_avg.data_ptr(),
            exp_avg_sq=exp_avg_sq.data_ptr(),
            moment_dtype=names[exp_avg.dtype],
            gradient=gradient.data_ptr(),
            **RATES,
            step=step,
            gradient_scale=gradient_scale,
            threads=threads,
        )

    def master(self) -> torch.Tensor:
        if self.kept.dtype == torch.int8:
            return self.parameter.float()
        return joined(self.parameter, self.kept) if self.kept.dtype == torch.int16 else self.kept

    def bits(self) -> list[torch.Tensor]:
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
        tensors = (self.kept, self.exp_avg, self.exp_avg_sq, self.parameter)
        return [tensor.view(integers[tensor.element_size()]).clone() for tensor in tensors]


def equal_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("parameter_dtype", ["bf16", "fp16", "fp32"])
def test_adamw_follows_torch_over_twenty_steps(parameter_dtype: str) -> None:
    elements = 5000
    state = State.random(elements, parameter_dtype)
    state.exp_avg.zero_()
    state.exp_avg_sq.zero_()
    weights = {dtype: state.kept.to(dtype).clone().requires_grad_() for dtype in (torch.float32, torch.float64)}
    optimizers = [
        torch.optim.AdamW([weight], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, foreach=False)
        for weight in weights.values()
    ]
    for step in range(1, 21):
        torch.manual_seed(step)
        state.gradient.copy_(torch.randn(elements) * torch.logspace(-6, 2, elements))
        for dtype, weight in weights.items():
            weight.grad = state.gradient.to(dtype)
        for optimizer in optimizers:
            optimizer.step()
        assert state.update(step)
    # torch's fp32 weights differ by 9e-7 in one process of sixty; its float64 ones and ours never do.
    for weight in weights.values():
        torch.testing.assert_close(state.kept.double(), weight.detach().double(), rtol=2e-6, atol=2e-6)
    moments = optimizers[1].state[weights[torch.float64]]
    size = torch.logspace(-6, 2, elements, dtype=torch.float64)  # a mean cancels: its error is relative to gradients
    torch.testing.assert_close(state.exp_avg / size, moments["exp_avg"] / size, rtol=0, atol=3e-7)
    torch.testing.assert_close(state.exp_avg_sq.double(), moments["exp_avg_sq"], rtol=2e-6, atol=0)
    assert torch.equal(state.parameter, state.kept.to(TORCH_DTYPES[parameter_dtype]))


def reference(state: State, step: int, gradient_scale: float) -> list[NDArray[np.float32]]:
    """The update in numpy, each operation rounded to fp32 by itself: what every vector unit must reproduce."""
    f = np.float32
    beta1, beta2 = BETAS
    tensors = (state.master(), state.exp_avg, state.exp_avg_sq, state.gradient)
    p, m, v, g = (tensor.float().numpy().copy() for tensor in tensors)
    with np.errstate(all="ignore"):
        g = g * f(gradient_scale)
        m = m + (g - m) * f(1 - beta1)
        v = v * f(beta2) + (g * g) * f(1 - beta2)
        denominator = np.sqrt(v) * f(1 / np.sqrt(1 - beta2**step)) + f(EPS)
        p = p * f(1 - LR * WEIGHT_DECAY) - (f(LR / (1 - beta1**step)) * m) / denominator
    return [p, m, v]


@pytest.mark.parametrize("elements", [1, 31, 32, 33, 2047, 2048, 2049, 70001])
@pytest.mark.parametrize(("parameter_dtype", "moments", "masters"), FORMATS)
def test_adamw_gives_the_bits_of_plain_fp32_operations(
    elements: int, parameter_dtype: str, moments: str, masters: str
) -> None:
    state = State.random(elements, parameter_dtype, moments, masters, seed=elements)
    state.gradient[::7] *= 1e-30  # squares that are subnormal or zero
    expected = [torch.from_numpy(array) for array in reference(state, 7, 0.37)]
    assert state.update(7, gradient_scale=0.37)
    dtype = TORCH_DTYPES[moments]
    master = expected[0].bfloat16().float() if masters == "none" else expected[0]
    assert torch.equal(state.master().view(torch.int32), master.view(torch.int32))
    assert torch.equal(state.exp_avg, expected[1].to(dtype)) and torch.equal(state.exp_avg_sq, expected[2].to(dtype))
    copy = split(expected[0])[0] if masters == "residual" else expected[0].to(TORCH_DTYPES[parameter_dtype])
    assert torch.equal(state.parameter, copy)


@settings(max_examples=examples(60), deadline=None)
@given(
    elements=st.integers(1, 9000),
    cuts=st.lists(st.integers(0, 9000), max_size=5),
    threads=st.integers(1, 4),
    formats=st.sampled_from(FORMATS),
)
def test_any_split_of_a_range_gives_the_same_bits(
    elements: int, cuts: list[int], threads: int, formats: tuple[str, str, str]
) -> None:
    whole = State.random(elements, *formats)
    whole.update(3, gradient_scale=0.5, threads=1)
    parts = State.random(elements, *formats)
    edges = [0, *sorted(min(cut, elements) for cut in cuts), elements]
    for begin, end in pairwise(edges):
        parts.update(3, begin, end, gradient_scale=0.5, threads=threads)
    assert equal_bits(whole.bits(), parts.bits())


def test_threads_change_no_bit() -> None:
    states = [State.random(400_003) for _ in range(4)]
    for state, threads in zip(states, (1, 2, 3, 8), strict=True):
        assert state.update(2, threads=threads)
    assert all(equal_bits(states[0].bits(), state.bits()) for state in states)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_masters_as_copy_and_residual_go_the_way_of_fp32_masters(moments: str) -> None:
    whole, parts = (State.random(20_000, "bf16", moments, masters) for masters in ("fp32", "residual"))
    for step in range(1, 30):
        torch.manual_seed(step)
        gradient = torch.randn(20_000) * torch.logspace(-9, 3, 20_000)
        for state in (whole, parts):
            state.gradient.copy_(gradient)
            assert state.update(step, gradient_scale=0.3)
        assert torch.equal(whole.kept.view(torch.int32), parts.master().view(torch.int32)), step
        assert torch.equal(whole.exp_avg, parts.exp_avg) and torch.equal(whole.exp_avg_sq, parts.exp_avg_sq)
    ties = (whole.kept.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(whole.parameter[~ties], parts.parameter[~ties])


def near_halves(dtype: str) -> torch.Tensor:
    """Every value of a 16-bit format, with what lies just above, just below and half-way to its neighbours, as fp32."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(TORCH_DTYPES[dtype]).float()
    unit = 1 << (16 if dtype == "bf16" else 13)
    offsets = torch.tensor([0, 1, -1, unit // 2 - 1, unit // 2, unit // 2 + 1, -(unit // 2)])
    values = (patterns.view(torch.int32).long()[:, None] + offsets).flatten() & 0xFFFFFFFF
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32).view(torch.float32)


def unchanged(state: State) -> bool:
    """An update that leaves masters as they are: they, and their formats, are all that it moves."""
    residual = state.kept.dtype == torch.int16
    state.gradient.zero_()
    return native.adamw(
        elements=state.gradient.numel(),
        parameter=state.parameter.data_ptr(),
        parameter_dtype="fp16" if state.parameter.dtype == torch.float16 else "bf16",
        master=None if residual else state.kept.data_ptr(),
        residual=state.kept.data_ptr() if residual else None,
        exp_avg=state.exp_avg.data_ptr(),
        exp_avg_sq=state.exp_avg_sq.data_ptr(),
        gradient=state.gradient.data_ptr(),
        lr=0.0,
        beta1=0.0,
        beta2=0.0,
        eps=1.0,
        weight_decay=0.0,
        step=1,
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_copy_is_rounded_as_torch_rounds(dtype: str) -> None:
    values = near_halves(dtype)
    state = State.random(values.numel(), dtype)
    state.kept.copy_(values)
    assert unchanged(state)
    want = values.to(TORCH_DTYPES[dtype])
    assert torch.equal(state.parameter.isnan(), want.isnan())
    numbers = ~want.isnan()
    assert torch.equal(state.parameter.view(torch.int16)[numbers], want.view(torch.int16)[numbers])


def test_copy_and_residual_hold_every_master() -> None:
    values = near_halves("bf16")
    numbers = ~values.isnan()
    state = State.random(values.numel(), "bf16", masters="residual")
    parameter, residual = split(torch.where(numbers, values, 0.0))
    assert torch.equal(joined(parameter, residual)[numbers].view(torch.int32), values[numbers].view(torch.int32))
    state.parameter.copy_(parameter)
    state.kept.copy_(residual)
    assert unchanged(state)
    assert torch.equal(state.parameter.view(torch.int16), parameter.view(torch.int16))
    assert torch.equal(state.kept, residual)
    assert int(residual.min()) == -(1 << 15) and int(residual.max()) == (1 << 15) - 1


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000])
def test_a_master_that_is_not_a_number_stays_one_in_each_format(bits: int) -> None:
    nan = torch.tensor([bits - (1 << 32) if bits >> 31 else bits] * 40, dtype=torch.int32).view(torch.float32)
    for parameter_dtype, moments, masters in FORMATS:
        state = State.random(40, parameter_dtype, moments, masters)
        state.gradient.copy_(nan)
        assert not state.update(1)
        assert all(tensor.isnan().all() for tensor in (state.master(), state.parameter, state.exp_avg))


@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
def test_one_factor_unscales_and_clips_to_the_bits_of_torch(loss_scale: float) -> None:
    """GradScaler.unscale_, clip_grad_norm_, then the step; or all in the step's one pass."""
    clipped, fused = State.random(5000), State.random(5000)
    weight = torch.zeros(5000, requires_grad=True)
    weight.grad = fused.gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([weight], 0.7)
    coefficient = (0.7 / (norm + 1e-6)).clamp(max=1.0)
    clipped.gradient.copy_(weight.grad)
    fused.gradient.mul_(loss_scale)
    assert clipped.update(4) and fused.update(4, gradient_scale=float(coefficient) / loss_scale)
    assert coefficient < 0.1 and equal_bits(clipped.bits(), fused.bits())


def test_flush_to_zero_in_the_process_changes_nothing() -> None:
    plain, flushed = State.random(5000), State.random(5000)
    for state in (plain, flushed):
        state.exp_avg.zero_()
        state.gradient.mul_(1e-38)
    plain.update(1)
    torch.set_flush_denormal(True)
    try:
        flushed.update(1)
    finally:
        torch.set_flush_denormal(False)
    assert plain.exp_avg.view(torch.int32).count_nonzero() > 4900  # subnormal, and not flushed
    assert plain.exp_avg.abs().max() < torch.finfo(torch.float32).tiny
    assert equal_bits(plain.bits(), flushed.bits())


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("position", [0, 31, 2048, 4999])
def test_adamw_reports_a_gradient_that_is_not_finite(bad: float, position: int) -> None:
    state = State.random(5000)
    state.gradient[position] = bad
    assert not state.update(1)


def test_what_the_scale_makes_infinite_is_reported() -> None:
    state = State.random(4096)
    state.gradient.fill_(3e38)
    assert state.update(1)
    assert not state.update(1, gradient_scale=10.0)


def wild_gradient(elements: int) -> torch.Tensor:
    """Of any exponent that leaves squares and moments finite, subnormals among them."""
    generator = torch.Generator().manual_seed(elements)
    exponents = torch.randint(-149, 60, (elements,), generator=generator)
    return torch.ldexp(torch.randn(elements, generator=generator, dtype=torch.float64).clamp(-1, 1), exponents).float()


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("elements", [1, 15, 16, 31, 33, 47, 2047, 2048, 2049, 4095, 70_001])
def test_statistics_in_passing_are_those_of_a_pass_of_their_own(elements: int, formats: tuple[str, str, bool]) -> None:
    plain, summed = State.random(elements, *formats), State.random(elements, *formats)
    for state in (plain, summed):
        state.gradient.copy_(wild_gradient(elements))
    finite, squares = summed.update_statistics(7, gradient_scale=1e-9)
    assert (finite, squares) == native.gradient_statistics(summed.gradient.data_ptr(), elements)
    assert finite == plain.update(7, gradient_scale=1e-9)
    assert equal_bits(plain.bits(), summed.bits())
    assert squares / (1 << 1074) == pytest.approx(float(summed.gradient.double().square().sum()), rel=1e-13)


@settings(max_examples=examples(30), deadline=None)
@given(
    blocks=st.integers(1, 80),
    rest=st.integers(0, 2047),
    cuts=st.lists(st.integers(0, 80), max_size=5),
    threads=st.integers(1, 4),
    formats=st.sampled_from(FORMATS),
)
def test_statistics_of_ranges_cut_at_blocks_add_up(
    blocks: int, rest: int, cuts: list[int], threads: int, formats: tuple[str, str, str]
) -> None:
    elements = 2048 * blocks + rest
    whole, parts = (State.random(elements, *formats) for _ in range(2))
    for state in (whole, parts):
        state.gradient.copy_(wild_gradient(elements))
    whole.update(3, threads=1)
    total = 0
    for begin, end in pairwise([0, *sorted(2048 * min(cut, blocks) for cut in cuts), elements]):
        finite, squares = parts.update_statistics(3, begin, end, threads=threads)
        assert finite
        total += squares
    assert total == native.gradient_statistics(whole.gradient.data_ptr(), elements)[1]
    assert equal_bits(whole.bits(), parts.bits())


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("position", [0, 17, 2048, 4095, 4999])
def test_statistics_report_a_gradient_that_is_not_finite(bad: float, position: int) -> None:
    state = State.random(5000)
    state.gradient[position] = bad
    got = state.update_statistics(1)
    assert not got[0] and got == native.gradient_statistics(state.gradient.data_ptr(), 5000)


def test_statistics_are_those_before_scaling() -> None:
    state = State.random(4096)
    state.gradient.fill_(3e38)
    finite, squares = state.update_statistics(1, gradient_scale=10.0)
    assert not finite  # the update saw infinities
    assert squares == 4096 * int(float(state.gradient[0])) ** 2 << 1074


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("elements", [1, 33, 70_001])
def test_the_mix_loads_and_stores_every_stream(moments: str, elements: int) -> None:
    state = State.random(elements, "bf16", moments)
    gradient = state.gradient.view(torch.int32)
    kept, exp_avg, exp_avg_sq, _ = state.bits()
    shift = 0 if moments == "fp32" else 16
    native.stream_mix(
        elements=elements,
        parameter=state.parameter.data_ptr(),
        master=state.kept.data_ptr(),
        exp_avg=state.exp_avg.data_ptr(),
        exp_avg_sq=state.exp_avg_sq.data_ptr(),
        moment_dtype=moments,
        gradient=state.gradient.data_ptr(),
    )
    mixed = (gradient >> shift).to(exp_avg.dtype)
    want = [kept ^ gradient, exp_avg ^ mixed, exp_avg_sq ^ mixed, ((kept ^ gradient) >> 16).to(torch.int16)]
    assert equal_bits(state.bits(), want)


def test_wrong_arguments_are_refused_and_named() -> None:
    state = State.random(8)
    addresses = {
        "elements": 8,
        "parameter": state.parameter.data_ptr(),
        "parameter_dtype": "bf16",
        "exp_avg": state.exp_avg.data_ptr(),
        "exp_avg_sq": state.exp_avg_sq.data_ptr(),
        "gradient": state.gradient.data_ptr(),
    }
    master = state.kept.data_ptr()
    rates = RATES | {"step": 1}
    before = state.bits()
    cases: list[tuple[str, dict[str, object]]] = [
        ("without a master", {"master": None, "parameter_dtype": "fp16"}),
        ("without a master", {"master": 0, "parameter_dtype": "fp32"}),
        ("exclude each other", {"master": master, "residual": master}),
        ("residual needs", {"master": None, "residual": master, "parameter_dtype": "fp16"}),
        ("moment_dtype", {"master": master, "moment_dtype": "fp16"}),
        ("exp_avg_scales is a null pointer", {"master": master, "moment_dtype": "int8", "elements": 64}),
        ("multiple of 64", {"master": master, "moment_dtype": "int8", "scales": [master, master]}),
        ("only moments in int8", {"master": master, "scales": [master, 0]}),
        ("aligned", {"master": master + 2}),
        ("elements must not be negative", {"master": master, "elements": -1}),
        ("step", {"master": master, "step": 0}),
        ("lr", {"master": master, "lr": -1.0}),
        ("beta2", {"master": master, "beta2": 1.0}),
        ("gradient_scale", {"master": master, "gradient_scale": float("nan")}),
    ]
    call: Callable[..., bool] = native.adamw
    for message, wrong in cases:
        with pytest.raises(ValueError, match=message):
            call(**{**addresses, **rates, **wrong})
    with pytest.raises(TypeError):
        call(**addresses, **rates, master=master, amsgrad=True)
    assert equal_bits(state.bits(), before)


EXTENT = 4096


@given(data=st.data())
@settings(deadline=None, max_examples=examples(60))
def test_the_sums_of_extents_before_and_after_are_their_checksums(data: st.DataObject) -> None:
    """Of states that lie one stream after the other, updated whole or in pieces, on any number of threads."""
    parameter = data.draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    moments = data.draw(st.sampled_from(["fp32", "bf16"]))
    elements = 4096 * data.draw(st.integers(1, 40))
    item = 4 if moments == "fp32" else 2
    nbytes = (4 + 2 * item) * elements
    ends = sorted(data.draw(st.sets(st.integers(1, nbytes // EXTENT - 1), max_size=4)) | {nbytes // EXTENT})
    ends = [EXTENT * end for end in ends]
    cuts = sorted(data.draw(st.sets(st.integers(1, elements // 128 - 1), max_size=3)) | {0, elements // 128})
    plain = State.random(elements, parameter, moments)
    finite, squares = plain.update_statistics(3)
    state = State.random(elements, parameter, moments)
    arena = torch.cat([t.view(torch.uint8) for t in (state.kept, state.exp_avg, state.exp_avg_sq)])
    places = (0, 4 * elements, (4 + item) * elements)
    lying = [slice(start, stop) for start, stop in pairwise((0, *ends))]

    def checksums() -> list[int]:
        return [native.checksum(arena[each].data_ptr(), each.stop - each.start) for each in lying]

    expected, before, after, seen = checksums(), [0] * len(ends), [0] * len(ends), 0
    for start, stop in pairwise(128 * cut for cut in cuts):
        starts = [place + size * start for place, size in zip(places, (4, item, item), strict=True)]
        fine, of_part, old, new = native.adamw_summed(
            *(arena.data_ptr() + each for each in starts),
            state.gradient.data_ptr() + 4 * start,
            state.parameter.data_ptr() + state.parameter.element_size() * start,
            parameter,
            stop - start,
            positions=tuple(starts),
            ends=ends,
            moment_dtype=moments,
            **RATES,
            step=3,
            threads=data.draw(st.integers(1, 3)),
        )
        before, after = (list(map(xor, *each)) for each in ((before, old), (after, new)))
        seen += of_part
        assert fine
    sizes = [each.stop - each.start for each in lying]
    assert [native.checksum_of(each, size) for each, size in zip(before, sizes, strict=True)] == expected
    assert [native.checksum_of(each, size) for each, size in zip(after, sizes, strict=True)] == checksums()
    whole = torch.cat([t.view(torch.uint8) for t in (plain.kept, plain.exp_avg, plain.exp_avg_sq)])
    assert torch.equal(arena, whole) and torch.equal(state.parameter, plain.parameter) and finite
    assert len(cuts) > 2 or seen == squares


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ends": [128]}, "multiple of 256"),
        ({"ends": [4096, 4096]}, "rise"),
        ({"ends": []}, "beyond"),
        ({"ends": [4096]}, "beyond"),
        ({"positions": (0, 4096, 4096 + 64)}, "multiple of 256"),
        ({"positions": (0, 4096, -256)}, "negative"),
        ({"elements": 1000}, "multiple of 256"),
        ({"moment_dtype": "bf16", "elements": 64}, "multiple of 256"),
    ],
)
def test_extents_that_cannot_be_summed_are_refused(change: dict[str, object], says: str) -> None:
    state = State.random(1024)
    given = {"elements": 1024, "positions": (0, 4096, 8192), "ends": [12288], "moment_dtype": "fp32"} | change
    before = state.kept.clone()
    with pytest.raises(ValueError, match=says):
        native.adamw_summed(
            state.kept.data_ptr(),
            state.exp_avg.data_ptr(),
            state.exp_avg_sq.data_ptr(),
            state.gradient.data_ptr(),
            state.parameter.data_ptr(),
            "bf16",
            **RATES,
            step=1,
            **given,
        )
    assert torch.equal(state.kept, before)
