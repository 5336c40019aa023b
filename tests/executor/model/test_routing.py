"""How tokens spread over experts, beside the routers' own logits as transformers hands them out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ssdplan.executor.loop import FAR_FROM_PROFILED, Loop
from ssdplan.executor.model.inspection.routing import Routing, Spread
from ssdplan.executor.model.layers import MicroBatch
from tests.executor.model.test_layers import opened
from tests.executor.test_architectures import make
from tests.executor.test_mixtures import MIXTURES
from tests.made.models import make_model


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_busiest_expert_is_that_of_the_routers_logits(tmp_path: Path, family: str) -> None:
    path = make(family, tmp_path / family, **MIXTURES[family])
    step = opened(path, alone=True)
    batches = [torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    step.batches = [MicroBatch(ids, ids) for ids in batches]
    step.model.routing.begin()
    step.layers.begin_step(0, step.batches)
    step.vertical()
    found = step.model.routing.end()
    step.layers.end_step()
    plain = AutoModelForCausalLM.from_pretrained(path)
    every = [plain(input_ids=ids, output_router_logits=True).router_logits for ids in batches]
    expected = []
    for layer in range(len(every[0])):
        chosen = torch.cat([logits[layer].topk(2).indices.flatten() for logits in every])
        counts = torch.bincount(chosen, minlength=4)
        expected.append(float(counts.max() / (counts.sum() / 4)))
    worst = max(range(len(expected)), key=expected.__getitem__)
    assert found is not None and found.experts == 4
    assert (found.block, found.times) == (worst, pytest.approx(expected[worst]))
    step.layers.begin_step(1, step.batches)
    step.vertical()
    assert step.model.routing.end() is None, "nothing is counted that nobody asked for"


def test_a_model_without_experts_has_none_to_count(tmp_path: Path) -> None:
    step = opened(make_model("llama", tmp_path / "llama"), alone=True)
    step.batches = [MicroBatch(*[torch.randint(3, 97, (1, 8))] * 2)]
    step.model.routing.begin()
    step.layers.begin_step(0, step.batches)
    step.vertical()
    assert step.model.routing.end() is None


def test_experts_that_do_nothing_are_no_experts() -> None:
    """Of some models tokens may choose numbers behind the last expert, which hand them on as they are."""

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Parameter(torch.zeros(3, 2, 2))

        def forward(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            return hidden

    experts = Experts()
    routing = Routing([torch.nn.Sequential(experts)])
    routing.begin()
    experts(torch.zeros(3, 2), chosen=torch.tensor([[0, 5], [0, 3], [1, 4]]))
    assert routing.end() == Spread(0, 2.0, 3)


@pytest.mark.parametrize(
    ("profiled", "times", "told"),
    [(1.2, 1.2 * FAR_FROM_PROFILED * 1.01, True), (1.2, 1.2 * FAR_FROM_PROFILED * 0.99, False), (None, 4.0, False)],
)
def test_a_routing_far_from_the_profiles_is_told_once(profiled: float | None, times: float, told: bool) -> None:
    notes: list[str] = []
    loop: Any = SimpleNamespace(
        routing=SimpleNamespace(end=lambda: Spread(2, times, 4)),
        plan=SimpleNamespace(model=SimpleNamespace(busiest_expert=profiled)),
        watch=SimpleNamespace(note=notes.append),
    )
    Loop._tell_routing(loop)
    Loop._tell_routing(loop)
    assert len(notes) == told and loop.routing is None
    assert not told or f"of the 4 experts of block.2 the busiest takes {times:.1f} times" in notes[0]
