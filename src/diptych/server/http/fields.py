"""The fields that clients of OpenAI's API, of vLLM and of llama.cpp send and that no model of `schema` reads.

Each is refused by name, because the answer would not be what was asked for, or has no effect, and why that is harmless.
What stands in neither table is unknown: it is named in the answer's header `x-diptych-ignored`. `docs/serving.md` shows all
of it; a test holds both to the params of the `openai` package and to vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ValidationInfo

IGNORED_HEADER = "x-diptych-ignored"
MAX_IGNORED_CHARS = 512
_SCOPE_KEY = "diptych.ignored"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused. harmless: values that ask for nothing, besides null and empty ones."""

    why: str
    harmless: tuple[object, ...] = ()

    def spares(self, value: object) -> bool:
        """Whether a value asks for nothing."""
        return value is None or value in ([], {}, "") or any(_is_same(value, one) for one in self.harmless)


def _is_same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


_ONLY_TEXT = "this server reads and writes text only"
_OLD_CALLS = "it was replaced by tools and tool_choice; send those"
_SAMPLER = "this server has no such sampler"
_BEAMS = "there is no beam search here"

REFUSED: Mapping[str, Refusal] = {
    # OpenAI
    "audio": Refusal(_ONLY_TEXT),
    "modalities": Refusal(_ONLY_TEXT, (["text"],)),
    "functions": Refusal(_OLD_CALLS),
    "function_call": Refusal(_OLD_CALLS, ("none", "auto")),
    "moderation": Refusal("nothing is moderated here"),
    "store": Refusal("chats are not stored here; /v1/responses stores", (False,)),
    "web_search_options": Refusal("nothing is searched here; give what was found as messages or documents"),
    # vLLM
    "allowed_token_ids": Refusal("hold the output with structured_outputs, or lower tokens with logit_bias"),
    "bad_words": Refusal("lower their tokens with logit_bias"),
    "chat_template": Refusal("the model's own template is used; its variables are chat_template_kwargs"),
    "early_stopping": Refusal(_BEAMS, (False,)),
    "ec_transfer_params": Refusal(_ONLY_TEXT),
    "guided_whitespace_pattern": Refusal("blanks in JSON are free within bounds"),
    "include_reasoning": Refusal("reasoning always comes apart, as reasoning_content; leave it unread", (True,)),
    "kv_transfer_params": Refusal("no KV blocks come from or go to other servers"),
    "length_penalty": Refusal(_BEAMS, (1, 1.0)),
    "logits_processors": Refusal("code is never taken from a request"),
    "logprob_token_ids": Refusal("the likeliest tokens are told: logprobs, top_logprobs"),
    "media_io_kwargs": Refusal(_ONLY_TEXT),
    "mm_processor_kwargs": Refusal(_ONLY_TEXT),
    "prompt_embeds": Refusal("prompts are text or token ids"),
    "prompt_logprobs": Refusal("send echo with logprobs to /v1/completions"),
    "repetition_detection": Refusal(_SAMPLER),
    "return_prompt_text": Refusal("/apply-template shows the prompt", (False,)),
    "return_tokens_as_token_ids": Refusal("send return_token_ids: ids come beside the text", (False,)),
    "routed_experts_prompt_start": Refusal("routed experts are not told", (0,)),
    "skip_special_tokens": Refusal("text shows no special tokens; send return_token_ids and detokenize", (True,)),
    "structural_tag": Refusal("use structured_outputs.grammar"),
    "thinking_token_budget": Refusal("reasoning has no limit of its own; max_tokens holds for all"),
    "truncate_prompt_tokens": Refusal("a prompt is never cut; shorten it"),
    "use_beam_search": Refusal(_BEAMS, (False,)),
    "vllm_xargs": Refusal("they mean nothing here"),
    "watermarking": Refusal("no answer is marked", (False,)),
    # llama.cpp
    "dry_multiplier": Refusal(_SAMPLER, (0, 0.0)),
    "dynatemp_range": Refusal(_SAMPLER, (0, 0.0)),
    "lora": Refusal("name an adapter as the model"),
    "mirostat": Refusal(_SAMPLER, (0,)),
    "n_predict": Refusal("it is max_tokens here"),
    "n_probs": Refusal("it is logprobs here", (0,)),
    "repeat_penalty": Refusal("it is repetition_penalty here", (1, 1.0)),
    "samplers": Refusal("the order is fixed: penalties, temperature, top_k, top_p, min_p"),
    "typical_p": Refusal(_SAMPLER, (1, 1.0)),
    "xtc_probability": Refusal(_SAMPLER, (0, 0.0)),
}

