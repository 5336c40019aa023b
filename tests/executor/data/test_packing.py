"""Samples that share a row are trained on as if each had a row of its own, and rows are filled as the packing says."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.executor.data.packing import EndToEnd, OneARow, WholeSamples
from ssdplan.executor.data.text_data import Batch, TextData
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.executor.model.layers import Layers, MicroBatch
from ssdplan.executor.model.model import open_model
from ssdplan.executor.model.weights import Weights
from ssdplan.plans.errors import MismatchError
from tests import reference
from tests.executor.test_architectures import make
from tests.executor.test_families import compare, run_step, train_streamed
from tests.extent import FULL, examples, short_or_full
from tests.made.models import FAMILIES, OTHERS, make_model, make_tokenizer

CPU = torch.device("cpu")
APART = (*FAMILIES, "gpt_neox", "gptj", "gpt_neo", "olmo2", "cohere2", *({"gemma4"} & set(OTHERS)))
NOT_APART = ("bloom", *({"mamba"} & set(OTHERS)))
VOCAB, LENGTH = 97, 18


def shared(steps: int, rows: int = 2, seed: int = 0) -> list[list[MicroBatch]]:
    """Random micro-batches of rows that sequences of one token and more share; the windows of families are shorter than
    the longest."""
    generator = torch.Generator().manual_seed(seed)
    cuts = [[[9], [1, 2, 17]], [[], [4, 5, 12]], [[8], [17]]]
    result = []
    for _ in range(steps):
        step = []
        for cut in cuts:
            ids = torch.randint(3, VOCAB, (rows, LENGTH), generator=generator)
            positions = torch.stack(
                [torch.cat([torch.arange(b - a) for a, b in itertools.pairwise([0, *row, LENGTH])]) for row in cut]
            )
            labels = ids.masked_fill(positions == 0, -100)
            labels[1, 3] = -100
            step.append(MicroBatch(ids, labels, None, positions))
        result.append(step)
    return result


@pytest.mark.parametrize(
    "family",
    [family for family in APART if FULL or family not in ("qwen2", "phi3", "gemma2", "gptj", "olmo2", "gpt_neox")],
)
def test_training_equals_plain_pytorch_on_each_sequence_alone(tmp_path: Path, family: str) -> None:
    path = make_model(family, tmp_path / "model", layers=4 if family == "gemma3" else 3)
    compare(path, shared(short_or_full(2, 4)), torch.float32, 5e-6, 1e-3, head_chunks=(7,))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_so_does_a_head_that_takes_all_at_once(tmp_path: Path, family: str) -> None:
    path = make_model(family, tmp_path / "model")
    compare(path, shared(3), torch.float32, 5e-6, 1e-3)


@pytest.mark.parametrize("family", NOT_APART)
def test_a_family_that_cannot_keep_sequences_apart_is_refused(tmp_path: Path, family: str) -> None:
    model = open_model(make_model(family, tmp_path / "model"), torch.float32)
    assert not model.keeps_apart(LENGTH)
    with pytest.raises(MismatchError, match=r"cannot keep texts apart .* --no-pack, or with --attend-across"):
        Layers(model, CPU).begin_step(0, shared(1)[0])


@pytest.mark.parametrize("family", short_or_full(["llama", "falcon", *({"opt"} & {*FAMILIES})], [*FAMILIES, "falcon"]))
def test_what_is_found_in_fp32_is_found_in_bf16(tmp_path: Path, family: str) -> None:
    path = make_model(family, tmp_path / "model")
    found = [open_model(path, dtype).anatomy.isolation.keeps_apart for dtype in (torch.float32, torch.bfloat16)]
    assert found[0] == found[1]
    assert found[0] == (None if family == "falcon" else "mask" if family == "opt" else "positions")  # alibi here


def test_a_falcon_that_rotates_is_kept_apart_by_a_mask(tmp_path: Path) -> None:
    path = make_model("falcon", tmp_path / "model", alibi=False)
    assert open_model(path, torch.float32).anatomy.isolation.keeps_apart == "mask"
    compare(path, shared(3), torch.float32, 5e-6, 1e-3, head_chunks=(7,))


MASKS = {  # of which kind: windows of some layers in a mask for each kind of them; masks that are added to scores
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4,
             "dropout": 0.0, "attention_dropout": 0.0},
    "rembert": {"is_decoder": True, "input_embedding_size": 32, "output_embedding_size": 32, "type_vocab_size": 1,
                "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("family", MASKS)
def test_masks_that_transformers_makes_keep_apart(tmp_path: Path, family: str) -> None:
    path = make(family, tmp_path / "model", **MASKS[family])
    model = open_model(path, torch.float32)
    assert model.anatomy.isolation.keeps_apart == "masks" and model.keeps_apart(LENGTH)
    if family == "xglm":  # its own code knows no float64, which tells noise from gradients
        expected, _ = reference.train(path, shared(2), reference.AdamW())
        assert train_streamed(model, shared(2), reference.AdamW(), CPU, 7)[0] == pytest.approx(expected, rel=5e-6)
    else:
        compare(path, shared(2), torch.float32, 5e-6, 1e-3, head_chunks=(7,))


@pytest.mark.parametrize(
    ("family", "why", "fields"),
    [
        ("mpt", "ALiBi", {"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}),
        ("roberta", "counts positions", {"is_decoder": True, "type_vocab_size": 1}),
        ("big_bird", "in blocks", {"is_decoder": True, "block_size": 4}),
    ],
)
def test_biases_along_a_row_positions_that_padding_moves_and_blocks_are_left_alone(
    tmp_path: Path, family: str, why: str, fields: dict[str, Any]
) -> None:
    model = open_model(make(family, tmp_path / "model", **fields), torch.float32)
    assert model.anatomy.isolation.keeps_apart is None
    with pytest.raises(MismatchError, match=f"--attend-across.* \\(.*{why}"):
        model.require_apart(LENGTH)


def test_long_rotary_scaling_is_exact_only_as_far_as_its_short_form_reaches(tmp_path: Path) -> None:
    """Beyond, one long sequence changes how short ones in its micro-batch are rotated."""
    half = [1.0] * 4
    rope = {"rope_type": "longrope", "short_factor": half, "long_factor": [4.0] * 4, "rope_theta": 1e4, "factor": 2.0}
    path = make_model(
        "phi3", tmp_path / "model", rope_parameters=rope, original_max_position_embeddings=16,
        max_position_embeddings=64, partial_rotary_factor=1.0,
    )  # fmt: skip
    model = open_model(path, torch.float32)
    assert model.keeps_apart(16) and not model.keeps_apart(17)


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("home")
    make_model("mistral", path / "model", vocab=320)
    make_tokenizer(path / "model")
    return path


def on_torch(batch: Batch) -> MicroBatch:
    return MicroBatch(
        *(None if a is None else torch.from_numpy(a) for a in (batch.input_ids, batch.labels, batch.attention_mask)),
        None if batch.position_ids is None else torch.from_numpy(batch.position_ids),
    )


def gradients(path: Path, batches: list[MicroBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """A step's loss and gradients by streamed layers."""
    model = open_model(path, torch.float32)
    layers, weights = Layers(model, CPU, head_chunk_tokens=5), Weights(model)
    masters = [torch.zeros(state.elements) for state in model.states]
    for index, master in enumerate(masters):
        weights.read(index, master)
        master.grad = torch.zeros_like(master)
    run_step(layers, model, 0, batches, masters)
    return layers.end_step(), {
        tensor.name: master.grad[tensor.offset : tensor.offset + tensor.elements].view(tensor.shape)
        for state, master in zip(model.states, masters, strict=True)
        for tensor in state.tensors
    }


