"""Rendering: prompts, completions and conversations become tokens, each marked as learnt or not.

Owns which of a sample's tokens count towards the loss, and proves it: where a part that is learnt begins and ends, the
tokens of the text up to there must be the first of the whole text's tokens. Where a token reaches into what is learnt,
the two sides are tokenised apart, as a model sees them that is asked. A sample for which neither holds is refused by
name. `samples/conversations.py` makes a conversation's text.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from ssdplan.plans.errors import UsageError

from .frame import Frame
from .reading.places import At, unsaid
from .samples.conversations import Chat, Spans
from .samples.formats import Completion, Conversation
from .samples.notes import AGAIN, UNREAD, Tally
from .tokens import BATCH_CHARACTERS, WHOLE_CHARACTERS, encode, one_of, special_tokens_around

NOT_LEARNT = np.uint32(1 << 31)
"""Set in a token that the loss does not count; the rest is its id."""

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class _Rendered:
    """A sample's text, and the spans of it, in characters, that are learnt."""

    place: str
    text: str
    spans: Spans
    completes: bool
    """Whether it is a prompt and its completion, which gets the special tokens of a text, or a whole conversation."""

    def cuts(self) -> list[int]:
        """Where the text's tokens must be known to end, but for its ends."""
        return sorted({cut for span in self.spans for cut in span} - {0, len(self.text)})

    def around(self, cut: int) -> str:
        """What an error shows of the text."""
        return repr(self.text[max(0, cut - 20) : cut + 20])


def sample_tokens(
    samples: Iterable[Completion | Conversation],
    tokenizer: Any,
    eos: int,
    instant: datetime,
    tally: Tally,
    ends: Collection[int] = (),
    append_end: bool = False,
    at: At = unsaid,
) -> Iterator[Tokens]:
    """Yields each sample's tokens, in order; what is not learnt has NOT_LEARNT set. `instant`: when it is for a chat
    template that writes the time. `ends`: tokens at which a model stops.

    A completion is learnt with the end-of-sequence token after it, or with one of `ends` that it brings (`Frame`). The
    assistant's messages of a conversation are learnt with what the template ends them by. With `append_end` one of
    `ends` is learnt after the last of these messages in any case (`_with_end`). `at` is told of what is rendered and
    tokenised next. Raises UsageError, with the sample's place, where that cannot be told exactly.
    """
    frame = Frame(tokenizer, special_tokens_around(tokenizer), eos, ends)
    number = 0
    for batch in _batched(_rendered(samples, tokenizer, instant, ends, tally, at)):
        texts = [[each.text, *(each.text[:cut] for cut in each.cuts())] for each in batch]
        places = [each.place for each, group in zip(batch, texts, strict=True) for _ in group]
        flat = [text for group in texts for text in group]
        at("tokenising", one_of(places), sum(map(len, flat)))
        encoded = iter(encode(tokenizer, flat, places=places))
        for each, group in zip(batch, texts, strict=True):
            whole, *prefixes = [next(encoded) for _ in group]
            if each.completes:
                yield _completion(each, whole, prefixes, tokenizer, frame, tally, number)
            else:
                ids, spans = _conversation(each, whole, prefixes, tokenizer)
                yield _marked(*(_with_end(ids, spans, ends, eos) if append_end else (ids, spans)))
            number += 1


def _rendered(
    samples: Iterable[Completion | Conversation],
    tokenizer: Any,
    instant: datetime,
    ends: Collection[int],
    tally: Tally,
    at: At,
) -> Iterator[_Rendered]:
    chat: Chat | None = None
    for number, sample in enumerate(samples):
        if isinstance(sample, Completion):
            text = sample.prompt + sample.completion
            rendered = _Rendered(sample.place, text, ((len(sample.prompt), len(text)),), completes=True)
        else:
            chat = chat or Chat(tokenizer, instant, ends)
            at("rendering", sample.place, 0)
            found = chat.render(sample)
            for kind, detail in found.lacks:
                tally.add(kind, number, detail)
            rendered = _Rendered(sample.place, found.text, found.spans, completes=False)
        for name in sample.unread:
            tally.add(UNREAD, number, name)
        if len(rendered.text) > WHOLE_CHARACTERS:
            raise UsageError(
                f"{sample.place}: a sample of {len(rendered.text)} characters ({WHOLE_CHARACTERS} at most)"
            )
        yield rendered


