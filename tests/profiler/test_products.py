"""What formats cost is a ratio of times: of the same work 1, and of what is made slow as much as it was made slow."""

import pytest
import torch

from ssdplan.profiler import products
from ssdplan.profiler.products import product_costs
from tests.profiler.made_time import MadeTime


def test_the_cost_of_a_format_is_what_it_takes_beside_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {torch.float32: 0.004, torch.bfloat16: 0.04, torch.float16: 0.002}
    real, threads, made = torch.nn.functional.linear, [], MadeTime()

    def slowed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        made.sleep(seconds[x.dtype])
        return real(x, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", slowed)
    monkeypatch.setattr(products, "TOKENS", 2)
    monkeypatch.setattr(products, "FEATURES", 2)
    before = torch.get_num_threads()
    costs = product_costs(clock=made)
    assert costs == {"bf16": pytest.approx(10.0), "fp16": pytest.approx(0.5)}
    assert set(threads) == {1} and torch.get_num_threads() == before
