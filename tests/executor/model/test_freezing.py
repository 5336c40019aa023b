"""Partial training: equal to plain PyTorch with the same parameters told that they require no gradient, whatever the
placement, the schedule and the runner, and across a stop; what is frozen leaves the run as it came in."""

import contextlib
import fnmatch
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.device.tensors import DTYPES
from ssdplan.executor.memory.store_records import Records
from ssdplan.executor.model.layers import Layers, MicroBatch
from ssdplan.executor.model.model import StreamedModel, open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.executor.snapshots.export_run import export_run
from ssdplan.executor.snapshots.resume import reopened
from ssdplan.executor.train import Result, train
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import MismatchError, UsageError
from ssdplan.plans.schedule.build import build_schedule
from tests import reference
from tests.executor.runs import LENGTH, micro_batches_of, opened, prepare
from tests.extent import FULL, short_or_full
from tests.made.plans import make_plan

STEPS = short_or_full(3, 4)
OPTIMIZER = AdamW(lr=3e-3, weight_decay=0.1, beta2=0.95, eps=1e-4)
"""With this epsilon a gradient that is rounding alone (of the bias of keys) moves nothing."""
MIXED: dict[str, Any] = {"optimizer": 0.4, "parameters": 0.3, "checkpoints": 0.5, "gradient": 0.6, "chunk": 4096}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = prepare(tmp_path_factory.mktemp("models"), layers=4)
    prepare(path / "untied", layers=4, tied=False)
    return prepare(path, "gpt2", layers=3)


def run(
    directory: Path,
    out: Path,
    freeze: tuple[str, ...],
    *,
    name: str = "llama",
    steps: int = STEPS,
    serial: bool = False,
    snapshot_every: int = 0,
    stop: int = 0,
    resumed: bool = False,
    anyway: bool = False,
    optimizer_settings: AdamW = OPTIMIZER,
    **choices: Any,
) -> Result:
    """A run under a plan of these choices; with `resumed`, that in `out` goes on under it. `stop`: behind that step."""
    precision = choices.get("precision", "fp32")
    model = opened(directory / name, DTYPES[precision], freeze=freeze)
    plan = make_plan(model, sequence_length=LENGTH, **{"micro_batches": 3, "chunk": 4096, **choices})

    def step(metrics) -> None:
        if metrics.step == stop:
            raise KeyboardInterrupt

    with contextlib.ExitStack() as stack:
        return train(
            plan,
            model,
            EmulatedDevice(),
            data=directory / "text.txt",
            out=out,
            recipe=Recipe(steps=steps, optimizer=optimizer_settings, serial=serial, snapshot_every=snapshot_every),
            watch=Watch(step=step),
            resume=stack.enter_context(reopened(out)) if resumed else None,
            anyway=anyway,
        )


def norms(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["grad_norm"] for line in lines if "grad_norm" in line]


def bits(out: Path, result: Result) -> tuple[Any, ...]:
    """All that a run yields."""
    weights = hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()
    return tuple(result.losses), tuple(norms(out)), weights


def matching(path: Path, freeze: tuple[str, ...]) -> set[str]:
    """The names of a model's parameters, a tied one by each, that match: found without our code."""
    model = reference.load(path)
    whole = dict(model.named_parameters(remove_duplicate=False))
    tensors = {id(p) for name, p in whole.items() for pattern in freeze if fnmatch.fnmatchcase(name, pattern)}
    return {name for name, p in model.named_parameters() if id(p) in tensors}