_CHATS = "it is of chats; /v1/chat/completions honours it"

# honoured by one route alone; a test holds these to the two models
OF_CHATS: Mapping[str, Refusal] = {
    "messages": Refusal(_CHATS),
    "top_logprobs": Refusal("send their number as logprobs", (0,)),
    "tools": Refusal(_CHATS),
    "tool_choice": Refusal(_CHATS, ("none", "auto")),
    "parallel_tool_calls": Refusal(_CHATS, (False, True)),
    "reasoning_effort": Refusal(_CHATS, ("none",)),
    "verbosity": Refusal(_CHATS, ("medium",)),
    "documents": Refusal(_CHATS),
    "add_generation_prompt": Refusal(_CHATS, (False,)),
    "continue_final_message": Refusal(_CHATS, (False,)),
    "chat_template_kwargs": Refusal(_CHATS),
}
OF_PROMPTS: Mapping[str, Refusal] = {"prompt": Refusal("send messages, or the prompt to /v1/completions")}

NO_EFFECT: Mapping[str, str] = {
    # OpenAI
    "metadata": "labels stored answers, and none is stored",
    "prompt_cache_key": "a hint where to look; every prompt's prefix is looked up here",
    "prompt_cache_options": "a hint how long to keep; what is unused longest goes first",
    "prompt_cache_retention": "a hint how long to keep; what is unused longest goes first",
    "safety_identifier": "labels the caller for OpenAI's reviews, and there are none",
    "service_tier": "there is one tier",
    "user": "labels the caller; caches are kept apart by cache_salt",
    # vLLM
    "guided_decoding_backend": "names the library that holds constraints; the one here holds them all",
    "return_mm_kwargs": "shapes the answers of vLLM's render routes only",
    "return_token_offsets": "shapes the answers of vLLM's render routes only",
    "session_id": "labels related requests; every prompt's prefix is looked up here",
    "spaces_between_special_tokens": "text shows no special tokens",
    "stream_interval": "every step is an event of its own; put together they are the same",
    "truncation_side": "a prompt is never cut",
    # llama.cpp
    "cache_prompt": "a hint for speed; prefixes are always cached, and the answer is the same",
    "id_slot": "places for sequences have no numbers here",
    "timings_per_token": "timings come with the last event",
}


def check_extra(
    extra: Mapping[str, Any], refused: Mapping[str, Refusal], no_effect: Mapping[str, str]
) -> Iterator[str]:
    """The names of unknown fields. Raises FieldRefused for the first one that is refused."""
    for name, value in extra.items():
        refusal = refused.get(name)
        if refusal is not None and not refusal.spares(value):
            raise FieldRefused(name, refusal.why)
        if refusal is None and name not in no_effect:
            yield name


class FieldRefused(Exception):
    """A known field that this server does not honour."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name)
        self.name = name
        self.message = f"{name} is not supported: {why}"


NEEDS_CONTENT = ("system", "developer", "user", "tool")  # roles of which nothing said is a mistake


def _check_said(content: Any, info: ValidationInfo) -> Any:
    # fields of a message are not told when unknown, so a text under another name would vanish
    role = info.data.get("role")
    if content is None and role in NEEDS_CONTENT:
        raise ValueError(f"is missing; a message with role {role!r} needs one: a string, or a list of text parts")
    return content


T = TypeVar("T")
# the content of a message behind its role, null for an assistant's alone
Said = Annotated[T, AfterValidator(_check_said)]


def ignored_header(names: tuple[str, ...]) -> dict[str, str]:
    """The header that tells which fields were not known; empty when all were."""
    shown = ", ".join(name.encode("ascii", "backslashreplace").decode() for name in names if name.isprintable())
    return {IGNORED_HEADER: shown[:MAX_IGNORED_CHARS]} if shown else {}


def note_ignored(scope: MutableMapping[str, Any], names: Sequence[str]) -> None:
    """Keep the names of a request's fields that were not known until it is answered."""
    scope[_SCOPE_KEY] = tuple(names)


def ignored_of(scope: Mapping[str, Any]) -> tuple[str, ...]:
    """What `note_ignored` kept."""
    names: tuple[str, ...] = scope.get(_SCOPE_KEY, ())
    return names
