"""Which engine reads a prompt and which one answers it. Integers only: tokens, and work in predicted microseconds.

    router = Router([Place(cache=core, price=price) for core in cores])
    route = router.choose(request)      # Route(prefill=1, decode=1): both on the second
    router.handed_off(request_id)       # its prompt is read, where that was another engine's part
    router.began(request_id)            # its first token is there
    router.forget(request_id, output_tokens=80)

How long an answer will be is not known when it is asked; the mean of those seen stands for it. A prompt is read apart from
its answer only where there is a pool for it, and not where what is left to read is short: a suffix that delays the decode
engine's streams no longer than `local_prefill_us` is read where its history is cached, and nothing travels.

A stream that has begun keeps nobody waiting: it shares its steps. So what is open does not add up, as work does; counted like
that, whoever has one stream more sends followers away from their cached history. What a request waits for is all that has not
begun, and while it is read everyone waits who is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from diptych.ground.config import one_of
from diptych.ground.errors import ConfigError
from diptych.ground.request import CacheScope, Request

POLICIES = ("least-delay", "longest-prefix", "round-robin")
# a decode row beside some tens of others costs about what a few prompt rows do, as it waits for its share of the weights
OUTPUT_WEIGHT = 8
FIRST_GUESS_TOKENS = 128  # of an answer, before any was seen


class Cache(Protocol):
    """What the router asks an engine."""

    def prefix_match(
        self, token_ids: tuple[int, ...], salt: CacheScope = None, *, digests: list[bytes] | None = None
    ) -> int:
        """Leading tokens that are cached there. digests: of its blocks, as far as engines of this model know them."""
        ...


class Price(Protocol):
    """What work on an engine is worth, in whole microseconds."""

    def prefill_us(self, new_tokens: int, cached_tokens: int) -> int:
        """Reading so many tokens behind so many cached ones."""
        ...

    def decode_us(self, context_tokens: int, output_tokens: int) -> int:
        """One sequence's share of the steps that write so many tokens behind a prompt."""
        ...