CASES = [
    # which model, its --freeze, choices of the plan
    ("tied", ("model.layers.[01].*",), {"alpha": 0.4}),
    ("untied", ("model.embed_tokens.weight", "model.layers.0.*"), {"alpha": 1.0, "clip_grad_norm": True}),
    ("untied", ("model.layers.[13].*",), {"schedule": "horizontal"}),
    ("tied", ("model.embed_tokens.weight", "model.norm.weight"), {"alpha": 0.4, "on_device": 0.5}),
    ("untied", ("lm_head.weight", "model.norm.*"), {"alpha": 0.4, "unified": True, "parameters": 0.0}),
    ("tied", ("model.embed_tokens.*", "model.layers.*"), {"schedule": "horizontal"}),
    (
        "untied",
        ("*.self_attn.?_proj.*", "model.layers.0.*", "model.embed*"),
        {"alpha": 1.0, "optimizer_states": "fp32"},
    ),
    ("gpt2", ("transformer.wpe.weight", "*.attn.*"), {"alpha": 0.4}),
    ("gpt2", ("transformer.wte.weight", "transformer.h.1.*"), {"schedule": "horizontal"}),
]
if FULL:
    CASES += [
        ("untied", ("model.embed_tokens.*", "model.layers.[01].*"), {"alpha": 0.4}),
        ("tied", ("lm_head.*",), {"alpha": 1.0, "clip_grad_norm": True}),
        ("untied", ("model.embed_tokens.*", "model.layers.*"), {"alpha": 0.4}),
        ("tied", ("*.mlp.*",), {"alpha": 0.4}),
        ("tied", ("model.layers.2.*",), {"alpha": 0.0, "across_turn": 0.5}),
        ("untied", ("*norm*", "model.embed_tokens.*"), {"alpha": 0.4, "unified": True, "parameters": 0.0}),
    ]


@pytest.mark.parametrize(("kind", "freeze", "choices"), CASES)
def test_it_equals_plain_pytorch_without_gradients_of_the_frozen(directory, tmp_path, kind, freeze, choices):
    name = "gpt2" if kind == "gpt2" else "llama"
    base = directory / "untied" if kind == "untied" else directory
    frozen = matching(base / name, freeze)
    batches = [micro_batches_of(base, step, micro_batches=3, family=name) for step in range(STEPS)]
    settings = reference.AdamW(lr=3e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
    free_norms: list[float] = []
    losses, weights = reference.train(base / name, batches, settings, norms=free_norms, frozen=frozen)
    if choices.get("clip_grad_norm"):
        choices = {**choices, "clip_grad_norm": 0.4 * min(free_norms)}
        settings = replace(settings, clip_grad_norm=0.4 * min(free_norms))
        losses, weights = reference.train(base / name, batches, settings, norms=(before := []), frozen=frozen)
        free_norms = before
    result = run(base, tmp_path / "run", freeze, name=name, **{**MIXED, **choices})

    assert result.losses == pytest.approx(losses, rel=1e-5)
    assert norms(tmp_path / "run") == pytest.approx(free_norms, rel=2e-5)
    start = load_file(base / name / "model.safetensors")
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert exported.keys() == start.keys() and frozen
    prefix = "transformer." if kind == "gpt2" else ""
    for stored, tensor in exported.items():
        own = stored if stored in weights else prefix + stored
        if own in frozen:
            assert torch.equal(tensor, start[stored]), stored
        else:
            moved = torch.linalg.vector_norm(weights[own] - start[stored])
            assert moved > 0 and torch.linalg.vector_norm(tensor - weights[own]) <= 0.02 * moved, stored


def test_weight_decay_spares_what_it_spares_of_a_layer_that_is_frozen_in_part(directory, tmp_path):
    """Norms and biases lie elsewhere in a state of which a part is taken out."""
    freeze, base = ("*.q_proj.*", "*.down_proj.*", "model.layers.1.*"), directory / "untied"
    batches = [micro_batches_of(base, step, micro_batches=3) for step in range(STEPS)]
    settings = reference.AdamW(lr=3e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=3.0, decay_all=False)
    frozen = matching(base / "llama", freeze)
    losses, weights = reference.train(base / "llama", batches, settings, frozen=frozen)
    sparing = replace(OPTIMIZER, weight_decay=3.0, decay_all=False)
    result = run(base, tmp_path / "run", freeze, optimizer_settings=sparing, alpha=0.4, **MIXED)
    assert result.losses == pytest.approx(losses, rel=1e-5)
    for name, tensor in load_file(tmp_path / "run" / "model" / "model.safetensors").items():
        assert torch.allclose(tensor, weights[name], rtol=1e-4, atol=1e-5), name


def test_freezing_matters(directory, tmp_path):
    """Else the test above would say nothing."""
    batches = [micro_batches_of(directory, step, micro_batches=3) for step in range(STEPS)]
    all_losses, _ = reference.train(directory / "llama", batches)
    some_losses, _ = reference.train(
        directory / "llama", batches, frozen=matching(directory / "llama", ("model.layers.[01].*",))
    )
    assert some_losses[0] == all_losses[0] and some_losses[1:] != pytest.approx(all_losses[1:], rel=1e-4)


GRID = [
    {"alpha": 0.0, "serial": True},
    {"alpha": 0.4, **MIXED},
    {"alpha": 1.0, "serial": True, **MIXED},
    {"alpha": 0.4, "optimizer": 1.0, "parameters": 1.0, "checkpoints": 1.0, "chunk": 2048},
    {"alpha": 1.0, "on_device": 0.5, "across_turn": 0.5, "checkpoints": 0.6},
    {"alpha": 0.4, "unified": True, "checkpoints": 0.5, "optimizer": 0.5},
    {"alpha": 0.0, "unified": True, "on_device": 1.0, "serial": True},
]


@pytest.mark.parametrize(
    ("precision", "freeze"),
    [("fp32", ("model.embed_tokens.*", "model.layers.0.*", "*.1.mlp.*")), ("bf16", ("*norm*", "*.2.*"))],
)
def test_placement_and_runner_change_no_bit(directory, tmp_path, precision, freeze):
    seen = {}
    for number, choices in enumerate(GRID if precision == "fp32" else short_or_full(GRID[1::2], GRID)):
        out = tmp_path / str(number)
        seen[number] = bits(out, run(directory / "untied", out, freeze, steps=3, precision=precision, **choices))
    assert len(set(seen.values())) == 1, seen


@pytest.mark.parametrize("freeze", [("model.layers.[01].*", "model.embed_tokens.*"), ("*.mlp.*",)])
def test_of_one_micro_batch_both_schedules_give_the_same_bits(directory, tmp_path, freeze):
    seen = []
    for schedule in ("vertical", "horizontal"):
        out = tmp_path / schedule
        seen.append(bits(out, run(directory, out, freeze, micro_batches=1, schedule=schedule, **MIXED)))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_is_frozen_leaves_as_the_checkpoint_has_it_in_the_runs_dtype(directory, tmp_path, precision):
    freeze = ("model.layers.[02].*", "*.3.mlp.*")
    base, dtype = directory / "untied", DTYPES[precision]
    run(base, tmp_path / "run", freeze, precision=precision, steps=2, alpha=1.0, **MIXED)
    start, frozen = load_file(base / "llama" / "model.safetensors"), matching(base / "llama", freeze)
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    for name, tensor in exported.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, start[name].to(dtype)) == (name in frozen), name


