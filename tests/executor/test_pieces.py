"""A block whose parameters are several states trains to the bits of one whose parameters are one state."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model import layout
from ssdplan.executor.model import model as models
from ssdplan.executor.model.layout import LayerSpec, StateSpec
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import train
from tests.executor.runs import LENGTH, prepare
from tests.made.plans import make_plan

Laid = tuple[tuple[LayerSpec, ...], tuple[StateSpec, ...]]


def in_halves(layers: tuple[LayerSpec, ...], states: tuple[StateSpec, ...]) -> Laid:
    """The same, with the first half of each block's tensors in one state and the second in another."""
    made: list[StateSpec] = []
    placed: dict[int, tuple[int, ...]] = {}
    for index, state in enumerate(states):
        half = len(state.tensors) // 2
        parts = [state.tensors[:half], state.tensors[half:]] if state.name.startswith("block.") else [state.tensors]
        placed[index] = tuple(range(len(made), len(made) + len(parts)))
        for number, tensors in enumerate(parts):
            name = f"{state.name}.{number}" if len(parts) > 1 else state.name
            made.append(
                layout._state(name, [(tensor.name, tensor.shape) for tensor in tensors], state.frozen, None, muon=False)
            )
    return tuple(
        dataclasses.replace(layer, states=tuple(part for index in layer.states for part in placed[index]))
        for layer in layers
    ), tuple(made)


def test_a_block_of_two_states_trains_as_one_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, laid_out = prepare(tmp_path), models.lay_out
    seen = []
    for name, count in (("one", 1), ("two", 2)):
        if count == 2:
            monkeypatch.setattr(models, "lay_out", lambda *given: in_halves(*laid_out(*given)))
        model = open_model(directory / "llama", torch.bfloat16)
        assert [len(layer.states) for layer in model.layers[1:-1]] == [count] * 3
        plan = make_plan(
            model,
            sequence_length=LENGTH,
            precision="bf16",
            micro_batches=2,
            alpha=0.3,
            optimizer=0.4,
            parameters=0.4,
            checkpoints=0.5,
            gradient=0.5,
            chunk=4096,
        )
        result = train(
            plan,
            model,
            EmulatedDevice(),
            data=directory / "text.txt",
            out=tmp_path / name,
            recipe=Recipe(steps=3, optimizer=AdamW(lr=1e-3, weight_decay=0.1, decay_all=False)),
        )
        weights = load_file(tmp_path / name / "model" / "model.safetensors")
        seen.append((result.losses, {name: weight.view(torch.int16).tolist() for name, weight in weights.items()}))
    assert seen[0] == seen[1]
