"""What a checkpoint's files say about embeddings and scores: the layout of sentence-transformers, read without it.

`modules.json` names a pipeline, of which the transformer, a pooling (first or last token, or mean), a normalisation and the
score of two logits are known here. `config_sentence_transformers.json` has the prompts, `sentence_bert_config.json` how texts
are read. What would change a vector and is not known is refused by name: other modules and poolings, code of its own.

>>> read_pooling(Path("Qwen3-Embedding-0.6B"), HfConfig(config))  # doctest: +SKIP
EmbeddingSpec(pool=<Pool.LAST: 'last'>, is_normalised=True, ...)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from diptych.ground.bounds import shown
from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.ground.request import Pool
from diptych.models.config import MAX_JSON_BYTES, HfConfig, read_json
from diptych.models.read import family_of
from diptych.models.reading.windows import is_both_ways

MODULES, PROMPTS, READING = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
POOLS_OF_COMPASS = {"bos": Pool.FIRST, "eos": Pool.LAST, "mean": Pool.MEAN}
POOLS = {"cls": Pool.FIRST, "lasttoken": Pool.LAST, "mean": Pool.MEAN}
# the flags that said it before sentence-transformers 5.4, and the word that says it now
OLD_POOLS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# pooling_type of GGUF files (`enum llama_pooling_type` of llama.h); 0: none
GGUF_POOLS = {1: Pool.MEAN, 2: Pool.FIRST, 3: Pool.LAST}
ACTIVATIONS = {"Sigmoid": True, "Identity": False}
USUAL_LABELS = 2  # of a config that says nothing of them, in transformers
MAX_LABELS = 2**16
# files of code in `auto_map` whose embeddings are those of the plain family with attention both ways (arXiv 2402.09906)
KNOWN_CODE = ("modeling_gritlm7b", "modeling_gritlm8x7b", "configuration_hf_nomic_bert", "modeling_hf_nomic_bert",
              "configuration_hf_alibaba_nlp_gte", "modeling_hf_alibaba_nlp_gte",
              "configuration_eurobert", "modeling_eurobert")  # fmt: skip
KNOWN_CLASSES = ("configuration.NewConfig", "modeling.NewModel")  # of GTE, in files of a name that many have


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How texts become prompts. prompts: instructions by name, put before a text.

    is_chat: texts go through the chat template, as messages of the roles user (or query and document) with the instruction
    as system; template_variables: what the template gets besides. max_tokens: the longest prompt, where the files say one.
    lowers: texts become small letters first.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    is_chat: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    lowers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec:
    """How a prompt's states become its vector. includes_prompt: whether a mean is also over the instruction, and the first
    token is also one of it.

    dimensions: the lengths that a vector may be cut to; empty: any. both_ways: each token attends to all others.
    dense: folders of the layers that a state goes through before it is normalised, in order.
    """

    pool: Pool = Pool.LAST
    is_normalised: bool = True
    includes_prompt: bool = True
    reading: Reading = Reading()
    dimensions: tuple[int, ...] = ()
    both_ways: bool = False
    dense: tuple[Path, ...] = ()


class Odds(Enum):
    """What becomes of the logits of a classification head: one label of them all holds, each by itself may, or as they are."""

    ONE_OF_ALL = "softmax"
    EACH = "sigmoid"
    NONE = "none"


PROBLEMS = {
    "single_label_classification": Odds.ONE_OF_ALL,
    "multi_label_classification": Odds.EACH,
    "regression": Odds.NONE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What a classification head tells apart. names: in the order of its logits."""

    names: tuple[str, ...]
    odds: Odds


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringSpec:
    """How a state of a query with a document becomes their score. pool: which: of an encoder the first, else the last.

    token_ids: of "yes" and "no", the difference of whose logits it is (one: its logit); None: by the classification head.
    labels: of that head, which scores where it has one. is_sigmoid: whether a score then becomes a probability.
    """

    token_ids: tuple[int, ...] | None
    labels: Labels | None = None
    pool: Pool = Pool.LAST
    is_sigmoid: bool = True
    reading: Reading = Reading()
    both_ways: bool = False


