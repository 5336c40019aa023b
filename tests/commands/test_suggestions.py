"""An option that a command does not have: named is only what means the same, in this command or in the one that has
it."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ssdplan import cli
from ssdplan.commands.configuration import read_configuration
from ssdplan.commands.parsing.command import Command
from ssdplan.commands.parsing.suggestions import ALIASES, ELSEWHERE, SAME, long_names
from ssdplan.plans.errors import UsageError

COMMANDS = dict(cli.all_commands(cli.make_command_line()))

PROFILE = "that is an option of ssdplan profile"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        # What looked like another option and is none of it.
        ("solve --epochs 3", "--epochs; that is an option of ssdplan run (see"),
        ("run --num-epochs=3", "did you mean --epochs?"),
        ("run --lora", "--lora; adapters and quantised weights are not trained; --freeze of ssdplan profile trains"),
        ("run --host-memory 8GiB", "that is an option of ssdplan solve or ssdplan compare (see"),
        ("run --batch-size 4", "that is --global-batch of ssdplan solve (see"),
        ("run --freeze x", f"--freeze; {PROFILE} (see"),
        ("run --clip-grad-norm 1", "that is an option of ssdplan solve (see"),
        # What users of transformers and TRL know.
        ("run --lr-scheduler cosine", "did you mean --lr-schedule?"),
        ("run --output out", "did you mean --out?"),
        ("run --checkpoint-every 5", "did you mean --snapshot-every?"),
        ("run --eval_every 5", "did you mean --eval-every?"),
        ("run --gradient-accumulation-steps 4", "that is --micro-batches of ssdplan solve (see"),
        ("run --per-device-train-batch-size 4", "that is --micro-batch-size of ssdplan solve (see"),
        ("run --max-grad-norm 1", "that is --clip-grad-norm of ssdplan solve (see"),
        ("run --max-length 4", "that is --sequence-length of ssdplan profile (see"),
        ("solve --batch-size 4", "did you mean --global-batch?"),
        ("profile --max-seq-len 4 --model m", "did you mean --sequence-length?"),
        ("export r --to d --output-dir out", "that is --out of ssdplan run (see"),
        ("run --micro-batch 4", "that is --micro-batch-size of ssdplan solve (see"),
        (
            "run --optimizer adamw",
            "--optimizer; that is an option of ssdplan profile, ssdplan solve or ssdplan compare (see",
        ),
        ("solve --optim adamw", "--optim; did you mean --optimizer? (see"),
        # Slips.
        ("run --decay 0.1", "did you mean --decay-steps, --decay-all or --weight-decay?"),
        ("run --sed 3", "did you mean --seed?"),
        ("run --beta 3", "did you mean --beta1 or --beta2?"),
        ("run --warmup 3", "did you mean --warmup-steps?"),
        ("solve --host-memry 3", "did you mean --host-memory?"),
        ("run --host-memry 3", "did you mean --host-memory of ssdplan solve?"),
        ("run --num-epochs 1 --lora 2", "did you mean --epochs?; adapters and"),
    ],
)
def test_what_is_named_means_the_same(arguments: str, says: str) -> None:
    said = CliRunner().invoke(cli.make_command_line(), arguments.split())
    assert said.exit_code == 2 and says in said.stderr and len(said.stderr.splitlines()) == 1 and not said.stdout


@pytest.mark.parametrize(
    "word",
    ["--eps2ilon", "--force", "--gpu", "--figures-of-merit", "--frozen", "--world-size", "--zero-stage"],
)
def test_nothing_is_named_where_nothing_is_near(word: str) -> None:
    said = CliRunner().invoke(cli.make_command_line(), ["run", word])
    assert f"unrecognized arguments: {word} (see ssdplan run --help)" in said.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("slove", "'slove'"),
        ("volume drpo r", "'drpo'"),
        ("run --sed 3", "did you mean --seed?"),
    ],
)
def test_click_names_nothing_of_its_own(arguments: str, says: str) -> None:
    """Not beside what is named here, and not in other words."""
    said = CliRunner().invoke(cli.make_command_line(), arguments.split())
    assert says in said.stderr and said.stderr.count("did you mean") == 1 and "No such" not in said.stderr


def test_the_tables_name_options_that_there_are() -> None:
    names = {name: long_names(command) for name, command in cli.all_commands(cli.make_command_line())}
    assert all(called in names[command] for command, called in SAME.values())
    here = {name for its in names.values() for name in its}
    assert not here & ELSEWHERE.keys()
    assert all(name not in names[command] for name, (command, _) in SAME.items())


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ("run --learning-rate 1e-5", "lr", 1e-5),
        ("run --learning_rate=1e-5", "lr", 1e-5),
        ("run --num_train_epochs 3", "epochs", 3.0),
        ("run --output-dir out", "out", Path("out")),
        ("train --max-steps 7", "steps", 7),
        ("train --per_device_train_batch_size 2", "micro_batch_size", 2),
        ("train --max_length 256", "sequence_length", 256),
        ("solve p.json --gradient-accumulation-steps 4", "micro_batches", 4),
        ("solve p.json --max-grad-norm 1", "clip_grad_norm", 1.0),
        ("profile --model-name-or-path m", "model", "m"),
        ("data preview --model m --train-file d", "data", Path("d")),
    ],
)
def test_names_of_trl_that_mean_the_same_are_taken(arguments: str, name: str, value: object) -> None:
    *called, first = next(
        (command.split(), made) for command, made in COMMANDS.items() if arguments.startswith(f"{command} ")
    )
    words = arguments.split()[len(called[0]) :]
    assert isinstance(first, Command)
    assert first.given(first.parse(words))[name] == value


def test_an_alias_is_no_second_option(tmp_path: Path) -> None:
    made = COMMANDS["run"]
    assert isinstance(made, Command)
    assert made.given(made.parse(["--lr", "1", "--learning-rate", "2"]))["lr"] == 2.0  # the last one counts, as always
    for words in ("--max-steps 3 --epochs 2", "--num-train-epochs 2 --steps 3"):
        said = CliRunner().invoke(cli.make_command_line(), ["run", *words.split()])
        assert "not allowed with argument" in said.stderr
    assert "--learning-rate" not in made.get_help(click.Context(made))
    (tmp_path / "a.yaml").write_text("learning_rate: 2e-5\nnum-train-epochs: 2\n")
    assert read_configuration(tmp_path / "a.yaml", made) == {"lr": 2e-5, "epochs": 2.0}
    (tmp_path / "a.yaml").write_text("learning_rate: 2e-5\nlr: 1e-5\n")
    with pytest.raises(UsageError, match="lr: was given in line 1 already"):
        read_configuration(tmp_path / "a.yaml", made)


def test_every_alias_has_its_row_in_the_glossary() -> None:
    glossary = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
    for alias in ALIASES:
        assert f"`{alias.replace('-', '_')}`" in glossary, alias
