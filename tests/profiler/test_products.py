"""What formats cost is a ratio of times: of the same work 1, and of what is made slow as much as it was made slow."""

import time

import pytest
import torch

from ssdplan.profiler import products
from ssdplan.profiler.products import product_costs


def test_the_cost_of_a_format_is_what_it_takes_beside_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {torch.float32: 0.004, torch.bfloat16: 0.04, torch.float16: 0.002}
    real, threads = torch.nn.functional.linear, []

    def slowed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        time.sleep(seconds[x.dtype])
        return real(x, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", slowed)
    monkeypatch.setattr(products, "TOKENS", 2)
    monkeypatch.setattr(products, "FEATURES", 2)
    before = torch.get_num_threads()
    costs = product_costs()
    assert list(costs) == ["bf16", "fp16"]
    assert 5 < costs["bf16"] < 15 and 0.25 < costs["fp16"] < 0.9
    assert set(threads) == {1} and torch.get_num_threads() == before
