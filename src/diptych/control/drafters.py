"""Drafters as control sees them: what followed the last tokens where they stood before, and what the user says will come.

    drafter = Lookup()
    drafter.propose(token_ids, 16)       # [] where nothing like the last tokens stood before

All of them work on integers, cost O(1) per token however long the text is, and may be wrong: a step verifies every draft.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Protocol

_READ_AT_ONCE = 4096  # tokens indexed per call: some milliseconds, so that a long prompt does not hold up one step
FRESH, LIKELY, FOLLOWED = range(3)  # confidence: two tokens agree, three do, or the last guess from there was right


class Drafter(Protocol):
    """Guesses what comes next in one sequence."""

    confidence: int  # of the last guess: FRESH, LIKELY or FOLLOWED

    def propose(self, token_ids: SequenceOf[int], n: int) -> list[int]:
        """At most `n` tokens that may follow `token_ids`, which only ever grows at its end."""
        ...


class _Index:
    """Of a text that grows: what came behind each pair and each triple of tokens, the latest place counting."""

    __slots__ = ("_after_pair", "_after_triple", "_read")

    def __init__(self) -> None:
        self._after_pair: dict[int, int] = {}
        self._after_triple: dict[int, int] = {}
        self._read = 1  # the next token that may end a pair

    def read(self, token_ids: SequenceOf[int], end: int) -> None:
        """Take in pairs and triples that end before `end`, or as many as one call may."""
        first, end = self._read, min(end, self._read + _READ_AT_ONCE)
        if end <= first:
            return
        pairs, triples = self._after_pair, self._after_triple
        before, last = (token_ids[first - 2] if first > 1 else None), token_ids[first - 1]
        for i in range(first, end):
            token_id = token_ids[i]
            pair = last << 32 | token_id
            pairs[pair] = i + 1
            if before is not None:
                triples[before << 64 | pair] = i + 1
            before, last = last, token_id
        self._read = end

    def after(self, token_ids: SequenceOf[int]) -> tuple[int | None, int]:
        """The place behind the last three tokens, else two, and the confidence; token_ids may be another text."""
        if len(token_ids) < 2:
            return None, FRESH
        pair = token_ids[-2] << 32 | token_ids[-1]
        if len(token_ids) > 2:
            found = self._after_triple.get(token_ids[-3] << 64 | pair)
            if found is not None:
                return found, LIKELY
        return self._after_pair.get(pair), FRESH


class AnswerMemory:
    """Recent answers of all requests with one cache salt, at most `limit_tokens` of them over all salts: the oldest go first.

    An answer is read over several steps. Texts of different salts never meet.
    """

    def __init__(self, limit_tokens: int) -> None:
        self._limit_tokens = limit_tokens
        self._n_tokens = 0
        self._answers: deque[tuple[str | None, tuple[int, ...]]] = deque()
        self._unread: deque[tuple[str | None, tuple[int, ...], int]] = deque()
        self._after: dict[str | None, dict[int, tuple[tuple[int, ...], int]]] = {}

    def add(self, salt: str | None, token_ids: SequenceOf[int]) -> None:
        """Keep the end of an answer, as much as the memory holds."""
        answer = tuple(token_ids[-self._limit_tokens :])
        if len(answer) < 4:
            return
        self._answers.append((salt, answer))
        self._unread.append((salt, answer, 2))
        self._n_tokens += len(answer)
        while self._n_tokens > self._limit_tokens:
            self._forget()

    def read(self) -> None:
        """Take in some of what is new: O(1) per call."""
        if not self._unread:
            return
        salt, answer, first = self._unread.popleft()
        places = self._after.setdefault(salt, {})
        end = min(len(answer) - 1, first + _READ_AT_ONCE)
        for i in range(first, end):
            places[_triple(answer, i)] = (answer, i + 1)
        if end < len(answer) - 1:
            self._unread.appendleft((salt, answer, end))

    def after(self, salt: str | None, token_ids: SequenceOf[int]) -> tuple[tuple[int, ...], int] | None:
        """An answer in which the last three tokens stood, and the place behind them."""
        places = self._after.get(salt)
        return None if places is None or len(token_ids) < 3 else places.get(_triple(token_ids, -1))

    def _forget(self) -> None:
        salt, answer = self._answers.popleft()
        self._n_tokens -= len(answer)
        if self._unread and self._unread[0][1] is answer:
            self._unread.popleft()
        places = self._after.get(salt)
        if places is None:
            return
        for i in range(2, len(answer) - 1):
            key = _triple(answer, i)
            if places.get(key, (None,))[0] is answer:
                del places[key]
        if not places:
            del self._after[salt]


def _triple(token_ids: SequenceOf[int], i: int) -> int:
    return token_ids[i - 2] << 64 | token_ids[i - 1] << 32 | token_ids[i]


class Lookup:
    """What followed the last three tokens (else two) where they stood before: the text quotes itself or its prompt.

    Its own text is looked up first, then `memory`, where there is one. While a guess goes on being right its source is
    followed, so that a long match is not left for a later, shorter one.
    """

    __slots__ = ("_at", "_index", "_memory", "_place", "_salt", "_source", "confidence")

    def __init__(self, memory: AnswerMemory | None = None, salt: str | None = None) -> None:
        self._index = _Index()
        self._memory = memory
        self._salt = salt
        self._source: SequenceOf[int] | None = None  # the text whose token at _place is the guess for token_ids[_at]
        self._place = 0
        self._at = 0
        self.confidence = FRESH

    def propose(self, token_ids: SequenceOf[int], n: int) -> list[int]:
        """See Drafter."""
        known = len(token_ids)
        self._index.read(token_ids, known - 1)  # nothing follows the newest token yet
        if not self._follow(token_ids, known):
            self._find(token_ids)
            self._at = known
        source, place = self._source, self._place
        if source is None:
            return []
        drafts = list(source[place : place + n])
        if source is token_ids and drafts:
            while len(drafts) < n:  # the source ran into the end: what it says goes on in the guess itself
                drafts.append(drafts[len(drafts) - (known - place)])
        return drafts

    def _follow(self, token_ids: SequenceOf[int], known: int) -> bool:
        """Go on in the source of the last guess, when all that came since is what it said."""
        source, place, at = self._source, self._place, self._at
        if source is None or at == known:
            return source is not None
        while at < known:
            if place >= len(source) or token_ids[at] != source[place]:
                return False
            at, place = at + 1, place + 1
        self._place, self._at = place, at
        self.confidence = FOLLOWED
        return place < len(source)

    def _find(self, token_ids: SequenceOf[int]) -> None:
        place, confidence = self._index.after(token_ids)
        if confidence == FRESH and self._memory is not None:
            found = self._memory.after(self._salt, token_ids)
            if found is not None:
                self._source, self._place = found
                self.confidence = LIKELY
                return
        self._source = None if place is None else token_ids
        self._place = place or 0
        self.confidence = confidence


class Prediction:
    """The answer that the user predicts: followed while it holds, and found again behind a difference.

    Behind a difference one token is first supposed to stand for one. Where that is wrong, the place is the nearest ahead
    at which the last two tokens of the answer stand.
    """

    __slots__ = ("_after_pair", "_at", "_is_lost", "_place", "_read", "_text", "confidence")

    def __init__(self, predicted: SequenceOf[int], *, start: int) -> None:
        """predicted: token ids; start: where the answer begins in the sequence."""
        self._text = predicted
        self._place = 0  # of the prediction's token for the sequence's token at _at
        self._at = start
        self._is_lost = False
        self._after_pair: dict[int, list[int]] = {}  # made from the first difference on
        self._read = 1
        self.confidence = FOLLOWED

    def propose(self, token_ids: SequenceOf[int], n: int) -> list[int]:
        """See Drafter."""
        text = self._text
        for at in range(self._at, len(token_ids)):
            if not self._is_lost and self._place < len(text) and token_ids[at] == text[self._place]:
                self._place += 1
                self.confidence = FOLLOWED
                continue
            found = self._found(token_ids, at)
            if found is not None:
                self._place, self._is_lost, self.confidence = found, False, LIKELY
            elif self.confidence == FRESH or self._is_lost:  # a second difference in a row
                self._is_lost = True
            else:
                self._place, self.confidence = self._place + 1, FRESH
        self._at = len(token_ids)
        return [] if self._is_lost else list(text[self._place : self._place + n])

    def _found(self, token_ids: SequenceOf[int], at: int) -> int | None:
        """The place behind the last two tokens of the answer that is nearest to where it was, those ahead first."""
        first, end = self._read, min(len(self._text), self._read + _READ_AT_ONCE)
        for i in range(first, end):
            self._after_pair.setdefault(self._text[i - 1] << 32 | self._text[i], []).append(i + 1)
        self._read = max(first, end)
        places = self._after_pair.get(token_ids[at - 1] << 32 | token_ids[at]) if at else None
        if not places:
            return None
        i = bisect_left(places, self._place)
        return places[i] if i < len(places) else places[-1]


class Handed:
    """The guess that came up with a sequence's last result: made by the executor's drafter of this number, with tensors, or
    what its grammar forces (None).
    """

    __slots__ = ("confidence", "number", "token_ids")

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.token_ids: tuple[int, ...] = ()
        self.confidence = FRESH if number is not None else FOLLOWED

    def propose(self, token_ids: SequenceOf[int], n: int) -> list[int]:
        """See Drafter. What is forced may be more than is wanted; a drafter that says more than it was asked misbehaves."""
        return list(self.token_ids if self.number is not None else self.token_ids[:n])
