"""The CPU kernels against independent oracles: torch's AdamW and conversions, numpy's fp32 one operation at a time (the
bits that any instruction set must give), and float64."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import ssdplan.native as native

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INTEGERS = {"fp32": torch.int32, "bf16": torch.int16, "fp16": torch.int16}
LR, BETAS, EPS, WEIGHT_DECAY = 3e-3, (0.9, 0.999), 1e-8, 0.1


@dataclass
class State:
    """What one update reads and writes."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    gradient: torch.Tensor
    parameter: torch.Tensor
    parameter_dtype: str

    @classmethod
    def random(cls, elements: int, parameter_dtype: str = "bf16", seed: int = 0) -> "State":
        generator = torch.Generator().manual_seed(seed)
        master, exp_avg, gradient = (torch.randn(elements, generator=generator) for _ in range(3))
        exp_avg_sq = torch.rand(elements, generator=generator)
        parameter = torch.empty(elements, dtype=TORCH_DTYPES[parameter_dtype])
        return cls(master, exp_avg, exp_avg_sq, gradient, parameter, parameter_dtype)

    def update(
        self, step: int, begin: int = 0, end: int | None = None, gradient_scale: float = 1.0, threads: int = 2
    ) -> tuple[bool, float]:
        parts = [
            tensor[begin:end] for tensor in (self.master, self.exp_avg, self.exp_avg_sq, self.gradient, self.parameter)
        ]
        return native.adamw(
            *(part.data_ptr() for part in parts),
            self.parameter_dtype,
            parts[0].numel(),
            lr=LR,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            step=step,
            gradient_scale=gradient_scale,
            threads=threads,
        )

    def bits(self) -> list[torch.Tensor]:
        return [
            self.master.view(torch.int32).clone(),
            self.exp_avg.view(torch.int32).clone(),
            self.exp_avg_sq.view(torch.int32).clone(),
            self.parameter.view(INTEGERS[self.parameter_dtype]).clone(),
        ]


def equal_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("parameter_dtype", ["bf16", "fp16", "fp32"])
def test_adamw_follows_torch_over_twenty_steps(parameter_dtype: str) -> None:
    elements = 5000
    state = State.random(elements, parameter_dtype)
    state.exp_avg.zero_()
    state.exp_avg_sq.zero_()
    weights = {dtype: state.master.to(dtype).clone().requires_grad_() for dtype in (torch.float32, torch.float64)}
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
        finite, sum_of_squares = state.update(step)
        assert finite
        assert sum_of_squares == pytest.approx(state.gradient.double().square().sum().item(), rel=1e-13)
    torch.testing.assert_close(state.master, weights[torch.float32].detach(), rtol=5e-7, atol=1e-7)
    torch.testing.assert_close(state.master.double(), weights[torch.float64].detach(), rtol=2e-6, atol=2e-6)
    moments = optimizers[0].state[weights[torch.float32]]
    size = torch.logspace(-6, 2, elements)  # a mean of gradients cancels: its error is relative to them
    torch.testing.assert_close(state.exp_avg / size, moments["exp_avg"] / size, rtol=0, atol=3e-7)
    torch.testing.assert_close(state.exp_avg_sq, moments["exp_avg_sq"], rtol=2e-6, atol=0)
    assert torch.equal(state.parameter, state.master.to(TORCH_DTYPES[parameter_dtype]))


def reference(state: State, step: int, gradient_scale: float) -> list[NDArray[np.float32]]:
    """The update in numpy, each operation rounded to fp32 by itself: what every vector unit must reproduce."""
    f = np.float32
    beta1, beta2 = BETAS
    p, m, v, g = (t.numpy().copy() for t in (state.master, state.exp_avg, state.exp_avg_sq, state.gradient))
    with np.errstate(all="ignore"):
        g = g * f(gradient_scale)
        m = m + (g - m) * f(1 - beta1)
        v = v * f(beta2) + (g * g) * f(1 - beta2)
        denominator = np.sqrt(v) * f(1 / np.sqrt(1 - beta2**step)) + f(EPS)
        p = p * f(1 - LR * WEIGHT_DECAY) - (f(LR / (1 - beta1**step)) * m) / denominator
    return [p, m, v]


