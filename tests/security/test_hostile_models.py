"""Model directories that came from somebody else: what a library would wait for, build or fail on is refused first."""

import json
import mmap
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ssdplan.commands import configuration, run
from ssdplan.executor.data.reading.model_config import read_config
from ssdplan.executor.data.tokens import vocabulary_of
from ssdplan.executor.model.directory.export import TensorEntry, export_model
from ssdplan.executor.model.model import open_model
from ssdplan.native.process import growing_at_most
from ssdplan.plans.errors import MismatchError, SsdplanError, UsageError
from tests.made.models import make_model, make_tokenizer

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model("llama", tmp_path_factory.mktemp("made") / "model", layers=2)
    make_tokenizer(path)
    return path


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


@pytest.fixture(autouse=True)
def in_bounded_time() -> Iterator[None]:
    """What hangs is ended by a signal, which no test expects."""
    signal.alarm(60)
    yield
    signal.alarm(0)


def says(model: Path, **fields: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("rms_norm_eps", float("nan"), "is nan, which is no finite number"),
        ("rms_norm_eps", float("inf"), "is inf, which is no finite number"),
        ("rms_norm_eps", {"__float__": "NaN"}, "is nan, which is no finite number"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": float("-inf")}, "rope_theta is -inf"),
        ("num_hidden_layers", 10**8, "is 100000000, and a model has at most 4,096"),
        ("hidden_size", 10**12, "is 1000000000000, and a model has at most 262,144"),
        ("hidden_size", 0, "is 0, and a model has at least 1"),
        ("num_attention_heads", 0, "is 0, and a model has at least 1"),
        ("num_key_value_heads", -2, "is -2, and a model has at least 1"),
        ("num_hidden_layers", 0, "is 0, and a model has at least 1"),
        ("intermediate_size", -1, "is -1, and no size is below 0"),
        ("vocab_size", 10**9, "and a model has at most 4,194,304"),
        ("intermediate_size", 10**9, "and a model has at most 262,144"),
        ("num_attention_heads", 10**30, "and a model has at most"),
        ("max_position_embeddings", 10**12, "and a model has at most 268,435,456"),
        ("text_config", {"deeper": [{"num_layers": 10**8}]}, "num_layers is 100000000"),
    ],
)
def test_numbers_that_no_model_has_are_refused_before_it_is_built(model, field, value, why):
    says(model, **{field: value})
    for read in (lambda: open_model(model, torch.float32), lambda: vocabulary_of(model)):
        with pytest.raises(UsageError, match=r"config.json: ") as error:
            read()
        assert field.startswith(("rope", "text")) or f": {field} is" in str(error.value)
        assert why in str(error.value)


def test_numbers_that_models_have_are_taken(tmp_path):
    """Those of the longest, widest and strangest that were published, and an infinity that Mamba's have."""
    file = tmp_path / "config.json"
    config = {
        "time_step_limit": [0.0, float("inf")],
        "max_position_embeddings": 10_485_760,
        "rope_theta": 3.6e9,
        "vocab_size": 262_208,
        "intermediate_size": 81_920,
        "hidden_size_per_layer_input": 0,
        "sliding_window": -1,
        "max_window_layers": 70,
        "model_max_length": 10**30,
        "use_cache": True,
    }
    file.write_text(json.dumps(config))
    assert read_config(file) == config


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [DEEP, "[]", '"x"', "{", "\ufeff{}", "\\", "9" * 5000])
def test_a_document_that_is_none_is_named(model, name, content):
    (model / name).write_text(content)
    if name != "config.json":
        (model / "model.safetensors").unlink()
    with pytest.raises(SsdplanError, match=rf"{name}: not a") as error:
        open_model(model, torch.float32)
    assert error.value.exit_code == (2 if name == "config.json" else 8)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer_config.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "endless", "socket"])
