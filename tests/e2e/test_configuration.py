"""`ssdplan run config.yaml` and `ssdplan doctor` as a user runs them."""

import json

from tests.e2e.test_commands import home, refused, ssdplan

assert home, "the fixture"

CONFIG = """
plan: {plan}
data: {home}/text.txt
eval-data: {home}/held-out.txt
steps: 4
lr: 3e-3
lr-schedule: linear
warmup-steps: 0.25
snapshot-every: 2
pack: false
out: first
"""


def weights(path) -> bytes:
    return (path / "model" / "model.safetensors").read_bytes()


def test_a_configuration_trains_as_options_do_and_so_does_what_the_run_keeps(home, tmp_path):
    """By a configuration with an option over it, by options alone, and by the configuration that the run kept: the same
    bits."""
    (tmp_path / "mine.yaml").write_text(CONFIG.format(plan=home / "plan.json", home=home))
    (tmp_path / "elsewhere").mkdir()
    done = ssdplan("run", "../mine.yaml", "--lr", "1e-3", cwd=tmp_path / "elsewhere")
    first = tmp_path / "first"
    ssdplan(
        "run", "plan.json", "--data", "text.txt", "--eval-data", "held-out.txt", "--steps", 4, "--lr", "1e-3",
        "--lr-schedule", "linear", "--warmup-steps", 0.25, "--snapshot-every", 2, "--no-pack",
        "--out", tmp_path / "second", cwd=home,
    )  # fmt: skip
    assert weights(first) == weights(tmp_path / "second")
    ours, theirs = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("first", "second"))
    assert ours["options"] == theirs["options"]
    ssdplan("run", first / "config.yaml", "--out", tmp_path / "third", cwd=tmp_path)
    assert weights(first) == weights(tmp_path / "third")
    told, default = done.stderr.split("as told\n", 1)[1].split("and by default\n", 1)
    assert "--lr 0.001 " in told and "--no-pack" in told and "--beta1 0.9 " in default
    again = ssdplan("run", "mine.yaml", "--resume", first, "--lr", "1e-3", "--steps", 6, cwd=tmp_path, expect=8)
    assert "learning_rate.steps was 4 and is 6" in again.stderr, "linear: another schedule"
    assert "has 4 behind it" in refused("run", "mine.yaml", "--resume", first, "--steps", 3, cwd=tmp_path, code=2)


def test_what_a_configuration_cannot_say_is_named(home, tmp_path):
    config = tmp_path / "config.yaml"
    for line, says in (
        ("snapshot_every: 2", "config.yaml:1: snapshot_every: unknown key; did you mean snapshot-every?"),
        ("lr: fast", "config.yaml:1: lr: 'fast' is not a number"),
        ("lr: 1e-4", "run needs PLAN, --data, --steps or --epochs, --out"),
        ("plan: none.json\ndata: a\nsteps: 1\nout: b", "none.json: cannot read this plan"),
        (f"plan: {home}/plan.json\ndata: a\nsteps: 1\nout: b\neval-every: 2", "--eval-every needs --eval-data"),
        (f"plan: {home}/plan.json\ndata: a\nsteps: 1\nout: b", f"{tmp_path}/a: "),
    ):
        config.write_text(line)
        assert says in refused("run", config, cwd=home, code=2), line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml"]


def test_the_doctor_says_whether_a_run_can_work(home, tmp_path):
    text = ssdplan("doctor", tmp_path, cwd=home).stdout
    assert "ssdplan can run here" in text and not list(tmp_path.iterdir())
    found = json.loads(ssdplan("doctor", "--json", cwd=home).stdout)
    assert found["can_run"] is True and found["facts"]["place"]["path"] == str(home)
    assert {"kernel", "memory", "io_uring", "direct I/O", "free space", "GPU"} <= {
        finding["what"] for finding in found["findings"]
    }
    missing = ssdplan("doctor", tmp_path / "none", cwd=home, expect=2)
    assert f"mkdir -p {tmp_path / 'none'}" in missing.stdout


def test_the_doctor_ends_with_the_code_of_a_run(home, tmp_path):
    """Where a run would fail, by the doctor's word and by a run's."""
    run = ["run", "plan.json", "--data", "text.txt", "--steps", 1, "--out", tmp_path / "run"]
    refused(*run, "--volume", "/proc", cwd=home, code=6)
    assert "ssdplan cannot run here" in ssdplan("doctor", "/proc", cwd=home, expect=6).stdout
