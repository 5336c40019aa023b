"""A configuration says what flags say, checked as they are; what it cannot say is one line with file, line and key."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.commands import run
from ssdplan.commands.configuration import configuration, key_of, read_configuration
from ssdplan.commands.resolved import as_kept, as_written, over, restored
from ssdplan.plans.documents.run import Run
from ssdplan.plans.errors import UsageError
from tests.extent import examples

RUN = run.command()


def flags(*arguments: str) -> dict[str, object]:
    """What the command line makes of arguments: the oracle."""
    return RUN.given(RUN.parse(arguments))


def read(directory: Path, text: str) -> dict[str, object]:
    (directory / "config.yaml").write_text(text)
    return read_configuration(directory / "config.yaml", RUN)


def test_a_configuration_says_what_flags_say(tmp_path):
    (tmp_path / "model").mkdir()
    got = read(
        tmp_path,
        "# a comment\nplan: plans/a.json\ndata: 'text one.txt'\nsteps: 12\nlr: 1e-5  # a number here too\n"
        "volume: [/one, two]\npack: false\nserial: true\nseed: -3\nout: /out\nmodel: model\nlr-schedule: wsd\n",
    )
    here = str(tmp_path)
    assert got == flags(
        f"{here}/plans/a.json", "--data", f"{here}/text one.txt", "--steps", "12", "--lr", "1e-5", "--volume", "/one",
        "--volume", f"{here}/two", "--no-pack", "--serial", "--seed", "-3", "--out", "/out", "--model", f"{here}/model",
        "--lr-schedule", "wsd",
    )  # fmt: skip


def test_paths_are_relative_to_the_file_and_names_are_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert read(tmp_path, "model: org/name")["model"] == "org/name"
    assert read(tmp_path, "model: ./none")["model"] == str(tmp_path / "none")
    assert read(tmp_path, "volume: one") == {"volume": [tmp_path / "one"]}
    assert read(tmp_path, "data: ~/text.txt")["data"] == Path("/home/someone/text.txt")
    monkeypatch.chdir(tmp_path)
    assert read_configuration(Path("config.yaml"), RUN)["data"] == Path("/home/someone/text.txt")


def test_the_configuration_in_the_document_is_one(tmp_path):
    document = Path(__file__).parents[2] / "docs" / "configuration.md"
    (shown,) = re.findall(r"```yaml\n(.*?)```", document.read_text(), re.DOTALL)
    assert read(tmp_path, shown).keys() >= {"plan", "data", "steps", "out", "volume"}


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n...\n", "\ufeff", "\r\n"])
def test_a_configuration_may_say_nothing(tmp_path, text):
    assert read(tmp_path, text) == {}


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("steps: 3\nstep: 4\n", 2, "step: unknown key; did you mean steps?"),
        ("eval_every: 3\n", 1, "eval_every: unknown key; did you mean eval-every?"),
        ("no-pack: true\n", 1, "did you mean pack?"),
        ("lora: 3\n", 1, "lora: unknown key; adapters and quantised weights"),
        ("lr_scheduler: 1\n", 1, "lr_scheduler: unknown key; did you mean lr-schedule?"),
        ("host-memory: 8GiB\n", 1, "host-memory: unknown key; that is an option of ssdplan solve"),
        ("\n\nfoo: 4\n", 3, "foo: unknown key; ssdplan run --help has all"),
        ("lr: fast\n", 1, "lr: 'fast' is not a number"),
        ("steps: 3\nlr: -1\n", 2, "lr: '-1' is negative"),
        ("lr-schedule: cosin\n", 1, "lr-schedule: invalid choice: 'cosin'"),
        ("seed: 1\nlr: 1\nseed: 2\n", 3, "seed: was given in line 1 already"),
        ("lr:\n", 1, "lr: has no value"),
        ("eval-data: null\n", 1, "eval-data: has no value"),
        ("lr: [1, 2]\n", 1, "lr: takes one value, not a list of 2"),
        ("lr: true\n", 1, "lr: takes a value, not true"),
        ("tensorboard: [a, b]\n", 1, "tensorboard: takes one value, not a list of 2"),
        ("pack: yes\n", 1, "pack: 'yes' is neither true nor false"),
        ("pack: 'true'\n", 1, "pack: 'true' is neither"),
        ("lr: {peak: 1}\n", 1, "lr: has keys below it"),
        ("volume: [[a]]\n", 1, "volume: a list has one value behind each dash"),
        ("volume:\n  - a\n  -\n", 3, "volume: has no value"),
        ("? [lr]\n: 1\n", 1, "not a list or a mapping"),
        ("eval-data: a\neval-split: 0.1\n", 2, "eval-split: not allowed with argument --eval-data"),
        ("data: &a text\neval-data: *a\n", 1, "anchors and aliases"),
        ("eval-data: *a\n", 1, "anchors and aliases"),
        ("data: !!python/object/apply:os.system [echo]\n", 1, "tags"),
        ("!!map {lr: 1}\n", 1, "tags"),
        ("- lr\n", 1, "lines of `key: value`"),
        ("lr\n", 1, "lines of `key: value`"),
        ("lr: 1\n---\nlr: 2\n", 2, "a second begins here"),
        ("lr: 1\n  seed: 2\n", 2, "not YAML"),
        ("lr: [1\n", 2, "not YAML"),
        ("\tlr: 1\n", 1, "not YAML"),
        ('data: "a\\0b"\n', 1, "characters that no option can have"),
        ("seed: 9223372036854775808\n", 1, "to 9223372036854775807, which 64 bits"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, text, line, says):
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/config.yaml:{line}: ") and says in message and "\n" not in message


def test_what_is_no_configuration_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    for content, says in (
        (b"lr: \xff", "not UTF-8"),
        (b"lr: \x00", "not YAML"),
        (b"# " + b"x" * (1 << 16), "larger than 64 KiB"),
        (b"[" * 60_000, "lines of"),
        (b"data: " + b"[" * 60_000, "one value behind each dash"),
    ):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=says):
            read_configuration(path, RUN)
    with pytest.raises(UsageError, match="No such file"):
        read_configuration(tmp_path / "none.yaml", RUN)
    with pytest.raises(UsageError, match="is a directory, not a configuration"):
        read_configuration(tmp_path, RUN)


def test_what_a_configuration_denies_is_denied(tmp_path):
    """Over what a run was started with, too, where the command line has no flag to say so."""
    denied = read(tmp_path, "serial: false\nresume-anyway: false\ntensorboard: false\npack: false\n")
    assert denied == {"serial": False, "resume_anyway": False, "tensorboard": False, "pack": False}
    assert over(denied, flags("--tensorboard", "--serial"), RUN) == denied


def test_flags_count_over_a_configuration(tmp_path):
    below = read(tmp_path, "lr: 1\nseed: 3\neval-data: /held-out\nvolume: [/a, /b]\npack: false\n")
    above = flags("--lr", "2", "--eval-split", "0.5", "--volume", "/c", "--pack")
    assert over(above, below, RUN) == {
        "lr": 2.0, "seed": 3, "eval_split": 0.5, "volume": [Path("/c")], "pack": True,
    }  # fmt: skip
    assert over({}, below, RUN) == below and over(above, {}, RUN) == above


VALUES = {
    "data": st.sampled_from(["/text.txt", "/a: b#c", "/no", "/ö ü", "/[x]", "/'q\"", "/-"]),
    "steps": st.integers(1, 10**6).map(str),
    "lr": st.floats(1e-9, 1.0).map(str),
    "lr-schedule": st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    "warmup-steps": st.sampled_from(["0", "7", "0.03"]),
    "seed": st.integers(-(1 << 63), (1 << 63) - 1).map(str),
    "model": st.sampled_from(["org/name", "no", "true", "1e5", "null", "0x1F", "/a/b"]),
    "volume": st.lists(st.sampled_from(["/a", "/b c", "/~", "/true"]), min_size=1, max_size=3),
    "pack": st.booleans(),
    "serial": st.booleans(),
    "tensorboard": st.sampled_from([True, "/events"]),
    "eval-split": st.floats(0.001, 0.999).map(str),
}


def as_arguments(options: dict[str, object]) -> list[str]:
    arguments = []
    for key, value in options.items():
        if key == "tensorboard":  # its value may be left out
            arguments.append(f"--{key}" if value is True else f"--{key}={value}")
        elif isinstance(value, bool):
            arguments.append(f"--{key}" if value else f"--no-{key}")
        else:
            arguments += [f"--{key}={each}" for each in (value if isinstance(value, list) else [value])]
    return arguments


@settings(max_examples=examples(150), deadline=None)
@given(options=st.fixed_dictionaries({}, optional=VALUES))
def test_any_options_mean_the_same_wherever_they_stand(tmp_path_factory, options):
    """By flags, in a configuration that a person's tool wrote, in run.json, in the config.yaml of a run, and as they
    are printed: five ways, one meaning."""
    directory = tmp_path_factory.getbasetemp()
    expected = flags(*as_arguments(options))
    assert read(directory, yaml.safe_dump(options, allow_unicode=True)) == expected
    kept = as_kept(expected, ())
    assert restored(RUN, kept, Path("run.json")) == expected
    again = read(directory, configuration(kept, "plan.json", []))
    assert again == {**expected, "plan": directory / "plan.json"}

    assert flags(*shlex.split(as_written(kept))) == expected


def test_every_option_has_one_name_in_both_files():
    """run.json has `eval_every` where a configuration has `eval-every`, and nothing else."""
    for param in RUN.params:
        assert key_of(param) == param.name.replace("_", "-")


LINES = st.lists(
    st.builds(
        "{}: {}\n".format,
        st.sampled_from([*VALUES, "plan", "out", "resume", "keep", "eval-every", "stall-after", "json", "*a", "? b"]),
        st.one_of(
            st.sampled_from(
                [
                    "1",
                    "[1, 2]",
                    "{a: 1}",
                    "&a b",
                    "*a",
                    "!!int 3",
                    "!x y",
                    "'",
                    '"\\ud800"',
                    '"\\0"',
                    "|",
                    ">-",
                    "~",
                    "- -",
                ]
            ),
            st.text(max_size=12),
        ),
    ),
    max_size=6,
).map("".join)


@settings(max_examples=examples(400), deadline=None)
@given(content=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode), LINES.map(str.encode)))
def test_any_bytes_are_a_configuration_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(content)
    try:
        options = read_configuration(path, RUN)
    except UsageError as error:
        assert str(error).startswith(str(path)) and len(str(error).splitlines()) == 1
    else:
        assert options.keys() <= {param.name for param in RUN.params}


KEPT = st.one_of(st.booleans(), st.text(max_size=8), st.lists(st.text(max_size=8), max_size=3).map(tuple))


@settings(max_examples=examples(300), deadline=None)
@given(kept=st.dictionaries(st.one_of(st.sampled_from([key.replace("-", "_") for key in VALUES]), st.text()), KEPT))
def test_any_kept_options_are_options_or_refused(kept):
    try:
        options = restored(RUN, kept, Path("RUN/run.json"))
    except UsageError as error:
        assert str(error).startswith("RUN/run.json: options.")
    else:
        assert options.keys() <= kept.keys()


@settings(max_examples=examples(200), deadline=None)
@given(
    content=st.one_of(
        st.binary(max_size=100),
        st.dictionaries(
            st.sampled_from(["schema", "options", "volumes", "left", "stores", "snapshots", "x"]),
            st.recursive(
                st.none()
                | st.booleans()
                | st.integers()
                | st.floats()
                | st.text(max_size=5)
                | st.just("ssdplan.run/1"),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                max_leaves=6,
            ),
        ).map(lambda raw: json.dumps(raw).encode()),
    )
)
def test_any_bytes_are_a_run_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "run.json"
    path.write_bytes(content)
    try:
        found = Run.load(path)
    except UsageError as error:
        assert str(path) in str(error) and len(str(error).splitlines()) == 1
    else:
        assert Run.model_validate_json(found.text()) == found
