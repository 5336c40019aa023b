"""What is exported is a model that transformers loads, equal bit for bit, or nothing at all."""

import errno
import json
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssdplan.executor.model.directory import export
from ssdplan.executor.model.directory.export import TensorEntry, copy_model, export_model
from ssdplan.executor.snapshots.export_run import export_run
from ssdplan.plans.documents.run import Run
from ssdplan.plans.errors import DiskFullError, IoFailure, UsageError
from tests import warm
from tests.made.models import make_model, make_tokenizer

Named = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(make_model("llama", tmp_path_factory.mktemp("source"), vocab=300))


def trained(source: Path, dtype: torch.dtype = torch.float32) -> Named:
    """Every tensor that the model saves, with values that the source does not have."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tied = model.config.tie_word_embeddings
    return [
        (name, (tensor + 1 / 3).to(dtype))
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    ]


def listed(tensors: Named) -> list[TensorEntry]:
    return [TensorEntry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """What safetensors itself reads in all shards."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            names = list(shard.keys())
            assert not found.keys() & names
            found |= {name: shard.get_tensor(name) for name in names}
    return found


def assert_same(found: dict[str, torch.Tensor], expected: Named) -> None:
    assert sorted(found) == sorted(name for name, _ in expected)
    for name, tensor in expected:
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_bytes", [export.MAX_SHARD_BYTES, 20_000, 1])
def test_transformers_loads_what_was_written(
    source: Path, tmp_path: Path, dtype: torch.dtype, shard_bytes: int
) -> None:
    tensors = trained(source, dtype)
    out = tmp_path / "not" / "there" / "yet"
    export_model(out, source=source, entries=listed(tensors), tensors=iter(tensors), max_shard_bytes=shard_bytes)
    assert_same(stored(out), tensors)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == dtype  # config.json says what the weights are
    assert_same({name: model.state_dict()[name] for name, _ in tensors}, tensors)
    text = "What is stored is read again."
    assert AutoTokenizer.from_pretrained(out)(text) == AutoTokenizer.from_pretrained(source)(text)
    assert os.listdir(out.parent) == ["yet"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_tied_tensor_is_written_once_and_loads_twice(tmp_path: Path, family: str) -> None:
    source = make_model(family, tmp_path / "source", tied=True)
    tensors = trained(source)
    export_model(tmp_path / "out", source=source, entries=listed(tensors), tensors=tensors)
    assert "lm_head.weight" not in stored(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert_same({name: model.state_dict()[name] for name, _ in tensors}, tensors)


def test_shards_are_named_and_indexed_as_hugging_face_does(source: Path, tmp_path: Path) -> None:
    tensors = trained(source)
    limit = 40_000
    export_model(tmp_path / "out", source=source, entries=listed(tensors), tensors=tensors, max_shard_bytes=limit)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {
        "total_parameters": sum(tensor.numel() for _, tensor in tensors),
        "total_size": sum(tensor.nbytes for _, tensor in tensors),
    }
    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as shard:
            names = list(shard.keys())
            assert {index["weight_map"][name] for name in names} == {file}
            sizes = [shard.get_tensor(name).nbytes for name in names]
            assert sum(sizes) <= limit or len(sizes) == 1
    assert sorted(index["weight_map"]) == sorted(name for name, _ in tensors)


def test_one_shard_is_a_file_of_the_documented_format_alone(source: Path, tmp_path: Path) -> None:
    tensors = trained(source, torch.bfloat16)
    export_model(tmp_path / "out", source=source, entries=listed(tensors), tensors=tensors)
    assert [file.name for file in (tmp_path / "out").glob("model*")] == ["model.safetensors"]
    content = (tmp_path / "out" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, tensor in tensors:
        start, end = header[name]["data_offsets"]
        assert header[name]["dtype"] == "BF16"
        assert header[name]["shape"] == list(tensor.shape)
        assert content[8 + length + start : 8 + length + end] == tensor.view(torch.uint8).numpy().tobytes()


def test_mixed_types_odd_shapes_and_views_keep_their_values_and_alignment(source: Path, tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors: Named = [
        ("byte", torch.arange(3, dtype=torch.uint8)),
        ("flag", torch.tensor([True, False, True])),
        ("scalar", torch.tensor(2.5, dtype=torch.float64)),
        ("none", torch.empty(0, 7)),
        ("half", torch.arange(5).to(torch.bfloat16)),
        ("transposed", base.t()),
        ("sliced", base[1:3, ::2]),
        ("learnt", torch.nn.Parameter(base + 1)),
        ("ünicode.名", torch.arange(9, dtype=torch.int64)),
        ("infinite", torch.tensor([float("inf"), -0.0, float("-inf")])),
    ]
    for folder, limit in (("one", export.MAX_SHARD_BYTES), ("many", 100)):
        export_model(tmp_path / folder, source=source, entries=listed(tensors), tensors=tensors, max_shard_bytes=limit)
        assert_same(stored(tmp_path / folder), tensors)
        for file in (tmp_path / folder).glob("*.safetensors"):
            content = file.read_bytes()
            (length,) = struct.unpack("<Q", content[:8])
            for name, place in json.loads(content[8 : 8 + length]).items():
                if name != "__metadata__":
                    assert place["data_offsets"][0] % dict(tensors)[name].element_size() == 0


def test_writes_larger_than_one_call_takes_are_whole(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_WRITE_BYTES", 1001)
    tensors = trained(source)
    export_model(tmp_path / "out", source=source, entries=listed(tensors), tensors=tensors)
    assert_same(stored(tmp_path / "out"), tensors)


def test_configuration_and_tokenizer_come_along_and_nothing_else(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    (copy / "optimizer.pt").write_text("not part of a model")
    config = json.loads((copy / "config.json").read_text())
    del config["dtype"]
    config |= {"torch_dtype": "float16", "text_config": {"dtype": "float16"}, "unknown_field": [1, 2]}
    (copy / "config.json").write_text(json.dumps(config))
    tensors = trained(source, torch.bfloat16)
    export_model(tmp_path / "out", source=copy, entries=listed(tensors), tensors=tensors)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}}
    copied = {"chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert set(os.listdir(tmp_path / "out")) == copied | {"config.json", "model.safetensors"}
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (copy / name).read_bytes()


def test_whatever_files_a_tokenizer_has_come_along(source: Path, tmp_path: Path) -> None:
    """The names are those that the tokenizers of transformers have, but for some that need a package to say so."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    names = {"chat_template.jinja", "additional_chat_templates/tool_use.jinja", "additional_chat_templates/rag.jinja"}
    for kind in set(TOKENIZER_MAPPING_NAMES.values()) - {None}:
        with suppress(ImportError, AttributeError):
            names |= set(getattr(transformers, kind).vocab_files_names.values())
    assert {"emoji.json", "sentencepiece.bpe.model"} < names
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    for name in names:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(name)
    (copy / "additional_chat_templates" / "notes.md").write_text("no template")
    tensors = trained(source)
    export_model(tmp_path / "out", source=copy, entries=listed(tensors), tensors=tensors)
    assert {name: (tmp_path / "out" / name).read_text() for name in names} == {name: name for name in names}
    assert not (tmp_path / "out" / "additional_chat_templates" / "notes.md").exists()
    copy_model(tmp_path / "again", tmp_path / "out")
    assert {name: (tmp_path / "again" / name).read_text() for name in names} == {name: name for name in names}


def test_the_finished_model_of_a_run_without_snapshots_is_copied_and_not_made_otherwise(tmp_path: Path) -> None:
    out = tmp_path / "run"
    (out / "model").mkdir(parents=True)
    (out / "model" / "config.json").write_text("{}")
    (out / "run.json").write_text(Run.model_validate({"schema": "ssdplan.run/1"}).text())
    for otherwise in ({"model": tmp_path}, {"volumes": [tmp_path]}):
        with pytest.raises(UsageError, match=r"kept no snapshots.*leave out --model and --volume"):
            export_run(out, tmp_path / "to", **otherwise)
    assert not (tmp_path / "to").exists() and export_run(out, tmp_path / "to") is None
    assert os.listdir(tmp_path / "to") == ["config.json"]


def test_a_model_is_its_owners_alone_whatever_the_umask(source: Path, tmp_path: Path) -> None:
    tensors = trained(source)
    before = os.umask(0)
    try:
        export_model(tmp_path / "out", source=source, entries=listed(tensors), tensors=tensors)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert modes == {0o600} and stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


def test_its_name_may_be_as_long_as_any(source: Path, tmp_path: Path) -> None:
    tensors = trained(source)
    export_model(tmp_path / ("m" * 255), source=source, entries=listed(tensors), tensors=tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["m" * 255]


# Nothing half-written


def test_only_a_new_or_empty_destination_is_written_to(source: Path, tmp_path: Path) -> None:
    tensors = trained(source)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("keep")
    (tmp_path / "file").write_text("keep")
    for name in ("used", "file"):
        with pytest.raises(UsageError, match=f"{name}: exists already"):
            export_model(tmp_path / name, source=source, entries=listed(tensors), tensors=tensors)
    assert (tmp_path / "used" / "mine").read_text() == (tmp_path / "file").read_text() == "keep"
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    export_model(tmp_path / "link", source=source, entries=listed(tensors), tensors=tensors)
    assert_same(stored(tmp_path / "empty"), tensors)
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "link", "used"]


@pytest.mark.parametrize("content", [None, "{"])
def test_a_source_without_a_configuration_is_refused(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "source").mkdir()
    if content is not None:
        (tmp_path / "source" / "config.json").write_text(content)
    tensors = [("a", torch.zeros(1))]
    with pytest.raises(UsageError, match=r"config\.json"):
        export_model(tmp_path / "out", source=tmp_path / "source", entries=listed(tensors), tensors=tensors)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("failure", [RuntimeError("the store is corrupt"), OSError(5, "EIO"), KeyboardInterrupt()])
@pytest.mark.parametrize("written", [0, 3])
def test_when_reading_fails_nothing_is_left_and_the_reason_is_kept(
    source: Path, tmp_path: Path, failure: BaseException, written: int
) -> None:
    tensors = trained(source)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors[:written]
        raise failure

    with pytest.raises(type(failure)) as raised:
        export_model(
            tmp_path / "out", source=source, entries=listed(tensors), tensors=failing(), max_shard_bytes=10_000
        )
    assert raised.value is failure
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("elements", [1, 7, 1 << 20])
def test_tensors_in_pieces_are_written_as_they_are_whole(source: Path, tmp_path: Path, elements: int) -> None:
    tensors = trained(source)[:6]
    held = torch.empty(elements)

    def pieces() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            for piece in tensor.view(-1).split(elements):
                held[: len(piece)] = piece
                yield name, held[: len(piece)]
                held.fill_(float("nan"))  # a piece may be gone when the next is asked for

    export_model(tmp_path / "out", source=source, entries=listed(tensors), tensors=pieces(), max_shard_bytes=20_000)
    assert_same(stored(tmp_path / "out"), tensors)


@pytest.mark.parametrize("change", ["fewer", "more", "order", "shape", "dtype", "longer", "shorter"])
def test_tensors_other_than_those_listed_are_a_broken_invariant(source: Path, tmp_path: Path, change: str) -> None:
    tensors = trained(source)
    name, first = tensors[0]
    given = {
        "fewer": tensors[:-1],
        "more": [*tensors, ("more", first)],
        "order": tensors[::-1],
        "shape": [(name, first.t()), *tensors[1:]],
        "dtype": [(name, first.half()), *tensors[1:]],
        "longer": [(name, first.view(-1)), (name, first.view(-1)[:3]), *tensors[1:]],
        "shorter": [(name, first.view(-1)[:-3]), *tensors[1:]],
    }[change]
    with pytest.raises(AssertionError):
        export_model(tmp_path / "out", source=source, entries=listed(tensors), tensors=given)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_too_small_is_known_before_anything_is_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = trained(source)

    def read(_: object) -> tuple[str, torch.Tensor]:
        raise AssertionError("read")

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(DiskFullError, match=r"takes \d+ bytes, 10 are free"):
        export_model(tmp_path / "out", source=source, entries=listed(tensors), tensors=map(read, tensors))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("number", "expected"), [(errno.ENOSPC, DiskFullError), (errno.EIO, IoFailure)])
@pytest.mark.parametrize("good_writes", [0, 5, 40])
def test_a_write_that_fails_leaves_nothing_behind(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    expected: type[Exception],
    good_writes: int,
) -> None:
    tensors = trained(source)
    write, calls = export._write, 0

    def failing(stream: FileIO, data: memoryview) -> None:
        nonlocal calls
        calls += 1
        if calls > good_writes:
            raise OSError(number, os.strerror(number))
        write(stream, data)

    monkeypatch.setattr(export, "_write", failing)
    with pytest.raises(expected):
        export_model(tmp_path / "out", source=source, entries=listed(tensors), tensors=tensors)
    assert calls == good_writes + 1
    assert os.listdir(tmp_path) == []


def test_what_a_full_device_says_is_understood(source: Path) -> None:
    tensors = trained(source)
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(DiskFullError), export._write_errors(Path("out")):
        export._write(full, tensors[0][1].view(torch.uint8).numpy().data)


def test_a_copy_takes_hardly_any_memory(source: Path, tmp_path: Path) -> None:
    """It is the end of a run, whose plan says what memory it takes at most."""
    done = warm.python(
        "import re, resource\n"
        "from pathlib import Path\n"
        "from ssdplan.executor.model.directory.export import copy_model\n"
        "mapped = int(re.search(r'VmData:\\s*([0-9]+)', Path('/proc/self/status').read_text())[1]) << 10\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (mapped + (8 << 20),) * 2)\n"
        f"copy_model(Path('copied'), Path({str(source)!r}))",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "copied" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
