"""The kinds of files that commands write, and how a file that ssdplan wrote is told from another.

Owns what the writers' files look like: documents by their schema, pages and traces by how they begin and end, tables by
their columns. It writes none of them, and believes nothing else that a file says.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ssdplan.plans.errors import UsageError
from ssdplan.plans.files import open_regular, read_bounded

_LOOK_BYTES = 1 << 16
_PAGE = re.compile(
    rb'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    rb'<meta http-equiv="Content-Security-Policy" content="default-src [^"]*">.{0,1024}?<title>[^<]*: ssdplan</title>',
    re.DOTALL,
)
_TRACE_BEGINS = b'{"traceEvents":['
_TRACE_SAYS = b'"otherData":{"format":"ssdplan.trace'
_COLUMNS = (
    {"step", "skipped", "eval_loss", "snapshot_seconds", "resumed"},
    {"swept", "label", "value", "refusal"},
    {"layer_class", "micro_batch_size", "saved_bytes", "forward_seconds", "fence", "outlier"},
    {"order", "state", "state_class", "what", "uses", "stays"},
    {"group", "name", "unit", "ours", "rival", "ratio"},
    {"name", "about", "tokens_per_second", "step_seconds"},
)
"""Of each table some columns that it always has: a run's steps, a sweep, sub-layers, prefetch, bench, compare."""


@dataclass(frozen=True)
class Kind:
    """A kind of file. `is_at` says whether the regular file at a path is one that ssdplan wrote; raises OSError."""

    name: str
    is_at: Callable[[Path], bool]


def _document(kind: str) -> Kind:
    return Kind(kind, lambda path: _schema(path, kind).startswith(f"ssdplan.{kind}/"))


def _schema(path: Path, kind: str) -> str:
    """What a document of ours says of itself, of whatever version; empty where it is none that could be of `kind`."""
    from ssdplan.plans.documents.base import MAX_DOCUMENT_BYTES

    try:
        data = read_bounded(path, MAX_DOCUMENT_BYTES, kind)
        content = json.loads(data) if f'"ssdplan.{kind}/'.encode() in data else None
    except (UsageError, ValueError, RecursionError):  # too large, or no JSON
        return ""
    schema = content.get("schema") if isinstance(content, dict) else None
    return schema if isinstance(schema, str) else ""


def _is_page(path: Path) -> bool:
    return _PAGE.match(_ends(path)[0]) is not None


def _is_trace(path: Path) -> bool:
    begins, ends = _ends(path)
    return begins.startswith(_TRACE_BEGINS) and _TRACE_SAYS in ends


def _is_table(path: Path) -> bool:
    columns = set(_ends(path)[0].split(b"\r\n", 1)[0].decode(errors="replace").split(","))
    return any(columns >= always for always in _COLUMNS)


def _ends(path: Path) -> tuple[bytes, bytes]:
    """How a file begins, and how it ends."""
    with open_regular(path, "file of ssdplan") as file:
        begins = file.read(_LOOK_BYTES)
        file.seek(-min(_LOOK_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
        return begins, file.read(_LOOK_BYTES)


PLAN, PROFILE = _document("plan"), _document("profile")
PAGE, TABLE, TRACE = Kind("page", _is_page), Kind("table", _is_table), Kind("trace", _is_trace)
