"""Embeddings, scores and labels: how texts become prompts of which states are wanted, and what states then mean.

An embedding is a prefill without a decode. The engine reads the prompt and hands up one state (`compute.pooler`); the vector
of a text is that state, cut to the dimensions asked for and normalised; the score of a query with a document is a product of
it with a few rows (a classification head, or the output rows of "yes" and "no"). A model that only embeds scores by cosine.
A classification head of several labels tells which of them a text, or a pair of texts, has.

    encoder = open_encoder(folder, hf_config, tokenizer, template, task="auto", spec=spec)
    prompt = encoder.prompt("a text", instruction=encoder.instruction("query"))
    vector = encoder.vector(state)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from diptych.compute.pooler import Dense, Tail, read_classes, read_dense, read_dense_of_gguf, read_head_rows, read_tail
from diptych.engine.text.template import ChatTemplate, RenderedPrompt
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.bounds import Bound, ids, shown
from diptych.ground.errors import PromptTooLong, RequestError, UnsupportedModel
from diptych.ground.request import Pooling, SamplingParams, Segment
from diptych.models.config import HfConfig
from diptych.models.pooling import (
    EmbeddingSpec,
    Odds,
    Reading,
    ScoringSpec,
    read_gguf_pooling,
    read_pooling,
    sees_both_ways,
    usual_pooling,
)
from diptych.models.spec import ModelSpec

logger = logging.getLogger("diptych.engine")

# what a request for a state says of tokens: none are drawn, and none are guessed
NO_TOKENS = SamplingParams(max_tokens=1, temperature=0.0, max_draft_tokens=0)
QUERY, DOCUMENT = "query", "document"  # the prompts of these names are put before the two sides of a search
TEXT, TEXT_PAIR = "text", "text_pair"  # of a pair that is classified
# how Qwen3-Reranker was trained to be asked (its model card)
JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
JUDGED = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
USUAL_TASK = "Given a web search query, retrieve relevant passages that answer the query"

Text = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledPrompt:
    """A prompt of which a state is wanted."""

    token_ids: tuple[int, ...]
    pooling: Pooling
    segments: tuple[Segment, ...] = ()

    @property
    def rendered(self) -> RenderedPrompt:
        """As the engine takes prompts."""
        return RenderedPrompt(text="", token_ids=self.token_ids, segments=self.segments)


class Encoder:
    """What a model that gives states needs beside the engine. Immutable, and safe to use from several threads.

    embedding: how vectors are made; scoring: how a query is judged with a document. One of them is there. labels: what its
    head tells apart, if it has one.
    """

    def __init__(
        self,
        tail: Tail,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        spec: ModelSpec,
        embedding: EmbeddingSpec | None = None,
        scoring: ScoringSpec | None = None,
        dense: Sequence[Dense] = (),
        has_own_form: bool = False,
    ) -> None:
        """dense: layers behind the pooling; where it scores, the last of them makes one or two logits, or one for each label.

        has_own_form: pairs are asked about in Qwen3-Reranker's words.
        """
        self.tail = tail
        self.embedding = embedding
        self.scoring = scoring
        self.labels = None if scoring is None else scoring.labels
        self.width = len(dense[-1].weight_ND) if dense else spec.hidden
        self._spec = spec
        self._template = template
        self._dense = dense
        self._has_own_form = has_own_form
        said = embedding or scoring
        assert said is not None
        self.reading: Reading = said.reading
        self._tokenizer = tokenizer.lowered() if self.reading.lowers else tokenizer
        self._both_ways = said.both_ways
        self._has_types = spec.n_token_types > 1
        if scoring is not None and self.reading.is_chat:
            self._check_roles()

    def instruction(self, name: str | None) -> str:
        """The prompt of that name; of none, the one that the files say is usual. RequestError for an unknown name."""
        prompts = self.reading.prompts
        name = self.reading.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise RequestError(f"there is no prompt named {shown(name)}; this model has {known}", param="prompt_name")
        return prompts[name]

    def prompt(self, text: Text, *, instruction: str = "") -> PooledPrompt:
        """A text (behind an instruction), or token ids as they are, to be embedded or classified. Raises RequestError,
        PromptTooLong.
        """
        spec = self.embedding or self.scoring
        assert spec is not None
        first = 0
        segments: tuple[Segment, ...] = ()
        if not isinstance(text, str):
            token_ids = ids("input", text, RequestError, n_ids=self._spec.vocab_size)
        elif self.reading.is_chat:
            rendered = self._rendered([{"role": "user", "content": text}], instruction)
            token_ids, segments = rendered.token_ids, rendered.segments
        else:
            token_ids = self._ids(instruction + text)
            n_before = min(self._n_before(instruction), len(token_ids) - 1)  # the last may have joined both
            if n_before > 0:
                first = 0 if self.embedding is None or self.embedding.includes_prompt else n_before
                places = (("instruction", 0, n_before), ("text", n_before, len(token_ids)))
                segments = tuple(Segment(name=name, start=start, end=end) for name, start, end in places)
        return self._checked(token_ids, Pooling(pool=spec.pool, first=first, both_ways=self._both_ways), segments)

    def vector(self, state: bytes, dimensions: int | None = None, *, normalises: bool | None = None) -> np.ndarray:
        """[dimensions] fp32: the state, cut, and normalised as the model wants it or as is said."""
        assert self.embedding is not None
        vector = self._behind_pooling(np.frombuffer(state, dtype=np.float32))[: dimensions or self.width]
        if not (self.embedding.is_normalised if normalises is None else normalises):
            return vector.copy()
        norm = float(np.sqrt(np.square(vector, dtype=np.float64).sum()))
        return (vector / max(norm, 1e-12)).astype(np.float32)

    def _behind_pooling(self, state: np.ndarray) -> np.ndarray:
        for layer in self._dense:
            state = layer.applied(state)
        return state

    def check_dimensions(self, dimensions: int | None) -> None:
        """RequestError for a length that vectors of this model cannot have."""
        Bound(int, 1, self.width, "dimensions", is_optional=True).take("dimensions", dimensions, RequestError)
        allowed = self.embedding.dimensions if self.embedding is not None else ()
        if dimensions is not None and allowed and dimensions not in (*allowed, self.width):
            raise RequestError(
                f"dimensions is {dimensions}; this model was trained for {', '.join(map(str, allowed))}",
                param="dimensions",
            )

    def ranking(self, pairs: Sequence[tuple[str, str]], *, instruction: str | None = None) -> Ranking:
        """The prompts that scores of these (query, document) pairs need. instruction: what is asked; None: as usual."""
        if not self.can_score:
            raise RequestError(
                self.not_made_for("scores"), hint="ask for labels (classify), where texts may come in pairs"
            )
        if self.scoring is not None:
            return _Judged(self, [self._pair(query, document, instruction) for query, document in pairs])
        return _Compared(self, pairs, instruction)

    def score(self, state: bytes) -> float:
        """Of the state behind a pair: a probability, or what the files say."""
        assert self.scoring is not None
        logits = self._behind_pooling(np.frombuffer(state, dtype=np.float32).astype(np.float64))
        if self.scoring.token_ids is not None:
            logits = logits * self._spec.logit_scale
            cap = self._spec.logit_softcap
            logits = logits if cap is None else cap * np.tanh(logits / cap)
        score = float(logits[0] - logits[1]) if len(logits) == 2 else float(logits[0])
        return _sigmoid(score) if self.scoring.is_sigmoid else score

    @property
    def can_score(self) -> bool:
        """Whether it gives one number for a pair."""
        return self.labels is None or len(self.labels.names) == 1

    def not_made_for(self, wanted: str) -> str:
        """That this model gives no `wanted`, and what it does."""
        if self.labels is not None and len(self.labels.names) > 1:
            names = shown(", ".join(self.labels.names)).strip("'")
            return f"this model tells {len(self.labels.names)} labels apart ({names}), and gives no {wanted}"
        does = "embeds texts" if self.scoring is None else "scores pairs"
        return f"this model {does}, and gives no {wanted}"

    def to_classify(self, text: Text, pair: str | None = None, *, instruction: str | None = None) -> PooledPrompt:
        """The prompt of a text, of a text and a second one (premise and hypothesis), or of token ids, whose labels are wanted.

        instruction: put before the text; None: as usual. Raises RequestError, PromptTooLong.
        """
        if self.labels is None:
            raise RequestError(self.not_made_for("labels"))
        if pair is None:
            return self.prompt(text, instruction=self.instruction(None) if instruction is None else instruction)
        if not isinstance(text, str):
            raise RequestError("token ids came with a second text; give them together as token ids", param=TEXT_PAIR)
        return self._pair(text, pair, instruction, names=(TEXT, TEXT_PAIR))

    def odds(self, state: bytes, *, is_activated: bool = True) -> np.ndarray:
        """[labels] fp64, of the state behind a text: probabilities, or what the config says; not activated: logits."""
        assert self.labels is not None
        logits = self._behind_pooling(np.frombuffer(state, dtype=np.float32).astype(np.float64))
        if not is_activated or self.labels.odds is Odds.NONE:
            return logits
        if self.labels.odds is Odds.EACH:
            return np.array([_sigmoid(float(logit)) for logit in logits])
        powers = np.exp(logits - logits.max())
        shares: np.ndarray = powers / powers.sum()
        return shares

    def _pair(
        self, query: str, document: str, instruction: str | None, names: tuple[str, str] = (QUERY, DOCUMENT)
    ) -> PooledPrompt:
        asked = self.instruction(None) if instruction is None else instruction
        for name, text in zip(names, (query, document), strict=True):
            self._refuse_endless(text, param=name)
        parts: list[tuple[str, Sequence[int]]]
        second: int | None = None
        if self.reading.is_chat:
            rendered = self._rendered(_pair_messages(query, document), asked)
            return self._checked(rendered.token_ids, self._judged, rendered.segments)
        if self._has_own_form:
            own = self._tokenizer.encode
            plain = self._template.plain_ids  # what a text spells stays text
            parts = [
                ("system", own(JUDGE, add_special_tokens=False)),
                (QUERY, plain(f"<Instruct>: {asked or USUAL_TASK}\n<Query>: {query}\n")),
                (DOCUMENT, plain(f"<Document>: {document}")),
                ("generation prompt", own(JUDGED, add_special_tokens=False)),
            ]
        else:
            pair = self._tokenizer.encode_pair(asked + query, document)
            n_query = len(self._tokenizer.encode(asked + query, add_special_tokens=False))
            parts = [(names[0], pair.token_ids[:n_query]), (names[1], pair.token_ids[n_query:])]
            second = _second_type(pair.type_ids) if self._has_types else None
        token_ids, segments = _joined(parts)
        return self._checked(token_ids, replace(self._judged, second=second), segments)

    @property
    def _judged(self) -> Pooling:
        assert self.scoring is not None
        return Pooling(pool=self.scoring.pool, both_ways=self._both_ways)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], instruction: str) -> RenderedPrompt:
        variables = dict(self.reading.template_variables)
        adds_prompt = bool(variables.pop("add_generation_prompt", False))
        system = [{"role": "system", "content": instruction}] if instruction else []
        return self._template.render([*system, *messages], add_generation_prompt=adds_prompt, kwargs=variables)

    def _check_roles(self) -> None:
        """Refuse a template that shows nothing of a query or a document."""
        query, document = "diptych query", "diptych document"
        text = self._rendered(_pair_messages(query, document), "").text
        missing = [name for name, mark in ((QUERY, query), (DOCUMENT, document)) if mark not in text]
        if missing:
            raise UnsupportedModel(f"the chat template of this model shows no message of the role {missing[0]!r}")

    def _ids(self, text: str) -> tuple[int, ...]:
        self._refuse_endless(text, param="input")
        token_ids = self._tokenizer.encode(text)
        end = self._tokenizer.missing_end
        return tuple(token_ids) if end is None else (*token_ids, end)

    def _n_before(self, instruction: str) -> int:
        """Tokens of an instruction, without what ends every text."""
        if not instruction:
            return 0
        token_ids = self._tokenizer.encode(instruction)
        return len(token_ids) - (token_ids[-1] in self._tokenizer.special_token_ids)

    def _refuse_endless(self, text: str, *, param: str) -> None:
        most = self.reading.max_tokens or self._spec.max_context_tokens
        self._tokenizer.refuse_endless(text, most, param=param)

    def _checked(self, token_ids: Sequence[int], pooling: Pooling, segments: tuple[Segment, ...]) -> PooledPrompt:
        most = self.reading.max_tokens
        if most is not None and len(token_ids) > most:
            raise PromptTooLong(
                f"input has {len(token_ids)} tokens; this model reads at most {most} of one text",
                hint="shorten it, or cut it into parts",
                param="input",
            )
        return PooledPrompt(token_ids=tuple(token_ids), pooling=pooling, segments=segments)


class Ranking:
    """Pairs on their way to scores: `prompts` are read, in order, and their states make `scores`."""

    def __init__(self, encoder: Encoder, prompts: Sequence[PooledPrompt]) -> None:
        self._encoder = encoder
        self.prompts = prompts

    def scores(self, states: Sequence[bytes]) -> list[float]:
        """One per pair."""
        raise NotImplementedError


class _Judged(Ranking):
    """One prompt per pair, and the model says how well they fit."""

    def scores(self, states: Sequence[bytes]) -> list[float]:
        """By the model's own judgement."""
        return [self._encoder.score(state) for state in states]


