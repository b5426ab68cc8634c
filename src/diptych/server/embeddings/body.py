"""What clients may send for embeddings, rerankings, scores and labels, with the bounds of the other routes.

Fields that other servers know and this one does not honour are refused by name (`REFUSED`), or have no effect (`NO_EFFECT`);
`docs/serving.md` shows all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AliasChoices, Field, PlainValidator, WithJsonSchema, model_validator

from diptych.server.http.bases import Body, StopAtFirst, conflict
from diptych.server.http.fields import Refusal
from diptych.server.prompts import Prompt, prompts_of, prompts_schema
from diptych.server.schema import RequestBody
from diptych.server.values import User, Whole

MAX_INPUTS = 2048  # OpenAI's
MAX_DIMENSIONS = 2**20
MAX_INSTRUCTION_CHARS = 65536

_NEVER_CUT = "a text is never cut; shorten it, or cut it into parts"
_SPECIAL = "texts are read as the model was trained to read them; send token ids to say otherwise"
REFUSED: Mapping[str, Refusal] = {
    "additional_data": Refusal("poolers have no data of their own here"),
    "add_special_tokens": Refusal(_SPECIAL, (True,)),
    "chat_template": Refusal("the model's own template is used where its files ask for one"),
    "embed_dtype": Refusal("numbers are fp32: float or base64", ("float32",)),
    "embedding_types": Refusal("numbers are fp32: encoding_format is float or base64", (["float"],)),
    "endianness": Refusal("base64 holds little-endian fp32", ("little", "native")),
    "images": Refusal("this server reads texts only"),
    "input_type": Refusal("name the model's own instruction with prompt_name, or write one with instruction"),
    "late_chunking": Refusal("every text is read by itself", (False,)),
    "max_chunks_per_doc": Refusal(_NEVER_CUT),
    "max_tokens_per_doc": Refusal(_NEVER_CUT),
    "messages": Refusal("send texts as input, or the token ids that /tokenize makes of messages"),
    "mm_processor_kwargs": Refusal("this server reads texts only"),
    "rank_fields": Refusal("documents are texts, or objects with a text"),
    "return_multivector": Refusal("a text has one vector", (False,)),
    "softmax": Refusal("scores are as the model's files say", (True,)),
    "activation": Refusal("scores are as the model's files say", (True,)),
    "task": Refusal("name the model's own instruction with prompt_name, or write one with instruction"),
    "truncate": Refusal(_NEVER_CUT, (False, "NONE")),
    "truncate_prompt_tokens": Refusal(_NEVER_CUT),
    "use_activation": Refusal("scores are as the model's files say; vectors have normalize", (True,)),
}
NO_EFFECT: Mapping[str, str] = {
    "truncation_side": "a text is never cut",
    "client_name": "labels the caller; caches are kept apart by cache_salt",
}


def _check_inputs(value: object) -> list[Prompt]:
    """A text, texts, token ids or lists of them, always as a list of inputs; none of them empty."""
    inputs = prompts_of(value, MAX_INPUTS)
    if "" in inputs:
        raise ValueError(f"entry {inputs.index('')} is empty; an empty text is not read")
    return inputs


Inputs = Annotated[list[Prompt], PlainValidator(_check_inputs), WithJsonSchema(prompts_schema(MAX_INPUTS))]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], StopAtFirst(), Field(min_length=1, max_length=MAX_INPUTS)]
Instruction = Annotated[str | None, Field(max_length=MAX_INSTRUCTION_CHARS)]


class PooledBody(RequestBody):
    """Fields of every route that reads and does not write."""

    instruction: Instruction = None
    user: User
    _refused: ClassVar[Mapping[str, Refusal]] = REFUSED
    _no_effect: ClassVar[Mapping[str, str]] = NO_EFFECT


class EmbeddingBody(PooledBody):
    """`POST /v1/embeddings`. prompt_name: an instruction that the model knows; instruction: one in words. normalize: to unit
    length, whatever the model's files say.
    """

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = Field(None, ge=1, le=MAX_DIMENSIONS)
    prompt_name: str | None = Field(None, max_length=256)
    normalize: bool | None = None

    @model_validator(mode="after")
    def _one_instruction(self) -> Self:
        if self.prompt_name is not None and self.instruction is not None:
            raise conflict("instruction", "prompt_name and instruction are both set; give one of them")
        return self


class DocumentText(Body):
    """A document as an object, as Jina and Cohere take it."""

    text: Text


class RerankBody(PooledBody):
    """`POST /v1/rerank`: documents in the order in which they fit the query."""

    query: Text
    documents: Annotated[list[Text | DocumentText], StopAtFirst(), Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: Whole | None = Field(None, ge=1, le=2**31 - 1)
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class ClassifyBody(PooledBody):
    """`POST /v1/classify`: vLLM's, and transformers' second texts. text_pair: one for each input, or several for one.
    use_activation: false: logits.
    """

    input: Inputs
    text_pair: Text | Texts | None = None
    use_activation: bool | None = Field(None, validation_alias=AliasChoices("use_activation", "activation"))

    @property
    def pairs(self) -> list[tuple[Prompt, str | None]]:
        """Each input with its second text, if any."""
        if self.text_pair is None:
            return [(one, None) for one in self.input]
        second = [self.text_pair] if isinstance(self.text_pair, str) else self.text_pair
        return list(zip(self.input * len(second) if len(self.input) == 1 else self.input, second, strict=True))

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if self.text_pair is None:
            return self
        if not all(isinstance(one, str) for one in self.input):
            raise conflict(
                "text_pair", "input has token ids and text_pair a second text; give both as token ids, or as texts"
            )
        second = 1 if isinstance(self.text_pair, str) else len(self.text_pair)
        if len(self.input) not in (1, second):
            raise conflict(
                "text_pair", f"input has {len(self.input)} entries and text_pair {second}; give one, or as many"
            )
        return self


class ScoreBody(PooledBody):
    """`POST /v1/score`, vLLM's: one text with one or many, or as many with as many."""

    text_1: Annotated[Text | Texts, Field(validation_alias=AliasChoices("text_1", "queries"))]
    text_2: Annotated[Text | Texts, Field(validation_alias=AliasChoices("text_2", "documents"))]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pair by pair."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        first = 1 if isinstance(self.text_1, str) else len(self.text_1)
        second = 1 if isinstance(self.text_2, str) else len(self.text_2)
        if first not in (1, second):
            raise conflict("text_1", f"text_1 has {first} entries and text_2 has {second}; give one, or as many")
        return self
