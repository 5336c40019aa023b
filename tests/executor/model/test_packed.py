"""Values in int8: the definition in float64, and a block's backward from them against one from the same numbers."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ssdplan.executor.model import packed
from ssdplan.executor.model.traced import LEAST_PACKED, trace
from ssdplan.plans.errors import UsageError
from tests.made.models import make_model

from .test_traced import PRICES, Called

GROUP = packed.GROUP


def there_and_back(value: torch.Tensor) -> torch.Tensor:
    """By the definition: groups of 64 in the order of memory, scale = most / 127 in fp32, nearest even."""
    order = sorted(range(value.dim()), key=lambda dimension: -value.stride(dimension))
    flat = value.permute(order).reshape(-1)
    wide = np.zeros(-(-flat.numel() // GROUP) * GROUP, np.float32)
    wide[: flat.numel()] = flat.float().numpy()
    groups = wide.reshape(-1, GROUP)
    scales = np.maximum(np.abs(groups).max(axis=1) / np.float32(127), np.float32(2.0**-126)).astype(np.float32)
    inverse = (np.float32(1) / scales).astype(np.float32)
    values = np.rint(groups * inverse[:, None]).astype(np.float32)
    back = torch.from_numpy((values * scales[:, None]).reshape(-1)[: flat.numel()].copy()).to(value.dtype)
    return back.view([value.shape[dimension] for dimension in order]).permute(
        [order.index(dimension) for dimension in range(value.dim())]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "order"), [((3, 5, 64), (0, 1, 2)), ((2, 4, 7, 9), (0, 2, 1, 3)), ((1,), (0,)), ((65, 3), (1, 0))]
)
def test_a_value_comes_back_as_defined(dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    sizes = [shape[dimension] for dimension in order]
    back = [order.index(dimension) for dimension in range(len(order))]
    value = torch.randn(sizes, generator=torch.Generator().manual_seed(3)).to(dtype).permute(back)
    assert tuple(value.shape) == shape
    elements = math.prod(shape)
    nbytes = packed.packed_bytes(elements)
    assert nbytes == -(-elements // 4) * 4 + 4 * -(-elements // GROUP)
    memory = torch.full((nbytes + 8,), 77, dtype=torch.uint8)
    packed.pack(memory[:nbytes], value, order)
    assert memory[nbytes:].tolist() == [77] * 8, "nothing beyond the place is written"
    found = packed.unpack(memory[:nbytes], shape, order, dtype)
    assert found.stride() == value.stride() and found.dtype == dtype
    assert torch.equal(found, there_and_back(value))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    value = torch.ones(130)
    value[70] = bad
    place = torch.empty(packed.packed_bytes(130), dtype=torch.uint8)
    packed.pack(place, value, (0,))
    found = packed.unpack(place, (130,), (0,), torch.float32)
    assert found[64:128].isnan().all() and torch.equal(found[:64], value[:64]) and torch.equal(found[128:], value[128:])


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_from_int8_is_backward_from_the_same_numbers(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    called = Called(make_model(family, tmp_path / "model"), dtype=dtype)
    traced = trace(called, called.hidden, called.others)
    seconds = {node.name: 1e-5 for node in traced.forward.graph.nodes}
    given = [called.hidden.detach(), *(other.detach() for other in called.others)]
    exact = called.by_autograd()
    lossy = 0
    for price in PRICES:
        kept = traced.cheapest(seconds, price)
        raw, cut = traced.cut(kept), traced.cut(kept, packed=True)
        assert [value.name for value in raw.kept] == [value.name for value in cut.kept]
        places = [torch.zeros(value.nbytes, dtype=torch.uint8) for value in cut.kept]
        whole = [torch.zeros(value.nbytes, dtype=torch.uint8) for value in raw.kept]
        with torch.no_grad():
            out = cut.forward(*given, *(v.laid(p) for v, p in zip(cut.kept, places, strict=True)))
            assert torch.equal(out, exact[0]), "a forward is exact, whatever is kept of it"
            raw.forward(*given, *(v.laid(p) for v, p in zip(raw.kept, whole, strict=True)))
            numbers = [v.laid(p) for v, p in zip(raw.kept, whole, strict=True)]
            known = [
                there_and_back(number) if value.packed else number
                for number, value in zip(numbers, cut.kept, strict=True)
            ]
            before = [place.clone() for place in places]
            found, expected = ({}, {}), ({}, {})
            for graphs, inputs, (of, _) in (
                (cut, [v.laid(p) for v, p in zip(cut.kept, places, strict=True)], found),
                (raw, known, expected),
            ):
                rest = [*(given[:1] if graphs.keeps_hidden else []), *given[1:], called.gradient]
                of["hidden"] = graphs.backward(*inputs, *rest, of.__setitem__)
        assert all(torch.equal(a, b) for a, b in zip(before, places, strict=True)), "what is kept stays in int8"
        assert set(found[0]) == set(expected[0])
        for name, gradient in expected[0].items():
            assert torch.equal(found[0][name], gradient), (name, price)
        lossy += any(value.packed for value in cut.kept)
    assert lossy, "some of what is kept is kept in int8"


def test_small_values_and_masks_stay_as_they_are(tmp_path: Path) -> None:
    """The statistics of norms and of attention, and what dropout drew."""
    called = Called(make_model("llama", tmp_path / "model", attention_dropout=0.3), training=True)
    traced = trace(called, called.hidden, called.others)
    every = traced.kept([value.name for value in traced.values], packed=True)
    for value in every:
        if value.packed:
            assert value.dtype == torch.float32 and value.elements * LEAST_PACKED > called.hidden.numel()
            assert value.nbytes < value.elements * 4 / 3.5
    hidden = called.hidden.shape
    small = [value for value in every if value.shape == (*hidden[:2], 1)]
    assert small and not any(value.packed for value in small if hidden[2] >= LEAST_PACKED)
    assert all(not value.packed for value in every if not value.dtype.is_floating_point)


def test_what_is_kept_in_int8_stays_so_until_its_first_use(tmp_path: Path) -> None:
    called = Called(make_model("llama", tmp_path / "model"))
    traced = trace(called, called.hidden, called.others)
    seconds = {node.name: 1e-5 for node in traced.forward.graph.nodes}
    cut = traced.cut(traced.cheapest(seconds, 0.0), packed=True)
    nodes = list(cut.backward.graph.nodes)
    unpacked = [node for node in nodes if node.target is packed.unpack]
    assert 0 < len(unpacked) <= sum(value.packed for value in cut.kept)
    for node in unpacked:
        following = [other for other in nodes[nodes.index(node) + 1 :] if other.target is not packed.unpack]
        assert node in following[0].all_input_nodes


def test_triton_gives_the_native_bits() -> None:
    """In Triton's interpreter, in a process of its own; on a GPU it is tested in test_gpu.py."""
    pytest.importorskip("triton", reason="Triton is not installed: torch's CUDA builds bring it")
    code = """
import torch
from ssdplan.executor.model import packed, packed_triton
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for elements in (1, 64, 1000, 70_001):
        source = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(dtype)
        source[elements // 2] *= 1e3
        if elements == 1000:
            source[100], source[300], source[800:] = float("nan"), float("-inf"), 0.0
        places = [torch.zeros(packed.packed_bytes(elements), dtype=torch.uint8) for _ in range(2)]
        packed.pack(places[0], source, (0,))
        parts = packed._parts(places[1], elements)
        packed_triton.quantize(*parts, source, packed.GROUP)
        native = packed._parts(places[0], elements)
        assert torch.equal(native[0], parts[0]), (dtype, elements)
        assert torch.equal(native[1].nan_to_num(-1.0), parts[1].nan_to_num(-1.0)), (dtype, elements)
        # The interpreter cuts bf16 off instead of rounding it.
        out = torch.empty(elements, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
        packed_triton.dequantize(out, *parts, packed.GROUP)
        back = packed.unpack(places[0], (elements,), (0,), dtype)
        assert torch.equal(out.to(dtype).nan_to_num(7.0), back.nan_to_num(7.0)), (dtype, elements)
print("the same bits")
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0 and "the same bits" in found.stdout, found.stderr


def test_a_gpu_without_triton_is_said_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed.importlib.util, "find_spec", lambda name: None)
    packed.require_kernels(torch.device("cpu"))
    with pytest.raises(UsageError, match="need the package triton, which is not installed"):
        packed.require_kernels(torch.device("cuda", 0))
    monkeypatch.setattr(packed.importlib.util, "find_spec", lambda name: "there")
    packed.require_kernels(torch.device("cuda", 0))
