"""Layers on a device that is not the processor: nothing of them stays behind. Without a GPU, by fake tensors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from tests.bounds import HANG_SECONDS
from tests.made.models import FAMILIES, OTHERS

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="torch has no such device"
)
def test_every_family_runs_where_the_processor_is_not(tmp_path: Path) -> None:
    families = (*FAMILIES, *OTHERS)
    done = subprocess.run(
        [sys.executable, "-m", "tests.executor.model.fake_device", str(tmp_path), *families],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *found, mixed = map(json.loads, done.stdout.splitlines())
    assert [(each["family"], each["padded"]) for each in found] == [
        (family, padded) for family in families for padded in (False, True)
    ]
    assert not [each for each in found if each["error"]]
    assert mixed["family"] == "mixed" and "device" in mixed["error"], "weights that were left on the processor"
