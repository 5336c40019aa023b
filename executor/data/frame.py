"""The frame of a text: the special tokens at its start and at its end.

Owns that each is there once, whatever the text brings along, and what is told of that and of those within the text
(`Midst`). It never makes tokens of a text.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from .samples.notes import AT_START, BLANKS, MIDST, OTHER_END, OWN_TOKENS, SEVERAL, Tally

_BLANK = re.compile("[\\s\ufeff\u200b\u2060]*")
"""White space, byte order marks and other characters without width."""


def _is_blank(text: str) -> bool:
    """Whether nothing of a text is to be seen."""
    return _BLANK.fullmatch(text) is not None


class Frame:
    """The special tokens around a sample: those of the tokenizer, and the end-of-sequence token.

    A text may bring such tokens of its own, several times and with white space outside them. They are taken away with
    that white space, and put there once. A text that ends with another token at which a model stops (`ends`) keeps that
    one as its end, and where the tokenizer puts no token before a text, one that begins texts stays: each once.
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
        begins = {tokenizer.bos_token_id} - {None}
        self.begins = self._starts | begins
        """Tokens that begin texts, whether or not the tokenizer puts them there by itself."""
        self.bounds = self.begins | self._ends
        """Tokens that begin or end texts."""
        self._own_begins = begins - self._starts
        added = tokenizer.added_tokens_decoder.items()
        self.others = frozenset(id for id, token in added if token.special) - self.bounds
        """All other special tokens."""
        self._tokenizer = tokenizer
        self._blanks: dict[int, bool] = {}

    def start(self, ids: Sequence[int]) -> int:
        """How many of a text's first tokens are taken away: those up to the last that is put before it in any case, and
        those up to the last of several that begin texts otherwise."""
        taken = self._run(ids, self._starts)
        run = self._run(ids[taken:], self._own_begins)
        own = [place for place in range(taken, taken + run) if ids[place] in self._own_begins]
        return own[-1] if len(own) > 1 else taken

    def stop(self, ids: Sequence[int]) -> tuple[int, list[int]]:
        """How many tokens of a text stay, without those of its `start`, and what is put behind them."""
        run = self._run(ids[::-1], self._ends, backwards=True)
        ending = range(len(ids) - run, len(ids))
        own = next((place for place in ending if ids[place] in self._stops), None)
        others = [place for place in ending if ids[place] in self._ends and (own is None or place < own)]
        several = False
        while len(others) > 1 and ids[others[-1]] == ids[others[-2]]:
            others.pop()
            several = True
        closing = self._closing if own is not None or not others else []
        if others and (own is None or several):
            return others[-1] + 1, closing
        return len(ids) if own is None else own, closing

    def body(self, ids: Sequence[int]) -> int:
        """How many of a text's tokens are before its end tokens at the end."""
        return len(ids) - self._run(ids[::-1], self._ends, backwards=True)

    def in_front(self, ids: Sequence[int]) -> tuple[int, str]:
        """How many of the first tokens begin texts, with white space before them; and those tokens in words."""
        run = self._run(ids, self.begins)
        return run, self.words(ids[:run], self.begins)

    def tell(self, tally: Tally, sample: int, start: Sequence[int], end: Sequence[int], kept: Sequence[int]) -> None:
        """Tell of a sample's own special tokens: its first tokens `start` and its last tokens `end` were taken away,
        and those between them are `kept`."""
        taken = [*(token for token in start if token not in self._own_begins), *end]
        if words := self.words(taken, self._starts | self._stops):
            tally.add(OWN_TOKENS, sample, words)
        several = [*self._own_begins.intersection(start), *({*kept[-1:]} & {*end} & (self._ends - self._stops))]
        if several:
            tally.add(SEVERAL, sample, self.words(several, self.bounds))
        if kept and kept[-1] in self._ends - self._stops and not self._stops & {*end}:
            tally.add(OTHER_END, sample, self.words(kept[-1:], self._ends))
        if any(token not in self._starts | self._ends for token in taken):
            tally.add(BLANKS, sample, "")

    def _run(self, ids: Sequence[int], own: Collection[int], *, backwards: bool = False) -> int:
        """How many of the first tokens are of `own` or white space; 0 without one of `own`, with which it ends."""
        place = found = 0
        while True:
            while place < len(ids) and ids[place] not in own and self.may_be_blank(ids[place]):
                place += 1
            if place == len(ids) or ids[place] not in own:
                return found
            between = ids[found:place]
            if not self.are_blank(between[::-1] if backwards else between):
                return found
            place = found = place + 1

    def are_blank(self, ids: Sequence[int]) -> bool:
        """Whether tokens, of which each may be white space, are that together."""
        return not ids or _is_blank(self._tokenizer.decode(ids))

    def may_be_blank(self, token: int) -> bool:
        """Whether a token is white space, or some bytes of it."""
        if token not in self._blanks:
            self._blanks[token] = _is_blank(self._tokenizer.decode([token]).strip("\ufffd"))
        return self._blanks[token]

    def words(self, ids: Sequence[int], own: Collection[int]) -> str:
        """The names of those of the tokens that are among `own`, each once."""
        found = [token for token in ids if token in own]
        return " and ".join(dict.fromkeys(map(str, self._tokenizer.convert_ids_to_tokens(found))))

    def midst(self) -> "Midst":
        """For the tokens of one text."""
        return Midst(self)

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


