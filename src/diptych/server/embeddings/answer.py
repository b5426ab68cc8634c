"""The answers: vectors, documents in order, scores, labels: each of prompts, what their states mean, and one account."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from diptych.engine.encoder import Encoder, PooledPrompt, Ranking
from diptych.ground.clock import wall_time_s
from diptych.server.embeddings.body import ClassifyBody, EmbeddingBody, PooledBody, RerankBody, ScoreBody
from diptych.server.embeddings.reading import StateReader
from diptych.server.generation import Asked, Generation
from diptych.server.http.answers import Fragments, json_bytes
from diptych.server.http.errors import ApiError

SHOWN_ACCOUNTS = 64  # of the texts of one body: of more, only what they took together is told


class PooledAnswer:
    """One body on its way to an answer. `close` must follow `answer` in every case."""

    prefix: str
    encoder: Encoder

    def __init__(self, generation: Generation, body: PooledBody, *, arrival_s: float) -> None:
        served = generation.served(body.model)
        encoder = generation.encoder
        if encoder is None:
            raise ApiError(
                400,
                f"{generation.model.name!r} was loaded to write text: it gives no embeddings, scores or labels\n"
                "hint: serve an embedding or reranking model, or start with --task embed or --task score",
                code="wrong_task",
            )
        self.encoder = encoder
        self._generation = generation
        self._asked = Asked(
            response_id=f"{self.prefix}{body.request_id or uuid.uuid4().hex}",
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            served=served,
            arrival_s=arrival_s,
            constraint=None,
        )
        self._reader = StateReader(generation, self._asked)

    def _wrong_task(self, wanted: str) -> ApiError:
        """That the model gives no `wanted`, and where to send texts."""
        encoder = self.encoder
        path = "/v1/embeddings" if encoder.scoring is None else "/v1/score" if encoder.can_score else "/v1/classify"
        return ApiError(400, f"{encoder.not_made_for(wanted)}\nhint: send texts to {path}", code="wrong_task")

    async def answer(self) -> bytes:
        """The whole answer, as JSON."""
        raise NotImplementedError

    def close(self) -> None:
        """Abort what still runs."""
        self._reader.close()

    def _frame(self) -> dict[str, Any]:
        return {
            "id": self._asked.response_id,
            "created": int(wall_time_s()),
            "model": self._asked.served.name,
            "system_fingerprint": self._asked.served.fingerprint,
        }

    def _accounts(self) -> dict[str, Any]:
        accountant, accounts = self._generation.accountant, self._reader.accounts()
        timings = accountant.timings(accounts)
        if len(accounts) > SHOWN_ACCOUNTS:
            del timings["diptych"]["prompts"], timings["diptych"]["segments"]
        usage = accountant.usage(accounts)
        return {"usage": {name: usage[name] for name in USAGE}, "timings": timings}


USAGE = ("prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details")


class EmbeddingAnswer(PooledAnswer):
    """OpenAI's list of embeddings."""

    prefix = "embd-"

    def __init__(self, generation: Generation, body: EmbeddingBody, *, arrival_s: float) -> None:
        super().__init__(generation, body, arrival_s=arrival_s)
        self._body = body
        if self.encoder.embedding is None:
            raise self._wrong_task("vectors")

    async def answer(self) -> bytes:
        """Vectors as lists of numbers, or as base64 of little-endian fp32."""
        body, encoder, run = self._body, self.encoder, self._generation.workers.run
        encoder.check_dimensions(body.dimensions)
        asked = encoder.instruction(body.prompt_name) if body.instruction is None else body.instruction

        def prompts() -> list[PooledPrompt]:
            return [encoder.prompt(text, instruction=asked) for text in body.input]

        states = await self._reader.read(await run(prompts), param="input")
        accounts = self._accounts()

        def encoded() -> bytes:
            data = Fragments()
            for index, state in enumerate(states):
                vector = encoder.vector(state, body.dimensions, normalises=body.normalize)
                data.add([{"object": "embedding", "index": index, "embedding": self._written(vector)}])
            return json_bytes({"object": "list", "data": data} | self._frame() | accounts)

        return await run(encoded)

    def _written(self, vector: np.ndarray) -> list[float] | str:
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers


class _RankedAnswer(PooledAnswer):
    """What rerank and score share."""

    def __init__(self, generation: Generation, body: PooledBody, *, arrival_s: float) -> None:
        super().__init__(generation, body, arrival_s=arrival_s)
        if not self.encoder.can_score:
            raise self._wrong_task("scores")

    async def _scores(self, pairs: Sequence[tuple[str, str]], instruction: str | None) -> list[float]:
        def ranking() -> Ranking:
            return self.encoder.ranking(pairs, instruction=instruction)

        ranked = await self._generation.workers.run(ranking)
        return ranked.scores(await self._reader.read(ranked.prompts, param="the texts"))


class RerankAnswer(_RankedAnswer):
    """Jina's and Cohere's documents, the best first."""

    prefix = "rerank-"

    def __init__(self, generation: Generation, body: RerankBody, *, arrival_s: float) -> None:
        super().__init__(generation, body, arrival_s=arrival_s)
        self._body = body

    async def answer(self) -> bytes:
        """The `top_n` best; of equals, the first that was sent."""
        body, texts = self._body, self._body.texts
        scores = await self._scores([(body.query, text) for text in texts], body.instruction)
        best = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: body.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if body.return_documents is not False:
            for result in results:
                result["document"] = {"text": texts[result["index"]]}
        answer = {"object": "list", "results": results} | self._frame() | self._accounts()
        return await self._generation.workers.run(json_bytes, answer)


class ScoreAnswer(_RankedAnswer):
    """vLLM's list of scores."""

    prefix = "score-"

    def __init__(self, generation: Generation, body: ScoreBody, *, arrival_s: float) -> None:
        super().__init__(generation, body, arrival_s=arrival_s)
        self._body = body

    async def answer(self) -> bytes:
        """One score per pair, in order."""
        scores = await self._scores(self._body.pairs, self._body.instruction)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        answer = {"object": "list", "data": data} | self._frame() | self._accounts()
        return await self._generation.workers.run(json_bytes, answer)


class ClassifyAnswer(PooledAnswer):
    """vLLM's list of labels."""

    prefix = "classify-"

    def __init__(self, generation: Generation, body: ClassifyBody, *, arrival_s: float) -> None:
        super().__init__(generation, body, arrival_s=arrival_s)
        self._body = body
        if self.encoder.labels is None:
            raise self._wrong_task("labels")
        self._names = self.encoder.labels.names

    async def answer(self) -> bytes:
        """The likeliest label of each text, of equals the first, and what each label has; `labels` names these, in order."""
        body, encoder, names, run = self._body, self.encoder, self._names, self._generation.workers.run

        def prompts() -> list[PooledPrompt]:
            return [encoder.to_classify(text, pair, instruction=body.instruction) for text, pair in body.pairs]

        states = await self._reader.read(await run(prompts), param="input")
        accounts = self._accounts()

        def encoded() -> bytes:
            data = Fragments()
            for index, state in enumerate(states):
                odds = encoder.odds(state, is_activated=body.use_activation is not False)
                label = names[int(odds.argmax())]
                data.add([{"index": index, "label": label, "probs": odds.tolist(), "num_classes": len(names)}])
            return json_bytes({"object": "list", "labels": names, "data": data} | self._frame() | accounts)

        return await run(encoded)
