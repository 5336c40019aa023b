"""Random models: a Llama of a given shape with random weights, as a Hugging Face model directory.

Owns the shape's configuration, the weights' distribution and a byte-level tokenizer, for benchmarks of models that no
one needs to download. Weights are drawn and written a few MiB at a time: the model is never whole in memory, nor is any
tensor of it. `python -m ssdplan.executor.model.directory.random_model --help` says how to call it.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from ssdplan.plans.errors import SsdplanError, UsageError

from .export import TensorEntry, export_model

END_OF_SEQUENCE = "<|endoftext|>"
_BYTES = 256
_PIECE_ELEMENTS = 1 << 20
_DEVIATION = 0.02
_DESCRIPTION = (
    "Write a Llama with random weights, and a byte-level tokenizer. The tokenizer has no chat template, so train it on "
    "texts, or on prompts with completions, not on conversations."
)
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """A Llama's. `intermediate` and `heads` follow from `hidden` when None: 8/3 of it in whole 256s, and heads of 64
    (of 128 from a hidden size of 2048 on)."""

    hidden: int
    layers: int
    vocab: int = 32000
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    """None: as many as heads."""
    tied: bool = True
    longest: int = 4096
    """Tokens of the longest sequence that the configuration admits."""

    def configuration(self) -> LlamaConfig:
        """Raises UsageError for a shape that no model has."""
        heads = self.heads or max(self.hidden // (128 if self.hidden >= 2048 else 64), 1)
        kv_heads = self.kv_heads or heads
        if self.hidden % (2 * heads) or heads % kv_heads:
            raise UsageError(
                f"{heads} heads and {kv_heads} of keys and values do not divide a hidden size of {self.hidden} into "
                "an even number each; give others"
            )
        if self.vocab <= _BYTES:
            raise UsageError(f"a vocabulary of {self.vocab} is too small for the tokenizer: {_BYTES + 1} at the least")
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate or -(-8 * self.hidden // 3 // 256) * 256,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=self.longest,
            tie_word_embeddings=self.tied,
            bos_token_id=0,
            eos_token_id=0,
            architectures=["LlamaForCausalLM"],
        )


def write_random_model(shape: Shape, out: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> int:
    """Write a model directory `out`, sharded safetensors and a tokenizer; returns its number of parameters.

    Matrices are normal with a deviation of 0.02, norms one; the same seed gives the same bits. Raises as
    `export_model`: UsageError where something lies already, DiskFullError where there is no space.
    """
    config = shape.configuration()
    with init_empty_weights():
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    module.tie_weights()
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    with tempfile.TemporaryDirectory(prefix="ssdplan-") as folder:
        config.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
        entries = [TensorEntry(name, sizes, dtype) for name, sizes in shapes.items()]
        export_model(out, source=Path(folder), entries=entries, tensors=_weights(shapes, dtype, seed))
    return sum(map(prod, shapes.values()))


def _weights(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    piece = torch.empty(_PIECE_ELEMENTS, dtype=dtype)
    for name, sizes in shapes.items():
        elements = prod(sizes)
        for start in range(0, elements, _PIECE_ELEMENTS):
            values = piece[: min(elements - start, _PIECE_ELEMENTS)]
            if len(sizes) == 1:
                values.fill_(1.0)
            else:
                values.normal_(0.0, _DEVIATION, generator=generator)
            yield name, values


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and 0 for the end of a sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([END_OF_SEQUENCE, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_SEQUENCE)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ssdplan.executor.model.directory.random_model", description=_DESCRIPTION
    )
    parser.add_argument("--hidden", type=int, required=True, metavar="N")
    parser.add_argument("--layers", type=int, required=True, metavar="N")
    parser.add_argument("--vocab", type=int, default=32000, metavar="N", help="[32000]")
    parser.add_argument("--intermediate", type=int, metavar="N", help="[8/3 of the hidden size]")
    parser.add_argument("--heads", type=int, metavar="N", help="[of 64 each; of 128 from a hidden size of 2048 on]")
    parser.add_argument("--kv-heads", type=int, metavar="N", help="[as many as heads]")
    parser.add_argument("--untied", action="store_true", help="the head has weights of its own")
    parser.add_argument("--precision", choices=sorted(_DTYPES), default="bf16", help="[bf16]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="[0]")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    given = parser.parse_args()
    shape = Shape(
        hidden=given.hidden,
        layers=given.layers,
        vocab=given.vocab,
        intermediate=given.intermediate,
        heads=given.heads,
        kv_heads=given.kv_heads,
        tied=not given.untied,
    )
    try:
        parameters = write_random_model(shape, given.out, dtype=_DTYPES[given.precision], seed=given.seed)
    except SsdplanError as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    print(f"{parameters / 1e6:.1f}M parameters in {given.out}")


if __name__ == "__main__":
    main()
