"""Zeroth-order passes by torch against the native kernel, which tests/native holds to the definition: the same bits."""

import os
import subprocess
import sys

import pytest
import torch

from ssdplan.executor.optimizer import passes
from ssdplan.executor.optimizer.passes import Pending, perturb
from ssdplan.executor.optimizer.rows import Rows

PENDING: list[Pending] = [(3, 0, 1e-2, 0.99), (4, 7, -3e-3, 1.0), (2**32 - 1, 2**16 - 1, 1e-4, 1.0)]


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("elements", "first"), [(1, 0), (63, 64), (5000, 2**40), (70_001, 128)])
def test_torch_has_the_bits_of_the_native_kernel(
    monkeypatch: pytest.MonkeyPatch, where: str, dtype: torch.dtype, elements: int, first: int
) -> None:
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    monkeypatch.setattr(passes, "PIECE", 1 << 14)
    ours = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(dtype)
    theirs = ours.clone().to(where)
    plus, minus = torch.empty_like(ours), torch.empty_like(ours)
    above, below = torch.empty_like(theirs), torch.empty_like(theirs)
    seed, tensor, step, direction, eps = 2**63 + 12345, 0xDEADBEEF, 77, 65535, 1e-3
    perturb(ours, plus, minus, seed=seed, tensor=tensor, step=step, direction=direction, eps=eps, pending=PENDING,
            first=first)  # fmt: skip
    passes._perturb(theirs, above, below, seed, tensor, step, direction, eps, PENDING, first)
    for native, by_torch in ((ours, theirs), (plus, above), (minus, below)):
        assert torch.equal(native, by_torch.cpu())
    assert elements == 1 or not torch.equal(plus, minus)


def test_triton_has_the_bits_of_the_native_kernel() -> None:
    """In Triton's interpreter, in a process of its own; it cuts bf16 off instead of rounding it, so not in bf16."""
    pytest.importorskip("triton", reason="Triton is not installed: torch's CUDA builds bring it")
    code = """
import torch
from ssdplan.executor.optimizer import passes, passes_triton
from ssdplan.executor.optimizer.rows import Rows
PENDING = [(3, 0, 1e-2, 0.99), (2**32 - 1, 2**16 - 1, 1e-4, 1.0)]
seed, tensor, step, direction, eps = 2**63 + 12345, 0xDEADBEEF, 77, 65535, 1e-3
for dtype, made in ((torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.float16)):
    for elements, first, sides, pending in (
        (1, 0, (1, 1), PENDING), (63, 64, (1, 0), []), (5000, 2**40, (1, 1), PENDING), (4100, 128, (0, 1), PENDING[:1]),
        (700, 0, (0, 0), PENDING), (700, 64, (0, 0), []),
    ):
        ours = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(dtype)
        theirs = ours.clone()
        made_by_us, made_by_triton = ([torch.zeros(elements, dtype=made) if s else None for s in sides] for _ in "12")
        passes.perturb(ours, *made_by_us, seed=seed, tensor=tensor, step=step, direction=direction, eps=eps,
                       pending=pending, first=first)
        passes_triton.perturb(theirs, *made_by_triton, seed, tensor, step, direction, eps, pending, first)
        for one, other in zip((ours, *made_by_us), (theirs, *made_by_triton)):
            assert one is other is None or torch.equal(one, other), (dtype, made, elements, first, sides)
    for width in (64, 192, 1024):
        rows = Rows(torch.tensor([0, 1, 2, 5, 9, 10, 4_000_000, 9_000_000, 9_000_000]), width)
        ours = torch.randn(9 * width, generator=torch.Generator().manual_seed(width)).to(dtype)
        theirs = ours.clone()
        made_by_us, made_by_triton = ([torch.zeros(9 * width, dtype=made) for _ in "12"] for _ in "12")
        passes.perturb(ours, *made_by_us, seed=seed, tensor=tensor, step=step, direction=direction, eps=eps,
                       pending=PENDING, rows=rows)
        passes_triton.perturb(theirs, *made_by_triton, seed, tensor, step, direction, eps, PENDING, 0, rows)
        for one, other in zip((ours, *made_by_us), (theirs, *made_by_triton)):
            assert torch.equal(one, other), (dtype, made, width)
print("the same bits")
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert found.returncode == 0 and "the same bits" in found.stdout, found.stderr


@pytest.mark.parametrize("where", ["cpu", "by torch", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 320])
def test_rows_have_the_bits_that_they_have_in_the_whole_tensor(
    monkeypatch: pytest.MonkeyPatch, where: str, dtype: torch.dtype, width: int
) -> None:
    """Side by side: updates, copies on both sides, and a row that is there twice."""
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    monkeypatch.setattr(passes, "PIECE", 128)
    whole = torch.randn(40, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    numbers, device = torch.tensor([0, 1, 2, 7, 11, 12, 39, 39]), "cuda" if where == "cuda" else "cpu"
    side_by_side = whole[numbers].flatten().to(device)
    how = {"seed": 2**63 + 5, "tensor": 0xDEADBEEF, "step": 77, "direction": 3, "eps": 1e-2, "pending": PENDING}
    expected = [whole.flatten(), torch.empty(40 * width, dtype=dtype), torch.empty(40 * width, dtype=dtype)]
    perturb(*expected, **how)
    found = [side_by_side, *(torch.empty_like(side_by_side) for _ in range(2))]
    rows = Rows(numbers.to(device), width)
    if where == "by torch":
        passes._perturb(*found, *how.values(), 0, rows)
    else:
        perturb(*found, **how, rows=rows)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.view(40, width)[numbers].flatten(), other.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("elements", "first"), [(1, 0), (63, 64), (5000, 2**40), (70_001, 128)])
def test_what_a_gpu_makes_has_the_bits_of_the_native_kernel(dtype: torch.dtype, elements: int, first: int) -> None:
    """By Triton where it is there, by torch where it is not; with masters in fp32 and without."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    for kept in {dtype, torch.float32}:
        for pending, tensor, step in ((PENDING, 0xDEADBEEF, 77), ([], 1, 1)):
            ours = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(kept)
            theirs = ours.cuda()
            sides = [torch.empty(elements, dtype=dtype) for _ in range(2)]
            of_gpu = [torch.empty(elements, dtype=dtype, device="cuda") for _ in range(2)]
            for p, made in ((ours, sides), (theirs, of_gpu)):
                perturb(p, *made, seed=2**63 + 5, tensor=tensor, step=step, direction=1, eps=1e-3, pending=pending,
                        first=first)  # fmt: skip
            for one, other in ((ours, theirs), *zip(sides, of_gpu, strict=True)):
                assert torch.equal(one, other.cpu()), (kept, pending)


def test_the_side_that_is_not_wanted_stays_as_it_is() -> None:
    p = torch.randn(1000)
    before, plus = p.clone(), torch.empty(1000)
    perturb(p, plus, None, seed=1, tensor=2, step=3, direction=0, eps=0.5)
    assert torch.equal(p, before) and not torch.equal(plus, before)
    drawn = passes.normals(1000, 0, 1, 2, 3, 0, torch.device("cpu"))
    assert torch.equal(plus, before + 0.5 * drawn)
