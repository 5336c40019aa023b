"""`ssdplan train` without its processes: its options, what it chooses, and what is still valid."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ssdplan import cli
from ssdplan.commands import profile, run, solve
from ssdplan.commands.resolved import words_of
from ssdplan.commands.train import choosing, command, entry, saying
from ssdplan.commands.train.choosing import Data
from ssdplan.commands.train.options import CHOSEN, COMMANDS, LEFT_OUT, takes
from ssdplan.commands.train.validity import Wanted, why_stale
from ssdplan.native.process import host_memory
from ssdplan.plans.analysis.memory_usage import snapshot_bytes
from ssdplan.plans.documents.profile import Network, Profile
from ssdplan.plans.errors import UsageError
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import format_bytes
from ssdplan.plans.views.quantities import decimal
from ssdplan.plans.views.screen import describe_briefly
from ssdplan.profiler.processor import cores, cpu_name
from tests.made.decisions import decide
from tests.made.plans import planned
from tests.made.profiles import made_machine, made_model, made_volume

NETWORK = Network(ranks=2, gather_bandwidth=1e9, exchange_bandwidth=1e9, add_rate=1e10)
THREE = {"profile": profile.command(), "solve": solve.command(), "run": run.command()}


def test_every_option_of_the_three_commands_is_there_or_is_left_out_with_a_reason() -> None:
    own = {param.name: param for param in command().params}
    for name in COMMANDS:
        there = {param.name for param in THREE[name].params}
        assert LEFT_OUT[name].keys() <= there, "what is left out, there is"
        assert there - LEFT_OUT[name].keys() <= own.keys()
        assert takes(name).keys() == there - LEFT_OUT[name].keys()
        for param in THREE[name].params:
            mine = own.get(param.name)
            if isinstance(param, click.Option) and param.name not in LEFT_OUT[name] and param.name != "model":
                assert isinstance(mine, click.Option) and (mine.opts, mine.secondary_opts) == (
                    param.opts,
                    param.secondary_opts,
                )
    assert own.keys() - {"configuration", "from_profile"} == set().union(*map(takes, COMMANDS))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("train", "train needs --model, --data, --out"),
        ("train --model m --data d", "train needs --out"),
        ("train --steps 3 --epochs 2", "argument --epochs: not allowed with argument --steps"),
        ("train --epochs 2 --steps 3", "argument --steps: not allowed with argument --epochs"),
        ("train plan.json", "plan.json: a configuration ends in .yaml or .yml"),
        ("run --epochs 1 --steps 3", "argument --steps: not allowed with argument --epochs"),
    ],
)
def test_what_lacks_or_contradicts_itself_is_refused(arguments: str, says: str) -> None:
    said = CliRunner().invoke(cli.make_command_line(), arguments.split())
    assert said.exit_code == 2 and says in said.stderr, said.stderr


def test_a_configuration_has_the_options_of_all_three(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: m\ndata: none.jsonl\nout: run\nhost-memory: 1GiB\nlr: 1e-5\nsteps: 3\n")
    said = CliRunner().invoke(cli.make_command_line(), ["train", str(tmp_path / "a.yaml"), "--epochs", "2"])
    assert said.exit_code == 2 and "none.jsonl" in said.stderr, said.stderr  # the first that is looked for
    (tmp_path / "b.yaml").write_text("sweep: host-memory=1GiB..2GiB\n")
    said = CliRunner().invoke(cli.make_command_line(), ["train", str(tmp_path / "b.yaml")])
    assert "b.yaml:1: sweep: unknown key" in said.stderr


def test_help_says_what_train_takes_where_nobody_says() -> None:
    """And not what the three commands take: train chooses."""
    shown = {option.name: option for section in command().sections for option in section.options}
    with command().make_context("train", [], resilient_parsing=True) as context:
        for name, words in CHOSEN.items():
            _, about = shown[name].get_help_record(context) or ("", "")
            assert about.endswith(f" [{words}]") and about.count("[") == 1, about


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"global_batch": 128},
            "a step takes 128, so no step is a part of an epoch; give --global-batch 4, or",
        ),
        ({"global_batch": 51, "eval_samples": 30}, "has 50 row(s) to train on, and a step takes 51"),
        ({"micro_batches": 30}, "a step takes 60, so"),
        ({"micro_batches": 20, "ranks": 2}, "give --global-batch 4 in the place of --micro-batches, or"),
        ({"micro_batch_size": 59, "schedule": "single"}, "in the place of --schedule --micro-batch-size, or"),
        ({"global_batch": 58}, ""),
        ({"micro_batches": 29}, ""),
        ({"global_batch": 128, "steps": 3}, ""),
    ],
)
def test_a_step_of_more_rows_than_an_epoch_is_refused_before_anything_is_measured(
    given: dict[str, Any], says: str
) -> None:
    data = Data("completion", 218, 3000, 60, 58, 64, 64, "")
    given = {"data": "rows.jsonl", **given}
    least = entry._least_batch(given, given, (2, 4))
    if says:
        with pytest.raises(UsageError) as refused:
            entry._require_rows(given, data, least)
        assert says in str(refused.value)
    else:
        entry._require_rows(given, data, least)


def test_the_batch_is_chosen_of_rows_that_are_not_held_out() -> None:
    data = Data("completion", 200, 3000, 60, 64, 64, 64, "")
    assert entry._batch({"data": "rows.jsonl"}, data)[0] == {"global_batch": 8}
    assert entry._batch({"data": "rows.jsonl", "eval_split": 0.2}, data)[0] == {"global_batch": 4}
    assert choosing.sizes_to_measure(None, 1, most=3) == (1, 2) and choosing.sizes_to_measure(None, 1, most=0) == (1,)


def test_what_is_in_the_way_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    words = ["train", "--model", str(tmp_path), "--data", str(tmp_path), "--out", str(tmp_path / "run")]
    said = CliRunner().invoke(cli.make_command_line(), words)
    assert said.exit_code == 2 and "exists already and is not an empty directory" in said.stderr


VALUES: dict[str, dict[str, Any]] = {
    "profile": {
        "model": "/a b",
        "micro_batch_sizes": (1, 3),
        "freeze": ["*.mlp.*", "x"],
        "endurance": [600 * 10**12],
        "volume": [Path("/v one"), Path("/w")],
        "allow_unused_weights": True,
    },
    "solve": {
        "profile": Path("/p.json"),
        "host_memory": 6291457,
        "max_ssd_write_per_step": 0,
        "residency": {"parameters": 0.1, "optimizer": 1 / 3},
        "delay_ratio": 0.3,
        "quiet": True,
    },
    "run": {
        "plan": Path("/p.json"),
        "pack": False,
        "lr": 3e-5,
        "warmup_steps": 0.03,
        "epochs": 1.5,
        "tensorboard": True,
        "eval_data": "",
    },
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_words_for_a_command_say_the_same_values(name: str) -> None:
    made = THREE[name]
    assert made.given(made.parse(words_of(made, VALUES[name]))) == VALUES[name]


@given(
    st.sampled_from(["text", "messages"]),
    st.integers(1, 10**9),
    st.integers(1, 5000),
    st.sampled_from([16, 64, 100, 128, 1000, 1024]),
)
def test_rows_are_as_long_as_the_data_want_and_the_model_takes(
    format: str, tokens: int, longest: int, most: int
) -> None:
    data = Data(format, 10, tokens, longest, 10, most, most, "")
    length = choosing.row_length(data)
    assert min(128, most) <= length <= most and (length.bit_count() == 1 or length == most)
    if format == "messages":
        assert length >= longest or length == most
        assert length == min(128, most) or length == most or length < 2 * longest
    elif length > min(128, most):
        assert tokens >= choosing.FEWEST_ROWS * length or length == most


@given(st.integers(0, 10**6), st.sampled_from([None, 1, 3, 4]), st.integers(1, 4))
def test_a_batch_leaves_enough_steps_an_epoch(rows: int, size: int | None, ranks: int) -> None:
    batch = choosing.rows_a_step(rows, micro_batch_size=size, ranks=ranks)
    assert batch % ((size or 1) * ranks) == 0 and 1 <= batch <= 32
    assert batch == (size or 1) * ranks or rows >= choosing.STEPS_AN_EPOCH * batch
    sizes = choosing.sizes_to_measure(batch, ranks)
    assert all((batch // ranks) % each == 0 for each in sizes)


def test_the_gpu_is_taken_where_the_driver_has_one_and_torch_can(tmp_path: Path) -> None:
    assert choosing.device_here(tmp_path / "none", "2.9.0+cu128") == "cpu"
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert choosing.device_here(tmp_path / "gpus", "2.9.0+cu128") == "cuda"
    assert choosing.device_here(tmp_path / "gpus", "2.9.0") == "cuda"
    assert choosing.device_here(tmp_path / "gpus", "2.9.0+cpu") == "cpu"


@pytest.fixture
def measured(tmp_path: Path) -> tuple[Profile, Wanted]:
    """A profile of this machine and a model that lies in a directory, and what is wanted of it: the same."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    machine = made_machine(shared=True, volumes=(made_volume(path=str(tmp_path)),)).model_copy(
        update={
            "name": cpu_name(),
            "cores": cores(),
            "host_memory_bytes": host_memory().total,
            "device": "cpu",
            "figures": "measured",
        }
    )
    shape = made_model().model_copy(update={"path": str(model), "figures": "measured"})
    found = Profile(created=datetime.now(UTC).isoformat(timespec="seconds"), machine=machine, model=shape)
    wanted = Wanted(
        model=model,
        sequence_length=shape.sequence_length,
        micro_batch_sizes=shape.micro_batch_sizes[:1],
        precision=shape.precision,
        freeze=(),
        allow_unused_weights=False,
        compression_error=False,
        muon=False,
        rows="any",
        device="cpu",
        volumes=(tmp_path / "run",),
        endurance=(),
        ranks=1,
    )
    return found, wanted


