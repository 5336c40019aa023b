"""What `ssdplan solve` writes, and what becomes of a plan that was there."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ssdplan import cli
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.errors import UsageError
from ssdplan.plans.units import format_bytes, parse_bytes
from ssdplan.plans.views.profile_text import suggested_host_memory
from tests.made.profiles import GIB, MIB, made_machine, made_model, made_profile, with_frozen


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "profile.json"
    made_profile(blocks=2, micro_batch_sizes=(1,)).save(path)
    return path


def invoked(*arguments: object, code: int = 0) -> str:
    """What a command that ends with this exit code writes to standard error."""
    said = CliRunner().invoke(cli.make_command_line(), list(map(str, arguments)), catch_exceptions=False)
    assert said.exit_code == code, said.stderr
    return said.stderr


def solve(*arguments: object, code: int = 0) -> str:
    return invoked("solve", "profile.json", *arguments, code=code)


def test_a_plan_that_is_replaced_is_named_and_kept(profile: Path) -> None:
    here = profile.parent
    told = solve("--host-memory", "512MiB", "--global-batch", 8)
    assert "replaced" not in told
    first = (here / "plan.json").read_bytes()
    told = solve("--host-memory", "512MiB", "--global-batch", 8)
    assert "replaced" not in told, "the same plan again"
    told = solve("--host-memory", "1GiB", "--global-batch", 4)
    said = "solve: replaced plan.json (made, 512 MiB, batch 8); the one before is plan-0.json\n"
    assert said in told
    second = (here / "plan.json").read_bytes()
    assert (here / "plan-0.json").read_bytes() == first != second
    told = solve("--host-memory", "256MiB", "--global-batch", 2)
    assert "replaced plan.json (made, 1 GiB, batch 4); the one before is plan-1.json" in told
    assert (here / "plan-1.json").read_bytes() == second and (here / "plan-0.json").read_bytes() == first
    decision = Plan.load(here / "plan.json").decision
    assert decision.micro_batch_size * decision.micro_batches == 2


def test_other_names_are_numbered_before_their_suffix(profile: Path) -> None:
    for name, kept in (("tight.plan.json", "tight.plan-0.json"), ("plan", "plan-0")):
        solve("--host-memory", "512MiB", "--global-batch", 8, "-o", name)
        before = Path(name).read_bytes()
        told = solve("--host-memory", "512MiB", "--global-batch", 2, "-o", name)
        assert Path(kept).read_bytes() == before
        assert f"the one before is {kept}" in told


def test_a_plan_of_another_version_is_kept_and_what_is_none_is_refused(profile: Path) -> None:
    Path("plan.json").write_text('{"schema": "ssdplan.plan/0"}')
    told = solve("--host-memory", "512MiB", "--global-batch", 2)
    assert "replaced plan.json (of another version, or edited)" in told
    assert Path("plan-0.json").read_text() == '{"schema": "ssdplan.plan/0"}'
    whole = profile.read_bytes()
    Path("notes.txt").write_text("mine")
    for name in ("profile.json", "notes.txt"):
        told = solve("--host-memory", "512MiB", "-o", name, code=UsageError.exit_code)
        assert f"{name}: exists and is not a plan" in told
    assert profile.read_bytes() == whole and Path("notes.txt").read_text() == "mine"
    Path("empty.json").touch()
    solve("--host-memory", "512MiB", "--global-batch", 2, "-o", "empty.json")
    assert Plan.load(Path("empty.json")) and not Path("empty-0.json").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--host-memory", "64"), "'64' has no unit; write 64GiB"),
        (("--host-memory", "0"), "'0' has no unit"),
        (("--host-memory", "nan"), "not a size|has no unit"),
        (("--host-memory", "-1GiB"), "not a size"),
        (("--host-memory", ""), "has no unit|not a size"),
        (("--host-memory", "9" * 400 + "GiB"), "out of range"),
        (("--device-memory", "128GiB"), "made GPU has 24 GiB"),
        (("--clip-grad-norm", "inf"), "out of range"),
        (("--delay-ratio", "nan"), "out of range"),
        (("--residency", "optimizer=1,optimizer=0"), "write "),
        (("--global-batch", "0"), "not a whole number"),
        (("--sweep", "host-memory=1..4"), "has no unit"),
        (("--sweep", "foo=4MiB..16MiB"), "cannot be swept; write NAME=FROM..TO.*known: .*host-memory"),
    ],
)
def test_sizes_and_numbers_that_mean_nothing_are_refused(arguments: tuple[str, ...], why: str, profile: Path) -> None:
    assert re.search(why, solve(*arguments, code=UsageError.exit_code))
    assert not Path("plan.json").exists()


def test_suffixes_mean_the_same_and_nothing_may_be_written_to_the_drive(profile: Path) -> None:
    for size in ("1GiB", "1G", "1g", "1 GiB", "1024M", "1048576k"):
        assert parse_bytes(size) == GIB
    for size in ("1 GiB", "1048576k"):
        solve("--host-memory", size, "--global-batch", 2, "-o", "one.json")
        assert Plan.load(Path("one.json")).decision.host_budget_bytes == GIB
    solve("--host-memory", "1GB", "--global-batch", 2, "--max-ssd-write-per-step", "0", "-o", "two.json")
    plan = Plan.load(Path("two.json"))
    assert (plan.decision.host_budget_bytes, plan.prediction.ssd_write_bytes) == (10**9, 0)
    assert plan.asked.max_ssd_write_bytes == 0


def test_a_plan_that_is_too_large_for_the_machine_is_said(profile: Path) -> None:
    """By what the plan takes, not by what it may take: a large budget is no large plan."""
    said = solve("--host-memory", "64GiB", "--global-batch", 2)
    assert "more than" not in said and "next: ssdplan run plan.json --data FILE --steps N --out DIR\n" in said
    made_profile(machine=made_machine(host_memory=256 * MIB), blocks=2, micro_batch_sizes=(1,)).save(profile)
    said = solve("--host-memory", "64MiB", "--global-batch", 2)
    peak = Plan.load(Path("plan.json")).prediction.peak_process_bytes
    assert peak is not None and peak > 256 * MIB
    assert f"the whole process peaks at {format_bytes(peak)}, more than the 256 MiB of the profiled machine" in said
    assert "next:" not in said and "written to plan.json" in said


WHAT_IF = "plan for another machine by a what-if: --model NAME --gpu NAME --ssd NAME, without a profile"


@pytest.mark.parametrize(
    ("host", "device", "why"),
    [
        ("128GiB", None, "host memory of 128 GiB: the profiled machine has 23.5 GiB in all; ask for less, or "),
        ("4GiB", "128GiB", "device memory of 128 GiB, emulated in DRAM: the profiled machine has 23.5 GiB in all"),
        ("12GiB", "12GiB", "host memory of 12 GiB and device memory of 12 GiB, emulated in DRAM: the profiled machine"),
        ("24064.001MiB", None, "host memory of 23.6 GiB: the profiled machine has 23.5 GiB in all"),
    ],
)
def test_more_memory_than_the_profiled_machine_has_is_refused(
    host: str, device: str | None, why: str, profile: Path
) -> None:
    """Of an emulated device too, which is a part of the same memory; a what-if is of another machine."""
    machine = made_machine(host_memory=47 * GIB // 2, device_memory=11 * GIB, shared=True)
    made_profile(machine=machine, blocks=2, micro_batch_sizes=(1,)).save(profile)
    budgets = ["--host-memory", host, *(["--device-memory", device] if device else [])]
    said = solve(*budgets, "--global-batch", 2, code=UsageError.exit_code)
    assert why in said and WHAT_IF in said
    assert not Path("plan.json").exists()


def test_more_memory_than_was_available_is_told_and_whether_it_matters(profile: Path) -> None:
    """The budgets are counted together where a device is emulated; the plan may take far less than they are."""

    def machine(available: int, *, shared: bool = False) -> None:
        made = made_machine(host_memory=24 * GIB, device_memory=12 * GIB, shared=shared)
        made = made.model_copy(update={"host_available_bytes": available, "process_bytes": 400 * MIB})
        made_profile(machine=made, blocks=2, micro_batch_sizes=(1,)).save(profile)

    machine(10 * GIB)
    assert "available" not in solve("--host-memory", "10GiB", "--global-batch", 2)
    told = solve("--host-memory", "16GiB", "--global-batch", 2)
    peak = Plan.load(Path("plan.json")).prediction.peak_process_bytes
    assert peak is not None
    assert "host memory of 16 GiB is more than the 10 GiB that were available when the machine was profiled; " in told
    assert f"; the whole process peaks at {format_bytes(peak)}, which is enough for this plan\n" in told
    assert "next: ssdplan run" in told
    machine(256 * MIB)
    assert "so end other programs before it runs\n" in solve("--host-memory", "1GiB", "--global-batch", 2)
    machine(10 * GIB, shared=True)
    assert "available" not in solve("--host-memory", "9GiB", "--global-batch", 2)
    told = solve("--host-memory", "9GiB", "--device-memory", "2GiB", "--global-batch", 2)
    assert "host and device memory of 11 GiB is more than the 10 GiB that were available" in told


def test_a_sweep_refuses_the_rows_that_the_machine_cannot_give(profile: Path) -> None:
    machine = made_machine(host_memory=24 * GIB).model_copy(update={"host_available_bytes": 10 * GIB})
    made_profile(machine=machine, blocks=2, micro_batch_sizes=(1,)).save(profile)
    asked = ["solve", "profile.json", "--global-batch", "2", "--sweep", "host-memory=8GiB..32GiB"]
    done = CliRunner().invoke(cli.make_command_line(), asked, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.strip().startswith(("8 GiB", "16 GiB", "32 GiB"))]
    assert [row[2] for row in rows] == [rows[0][2], rows[1][2], "host"] and float(rows[0][2].replace(",", "")) > 0
    assert "host memory of 32 GiB: the profiled machine has 24 GiB in all" in " ".join(done.stdout.split())
    assert "solve: from host-memory 16 GiB on, host memory of 16 GiB is more than the 10 GiB that were" in done.stderr


def test_a_what_if_has_the_memory_that_it_names(profile: Path) -> None:
    machine = ["--model", "gpt2", "--ssd", "samsung-990-pro", "--micro-batch-sizes", "1", "--global-batch", "1"]
    invoked("solve", *machine, "--gpu", "none", "--host-memory", "8TiB")
    invoked("solve", *machine, "--gpu", "none", "--host-memory", "8GiB", "--device-memory", "1TiB")


def test_a_directory_can_be_measured_too(profile: Path) -> None:
    Path("weights").mkdir()
    told = invoked("solve", "--model", "weights", "--gpu", "rtx-4090", code=UsageError.exit_code)
    assert "--model weights: a what-if also needs --ssd, --host-memory" in told and "ssdplan profile weights" in told


def test_the_first_budget_that_a_profile_names_fits_model_and_machine() -> None:
    """14 bytes an element of training state in bf16 and 4 of gradient, within an eighth; or a half of what is free."""

    def suggested(profile: Profile) -> int:
        return parse_bytes(suggested_host_memory(profile))

    model = made_model(blocks=12, hidden=2048, vocab=32000)
    elements = sum(state.elements for state in model.states)
    wanted = 18 * elements
    assert 7 / 8 * wanted <= suggested(made_profile(model=model)) <= wanted
    small = made_machine(host_memory=8 * GIB)
    assert suggested(made_profile(model=model, machine=small)) == 4 * GIB
    frozen = with_frozen(model, [1.0] * 8 + [0.0] * 6)
    assert suggested(made_profile(model=frozen)) < 0.7 * wanted
    assert suggested(made_profile()) == 64 * MIB, "the least that is named"
    assert suggested_host_memory(made_profile(model=model, machine=small)) == "4GiB"


def test_the_programs_that_decided_a_plan_are_written_and_confirmed(profile: Path) -> None:
    solve("--host-memory", "64MiB", "--global-batch", 8)
    before = Path("plan.json").read_bytes()
    told = solve("--host-memory", "64MiB", "--global-batch", 8, "--write-lp", "programs", "--solver", "HiGHS")
    assert "solve: wrote the 5 linear programs that decided the plan to programs\n" in told
    assert "written to plan.json" in told and Path("plan.json").read_bytes() == before
    assert [path.name[:2] for path in sorted(Path("programs").iterdir())] == ["1-", "2-", "3-", "4-", "5-"]


def test_programs_are_of_one_plan_and_solvers_of_this_machine(profile: Path) -> None:
    told = solve("--solver", "guess", "--host-memory", "64MiB", "--write-lp", "programs", code=UsageError.exit_code)
    assert re.search(r"--solver guess: PuLP finds no such solver here; it finds HiGHS", told)
    told = solve("--sweep", "host-memory=64MiB..128MiB", "--write-lp", "programs", code=UsageError.exit_code)
    assert "--write-lp: a sweep has the programs of many plans" in told
    told = solve("--host-memory", "64MiB", "--write-lp", "profile.json", code=UsageError.exit_code)
    assert "is a file, not a directory" in told
    assert not Path("plan.json").exists() and not Path("programs").exists()


def test_a_wear_price_is_refused_where_nothing_is_weighed(profile: Path) -> None:
    for way in ("all", "none", "paper"):
        told = solve("--recompute", way, "--wear-price", 0.1, code=UsageError.exit_code)
        assert f"--wear-price: with --recompute {way} nothing is weighed by it" in told
    solve("--host-memory", "512MiB", "--global-batch", 2, "--recompute", "auto", "--wear-price", 0.1)