class _Compared(Ranking):
    """Every text of the pairs once, and the cosine of the angle between two vectors."""

    def __init__(self, encoder: Encoder, pairs: Sequence[tuple[str, str]], instruction: str | None) -> None:
        known = encoder.reading.prompts
        before = [encoder.instruction(name if name in known else None) for name in (QUERY, DOCUMENT)]
        before[0] = before[0] if instruction is None else instruction
        sides = [(before[side], pair[side]) for side in (0, 1) for pair in pairs]
        places = {text: number for number, text in enumerate(dict.fromkeys(sides))}
        self._places = [(places[sides[i]], places[sides[i + len(pairs)]]) for i in range(len(pairs))]
        super().__init__(encoder, [encoder.prompt(text, instruction=asked) for asked, text in places])

    def scores(self, states: Sequence[bytes]) -> list[float]:
        """Cosines."""
        vectors = [self._encoder.vector(state, normalises=False).astype(np.float64) for state in states]
        units = [vector / max(float(np.linalg.norm(vector)), 1e-12) for vector in vectors]
        return [float(units[query] @ units[document]) for query, document in self._places]


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _second_type(type_ids: Sequence[int]) -> int | None:
    """Where tokens of the second type begin, which all behind are of; None: there are none. UnsupportedModel for others."""
    if not any(type_ids):
        return None
    begin = next(i for i, one in enumerate(type_ids) if one)
    if set(type_ids[begin:]) != {1}:
        raise UnsupportedModel(
            f"tokenizer.json gives tokens of a pair the types {list(dict.fromkeys(type_ids))}, and not 0, then 1"
        )
    return begin