def read_pooling(directory: Path, config: HfConfig) -> EmbeddingSpec | ScoringSpec | None:
    """What the files of a checkpoint folder call for; None where it is a model that writes. LoadError, UnsupportedModel."""
    modules = _modules(directory)
    named = config.raw.get("architectures")
    is_classifier = isinstance(named, list) and bool(named) and str(named[0]).endswith("ForSequenceClassification")
    if not modules and not is_classifier:
        return None
    both_ways = sees_both_ways(config)
    kinds = [kind for kind, _ in modules]
    places = dict(modules)
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")]
    if others:
        raise UnsupportedModel(f"{MODULES} in {directory} has the module {others[0]}, which is not supported")
    reading = _reading(directory)
    if is_classifier or "LogitScore" in places:
        labels = _labels(config) if is_classifier else None
        return ScoringSpec(
            token_ids=None if is_classifier else _true_and_false(directory / places["LogitScore"] / "config.json"),
            labels=labels,
            pool=_judged_pool(config) if is_classifier else Pool.LAST,
            is_sigmoid=(labels is not None and len(labels.names) > 1)
            or _is_sigmoid(directory, config),  # of one number
            reading=reading,
            both_ways=both_ways,
        )
    if "Pooling" not in places:
        raise UnsupportedModel(f"{MODULES} in {directory} names no pooling; one vector per text cannot be made")
    behind = kinds[kinds.index("Pooling") + 1 :]
    is_normalised = behind[-1:] == ["Normalize"]
    if behind != ["Dense"] * (len(behind) - is_normalised) + ["Normalize"] * is_normalised:
        raise UnsupportedModel(
            f"{MODULES} in {directory} has {', '.join(kinds)}: Dense and then Normalize may come behind Pooling"
        )
    file = directory / places["Pooling"] / "config.json"
    pool, includes_prompt = _pooling(file)
    _check_seen(pool, both_ways, str(file))
    return EmbeddingSpec(
        pool=pool,
        is_normalised=is_normalised,
        includes_prompt=includes_prompt,
        reading=reading,
        dimensions=tuple(config.integers("matryoshka_dimensions") or ()),
        both_ways=both_ways,
        dense=tuple(directory / place for kind, place in modules if kind == "Dense"),
    )


def read_gguf_pooling(config: HfConfig) -> EmbeddingSpec | None:
    """What the metadata of a GGUF file calls for; None where it is a model that writes. UnsupportedModel for other poolings."""
    kind = config.raw.get("pooling_type")
    if not kind:
        return None
    if kind not in GGUF_POOLS:
        raise UnsupportedModel(
            f"pooling_type in {config.path} is {kind!r}; 1 (mean), 2 (first token) and 3 (last token) are supported",
            hint="4 is for a head that ranks; ask for --task generate to read it without",
        )
    both_ways = sees_both_ways(config)
    _check_seen(GGUF_POOLS[kind], both_ways, config.path)
    return EmbeddingSpec(pool=GGUF_POOLS[kind], both_ways=both_ways)


def _check_seen(pool: Pool, both_ways: bool, where: str) -> None:
    if pool is Pool.FIRST and not both_ways:
        raise UnsupportedModel(
            f"the pooling of {where} is the first token's state, which has seen no other token: the model is causal",
            hint='write "is_causal": false into the config if its tokens attend both ways',
        )


def usual_pooling(config: HfConfig) -> EmbeddingSpec:
    """Where no file says one: the last token of a decoder, which alone has seen the text, the mean of an encoder, as
    sentence-transformers takes it.
    """
    pool = Pool.MEAN if family_of(config).is_encoder else Pool.LAST
    return EmbeddingSpec(pool=pool, both_ways=sees_both_ways(config))


def sees_both_ways(config: HfConfig) -> bool:
    """Whether tokens attend to those behind them. UnsupportedModel for code of its own that may do so, or anything else."""
    raw = config.raw
    inner = config.decoder
    for said in (raw, {} if inner is None else inner.raw):
        if said.get("is_causal") is False or is_both_ways(HfConfig(said)) or said.get("bidirectional"):
            return True
    code = raw.get("auto_map")
    if not code or raw.get("is_causal") is True:
        return family_of(config).is_encoder
    where = str(next(iter(code.values()), "") if isinstance(code, dict) else code)
    code_file = where.rpartition("--")[2]
    is_gte = family_of(config).name == "gte" and code_file in KNOWN_CLASSES
    if is_gte or code_file.partition(".")[0] in KNOWN_CODE:
        return True
    raise UnsupportedModel(
        f"{config.path} brings code of its own ({where[:80]}), which is never run, and does not say whether tokens attend to "
        "those behind them",
        hint='write "is_causal": false into the config if they do and the model is otherwise a plain one, true if they do not',
    )


def _modules(directory: Path) -> list[tuple[str, str]]:
    """Kinds of the pipeline's modules in order, each with its folder; empty where no pipeline is named."""
    path = directory / MODULES
    if not path.is_file():
        return []
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise LoadError(f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON_BYTES} are read")
        listed = json.loads(path.read_text(encoding="utf-8"))
        found = [(str(one["type"]).rpartition(".")[2], str(one.get("path", ""))) for one in listed]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read: {error}", hint="download the file again") from error
    if any(Path(place).is_absolute() or ".." in Path(place).parts for _, place in found):
        raise LoadError(f"{path} names a folder outside its own")
    return found


