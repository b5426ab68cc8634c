"""GGUF architectures as data: how a file's metadata becomes a config.json's keys, and where a tensor of ours lies in it.

A file is read as the Hugging Face checkpoint that it was converted from: the keys of `read_config` go through
`models.read` like any config.json, and `place_of` knows a tensor's name there and what the converter did to it (rows of q
and k reordered, 1 added to norms, experts stacked). Sources: `conversion/*.py` and `src/models/*.cpp` of llama.cpp, release
of llama-cpp-python 0.3.36.

>>> place_of("model.layers.3.mlp.up_proj.weight", ARCHITECTURES["qwen2"]).name
'blk.3.ffn_up.weight'
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.models.config import HfConfig
from diptych.models.gguf_file import GgufArray, GgufFile, open_gguf
from diptych.models.read import read_model
from diptych.models.spec import ModelSpec

logger = logging.getLogger("diptych.models")

# keys after the architecture's name -> keys of config.json
USUAL: dict[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
NEEDED = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
          "attention.layer_norm_rms_epsilon")  # fmt: skip
WINDOWED = {"attention.sliding_window": "sliding_window"}
CAPPED = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
EXPERT_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
# read by `read_config` itself, or without influence on what a token's logits are
ALSO_READ = frozenset((
    "vocab_size", "attention.value_length", "attention.sliding_window_pattern", "rope.dimension_count", "attention.causal",
    "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scale_linear", "tensor_data_layout",
))  # fmt: skip
# change the mathematics, and no architecture here reads them -> the values that say: as usual
CHANGING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "attention.scale", "attention.output_scale",
                     "attention.value_scale", "expert_weights_scale"), (0.0, 1.0)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count", "expert_gating_func"), (0, 1)),
    **dict.fromkeys((
        "attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale", "attention.kv_lora_rank",
        "attention.q_lora_rank", "attention.key_length_swa", "attention.value_length_swa", "attention.shared_kv_layers",
        "attention.recurrent_layers", "attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping",
        "router_logit_softcapping", "expert_count", "expert_shared_count", "expert_shared_feed_forward_length",
        "leading_dense_block_count", "moe_every_n_layers", "interleave_moe_layer_step", "full_attention_interval",
        "use_parallel_residual", "ssm.state_size", "nextn_predict_layers", "swin_norm", "num_loops", "pooling_type",
        "rope.dimension_sections", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor",
    ), (0,)),
}  # fmt: skip
# our names of a layer's norms -> theirs
BEFORE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
AROUND = {**AFTER, "input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """What `general.architecture` names. keys: read beside USUAL; fixed: of the config, always; norms: names in a layer.

    is_permuted: rows of q and k lie in the order of llama.cpp's own rotation. norm_added: by the converter to every norm.
    may_have_biases: where the file has some. wide_layers: of the one size whose scores are scaled otherwise.
    """

    architecture: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    is_permuted: bool = False
    norm_added: float = 0.0
    may_have_biases: bool = False
    wide_layers: int | None = None


IN_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
AT_THE_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
EXPERT = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)\.(weight|bias)$")
ONE_EXPERT = re.compile(r"^(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)$")
# what a rotation divides its frequencies by: Llama 3's own scaling, and the two sets of Phi 3
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSOR = re.compile(r"^(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight$")

LLAMA = GgufArchitecture(architecture="LlamaForCausalLM", is_permuted=True, may_have_biases=True)
MIXTRAL = GgufArchitecture(architecture="MixtralForCausalLM", keys=EXPERTS, is_permuted=True)
GEMMA: dict[str, Any] = {"keys": {**WINDOWED, **CAPPED}, "norms": AROUND, "norm_added": 1.0}
ARCHITECTURES: dict[str, GgufArchitecture] = {
    # Llama 1 to 3, Mistral, and what copies them; with experts it is Mixtral
    "llama": LLAMA,
    "qwen2": GgufArchitecture(architecture="Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture(architecture="Qwen3ForCausalLM"),
    # llama.cpp scales the chosen experts to sum to 1, as all published models do
    "qwen3moe": GgufArchitecture(
        architecture="Qwen3MoeForCausalLM", keys={**EXPERTS, **EXPERT_WIDTH}, fixed={"norm_topk_prob": True}
    ),
    "phi3": GgufArchitecture(architecture="Phi3ForCausalLM", keys=WINDOWED),
    # wide_layers: the one size whose scores are scaled by the width of the model over its heads (llama.cpp knows it so too)
    "gemma2": GgufArchitecture(architecture="Gemma2ForCausalLM", wide_layers=46, **GEMMA),
    "gemma3": GgufArchitecture(architecture="Gemma3ForCausalLM", wide_layers=62, **GEMMA),
    "olmo2": GgufArchitecture(architecture="Olmo2ForCausalLM", norms=AFTER),
    "smollm3": GgufArchitecture(architecture="SmolLM3ForCausalLM", is_permuted=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor of ours lies. expert: entry of a stacked tensor; heads: whose rows were reordered, 'q' or 'k'."""

    name: str
    expert: int | None = None
    heads: str | None = None
    added: float = 0.0


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """What the file says it is. UnsupportedModel, with the list of those that are read, for any other."""
    name = file.metadata.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise UnsupportedModel(
            f"architecture {name!r} in {file.path} is not supported; of GGUF files {', '.join(ARCHITECTURES)} are",
            hint="its Hugging Face checkpoint may be: the list of those is longer",
        )
    return MIXTRAL if found is LLAMA and file.metadata.get("llama.expert_count") else found