# A run that stops and goes on.

HALVES = ("model.layers.[01].*", "model.embed_tokens.*", "*.2.mlp.*")


@pytest.fixture(scope="module")
def expected(directory, tmp_path_factory) -> tuple[Any, ...]:
    out = tmp_path_factory.mktemp("expected") / "run"
    return bits(out, run(directory / "untied", out, HALVES, steps=5, **MIXED))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (MIXED, MIXED),
        (MIXED, {"alpha": 1.0, "optimizer": 1.0, "parameters": 1.0, "checkpoints": 1.0}),
        ({"optimizer": 1.0, "parameters": 1.0, "checkpoints": 1.0}, {"alpha": 0.4, **MIXED}),
        ({"alpha": 0.4, "on_device": 1.0}, {"unified": True, "alpha": 0.4, "on_device": 0.5}),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_bits(directory, tmp_path, expected, first, second):
    out, base = tmp_path / "run", directory / "untied"
    with pytest.raises(KeyboardInterrupt):
        run(base, out, HALVES, steps=5, snapshot_every=2, stop=3, **first)
    export_run(out, tmp_path / "exported")
    halfway = load_file(tmp_path / "exported" / "model.safetensors")
    start = load_file(base / "llama" / "model.safetensors")
    frozen = matching(base / "llama", HALVES)
    assert {name for name, tensor in halfway.items() if torch.equal(tensor, start[name])} == frozen
    result = run(base, out, HALVES, steps=5, snapshot_every=2, resumed=True, **second)
    assert bits(out, result) == expected
    export_run(out, tmp_path / "last")
    weights = (out / "model" / "model.safetensors").read_bytes()
    assert (tmp_path / "last" / "model.safetensors").read_bytes() == weights


