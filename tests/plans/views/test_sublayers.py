"""What a person sees of a profile's sub-layers and rungs: the tables, the picture and the table for other programs."""

import re
import statistics
from pathlib import Path

import pytest

from ssdplan import cli
from ssdplan.plans.analysis.frames import sublayers_frame
from ssdplan.plans.documents.profile import Model, Profile, SubLayer
from ssdplan.plans.errors import UsageError
from ssdplan.plans.views.plots.sublayers_plot import draw_sublayers
from ssdplan.plans.views.profile_text import describe_profile
from ssdplan.plans.views.sublayers_text import MOST_SUBLAYERS
from tests.made.profiles import made_machine, made_model, made_profile, with_frozen
from tests.plans.read_csv import read_csv

LINK = 4e9
SUBLAYERS = (
    ("norm", 8_000_000, 0.002),  # 4 GB/s
    ("attention", 1_000_000, 0.001),  # 1 GB/s
    ("after attention", 0, 0.003),
    ("up", 2_000_000, 0.001),  # 2 GB/s
    ("act", 3_000_000, 0.001),  # 3 GB/s
    ("$mul$", 60_000_000, 0.001),  # 60 GB/s
)
THROUGHPUTS = [4e9, 1e9, 2e9, 3e9, 60e9]


def with_sublayers(model: Model, sublayers: tuple[tuple[str, int, float], ...] = SUBLAYERS) -> Model:
    """The same at every micro-batch size, of blocks; a micro-batch of b rows saves b times as much."""

    def measured(size: int) -> tuple[SubLayer, ...]:
        return tuple(
            SubLayer(name=name, saved_bytes=size * saved, forward_seconds=seconds, samples=9)
            for name, saved, seconds in sublayers
        )

    classes = tuple(
        entry.model_copy(
            update={
                "timings": tuple(
                    timing.model_copy(update={"sublayers": measured(timing.micro_batch_size)})
                    for timing in entry.timings
                )
            }
        )
        if entry.name == "block"
        else entry
        for entry in model.classes
    )
    return model.model_copy(update={"classes": classes})


def profile_of(model: Model | None = None, **machine: object) -> Profile:
    """By default one micro-batch size, and rungs that keep a tenth and all, and leave half and none."""
    model = model or with_sublayers(made_model(micro_batch_sizes=(1,), rungs=((0.1, 0.5), (1.0, 0.0))))
    return made_profile(machine=made_machine(**{"link": LINK, "d2h": 5e9, **machine}), model=model)


