"""Which causal model types of the installed transformers train, and whether they train as plain PyTorch trains them.

    python benchmarks/models.py [TYPE ...] [--commands] [--write docs/models.md]

makes a tiny checkpoint of each type (tiny_models.py), trains four steps of it in fp32 and in bf16, streamed and by
plain PyTorch on the same rows, exports it, and has from_pretrained load the export. With --commands the steps are
those of `ssdplan profile`, `solve` and `run`, half a minute a type; without, those of the layers that a run streams, a
few seconds a type. It prints a line a type; --write puts the table into a document, between its two marks.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from tiny_models import IMAGES, TYPES, auto_class, make_tiny
from transformers.utils import logging

from ssdplan.cli import main as ssdplan
from ssdplan.executor.data.text_data import TextData
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.executor.memory.states import saved_entries
from ssdplan.executor.model.directory.export import export_model
from ssdplan.executor.model.kinds import spared_parameters
from ssdplan.executor.model.layers import Layers, MicroBatch
from ssdplan.executor.model.model import StreamedModel, open_model
from ssdplan.executor.model.saved_form import SavedForm
from ssdplan.executor.model.weights import Weights
from ssdplan.plans.errors import MismatchError, SsdplanError, first_line

STEPS, ROWS, LENGTH = 4, 2, 32
RATE, DECAY = 1e-3, 0.01
BOUND = 5e-6
"""Of the families' tests: how far losses in fp32 may be from plain PyTorch's, relatively."""
NOISE = 3.0
"""In bf16: how many times as far as plain PyTorch's losses in bf16 are from its own in fp32."""
BEGIN, END = "<!-- benchmarks/models.py -->", "<!-- end -->"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Row:
    """What was found of a type. `far`: the largest relative difference of losses, by precision."""

    model_type: str
    result: str = "trains"
    far: dict[str, float] = field(default_factory=dict)
    packs: bool = False
    why: str = ""

    def line(self) -> str:
        far = " | ".join(f"{self.far[each]:.0e}" if each in self.far else "" for each in DTYPES)
        return f"| {self.model_type} | {self.result} | {far} | {'yes' if self.packs else ''} | {self.why} |"


def tried(model_type: str, work: Path, *, commands: bool) -> Row:
    """Trains a type in every precision. Whatever fails is a result, by name."""
    row, path = Row(model_type), work / model_type
    try:
        make_tiny(model_type, path)
    except Exception as error:  # any code of any model may be in there
        return Row(model_type, "not made", why=f"{type(error).__name__}: {_short(error)}")
    losses = {}
    for precision, dtype in DTYPES.items():
        try:
            model = open_model(path, dtype)
            steps = list(_steps(work, model))
            trained = _by_commands if commands else _by_layers
            streamed = trained(work, model, steps, precision)
        except SsdplanError as error:
            result = "refused" if precision == "fp32" else "fp32 only"
            row.result, row.why = result, _short(error)
            break
        except Exception as error:  # which is a defect
            row.result, row.why = "**fails**", f"{type(error).__name__}: {_short(error)}"
            break
        row.packs = model.keeps_apart(LENGTH)
        row.why = model.anatomy.isolation.in_the_way
        losses[precision] = plain = _plainly(path, model, steps, dtype)
        row.far[precision] = _far(streamed, plain)
        bound = BOUND if precision == "fp32" else NOISE * _far(plain, losses["fp32"]) + 1e-3
        if row.far[precision] > bound:
            row.result, row.why = "**differs**", f"in {precision} by more than {bound:.0e}"
            break
    return row


def _short(error: Exception) -> str:
    """What a table has room for of an error, without the place of the model."""
    told = first_line(error).replace("|", "/").split("cannot be streamed exactly: ")[-1]
    return re.sub(r"^/\S+: ", "", told.split("; no option changes that")[0])[:200]


