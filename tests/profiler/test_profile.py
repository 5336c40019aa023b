"""A whole profile, of made parts and of tiny real models: what a planner reads is true and can be read back."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from transformers import AutoModelForCausalLM

from ssdplan.commands.profile import command
from ssdplan.executor.device.device import open_device
from ssdplan.executor.model.layers import Layers, MicroBatch
from ssdplan.executor.model.model import open_model
from ssdplan.executor.model.weights import Weights
from ssdplan.executor.store.volumes import Blank
from ssdplan.plans.documents.profile import Profile, logits_chunk_tokens
from ssdplan.plans.errors import DiskFullError, MismatchError, UsageError
from ssdplan.profiler import contention, layer_bench, storage
from ssdplan.profiler import profile as profiling
from ssdplan.profiler.profile import ProfileLimits, profile, state_classes
from ssdplan.profiler.storage import MIB
from tests import brief
from tests.made.models import make_model
from tests.profiler.made import MadeDevice, MadeLayers, MadeMicroBatch, MadeModel, MadeWeights

QUICK = ProfileLimits.within(0.5)


def silent(fraction: float, what: str) -> None:
    pass


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long compute and a drive are measured beside each other, test_contention.py is about."""
    monkeypatch.setattr(contention, "SHORTEST_WINDOW_SECONDS", brief.WINDOW_SECONDS)


