"""kill -9 at any moment of training, of a snapshot or of a move, SIGTERM once and twice: each run goes on to the bits
of one that nobody killed, and each store that is found is that of the same step of it.

SSDPLAN_KILLS raises the number of random kills, SSDPLAN_KILL_STRIDE=1 tries every boundary between two operations or
transfers of a step and of a move (docs/store-format.md); SSDPLAN_KILL_FREEZE="*.mlp.*" kills runs that freeze a part,
SSDPLAN_KILL_OPTIMIZER=muon runs by Muon.
"""

import json
import os
from pathlib import Path

from tests import warm
from tests.bounds import HANG_SECONDS
from tests.extent import short_or_full

KILLS = int(os.environ.get("SSDPLAN_KILLS", "10"))
STRIDE = int(os.environ.get("SSDPLAN_KILL_STRIDE", short_or_full("90", "60")))


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    """In a process of its own, from one without threads: it forks, and so must have none."""
    code = (
        "from pathlib import Path; from tests.executor.snapshots import killing; "
        f"killing.main(Path({str(tmp_path)!r}), {KILLS}, {STRIDE}, 1)"
    )
    ended = warm.python(code, cwd=Path.cwd(), seconds=HANG_SECONDS + 60 * KILLS + 40000 // STRIDE)
    assert ended.returncode == 0, ended.stderr[-3000:]
    result = json.loads(ended.stdout.splitlines()[-1])
    print(result)
    assert result["kills"] >= KILLS
    assert len(result["reached"]) >= 3, f"the kills met few moments: {result}"
    assert set(result["boundaries"]) == {"step and snapshot", "move to another plan"}
