"""kill -9 at any moment of training leaves a store that opens, at a step whose states are those of an unkilled run.

SSDPLAN_KILLS raises the number of kills (docs/store-format.md).
"""

import json
import os
import subprocess
import sys

KILLS = int(os.environ.get("SSDPLAN_KILLS", "15"))


def test_a_killed_run_leaves_a_store_that_opens(tmp_path):
    """In a process of its own: it forks, and so must have no threads."""
    command = [sys.executable, "-m", "tests.executor.killing", str(tmp_path), str(KILLS), "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60 + 10 * KILLS, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["kills"] == KILLS
    assert len(result["reached"]) >= 3, f"the kills met few moments: {result}"