def _far(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def _steps(work: Path, model: StreamedModel) -> Iterator[MicroBatch]:
    """The rows of each step: those that a run takes with --no-pack. No two are of one length, so that the mask is told
    to both; without it the same sums round differently."""
    text = TextData(work / "rows.jsonl", load_tokenizer(model.path), sequence_length=LENGTH, pack=False)
    for step in range(STEPS):
        (batch,) = text.micro_batches(step, micro_batches=1, micro_batch_size=ROWS, seed=0)
        mask = None if batch.attention_mask is None else torch.from_numpy(batch.attention_mask)
        yield MicroBatch(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels), mask)


def _by_commands(work: Path, model: StreamedModel, steps: Sequence[MicroBatch], precision: str) -> list[float]:
    """The losses of a run, whose model is looked at; SsdplanError where a command ends otherwise than with 0."""
    profile, plan, run = (work / f"{model.name}-{precision}-{what}" for what in ("profile.json", "plan.json", "run"))
    size = ("--sequence-length", LENGTH, "--micro-batch-sizes", ROWS, "--precision", precision, "--seconds", 1)
    rates = ("--lr", RATE, "--weight-decay", DECAY)
    for words in (
        ("profile", "--model", model.path, *size, "--volume", work, "-o", profile),
        ("solve", profile, "--host-memory", "1GiB", "--global-batch", ROWS, "-o", plan),
        ("run", plan, "--data", work / "rows.jsonl", "--no-pack", "--steps", STEPS, *rates, "--out", run),
    ):
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            code = ssdplan(list(map(str, words)))
        if code:
            told = [line for line in said.getvalue().splitlines() if "error: " in line]
            raise MismatchError(told[-1].split("error: ")[-1] if told else f"{words[0]} ended with {code}")
    _look_at(run / "model", model)
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()][:STEPS]


def _by_layers(work: Path, model: StreamedModel, steps: Sequence[MicroBatch], precision: str) -> list[float]:
    """The losses of the layers that a run streams, all in memory; the model is exported, and looked at."""
    layers, weights, spared = Layers(model, torch.device("cpu")), Weights(model), spared_parameters(model.module)
    masters = [torch.zeros(state.elements) for state in model.states]
    for index, master in enumerate(masters):
        weights.read(index, master)
    views = {
        tensor.name: (master, slice(tensor.offset, tensor.offset + tensor.elements), dtype, state.frozen)
        for state, master, dtype in zip(model.states, masters, model.dtypes, strict=True)
        for tensor in state.tensors
    }
    leaves = {name: master[place].clone() for name, (master, place, _, frozen) in views.items() if not frozen}
    update = _optimizer(leaves, spared)
    losses = []
    for number, batch in enumerate(steps):
        for master in masters:
            master.grad = torch.zeros_like(master)
        _step(layers, model, number, batch, masters)
        losses.append(layers.end_step())
        for name, leaf in leaves.items():
            gradient = views[name][0].grad
            assert gradient is not None
            leaf.grad = gradient[views[name][1]].clone()
        update.step()
        for name, leaf in leaves.items():
            views[name][0][views[name][1]] = leaf
    own = [(name, master[place].to(dtype)) for name, (master, place, dtype, _) in views.items()]
    form, out = SavedForm(model), work / f"{model.name}-{precision}"
    tensors = form.tensors([*own, *model.persistent_buffers.items()])
    export_model(out, source=model.path, entries=form.entries(saved_entries(model)), tensors=tensors, files=form.files)
    _look_at(out, model)
    return losses


def _step(
    layers: Layers, model: StreamedModel, number: int, batch: MicroBatch, masters: Sequence[torch.Tensor]
) -> None:
    layers.begin_step(number, [batch])
    head, elements = len(model.layers) - 1, batch.input_ids.numel() * model.hidden_size
    hidden = [torch.empty(elements, dtype=model.dtype) for _ in range(head)]

    def streamed(layer: int) -> list[torch.Tensor]:
        return [masters[index].to(model.dtypes[index]) for index in model.layers[layer].states]

    for layer in range(head):
        layers.forward(layer, 0, streamed(layer), hidden[layer - 1] if layer else None, hidden[layer])
    gradient = None
    for layer in range(head, model.first_trained - 1, -1):
        into = torch.empty_like(hidden[0]) if layer > model.first_trained else None
        gradients = [grad for index in model.trained(layer) if (grad := masters[index].grad) is not None]
        layers.backward(layer, 0, streamed(layer), hidden[layer - 1] if layer else None, gradient, into, gradients)
        gradient = into


