"""Weight decay's exclusions: those of transformers.Trainer for every family, exact however a state is cut."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import Trainer

from ssdplan import native
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.kinds import spared_parameters
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW, RangeUpdate
from ssdplan.executor.optimizer.weight_decay import spared_spans, windows
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import Result, train
from ssdplan.plans.documents.state_layout import OPTIMIZER_FORMATS
from tests import reference
from tests.executor.runs import LENGTH, micro_batches_of, opened, prepare
from tests.executor.test_families import vanishing
from tests.made.models import FAMILIES, OTHERS, make_model
from tests.made.plans import make_plan

OPTIMIZER = AdamW(lr=1e-3, weight_decay=30.0, beta1=0.8, beta2=0.95, eps=1e-6, decay_all=False)
"""Of so strong a decay one step shows whether a parameter had it."""


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_the_parameters_that_decay_are_those_of_the_trainer(family, tmp_path):
    model = open_model(make_model(family, tmp_path / family), torch.float32)
    names = [tensor.name for state in model.states for tensor in state.tensors]
    theirs = set(Trainer.get_decay_parameter_names(None, model.module))
    assert {name for name in names if name not in spared_parameters(model.module)} == theirs & set(names)
    assert 0 < len(theirs & set(names)) < len(names)

    for state, spans in zip(model.states, spared_spans(model), strict=True):
        spared = torch.zeros(state.elements, dtype=torch.bool)
        for start, stop in spans:
            spared[start:stop] = True
        for tensor in state.tensors:
            part = spared[tensor.offset : tensor.offset + tensor.elements]
            assert part.all() if tensor.name not in theirs else not part.any(), tensor.name


@given(
    edges=st.lists(st.integers(0, 6 * 32), unique=True, max_size=8).map(sorted),
    start=st.integers(0, 5),
    count=st.integers(1, 6),
)
def test_windows_cover_a_range_once_and_sum_whole_blocks(edges, start, count):
    spans = tuple((64 * a, 64 * b) for a, b in zip(edges[::2], edges[1::2], strict=False))
    first, last = 2048 * start, 2048 * min(start + count, 6)
    cut = windows(first, last, spans)
    assert [window.start for window in cut] == [0, *(window.stop for window in cut[:-1])]
    assert cut[-1].stop == last - first
    for window in cut:
        assert window.start % 2048 == 0 and window.stop % 2048 == 0
        assert len(window.pieces) == 1 or window.stop - window.start == 2048
        assert [piece.start for piece in window.pieces] == [window.start, *(p.stop for p in window.pieces[:-1])]
        assert window.pieces[-1].stop == window.stop
    for element in range(0, last - first, 64):
        decays = not any(a <= first + element < b for a, b in spans)
        assert [p.decays for w in cut for p in w.pieces if p.start <= element < p.stop] == [decays]


@pytest.mark.parametrize("states", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_update_of_windows_is_that_of_each_part_and_its_norm_that_of_the_whole(states, dtype):
    elements, spans = 5 * 2048, ((64, 128), (2048, 4096), (6144 + 192, 8192 + 64))
    each = {"fp32": 12, "bf16": 8}[states]
    generator = torch.Generator().manual_seed(3)
    gradient = torch.randn(elements, generator=generator)
    masters = torch.randn(elements, generator=generator)

    def fresh() -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.zeros(each * elements, dtype=torch.uint8)
        memory[: 4 * elements].view(torch.float32).copy_(masters)
        return memory, torch.zeros(elements, dtype=dtype)

    def update(weight_decay: float, cuts=()) -> tuple[torch.Tensor, torch.Tensor, int]:
        memory, parameters = fresh()
        optimizer = AdamW(lr=1e-2, weight_decay=weight_decay)
        bound = RangeUpdate(
            memory, OPTIMIZER_FORMATS["fp32", states], gradient, parameters, threads=2, statistics=True, windows=cuts
        )
        finite, squares, *_ = bound(optimizer, step=1, gradient_scale=0.5)
        assert finite
        return memory, parameters, squares

    decayed, spared = update(0.5), update(0.0)
    cut = update(0.5, windows(0, elements, spans))
    mask = torch.zeros(elements, dtype=torch.bool)
    for start, stop in spans:
        mask[start:stop] = True
    assert torch.equal(cut[1], torch.where(mask, spared[1], decayed[1]))
    both = (part[0][: 4 * elements].view(torch.float32) for part in (spared, decayed))
    assert torch.equal(cut[0][: 4 * elements].view(torch.float32), torch.where(mask, *both))
    assert torch.equal(cut[0][4 * elements :], decayed[0][4 * elements :]), "moments know no decay"
    assert not torch.equal(spared[1], decayed[1])
    assert cut[2] == decayed[2] == native.gradient_statistics(gradient.data_ptr(), elements)[1]


def run(directory: Path, out: Path, family: str, *, steps: int, serial: bool = False, **choices) -> Result:
    model = opened(directory / family, torch.float32)
    return train(
        make_plan(model, sequence_length=LENGTH, **{"micro_batches": 2, **choices}),
        model,
        EmulatedDevice(),
        data=directory / "text.txt",
        out=out,
        recipe=Recipe(steps=steps, optimizer=OPTIMIZER, serial=serial),
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_run_equals_plain_pytorch_with_the_trainers_groups(family, tmp_path):
    prepare(tmp_path, family)
    result = run(tmp_path, tmp_path / "run", family, steps=10, alpha=0.4, optimizer=0.5, parameters=0.2, chunk=4096)
    steps = [micro_batches_of(tmp_path, step, micro_batches=2, family=family) for step in range(10)]
    settings = reference.AdamW(lr=1e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=30.0, decay_all=False)
    losses, weights = reference.train(tmp_path / family, steps, settings)
    assert result.losses == pytest.approx(losses, rel=5e-6)
    ignored = vanishing(tmp_path / family, steps[0], torch.float32)
    for name, tensor in load_file(result.model_directory / "model.safetensors").items():
        difference = tensor - weights[name]
        if name in ignored:
            difference = difference[~ignored[name]]
        assert torch.linalg.vector_norm(difference) <= 1e-3 * torch.linalg.vector_norm(weights[name]), name


def test_placement_cuts_and_runner_change_no_bit(tmp_path):
    prepare(tmp_path, "gpt2")
    seen = {}
    for number, (alpha, residency, chunk, serial, unified) in enumerate(
        [
            (0.0, 0.0, 4096, False, False),
            (0.3, 0.37, 2048, True, False),
            (1.0, 0.37, 1 << 20, False, False),
            (0.3, 0.0, 8192, False, True),
        ]
    ):
        out = tmp_path / str(number)
        result = run(
            tmp_path,
            out,
            "gpt2",
            steps=3,
            serial=serial,
            alpha=alpha,
            optimizer=residency,
            parameters=0.0 if unified else residency,
            checkpoints=residency,
            chunk=chunk,
            unified=unified,
        )
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        weights = hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()
        seen[number] = (weights, tuple(result.losses), tuple(line["grad_norm"] for line in lines))
    assert len(set(seen.values())) == 1, seen