def _batched(samples: Iterable[_Rendered]) -> Iterator[list[_Rendered]]:
    batch: list[_Rendered] = []
    characters = 0
    for sample in samples:
        batch.append(sample)
        characters += len(sample.text) + sum(sample.cuts()) + 64
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _completion(
    sample: _Rendered,
    whole: list[int],
    prefixes: list[list[int]],
    tokenizer: Any,
    frame: Frame,
    tally: Tally,
    number: int,
) -> Tokens:
    if prefixes and whole[: len(prefixes[0])] != prefixes[0]:
        prompt, answer = prefixes[0], _apart(sample, prefixes[0], whole, tokenizer)
    else:
        start = len(prefixes[0]) if prefixes else (0 if sample.spans[0][0] == 0 else len(whole))
        prompt, answer = whole[:start], whole[start:]
    text = [*prompt, *answer]
    start = frame.start(text)
    given, answer = prompt[start:], answer[max(0, start - len(prompt)) :]
    stop, closing = frame.stop(answer)  # the end of a prompt is no end of what is learnt
    frame.tell(tally, number, text[:start], answer[stop:], answer[:stop])
    front, words = frame.in_front(answer[:stop]) if given else (0, "")
    if words:
        tally.add(AGAIN, number, words)
    midst = frame.midst()
    midst.see(given)
    midst.see(answer[front : frame.body(answer)])
    midst.tell(tally, number)
    found = np.asarray([*frame.opening, *given, *answer[:stop], *closing], np.uint32)
    found[: len(frame.opening) + len(given)] |= NOT_LEARNT
    return found


def _apart(sample: _Rendered, prompt: list[int], whole: list[int], tokenizer: Any) -> list[int]:
    """The completion's tokens by itself, where prompt and completion share a token when they are tokenised as one.

    A model that is asked sees the prompt's tokens alone. Refused where the two then do not read as the whole does.
    """
    start = sample.spans[0][0]
    (answer,) = encode(tokenizer, [sample.text[start:]])
    if not _reads_as(tokenizer, [*prompt, *answer], whole):
        raise UsageError(
            f"{sample.place}: prompt and completion share a token, in {sample.around(start)}, and cannot be taken "
            "apart; let the prompt end, or the completion begin, at the border of a word"
        )
    return answer


def _conversation(
    sample: _Rendered, whole: list[int], prefixes: list[list[int]], tokenizer: Any
) -> tuple[list[int], Spans]:
    """The tokens, and the spans of them that are learnt."""
    ends = {0: 0, len(sample.text): len(whole)}
    for cut, prefix in zip(sample.cuts(), prefixes, strict=True):
        if whole[: len(prefix)] != prefix:
            whole, ends = _in_parts(sample, whole, tokenizer)
            break
        ends[cut] = len(prefix)
    return whole, tuple((ends[start], ends[stop]) for start, stop in sample.spans)


def _in_parts(sample: _Rendered, whole: list[int], tokenizer: Any) -> tuple[list[int], dict[int, int]]:
    """The tokens where a token of the whole text reaches from what asks the assistant into its message, as when both
    have line breaks there: a model that is asked sees the tokens of what asks alone, so what follows is tokenised by
    itself. And where among them the text's cuts are.

    Refused where a token reaches out of a message at its end, for then it is neither learnt nor not, and where the
    parts do not read as the whole does.
    """
    begins = {start for start, _ in sample.spans}
    ids: list[int] = []
    ends, base = {0: 0}, 0
    cuts = [*sample.cuts(), len(sample.text)]
    while base < len(sample.text):
        ahead = [cut for cut in cuts if cut > base]
        *prefixes, rest = encode(tokenizer, [sample.text[base:cut] for cut in ahead])
        torn = next((i for i, prefix in enumerate(prefixes) if rest[: len(prefix)] != prefix), len(prefixes))
        if torn < len(prefixes) and ahead[torn] not in begins:
            raise UsageError(
                f"{sample.place}: a token reaches across the end of an assistant's message, in "
                f"{sample.around(ahead[torn])}, so it is neither learnt nor not; change the message there, or the chat "
                "template"
            )
        for cut, prefix in zip(ahead[: torn + 1], [*prefixes, rest], strict=False):
            ends[cut] = len(ids) + len(prefix)
        ids += [*prefixes, rest][torn]
        base = ahead[torn]
    if not _reads_as(tokenizer, ids, whole):
        first = min(begins - {0})
        raise UsageError(
            f"{sample.place}: what asks the assistant and its message share a token, as in {sample.around(first)}, and "
            "cannot be taken apart; begin the message without white space, or change the chat template"
        )
    return ids, ends


def _reads_as(tokenizer: Any, ids: list[int], whole: list[int]) -> bool:
    one, other = (tokenizer.decode(each, clean_up_tokenization_spaces=False) for each in (ids, whole))
    return bool(one == other)


def _with_end(ids: list[int], spans: Spans, ends: Collection[int], eos: int) -> tuple[list[int], Spans]:
    """The same, so that an end token is learnt with the last of the assistant's messages, if none is within it yet: the
    one that follows it, which then is learnt behind each, or else `eos`, with which the sample ends."""

    def learns(start: int, stop: int) -> bool:
        return any(token in ends for token in ids[start:stop])

    start, stop = spans[-1]
    if learns(start, stop):
        return ids, spans
    if stop < len(ids) and ids[stop] in ends:
        return ids, tuple((a, b if learns(a, b) else b + learns(b, b + 1)) for a, b in spans)
    return [*ids[:stop], eos], (*spans[:-1], (start, stop + 1))


def _marked(ids: list[int], spans: Spans) -> Tokens:
    found = np.asarray(ids, np.uint32) | NOT_LEARNT
    for start, stop in spans:
        found[start:stop] &= ~NOT_LEARNT
    return found