def _pooling(path: Path) -> tuple[Pool, bool]:
    """Which pooling, and whether a mean includes the instruction."""
    config = read_json(path)
    mode = config.get("pooling_mode")
    if mode is None:
        chosen = [word for flag, word in OLD_POOLS.items() if config.get(flag)]
        mode = chosen[0] if len(chosen) == 1 else chosen or "mean"
    if isinstance(mode, list) and len(mode) == 1:
        mode = mode[0]
    if not isinstance(mode, str) or mode not in POOLS:
        raise UnsupportedModel(f"the pooling of {path} is {mode!r}; {', '.join(POOLS)} are supported")
    return POOLS[mode], config.get("include_prompt") is not False


def _reading(directory: Path) -> Reading:
    saved = _json_if_any(directory / PROMPTS)
    read = HfConfig(_json_if_any(directory / READING), path=str(directory / READING))
    lowers, is_chat = read.flag("do_lower_case"), "message" in read.section("modality_config").raw
    if lowers and is_chat:
        raise UnsupportedModel(
            f"do_lower_case in {directory / READING} is true; what goes through a chat template is read as it is"
        )
    prompts = saved.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise LoadError(f"prompts in {directory / PROMPTS} must map names to texts")
    default = saved.get("default_prompt_name")
    if default is not None and default not in list(prompts):
        raise LoadError(f"default_prompt_name in {directory / PROMPTS} is {default!r}, and there is no such prompt")
    longest = read.raw.get("max_seq_length")
    variables = read.section("processing_kwargs").section("chat_template").raw
    return Reading(
        prompts=prompts,
        default_prompt=default,
        is_chat=is_chat,
        template_variables={key: value for key, value in variables.items() if key != "restore_suffix"},
        max_tokens=longest if type(longest) is int and longest > 0 else None,
        lowers=lowers,
    )


def _judged_pool(config: HfConfig) -> Pool:
    """The state that a head judges by: of decoders the last token's, but where their class reads another from `pooling`."""
    family = family_of(config)
    if not family.is_encoder:
        said = (config.decoder or config).raw.get("pooling") if "pooling" in family.unread else None
        if said not in (None, *POOLS_OF_COMPASS):
            raise UnsupportedModel(f"pooling in {config.path} is {said!r}; {', '.join(POOLS_OF_COMPASS)} are supported")
        pool = POOLS_OF_COMPASS["eos" if said is None else said]
        _check_seen(pool, sees_both_ways(config), config.path)
        return pool
    said = config.raw.get("classifier_pooling", "cls")
    if said not in POOLS:
        raise UnsupportedModel(f"classifier_pooling in {config.path} is {said!r}; {', '.join(POOLS)} are supported")
    return POOLS[said]


def _labels(config: HfConfig) -> Labels:
    """By `id2label` and `problem_type`, as transformers' pipeline for texts reads them."""
    said = config.raw.get("id2label")
    if said is None:
        number = config.integer("num_labels", USUAL_LABELS)
        if number > MAX_LABELS:
            raise LoadError(f"num_labels in {config.path} is {number}; it must be at most {MAX_LABELS}")
        names = tuple(f"LABEL_{i}" for i in range(number))
    else:
        by_number = {str(number): str(name) for number, name in said.items()} if isinstance(said, dict) else {}
        names = tuple(by_number.get(str(number), "") for number in range(len(by_number)))
    if not all(names) or not names:
        raise LoadError(f"id2label in {config.path} is {shown(said)}; it must name the labels 0, 1 and on")
    problem = config.raw.get("problem_type")
    if problem is not None and (not isinstance(problem, str) or problem not in PROBLEMS):
        raise UnsupportedModel(
            f"problem_type in {config.path} is {shown(problem)}; {', '.join(PROBLEMS)} are supported"
        )
    odds = Odds.ONE_OF_ALL if problem is None else PROBLEMS[problem]
    return Labels(names=names, odds=Odds.EACH if len(names) == 1 and odds is Odds.ONE_OF_ALL else odds)


def _true_and_false(path: Path) -> tuple[int, ...]:
    config = read_json(path)
    ids = [config.get("true_token_id"), config.get("false_token_id")]
    found = tuple(one for one in ids if one is not None)
    if not found or ids[0] is None or not all(type(one) is int and one >= 0 for one in found):
        raise LoadError(f"true_token_id and false_token_id in {path} are {ids}; they must be token ids")
    return found


def _is_sigmoid(directory: Path, config: HfConfig) -> bool:
    """By the activation that the files name; a probability where they name none."""
    named = _json_if_any(directory / PROMPTS).get("activation_fn")
    inner = config.raw.get("sentence_transformers")
    named = named or (inner.get("activation_fn") if isinstance(inner, dict) else None)
    named = named or config.raw.get("sbert_ce_default_activation_function")
    if named is None:
        return True
    word = str(named).rpartition(".")[2]
    if word not in ACTIVATIONS:
        raise UnsupportedModel(f"the activation of scores is {named!r}; {' and '.join(ACTIVATIONS)} are supported")
    return ACTIVATIONS[word]


def _json_if_any(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
