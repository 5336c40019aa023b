"""The scripts that complete commands, tried in the shells that they are for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ssdplan import cli
from tests.bounds import HANG_SECONDS

pytest.importorskip("shtab")

ASK = """
source ./script
read -ra COMP_WORDS <<< "$1"
if [[ $1 == *' ' ]]; then COMP_WORDS+=(""); fi
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$1 COMP_POINT=${#1}
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
]


def script(shell: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    (directory / "script").write_text(capsys.readouterr().out)
    for name in ("plan.json", "text.txt"):
        (directory / name).touch()
    (directory / "texts").mkdir()


def test_bash_completes(tmp_path, capsys):
    script("bash", tmp_path, capsys)
    for typed, expected in CASES:
        ask = ["bash", "--norc", "-c", ASK, "bash", typed]
        done = subprocess.run(ask, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=HANG_SECONDS)
        assert set(done.stdout.split()) == expected, typed


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_fish_completes(tmp_path, capsys):
    script("fish", tmp_path, capsys)
    for typed, expected in CASES:
        ask = ["fish", "--no-config", "-c", f"source ./script; complete -C '{typed}'"]
        done = subprocess.run(ask, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=HANG_SECONDS)
        assert expected <= {line.split("\t")[0].rstrip("/") for line in done.stdout.splitlines()}, typed


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_zsh_reads_its_script(tmp_path, capsys):
    script("zsh", tmp_path, capsys)
    assert (tmp_path / "script").read_text().startswith("#compdef ssdplan")
    subprocess.run(["zsh", "-n", "script"], cwd=tmp_path, check=True, timeout=HANG_SECONDS)


def test_without_shtab_the_way_to_it_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    said = capsys.readouterr()
    assert "pip install shtab" in said.err and not said.out
