"""The zeroth-order pass against a second implementation in numpy: Philox with its authors' known answers, Box and
Muller in float64, and the steps in fp32; and the directions against what normal numbers do."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import ssdplan.native as native
from tests.extent import examples

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def philox(counter: list[NDArray[np.uint64]], key: tuple[int, int]) -> list[NDArray[np.uint64]]:
    """Philox4x32-10 of counters' four words, each an array of 32-bit numbers."""
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (second >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            second & mask,
            (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            first & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_oracles_philox_knows_random123s_answers(
    counter: list[int], key: tuple[int, int], answer: list[int]
) -> None:
    words = philox([np.array([word], np.uint64) for word in counter], key)
    assert [int(word[0]) for word in words] == answer


def directions(
    seed: int, tensor: int, step: int, first: int, elements: int, direction: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The defined normals, and the radii r of their pairs, in float64."""
    e = np.arange(first, first + elements, dtype=np.uint64)
    c = np.uint64(16) * (e // np.uint64(64)) + e % np.uint64(16)
    counter = [
        c & np.uint64(0xFFFFFFFF),
        (c >> np.uint64(32)) + np.uint64(direction << 16),
        np.full_like(c, tensor),
        np.full_like(c, step),
    ]
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    place = (e // np.uint64(16)) % np.uint64(4)
    a, b = np.where(place < 2, words[0], words[2]), np.where(place < 2, words[1], words[3])
    r = np.sqrt(-2 * np.log(((a >> np.uint64(1)).astype(np.float64) + 0.5) / 2**31))
    t = 2 * np.pi * b.astype(np.float64) / 2**32
    return r * np.where(place % np.uint64(2) == 0, np.cos(t), np.sin(t)), r


def drawn(
    seed: int, tensor: int, step: int, first: int, elements: int, threads: int = 1, direction: int = 0
) -> NDArray[np.float32]:
    """The native normals: what an update by -1 leaves of zeros."""
    out = torch.zeros(elements)
    pending = [(step, direction, -1.0, 1.0)]
    native.zeroth_order_update(
        out.data_ptr(), "fp32", elements, seed=seed, tensor=tensor, pending=pending, first=first, threads=threads
    )
    return out.numpy()


@settings(max_examples=examples(30), deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    tensor=st.integers(0, 2**32 - 1),
    step=st.integers(0, 2**32 - 1),
    first=st.integers(0, 2**50 - 70_000),
    elements=st.integers(1, 70_000),
    direction=st.integers(0, 2**16 - 1),
)
def test_directions_are_the_defined_ones(
    seed: int, tensor: int, step: int, first: int, elements: int, direction: int
) -> None:
    got = drawn(seed, tensor, step, first, elements, threads=2, direction=direction)
    want, r = directions(seed, tensor, step, first, elements, direction)
    # An error e of r^2 is one of e / 2r of r, and at most the root of e.
    error = 1.2e-7 + 5e-7 * r**2
    assert (np.abs(got - want) <= np.minimum(error / r, np.sqrt(error)) + 3e-7 * r).all()


def test_directions_are_normal_and_independent() -> None:
    n = 4_000_000
    z = drawn(1, 0, 0, 0, n, threads=2).astype(np.float64)
    # Moments, within five standard errors.
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)]:
        assert abs((z**power).mean() - moment) < 5 * math.sqrt(variance / n), power
    # Kolmogorov and Smirnov: the distribution's largest distance passes 1.95 / sqrt(n) once in a thousand.
    ordered = np.sort(z[:1_000_000])
    erf = torch.special.erf(torch.from_numpy(ordered / math.sqrt(2))).numpy()
    cdf = (1 + erf) / 2
    steps = np.arange(len(cdf) + 1) / len(cdf)
    assert max((steps[1:] - cdf).max(), (cdf - steps[:-1]).max()) < 1.95 / 1000
    assert 4.8 < np.abs(z).max() < 6.7  # of four million, beyond 4.8 with a chance of 0.998
    # Neighbours, the halves of a pair and of a counter, other tensors, steps and seeds.
    others = {f"{lag} further": z[lag:] for lag in (1, 2, 4, 15, 16, 32, 48, 64, 1024)}
    others |= {"tensor": drawn(1, 1, 0, 0, n), "step": drawn(1, 0, 1, 0, n), "seed": drawn(2, 0, 0, 0, n)}
    others |= {"high seed": drawn(1 + (1 << 32), 0, 0, 0, n), "far": drawn(1, 0, 0, 1 << 36, n)}
    others |= {"direction": drawn(1, 0, 0, 0, n, direction=1)}
    for name, other in others.items():
        length = len(other)
        for x, y in [(z[:length], other), (z[:length] ** 2 - 1, np.square(other, dtype=np.float64) - 1)]:
            correlation = (x * y).mean() / math.sqrt((x * x).mean() * (y * y).mean())
            assert abs(correlation) < 5 / math.sqrt(length), name


def state(elements: int, dtype: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parameters = torch.randn(elements, generator=torch.Generator().manual_seed(seed)).to(TORCH_DTYPES[dtype])
    return parameters, torch.empty_like(parameters), torch.empty_like(parameters)


@pytest.mark.parametrize(
    "pending", [[], [(6, 0, 3e-2, 1.0)], [(5, 0, 3e-2, 0.999), (5, 1, -1e-2, 1.0), (6, 0, 2e-2, 0.99)]]
)
@pytest.mark.parametrize(
    ("masters", "dtype"), [(None, "fp32"), (None, "bf16"), (None, "fp16"), ("fp32", "bf16"), ("fp32", "fp16")]
)
@pytest.mark.parametrize(("first", "elements"), [(0, 1), (5, 64), (63, 66), (1 << 40, 70_001)])
def test_the_pass_is_updates_and_perturbations_rounded_one_by_one(
    pending: list[tuple[int, int, float, float]], masters: str | None, dtype: str, first: int, elements: int
) -> None:
    """Each update rounds to the parameters' own format; what is perturbed is these, rounded to that of the copies."""
    _, plus, minus = state(elements, dtype)
    parameters, _, _ = state(elements, masters or dtype)
    p = parameters.float().numpy().copy()
    native.zeroth_order(
        *(tensor.data_ptr() for tensor in (parameters, plus, minus)),
        dtype,
        elements,
        seed=9,
        tensor=4,
        step=7,
        direction=2,
        eps=1e-2,
        pending=pending,
        masters=masters,
        first=first,
        threads=2,
    )

    def rounded(values: NDArray[np.float32], to: str) -> torch.Tensor:
        return torch.from_numpy(values).to(TORCH_DTYPES[to])

    for step, direction, scale, keep in pending:
        z = drawn(9, 4, step, first, elements, direction=direction)
        p = rounded(np.float32(keep) * p - np.float32(scale) * z, masters or dtype).float().numpy()
    z = np.float32(1e-2) * drawn(9, 4, 7, first, elements, direction=2)
    assert torch.equal(parameters, rounded(p, masters or dtype))
    copy = rounded(p, dtype).float().numpy()
    assert torch.equal(plus, rounded(copy + z, dtype)) and torch.equal(minus, rounded(copy - z, dtype))


@settings(max_examples=examples(40), deadline=None)
@given(
    first=st.integers(0, 300),
    elements=st.integers(1, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=5),
    threads=st.integers(1, 4),
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    turns=st.booleans(),
)
def test_any_split_of_a_range_gives_the_same_bits(
    first: int, elements: int, cuts: list[int], threads: int, dtype: str, turns: bool
) -> None:
    """Of ranges, and of the two copies: the second pass of one that takes turns updates nothing."""
    moves = [(1, 0, 0.01, 0.9), (1, 3, 0.02, 1.0)]
    settings_: dict[str, Any] = {"seed": 3, "tensor": 1, "step": 2, "eps": 1e-3}
    whole, parts = state(elements, dtype), state(elements, dtype)
    addresses = [tensor.data_ptr() for tensor in whole]
    native.zeroth_order(*addresses, dtype, elements, first=first, pending=moves, **settings_)
    for begin, end in pairwise([0, *sorted(min(cut, elements) for cut in cuts), elements]):
        p, plus, minus = (tensor[begin:end].data_ptr() for tensor in parts)
        settings_ |= {"first": first + begin, "threads": threads}
        if begin == end:
            continue
        if turns:
            native.zeroth_order(p, plus, 0, dtype, end - begin, pending=moves, **settings_)
            native.zeroth_order(p, 0, minus, dtype, end - begin, **settings_)
        else:
            native.zeroth_order(p, plus, minus, dtype, end - begin, pending=moves, **settings_)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_threads_and_flushes_change_no_bit() -> None:
    """Updates that wait and are made together are those that were made one by one."""
    results = []
    moves = [(0, 0, 0.5, 1.0), (0, 1, -0.25, 0.99), (1, 0, 0.125, 1.0)]
    for threads in (1, 2, 5):
        tensors = state(200_000, "bf16")
        addresses = [tensor.data_ptr() for tensor in tensors]
        native.zeroth_order(*addresses, "bf16", 200_000, seed=1, tensor=0, step=0, eps=1e-2, threads=threads)
        for move in moves:
            native.zeroth_order_update(addresses[0], "bf16", 200_000, seed=1, tensor=0, pending=[move], threads=threads)
        results.append(tensors)
    fused = state(200_000, "bf16")
    native.zeroth_order(
        *(tensor.data_ptr() for tensor in fused), "bf16", 200_000, seed=1, tensor=0, step=1, eps=1e-2, pending=moves
    )
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    assert torch.equal(fused[0], results[0][0])


def test_wrong_arguments_are_refused() -> None:
    addresses = [tensor.data_ptr() for tensor in state(64, "fp32")]
    good = {"seed": 0, "tensor": 0, "step": 0, "eps": 1e-3}
    for message, wrong in [
        ("tensor", {"tensor": 1 << 32}),
        ("step", {"step": -1}),
        ("eps", {"eps": 0.0}),
        ("eps", {"eps": float("nan")}),
        ("direction", {"direction": 1 << 16}),
        ("step", {"pending": [(-1, 0, 0.1, 1.0)]}),
        ("direction", {"pending": [(0, 1 << 16, 0.1, 1.0)]}),
        ("scale", {"pending": [(0, 0, float("inf"), 1.0)]}),
        ("keep", {"pending": [(0, 0, 0.1, -1.0)]}),
        ("masters|parameters must be", {"masters": "bf16"}),
        ("2\\^50", {"first": 1 << 50}),
        ("first", {"first": -1}),
        ("threads", {"threads": 0}),
    ]:
        with pytest.raises(ValueError, match=message):
            native.zeroth_order(*addresses, "fp32", 64, **{**good, **wrong})
    p, plus, minus = addresses
    for message, arguments in [
        ("overlap", (p, plus, p, "fp32", 64)),
        ("overlap", (p, plus, plus, "fp32", 64)),
        ("plus is a null", (p, 0, 0, "fp32", 64)),
        ("dtype", (p, plus, minus, "int8", 64)),
        ("aligned", (p + 1, plus, minus, "fp32", 64)),
        ("negative", (p, plus, minus, "fp32", -1)),
    ]:
        with pytest.raises(ValueError, match=message):
            native.zeroth_order(*arguments, **good)