def test_a_profile_of_the_same_machine_model_and_drive_is_valid(measured: tuple[Profile, Wanted]) -> None:
    assert why_stale(*measured) == ""


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"sequence_length": 7}, "the row length is another"),
        ({"micro_batch_sizes": (1, 999)}, "it has no micro-batches of 999"),
        ({"precision": "fp16"}, "the precision is another"),
        ({"freeze": ("*.mlp.*",)}, "what is frozen is another"),
        ({"device": "cuda"}, "the device is another"),
        ({"ranks": 2}, "the number of ranks is another (1, now 2)"),
        ({"volumes": (Path("/proc"),)}, "it is of other drives"),
        ({"volumes": (Path("/"), Path("/"))}, "it is of other drives"),
        ({"endurance": (10**14,)}, "another rating"),
        ({"model": Path("/elsewhere")}, "the model is another"),
    ],
)
def test_another_wish_makes_a_profile_stale(
    measured: tuple[Profile, Wanted], changed: dict[str, Any], why: str
) -> None:
    from dataclasses import replace

    assert why in why_stale(measured[0], replace(measured[1], **changed))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"name": "another"}, "the processor is another (another, now "),
        ({"cores": 999}, "the number of cores is another (999, now "),
        ({"host_memory_bytes": 1 << 50}, "the host memory is another"),
        ({"figures": "estimated"}, "its figures are estimated"),
    ],
)
def test_another_machine_makes_a_profile_stale(
    measured: tuple[Profile, Wanted], changed: dict[str, Any], why: str
) -> None:
    found, wanted = measured
    machine = found.machine.model_copy(update=changed)
    assert why in why_stale(found.model_copy(update={"machine": machine}), wanted)


