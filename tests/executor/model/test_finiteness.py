"""What is not finite ends a run, with the layer that it began in and the micro-batch; what was durable stays so."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.finiteness import Finiteness
from ssdplan.executor.model.layers import Layers
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.runtime.session import Session
from ssdplan.executor.train import train
from ssdplan.plans.errors import NumericalError
from tests.executor.runs import LENGTH, prepare
from tests.made.plans import make_plan

LAYERS = 3


@pytest.fixture
def directory(tmp_path) -> Path:
    return prepare(tmp_path, layers=LAYERS)


def run(directory: Path, precision: str = "fp32", *, snapshot_every: int = 0, **choices) -> None:
    model = open_model(directory / "llama", torch.bfloat16 if precision == "bf16" else torch.float32)
    train(
        make_plan(model, sequence_length=LENGTH, precision=precision, **{"optimizer": 0.5, "chunk": 4096, **choices}),
        model,
        EmulatedDevice(),
        data=directory / "text.txt",
        out=directory / "run",
        recipe=Recipe(steps=3, optimizer=AdamW(lr=1e-3), snapshot_every=snapshot_every),
    )


def spoil(directory: Path, name: str) -> None:
    """A checkpoint in which one element of one tensor is infinite."""
    path = directory / "llama" / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    tensors[name].view(-1)[3] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("precision", "alpha", "unified"), [("fp32", 0.0, False), ("bf16", 0.4, False), ("fp32", 0.0, True)]
)
def test_the_layer_whose_output_is_not_finite_is_named(directory, precision, alpha, unified):
    spoil(directory, "model.layers.1.mlp.down_proj.weight")
    finer = "" if precision == "fp32" else ", or profile with --precision fp32"
    mend = "nothing was updated yet, so look for a stored weight that is not"
    words = rf"step 1: the output of block\.1 for micro-batch 0 is not finite; {mend}{finer}$"
    with pytest.raises(NumericalError, match=words):
        run(directory, precision, alpha=alpha, unified=unified)
    assert not (directory / "run" / "model").exists()


def test_the_loss_is_named_where_only_the_head_is_at_fault(directory):
    spoil(directory, "model.norm.weight")
    with pytest.raises(NumericalError, match=r"step 1: the loss of micro-batch 0 is not finite"):
        run(directory)


class _Spoiled(Layers):
    """Layers whose backward of one layer and micro-batch goes wrong."""

    where = (2, 1)
    parameters_alone = False

    def backward(self, layer, micro_batch, weights, hidden, out_gradient, in_gradient, gradients, *rest):
        if (layer, micro_batch) == self.where and not self.parameters_alone:
            out_gradient[5] = float("nan")
        super().backward(layer, micro_batch, weights, hidden, out_gradient, in_gradient, gradients, *rest)
        if (layer, micro_batch) == self.where and self.parameters_alone:
            tensor = self._model.states[self._model.layers[layer].states[0]].tensors[1]
            gradients[0][tensor.offset + tensor.elements - 1] = float("inf")


def test_the_layer_whose_gradient_first_is_not_finite_is_named(directory, monkeypatch):
    monkeypatch.setattr("ssdplan.executor.sessions.Layers", _Spoiled)
    with pytest.raises(NumericalError, match=r"step 1: the gradient that block\.1 hands down for micro-batch 1 is not"):
        run(directory)


@pytest.mark.parametrize(("alpha", "unified"), [(0.0, False), (0.5, False), (0.0, True), (1.0, True)])
def test_a_parameter_whose_gradient_alone_is_not_finite_is_named(directory, monkeypatch, alpha, unified):
    monkeypatch.setattr(_Spoiled, "parameters_alone", True)
    monkeypatch.setattr("ssdplan.executor.sessions.Layers", _Spoiled)
    model = open_model(directory / "llama", torch.float32)
    name = model.states[model.layers[2].states[0]].tensors[1].name
    with pytest.raises(NumericalError, match=rf"step 1: the gradient of {name} is not finite"):
        run(directory, alpha=alpha, unified=unified, chunk=2048)


def test_the_last_snapshot_is_that_of_the_steps_before(directory, monkeypatch):
    """The third step goes wrong when it has made updates already."""
    steps_begun: list[int] = []

    class SpoiledAtLast(_Spoiled):
        def begin_step(self, step, micro_batches, **options):
            steps_begun.append(step)
            type(self).where = (1, 1) if step == 2 else (-1, -1)
            return super().begin_step(step, micro_batches, **options)

    taken: list[int] = []
    snapshot = Session.snapshot

    def counted(session, *what):
        taken.append(steps_begun[-1] + 1)
        return snapshot(session, *what)

    monkeypatch.setattr("ssdplan.executor.sessions.Layers", SpoiledAtLast)
    monkeypatch.setattr(Session, "snapshot", counted)
    with pytest.raises(NumericalError, match=r"step 3: the gradient that block\.0 hands down for micro-batch 1"):
        run(directory, snapshot_every=1)
    assert taken == [1, 2]
    assert list((directory / "run").glob("volume-*")), "the store that has them stays"


def test_the_first_of_several_is_found():
    seen = Finiteness(5, 3, torch.bfloat16, torch.device("cpu"))
    fine, bad = torch.ones(7, dtype=torch.bfloat16), torch.ones(7, dtype=torch.bfloat16)
    bad[6] = float("nan")
    for layer in range(5):
        for micro_batch in range(3):
            for which in ("forward", "backward"):
                seen.look(which, layer, micro_batch, fine)
    assert seen.first("forward") is None and seen.first("backward") is None
    seen.look("backward", 1, 0, bad)
    for layer, micro_batch in ((2, 2), (2, 1), (4, 0)):
        seen.look("forward", layer, micro_batch, bad)
        seen.look("backward", layer, micro_batch, -bad / 0)
    assert seen.first("forward") == (2, 1) and seen.first("backward") == (4, 0)
