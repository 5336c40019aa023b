"""The update of a range of matrices: the bits of torch.optim.Muon on the same gradients, whatever the masters are."""

import pytest
import torch

from ssdplan.executor.device.masters import joined
from ssdplan.executor.optimizer.muon import MatrixUpdate, Muon
from ssdplan.plans.documents.matrices import PIECE, Matrix, workspace_bytes
from ssdplan.plans.documents.state_layout import MOMENTUM

SHAPES = [(64, 64), (128, 48), (48, 128), (1, 96), (3 * 64 + 1, 64)]
WIDE = [(3, PIECE + 5)]


def _laid(shapes: list[tuple[int, int]]) -> list[Matrix]:
    matrices: list[Matrix] = []
    for rows, columns in shapes:
        matrices.append(Matrix(rows=rows, columns=columns, start=matrices[-1].stop if matrices else 4096))
    return matrices


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize(
    ("masters", "shapes"), [("fp32", SHAPES), ("residual", SHAPES), ("none", SHAPES), ("fp32", WIDE)]
)
def test_an_update_has_the_bits_of_torchs_own(masters, shapes, adjust):
    generator = torch.Generator().manual_seed(3)
    matrices, formats = _laid(shapes), MOMENTUM[masters]
    elements = matrices[-1].stop - matrices[0].start
    states = torch.zeros(formats.range_bytes(elements), dtype=torch.uint8)
    gradient, parameters = torch.zeros(elements), torch.zeros(elements, dtype=torch.bfloat16)
    theirs = [torch.randn(matrix.shape, generator=generator, requires_grad=True) for matrix in matrices]
    places = [slice(m.start - 4096, m.start - 4096 + m.elements) for m in matrices]
    parts = {part.what: states[part.offset : part.stop] for part in formats.parts(elements)}
    for place, their in zip(places, theirs, strict=True):
        flat = their.detach().view(-1)
        if masters != "fp32":
            flat.copy_(flat.bfloat16())
        parameters[place] = flat.bfloat16()
        if masters == "fp32":
            parts["master"].view(torch.float32)[place] = flat
    decays = [number != 1 for number in range(len(matrices))]
    workspace = torch.full((workspace_bytes(matrices),), 0xFF, dtype=torch.uint8)
    update = MatrixUpdate(
        states, formats, gradient, parameters, matrices, workspace, start=4096, decays=decays, looks=True
    )
    settings = Muon(lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr=adjust)
    groups = [
        {"params": [their], "weight_decay": 0.1 if decaying else 0.0}
        for their, decaying in zip(theirs, decays, strict=True)
    ]
    oracle = torch.optim.Muon(groups, lr=0.02, momentum=0.9, adjust_lr_fn=adjust)
    for step in range(3):
        for place, their in zip(places, theirs, strict=True):
            drawn = torch.randn(their.shape, generator=generator)
            their.grad, gradient[place] = drawn / 4, drawn.view(-1)
        assert update(settings, step=step + 1, gradient_scale=0.25).finite
        oracle.step()
        for place, their in zip(places, theirs, strict=True):
            if masters == "none":
                their.data.copy_(their.data.bfloat16())
            kept = {
                "fp32": lambda: parts["master"].view(torch.float32),
                "residual": lambda: joined(parameters, parts["master"].view(torch.int16)),
                "none": parameters.float,
            }[masters]()
            assert torch.equal(kept[place], their.detach().view(-1))
            if masters == "fp32":
                assert torch.equal(parameters[place], their.detach().view(-1).bfloat16())
