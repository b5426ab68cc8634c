"""What heads that draft are: published layouts of Medusa and EAGLE read into one description each, held against their model.

Layouts, as far as they are read (facts from the projects' own code and checkpoints):
* Medusa (FasterDecoding/Medusa; TGI and vLLM too): `medusa_num_heads`, `medusa_num_layers`; tensors `0.0.linear.weight`,
  `0.1.weight`, or vLLM's `blocks.0.layers.0.weight`, `lm_heads.0.weight`; without those the model's own output projection.
* EAGLE-1 (SafeAILab/EAGLE): a Llama of one layer without its first norm; `fc.weight`, `layers.0.*`; embedding and output
  projection are the model's where the file has none.
* EAGLE-3 (SafeAILab/EAGLE, SpecForge): `fc.weight` over three states, `midlayer.*`, `norm.weight`, `lm_head.weight` over
  `draft_vocab_size` tokens that `d2t` maps to the model's.
* speculators (vllm-project/speculators): `speculators_model_type` eagle or eagle3, the layer in `transformer_layer_config`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from diptych.ground.errors import ConfigError, LoadError
from diptych.models.config import HfConfig
from diptych.models.mlp import MlpSpec
from diptych.models.read import read_model
from diptych.models.spec import AttentionLayer, LayerSpec, ModelSpec

# what of a head's config says how its layer is made; the rest is about training
LAYER_KEYS = (
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "mlp_bias",
    "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "vocab_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec:
    """n_heads heads of n_blocks residual blocks over the last state; has_own_head: each with an output projection."""

    n_heads: int
    n_blocks: int
    hidden: int
    vocab_size: int
    has_own_head: bool

    @property
    def spec(self) -> ModelSpec:
        """As a model without layers of its own; the one here stands for form's sake, as stores have at least one."""
        return _no_layers("medusa", self.hidden, self.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """One decoder layer over (embedding, state).

    version: 1 or 3. layer: the layer as a model, its vocabulary that of the drafts. n_words: tokens of its embedding. taps:
    behind which layers of the model the states are taken; one, normed, for EAGLE-1. norms_residual: EAGLE-3's residual
    stream begins with the normed state.
    """

    version: int
    layer: ModelSpec
    n_words: int
    target_hidden: int
    taps: tuple[int, ...]
    norms_residual: bool = False

    @property
    def fusion(self) -> ModelSpec:
        """EAGLE-3's `fc`, as a model without layers."""
        return _no_layers("eagle3-fc", self.layer.hidden, self.layer.hidden)


def kind_of_heads(config: dict[str, Any]) -> str | None:
    """'medusa', 'eagle', or None for a config that is of no heads."""
    names = _architectures(config)
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config or "medusa" in names:
        return "medusa"
    if "eagle" in names or "draft_vocab_size" in config or "speculators_model_type" in config:
        return "eagle"
    return None


def _architectures(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    return " ".join(map(str, named)).lower() if isinstance(named, list) else ""


def read_medusa(config: dict[str, Any], target: ModelSpec, path: str, *, has_own_head: bool) -> MedusaSpec:
    """The description of Medusa heads. LoadError for a config without them, ConfigError where they do not fit."""
    n_heads = config.get("medusa_num_heads", config.get("num_heads"))
    n_blocks = config.get("medusa_num_layers", config.get("num_hidden_layers", 1))
    if type(n_heads) is not int or type(n_blocks) is not int or not 1 <= n_heads <= 64 or not 1 <= n_blocks <= 64:
        raise LoadError(f"{path} has medusa_num_heads {n_heads!r} and medusa_num_layers {n_blocks!r}; both are counts")
    for name, ours in (("hidden_size", target.hidden), ("vocab_size", target.vocab_size)):
        _refuse_other(path, name, config.get(name, ours), ours)
    return MedusaSpec(
        n_heads=n_heads,
        n_blocks=n_blocks,
        hidden=target.hidden,
        vocab_size=target.vocab_size,
        has_own_head=has_own_head,
    )


def read_eagle(config: dict[str, Any], target: ModelSpec, path: str) -> EagleSpec:
    """The description of an EAGLE head. ConfigError where it does not fit the model."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle", "eagle3"):
        raise LoadError(f"speculators_model_type in {path} is {kind!r}; eagle and eagle3 are read")
    own = HfConfig(config, path=path)
    version = 3 if kind == "eagle3" or "eagle3" in _architectures(config) or "draft_vocab_size" in config else 1
    raw = own.section("transformer_layer_config").raw or config
    layers = raw.get("num_hidden_layers", 1)
    if layers != 1:
        raise LoadError(f"num_hidden_layers in {path} is {layers!r}; an EAGLE head has 1")
    named = {key: raw[key] for key in LAYER_KEYS if raw.get(key) is not None}
    layer = read_model(
        HfConfig(
            named | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, path=path
        )
    )
    _refuse_other(path, "vocab_size", layer.vocab_size, target.vocab_size)
    n_words = layer.vocab_size
    layer = replace(layer, name=f"eagle{version}", embed_scale=target.embed_scale)
    if version == 1:
        _refuse_other(path, "hidden_size", layer.hidden, target.hidden)
        return EagleSpec(
            version=1, layer=layer, n_words=n_words, target_hidden=target.hidden, taps=(target.n_layers - 1,)
        )
    _refuse_other(path, "target_hidden_size", config.get("target_hidden_size") or target.hidden, target.hidden)
    drafted = HfConfig({**raw, **config}, path=path).integer("draft_vocab_size", n_words)
    return EagleSpec(
        version=3,
        layer=replace(layer, vocab_size=drafted),
        n_words=n_words,
        target_hidden=target.hidden,
        taps=_taps(own, target),
        norms_residual=bool(config.get("norm_before_residual", False)),
    )


def _taps(config: HfConfig, target: ModelSpec) -> tuple[int, ...]:
    """Configs count the layer that the state enters; we the one that it leaves."""
    name = "eagle_aux_hidden_state_layer_ids"
    nested, n = config.section("eagle_config"), target.n_layers
    named = (nested if name in nested.raw else config).integers(name)
    entered = (2, n // 2, n - 3) if named is None else tuple(named)
    if len(entered) != 3 or any(type(one) is not int or not 1 <= one <= n for one in entered):
        raise ConfigError(
            f"{config.path} takes states before layers {list(entered)}; the model has {n} layers, and three of 1 to {n} are "
            "needed"
        )
    return tuple(one - 1 for one in entered)


def _refuse_other(path: str, name: str, theirs: Any, ours: int) -> None:
    if theirs != ours:
        raise ConfigError(
            f"{name} in {path} is {theirs!r}; the model's is {ours}", hint="heads are made for one model and no other"
        )


def _no_layers(name: str, hidden: int, vocab_size: int) -> ModelSpec:
    attention = AttentionLayer(n_heads=1, n_kv_heads=1, head_dim=16, scale=1.0)
    return ModelSpec(
        name=name,
        family="llama",
        architecture="LlamaForCausalLM",
        hidden=hidden,
        vocab_size=vocab_size,
        layers=(LayerSpec(attention=attention, mlp=MlpSpec(ffn=1)),),
        max_context_tokens=2**31 - 1,
    )
