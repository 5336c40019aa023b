"""The loss of a model directory: by streamed layers, and by plain transformers on each row alone."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ssdplan.executor.model.layers import Layers, MicroBatch
from ssdplan.executor.model.model import StreamedModel
from ssdplan.executor.model.weights import Weights

CPU = torch.device("cpu")


def rows_of(*lengths: int, width: int | None = None, vocab: int = 97, seed: int = 0) -> MicroBatch:
    """Random rows of so many tokens each, padded on the right to `width`, or the longest."""
    width = width or max(lengths)
    ids = torch.randint(3, vocab, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return MicroBatch(ids * mask, ids.masked_fill(mask == 0, -100), None if mask.all() else mask)


def streamed_loss(model: StreamedModel, batches: Sequence[MicroBatch], *, training: bool = False) -> float:
    """The mean loss of a step of these micro-batches, by layers whose weights are read from the files."""
    layers, weights = Layers(model, CPU), Weights(model)
    states = [torch.zeros(state.elements, dtype=model.dtype) for state in model.states]
    for index, state in enumerate(states):
        weights.read(index, state)
    weights.close()
    layers.begin_step(0, batches, training=training)
    head = len(model.layers) - 1
    for k, batch in enumerate(batches):
        hidden = None
        for layer in range(head):
            out = torch.empty(batch.input_ids.numel() * model.hidden_size, dtype=model.dtype)
            layers.forward(layer, k, [states[index] for index in model.layers[layer].states], hidden, out)
            hidden = out
        assert hidden is not None
        layers.loss(k, [states[index] for index in model.layers[head].states], hidden)
    return layers.end_step()


def plain_loss(path: Path, batches: Sequence[MicroBatch], dtype: torch.dtype = torch.float32) -> float:
    """The same by from_pretrained, which sees one row at a time and no padding."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    total, tokens = 0.0, 0
    for batch in batches:
        for row, ids in enumerate(batch.input_ids):
            length = len(ids) if batch.attention_mask is None else int(batch.attention_mask[row].sum())
            with torch.no_grad():
                loss = model(input_ids=ids[None, :length], labels=ids[None, :length], use_cache=False).loss
            total, tokens = total + float(loss) * (length - 1), tokens + length - 1
    return total / tokens
