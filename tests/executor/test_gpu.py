"""Runs on a CUDA device: equal to plain PyTorch, the same bits serial and overlapped, within the plan's peak."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from ssdplan.executor.device.device import CudaDevice
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.layers import Layers, MicroBatch
from ssdplan.executor.model.model import open_model
from ssdplan.executor.model.packed import pack, packed_bytes, unpack
from ssdplan.executor.model.weights import Weights
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.optimizer.zeroth_order import MeZO
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.snapshots.replay import replay
from ssdplan.executor.train import train
from ssdplan.plans.documents.plan import Saved
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from tests import reference
from tests.executor.runs import LENGTH, micro_batches_of, prepare
from tests.made.models import FAMILIES, make_model
from tests.made.plans import make_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("model"))


def run(directory, out, *, serial=False, precision="fp32", freeze=(), device=None, **choices):
    model = open_model(directory / "llama", torch.bfloat16 if precision == "bf16" else torch.float32, freeze=freeze)
    plan = make_plan(model, sequence_length=LENGTH, precision=precision, device="cuda", **choices)
    recipe = Recipe(steps=5, optimizer=AdamW(lr=1e-3, weight_decay=0.1), serial=serial)
    return plan, train(plan, model, device or CudaDevice(), data=directory / "text.txt", out=out, recipe=recipe)


@pytest.mark.parametrize(
    "choices",
    [{"alpha": 0.4}, {"schedule": "horizontal", "on_device": 0.3}, {"alpha": 0.4, "freeze": ("model.layers.[01].*",)}],
)
def test_a_run_on_the_gpu_equals_plain_pytorch(directory, tmp_path, choices):
    _, result = run(directory, tmp_path / "run", micro_batches=3, optimizer=0.5, parameters=0.3, **choices)
    steps = [micro_batches_of(directory, step, micro_batches=3) for step in range(5)]
    names = dict(reference.load(directory / "llama").named_parameters())
    frozen = {name for name in names if "freeze" in choices and (".layers.0." in name or ".layers.1." in name)}
    optimizer = reference.AdamW(lr=1e-3, betas=(0.9, 0.999))
    losses, _ = reference.train(directory / "llama", steps, optimizer, frozen=frozen)
    assert result.losses == pytest.approx(losses, rel=2e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_placement_delay_and_runner_change_no_bit_on_the_gpu(directory, tmp_path, precision):
    seen = set()
    for number, (alpha, residency, serial, on_device, across_turn, updated, inputs) in enumerate(
        [
            (0.0, 0.0, True, 0.0, 0.0, 0.0, 0.0),
            (0.0, 0.0, False, 0.0, 0.0, 0.0, 0.0),
            (0.3, 0.37, False, 0.0, 0.0, 0.0, 0.0),
            (1.0, 1.0, False, 0.0, 0.0, 0.0, 1.0),
            (0.0, 0.0, False, 1.0, 0.0, 0.0, 0.0),
            (0.3, 0.37, False, 0.3, 0.7, 0.0, 0.5),
            (0.3, 0.37, False, 1.0, 0.0, 0.5, 0.5),
            (0.0, 0.0, True, 1.0, 0.0, 1.0, 1.0),
            (0.0, 0.0, False, 1.0, 0.0, 1.0, 1.0),
        ]
    ):
        out = tmp_path / str(number)
        _, result = run(
            directory,
            out,
            serial=serial,
            precision=precision,
            alpha=alpha,
            optimizer=residency,
            parameters=residency,
            checkpoints=residency,
            gradient=residency,
            on_device=on_device,
            across_turn=across_turn,
            updated=updated,
            inputs=inputs,
            chunk=4096,
        )
        seen.add((tuple(result.losses), (out / "model" / "model.safetensors").read_bytes()))
    assert len(seen) == 1


@pytest.mark.parametrize("optimizer_states", ["fp32", "bf16"])
def test_placement_cuts_and_runner_change_no_bit_of_a_clipped_run_on_the_gpu(directory, tmp_path, optimizer_states):
    seen = set()
    for number, (residency, chunk, serial, updated) in enumerate(
        [(0.0, 2048, True, 0.0), (0.37, 8192, False, 0.0), (1.0, 1 << 20, False, 0.0), (1.0, 4096, False, 1.0)]
    ):
        out = tmp_path / str(number)
        _, result = run(
            directory,
            out,
            serial=serial,
            alpha=1.0,
            clip_grad_norm=0.5,
            optimizer_states=optimizer_states,
            optimizer=residency,
            parameters=residency,
            gradient=residency,
            on_device=updated,
            updated=updated,
            inputs=updated,
            chunk=chunk,
        )
        norms = [json.loads(line)["grad_norm"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert min(norms) > 0.5
        seen.add((tuple(result.losses), tuple(norms), (out / "model" / "model.safetensors").read_bytes()))
    assert len(seen) == 1


def test_the_allocators_peak_keeps_the_plan(directory, tmp_path):
    """No library takes its workspace in a run: 32 MiB for each thread and stream, which no plan counts. In a process of
    its own: what other tests left would lend the run its gaps."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        arena, measured, reserved, allocated = process.submit(peaks, directory, tmp_path / "run").result(timeout=300)
    slack = 8 << 20  # a tiny block's compute, token ids, losses, and the squares of one range of gradients
    assert arena <= allocated <= arena + slack
    assert measured == reserved >= arena