def test_a_snapshot_holds_no_state_of_what_is_frozen(directory):
    """Wherever states live: 12 bytes of each element that is trained."""
    model = open_model(directory / "untied" / "llama", torch.float32, freeze=HALVES)
    trained = sum(state.elements for state in model.states if not state.frozen)
    for choices in (MIXED, {"optimizer": 1.0, "parameters": 1.0, "checkpoints": 1.0}, {}):
        plan = make_plan(model, sequence_length=LENGTH, **choices)
        records = Records.of(build_schedule(plan.model, plan.decision), snapshots=True).records
        durable = [record for record in records if record.durable]
        assert sum(record.nbytes for record in durable) == 12 * trained
        assert not [record.name for record in durable if "frozen" in record.name]


def test_what_a_stopped_run_froze_it_keeps(directory, tmp_path):
    out, base = tmp_path / "run", directory / "untied"
    with pytest.raises(KeyboardInterrupt):
        run(base, out, HALVES, steps=5, snapshot_every=2, stop=3, **MIXED)
    for freeze in ((), ("model.layers.[01].*",), ("model.layers.[01].*", "model.embed_tokens.*", "*.2.self_attn.*")):
        with pytest.raises(
            MismatchError, match=r"froze model.layers.\[01\].* model.embed_tokens.* .*this plan freezes"
        ):
            run(base, out, freeze, steps=5, snapshot_every=2, resumed=True, anyway=True, **MIXED)
    same = ("model.layers.0.*", "model.layers.1.*", "model.layers.2.mlp.*", "model.embed_tokens.weight")
    assert len(run(base, out, same, steps=5, snapshot_every=2, resumed=True, **MIXED).losses) == 5


def test_a_stopped_run_wants_the_weights_that_it_froze(directory, tmp_path):
    """They are in the model's own files, so another model's may not take their place, whatever the user says."""
    out, base = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(directory / "untied", base)
    with pytest.raises(KeyboardInterrupt):
        run(base, out, HALVES, steps=5, snapshot_every=2, stop=3, **MIXED)
    file = base / "llama" / "model.safetensors"
    changed = {name: tensor + 1 for name, tensor in load_file(file).items()}
    save_file(changed, file, {"format": "pt"})
    with pytest.raises(MismatchError, match="weights changed, and what the run froze is still in its files"):
        run(base, out, HALVES, steps=5, snapshot_every=2, resumed=True, anyway=True, **MIXED)
    with pytest.raises(MismatchError, match="has other weights than the model that the run trained"):
        export_run(out, tmp_path / "exported", model=base / "llama")
    assert not (tmp_path / "exported").exists()
    export_run(out, tmp_path / "exported", model=directory / "untied" / "llama")


def test_a_plan_belongs_to_what_it_freezes(directory, tmp_path):
    frozen = open_model(directory / "llama", torch.float32, freeze=("model.layers.0.*",))
    plan = make_plan(frozen, sequence_length=LENGTH)
    assert plan.model.freeze == ("model.layers.0.*",)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(MismatchError):
        train(
            plan,
            open_model(directory / "llama", torch.float32),
            EmulatedDevice(),
            data=directory / "text.txt",
            out=tmp_path / "run",
            recipe=Recipe(steps=1, optimizer=OPTIMIZER),
        )


# Names.


def states_of(model: StreamedModel) -> dict[str, tuple[str, ...]]:
    return {state.name: tuple(tensor.name for tensor in state.tensors) for state in model.states}


