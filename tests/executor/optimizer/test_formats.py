"""Masters other than fp32 and moments in 8 bits: an update to the bit as plain arithmetic has it, whatever range is
summed, and runs near plain PyTorch that does the same, with the same bits wherever states live."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ssdplan import native
from ssdplan.executor.device.masters import joined, split
from ssdplan.executor.optimizer.adamw import AdamW, RangeUpdate
from ssdplan.executor.optimizer.weight_decay import windows
from ssdplan.plans.documents.state_layout import OPTIMIZER_FORMATS, Masters, OptimizerStates, Part
from tests import eight_bits, reference
from tests.executor.optimizer.test_optimizer_states import OPTIMIZER, SETTINGS, run
from tests.executor.runs import micro_batches_of, prepare

NARROW = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"))


def moments_in(states: torch.Tensor, part: Part) -> torch.Tensor:
    """fp32: the moments that a part holds, of int8 by the oracle's list of fractions."""
    (first, end), *side = part.places(0, part.elements)
    if not side:
        return states[first:end].view(NARROW[part.format.name]).float()
    signed = part.what == "first moment"
    numbers = states[first:end].long()
    above = eight_bits.fractions(signed=signed)
    above = above[above >= 0]
    negative = signed & (numbers > 128)
    fractions = above[torch.where(negative, 256 - numbers, numbers)]
    scales = states[slice(*side[0])].view(torch.float32).repeat_interleave(eight_bits.BLOCK)
    return torch.where(negative, -fractions, fractions) * scales


