"""What a run lacks, or what lies where it would go, is refused at once: before torch is loaded, which takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

from ssdplan.plans.schedule.build import build_schedule
from tests.bounds import HANG_SECONDS
from tests.made.decisions import decide
from tests.made.plans import planned
from tests.made.profiles import made_machine, made_model

CODE = (
    "import sys\nfrom ssdplan import cli\ncode = cli.main(sys.argv[1:])\n"
    "assert not {'torch', 'transformers'} & set(sys.modules)\nsys.exit(code)"
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    model = made_model(blocks=2, hidden=64)
    decision = decide(model)
    planned(model, made_machine(), decision, build_schedule(model, decision)).save(tmp_path / "plan.json")
    (tmp_path / "text.txt").write_text("some words")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("run plan.json --data none.jsonl --steps 1 --out r", "none.jsonl"),
        ("run plan.json --data text.txt --eval-data none.txt --steps 1 --out r", "none.txt"),
        ("run plan.json --data text.txt --steps 1 --out taken", "taken: exists already"),
        ("run plan.json --data text.txt --steps 1 --out r --model ./none", "./none: no such directory"),
        ("run --resume taken", "taken: no run that could go on"),
        ("export taken --to e", "taken: no run"),
        ("volume drop taken --yes", "taken: no run"),
    ],
)
def test_what_cannot_begin_is_refused_at_once(home: Path, arguments: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments.split()],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (home / "r").exists()