def test_a_pattern_is_held_against_every_name_of_a_parameter(directory, tmp_path):
    """The model's own, the checkpoint's, and both names of a tied one."""
    gpt2 = shutil.copytree(directory / "gpt2", tmp_path / "gpt2")
    file = gpt2 / "model.safetensors"  # as the one that everyone has: without its prefix
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}, file)
    opened = [
        states_of(open_model(gpt2, torch.float32, freeze=(pattern,)))
        for pattern in ("transformer.wte.weight", "lm_head.weight", "wte.weight", "*wte*")
    ]
    assert all(each == opened[0] for each in opened)
    assert opened[0]["tied.frozen"] == ("transformer.wte.weight",) and "tied" not in opened[0]


def test_a_layer_of_which_a_part_is_frozen_has_two_states(directory):
    model = open_model(directory / "llama", torch.float32, freeze=("*.mlp.*", "model.layers.0.*"))
    whole = open_model(directory / "llama", torch.float32)
    ours, every = states_of(model), states_of(whole)
    assert ours["block.0.frozen"] == every["block.0"] and "block.0" not in ours
    for block in ("block.1", "block.2", "block.3"):
        assert sorted(ours[block] + ours[f"{block}.frozen"]) == sorted(every[block])
        assert all(".mlp." in name for name in ours[f"{block}.frozen"])
    assert [layer.layer_class for layer in model.layers[1:-1]] == ["block.frozen"] + ["block.partly"] * 3
    assert model.fingerprint != whole.fingerprint and model.first_trained == 0
    names = [[model.states[index].name for index in layer.states] for layer in model.layers]
    assert names[0] == ["tied"] and names[1] == ["block.0.frozen"] and names[2] == ["block.1", "block.1.frozen"]


def test_what_cannot_be_frozen_is_refused(directory):
    with pytest.raises(
        UsageError, match=r"--freeze model.layer.0.\*: matches no parameter of llama; near it are model"
    ):
        open_model(directory / "llama", torch.float32, freeze=("model.layer.0.*",))
    with pytest.raises(UsageError, match=r"--freeze mlp: matches no .*near it are model.layers.0.mlp"):
        open_model(directory / "llama", torch.float32, freeze=("*norm*", "mlp"))
    with pytest.raises(UsageError, match="freezes all of llama, so there is nothing to train"):
        open_model(directory / "llama", torch.float32, freeze=("model.*",))


# What is computed.


@pytest.mark.parametrize(("freeze", "trained"), [((), 1.0), (("model.layers.1.*",), 0.0), (("*.1.mlp.*",), None)])
def test_no_gradient_of_a_frozen_matrix_is_computed(directory, freeze, trained):
    """Floating-point operations of a block's backward, against those of its forward: a matrix that is trained takes
    one multiplication for its own gradient and one for its input's, a frozen one only the latter."""
    model = open_model(directory / "untied" / "llama", torch.float32, freeze=freeze)
    layers = Layers(model, torch.device("cpu"))
    ids = torch.arange(32).view(2, 16)
    layers.begin_step(0, [MicroBatch(ids, ids)])

    def of(layer: int, states) -> list[torch.Tensor]:
        return [torch.randn(model.states[index].elements) for index in states]

    weights = {layer: of(layer, model.layers[layer].states) for layer in (0, 2)}
    hidden, out, gradient, into = (torch.randn(32 * model.hidden_size) for _ in range(4))
    layers.forward(0, 0, weights[0], None, hidden)
    gradients = of(2, model.trained(2))
    with FlopCounterMode(display=False) as forward:
        layers.forward(2, 0, weights[2], hidden, out)
    with FlopCounterMode(display=False) as backward:
        layers.backward(2, 0, weights[2], hidden, gradient, into, gradients, [True] * len(gradients))
    matrices = {
        tensor.name: 2 * 32 * tensor.elements
        for index in model.layers[2].states
        for tensor in model.states[index].tensors
        if len(tensor.shape) == 2
    }
    own = sum(
        flops
        for name, flops in matrices.items()
        if name in {t.name for index in model.trained(2) for t in model.states[index].tensors}
    )
    attention = forward.get_total_flops() - sum(matrices.values())
    assert attention >= 0 and (trained is None or own == trained * sum(matrices.values()))
    linear = backward.get_total_flops() - sum(matrices.values()) * 2 - own
    whole = linear - attention
    assert 0 <= whole <= 3 * attention, "beyond the matrices, only attention's own backward is left"