def lines_of(page: str, heading: str) -> list[str]:
    """The lines below a heading, each as words."""
    found = re.search(rf"^{heading}.*?\n(.*?)(\n\n|\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, page
    return [" ".join(line.split()) for line in found[1].splitlines()]


def test_sub_layers_are_shown_in_order_with_the_fence_and_the_slower_way_of_the_link() -> None:
    lines = lines_of(describe_profile(profile_of()), "Sub-layers of block, a micro-batch of 1 row")
    assert [line.split()[0] for line in lines[1:8]] == ["norm", "attention", "after", "up", "act", "$mul$", "all"]
    assert lines[1] == "norm 7.63 MiB 2 ms 4 GB/s" and lines[3] == "after attention - 3 ms -"
    assert lines[6] == "$mul$ 57.2 MiB 1 ms 60 GB/s outlier" and lines[7] == "all 70.6 MiB 9 ms"
    # Of 1, 2, 3, 4 and 60 GB/s the quartiles are 2 and 4.
    low, _, high = statistics.quantiles(THROUGHPUTS, n=4, method="inclusive")
    assert (low, high, high + 1.5 * (high - low)) == (2e9, 4e9, 7e9)
    words = " ".join(lines[8:])
    assert "medians of 9 rounds" in words
    assert "The fence, Q3 + 1.5 IQR, is at 7 GB/s; the slower way of the link moves 4 GB/s" in words
    assert words.endswith("PyAO's rule recomputes 1 outlier, 57.2 MiB, and keeps the rest.")


def test_where_the_link_is_faster_nothing_is_an_outlier() -> None:
    lines = lines_of(describe_profile(profile_of(link=7e10, d2h=7e10)), "Sub-layers of block")
    assert "outlier" not in " ".join(lines[:8])
    assert " ".join(lines).endswith("none lies above both, so PyAO's rule keeps all of them.")


def test_rungs_are_shown_with_what_is_left_of_the_recomputation() -> None:
    """A made block's backward is three forwards, one of which is the recomputation."""
    profile = profile_of()
    timing = profile.model.timing("block", 1)
    forward = f"{1e6 * timing.forward_seconds:.3g} us" if timing.forward_seconds < 1e-3 else None
    lines = lines_of(describe_profile(profile), "Rungs of block, a micro-batch of 1 row")
    assert forward and lines[1].startswith(f"nothing - - {forward} ") and lines[1].endswith(" 100%")
    assert lines[2].startswith("rung-1 13.6 KiB 10% ") and lines[2].endswith(" 50%")
    assert lines[3].startswith("rung-2 136 KiB 100% ") and lines[3].endswith(" 0%")
    assert " ".join(lines[4:]).startswith("of all: of the 136 KiB that autograd would keep.")
    assert "counted as one forward" in " ".join(lines)


def test_tables_are_of_the_largest_micro_batches() -> None:
    page = describe_profile(profile_of(with_sublayers(made_model(micro_batch_sizes=(1, 4), rungs=((1.0, 0.0),)))))
    assert lines_of(page, "Sub-layers of block, a micro-batch of 4 rows")[1] == "norm 30.5 MiB 2 ms 16 GB/s"


def test_a_long_list_of_sub_layers_is_cut() -> None:
    many = tuple((f"expert.{number}", 1000, 0.001) for number in range(100))
    lines = lines_of(describe_profile(profile_of(with_sublayers(made_model(), many))), "Sub-layers of block")
    assert lines[MOST_SUBLAYERS].startswith("expert.63") and "and 36 more, which --csv FILE writes" in lines


def test_a_profile_without_rungs_says_what_a_new_one_could_bring() -> None:
    """A forward is a quarter of a made block's time. Blocks below all that is trained recompute nothing."""
    profile = profile_of(made_model())
    page = describe_profile(profile)
    (line,) = lines_of(page, "Blocks without rungs")[:1]
    assert line.startswith("block: backward recomputes all of its forward") and "Sub-layers of" not in page
    assert "up to about 25% of its time" in " ".join(lines_of(page, "Blocks without rungs"))
    assert "Blocks without rungs" not in describe_profile(profile_of())
    noted = profile.model_copy(update={"notes": ("block: its code cannot be traced, so it is recomputed",)})
    assert "Blocks without rungs" not in describe_profile(noted)
    guess = profile.model_copy(update={"model": profile.model.model_copy(update={"figures": "estimated"})})
    assert "Blocks without rungs" not in describe_profile(guess)
    only_head = with_frozen(made_model(), (1, 1, 1, 1, 1, 0))
    assert "Blocks without rungs" not in describe_profile(profile_of(only_head))


def test_the_picture_has_a_bar_for_each_sub_layer_and_two_lines() -> None:
    figure = draw_sublayers(profile_of())
    (axes,) = figure.axes
    bars = {round(bar.get_x() + bar.get_width() / 2): bar for bar in axes.patches}
    heights = [bars[number].get_height() for number in range(len(SUBLAYERS))]
    assert heights == pytest.approx([4, 1, 0, 2, 3, 60])
    levels = [line.get_ydata()[0] for line in axes.lines]
    assert levels == pytest.approx([7, 4])
    colours = [bars[number].get_facecolor() for number in range(len(SUBLAYERS))]
    assert len(set(colours)) == 2 and colours.count(colours[5]) == 1
    assert [label.get_text() for label in axes.get_xticklabels()][-1] == r"\$mul\$"
    figure.draw_without_rendering()  # a name that is no formula raises nothing


def test_the_table_has_every_sub_layer_at_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = profile_of(with_sublayers(made_model(micro_batch_sizes=(1, 2))))
    profile.save(tmp_path / "profile.json")
    asked = ["--plots", str(tmp_path / "plots"), "--csv", str(tmp_path / "table.csv")]
    assert cli.main(["show", str(tmp_path / "profile.json"), *asked]) == 0
    printed, told = capsys.readouterr()
    assert printed.rstrip() == describe_profile(profile).rstrip() and told.count("written to ") == 2
    assert (tmp_path / "plots" / "sublayers.png").read_bytes().startswith(b"\x89PNG")
    rows = read_csv(tmp_path / "table.csv")
    assert [(row["micro_batch_size"], row["name"]) for row in rows] == [
        (size, name) for size in "12" for name, _, _ in SUBLAYERS
    ]
    assert {(row["layer_class"], row["bandwidth"]) for row in rows} == {("block", "4000000000.0")}
    assert [float(row["throughput"]) for row in rows if int(row["saved_bytes"])] == pytest.approx(
        [size * each for size in (1, 2) for each in THROUGHPUTS]
    )
    assert [row["outlier"] for row in rows] == ([*["False"] * 5, "True"]) * 2
    assert {row["fence"] for row in rows} == {"7000000000.0", "14000000000.0"}
    assert len(sublayers_frame(profile)) == len(rows)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (["--plots", "plots"], "--plots is of sub-layers, and this profile has none; profile again"),
        (["--csv", "table.csv"], "--csv is of sub-layers, and this profile has none; profile again"),
        (["--html", "page.html"], "a profile has no page and no trace; give them a plan"),
        (["--trace", "trace.json"], "a profile has no page and no trace; give them a plan"),
    ],
)
def test_what_a_profile_has_not_is_refused(
    asked: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made_profile().save(tmp_path / "profile.json")
    assert cli.main(["show", "profile.json", *asked]) == UsageError.exit_code
    printed, told = capsys.readouterr()
    assert (
        f"profile.json: {why}" in told
        and not printed
        and [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    )