@pytest.mark.parametrize("elements", [1, 15, 16, 17, 2047, 2048, 2049, 70001])
def test_adamw_gives_the_bits_of_plain_fp32_operations(elements: int) -> None:
    state = State.random(elements, seed=elements)
    state.gradient[::7] *= 1e-30  # squares that are subnormal or zero
    state.master[::5] = 1e-39
    expected = reference(state, 7, 0.37)
    state.update(7, gradient_scale=0.37)
    for got, want in zip((state.master, state.exp_avg, state.exp_avg_sq), expected, strict=True):
        assert np.array_equal(got.numpy().view(np.int32), want.view(np.int32))


@settings(max_examples=60, deadline=None)
@given(
    elements=st.integers(1, 9000),
    cuts=st.lists(st.integers(0, 9000), max_size=5),
    threads=st.integers(1, 4),
    parameter_dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
)
def test_any_split_of_a_range_gives_the_same_bits(
    elements: int, cuts: list[int], threads: int, parameter_dtype: str
) -> None:
    whole = State.random(elements, parameter_dtype)
    whole.update(3, gradient_scale=0.5, threads=1)
    parts = State.random(elements, parameter_dtype)
    edges = [0, *sorted(min(cut, elements) for cut in cuts), elements]
    for begin, end in pairwise(edges):
        parts.update(3, begin, end, gradient_scale=0.5, threads=threads)
    assert equal_bits(whole.bits(), parts.bits())


def test_threads_change_neither_bits_nor_the_sum() -> None:
    states = [State.random(400_003) for _ in range(4)]
    results = [state.update(2, threads=threads) for state, threads in zip(states, (1, 2, 3, 8), strict=True)]
    assert len(set(results)) == 1
    assert all(equal_bits(states[0].bits(), state.bits()) for state in states)


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
@pytest.mark.parametrize("position", [0, 2047, 2048, 69_999, 70_000])
def test_adamw_reports_a_gradient_that_is_not_finite(bad: float, position: int) -> None:
    state = State.random(70_001)
    state.gradient[position] = bad
    assert state.update(1)[0] is False


def test_finite_gradients_whose_sum_overflows_are_finite() -> None:
    state = State.random(4096)
    state.gradient.fill_(3e38)
    finite, sum_of_squares = state.update(1)
    assert finite
    assert sum_of_squares == pytest.approx(4096 * float(np.float32(3e38)) ** 2, rel=1e-13)
    assert state.update(1, gradient_scale=10.0)[0] is False  # what the scale makes of it is not