class TokenPrice:
    """Where nothing is known of an engine: tokens, a written one worth some that are read."""

    def prefill_us(self, new_tokens: int, cached_tokens: int) -> int:
        """One for each."""
        return new_tokens

    def decode_us(self, context_tokens: int, output_tokens: int) -> int:
        """OUTPUT_WEIGHT for each."""
        return OUTPUT_WEIGHT * output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An engine as the router sees it. decodes False: it reads prompts for those that do."""

    cache: Cache
    price: Price
    decodes: bool = True


class Route(NamedTuple):
    """The engine that reads the prompt, and the one that answers: usually the same."""

    prefill: int
    decode: int


@dataclass(slots=True)
class _Sent:
    route: Route
    prefill_us: int  # 0 once it is read
    decode_us: int
    n_sequences: int
    has_begun: bool = False


@dataclass(slots=True)
class _Open:
    """Of the requests an engine has a part in: all their work, that of those that have not begun, and sequences to answer."""

    work_us: int = 0
    waiting_us: int = 0
    n_sequences: int = 0


class Router:
    """least-delay: where the work of requests that have not begun, and reading this one, less what is cached for it, once for
    itself and once for each sequence there, add up to least. longest-prefix: where most of its prompt is cached, the least
    delay among equals. round-robin: in turn.
    """

    def __init__(self, places: Sequence[Place], *, policy: str = "least-delay", local_prefill_us: int = 0) -> None:
        one_of("router", policy, POLICIES)
        self._places = list(places)
        self._closed: set[int] = set()
        self._policy = policy
        self._local_prefill_us = local_prefill_us
        self._decoders = [i for i, place in enumerate(places) if place.decodes]
        self._readers = [i for i, place in enumerate(places) if not place.decodes]
        if not self._decoders:
            raise ConfigError(f"none of {len(places)} engines decodes; at least 1 must")
        self._at = [_Open() for _ in places]
        self._sent: dict[str, _Sent] = {}
        self._turn = self._n_apart = 0
        self._digests: list[bytes] = []  # of the request being placed
        self._n_answers = 0
        self._answer_tokens = 0

    def close(self, i: int) -> None:
        """Send nothing to engine i any more. What is open there counts until it is forgotten."""
        self._closed.add(i)

    def open(self, i: int) -> None:
        """Engine i takes requests again."""
        self._closed.discard(i)

    def add(self, place: Place) -> int:
        """One engine more; answers its number."""
        self._places.append(place)
        self._at.append(_Open())
        i = len(self._places) - 1
        (self._decoders if place.decodes else self._readers).append(i)
        return i

    def open_work_us(self, *, decodes: bool) -> int:
        """Of all open requests, at engines that decode or at those that only read."""
        return sum(self._at[i].work_us for i in (self._decoders if decodes else self._readers))

    @property
    def can_answer(self) -> bool:
        """Whether an engine that decodes is open."""
        return any(i not in self._closed for i in self._decoders)

    def choose(self, request: Request, *, may_part: bool | None = None) -> Route:
        """The engines for this request; its work counts there until `handed_off`, `began` and `forget`.

        may_part: whether its prompt may be read by another engine than answers it; None: where it asks for one answer.
        """
        if may_part is None:
            may_part = request.sampling.n == 1
        turn, self._turn = self._turn, self._turn + 1
        self._digests = []
        prompt_tokens = len(request.prompt_token_ids)
        n = request.sampling.n
        output_tokens = 0 if request.only_reads else self._usual_answer * n
        decoder, read_us = self._best(request, self._of(self._decoders), turn)
        reader = decoder
        readers = self._of(self._readers)
        if readers and may_part and read_us > self._local_prefill_us:
            reader, read_us = self._best(request, readers, self._n_apart)
            self._n_apart += 1
        decode_us = self._places[decoder].price.decode_us(prompt_tokens, output_tokens)
        self._sent[request.request_id] = _Sent(Route(reader, decoder), read_us, decode_us, n)
        for i, work_us in ((reader, read_us), (decoder, decode_us)):
            self._at[i].work_us += work_us
            self._at[i].waiting_us += work_us
        self._at[decoder].n_sequences += n
        return Route(reader, decoder)

    def handed_off(self, request_id: str) -> None:
        """Its prompt is read; what is left is the decode engine's."""
        self._read(self._sent[request_id])

    def began(self, request_id: str) -> None:
        """Its first token is there: nobody waits for it any more."""
        sent = self._sent[request_id]
        if not sent.has_begun:
            sent.has_begun = True
            self._read(sent)
            self._at[sent.route.decode].waiting_us -= sent.decode_us

    def forget(self, request_id: str, *, output_tokens: int = 0) -> None:
        """It is over; output_tokens is what it wrote (0: it was refused)."""
        self.began(request_id)
        sent = self._sent.pop(request_id)
        self._at[sent.route.decode].work_us -= sent.decode_us
        self._at[sent.route.decode].n_sequences -= sent.n_sequences
        if output_tokens:
            self._n_answers += 1
            self._answer_tokens += output_tokens

    def _read(self, sent: _Sent) -> None:
        reader = self._at[sent.route.prefill]
        reader.work_us -= sent.prefill_us
        reader.waiting_us -= sent.prefill_us
        sent.prefill_us = 0

    def _of(self, engines: list[int]) -> list[int]:
        return [i for i in engines if i not in self._closed] if self._closed else engines

    def _best(self, request: Request, among: list[int], turn: int) -> tuple[int, int]:
        """The engine of `among`, and what reading the prompt takes there."""
        prompt_tokens, n = len(request.prompt_token_ids), len(among)
        in_turn = among[turn % n]
        looks = n > 1 and self._policy != "round-robin"
        found: list[tuple[int, int, int, int]] = []  # (-cached tokens, delay, place in turn, engine)
        read_us: dict[int, int] = {}
        for place, i in enumerate(among if looks else [in_turn]):
            one = self._places[i]
            asks = looks or self._readers
            cached = 0
            if asks:
                cached = one.cache.prefix_match(request.prompt_token_ids, request.cache_scope, digests=self._digests)
            read_us[i] = one.price.prefill_us(prompt_tokens - cached, cached)
            at = self._at[i]
            delay_us = at.waiting_us + read_us[i] * (1 + at.n_sequences)
            found.append((-cached if self._policy == "longest-prefix" else 0, delay_us, (place - turn) % n, i))
        best = min(found)[-1]
        return best, read_us[best]

    @property
    def _usual_answer(self) -> int:
        return self._answer_tokens // self._n_answers if self._n_answers else FIRST_GUESS_TOKENS
