"""Runs on a CUDA device: equal to plain PyTorch, the same bits serial and overlapped, within the plan's peak."""

import json

import pytest
import torch

from ssdplan.executor.device import CudaDevice
from ssdplan.executor.model import open_model
from ssdplan.executor.optimizer import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import train
from tests import reference
from tests.executor.planned import make_plan
from tests.executor.runs import LENGTH, micro_batches_of, prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("model"))


def run(directory, out, *, serial=False, precision="fp32", freeze=(), **choices):
    model = open_model(directory / "llama", torch.bfloat16 if precision == "bf16" else torch.float32, freeze=freeze)
    plan = make_plan(model, sequence_length=LENGTH, precision=precision, device="cuda", **choices)
    recipe = Recipe(steps=5, optimizer=AdamW(lr=1e-3, weight_decay=0.1), serial=serial)
    return plan, train(plan, model, CudaDevice(), data=directory / "text.txt", out=out, recipe=recipe)


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
    for number, (alpha, residency, serial, on_device, across_turn) in enumerate(
        [
            (0.0, 0.0, True, 0.0, 0.0),
            (0.0, 0.0, False, 0.0, 0.0),
            (0.3, 0.37, False, 0.0, 0.0),
            (1.0, 1.0, False, 0.0, 0.0),
            (0.0, 0.0, False, 1.0, 0.0),
            (0.3, 0.37, False, 0.3, 0.7),
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
            chunk=4096,
        )
        seen.add((tuple(result.losses), (out / "model" / "model.safetensors").read_bytes()))
    assert len(seen) == 1


@pytest.mark.parametrize("optimizer_states", ["fp32", "bf16"])
def test_placement_cuts_and_runner_change_no_bit_of_a_clipped_run_on_the_gpu(directory, tmp_path, optimizer_states):
    seen = set()
    for number, (residency, chunk, serial) in enumerate(
        [(0.0, 2048, True), (0.37, 8192, False), (1.0, 1 << 20, False)]
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
            chunk=chunk,
        )
        norms = [json.loads(line)["grad_norm"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert min(norms) > 0.5
        seen.add((tuple(result.losses), tuple(norms), (out / "model" / "model.safetensors").read_bytes()))
    assert len(seen) == 1


def test_the_allocators_peak_keeps_the_plan(directory, tmp_path):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _, result = run(directory, tmp_path / "run", micro_batches=4)
    measured = next(row.measured for row in result.compared if row.quantity == "peak_device_bytes")
    slack = 128 << 10  # token ids, losses and buffers of the model itself, and the squares of one range of gradients
    assert torch.cuda.max_memory_allocated() - before <= measured + slack


def test_a_workspace_is_what_the_allocator_takes_from_an_empty_cache():
    """Whatever it kept from before: a small tensor costs the segment that it lies in."""
    device = CudaDevice()

    def work():
        return torch.empty(3 << 20, dtype=torch.uint8, device="cuda").data_ptr()

    first, again = (device.peak_bytes(work)[1] for _ in range(2))
    assert first == again >= 3 << 20
    assert first % (2 << 20) == 0, "whole segments of the allocator"


def test_a_gradients_copy_says_what_is_in_it():
    device = CudaDevice()
    gradient = torch.randn(3 * 2048, device="cuda") * torch.logspace(-12, 12, 3 * 2048, device="cuda")
    host = torch.zeros(3 * 2048)
    for scale in (1.0, 1e20, 0.0):  # the second squares beyond fp32
        finite, squares = device.copy_d2h_gradient(host, gradient * scale)
        assert finite and torch.equal(host, (gradient * scale).cpu())
        assert squares / (1 << 1074) == pytest.approx(float(host.double().square().sum()), rel=1e-5)
    for bad in (float("inf"), float("nan")):
        gradient[4097] = bad
        assert not device.copy_d2h_gradient(host, gradient)[0]
