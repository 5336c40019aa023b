"""The live line: an estimate that stays steady and comes true, words that fit, and a log that is not a line a step."""

import io
import random

import pytest

from ssdplan.plans.analysis.wear import share_of_rating
from ssdplan.plans.views import progress_line as progress
from ssdplan.plans.views.live_line import Pace, live_line
from ssdplan.plans.views.progress_line import ProgressLine
from tests.made.profiles import made_machine, made_volume


@pytest.mark.parametrize("begun", [0, 37])
def test_what_is_left_is_what_it_then_takes(begun):
    """Steps of about 10 s, an evaluation of 40 s after every tenth, a snapshot of 1 s after every fifth."""
    random.seed(7)
    now, pace = 1000.0, Pace(200, lambda: now)
    told = []
    for step in range(begun + 1, 201):
        seconds = random.uniform(9, 11) + (100.0 if step == 90 else 0.0)
        now += seconds
        told.append((step, now, pace.left(step, seconds)))
        now += (40.0 if step % 10 == 0 else 0.0) + (1.0 if step % 5 == 0 else 0.0)
    end = told[-1][1]
    for step, at, left in told[20:]:
        assert left == pytest.approx(end - at - (100 if step < 90 else 0), rel=0.12, abs=45), step
    before, after = (left for step, _, left in told if step in (89, 90))
    assert abs(before - after) < 45, "one slow step is no reason to expect others"
    assert told[-1][2] == 0.0 and pace.told == 200 - begun


def test_no_time_is_told_before_a_few_steps_are_known():
    """A first step of 30 s, in which libraries are warmed, and then steps of 0.1 s."""
    now, pace = 0.0, Pace(1000, lambda: now)
    told = []
    for step in range(1, 6):
        seconds = 30.0 if step == 1 else 0.1
        now += seconds
        told.append(pace.left(step, seconds))
    assert told[:2] == [None, None]
    assert told[2:] == [pytest.approx((1000 - step) * 0.1) for step in (3, 4, 5)]


def _line(**more: object) -> str:
    figures = {
        "step": 7, "steps": 90, "loss": 2.5, "skipped": False, "tokens_per_second": 1234.5, "learnt_share": 0.97,
        "left_seconds": 83.0, "written_bytes": 0, "machine": None,
    }  # fmt: skip
    return live_line(**{**figures, **more})  # type: ignore[arg-type]


def test_the_line_says_what_is_known_and_fits():
    assert _line() == "step 7/90  loss 2.5000  1,234 tokens/s  1:23 left"
    rated = made_volume().model_copy(update={"endurance_bytes": 600 * 10**12})
    machine = made_machine(volumes=(rated,))
    words = _line(written_bytes=3 * 10**12, machine=machine)
    assert words.endswith("  3 TB to ssd, 0.5% worn")
    assert _line(written_bytes=3 * 10**12, machine=made_machine()).endswith("  3 TB to ssd")
    assert "  skipped  " in _line(skipped=True, loss=float("nan"))
    longest = _line(
        step=99_999, steps=100_000, loss=12.3456, tokens_per_second=12345.0, left_seconds=9e5,
        written_bytes=123 * 10**12, machine=machine,
    )  # fmt: skip
    assert len(f"run: {longest}") <= 100
    assert "loss 1e+30" in _line(loss=1e30)
    assert _line(left_seconds=None) == "step 7/90  loss 2.5000  1,234 tokens/s"


def test_the_line_says_what_of_its_tokens_is_learnt():
    """238 tokens of the 1,024 positions of a step of chats."""
    assert _line(learnt_share=238 / 1024) == "step 7/90  loss 2.5000  1,234 tokens/s, 23.2% learnt  1:23 left"
    rated = made_volume().model_copy(update={"endurance_bytes": 600 * 10**12})
    longest = _line(
        step=99_999, steps=100_000, loss=12.3456, tokens_per_second=12345.0, left_seconds=9e5, learnt_share=0.2324,
        written_bytes=123 * 10**12, machine=made_machine(volumes=(rated,)),
    )  # fmt: skip
    assert len(f"run: {longest}") <= 100 and longest.endswith("123 TB to ssd") and "23.2% learnt" in longest


def test_the_share_of_a_rating_is_that_of_the_drive_that_is_worn_most():
    """A store is striped by the speed of reading and writing by turns: here two thirds and one third."""
    fast = made_volume(read=6e9, write=6e9).model_copy(update={"endurance_bytes": 900})
    slow = made_volume(read=3e9, write=3e9).model_copy(update={"endurance_bytes": 300})
    assert share_of_rating(made_machine(volumes=(fast, slow)), 90) == pytest.approx(max(60 / 900, 30 / 300))
    assert share_of_rating(made_machine(volumes=(fast, made_volume(read=3e9, write=3e9))), 90) == pytest.approx(
        60 / 900
    )
    assert share_of_rating(made_machine(), 90) is None


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_has_a_line_now_and_then_and_a_terminal_one_that_is_rewritten(monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    log, terminal = io.StringIO(), _Terminal()
    lines = [ProgressLine("run", stream) for stream in (log, terminal)]
    week, step = 7 * 86400, 0
    while now < week:
        now, step = now + 2.0, step + 1
        for line in lines:
            line.say(f"run: step {step}  " + "x" * 100, seldom=True)
    assert "\r" not in log.getvalue() and 9_000 < log.getvalue().count("\n") < 13_000
    log.truncate(0)
    lines[0].say("run: the last step")
    assert log.getvalue().endswith("run: the last step\n")
    assert "\n" not in terminal.getvalue()
    assert max(map(len, terminal.getvalue().split("\r"))) == 79, "a longer line could not be rewritten"
    lines[1].note("held-out loss after 3 steps: 2.0")
    assert terminal.getvalue().endswith("\rrun: held-out loss after 3 steps: 2.0\n")


def test_what_is_whole_is_said_once() -> None:
    """A reader of small files has all of one before it hands out the first sample."""
    log = io.StringIO()
    line = ProgressLine("data", log)
    for what in ("a.jsonl", "b.jsonl"):
        for fraction in (0.5, 1.0, 1.0, 1.0):
            line(fraction, what)
    line(0.5, "b.jsonl")
    line(1.0, "b.jsonl")
    assert [words for words in log.getvalue().splitlines() if "100%" in words] == [
        "data: 100% a.jsonl", "data: 100% b.jsonl", "data: 100% b.jsonl",
    ]  # fmt: skip
