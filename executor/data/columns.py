"""Tables: the rows of .parquet and .arrow files, a few at a time.

Owns pyarrow, an optional dependency, and what is wrong with such a file. It never holds more than one batch of rows.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssdplan.plans.errors import UsageError, first_line

from .files import unreadable

_ROWS_AT_A_TIME = 64
_FILE_MAGIC = b"ARROW1"


def names(file: Path) -> list[str]:
    """The names of a table's columns."""
    with _opened(file) as (schema, _):
        return list(schema.names)


def rows(file: Path, wanted: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row's number, from 1, and those of the `wanted` columns that the table has. Raises UsageError for a file
    that is not such a table, is damaged, or holds what is not UTF-8."""
    number = 0
    with _opened(file) as (schema, batches):
        columns = [name for name in wanted if name in schema.names]
        for batch in batches(columns):
            for start in range(0, batch.num_rows, _ROWS_AT_A_TIME):
                for fields in _values(file, batch.slice(start, _ROWS_AT_A_TIME), number):
                    number += 1
                    yield number, fields


def _values(file: Path, batch: Any, before: int) -> list[dict[str, Any]]:
    try:
        batch.validate(full=True)  # a damaged file may say that values lie outside of it
        found: list[dict[str, Any]] = batch.to_pylist()
        return found
    except (ValueError, OverflowError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UsageError(
            f"{file}: one of rows {before + 1} to {before + batch.num_rows} cannot be read: {reason}"
        ) from error


def _to_its_end(file: Path, source: Any, stream: Any) -> Iterator[Any]:
    """The record batches of a stream. Raises UsageError where the mark is missing that pyarrow and `datasets` end one
    by, for it may have been cut between two batches, and where more follows the mark, which no reader reads."""
    while True:
        before = source.tell()
        try:
            batch = stream.read_next_batch()
        except StopIteration:
            break
        yield batch
    end = source.tell()
    if end == before:
        raise UsageError(
            f"{file}: the stream has no end-of-stream mark, so batches may be missing; write it again, and close its "
            "writer"
        )
    if end < source.size():
        raise UsageError(
            f"{file}: {source.size() - end} bytes follow the end of the stream, and would not be read; split them off "
            "into a file of their own"
        )


def _distinct(file: Path, schema: Any) -> Any:
    """The schema, if no two columns have one name."""
    name, times = Counter(schema.names).most_common(1)[0] if schema.names else ("", 0)
    if times > 1:
        raise UsageError(f"{file}: has several columns called `{name}`; rename all but one of them")
    return schema


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, Any]]:
    """A table's schema, and a function from names of columns to an iterator of record batches, to be called once."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise UsageError(
            f"{file}: {file.suffix} files need the package pyarrow: pip install pyarrow (or ssdplan[data]), or convert "
            "the file to .jsonl"
        ) from error
    try:
        with file.open("rb"):
            pass  # pyarrow's own error would not say why
    except OSError as error:
        raise unreadable(file, error) from error
    try:
        if file.suffix.lower() == ".parquet":
            with parquet.ParquetFile(file, pre_buffer=False) as table:
                yield (
                    _distinct(file, table.schema_arrow),
                    lambda names: table.iter_batches(_ROWS_AT_A_TIME, columns=names),
                )
            return
        with pyarrow.memory_map(str(file)) as source:
            if source.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
                table = ipc.open_file(source)
                count = table.num_record_batches
                yield (
                    _distinct(file, table.schema),
                    lambda names: (table.get_batch(i).select(names) for i in range(count)),
                )
            else:
                source.seek(0)
                stream = ipc.open_stream(source)
                yield (
                    _distinct(file, stream.schema),
                    lambda names: (batch.select(names) for batch in _to_its_end(file, source, stream)),
                )
    except UsageError:  # which is a ValueError too, and says it better
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UsageError(
            f"{file}: not a {file.suffix} table that can be read ({first_line(error)}); write it again"
        ) from error