def all_fp32_near_halves(dtype: str) -> torch.Tensor:
    """Every value of a 16-bit format, with what lies just above, just below and half-way to its neighbours."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(TORCH_DTYPES[dtype]).float()
    bits = patterns.view(torch.int32).long()
    unit = 1 << (16 if dtype == "bf16" else 13)
    offsets = torch.tensor([0, 1, -1, unit // 2 - 1, unit // 2, unit // 2 + 1, -(unit // 2)])
    near = (bits[:, None] + offsets).flatten() & 0xFFFFFFFF
    sweep = torch.arange(0, 2**32, 65_521)  # and all of fp32, sparsely
    values = torch.cat([near, sweep])
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32).view(torch.float32)


def converted(source: torch.Tensor, source_dtype: str, destination_dtype: str, threads: int = 2) -> torch.Tensor:
    destination = torch.empty(source.numel(), dtype=TORCH_DTYPES[destination_dtype])
    native.convert(
        destination.data_ptr(), destination_dtype, source.data_ptr(), source_dtype, source.numel(), threads=threads
    )
    return destination


def assert_same_numbers(got: torch.Tensor, want: torch.Tensor, integers: torch.dtype) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    numbers = ~want.isnan()
    assert torch.equal(got.view(integers)[numbers], want.view(integers)[numbers])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rounding_agrees_with_torch_around_every_value(dtype: str) -> None:
    source = all_fp32_near_halves(dtype)
    got = converted(source, "fp32", dtype)
    assert_same_numbers(got, source.to(TORCH_DTYPES[dtype]), torch.int16)
    assert torch.equal(torch.signbit(got), torch.signbit(source))


@pytest.mark.parametrize("source_dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("destination_dtype", ["fp32", "bf16", "fp16"])
def test_every_16_bit_value_converts_as_in_torch(source_dtype: str, destination_dtype: str) -> None:
    source = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(TORCH_DTYPES[source_dtype])
    got = converted(source, source_dtype, destination_dtype)
    assert_same_numbers(got, source.to(TORCH_DTYPES[destination_dtype]), INTEGERS[destination_dtype])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_fused_parameter_is_rounded_as_convert_rounds(dtype: str) -> None:
    source = all_fp32_near_halves(dtype)
    state = State.random(source.numel(), dtype)
    state.master.copy_(source)
    state.update(1)
    assert torch.equal(state.parameter.view(torch.int16), converted(state.master, "fp32", dtype).view(torch.int16))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_is_finite_finds_one_bad_element_anywhere(dtype: str) -> None:
    largest = torch.finfo(TORCH_DTYPES[dtype]).max
    values = torch.full((70_001,), largest, dtype=TORCH_DTYPES[dtype])
    assert native.is_finite(values.data_ptr(), values.numel(), dtype, 2)
    for position in (0, 33, 65_536, 70_000):
        for bad in (float("inf"), float("-inf"), float("nan")):
            values[position] = bad
            assert not native.is_finite(values.data_ptr(), values.numel(), dtype, 2)
            assert native.is_finite(values.data_ptr(), position, dtype, 2)
        values[position] = -largest
    assert native.is_finite(0, 0, dtype)


@settings(max_examples=30, deadline=None)
@given(nbytes=st.integers(0, 3 << 20), shift=st.integers(0, 70), threads=st.integers(1, 3))
def test_copy_copies_exactly_its_range(nbytes: int, shift: int, threads: int) -> None:
    source = torch.randint(0, 255, (nbytes + 200,), dtype=torch.uint8)
    destination = torch.zeros(nbytes + 200, dtype=torch.uint8)
    native.copy(destination.data_ptr() + 70, source.data_ptr() + shift, nbytes, threads=threads)
    assert torch.equal(destination[70 : 70 + nbytes], source[shift : shift + nbytes])
    assert not destination[:70].any()
    assert not destination[70 + nbytes :].any()


def test_wrong_arguments_are_refused_and_named() -> None:
    values = torch.zeros(64)
    address = values.data_ptr()
    state = State.random(8)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("source is a null pointer", lambda: native.copy(address, 0, 4)),
        ("destination is a null pointer", lambda: native.convert(0, "bf16", address, "fp32", 1)),
        ("nbytes must not be negative", lambda: native.copy(address, address + 64, -1)),
        ("overlap", lambda: native.copy(address, address + 4, 8)),
        ("threads must be", lambda: native.copy(address, address + 64, 4, threads=0)),
        ("'int8'", lambda: native.is_finite(address, 1, "int8")),
        ("aligned", lambda: native.is_finite(address + 1, 1, "fp32")),
        ("elements must not be negative", lambda: native.is_finite(address, -1, "fp32")),
        ("step", lambda: state.update(0)),
        ("gradient_scale", lambda: state.update(1, gradient_scale=float("nan"))),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_isa_names_a_known_path() -> None:
    assert native.isa() in {"x86-64-v4", "x86-64-v3", "baseline"}


@pytest.mark.parametrize("elements", [0, 1, 15, 16, 17, 2047, 2048, 2049, 100_003])
def test_gradient_statistics_are_those_of_the_update(elements: int) -> None:
    generator = torch.Generator().manual_seed(elements)
    gradient = torch.randn(elements, generator=generator)
    finite, squares = native.gradient_statistics(gradient.data_ptr(), elements, threads=2)
    assert finite and squares == pytest.approx(float(gradient.double().square().sum()), rel=1e-14)
    states = torch.zeros(3, max(elements, 1))
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    addresses = [states[row].data_ptr() for row in range(3)]
    master = states[0].data_ptr()
    assert native.adamw(*addresses, gradient.data_ptr(), master, "fp32", elements, **rates) == (finite, squares)
    for position in {0, elements // 2, elements - 1} if elements else ():
        for bad in (float("inf"), float("nan")):
            spoilt = gradient.clone()
            spoilt[position] = bad
            assert not native.gradient_statistics(spoilt.data_ptr(), elements)[0]
