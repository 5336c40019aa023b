"""Tables: the rows of .parquet and .arrow files, a few at a time.

Owns pyarrow, an optional dependency, and what is wrong with such a file. It never holds more than one batch of rows.
What becomes of one in Python is bounded too: tables may say a long text once and refer to it a million times.
"""

import functools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssdplan.plans.errors import UsageError, first_line
from ssdplan.plans.files import open_regular
from ssdplan.plans.units import format_bytes

from .files import unreadable
from .places import At, unsaid

_ROWS_AT_A_TIME = 64
_FILE_MAGIC = b"ARROW1"
_BATCH_BYTES = 1 << 28
"""Of rows that become Python's at once: more is done a row at a time."""
_ROW_BYTES = 1 << 30
"""What is more is no row, as it would be none of a .jsonl file, which takes a quarter of that."""
_GROWTH, _GROWN_BYTES = 10_000, 1 << 28
"""How many times larger than the file its values may be, and what they may be in any case. One prompt that a thousand
rows share is some hundred times as large as it is in the file."""
_LOOK_BYTES = 1 << 24
"""Of first rows that are read before what the others hold is looked at."""
_PAGE_HEAD_BYTES = 16
_NEXT_I32 = b"\x15"
_VALUE_BYTES = 64
"""Of any value in Python, at least."""
_PLAIN_GROWTH = 8 * _VALUE_BYTES
"""How much larger than in a table values become, of types that have no references: a boolean is a bit there."""


def names(file: Path) -> list[str]:
    """The names of a table's columns."""
    with _opened(file) as (schema, _):
        return list(schema.names)


def rows(file: Path, wanted: Iterable[str], at: At = unsaid) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row's number, from 1, and those of the `wanted` columns that the table has. `at` is told of each batch
    before it is read. Raises UsageError for a file that is not such a table, is damaged, holds what is not UTF-8, or
    has a row that is too large, or many that are together."""
    number = 0
    with _opened(file) as (schema, batches):
        columns = [name for name in wanted if name in schema.names]
        at("reading", f"{file}: row 1 or one after it", 0)
        looked = False
        for batch in batches(columns):
            for start in range(0, batch.num_rows, _ROWS_AT_A_TIME):
                some = batch.slice(start, _ROWS_AT_A_TIME)
                _require_valid(file, some, number)
                if not looked and (number or _held_bytes(some) > _LOOK_BYTES):
                    looked = True
                    _look_ahead(file, columns, at)
                for part in _parts(file, some, number):
                    for fields in _values(file, part, number):
                        number += 1
                        yield number, fields
                    at("reading", f"{file}: row {number + 1} or one after it", 0)


def _look_ahead(file: Path, columns: list[str], at: At) -> None:
    """Raise UsageError where the rows together hold so many bytes that nobody wrote them: a few hundred bytes may refer
    to one text any number of times. No row becomes Python's here, so a file is refused before hours of work on it."""
    size, held, number = file.stat().st_size, 0, 0
    most = max(_GROWTH * size, _GROWN_BYTES)
    with _opened(file) as (_, batches):
        for batch in batches(columns):
            for start in range(0, batch.num_rows, _ROWS_AT_A_TIME):
                at("reading", f"{file}: row {number + 1} or one after it", 0)
                some = batch.slice(start, _ROWS_AT_A_TIME)
                _require_valid(file, some, number)
                held += _held_bytes(some)
                if held > most:
                    deque(_parts(file, some, number), maxlen=0)  # names a row that is too large by itself
                number += some.num_rows
                if held > most:
                    raise UsageError(
                        f"{file}: row {number}: up to here the rows hold {format_bytes(held)}, and the file has "
                        f"{format_bytes(size)}; at most {_GROWTH:,} times its size is read, or "
                        f"{format_bytes(_GROWN_BYTES)} if that is more; take out rows that repeat others, or convert "
                        "the file to .jsonl if all of them are meant"
                    )


def _held_bytes(batch: Any) -> int:
    """What the values take, each reference to one counted as the value."""
    return int(batch.nbytes) if all(map(_is_plain, batch.schema.types)) else _python_bytes(batch)