@pytest.fixture
def grown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process grows by, test_model.py is about; a real model takes long for it."""
    for name in ("GROWING_ROUNDS", "GROWING_RUNS"):
        monkeypatch.setattr(layer_bench, name, 1)


@pytest.mark.usefixtures("grown_once")
@pytest.mark.parametrize(
    ("family", "tied", "dtype"), [("llama", True, torch.bfloat16), ("gemma3", False, torch.float32)]
)
def test_a_tiny_real_model(tmp_path: Path, family: str, tied: bool, dtype: torch.dtype) -> None:
    directory = make_model(family, tmp_path / "model", layers=4, tied=tied)
    (tmp_path / "volume").mkdir()
    model, device = open_model(directory, dtype), open_device("cpu")
    told: list[float] = []
    found = profile(
        model,
        lambda chunk: Layers(model, device.torch_device, head_chunk_tokens=chunk),
        MicroBatch,
        Weights(model),
        device,
        [tmp_path / "volume"],
        sequence_length=12,
        micro_batch_sizes=[1, 2],
        progress=lambda fraction, what: told.append(fraction),
        limits=QUICK,
    )
    assert told == sorted(told) and told[0] == 0.0 and told[-1] == pytest.approx(1.0)
    assert not list((tmp_path / "volume").iterdir())
    found.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == found

    plain = AutoModelForCausalLM.from_pretrained(directory)
    assert found.model.parameters == sum(parameter.numel() for parameter in plain.parameters())
    assert found.model.precision == {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    assert (found.model.name, found.model.fingerprint) == (model.name, model.fingerprint)
    assert found.model.path == str(directory), "absolute, so that a plan finds it from anywhere"
    assert [layer.name for layer in found.model.layers] == [layer.name for layer in model.layers]
    assert {state.name: state.state_class for state in found.model.states} == (
        {"tied": "tied", "head": "head", **{f"block.{i}": "block" for i in range(4)}}
        if tied
        else {
            "embedding": "embedding",
            "head": "head",
            **{f"block.{i}": f"block.{i % 2}" for i in range(4)},  # windows alternate
        }
    )
    assert found.model.head_chunk_tokens == logits_chunk_tokens(97) and found.model.workspace_margin == 0
    assert found.machine.compute_shares_cpu and found.machine.device == "cpu"
    beside = found.machine.compute_beside_updates, found.machine.updates_beside_compute
    assert all(kept is not None and 0 < kept <= 1 for kept in beside)
    for entry in found.model.classes:
        for timing in entry.timings:
            assert 0 < timing.forward_seconds < 5 and 0 < timing.backward_seconds < 5
            assert timing.forward_workspace_bytes > 0 and timing.backward_workspace_bytes > 0
    # At least the ids, the labels and the mask; the model's own masks and rotary tables come on top.
    assert all(found.model.context_bytes[size] >= size * 12 * 3 * 8 for size in (1, 2))
    block = found.model.classes[1].timings
    # A block keeps at least the inputs of its linear layers, and exactly twice as much for twice the rows.
    tokens, element = 12, dtype.itemsize
    assert block[0].saved_activation_bytes > 4 * tokens * model.hidden_size * element
    assert block[1].saved_activation_bytes == pytest.approx(2 * block[0].saved_activation_bytes, rel=0.02)


def made_profile(
    volumes: list[Path],
    sizes: list[int] | None = None,
    sequence_length: int = 8,
    model: MadeModel | None = None,
    chunks: list[int | None] | None = None,
    endurance: tuple[int, ...] = (),
    local_ranks: int = 1,
    blanks: dict[Path, Blank | None] | None = None,
) -> Profile:
    """`chunks` gets what the layers are made with."""
    layers = MadeLayers(model or MadeModel())

    def make_layers(chunk: int | None) -> MadeLayers:
        if chunks is not None:
            chunks.append(chunk)
        return layers

    return profile(
        layers.model,
        make_layers,
        MadeMicroBatch,
        MadeWeights(),
        MadeDevice(h2d=800e9, d2h=400e9),
        volumes,
        sequence_length=sequence_length,
        micro_batch_sizes=[1] if sizes is None else sizes,
        progress=silent,
        blanks=blanks or {},
        endurance=endurance,
        limits=QUICK,
        local_ranks=local_ranks,
    )


def test_ranks_of_one_machine_share_the_room_and_the_rating_of_a_directory(tmp_path: Path) -> None:
    (alone,), (shared,) = (
        made_profile([tmp_path], endurance=(1000,), local_ranks=ranks).machine.volumes for ranks in (1, 4)
    )
    assert (alone.endurance_bytes, shared.endurance_bytes) == (1000, 250)
    assert shared.free_bytes == pytest.approx(alone.free_bytes / 4, rel=0.1)


def test_two_volumes_on_one_file_system_are_noted(tmp_path: Path) -> None:
    volumes = [tmp_path / "a", tmp_path / "b"]
    for volume in volumes:
        volume.mkdir()
    found = made_profile(volumes, endurance=(6 * 10**14, 10**15))
    assert [volume.endurance_bytes for volume in found.machine.volumes] == [6 * 10**14, 10**15]
    assert [volume.path for volume in found.machine.volumes] == [str(volume) for volume in volumes]
    assert any("are on one file system" in note for note in found.notes)
    assert found.model.parameters == 3 * 2 * 32 * 48 + 32 + 50 * 32
    assert found.machine.device_name == "made device" and found.machine.device_memory_bytes == 1 << 30


def test_drives_are_measured_where_the_store_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All over what its share of the store takes, and on the blank volume that is there."""
    asked: dict[str, list[tuple[Any, Any]]] = {"measure_volume": [], "measure_contention": []}

    def telling(name: str) -> Callable[..., Any]:
        measured = getattr(profiling, name)

        def tell(*given: Any, **options: Any) -> Any:
            asked[name].append((options["blank"], options["reach"]))
            return measured(*given, **options)

        return tell

    for name in asked:
        monkeypatch.setattr(profiling, name, telling(name))
    monkeypatch.setattr(profiling, "MOST_WRITTEN", 1)
    path = tmp_path / "file"
    path.write_bytes(bytes(72 * MIB))
    blank, model = Blank(path, 8192, 72 * MIB), MadeModel()
    (tmp_path / "a").mkdir()
    found = made_profile([tmp_path / "a", path], model=model, blanks={tmp_path / "a": None, path: blank})
    elements = sum(state.elements for state in model.states)
    share = elements * (model.dtype.itemsize + 12) // 2
    for each in asked.values():
        assert each == [(None, share), (blank, share)]
    assert any("file: measured on the blank volume file" in note for note in found.notes)
    assert any("are on one file system" in note for note in found.notes)


def test_what_is_measured_is_the_chunk_that_is_written_down(tmp_path: Path) -> None:
    cut: list[int | None] = []
    found = made_profile([tmp_path], model=MadeModel(vocab_size=128256), chunks=cut)
    assert cut == [found.model.head_chunk_tokens] == [1024]
    assert not any("position-wise" in note for note in found.notes)
    whole: list[int | None] = []
    found = made_profile([tmp_path], model=MadeModel(head_is_position_wise=False), chunks=whole)
    assert whole == [found.model.head_chunk_tokens] == [None]
    assert any("made: its head is not position-wise, so all logits" in note for note in found.notes)


