"""The scripts that complete commands, tried in the shells that they are for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ssdplan import cli
from tests.bounds import HANG_SECONDS

ASK = """
source ./script
compopt() {  # bash itself completes paths, by the option that a completion function sets
    case $2 in
        default) COMPREPLY=($(compgen -f -- "$typed")) ;;
        dirnames) COMPREPLY=($(compgen -d -- "$typed")) ;;
    esac
}
read -ra COMP_WORDS <<< "$1"
if [[ $1 == *' ' ]]; then COMP_WORDS+=(""); fi
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$1 COMP_POINT=${#1}
typed=${COMP_WORDS[COMP_CWORD]}
specification=($(complete -p ssdplan))
for ((i = 0; i < ${#specification[@]}; i++)); do
    if [[ ${specification[i]} == -F ]]; then function=${specification[i + 1]}; fi
done
$function ssdplan "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}" 2> /dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""What bash does when TAB is pressed, without a terminal."""
CASES = [
    ("ssdplan so", {"solve"}),
    ("ssdplan run --lr-schedule ", {"constant", "linear", "cosine", "wsd"}),
    ("ssdplan run --eval-", {"--eval-data", "--eval-split", "--eval-samples", "--eval-every"}),
    ("ssdplan run --no-pa", {"--no-pack"}),
    ("ssdplan run --pack pla", {"plan.json"}),
    ("ssdplan run plan.json --data te", {"text.txt", "texts"}),
    ("ssdplan run plan.json --out te", {"texts"}),
    ("ssdplan volume ", {"init", "info", "check", "drop"}),
    ("ssdplan data preview --sam", {"--samples"}),
    ("ssdplan solve --model x --ss", {"--ssd"}),
    ("ssdplan --ver", {"--version"}),
    ("ssdplan run --bogus --eps x --optim", set()),
    ("ssdplan compl", {"completion"}),
    ("ssdplan completion ", {"bash", "zsh", "fish"}),
    ("ssdplan profile --model te", {"texts"}),
    ("ssdplan volume info pla", {"plan.json"}),
]


def script(shell: str, directory: Path) -> dict[str, str]:
    """Write a shell's script and some files; returns an environment in which `ssdplan` is a command."""
    made = CliRunner().invoke(cli.make_command_line(), ["completion", shell])
    assert made.exit_code == 0
    (directory / "script").write_text(made.stdout)
    for name in ("plan.json", "text.txt"):
        (directory / name).touch()
    (directory / "texts").mkdir()
    (directory / "bin").mkdir()
    command = directory / "bin" / "ssdplan"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ssdplan.cli "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}


def done(*ask: str, directory: Path, environment: dict[str, str]) -> str:
    return subprocess.run(
        ask, cwd=directory, env=environment, capture_output=True, text=True, check=True, timeout=HANG_SECONDS
    ).stdout


def test_bash_completes(tmp_path: Path) -> None:
    environment = script("bash", tmp_path)
    for typed, expected in CASES:
        told = done("bash", "--norc", "-c", ASK, "bash", typed, directory=tmp_path, environment=environment)
        assert set(told.split()) == expected, typed


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_fish_completes(tmp_path: Path) -> None:
    environment = script("fish", tmp_path)
    for typed, expected in CASES:
        ask = f"source ./script; complete -C '{typed}'"
        told = done("fish", "--no-config", "-c", ask, directory=tmp_path, environment=environment)
        assert expected <= {line.split("\t")[0].rstrip("/") for line in told.splitlines()}, typed


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_zsh_reads_its_script(tmp_path: Path) -> None:
    script("zsh", tmp_path)
    assert (tmp_path / "script").read_text().startswith("#compdef ssdplan")
    subprocess.run(["zsh", "-n", "script"], cwd=tmp_path, check=True, timeout=HANG_SECONDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_is_told_the_same(shell: str, tmp_path: Path) -> None:
    """What scripts ask for: words and types of values, by the variable of click."""
    environment = {
        **script(shell, tmp_path),
        "_SSDPLAN_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "ssdplan run --lr-schedule ",
        "COMP_CWORD": "" if shell == "fish" else "3",
    }
    told = done("ssdplan", directory=tmp_path, environment=environment)
    assert [word for word in ("constant", "linear", "cosine", "wsd") if word in told.replace(",", " ").split()] == [
        "constant", "linear", "cosine", "wsd",
    ]  # fmt: skip