def _parts(file: Path, batch: Any, before: int) -> Iterator[Any]:
    """The batch, or where it would be large in Python its rows one by one. Raises UsageError for a row that would be
    too large by itself."""
    plain = all(map(_is_plain, batch.schema.types))
    if (plain and batch.nbytes <= _BATCH_BYTES // _PLAIN_GROWTH) or _python_bytes(batch) <= _BATCH_BYTES:
        yield batch
        return
    for index in range(batch.num_rows):
        row = batch.slice(index, 1)
        if (nbytes := _python_bytes(row)) > _ROW_BYTES:
            raise UsageError(
                f"{file}: row {before + index + 1} would take {nbytes / (1 << 30):.3g} GiB or more "
                f"({_ROW_BYTES >> 30} GiB at most); split it into several rows"
            )
        yield row


@functools.lru_cache(maxsize=256)
def _is_plain(kind: Any) -> bool:
    """Whether values of this type take a bit each at least, and none is there twice."""
    from pyarrow import types

    if types.is_struct(kind) or types.is_map(kind) or types.is_list(kind) or types.is_large_list(kind):
        parts = [kind.field(index).type for index in range(kind.num_fields)] if not types.is_map(kind) else []
        parts += [kind.key_type, kind.item_type] if types.is_map(kind) else []
        return bool(parts) and all(map(_is_plain, parts))
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(of(kind) for of in (*texts, types.is_integer, types.is_floating, types.is_boolean, types.is_temporal))


def _python_bytes(batch: Any) -> int:
    return sum(_bytes_of(column) for column in batch.columns)


def _bytes_of(array: Any) -> int:
    """What the values take in Python, roughly: every reference to a value counts as the value."""
    import pyarrow
    import pyarrow.compute as pc
    from pyarrow import types

    kind, own = array.type, _VALUE_BYTES * len(array)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _bytes_of(array.storage)
    if types.is_dictionary(kind):
        used = pc.value_counts(array.indices.drop_null())
        return own + sum(
            count.as_py() * _bytes_of(array.dictionary.slice(index.as_py(), 1))
            for index, count in zip(used.field("values"), used.field("counts"), strict=True)
        )
    if types.is_struct(kind):
        return own + sum(map(_bytes_of, array.flatten()))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return own + _bytes_of(array.flatten())
    if types.is_map(kind) and len(array):
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return own + sum(_bytes_of(part.slice(first, last - first)) for part in (array.keys, array.items))
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        spans = zip(array.offsets, array.sizes, array.is_valid(), strict=True)
        return own + sum(_bytes_of(array.values.slice(a.as_py(), n.as_py())) for a, n, valid in spans if valid.as_py())
    if types.is_run_end_encoded(kind):
        first = array.find_physical_offset()
        runs = array.values.slice(first, array.find_physical_length())
        return own + len(array) * max((_bytes_of(runs.slice(index, 1)) for index in range(len(runs))), default=0)
    if any(of(kind) for of in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)):
        return own + int(pc.sum(pc.binary_length(array)).as_py() or 0)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return own + sum(len(value.as_buffer() or b"") for value in array if value.is_valid)
    return own + int(array.nbytes)


def _require_valid(file: Path, batch: Any, before: int) -> None:
    """Raise UsageError for a damaged batch, of which values may lie outside of it."""
    try:
        batch.validate(full=True)
    except (ValueError, OverflowError) as error:
        raise _unreadable_rows(file, batch, before, error) from error


def _values(file: Path, batch: Any, before: int) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = batch.to_pylist()
        return found
    except (ValueError, OverflowError) as error:
        raise _unreadable_rows(file, batch, before, error) from error


def _unreadable_rows(file: Path, batch: Any, before: int, error: Exception) -> UsageError:
    reason = str(error).strip().split("\n")[0]
    return UsageError(f"{file}: one of rows {before + 1} to {before + batch.num_rows} cannot be read: {reason}")


def _rows_at_once(file: Path, table: Any, wanted: Sequence[str]) -> int:
    """How many rows of a .parquet file are decoded together. Each may refer to the longest value of a dictionary, or
    repeat what the one before it begins with.

    The first row of each group is read first: where a column's description is missing, that is an error, while a look
    at the description would end the process (pyarrow calls std::terminate)."""
    roots, most, metadata = set(wanted), 1, table.metadata
    with open_regular(file, ".parquet table") as stream:
        for number in range(metadata.num_row_groups):
            next(table.iter_batches(1, row_groups=[number], columns=list(wanted)), None)
            group = metadata.row_group(number)
            for place in range(metadata.num_columns):
                if metadata.schema.column(place).path.split(".")[0] not in roots:
                    continue
                column = group.column(place)
                if "DELTA_BYTE_ARRAY" in column.encodings:
                    most = max(most, column.total_uncompressed_size)
                if column.dictionary_page_offset is not None:
                    stream.seek(column.dictionary_page_offset)
                    most = max(most, _page_bytes(stream.read(_PAGE_HEAD_BYTES)))
    return max(1, min(_ROWS_AT_A_TIME, _ROW_BYTES // most))


def _page_bytes(head: bytes) -> int:
    """How large a page of a .parquet file is without compression, by its header: a structure of Thrift's compact
    protocol, which begins with the type and this size, each a byte that says so and a zigzag number; 0 for others."""
    numbers, place = [], 0
    for _ in range(2):
        if head[place : place + 1] != _NEXT_I32:
            return 0
        end = next((i for i in range(place + 1, len(head)) if head[i] < 0x80), len(head) - 1)
        zigzag = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(head[place + 1 : end + 1]))
        numbers.append((zigzag >> 1) ^ -(zigzag & 1))
        place = end + 1
    return max(0, numbers[1])


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
        with open_regular(file, f"{file.suffix} table"):
            pass  # pyarrow's own error would not say why
    except OSError as error:
        raise unreadable(file, error) from error
    try:
        if file.suffix.lower() == ".parquet":
            with parquet.ParquetFile(file, pre_buffer=False) as table:
                yield (
                    _distinct(file, table.schema_arrow),
                    lambda names: table.iter_batches(_rows_at_once(file, table, names), columns=names),
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
