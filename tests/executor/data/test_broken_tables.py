"""Tables of which a byte was changed, at every place: read or refused, and the process lives."""

import subprocess
import sys

import pyarrow
import pyarrow.parquet

EVERY_CHANGE = """
import sys
from pathlib import Path

from ssdplan.executor.data.reading.columns import rows
from ssdplan.plans.errors import UsageError

path, refused, read = Path(sys.argv[1]), 0, 0
content = path.read_bytes()
for place in range(len(content)):
    for change in (1, 2, 4, 8, 255):
        changed = bytearray(content)
        changed[place] ^= change
        path.write_bytes(changed)
        try:
            read += len(list(rows(path, ["text"]))) > 0
        except UsageError:
            refused += 1
print(refused, read)
"""


def test_whatever_byte_of_a_table_is_changed_the_process_lives(tmp_path) -> None:
    """pyarrow ends a process that looks at the description of a column where there is none."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "row of a table"}] * 4), path)
    done = subprocess.run(
        [sys.executable, "-c", EVERY_CHANGE, str(path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    refused, read = map(int, done.stdout.split())
    assert refused > 100 and read > 100