def plain(path: Path, sequences: list[tuple[list[int], list[bool]]]) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by the whole model on each sequence (tokens, and which are learnt) by itself: the oracle."""
    model = reference.load(path).train()
    batches = []
    for ids, learnt in sequences:
        tokens = torch.tensor([ids])
        batches.append(MicroBatch(tokens, tokens.masked_fill(~torch.tensor([learnt]), -100)))
    loss = reference.step_loss(model, batches, backward=True)
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def same(got: tuple[float, dict[str, torch.Tensor]], want: tuple[float, dict[str, torch.Tensor]]) -> bool:
    close = [
        torch.linalg.vector_norm(got[1][name] - grad) <= 1e-4 * torch.linalg.vector_norm(grad)
        for name, grad in want[1].items()
    ]
    return got[0] == pytest.approx(want[0], rel=5e-6) and all(close)


def test_packed_texts_are_the_texts_one_by_one(home: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(home / "model")
    texts = [
        "What is stored",
        "a",
        "The quick brown fox jumps over the lazy dog.",
        "is read again.",
        "und",
        "x y z",
    ] * 2
    data = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    stream = [(token, n) for n, text in enumerate(texts) for token in [*tokenizer(text)["input_ids"], 0]]
    pieces = []
    for start in range(0, len(stream) - LENGTH + 1, LENGTH):
        for _, group in itertools.groupby(stream[start : start + LENGTH], key=lambda pair: pair[1]):
            ids = [token for token, _ in group]
            pieces.append((ids, [True] * len(ids)))
    want = plain(home / "model", pieces)

    def step(*, attend_across: bool) -> tuple[float, dict[str, torch.Tensor]]:
        samples = TextData(data, tokenizer, sequence_length=LENGTH, attend_across=attend_across)
        assert samples.has_borders
        return gradients(home / "model", [on_torch(b) for bs in samples.eval_batches(1) for b in bs])

    assert same(step(attend_across=False), want)
    assert not same(step(attend_across=True), want)


@pytest.mark.parametrize("pack", [True, False])
def test_packed_or_padded_completions_are_the_completions_one_by_one(home: Path, tmp_path: Path, pack: bool) -> None:
    """Of very different lengths, over several micro-batches; what is padded counts nowhere."""
    tokenizer = load_tokenizer(home / "model")
    rows = [
        {"prompt": prompt, "completion": " " + completion}
        for prompt, completion in [
            ("The quick", "brown fox"), ("What", "is read again"), ("a", "b"), ("over the lazy", "dog."), ("x", "y z"),
            ("The quick brown fox jumps over the lazy", "dog, and what is stored is read again and again"),
        ]
    ]  # fmt: skip
    sequences = []
    for row in rows:
        given = tokenizer(row["prompt"])["input_ids"]
        whole = [*tokenizer(row["prompt"] + row["completion"])["input_ids"], tokenizer.eos_token_id]
        assert whole[: len(given)] == given
        sequences.append((whole, [i >= len(given) for i in range(len(whole))]))
    length = max(len(ids) for ids, _ in sequences) - 2
    sequences = [(ids[:length], learnt[:length]) for ids, learnt in sequences]
    samples = TextData(write(tmp_path / "a.jsonl", rows), tokenizer, sequence_length=length, pack=pack)
    assert samples.cut == 1 and samples.left_out == 0
    batches = [on_torch(batch) for batch in next(samples.eval_batches(2, micro_batches=3))]
    assert any(batch.position_ids is not None for batch in batches) == pack
    assert same(gradients(home / "model", batches), plain(home / "model", sequences))


# Which tokens share a row

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=40)


def bounds(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    ends = np.cumsum(lengths)
    return ends - lengths, ends


def covered(rows: EndToEnd | OneARow | WholeSamples) -> list[list[int]]:
    return [[i for start, stop in rows.segments(row) for i in range(start, stop)] for row in range(rows.count)]


@given(lengths=LENGTHS, length=st.integers(2, 15))
def test_laid_end_to_end_rows_are_the_stream_cut(lengths: list[int], length: int) -> None:
    starts, stops = bounds(lengths)
    rows = EndToEnd(starts, stops, length)
    total = sum(lengths)
    assert covered(rows) == [list(range(i, i + length)) for i in range(0, total - length + 1, length)]
    borders = set(stops.tolist())
    for row in range(rows.count):
        segments = rows.segments(row)
        inner = {stop for _, stop in segments[:-1]}
        assert inner == borders & set(range(segments[0][0] + 1, segments[-1][1]))


@given(lengths=LENGTHS, length=st.integers(2, 15), chosen=st.randoms(use_true_random=False))
def test_whole_samples_are_each_in_one_row_and_rows_hold_them(lengths, length, chosen) -> None:
    starts, stops = bounds(lengths)
    kept = np.array(sorted(chosen.sample(range(len(lengths)), k=chosen.randint(1, len(lengths)))))
    rows = WholeSamples(starts[kept], stops[kept], length)
    assert all(len(row) <= length for row in covered(rows))
    found = sorted(segment for row in range(rows.count) for segment in rows.segments(row))
    assert found == [(int(starts[k]), int(min(stops[k], starts[k] + length))) for k in kept]
    assert covered(OneARow(starts, stops, length)) == [
        list(range(start, min(start + length, stop))) for start, stop in zip(starts, stops, strict=True)
    ]


@settings(max_examples=examples(60), deadline=None)
@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=7))
def test_no_more_rows_than_best_fit_is_proven_to_take(lengths: list[int]) -> None:
    """Eleven ninths of the fewest rows possible, and two thirds of one (Dosa, 2007), found by trying all."""

    def fewest(left: tuple[int, ...], rows: tuple[int, ...]) -> int:
        if not left:
            return len(rows)
        options = {(*rows[:i], room - left[0], *rows[i + 1 :]) for i, room in enumerate(rows) if room >= left[0]}
        options.add((*rows, 10 - left[0]))
        return min(fewest(left[1:], option) for option in options)

    assert WholeSamples(*bounds(lengths), 10).count <= 11 / 9 * fewest(tuple(lengths), ()) + 6 / 9
