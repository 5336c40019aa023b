"""`python -m ssdplan.rivals.making ORDER`: the model, the tokenizer and the rows that all arms of a comparison share.

A process of its own, so that its memory counts nowhere. A model of random weights is written layer by layer. The rows
are token ids; the text that `ssdplan run` reads is those ids as words, and the tokenizer turns each word into its id.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from ssdplan.plans.errors import UsageError, first_line

from .shapes import Shape

INITIAL_DEVIATION = 0.02
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Order:
    """What to make. Either `shape` or `model`; `data` only with `model`, whose tokenizer reads it."""

    directory: str
    """Gets `model/`, `rows.npy` and `text.txt`."""
    shape: str
    model: str
    data: str
    vocab: int
    rows: int
    row_tokens: int
    seed: int
    precision: str
    """What the arms compute in."""

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def make(order: Order) -> None:
    """Make it all. Raises UsageError for data without a tokenizer, or of fewer tokens than a row."""
    directory = Path(order.directory)
    model = directory / "model"
    model.mkdir()
    rows = _rows(order)
    np.save(directory / "rows.npy", rows)
    width = len(str(order.vocab - 1))
    with (directory / "text.txt").open("w", encoding="ascii") as text:
        for row in rows:
            text.write(" ".join(f"{token:0{width}}" for token in row) + "\n")
    if order.shape:
        _write_model(Shape.parse(order.shape), model, order.seed)
    else:
        _copy_model(Path(order.model).resolve(), model, rounded=order.precision == "bf16")
    _write_tokenizer(order.vocab, width, model)


def _rows(order: Order) -> npt.NDArray[np.uint32]:
    """uint32 [rows, row_tokens]: random ids of a seed, or those of a text; no more rows than the text has."""
    shape = (order.rows, order.row_tokens)
    if not order.data:
        return np.random.default_rng(order.seed).integers(0, order.vocab, shape, dtype=np.uint32)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(order.model, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{order.model}: --data needs the model's tokenizer: {first_line(error)}") from error
    tokens: list[int] = []
    for text in _texts(Path(order.data)):
        tokens += tokenizer(text)["input_ids"]
        if len(tokens) >= order.rows * order.row_tokens:
            break
    count = min(len(tokens) // order.row_tokens, order.rows)
    if not count:
        raise UsageError(f"{order.data}: {len(tokens)} tokens in all, fewer than one row of {order.row_tokens}")
    return np.array(tokens[: count * order.row_tokens], np.uint32).reshape(count, order.row_tokens)


def _texts(path: Path) -> Iterator[str]:
    """A .txt file's paragraphs, or the field `text` of a .jsonl file's rows."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    text = json.loads(line)["text"] if path.suffix == ".jsonl" else line
                except (ValueError, KeyError, TypeError) as error:
                    raise UsageError(f"{path}:{number}: no JSON object with a field `text`") from error
                if text.strip():
                    yield text
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _write_model(shape: Shape, directory: Path, seed: int) -> None:
    """A Llama in bf16, a safetensors file a layer: normal numbers, and ones for the norms."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=1 << 16,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=shape.vocab - 1,
        dtype="bfloat16",
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    with torch.device("meta"):
        wanted = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).named_parameters()}
    assert sum(size.numel() for size in wanted.values()) == shape.parameters
    generator = torch.Generator().manual_seed(seed)
    files: dict[str, list[str]] = {}
    for name in wanted:
        layer = name.split(".")[2] if name.startswith("model.layers.") else name.removesuffix(".weight")
        files.setdefault(f"model-{layer.removeprefix('model.')}.safetensors", []).append(name)
    for file, names in files.items():
        tensors = {
            name: torch.ones(wanted[name], dtype=torch.bfloat16)
            if len(wanted[name]) == 1
            else torch.empty(wanted[name]).normal_(std=INITIAL_DEVIATION, generator=generator).bfloat16()
            for name in names
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _copy_model(source: Path, directory: Path, *, rounded: bool) -> None:
    """A model's configuration and its weights, `rounded` to bf16, a file at a time; files that need no change are
    links.

    Arms differ in what they make fp32 masters of, the checkpoint's weights or their bf16 copy; so there is one of both.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    for file in sorted(source.iterdir()):
        if file.suffix == ".json" and file.name not in TOKENIZER_FILES:
            shutil.copyfile(file, directory / file.name)
        elif file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as shard:
                names = list(shard.keys())
                if not rounded or all(shard.get_slice(name).get_dtype() == "BF16" for name in names):
                    (directory / file.name).symlink_to(file)
                    continue
                tensors = {name: shard.get_tensor(name) for name in names}
            copies = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
            save_file(copies, directory / file.name, metadata={"format": "pt"})


def _write_tokenizer(vocab: int, width: int, directory: Path) -> None:
    """A tokenizer whose words are the ids themselves; the last one ends a sequence."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"{token:0{width}}": token for token in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"{0:0{width}}"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = f"{vocab - 1:0{width}}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(directory)


if __name__ == "__main__":
    try:
        make(Order.load(Path(sys.argv[1])))
    except UsageError as error:
        print(f"ssdplan: error: {error}", file=sys.stderr)
        raise SystemExit(UsageError.exit_code) from error