def test_what_is_no_regular_file_is_named_and_not_opened(model, name, kind):
    (model / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(model / name)
    elif kind == "endless":
        (model / name).symlink_to("/dev/zero")
    else:
        (model / name).symlink_to("/dev/null")
    with pytest.raises(UsageError, match=rf"{name}: is not a regular file"):
        open_model(model, torch.float32)


def test_a_directory_is_no_configuration_nor_is_a_large_file(model):
    (model / "config.json").rename(model / "kept")
    (model / "config.json").mkdir()
    with pytest.raises(UsageError, match=r"config.json: is a directory, not a model configuration"):
        open_model(model, torch.float32)
    (model / "config.json").rmdir()
    with (model / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # a hole
    with pytest.raises(UsageError, match=r"config.json: larger than 64 MiB, so not a model configuration"):
        open_model(model, torch.float32)


def test_an_export_reads_its_models_configuration_within_bounds(model, tmp_path):
    (model / "config.json").write_text(DEEP)
    entries = [TensorEntry("w", (2,), torch.float32)]
    with pytest.raises(UsageError, match=r"config.json: not a model configuration"):
        export_model(tmp_path / "to", source=model, entries=entries, tensors=iter([("w", torch.ones(2))]))


def test_a_model_whose_logits_are_no_numbers_is_refused(model):
    """By a route that no look at the configuration finds: the root of a negative number."""
    says(model, rms_norm_eps=-1e9)
    with pytest.raises(MismatchError, match="cannot be streamed exactly"):
        open_model(model, torch.float32)


@pytest.mark.parametrize(
    ("field", "value", "kind", "why"),
    [
        ("num_hidden_layers", "three", UsageError, "'num_hidden_layers' expected int, got str (value: 'three'); copy"),
        ("hidden_size", [1, 2], UsageError, "'hidden_size' expected int, got list (value: [1, 2]); copy"),
        ("num_attention_heads", 5, MismatchError, "(32) is not a multiple of the number of attention heads (5); copy"),
    ],
)
def test_a_value_that_the_library_refuses_is_named(model, field, value, kind, why):
    """One that is of another kind is wrong itself; values that do not go together are a mismatch."""
    says(model, **{field: value})
    with pytest.raises(kind, match=r"config.json: ") as error:
        open_model(model, torch.float32)
    assert why in str(error.value) and "\n" not in str(error.value)


def test_a_long_value_is_cut(model):
    says(model, num_hidden_layers="x" * 100_000)
    with pytest.raises(UsageError, match=r"'num_hidden_layers' expected int, got str \(value: 'xxx") as error:
        open_model(model, torch.float32)
    assert len(str(error.value)) < 1000


def test_what_is_no_number_is_named_as_that(model):
    """0 to a power is 0 or, of a negative one, infinite: so are the frequencies, and sine and cosine are NaN."""
    says(model, rope_parameters={"rope_type": "default", "rope_theta": 0})
    with pytest.raises(
        MismatchError,
        match=r"the argument position_embeddings of its layer 0 holds NaN, and its buffer model.rotary_emb.inv_freq is "
        r"not finite; look at the values in its config.json",
    ):
        open_model(model, torch.float32)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hidden_act": "foo"}, "hidden_act is 'foo', which transformers does not know; copy the model's own again"),
        ({"rope_parameters": {"rope_type": "zork"}}, "rope_type is 'zork', which transformers does not know"),
        ({"dtype": "float7"}, "dtype is 'float7', which transformers does not know"),
        ({"head_dim": 0}, "head_dim is 0, and transformers cannot build that (0.0 cannot be raised"),
    ],
)
def test_a_value_that_the_library_fails_for_is_named(model, fields, why):
    says(model, **fields)
    with pytest.raises(MismatchError) as error:
        open_model(model, torch.float32)
    assert str(error.value).startswith(f"{model / 'config.json'}: {why}")


def test_what_a_library_raises_for_a_configuration_is_an_error_of_ours(model, monkeypatch):
    """Whatever it is: here what older ones raise for no head, when `data preview` reads the size of the vocabulary."""
    says(model, n_inner=0)

    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("integer modulo by zero")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fail)
    with pytest.raises(UsageError, match=r"json: n_inner is 0, and transformers cannot build that \(integer m"):
        vocabulary_of(model)


def test_a_number_of_thousands_of_digits_is_refused_in_words_of_ours(model):
    text = (model / "config.json").read_text().rstrip().removesuffix("}")
    (model / "config.json").write_text(f'{text}, "more": {"1" * 6000}}}')
    with pytest.raises(UsageError, match=r"configuration \(a number in it has more than 4,300 digits\)$"):
        open_model(model, torch.float32)


def test_what_a_model_builds_is_bounded(tmp_path):
    """GPT-Neo's causal masks grow with the square of the positions: here 16 TiB each."""
    make_model("gpt_neo", tmp_path / "model")
    says(tmp_path / "model", max_position_embeddings=1 << 22)
    with pytest.raises(MismatchError, match="cannot be built"):
        open_model(tmp_path / "model", torch.float32)


def test_growth_is_bounded_within_the_block_alone():
    with growing_at_most(64 << 20), pytest.raises(OSError, match="Cannot allocate memory"):
        mmap.mmap(-1, 128 << 20)  # a bytearray may lie in what an earlier test gave back
    mmap.mmap(-1, 128 << 20).close()


@pytest.mark.parametrize("text", ["a: &x [1]\nb: *x\n", "a: " + "[" * 30_000, "a: !!python/object:os.system x\n"])
def test_a_configuration_is_no_bomb(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"run.yaml:\d"):
        configuration.read_configuration(tmp_path / "run.yaml", run.command())


def test_a_configuration_is_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(UsageError, match=r"run.yaml: is not a regular file"):
        configuration.read_configuration(tmp_path / "run.yaml", run.command())