def read_config(file: GgufFile) -> dict[str, Any]:
    """The file's metadata as a config.json. Raises UnsupportedModel and LoadError, which name the key."""
    kind = architecture_of(file)
    keys = _Keys(file)
    names = {**USUAL, **kind.keys}
    keys.refuse_changing(names)
    config: dict[str, Any] = {"architectures": [kind.architecture], **kind.fixed}
    for name, ours in names.items():
        value = keys.number(name)
        if value is None and name in NEEDED:
            raise LoadError(
                f"{keys.full(name)} is missing from {file.path}", hint="the file is damaged, or no language model"
            )
        if value is not None:
            config[ours] = value
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise LoadError(
            f"tensor token_embd.weight is missing from {file.path}", hint="it holds a vocabulary, or an adapter"
        )
    config["vocab_size"] = table.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    heads = config["num_attention_heads"]
    if not isinstance(heads, int) or heads < 1:
        raise LoadError(f"{keys.full('attention.head_count')} in {file.path} is {heads}; it must be at least 1")
    config.setdefault("head_dim", config["hidden_size"] // heads)
    config.setdefault("rope_theta", 10_000.0)
    if keys.number("attention.value_length") not in (None, config["head_dim"]):
        raise LoadError(f"{file.path} has values of another width than keys, which no op of the engine computes")
    if kind.may_have_biases:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if kind.wide_layers is not None:
        is_wide = config["num_hidden_layers"] == kind.wide_layers
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if is_wide else config["head_dim"]
    _add_windows(config, keys, kind)
    _add_rope(config, keys, file)
    return config


def _add_windows(config: dict[str, Any], keys: _Keys, kind: GgufArchitecture) -> None:
    if "attention.sliding_window" not in kind.keys:
        return
    config["sliding_window"] = config.get("sliding_window") or None
    pattern = keys.values("attention.sliding_window_pattern")
    if pattern is not None and config["sliding_window"] and kind.architecture.startswith("Gemma"):
        config["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    elif kind.architecture == "Gemma3ForCausalLM":
        config["sliding_window_pattern"] = keys.number("attention.sliding_window_pattern") or 6
    if kind.architecture == "Gemma3ForCausalLM":
        config["rope_local_base_freq"] = keys.number("rope.freq_base_swa") or 10_000.0


def _add_rope(config: dict[str, Any], keys: _Keys, file: GgufFile) -> None:
    """partial_rotary_factor and rope_scaling, where the file says more than a base."""
    turned = keys.number("rope.dimension_count")
    if turned is not None and turned != config["head_dim"]:
        config["partial_rotary_factor"] = turned / config["head_dim"]
    kind, factor = (
        keys.text("rope.scaling.type"),
        keys.number("rope.scaling.factor") or keys.number("rope.scale_linear"),
    )
    original = keys.number("rope.scaling.original_context_length")
    attention = keys.number("rope.scaling.yarn_attn_factor") or keys.number("rope.scaling.attn_factor")
    freqs, long, short = (file.floats(name) for name in (ROPE_FREQS, ROPE_LONG, ROPE_SHORT))
    scaling: dict[str, Any] | None = None
    if freqs is not None and (long or short or kind not in (None, "none")):
        raise LoadError(f"{file.path} scales its positions twice: by {ROPE_FREQS} and by another rule")
    if freqs is not None:
        # the converter keeps Llama 3's rule as the numbers that come out of it, and drops the rule
        scaling = {"rope_type": "longrope", "long_factor": freqs, "short_factor": freqs, "factor": 1.0,
                   "attention_factor": 1.0, "original_max_position_embeddings": config["max_position_embeddings"]}  # fmt: skip
    elif long is not None or short is not None:
        scaling = {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "attention_factor": attention or 1.0,
        }
        config["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                   "attention_factor": attention, "beta_fast": keys.number("rope.scaling.yarn_beta_fast"),
                   "beta_slow": keys.number("rope.scaling.yarn_beta_slow")}  # fmt: skip
    elif kind == "linear" or (kind is None and factor not in (None, 0, 1)):
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind not in (None, "none", "longrope"):
        raise LoadError(
            f"{keys.full('rope.scaling.type')} in {file.path} is {kind!r}; linear, yarn and longrope are read"
        )
    if scaling is not None:
        config["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}


class _Keys:
    """The metadata of the file's own architecture."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._prefix = f"{file.metadata['general.architecture']}."

    def full(self, name: str) -> str:
        """The key as the file has it."""
        return self._prefix + name

    def number(self, name: str) -> Any:
        """A number; of an array the one that all its entries are. None where it is absent or the array is empty."""
        value = self._file.metadata.get(self.full(name))
        if isinstance(value, GgufArray):
            values = set(self.values(name) or ())
            if len(values) > 1:
                if name == "attention.sliding_window_pattern":
                    return None
                raise LoadError(
                    f"{self.full(name)} in {self._file.path} differs from layer to layer, which is not supported"
                )
            value = values.pop() if values else None
        if value is not None and (isinstance(value, str) or not math.isfinite(value)):
            raise LoadError(f"{self.full(name)} in {self._file.path} is {value!r}; it must be a number")
        return value

    def values(self, name: str) -> list[Any] | None:
        """An array's values; None where there is none."""
        value = self._file.metadata.get(self.full(name))
        if isinstance(value, GgufArray) and value.count > 2**20:
            raise LoadError(f"{self.full(name)} in {self._file.path} has {value.count} entries")
        return value.values() if isinstance(value, GgufArray) else None

    def text(self, name: str) -> str | None:
        """A string; None where it is absent."""
        value = self._file.metadata.get(self.full(name))
        if value is not None and not isinstance(value, str):
            raise LoadError(f"{self.full(name)} in {self._file.path} is {value!r}; it must be a text")
        return value

    def refuse_changing(self, read: Mapping[str, str]) -> None:
        """LoadError for a key that changes the mathematics and is not read; a warning for one that nobody knows."""
        unknown = []
        for key, value in self._file.metadata.items():
            name = key.removeprefix(self._prefix)
            if name == key or name in read or name in ALSO_READ:
                continue
            if name not in CHANGING:
                unknown.append(key)
            elif isinstance(value, GgufArray | str) or value not in CHANGING[name]:
                shown = f"{value.count} values" if isinstance(value, GgufArray) else repr(value)
                raise LoadError(
                    f"{key} in {self._file.path} is {shown}; it changes the mathematics, and {self._prefix[:-1]} here has no "
                    "such key", hint="the file is of a newer model than this version knows",
                )  # fmt: skip
        if self._file.metadata.get(self.full("attention.causal"), True) is not True:
            raise LoadError(
                f"{self.full('attention.causal')} in {self._file.path} is false; only causal models are run"
            )
        if unknown:
            logger.warning("metadata keys that are not known, not read: %s", ", ".join(sorted(unknown)))


def place_of(name: str, kind: GgufArchitecture) -> Place | None:
    """Where the tensor that a Hugging Face checkpoint calls `name` lies; None for a name that GGUF has no word for."""
    if name in AT_THE_ENDS:
        is_norm = name == "model.norm.weight"
        return Place(name=AT_THE_ENDS[name], added=kind.norm_added if is_norm else 0.0)
    layer = LAYER.match(name)
    if layer is None:
        return None
    number, part, ending = layer.groups()
    expert = ONE_EXPERT.match(part)
    if expert is not None and expert[2] in EXPERT:
        return Place(name=f"blk.{number}.ffn_{EXPERT[expert[2]]}_exps.{ending}", expert=int(expert[1]))
    theirs = kind.norms.get(part) or IN_LAYER.get(part)
    if theirs is None:
        return None
    heads = {"attn_q": "q", "attn_k": "k"}.get(theirs) if kind.is_permuted else None
    added = kind.norm_added if part.endswith("norm") else 0.0
    return Place(name=f"blk.{number}.{theirs}.{ending}", heads=heads, added=added)


def load_gguf_spec(path: Path) -> ModelSpec:
    """The model of a GGUF file, as the planner sees it. LoadError where it holds another number of parameters than it says."""
    file = open_gguf(path)
    return read_model(HfConfig(read_config(file), path=str(path)), name=path.stem)


def count_parameters(file: GgufFile) -> int:
    """Elements of all tensors but those that only say how positions turn."""
    return sum(math.prod(tensor.shape) for name, tensor in file.tensors.items() if not ROPE_TENSOR.match(name))