def open_encoder(
    directory: Path,
    hf_config: Mapping[str, Any],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    task: str,
    spec: ModelSpec,
) -> Encoder | None:
    """What the task (`ground.config.TASKS`) makes of a checkpoint; None where it only writes.

    Raises UnsupportedModel for what cannot be had of it, LoadError.
    """
    config = HfConfig(dict(hf_config), path=str(directory / "config.json"))
    said = None
    if task != "generate":
        said = read_pooling(directory, config) if directory.is_dir() else read_gguf_pooling(config)
    if task == "generate" and not spec.has_head:
        raise UnsupportedModel(
            f"{directory} has no output projection, or attends both ways, and can write no text",
            hint="leave --task out",
        )
    if task == "embed":
        if isinstance(said, ScoringSpec):
            does = "judges pairs" if said.labels is None else "has a classification head"
            raise UnsupportedModel(f"{directory} {does}, and embeds no texts", hint="leave --task out")
        said = said or usual_pooling(config)
    if said is None and not spec.has_head:
        said = usual_pooling(config)
    if task == "score" and isinstance(said, ScoringSpec) and said.labels is not None and len(said.labels.names) > 1:
        raise UnsupportedModel(
            f"{directory} tells {len(said.labels.names)} labels apart; a score is made of one", hint="leave --task out"
        )
    is_asked = task == "score" and said is None
    if is_asked:
        said = ScoringSpec(token_ids=_yes_and_no(tokenizer), both_ways=sees_both_ways(config))
    if said is None:
        if config.raw.get("is_causal") is False:
            logger.warning(
                "is_causal is false in %s: embeddings would attend both ways; text is written causally", directory
            )
        return None
    if said.both_ways and any(layer.attention.index is not None for layer in spec.layers):
        raise UnsupportedModel(
            f"{directory} attends both ways by an index that chooses what is attended to; that is not run"
        )
    tail = read_tail(directory, spec)
    prompts = ",".join(sorted(said.reading.prompts)) or "none"
    if isinstance(said, EmbeddingSpec):
        width = spec.hidden
        dense = _read_layers(said.dense, width) if directory.is_dir() else read_dense_of_gguf(directory, width)
        logger.info(
            "embeddings pool=%s normalised=%s width=%d both_ways=%s prompts=%s",
            said.pool.value, said.is_normalised, len(dense[-1].weight_ND) if dense else spec.hidden, said.both_ways, prompts,
        )  # fmt: skip
        return Encoder(tail, tokenizer, template, spec=spec, embedding=said, dense=dense)
    labels = "none" if said.labels is None else shown(",".join(said.labels.names))
    logger.info("scores by=%s labels=%s prompts=%s", said.token_ids or "head", labels, prompts)
    if said.token_ids is not None:
        dense = (read_head_rows(directory, spec, said.token_ids),)
    else:
        assert said.labels is not None
        dense = read_classes(directory, spec, len(said.labels.names))
    return Encoder(tail, tokenizer, template, spec=spec, scoring=said, dense=dense, has_own_form=is_asked)


def _read_layers(folders: Sequence[Path], n_inputs: int) -> tuple[Dense, ...]:
    layers: list[Dense] = []
    for folder in folders:
        layers.append(read_dense(folder, len(layers[-1].weight_ND) if layers else n_inputs))
    return tuple(layers)


def _yes_and_no(tokenizer: Tokenizer) -> tuple[int, int]:
    yes, no = tokenizer.token_id("yes"), tokenizer.token_id("no")
    if yes is None or no is None:
        raise UnsupportedModel("the vocabulary has no tokens yes and no, whose logits a score is made of")
    return yes, no


def _pair_messages(query: str, document: str) -> list[dict[str, str]]:
    return [{"role": QUERY, "content": query}, {"role": DOCUMENT, "content": document}]


def _joined(parts: Sequence[tuple[str, Sequence[int]]]) -> tuple[tuple[int, ...], tuple[Segment, ...]]:
    token_ids: list[int] = []
    segments: list[Segment] = []
    for name, some in parts:
        if some:
            segments.append(Segment(name=name, start=len(token_ids), end=len(token_ids) + len(some)))
            token_ids += some
    return tuple(token_ids), tuple(segments)