def test_a_model_that_was_written_since_makes_a_profile_stale(measured: tuple[Profile, Wanted]) -> None:
    found, wanted = measured
    later = time.time() + 60
    (wanted.model / "model.safetensors").write_bytes(b"")
    assert why_stale(found, wanted) == ""
    os.utime(wanted.model / "model.safetensors", (later, later))
    assert why_stale(found, wanted) == "model.safetensors changed since"


def test_what_a_plan_takes_names_a_snapshot_where_one_is_taken() -> None:
    """With what of the states does not live on ssd, which is all that a snapshot writes."""
    model = made_model(blocks=2, hidden=64)
    for share in (0.0, 0.5):
        decision = decide(model, optimizer=share)
        schedule = build_schedule(model, decision)
        plan = planned(model, made_machine(), decision, schedule)
        each = snapshot_bytes(schedule)
        assert (each > 0) == (share > 0)
        for taken in (each, None):
            said = saying.of_plan(plan, steps=10, store_bytes=1, snapshot_bytes=taken, exact=True)[-1]
            assert (f" and {format_bytes(each)} a snapshot" in said) == (taken is not None and each > 0), said
            assert f"{decimal(10 * plan.prediction.ssd_write_bytes)} in all steps" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_several_ranks_it_says_that_figures_are_of_each(ranks: int) -> None:
    model = made_model(blocks=2, hidden=64)
    decision = decide(model, optimizer=0.5, micro_batches=3, ranks=ranks)
    plan = planned(
        model, made_machine().model_copy(update={"network": NETWORK}), decision, build_schedule(model, decision)
    )
    said = saying.of_plan(plan, steps=10, store_bytes=1, snapshot_bytes=None, exact=True)
    each = "memory, the store and what is written are of each of the 2 ranks"
    assert (each in said) == (" on each of 2 ranks, " in said[0]) == (ranks == 2)
    assert "in 3 micro-batch(es) of " in said[0]
    brief = describe_briefly(plan, build_schedule(model, decision), "more")
    assert ("ranks               2; memory and ssd below are of each of them" in brief) == (ranks == 2)
    decision = decide(model, optimizer=1.0, parameters=1.0, checkpoints=1.0, micro_batches=3, ranks=ranks)
    plan = planned(
        model, made_machine().model_copy(update={"network": NETWORK}), decision, build_schedule(model, decision)
    )
    brief = describe_briefly(plan, build_schedule(model, decision), "more")
    assert not plan.prediction.ssd_bytes, "no line on ssd follows"
    assert ("ranks               2; memory below is of each of them" in brief) == (ranks == 2)