def peaks(directory, out):
    """Bytes of a run: of its plan's device arena, of the peak that it reports, and what the allocator held at most of
    segments and of tensors, beyond what there was before."""
    device = CudaDevice()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    plan, result = run(directory, out, micro_batches=4, device=device)
    measured = next(row.measured for row in result.compared if row.quantity == "peak_device_bytes")
    most = torch.cuda.max_memory_reserved() - reserved, torch.cuda.max_memory_allocated() - allocated
    return plan.prediction.device_arena_bytes, measured, *most


def test_a_workspace_does_not_depend_on_what_the_allocator_kept():
    """It is whole segments beyond the tensors of before, whatever gaps there were among them."""
    device = CudaDevice()

    def work():
        return torch.empty(3 << 20, dtype=torch.uint8, device="cuda").data_ptr()

    first, again = (device.peak_bytes(work)[1] for _ in range(2))
    assert first == again >= 3 << 20
    assert (torch.cuda.memory_allocated() + first) % (2 << 20) == 0, "whole segments of the allocator"


@pytest.mark.parametrize("family", FAMILIES)
def test_long_rows_give_the_same_bits_twice(tmp_path, family):
    """2 x 1024 tokens: attention's backward has many tiles of keys to add up, in any order if nobody forbids it."""
    device = CudaDevice()
    path = make_model(family, tmp_path / "model", hidden=128, max_position_embeddings=1024)
    model = open_model(path, torch.bfloat16)
    layers = Layers(model, device.torch_device, head_chunk_tokens=512 if model.head_is_position_wise else None)
    ids = torch.randint(model.vocab_size, (2, 1024), generator=torch.Generator().manual_seed(0))
    weights = Weights(model)
    places = []
    for layer in model.layers:
        places.append([])
        for state in layer.states:
            host = torch.empty(model.states[state].elements, dtype=model.dtype)
            weights.read(state, host)
            places[-1].append(host.to(device.torch_device))
    weights.close()

    def step():
        """The gradients of all layers, and the loss."""
        found = []
        count, head = 2 * 1024 * model.hidden_size, len(model.layers) - 1
        with device.lane("compute"):
            layers.begin_step(0, [MicroBatch(ids, ids)])
            hidden = [torch.zeros(count, dtype=model.dtype, device="cuda") for _ in range(head)]
            for layer in range(head):
                layers.forward(layer, 0, places[layer], hidden[layer - 1] if layer else None, hidden[layer])
            above = None
            for layer in range(head, -1, -1):
                below = torch.zeros(count, dtype=model.dtype, device="cuda") if layer else None
                sums = [torch.zeros(model.states[s].elements, device="cuda") for s in model.layers[layer].states]
                layers.backward(layer, 0, places[layer], hidden[layer - 1] if layer else None, above, below, sums)
                found += sums
                above = below
        return found, layers.end_step()

    (first, loss), (again, loss_again) = step(), step()
    assert loss == loss_again and all(map(torch.equal, first, again))
    assert all(bool(sums.isfinite().all()) and bool(sums.any()) for sums in first)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saving_activations_changes_no_bit_on_the_gpu(directory, tmp_path, precision):
    """By a rung that keeps everything, on every tier; the values are those that a trace on the GPU has."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    device, model = CudaDevice(), open_model(directory / "llama", dtype)
    layers, weights = Layers(model, device.torch_device), Weights(model)
    given = []
    for state in range(len(model.states)):
        host = torch.empty(model.states[state].elements, dtype=dtype)
        weights.read(state, host)
        given.append(host.to(device.torch_device))
    ids = torch.randint(3, 97, (2, LENGTH))
    layers.begin_step(0, [MicroBatch(ids, ids)])
    hidden = torch.zeros(2 * LENGTH * model.hidden_size, dtype=dtype, device="cuda")
    layers.forward(0, 0, [given[index] for index in model.layers[0].states], None, hidden)
    call = layers.trace_block(1, 0, [given[index] for index in model.layers[1].states], hidden)
    assert call is not None
    values = call.traced.cheapest(dict.fromkeys((node.name for node in call.traced.forward.graph.nodes), 1e-5), 1e-15)
    choices = {"precision": precision, "micro_batches": 3, "alpha": 0.4, "rungs": {"all": tuple(sorted(values))}}
    _, expected = run(directory, tmp_path / "all", **choices)
    tiers = ("device", "host", "ssd")
    saved = [Saved(rung="all", tier=tier, share=0.3) for tier in tiers]
    _, found = run(directory, tmp_path / "saved", saved=saved, **choices)
    assert found.losses == expected.losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("elements", [1, 64, 1000, 70_001])
def test_int8_has_the_same_bits_on_the_gpu(dtype, elements):
    source = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(dtype)
    source[elements // 2] *= 1e3
    if elements == 1000:
        source[100], source[300], source[800:] = float("nan"), float("-inf"), 0.0
    here, there = (torch.zeros(packed_bytes(elements), dtype=torch.uint8, device=place) for place in ("cpu", "cuda"))
    pack(here, source, (0,))
    pack(there, source.cuda(), (0,))
    one, other = (unpack(place, (elements,), (0,), dtype).cpu() for place in (here, there))
    assert torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    assert torch.equal(here[:elements], there[:elements].cpu())


def test_a_gradients_copy_says_what_is_in_it():
    device = CudaDevice()
    gradient = torch.randn(3 * 2048, device="cuda") * torch.logspace(-12, 12, 3 * 2048, device="cuda")
    host = torch.zeros(2048)

    def copied(source, whole):
        device.synchronize()  # what was made elsewhere is there
        with device.lane("d2h"):
            found = device.copy_d2h_gradient(host, source, whole)
        return found()

    for scale in (1.0, 1e20, 0.0):  # the second squares beyond fp32
        scaled = gradient * scale
        finite, squares = copied(scaled[:2048], scaled)
        assert finite and torch.equal(host, scaled[:2048].cpu())
        assert squares / (1 << 1074) == pytest.approx(float(scaled.cpu().double().square().sum()), rel=1e-5)
        assert copied(scaled[4096:], None) == (True, 0)
        with device.lane("compute"):
            found = device.squares(scaled, 1)
        assert found() == (True, squares), "where it stays, a gradient's sum is the same"
        assert torch.equal(host, scaled[4096:].cpu())
    for bad in (float("inf"), float("nan")):
        gradient[4097] = bad
        assert not copied(gradient[:2048], gradient)[0]


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_run_without_gradients_has_the_updates_of_one_on_the_cpu(directory, tmp_path, by_rows):
    """Losses round otherwise there; the directions do not, nor what is made of the same numbers."""
    found = {}
    if by_rows:
        directory = prepare(tmp_path / "models", tied=False, hidden=64)
    for device, kind in ((CudaDevice(), "cuda"), (EmulatedDevice(), "cpu")):
        model = open_model(directory / "llama", torch.float32)
        plan = make_plan(
            model, sequence_length=LENGTH, precision="fp32", device=kind, parameters=0.5, micro_batches=2,
            zeroth_order=ZerothOrder(directions=2, written_every=2, by_rows=by_rows),
        )  # fmt: skip
        recipe = Recipe(steps=4, optimizer=MeZO(lr=1e-4, eps=1e-2))
        out = tmp_path / kind
        found[kind] = train(plan, model, device, data=directory / "text.txt", out=out, recipe=recipe,
                            options={"model": str(directory / "llama")}).losses  # fmt: skip
    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-4)
    replay(tmp_path / "cuda", tmp_path / "replayed")
    one, other = (path / "model.safetensors" for path in (tmp_path / "replayed", tmp_path / "cuda" / "model"))
    assert one.read_bytes() == other.read_bytes()
