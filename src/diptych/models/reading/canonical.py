"""A config in the words that `models.read` asks in, whatever its family calls things; and the one allow-list of keys.

A key that changes the mathematics and that the family does not read is refused by name. A key that no family knows is
named in a warning: the classes of transformers do not read it either.
"""

from __future__ import annotations

import logging
from itertools import cycle, islice
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.families.family import Family
from diptych.models.keys import CHANGING, HARMLESS, HARMLESS_ENDINGS, NEUTRAL, SYNONYMS
from diptych.models.reading.block_index import as_indexed
from diptych.models.reading.blocks import as_halves, as_layers, as_pairs, as_searched, as_states, without_pictures
from diptych.models.reading.deepseek_v4 import as_deepseek_v4
from diptych.models.reading.encoders import as_gated_or_not, as_related, as_windowed, with_stretched_base
from diptych.models.reading.glm_next import as_glm_next
from diptych.models.reading.gpt import of_all_layers, with_kinds, with_section
from diptych.models.reading.griffin import as_griffin
from diptych.models.reading.laguna import as_gated
from diptych.models.reading.ling import as_ling
from diptych.models.reading.mixtures import of_text
from diptych.models.reading.shared import as_asides
from diptych.models.reading.step import as_usual
from diptych.models.reading.windows import named_layers, with_turns
from diptych.models.rope import ROPE_KEYS

logger = logging.getLogger("diptych.models")

INDEXED = ("indexed_attention", "deepseek_sparse_attention")  # what layers are called that attend by an index
# what says in other words what a config of the usual kind says, by a key that only such families have
BY_KEY = {
    "num_sliding_attention_heads": as_usual, "gating": as_gated, "kda_lower_bound": as_ling, "index_kpool": as_glm_next,
    "block_types": as_griffin, "entry_layers": as_deepseek_v4,
    "post_norm_eps": with_turns, "feed_forward_proj": as_gated_or_not, "pack_qkv": with_stretched_base,
    "pos_att_type": as_related, "attention_windows": as_windowed,
}  # fmt: skip


def canonical(config: HfConfig, family: Family) -> HfConfig:
    """The decoder's config: class defaults under what the file says, by the names used here. LoadError for an unread key."""
    decoder, wrapper = config.decoder or config, config.wrapper
    raw, path = dict(decoder.raw), decoder.path
    if decoder is not config and ("tie_word_embeddings" in wrapper.raw or wrapper is not config):
        raw["tie_word_embeddings"] = wrapper.raw.get("tie_word_embeddings", False)
    for theirs, ours in family.renamed.items():
        if theirs in raw:
            raw[ours] = raw.pop(theirs)
    raw = named_layers(raw, family, path)
    raw = of_text(raw) if family.has_other_experts else raw
    for key in family.by_layer:
        raw |= {key: of_all_layers(raw[key], key, path)} if key in raw else {}
    kinds = raw.get("layer_types")
    if kinds is None and family.keys.get("layer_types") is not None:  # what they are, again and again
        n_layers = HfConfig({**family.keys, **raw}, path=path).integer("num_hidden_layers")
        kinds = raw["layer_types"] = [*islice(cycle(family.keys["layer_types"]), n_layers)]
    is_indexed = "index_topk" in family.keys and family.state_rule is None
    if is_indexed and isinstance(kinds, list) and all(kind in INDEXED for kind in kinds):
        del raw["layer_types"]  # which says no more than that there is an index
    if "indexer_budget" in family.keys and isinstance(kinds, list):
        raw["layer_types"] = ["full_attention" if kind == INDEXED[0] else kind for kind in kinds]
    raw = as_indexed(raw, family, path) if "index_topk_blocks" in family.keys else raw
    if "attention_types" in family.keys:
        raw = with_kinds(raw, path)
    for key, in_these_words in BY_KEY.items():
        raw = in_these_words(raw, family.keys, path) if key in family.keys else raw
    for section in family.sections:
        raw = with_section(raw, section, family, path)
    read = {*family.keys, *(ROPE_KEYS if "rope_theta" in family.keys else ()), "layer_types", "hidden_act"}
    _check_keys(raw, read, family, path)
    if raw.get("rope_scaling") or raw.get("rope_parameters"):  # a class default holds only where neither is given
        raw = {"rope_parameters": None, **raw}
    settled = {**family.keys, **{key: value for key, value in raw.items() if key in read}}
    if family.has_blocks:
        settled |= as_layers(raw, path)
    elif family.has_pairs:
        settled |= as_pairs(settled, path)
    elif family.has_states_alone:
        settled |= as_states(settled, path)
    elif family.has_halves:
        settled |= as_halves(settled, path)
    elif family.shares_blocks:
        settled |= as_asides(settled, path)
    elif "local_attention" in family.keys and settled.get("sliding_window") is None:
        # to either side, in what it was made of
        settled["sliding_window"] = HfConfig(settled, path=path).integer("local_attention", low=2) // 2
    elif "cross_attention_layers" in family.keys:
        settled |= without_pictures(settled, path)
    elif "block_configs" in family.keys:
        settled |= as_searched(settled, path)
    elif family.counts_offset:
        offset = family.positions_offset or 0
        settled["max_position_embeddings"] = (
            HfConfig(settled, path=path).integer("max_position_embeddings", low=offset + 1) - offset
        )
    return HfConfig(settled, path=path)


def _check_keys(raw: dict[str, Any], read: set[str], family: Family, path: str) -> None:
    unknown = []
    for key, value in raw.items():
        if key in family.fixed:  # also of what every family has, as the activation
            if value not in family.fixed[key]:
                allowed = " or ".join(repr(one) for one in family.fixed[key])
                raise LoadError(f"{key} in {path} is {value!r}; of {family.name}, only {allowed} is supported")
        elif key in read or _is_harmless(key, family) or _is_said(key, raw, family):
            continue
        elif key in CHANGING:
            if value and not (key in NEUTRAL and value == NEUTRAL[key]):
                raise LoadError(
                    f"{key} in {path} is {value!r}; it changes the mathematics, and {family.name} has no such key",
                    hint="the architecture named there may be wrong, or newer than this version knows",
                )
        elif value:
            unknown.append(key)
    if unknown:
        logger.warning("config keys that no family knows, not read (transformers reads none of them for %s): %s",
                       family.name, ", ".join(sorted(unknown)))  # fmt: skip


def _is_harmless(key: str, family: Family) -> bool:
    """Whether a key means nothing, to any family or to this one."""
    return key in HARMLESS or key in family.unread or key.endswith(HARMLESS_ENDINGS)


def _is_said(key: str, raw: dict[str, Any], family: Family) -> bool:
    """Whether a key by which other families call one of this family's says what that one does."""
    ours = [name for name in SYNONYMS.get(key, ()) if name in family.keys]
    if key == "num_key_value_heads":  # as many as there are heads: no two share one
        ours = ["num_attention_heads"]
    return any(raw[key] == raw.get(name, family.keys[name]) for name in ours)
