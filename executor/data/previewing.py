"""Previewing: makes a preview of untrusted data and models in a process of its own that is watched (`apart.py`).

Owns what is asked of that process, `python -m ssdplan.executor.data.previewing`, and how the preview comes back.
`preview.py` makes the preview.
"""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .apart import LIMITS, Limits, answer, ask
from .preview import Part, Preview, Shown, look
from .reader import Here
from .reading.places import At, unsaid
from .text_data import TextData
from .tokenising import Paced, Progress
from .tokens import load_tokenizer, positions_of, vocabulary_of


@dataclass(frozen=True)
class Order:
    """Which data are looked at, by which model's tokenizer, as `TextData` has it; the first `samples` are shown.

    Without a `sequence_length` rows have `usual_length`, or as many as the model has positions where these are fewer.
    """

    model: str
    data: str
    sequence_length: int | None
    usual_length: int
    pack: bool
    format: str | None
    append_eos: bool
    cache: str | None
    samples: int


def look_here(order: Order, progress: Progress | None, at: At = unsaid) -> Preview:
    """The preview, made in this process. `at` is told of what is worked on. Raises as `load_tokenizer` and
    `TextData` do."""
    at("reading", order.model, 0)
    model, path = Path(order.model), Path(order.data)
    tokenizer, vocab_size = load_tokenizer(model), vocabulary_of(model)
    length, length_from = order.sequence_length, "as given"
    if length is None:
        length, length_from = order.usual_length, "since --sequence-length is not given"
        if (most := positions_of(model)) is not None and most < length:
            length, length_from = most, f"the model's max_position_embeddings, {length_from}"

    data = TextData(
        path,
        Here(tokenizer, at=at),
        sequence_length=length,
        pack=order.pack,
        format=order.format,
        append_eos=order.append_eos,
        cache=None if order.cache is None else Path(order.cache),
        vocab_size=vocab_size,
        progress=progress,
        refuse=False,
    )
    return look(path, data, tokenizer, order.samples, length_from)


def look_apart(order: Order, progress: Progress | None, limits: Limits = LIMITS) -> Preview:
    """The same, made in a process of its own. Raises its errors, and those of `apart.ask`."""
    shown: list[Shown] = []
    found: list[dict[str, Any]] = []

    def told(said: dict[str, Any]) -> None:
        if "shown" in said:
            parts = tuple(Part(**part) for part in said["shown"].pop("parts"))
            shown.append(Shown(**said["shown"], parts=parts))
        elif "preview" in said:
            found.append(said["preview"])
        elif progress is not None:
            progress(said["done"], said["total"])

    cache = None if order.cache is None else Path(order.cache)
    ask(__name__, dataclasses.asdict(order), told, order.data, limits, cache)
    [preview] = found
    return Preview(**{**preview, "notes": tuple(preview["notes"]), "shown": tuple(shown)})


def main() -> int:
    def asked(request: dict[str, Any], at: At, tell: Callable[..., None]) -> None:
        preview = look_here(Order(**request), Paced(lambda done, total: tell(done=done, total=total)), at)
        for each in preview.shown:
            tell(shown=dataclasses.asdict(each))
        tell(preview=dataclasses.replace(preview, shown=()).as_json())

    return answer(asked)


if __name__ == "__main__":
    sys.exit(main())
