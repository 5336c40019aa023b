"""The loss whose gradient is made in place has the bits of transformers' own."""

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from ssdplan.executor.model.cross_entropy import cross_entropy


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 7), (5, 320), (66, 32000), (37, 130001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradient_have_the_bits_of_transformers(
    dtype: torch.dtype, tokens: int, vocabulary: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    logits = (torch.randn(1, tokens, vocabulary, generator=generator) * 4).to(dtype)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = -100
    labels[0], normaliser = 3, torch.tensor(777)
    theirs, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    wanted = ForCausalLMLoss(theirs, None, vocabulary, num_items_in_batch=normaliser, shift_labels=labels)
    loss = cross_entropy(ours, labels, normaliser)
    (wanted * scale).backward()
    (loss * scale).backward()
    assert torch.equal(loss, wanted) and torch.equal(cross_entropy(logits, labels, normaliser), wanted)
    assert theirs.grad is not None and ours.grad is not None
    assert torch.equal(ours.grad.view(torch.uint8), theirs.grad.view(torch.uint8))
    assert torch.equal(ours.detach(), logits), "what was given is as it was"


def test_what_is_not_finite_stays_so() -> None:
    for value in (float("nan"), float("inf")):
        logits = torch.zeros(2, 5)
        logits[1, 2] = value
        wanted = ForCausalLMLoss(logits, None, 5, num_items_in_batch=torch.tensor(2), shift_labels=torch.tensor([1, 2]))
        loss = cross_entropy(logits, torch.tensor([1, 2]), torch.tensor(2))
        assert loss.isnan() == wanted.isnan() and not loss.isfinite()


def test_a_gradient_is_kept_of_no_array_but_one() -> None:
    """Of [tokens, vocabulary] in fp32 there is one beside what was given: transformers' loss has four."""
    logits = torch.zeros(64, 4096, dtype=torch.bfloat16, requires_grad=True)
    sizes: list[int] = []
    loss = cross_entropy(logits, torch.zeros(64, dtype=torch.int64), torch.tensor(1))
    held = loss.grad_fn
    for name in dir(held):
        value = getattr(held, name, None)
        if isinstance(value, torch.Tensor):
            sizes.append(value.numel() * value.element_size())
    assert sorted(sizes)[-1] == 64 * 4096 * 4 and sum(size == 64 * 4096 * 4 for size in sizes) == 1
    loss.backward()
    assert not hasattr(held, "array"), "it is gone with its gradient"
