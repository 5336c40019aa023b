"""Frames: what documents hold, as tables of pandas with a type for each column.

Owns how a value becomes a cell: whole numbers stay whole where others are missing, and what a document has not is
missing. Import it where a table is made: pandas takes time and memory that planning and training do without.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pandas as pd
from pydantic import BaseModel

from ..documents.profile import Profile
from ..documents.sweep import Sweep, SweepResult
from ..graph.ops import TIERS
from .prefetch import Entry
from .sublayers import blocks_with_backward, bound_of, fence, outliers, throughput

INTEGER, NUMBER, TRUTH, TEXT = "Int64", "float64", "boolean", "str"
_MOST_WHOLE = 1 << 53
"""Up to here a float64 holds each whole number."""
_TYPES = {int: INTEGER, float: NUMBER, bool: TRUTH, str: TEXT}


def frame_of(columns: Mapping[str, str], rows: Iterable[Mapping[str, object]]) -> pd.DataFrame:
    """A row for each of `rows`, with `columns` (name -> type of pandas) in their order. What a row lacks, or has as
    None, is missing; what is no column is left out."""
    return pd.DataFrame(list(rows), columns=list(columns), dtype=object).astype(dict(columns))


def columns_of(part: type[BaseModel]) -> dict[str, str]:
    """The fields of `part` that are one number, truth or text each, in their order -> the type of pandas."""
    kinds = {name: _kind(field.annotation) for name, field in part.model_fields.items()}
    return {name: _TYPES[kind] for name, kind in kinds.items() if kind in _TYPES}


def sweep_frame(sweep: Sweep) -> pd.DataFrame:
    """A row for each point, in their order: what was `swept`, the point's `label` and `value` (bytes, where a size was
    swept; integers where all values are whole; missing where names were swept), the fields of its result, missing where
    there is none, and the `refusal`, which says why."""
    values = [point.value for point in sweep.points if point.value is not None]
    whole = all(value.is_integer() and value <= _MOST_WHOLE for value in values)
    value = INTEGER if whole else NUMBER
    columns = {"swept": TEXT, "label": TEXT, "value": value, **columns_of(SweepResult), "refusal": TEXT}
    return frame_of(
        columns,
        (
            {"swept": sweep.name, **point.model_dump(), **(point.result.model_dump() if point.result else {})}
            for point in sweep.points
        ),
    )


def sublayers_frame(profile: Profile) -> pd.DataFrame:
    """A row for each sub-layer of each class of blocks at each micro-batch size, in order: what was measured, its
    `throughput`, and what PyAO's rule says of it. Bytes and seconds; `throughput`, `fence` and `bandwidth` in bytes a
    second."""
    columns = {
        "layer_class": TEXT,
        "micro_batch_size": INTEGER,
        "name": TEXT,
        "saved_bytes": INTEGER,
        "forward_seconds": NUMBER,
        "samples": INTEGER,
        "throughput": NUMBER,
        "fence": NUMBER,
        "bandwidth": NUMBER,
        "outlier": TRUTH,
    }
    model, bandwidth = profile.model, bound_of(profile.machine)
    rows: list[dict[str, object]] = []
    for layer_class in blocks_with_backward(model):
        for size in model.micro_batch_sizes:
            sublayers = model.timing(layer_class, size).sublayers
            same = {
                "layer_class": layer_class,
                "micro_batch_size": size,
                "fence": fence(sublayers),
                "bandwidth": bandwidth,
            }
            for each, outlier in zip(sublayers, outliers(sublayers, bandwidth), strict=True):
                rows.append({**each.model_dump(), **same, "throughput": throughput(each), "outlier": outlier})
    return frame_of(columns, rows)


def prefetch_frame(entries: Sequence[Entry]) -> pd.DataFrame:
    """A row for each row of the prefetch table, in order: bytes on each tier that is its home, and its stays elsewhere
    as `tier:start-end` with blanks between, in seconds from the start of the step."""
    columns = {
        "order": INTEGER,
        "state": TEXT,
        "state_class": TEXT,
        "what": TEXT,
        "device_bytes": INTEGER,
        "host_bytes": INTEGER,
        "ssd_bytes": INTEGER,
        "uses": INTEGER,
        "first_seconds": NUMBER,
        "last_seconds": NUMBER,
        "between_bytes": INTEGER,
        "place_bytes": INTEGER,
        "stays": TEXT,
    }
    return frame_of(
        columns,
        (
            {
                "order": each.order,
                "state": each.state,
                "state_class": each.state_class,
                "what": each.what,
                **{f"{tier}_bytes": each.home.get(tier, 0) for tier in TIERS},
                "uses": each.uses,
                "first_seconds": each.first,
                "last_seconds": each.last,
                "between_bytes": each.between,
                "place_bytes": each.size_class,
                "stays": " ".join(f"{stay.tier}:{stay.start:.9f}-{stay.end:.9f}" for stay in each.stays),
            }
            for each in entries
        ),
    )


def _kind(annotation: Any) -> object:
    """The type behind what a field may be: `int` of `Bytes | None`."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        kinds = {_kind(each) for each in get_args(annotation)} - {NoneType}
        return kinds.pop() if len(kinds) == 1 else None
    return annotation
