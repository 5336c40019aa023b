"""Zeroth-order passes by torch against the native kernel, which tests/native holds to the definition: the same bits."""

import pytest
import torch

from ssdplan.executor.optimizer import passes
from ssdplan.executor.optimizer.passes import Pending, perturb

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


def test_the_side_that_is_not_wanted_stays_as_it_is() -> None:
    p = torch.randn(1000)
    before, plus = p.clone(), torch.empty(1000)
    perturb(p, plus, None, seed=1, tensor=2, step=3, direction=0, eps=0.5)
    assert torch.equal(p, before) and not torch.equal(plus, before)
    drawn = passes.normals(1000, 0, 1, 2, 3, 0, torch.device("cpu"))
    assert torch.equal(plus, before + 0.5 * drawn)
