"""A table as a file of comma-separated values (RFC 4180), for other programs.

Owns the form: a line of names, then a line for each row, in UTF-8. A missing value is empty, and a float has the digits
that read back as the same float. Lines end with both characters, or a text that holds one of them would not be quoted.
"""

from pathlib import Path

import pandas as pd

from ..files import write_whole


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Let the file `path` be `table` without its index, whole or not at all. Raises OSError when it cannot be."""
    write_whole(path, table.to_csv(index=False, lineterminator="\r\n"))