class Midst:
    """The tokens that begin or end texts within one text, whose tokens are given piece by piece: the first that has
    text on both sides, and the first at the text's start.

    One with another special token behind it, as `<|im_end|>` before `<|im_start|>`, ends a turn and not the text: it
    is none. Nor is a token that begins texts, where it is the text's very first.
    """

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._begun = False
        self._lead: list[int] | None = []
        """The first tokens, while they may be white space and such tokens alone."""
        self._at_start: int | None = None
        self._found: int | None = None
        self._waiting: int | None = None
        """One of which the next tokens say whether it is one."""
        self._between: list[int] = []

    def see(self, ids: Sequence[int]) -> None:
        """The next of the text's tokens."""
        if self._found is not None or not ids:
            return
        frame = self._frame
        rest = ids[1:] if not self._begun and ids[0] in frame.begins else ids
        self._begun = True
        if self._waiting is None and frame.bounds.isdisjoint(rest):
            self._pass(rest)
            return
        for token in rest:
            if self._waiting is not None:
                if token not in frame.bounds and frame.may_be_blank(token):
                    self._between.append(token)
                    continue
                if token in frame.others and frame.are_blank(self._between):
                    self._waiting = self._lead = None
                    continue
                if not self._settle():
                    return
                self._waiting = None
                self._pass(self._between)
            if token in frame.bounds:
                self._wait(token)
            else:
                self._pass([token])

    def _pass(self, ids: Sequence[int]) -> None:
        """Go on behind tokens that are none of such."""
        if self._lead is not None:
            self._lead = [*self._lead, *ids] if all(map(self._frame.may_be_blank, ids)) else None

    def _wait(self, token: int) -> None:
        if self._lead is not None:
            self._lead = [] if self._frame.are_blank(self._lead) else None
        self._waiting, self._between = token, []

    def _settle(self) -> bool:
        """The token that waits is one. Whether there is more to look for."""
        if self._lead is None:
            self._found = self._waiting
        elif self._at_start is None:
            self._at_start = self._waiting
        return self._lead is not None

    def tell(self, tally: Tally, sample: int) -> None:
        """Tell of them, once all but the text's end has been seen."""
        if self._waiting is not None and self._found is None:
            self._settle()
        for kind, token in ((AT_START, self._at_start), (MIDST, self._found)):
            if token is not None:
                tally.add(kind, sample, self._frame.words([token], self._frame.bounds))
