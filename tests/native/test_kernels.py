"""Conversions, copies, finiteness and the statistics of gradients, against torch, fractions and float64."""

import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ssdplan.native as native
from tests.extent import examples

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INTEGERS = {"fp32": torch.int32, "bf16": torch.int16, "fp16": torch.int16}
UNIT = 1 << 1074  # sums of squares are in units of 2**-1074


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


def every_pair(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Every value of a format that has 16 bits, each beside fp32 ones of every kind: zeros of both signs, subnormals,
    infinities, what cancels it, and what leaves the sum half-way between two fp32 values."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    source = every.repeat(7).view(TORCH_DTYPES[dtype]) if dtype != "fp32" else wild(7 << 16, seed=3)
    generator = torch.Generator().manual_seed(5)
    kinds = torch.arange(source.numel()) % 7
    target = wild(source.numel(), seed=4)
    target = torch.where(kinds == 0, 0.0, target)
    target = torch.where(kinds == 1, -0.0, target)
    target = torch.where(kinds == 2, -source.float(), target)
    target = torch.where(kinds == 3, source.float() * 2**-24, target)
    target = torch.where(kinds == 4, float("inf"), target)
    order = torch.randperm(source.numel(), generator=generator)
    return target, source[order] if dtype == "fp32" else source


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("begin", [False, True])
def test_accumulating_gives_the_bits_of_torch(dtype: str, begin: bool) -> None:
    target, source = every_pair(dtype)
    want = target.clone()
    if begin:
        want.zero_()
    want.add_(source)
    native.accumulate(target.data_ptr(), source.data_ptr(), dtype, target.numel(), begin=begin, threads=2)
    assert_same_numbers(target, want, torch.int32)


@settings(max_examples=examples(60), deadline=None)
@given(
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    elements=st.integers(0, 200_000),
    shift=st.integers(0, 70),
    cut=st.integers(0, 200_000),
    threads=st.integers(1, 3),
)
def test_accumulating_touches_exactly_its_range(dtype: str, elements: int, shift: int, cut: int, threads: int) -> None:
    """Micro-batch by micro-batch, the range cut in two, as torch adds them; what lies around it stays."""
    sources = [torch.randn(elements + 70).to(TORCH_DTYPES[dtype]) for _ in range(3)]
    target = torch.randn(elements + 140)
    want = target.clone()
    want[shift : shift + elements].zero_()
    for turn, source in enumerate(sources):
        part = source[70 - shift : 70 - shift + elements]
        want[shift : shift + elements].add_(part)
        for begin, end in pairwise([0, min(cut, elements), elements]):
            native.accumulate(
                target[shift + begin :].data_ptr(),
                part[begin:].data_ptr(),
                dtype,
                end - begin,
                begin=turn == 0,
                threads=threads,
            )
    assert torch.equal(target.view(torch.int32), want.view(torch.int32))


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


@settings(max_examples=examples(30), deadline=None)
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
    cases: list[tuple[str, Callable[[], object]]] = [
        ("source is a null pointer", lambda: native.copy(address, 0, 4)),
        ("destination is a null pointer", lambda: native.convert(0, "bf16", address, "fp32", 1)),
        ("nbytes must not be negative", lambda: native.copy(address, address + 64, -1)),
        ("overlap", lambda: native.copy(address, address + 4, 8)),
        ("threads must be", lambda: native.copy(address, address + 64, 4, threads=0)),
        ("'int8'", lambda: native.is_finite(address, 1, "int8")),
        ("aligned", lambda: native.is_finite(address + 1, 1, "fp32")),
        ("elements must not be negative", lambda: native.is_finite(address, -1, "fp32")),
        ("overlap", lambda: native.copy_statistics(address, address + 4, 8)),
        ("overlap", lambda: native.accumulate(address, address + 8, "bf16", 8, begin=True)),
        ("target is a null pointer", lambda: native.accumulate(0, address, "bf16", 8, begin=False)),
        ("gradient is a null pointer", lambda: native.gradient_statistics(0, 1)),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_isa_names_a_known_path() -> None:
    assert native.isa() in {"x86-64-v4", "x86-64-v3", "baseline"}


def block_sums(gradient: torch.Tensor) -> Fraction:
    """The defined sum: float64 over blocks of 2048, sixteen lanes each, then exactly."""
    total = Fraction(0)
    squares = gradient.double().numpy() ** 2
    for start in range(0, len(squares), 2048):
        block = squares[start : start + 2048]
        lanes = np.zeros(16)
        for at in range(0, len(block), 16):
            part = block[at : at + 16]
            lanes[: len(part)] += part
        sum_of_block = 0.0
        for lane in lanes:
            sum_of_block += float(lane)
        total += Fraction(sum_of_block)
    return total


def wild(elements: int, seed: int = 0) -> torch.Tensor:
    """fp32 values over the whole range of exponents, subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-149, 127, (elements,), generator=generator)
    return torch.ldexp(torch.randn(elements, generator=generator, dtype=torch.float64).clamp(-1, 1), exponents).float()


@pytest.mark.parametrize("elements", [0, 1, 15, 16, 17, 2047, 2048, 2049, 100_003])
@pytest.mark.parametrize("make", [wild, lambda elements: torch.randn(elements)])
def test_the_sum_of_squares_is_the_defined_one(elements: int, make: Callable[[int], torch.Tensor]) -> None:
    gradient = make(elements)
    finite, squares = native.gradient_statistics(gradient.data_ptr(), elements, threads=2)
    assert finite and Fraction(squares, UNIT) == block_sums(gradient)
    assert squares / UNIT == pytest.approx(float(gradient.double().square().sum()), rel=1e-13)


@settings(max_examples=examples(40), deadline=None)
@given(
    blocks=st.integers(1, 80),
    rest=st.integers(0, 2047),
    cuts=st.lists(st.integers(0, 80), max_size=6),
    threads=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
)
def test_any_cut_at_blocks_in_any_order_gives_the_same_sum(
    blocks: int, rest: int, cuts: list[int], threads: int, order: Random
) -> None:
    gradient = wild(2048 * blocks + rest, seed=blocks)
    target = torch.zeros_like(gradient)
    whole = native.gradient_statistics(gradient.data_ptr(), gradient.numel())
    ranges = list(pairwise([0, *sorted(2048 * min(cut, blocks) for cut in cuts), gradient.numel()]))
    order.shuffle(ranges)
    total = 0
    for begin, end in ranges:
        part, copy = gradient[begin:end], target[begin:end]
        finite, squares = native.copy_statistics(copy.data_ptr(), part.data_ptr(), end - begin, threads=threads)
        assert finite
        total += squares
    assert (True, total) == whole
    assert torch.equal(target.view(torch.int32), gradient.view(torch.int32))


@pytest.mark.parametrize("elements", [1, 2048, 100_003])
def test_statistics_find_one_bad_element_anywhere(elements: int) -> None:
    gradient = torch.randn(elements)
    target = torch.empty_like(gradient)
    for position in {0, elements // 2, elements - 1}:
        for bad in (float("inf"), float("-inf"), float("nan")):
            spoilt = gradient.clone()
            spoilt[position] = bad
            assert not native.gradient_statistics(spoilt.data_ptr(), elements)[0]
            assert not native.copy_statistics(target.data_ptr(), spoilt.data_ptr(), elements, threads=2)[0]
            assert torch.equal(target.view(torch.int32), spoilt.view(torch.int32))


def test_finite_gradients_whose_sum_overflows_fp32_are_finite() -> None:
    gradient = torch.full((4096,), 3e38)
    finite, squares = native.gradient_statistics(gradient.data_ptr(), 4096)
    assert finite and Fraction(squares, UNIT) == 4096 * Fraction(float(gradient[0])) ** 2
    assert native.is_finite(gradient.data_ptr(), 4096, "fp32")


def resident_bytes() -> int:
    """The most memory that the process has held."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def test_the_overflow_check_needs_no_memory() -> None:
    gradient = torch.ones(16 << 20)
    assert native.is_finite(gradient.data_ptr(), gradient.numel(), "fp32", 2)  # the threads have their stacks now
    with open("/proc/self/clear_refs", "w", encoding="ascii") as peak:
        peak.write("5")
    before = resident_bytes()
    tracemalloc.start()
    assert native.is_finite(gradient.data_ptr(), gradient.numel(), "fp32", 2)
    _, python_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert python_peak < 1 << 20
    assert resident_bytes() - before <= 1 << 20
