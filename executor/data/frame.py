"""The frame of a text: the special tokens at its start and at its end.

Owns that each is there once, whatever the text brings along, and what is told of that. It never makes tokens of a text.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from .samples.notes import BLANKS, OTHER_END, OWN_TOKENS, Tally

_BLANK = re.compile("[\\s\ufeff\u200b\u2060]*")
"""White space, byte order marks and other characters without width."""


def _is_blank(text: str) -> bool:
    """Whether nothing of a text is to be seen."""
    return _BLANK.fullmatch(text) is not None


class Frame:
    """The special tokens around a sample: those of the tokenizer, and the end-of-sequence token.

    A text may bring such tokens of its own, several times and with white space outside them. They are taken away with
    that white space, and put there once. A text that ends with another token at which a model stops (`ends`) keeps that
    one as its end.
    """

    def __init__(
        self, tokenizer: Any, around: tuple[list[int], list[int]], eos: int, ends: Collection[int] = ()
    ) -> None:
        """`around`: what the tokenizer puts before and after a text by itself."""
        before, self._after = around
        self.opening = before
        """What is put before a text."""
        self._closing = self._after if self._after and self._after[-1] == eos else [*self._after, eos]
        self._starts, self._stops = frozenset(before), frozenset(self._closing)
        self._ends = self._stops | frozenset(ends)
        self._tokenizer = tokenizer
        self._blanks: dict[int, bool] = {}

    def start(self, ids: Sequence[int]) -> int:
        """How many of a text's first tokens are taken away: those up to the last that is put before it in any case."""
        return self._run(ids, self._starts)

    def stop(self, ids: Sequence[int]) -> tuple[int, list[int]]:
        """How many tokens of a text stay, without those of its `start`, and what is put behind them."""
        run = self._run(ids[::-1], self._ends, backwards=True)
        ending = range(len(ids) - run, len(ids))
        own = next((place for place in ending if ids[place] in self._stops), None)
        if own is not None or not run:
            return len(ids) if own is None else own, self._closing
        return 1 + next(place for place in reversed(ending) if ids[place] in self._ends), []

    def in_front(self, ids: Sequence[int]) -> str:
        """In words, the tokens that are put before a text, where these begin with some."""
        return self._words(ids[: self.start(ids)], self._starts)

    def tell(self, tally: Tally, sample: int, start: Sequence[int], end: Sequence[int], kept: Sequence[int]) -> None:
        """Tell of a sample's own special tokens: its first tokens `start` and its last tokens `end` were taken away,
        and those between them are `kept`."""
        taken = [*start, *end]
        if words := self._words(taken, self._starts | self._stops):
            tally.add(OWN_TOKENS, sample, words)
        if kept and kept[-1] in self._ends - self._stops and not self._stops & {*end}:
            tally.add(OTHER_END, sample, self._words(kept[-1:], self._ends))
        if any(token not in self._starts | self._ends for token in taken):
            tally.add(BLANKS, sample, "")

    def _run(self, ids: Sequence[int], own: Collection[int], *, backwards: bool = False) -> int:
        """How many of the first tokens are of `own` or white space; 0 without one of `own`, with which it ends."""
        place = found = 0
        while True:
            while place < len(ids) and ids[place] not in own and self._may_be_blank(ids[place]):
                place += 1
            if place == len(ids) or ids[place] not in own:
                return found
            between = ids[found:place]
            if between and not _is_blank(self._tokenizer.decode(between[::-1] if backwards else between)):
                return found
            place = found = place + 1

    def _may_be_blank(self, token: int) -> bool:
        """Whether a token is white space, or some bytes of it."""
        if token not in self._blanks:
            self._blanks[token] = _is_blank(self._tokenizer.decode([token]).strip("\ufffd"))
        return self._blanks[token]

    def _words(self, ids: Sequence[int], own: Collection[int]) -> str:
        found = [token for token in ids if token in own]
        return " and ".join(dict.fromkeys(map(str, self._tokenizer.convert_ids_to_tokens(found))))

    def unframed(self, ids: list[int]) -> list[int] | None:
        """A text's own tokens, of those that the tokenizer made of it with its special tokens; None where it did not
        put them around it as around others."""
        start, stop = len(self.opening), len(ids) - len(self._after)
        return (
            ids[start:stop] if start <= stop and [*ids[:start], *ids[stop:]] == [*self.opening, *self._after] else None
        )

    def ended(self, ids: list[int]) -> list[int]:
        """Tokens that the tokenizer put others around as only it knows, with an end behind them."""
        return [*ids, *self._closing[len(self._after) :]]
