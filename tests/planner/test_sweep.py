"""Sweeps of names and of lists: the values, what each changes, and how a table, a file and a picture show them."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ssdplan import cli
from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.planner.sweep import first_meant, parse_values, sweep
from ssdplan.plans.documents.sweep import result_of
from ssdplan.plans.errors import UsageError
from ssdplan.plans.views.plots.sweep_plot import draw_sweep
from ssdplan.plans.views.sweep_text import describe_sweep
from tests.made.profiles import GIB

SOURCE = WhatIf(
    model="smollm2-135m",
    gpu="rtx-4090",
    ssds=["samsung-990-pro"],
    host_memory_bytes=GIB,
    sequence_length=256,
    micro_batch_sizes=(1,),
)


def test_values_are_numbers_or_names() -> None:
    assert parse_values("sequence-length=1024..4096").values == (1024, 2048, 4096)
    assert parse_values("host-memory=64GiB, 32GiB").values == (64 * GIB, 32 * GIB)
    assert parse_values("GPU=rtx-4090,RTX 3090").values == ("rtx-4090", "RTX 3090")
    for wrong in ("gpu", "gpu=", "gpu=a,,b", "gpu=a,b,a", "ssds=1,2,1", "ssds=1,2.5", "host-memory=1GiB,2",
                  "gpu=" + ",".join(map(str, range(33)))):  # fmt: skip
        with pytest.raises(UsageError):
            parse_values(wrong)


@pytest.mark.parametrize(
    ("swept", "changed"),
    [
        ("gpu=rtx-3090", {"gpu": "rtx-3090"}),
        ("ssd=samsung-980-pro:1TB*2", {"ssds": ["samsung-980-pro:1TB*2"]}),
        ("cpu=epyc-7302", {"cpu": "epyc-7302"}),
        ("link=pcie-3.0-x16", {"link": "pcie-3.0-x16"}),
        ("model=gpt2", {"model": "gpt2"}),
        ("sequence-length=512,1024", {"sequence_length": 512}),
        ("gpu=no-such,rtx-3090", {"gpu": "rtx-3090"}),
    ],
)
def test_a_value_is_the_what_if_of_that_name(swept: str, changed: dict[str, object]) -> None:
    assert first_meant(SOURCE, parse_values(swept)) == estimate(replace(SOURCE, **changed))


def test_a_network_takes_the_place_of_the_one_between_the_same() -> None:
    from ssdplan.planner.catalogue.ranks import Ranks

    several = replace(SOURCE, gpu="rtx-3090", several=Ranks(4, 2), networks=["10gbe", "nvlink-3090"])
    found = first_meant(several, parse_values("network=100gbe"))
    assert found == estimate(replace(several, networks=["nvlink-3090", "100gbe"]))


def test_names_are_rows_and_bars() -> None:
    """Each row is what `solve` finds; one that the catalogue lacks has its error as its row."""
    request = SolveRequest(host_memory_bytes=GIB, micro_batches=1)
    found = sweep(SOURCE, request, parse_values("gpu=rtx-3090,no-such,none"), lambda part, what: None)
    first, lacking, last = found.points
    assert [point.label for point in found.points] == ["rtx-3090", "no-such", "none"]
    assert all(point.value is None for point in found.points) and found.title == "smollm2-135m"
    assert lacking.result is None and "no GPU (or none) 'no-such'" in lacking.refusal
    for point, unified in ((first, False), (last, True)):
        asked = replace(request, unified_memory=unified)
        profile = estimate(replace(SOURCE, gpu=point.label))
        assert point.result == result_of(solve(profile, asked, told="step"))
    (axes,) = draw_sweep(found).axes
    assert [bar.get_height() for bar in axes.patches] == [
        point.result.tokens_per_second for point in (first, last) if point.result
    ]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["rtx-3090", "no-such", "none"]
    assert all(len(line) <= 100 for line in describe_sweep(found).splitlines())


def test_what_a_sweep_names_need_not_be_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [
        "solve",
        "--model",
        "smollm2-135m",
        "--ssd",
        "samsung-990-pro",
        "--host-memory",
        "1GiB",
        "--micro-batches",
    ]
    command += ["1", "--sequence-length", "256", "--micro-batch-sizes", "1", "--sweep"]
    assert cli.main([*command, "gpu=rtx-9999,rtx-3090", "--csv", "s.csv"]) == 0
    assert capsys.readouterr().out.startswith("smollm2-135m, by gpu\n")
    lines = list(csv.DictReader((tmp_path / "s.csv").open()))
    assert [(line["label"], line["value"]) for line in lines] == [("rtx-9999", ""), ("rtx-3090", "")]
    assert cli.main([*command, "ssds=1,2"]) == UsageError.exit_code
    assert "also needs --gpu" in capsys.readouterr().err


@pytest.mark.parametrize("models", ["./nothing,gpt2", "gpt2,./nothing", "nothing,gpt2", "nothing,./nothing,gpt2"])
def test_a_model_that_is_none_is_a_row_wherever_it_stands(
    models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["solve", "--gpu", "rtx-4090", "--ssd", "samsung-990-pro", "--host-memory", "8GiB"]
    command += ["--micro-batches", "1"]
    command += ["--sequence-length", "256", "--micro-batch-sizes", "1", "--json", "--sweep"]
    assert cli.main([*command, f"model={models}"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["label"] for point in points] == models.split(",")
    for point in points:
        lacking = {"./nothing": "cannot read it", "nothing": "no model 'nothing'"}.get(point["label"], "")
        assert lacking in (point["refusal"] or "") and (point["result"] is None) == bool(lacking)
    nothing = models.replace("gpt2", "/nothing")
    assert cli.main([*command, f"model={nothing}"]) == UsageError.exit_code
    assert "nothing" in capsys.readouterr().err
