"""int8 quantisation by groups against numpy in float64, and at the edges of what fp32 holds."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ssdplan.native as native
from tests.extent import examples

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
MAGNITUDES = {"fp32": (-30, 30), "bf16": (-30, 30), "fp16": (-4, 3)}
"""Powers of ten that a format holds as normal numbers."""
GROUPS = [32, 64, 128, 256, 512, 1024, 2048, 4096]


def quantized(source: torch.Tensor, group: int, threads: int = 1) -> tuple[torch.Tensor, torch.Tensor, bool]:
    elements = source.numel()
    values, scales = torch.full((elements,), 99, dtype=torch.int8), torch.full((-(-elements // group),), -1.0)
    dtype = NAMES[source.dtype]
    finite = native.quantize(
        values.data_ptr(), scales.data_ptr(), source.data_ptr(), dtype, elements, group=group, threads=threads
    )
    return values, scales, finite


def dequantized(values: torch.Tensor, scales: torch.Tensor, group: int, dtype: str, threads: int = 1) -> torch.Tensor:
    out = torch.empty(values.numel(), dtype=TORCH_DTYPES[dtype])
    native.dequantize(
        out.data_ptr(), dtype, values.data_ptr(), scales.data_ptr(), out.numel(), group=group, threads=threads
    )
    return out


def grouped(source: torch.Tensor, group: int) -> np.ndarray:
    """float64 [groups, group], the last group filled up with zeros."""
    padded = torch.zeros(-(-source.numel() // group) * group, dtype=torch.float64)
    padded[: source.numel()] = source.double()
    return padded.view(-1, group).numpy()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("group", GROUPS)
def test_it_is_the_defined_one_in_float64(dtype: str, group: int) -> None:
    generator = torch.Generator().manual_seed(group)
    size = torch.logspace(*MAGNITUDES[dtype], 70_001, dtype=torch.float64).float()
    source = (torch.randn(70_001, generator=generator) * size).to(TORCH_DTYPES[dtype])
    values, scales, finite = quantized(source, group, threads=2)
    assert finite
    wide = grouped(source, group)
    exact = np.abs(wide).max(axis=1) / 127
    np.testing.assert_array_equal(scales.numpy(), exact.astype(np.float32))
    ratio = wide / scales.double().numpy()[:, None]
    got = grouped(values, group)
    assert np.abs(got - ratio).max() <= 0.5 + 2e-5  # nearest, but where two are as good as equally near
    clear = np.abs(ratio - np.floor(ratio) - 0.5) > 2e-5
    np.testing.assert_array_equal(got[clear], np.rint(ratio)[clear])
    assert np.abs(got).max(axis=1).min() == 127
    back = dequantized(values, scales, group, dtype, threads=2)
    product = torch.repeat_interleave(scales, group)[: values.numel()] * values.float()
    assert torch.equal(back, product.to(TORCH_DTYPES[dtype]))


def test_ties_go_to_even() -> None:
    source = torch.cat([torch.arange(-63.5, 64.0, 1.0)[:127], torch.tensor([127.0])])  # a scale of 1
    values, scales, finite = quantized(source, 128)
    assert finite and scales.tolist() == [1.0]
    assert values.tolist() == np.rint(source.numpy()).astype(np.int8).tolist()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1.1754944e-38, 1e-37, 3e38])
def test_groups_of_zeros_and_of_extreme_magnitudes(dtype: str, size: float) -> None:
    source = (torch.linspace(-1, 1, 64, dtype=torch.float64) * size).to(TORCH_DTYPES[dtype])
    values, scales, finite = quantized(source, 64)
    assert finite and torch.isfinite(scales).all() and scales.min() > 0
    error = (dequantized(values, scales, 64, "fp32").double() - source.double()).abs()
    assert float(error.max()) <= float(scales[0]) * (0.5 + 2e-5)
    if size == 0:
        assert not values.any() and not dequantized(values, scales, 64, dtype).any()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("position", [0, 63, 64, 70_000])
def test_what_is_not_finite_is_reported_and_comes_back_as_nan(bad: float, dtype: str, position: int) -> None:
    source = torch.ones(70_001, dtype=TORCH_DTYPES[dtype])
    source[position] = bad
    values, scales, finite = quantized(source, 64, threads=2)
    assert not finite
    expected = torch.ones(70_001, dtype=torch.bool)
    start = position // 64 * 64
    expected[start : start + 64] = False
    assert torch.equal(dequantized(values, scales, 64, dtype).isfinite(), expected)


@settings(max_examples=examples(40), deadline=None)
@given(
    elements=st.integers(1, 140_000),
    group=st.sampled_from(GROUPS),
    cuts=st.lists(st.integers(0, 4000), max_size=4),
    threads=st.integers(1, 4),
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
)
def test_any_split_at_groups_gives_the_same_bits(
    elements: int, group: int, cuts: list[int], threads: int, dtype: str
) -> None:
    source = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(TORCH_DTYPES[dtype])
    whole, whole_scales, _ = quantized(source, group)
    back = dequantized(whole, whole_scales, group, dtype)
    for begin, end in pairwise([0, *sorted(min(cut * group, elements) for cut in cuts), elements]):
        values, scales, finite = quantized(source[begin:end], group, threads)
        assert finite and torch.equal(values, whole[begin:end])
        assert torch.equal(scales, whole_scales[begin // group : -(-end // group) if end > begin else begin // group])
        assert torch.equal(dequantized(values, scales, group, dtype, threads), back[begin:end])


def test_wrong_arguments_are_refused() -> None:
    values, scales, source = torch.zeros(64, dtype=torch.int8), torch.zeros(2), torch.zeros(64)
    a, b, c = values.data_ptr(), scales.data_ptr(), source.data_ptr()
    for group in (0, 16, 48, 8192, -64):
        with pytest.raises(ValueError, match="group"):
            native.quantize(a, b, c, "fp32", 64, group=group)
        with pytest.raises(ValueError, match="group"):
            native.dequantize(c, "fp32", a, b, 64, group=group)
    for message, arguments in [
        ("int8", (a, b, c, "int8", 64)),
        ("values is a null", (0, b, c, "fp32", 64)),
        ("scales is a null", (a, 0, c, "fp32", 64)),
        ("source is a null", (a, b, 0, "fp32", 64)),
        ("overlap", (c, b, c, "fp32", 64)),
        ("aligned", (a, b + 1, c, "fp32", 64)),
        ("negative", (a, b, c, "fp32", -1)),
    ]:
        with pytest.raises(ValueError, match=message):
            native.quantize(*arguments)