def _look_at(out: Path, model: StreamedModel) -> None:
    """MismatchError unless an export has the tensors of the original, and from_pretrained finds all that it wants."""
    before, after = (
        {name for file in each.glob("*.safetensors") for name in _names(file)} for each in (model.path, out)
    )
    if before != after:
        raise MismatchError(f"the export has other tensors than the original: {sorted(before ^ after)[:3]}")
    _, told = auto_class(model.name).from_pretrained(out, output_loading_info=True)
    if told["missing_keys"] or told["unexpected_keys"] or told["mismatched_keys"]:
        raise MismatchError(f"from_pretrained finds the export unlike the model: {told}")


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _optimizer(parameters: dict[str, torch.Tensor], spared: frozenset[str]) -> torch.optim.AdamW:
    groups = [
        {"params": [each for name, each in parameters.items() if (name in spared) == spares], "weight_decay": decay}
        for spares, decay in ((False, DECAY), (True, 0.0))
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=RATE)


def _plainly(path: Path, model: StreamedModel, steps: Sequence[MicroBatch], dtype: torch.dtype) -> list[float]:
    """The losses of plain PyTorch: the library's own model, its own loss, torch's AdamW on fp32 weights."""
    plain, whole = (auto_class(path.name).from_pretrained(path, dtype=each).train() for each in (dtype, torch.float32))
    plain.config.use_cache = False
    masters = {name: each.detach().clone().requires_grad_() for name, each in whole.named_parameters()}
    update = _optimizer(dict(masters), spared_parameters(plain))
    losses = []
    for batch in steps:
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(masters[name])
        plain.zero_grad()
        labels = batch.labels
        if not model.anatomy.shifts_labels:
            labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        loss = plain(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
        loss.backward()
        losses.append(float(loss.detach()))
        for name, parameter in plain.named_parameters():
            masters[name].grad = None if parameter.grad is None else parameter.grad.float()
        update.step()
    return losses


def _write(document: Path, rows: Sequence[Row]) -> None:
    text = document.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert rest and after, f"{document} lacks {BEGIN} or {END}"
    table = [
        "| type | result | fp32 | bf16 | packs | why |",
        "|---|---|---|---|---|---|",
        *(row.line() for row in rows),
    ]
    document.write_text("\n".join([before + BEGIN, "", *table, "", END + after]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="[all]")
    parser.add_argument("--commands", action="store_true", help="through the commands")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a document whose table is to be written")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where models are made [a new one, removed again]")
    given = parser.parse_args()
    if unknown := set(given.types) - {*TYPES, *IMAGES}:
        parser.error(f"no causal model types of this transformers: {', '.join(sorted(unknown))}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="ssdplan-", dir=given.work) as folder:
        work = Path(folder)
        os.environ["SSDPLAN_CACHE"] = folder
        texts = ("the quick brown fox jumps over it"[: 16 + number] for number in range(2 * STEPS * ROWS))
        (work / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
        for model_type in given.types or (*TYPES, *IMAGES):
            rows.append(tried(model_type, work, commands=given.commands))
            print(rows[-1].line(), flush=True)
            for left in work.glob(f"{model_type}*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    trained = sum(row.result in ("trains", "fp32 only") for row in rows)
    print(f"{trained} of {len(rows)} train, {sum(row.packs for row in rows)} of them pack")
    if given.write:
        _write(given.write, rows)
    raise SystemExit(any(row.result.startswith("**") for row in rows))


if __name__ == "__main__":
    main()