def test_the_command_tells_the_usual_time_of_all_measurements() -> None:
    shown = command().get_help(click.Context(command()))
    told = re.search(r"\[(\d+), and (\d+) for each further volume\]", " ".join(shown.split()))
    assert told is not None
    usual = ProfileLimits()
    assert [int(number) for number in told.groups()] == [usual.in_all(1), usual.in_all(2) - usual.in_all(1)]


@pytest.mark.parametrize("volumes", [1, 2, 5])
def test_seconds_are_of_all_measurements_together(volumes: int) -> None:
    given = ProfileLimits.within(20, volumes=volumes)
    assert given.in_all(volumes) == pytest.approx(20)
    assert given.volume_seconds / given.model_seconds == pytest.approx(1 / 3)
    assert ProfileLimits.within(ProfileLimits().in_all(volumes), volumes=volumes) == ProfileLimits()


def test_classes_of_states() -> None:
    assert state_classes(MadeModel()) == ["block.0", "block.1", "block.0", "head", "tied"]
    untied = MadeModel()
    head = replace(untied.layers[-1], states=(3,))
    assert state_classes(replace(untied, layers=(*untied.layers[:-1], head)))[-2:] == ["head", "embedding"]


def test_arguments_that_cannot_be_meant(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no volume"):
        made_profile([])
    with pytest.raises(UsageError, match="named twice"):
        made_profile([tmp_path, tmp_path / "."])
    for sizes in ([], [0, 1], [2, 2]):
        with pytest.raises(UsageError, match="micro-batch sizes"):
            made_profile([tmp_path], sizes=sizes)
    with pytest.raises(UsageError, match="2 endurances for 1 volumes"):
        made_profile([tmp_path], endurance=(1, 2))
    with pytest.raises(UsageError, match="sequence length 1"):
        made_profile([tmp_path], sequence_length=1)


def test_a_full_volume_ends_it_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "free_bytes", lambda directory: 1 << 20)
    with pytest.raises(DiskFullError):
        made_profile([tmp_path])


def test_a_sequence_longer_than_the_model_takes(tmp_path: Path) -> None:
    model, device = open_model(make_model("gpt2", tmp_path / "model"), torch.float32), open_device("cpu")
    assert model.max_sequence_length is not None
    with pytest.raises(MismatchError, match=f"takes {model.max_sequence_length}"):
        profile(
            model,
            lambda chunk: Layers(model, device.torch_device, head_chunk_tokens=chunk),
            MicroBatch,
            Weights(model),
            device,
            [tmp_path],
            sequence_length=model.max_sequence_length + 1,
            micro_batch_sizes=[1],
            progress=lambda fraction, what: pytest.fail("it is known before anything is measured"),
            limits=QUICK,
        )


@pytest.mark.usefixtures("grown_once")
def test_a_model_that_is_frozen_in_part(tmp_path: Path) -> None:
    """Frozen blocks are a class of their own, by whether they run backward; what each class costs is measured so."""
    freeze = ("model.layers.[01].*", "model.layers.3.*", "model.embed_tokens.*", "model.layers.4.mlp.*")
    directory = make_model("llama", tmp_path / "model", layers=6)
    model, device = open_model(directory, torch.float32, freeze=freeze), open_device("cpu")
    found = profile(
        model,
        lambda chunk: Layers(model, device.torch_device, head_chunk_tokens=chunk),
        MicroBatch,
        Weights(model),
        device,
        [tmp_path],
        sequence_length=12,
        micro_batch_sizes=[1],
        progress=silent,
        limits=QUICK,
    ).model
    assert found.freeze == freeze and found.first_trained == 3
    assert [layer.layer_class for layer in found.layers[1:-1]] == [
        "block.frozen", "block.frozen", "block", "block.frozen", "block.partly", "block"
    ]  # fmt: skip
    assert {state.name: (state.state_class, state.frozen) for state in found.states} == {
        "embedding.frozen": ("embedding.forward", True),
        "block.0.frozen": ("block.forward", True),
        "block.1.frozen": ("block.forward", True),
        "block.2": ("block", False),
        "block.3.frozen": ("block.frozen", True),
        "block.4": ("block.partly", False),
        "block.4.frozen": ("block.partly.frozen", True),
        "block.5": ("block", False),
        "head": ("head", False),
    }
    assert found.timing("embedding", 1).backward_seconds == 0
    assert all(found.timing(name, 1).backward_seconds > 0 for name in ("block", "block.frozen", "block.partly", "head"))
