"""A plan or profile that was damaged is refused with one line that names the field."""

import errno
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.errors import DiskFullError, UsageError
from ssdplan.plans.units import format_bytes, format_enough, format_seconds, format_there, parse_bytes
from tests.made.profiles import made_profile


def test_a_profile_survives_a_round_trip(tmp_path):
    profile = made_profile(tied=True)
    profile.save(tmp_path / "profile.json")
    again = Profile.load(tmp_path / "profile.json")
    assert again == profile and again.sha256() == profile.sha256()
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p["machine"].pop("cores"), "machine.cores: this field is missing"),
        (lambda p: p["machine"].update(coers=3), "machine.coers: unknown key; did you mean cores?"),
        (lambda p: p["machine"].update(cores=0), "machine.cores = 0"),
        (lambda p: p["machine"].update(update_rate=float("nan")), "machine.update_rate"),
        (
            lambda p: p["model"]["states"][0].update(elements=100),
            "model.states.0: elements = 100 is not a multiple of",
        ),
        (lambda p: p["model"]["layers"][0].update(states=[99]), "a state that does not exist"),
        (lambda p: p.update(schema="ssdplan.plan/1"), "this is a plan, not a profile; ssdplan run"),
        (lambda p: p.update(schema="ssdplan.sweep/1"), "this is a sweep, not a profile"),
        (lambda p: p.update(schema="ssdplan.profile/0"), "schema = 'ssdplan.profile/0'"),
        (lambda p: p.update(schema=["ssdplan.plan/1"]), "schema = ['ssdplan.plan/1']"),
        (lambda p: p["machine"].update(cores=True), "machine.cores = True"),
        (lambda p: p["machine"].update(cores="10"), "machine.cores = '10'"),
        (lambda p: p["machine"].update(cores=2.0), "machine.cores = 2.0"),
        (lambda p: p["model"].update(name=7), "model.name = 7"),
    ],
)
def test_a_damaged_profile_is_refused(tmp_path, damage, message):
    raw = json.loads(made_profile().text())
    damage(raw)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(UsageError) as caught:
        Profile.load(path)
    assert message in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"schema": 3}', "\x00"])
def test_what_is_no_document_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="plan"):
        Plan.load(path)


SIZES = {
    "8GiB": 8 << 30,
    "64G": 68_719_476_736,
    "64g": 68_719_476_736,
    "64 GiB": 68_719_476_736,
    "64GB": 64_000_000_000,
    " 64 gb ": 64_000_000_000,
    "2.5 GB": 2_500_000_000,
    "1.5T": 1_649_267_441_664,
    "2TB": 2_000_000_000_000,
    "512MiB": 512 << 20,
    "512M": 512 << 20,
    "7K": 7168,
    "1kb": 1000,
    "4096B": 4096,
    "9007199254740993B": 9_007_199_254_740_993,
}


def test_sizes_are_read_and_written():
    assert {text: parse_bytes(text) for text in SIZES} == SIZES
    for bad in ("", "GiB", "-1GiB", "8Gig", "8 G B", "1e9", "1e9B", "nanGiB", "infGiB", "٣GiB", "0", "0GiB", "0.1B",
                "1048576TiB", "9" * 5000 + "GiB", "8GiB,8GiB"):  # fmt: skip
        with pytest.raises(UsageError):
            parse_bytes(bad)
    for bare in ("64", "4096", "1.5", "68719476736"):
        with pytest.raises(UsageError, match=f"'{bare}' has no unit; write {bare}GiB, .* in bytes, {bare}B"):
            parse_bytes(bare)
    assert [parse_bytes(nothing, 0) for nothing in ("0", "0.0", "0B", "0GiB")] == [0] * 4
    assert [format_bytes(n) for n in (0, 4096, 3 << 29, 900 << 20)] == ["0 B", "4 KiB", "1.5 GiB", "900 MiB"]
    assert [format_seconds(s) for s in (0.25, 12.34, 245, 3723)] == ["250 ms", "12.3 s", "4:05", "1:02:03"]
    assert format_seconds(0.9996) == "1 s"


ROUNDED = {
    1023: ("1023 B", "1023 B", "1023 B"),
    (1 << 20) - 1: ("1 MiB", "1023 KiB", "1 MiB"),
    16101 << 10: ("15.7 MiB", "15.7 MiB", "15.8 MiB"),
    1 << 30: ("1 GiB", "1 GiB", "1 GiB"),
    (1 << 30) + 1: ("1 GiB", "1 GiB", "1.01 GiB"),
    (1 << 40) - 1: ("1 TiB", "1023 GiB", "1 TiB"),
    3 << 40: ("3 TiB", "3 TiB", "3 TiB"),
    128 << 30: ("128 GiB", "128 GiB", "128 GiB"),
    1234 << 20: ("1.21 GiB", "1.2 GiB", "1.21 GiB"),
}
"""Nearest, down and up."""


def test_a_size_has_one_form_however_it_is_rounded():
    found = {nbytes: (format_bytes(nbytes), format_there(nbytes), format_enough(nbytes)) for nbytes in ROUNDED}
    assert found == ROUNDED


@given(st.integers(1, 1 << 59))
def test_a_rounded_size_is_never_on_the_wrong_side(nbytes):
    """And nothing is rounded by more than a hundredth, or has a number of 1024 below the largest unit."""
    down, near, up = format_there(nbytes), format_bytes(nbytes), format_enough(nbytes)
    least, nearest, most = map(parse_bytes, (down, near, up))
    assert 0.99 * nbytes <= least <= nbytes <= most <= 1.01 * nbytes + 1 and nearest in (least, most)
    assert all(float(text.split()[0]) < 1024 or text.endswith("TiB") for text in (down, near, up))
    assert format_enough(nbytes + 1) != down


@pytest.mark.parametrize(
    ("field", "twice"), [("cores", '"cores": 7, "cores": '), ("schema", '"schema": "ssdplan.plan/1", "schema": ')]
)
def test_a_key_that_is_named_twice_is_refused(tmp_path, field, twice):
    """Of two values nobody knows which an editor meant; JSON's reader would take the last."""
    path = tmp_path / "profile.json"
    text = made_profile().text()
    assert f'"{field}": ' in text
    path.write_text(text.replace(f'"{field}": ', twice, 1))
    with pytest.raises(UsageError, match=f"profile.json: not a profile: {field} is named twice"):
        Profile.load(path)


def test_a_full_disk_is_an_error_of_its_own(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ssdplan.plans.documents.base.write_whole", full)
    with pytest.raises(DiskFullError, match=r"profile\.json: cannot write: no space left"):
        made_profile().save(tmp_path / "profile.json")
