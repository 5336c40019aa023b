"""Moments in 8 bits by torch and brute force: the oracle of `native/src/eight_bits.hpp`.

The code is that of dynamic quantization, as bitsandbytes makes its maps (Dettmers et al., 2022): every one of 256
fractions is listed, and the nearer of two neighbours is taken.
"""

import torch

BLOCK = 64


def fractions(*, signed: bool) -> torch.Tensor:
    """fp32 [256], rising."""
    found = [0.0, 1.0]
    for i in range(7):
        ends = torch.linspace(0.1, 1.0, 2 ** (i + (0 if signed else 1)) + 1, dtype=torch.float64)
        means = 10.0 ** (i - 6) * (ends[:-1] + ends[1:]) / 2
        found += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted(found), dtype=torch.float64).float()


def rounded(values: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """What is left of fp32 `values`, any shape, when each 64 in their order have one scale, their largest magnitude.
    Only a zero becomes a zero where there is no sign."""
    padded = torch.nn.functional.pad(values.detach().flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(1, keepdim=True)
    book = fractions(signed=signed)
    parts = padded * torch.where(scales > 0, 1 / scales, 0)
    above = torch.searchsorted(book, parts).clamp(1, len(book) - 1)
    nearer = (parts.double() - book[above - 1].double()) <= (book[above].double() - parts.double())
    found = above - nearer.long()
    if not signed:
        found = torch.where((padded > 0) & (found == 0), 1, found)
    return (book[found] * scales).flatten()[: values.numel()].view(values.shape)
