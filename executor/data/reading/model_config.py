"""Checks a model's JSON documents, and what its config.json says, before a library builds the model.

Owns the bounds. They lie far above what models have, and far below what a machine could only try to hold: a library
builds what it is told, layer by layer. What is within them may still be no model; whoever builds it says so.
"""

import json
import math
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssdplan.plans.errors import UsageError, first_line
from ssdplan.plans.files import read_bounded
from ssdplan.plans.json_errors import json_reason

from .documents import require_itself
from .files import unreadable

MOST_BYTES = 64 << 20
"""Of a document; an index of a million tensors has as many."""
MOST_LAYERS = 4096
MOST_TOKENS = 1 << 22
"""Of a vocabulary."""
MOST_POSITIONS = 1 << 28
MOST_WIDE = 1 << 18
"""Of all other sizes: hidden states, projections, heads, experts."""
_VOCABULARY = re.compile("vocab")
_LAYERS = re.compile(r"(^|_)(n_)?layers?$|^depth$")
_POSITIONS = re.compile(r"position|^n_ctx$|seq|window|context|distance|^audio_")
_WIDE = re.compile(r"(size|dims?|width|heads?|embd|inner|model|rank|groups|kernel|experts?)$|hidden|intermediate|ffn")
_NEEDED = frozenset(
    {
        *("vocab_size", "hidden_size", "n_embd", "d_model"),
        *("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
        *("num_attention_heads", "num_heads", "n_head", "n_heads", "num_key_value_heads"),
    }
)
"""Sizes that no model has as 0, or below."""
_NOT_BELOW_0 = frozenset({"intermediate_size", "ffn_dim", "n_inner", "head_dim"})
_NAMES = frozenset({"model_type", "architectures", "_name_or_path", "transformers_version"})
"""Fields that name the model as a whole."""
_ENDLESS = "time_step_limit"
"""The one field whose values may be infinite, as Mamba's are."""


def require_regular(model_dir: Path) -> None:
    """Raise UsageError for what is neither a file nor a directory in a model's directory, links followed: a library
    that opens a FIFO waits for ever, and a device has no end."""
    for path in sorted(model_dir.iterdir()):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:  # a link that leads nowhere: who needs it says so
            continue
        except OSError as error:
            raise unreadable(path, error) from error
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise UsageError(f"{path}: is not a regular file; take it away, or copy the model's own again")


def document(file: Path, kind: str) -> bytes:
    """The content of one of a model's JSON documents; `kind` is what it is, for errors. Raises UsageError for what is
    no regular file, too large or a pointer to another, IoFailure."""
    try:
        content = read_bounded(file, MOST_BYTES, kind)
    except OSError as error:
        raise unreadable(file, error) from error
    require_itself(file)
    return content


def parsed(content: bytes) -> Any:
    """What a document says. Raises ValueError for what is no JSON, or is nested too deeply to be read."""
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_config(file: Path) -> dict[str, Any]:
    """A config.json, whose numbers are such as a model may have. Raises UsageError, and as `document`."""
    content = document(file, "model configuration")
    try:
        config = parsed(content)
    except ValueError as error:
        raise UsageError(f"{file}: not a model configuration ({json_reason(error)})") from error
    if not isinstance(config, dict):
        raise UsageError(f"{file}: not a model configuration (it holds no object of fields)")
    for name, value in _numbers(config):
        if (why := _wrong(name, value)) is not None:
            raise UsageError(f"{file}: {name} is {value}, {why}; copy the model's own again")
    return config


def blamed(config: dict[str, Any], error: Exception) -> str | None:
    """Which field of a configuration a library's error about it is probably of, with the value; None where none stands
    out: a word that the error names in quotes, or a size of 0."""
    said = str(error)
    words = {word for _, word in re.findall(r"(['\"`])(.+?)\1", said)}
    for name, value in _leaves(config):
        if isinstance(value, str) and value in words and name not in _NAMES:
            return f"{name} is {value!r}, which transformers does not know; copy the model's own again"
    for name, value in _leaves(config):
        if value == 0 and not isinstance(value, bool | str | float) and _WIDE.search(name):
            return f"{name} is 0, and transformers cannot build that ({first_line(error)}); copy the model's own again"
    return None


def _numbers(config: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number in a configuration, with the name of the field that it is in."""
    return (
        (name, value)
        for name, value in _leaves(config)
        if isinstance(value, int | float) and not isinstance(value, bool)
    )


def _leaves(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every value in a configuration that holds no others, with the name of the field that it is in."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            if isinstance(written := value.get("__float__"), str) and len(value) == 1:  # as transformers writes it
                left.append((name, {"NaN": math.nan}.get(written, math.inf)))
            left += value.items()
        elif isinstance(value, list):
            left += ((name, each) for each in value)
        else:
            yield name, value


def _wrong(name: str, value: float) -> str | None:
    """What is wrong with a number, if anything."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if name == _ENDLESS and not math.isnan(value) else "which is no finite number"
    if name in _NEEDED and value < 1:
        return "and a model has at least 1"
    if value < 0 and name in _NOT_BELOW_0:
        return "and no size is below 0"
    for names, most in (
        (_VOCABULARY, MOST_TOKENS),
        (_LAYERS, MOST_LAYERS),
        (_POSITIONS, MOST_POSITIONS),
        (_WIDE, MOST_WIDE),
    ):
        if names.search(name):
            return f"and a model has at most {most:,}" if value > most else None
    return None