def kept(values: torch.Tensor, moments: OptimizerStates, *, signed: bool) -> torch.Tensor:
    if moments == "int8":
        return eight_bits.rounded(values, signed=signed)
    return values.to(NARROW[moments]).float()


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("masters", ["fp32", "residual", "none"])
@pytest.mark.parametrize(("grains", "spared"), [(1, ()), (4, ()), (5, ((64, 192), (8192, 8256)))])
def test_updates_are_those_of_plain_arithmetic_and_sums_those_of_their_bytes(
    masters: Masters, moments: OptimizerStates, grains: int, spared: tuple[tuple[int, int], ...]
) -> None:
    """Three updates in numpy, each operation rounded to fp32 by itself, states rounded in between."""
    f, formats, elements = np.float32, OPTIMIZER_FORMATS[masters, moments], 2048 * grains
    generator = torch.Generator().manual_seed(grains)
    p = torch.randn(elements, generator=generator)
    states = torch.zeros(formats.range_bytes(elements), dtype=torch.uint8)
    parts = {part.what: part for part in formats.parts(elements)}
    parameters = p.bfloat16()
    if masters == "residual":
        split(p, parameters, states[: 2 * elements].view(torch.int16))
    elif masters == "fp32":
        states[: 4 * elements].view(torch.float32).copy_(p)
    gradient = torch.empty(elements)
    extents = sorted({4096, states.numel() // 8192 * 4096 or 4096, states.numel()})
    cut = windows(0, elements, spared)
    update = RangeUpdate(
        states, formats, gradient, parameters, threads=2, statistics=True, windows=cut, extents=extents
    )
    assert update._passing == (not spared or (masters != "residual" and moments == "fp32")), "in one pass, if it can"
    decays = np.ones(elements, dtype=bool)
    for start, stop in spared:
        decays[start:stop] = False

    def sums() -> tuple[int, ...]:
        return tuple(
            native.checksum(states[a:b].data_ptr(), b - a) for a, b in zip((0, *extents), extents, strict=False)
        )

    p = p.bfloat16().float() if masters == "none" else p
    m = v = torch.zeros(elements)
    for step in (1, 2, 3):
        size = 10.0 ** torch.randint(-6, 2, (elements,), generator=generator)
        gradient.copy_(torch.randn(elements, generator=generator) * size)
        gradient[:64] = 0.0
        before = sums()
        found = update(OPTIMIZER, step=step, gradient_scale=0.3)
        assert found.finite and found.before == before and found.after == sums()
        assert found.squares == native.gradient_statistics(gradient.data_ptr(), elements)[1]
        g, was, m_was, v_was = (each.numpy() for each in (gradient, p, m, v))
        g = g * f(0.3)
        m_new = m_was + (g - m_was) * f(1 - 0.9)
        v_new = v_was * f(0.95) + (g * g) * f(1 - 0.95)
        denominator = np.sqrt(v_new) * f(1 / np.sqrt(1 - 0.95**step)) + f(1e-8)
        decay = np.where(decays, f(1 - 1e-3 * 0.1), f(1))
        p = torch.from_numpy(was * decay - (f(1e-3 / (1 - 0.9**step)) * m_new) / denominator)
        m = kept(torch.from_numpy(m_new), moments, signed=True)
        v = kept(torch.from_numpy(v_new), moments, signed=False)
        if masters == "none":
            p = p.bfloat16().float()
        held = parameters.float() if masters == "none" else states[: 4 * elements].view(torch.float32)
        if masters == "residual":
            held = joined(parameters, states[: 2 * elements].view(torch.int16))
            assert torch.equal(parameters.float(), reference.ties_away(p))
        assert torch.equal(held[:elements].view(torch.int32), p.view(torch.int32)), step
        assert torch.equal(moments_in(states, parts["first moment"]), m), step
        assert torch.equal(moments_in(states, parts["second moment"]), v), step
    assert moments != "int8" or not ((v == 0) & (torch.from_numpy(v_new) > 0)).any()


def test_what_is_lost_of_masters_is_nothing_or_what_bf16_loses() -> None:
    """A step far below a parameter's last digit, many times: residuals add it up, without masters it is lost."""
    elements, optimizer = 2048, AdamW(lr=1e-6, weight_decay=0.0)
    moved, gradient = {}, torch.ones(elements)
    for masters in ("fp32", "residual", "none"):
        formats = OPTIMIZER_FORMATS[masters, "fp32"]
        states = torch.zeros(formats.range_bytes(elements), dtype=torch.uint8)
        parameters = torch.ones(elements, dtype=torch.bfloat16)
        if masters == "fp32":
            states[: 4 * elements].view(torch.float32).fill_(1.0)
        update = RangeUpdate(states, formats, gradient, parameters, threads=1)
        for step in range(1, 5001):
            update(optimizer, step=step, gradient_scale=1.0)
        moved[masters] = 1.0 - float(parameters[0])
    assert moved["fp32"] == moved["residual"] > 0.0035 and moved["none"] == 0.0


def test_a_run_without_masters_equals_plain_pytorch_that_rounds_them(directory, tmp_path):
    steps = [micro_batches_of(directory, step, micro_batches=2) for step in range(4)]
    rounding = reference.AdamW(**{**vars(SETTINGS), "masters": "none"})
    losses, weights = reference.train(directory / "llama", steps, rounding, torch.bfloat16)
    _, others = reference.train(directory / "llama", steps, SETTINGS, torch.bfloat16)
    _, result = run(
        directory, tmp_path / "run", steps=4, precision="bf16", optimizer_states="fp32", masters="none", alpha=0.4,
        optimizer=0.5, parameters=0.2, gradient=0.5, chunk=4096,
    )  # fmt: skip
    assert result.losses == pytest.approx(losses, rel=1e-3)
    apart = [
        float(
            torch.linalg.vector_norm(tensor.float() - weights[name]) / torch.linalg.vector_norm(tensor - others[name])
        )
        for name, tensor in load_file(tmp_path / "run" / "model" / "model.safetensors").items()
    ]
    assert sum(apart) / len(apart) < 0.7, "nearer to it than to training with masters"
    compared = {row.quantity: row for row in result.compared}
    for quantity in ("host_arena_bytes", "device_arena_bytes", "ssd_read_bytes", "ssd_write_bytes"):
        assert compared[quantity].measured == compared[quantity].predicted, quantity


def test_placement_changes_no_bit(directory, tmp_path):
    seen = set()
    for number, choices in enumerate(
        [
            {"alpha": 0.3, "optimizer": 0.37, "parameters": 0.5, "gradient": 0.3, "chunk": 1 << 14, "across_turn": 0.6},
            {"unified": True, "across_turn": 0.5, "chunk": 1 << 15},
            {"on_device": 1.0, "updated": 0.5, "optimizer": 0.5, "serial": True},
        ]
    ):
        out = tmp_path / str(number)
        formats = {"optimizer_states": "int8", "masters": "residual", "precision": "bf16"}
        _, result = run(directory, out, steps=3, **formats, **choices)
        weights = hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()
        seen.add((weights, tuple(result.losses), tuple(result.eval_losses.values())))
    assert len(seen) == 1
