"""The metadata of a GGUF file by key: what is read, what may not be ignored, and what a value must be."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.gguf.architecture import GgufArchitecture
from diptych.models.gguf.file import GgufArray, GgufFile

logger = logging.getLogger("diptych.models")

NEEDED = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
# read by `read_config` itself, or without influence on what a token's logits are
ALSO_READ = frozenset((
    "vocab_size", "attention.value_length", "attention.sliding_window_pattern", "rope.dimension_count", "attention.causal",
    "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scale_linear", "tensor_data_layout", "attention.key_length_mla",
    "nextn_predict_layers", "pooling_type",
))  # fmt: skip
# change the mathematics, and no architecture here reads them -> the values that say: as usual
CHANGING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "attention.scale", "attention.output_scale",
                     "attention.value_scale", "expert_weights_scale", "expert_weights_norm"), (0.0, 1.0)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count", "expert_gating_func"), (0, 1)),
    **dict.fromkeys((
        "attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale", "attention.kv_lora_rank",
        "attention.q_lora_rank", "attention.key_length_swa", "attention.value_length_swa", "attention.shared_kv_layers",
        "attention.recurrent_layers", "attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping",
        "router_logit_softcapping", "expert_count", "expert_shared_count", "expert_shared_feed_forward_length",
        "leading_dense_block_count", "moe_every_n_layers", "interleave_moe_layer_step", "full_attention_interval",
        "use_parallel_residual", "ssm.state_size", "swin_norm", "num_loops", "attention.value_length_mla",
        "rope.dimension_sections", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor", "rope.scaling.alpha",
        "attention.temperature_length", "expert_group_scale", "experts_per_group", "swiglu_clamp_exp", "swiglu_clamp_shexp",
    ), (0,)),
}  # fmt: skip


class Keys:
    """The metadata of the file's own architecture."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._prefix = f"{file.metadata['general.architecture']}."

    @property
    def path(self) -> Path:
        """Of the file."""
        return self._file.path

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

    def by_layer(self, name: str) -> Any:
        """A number, or a list of them where layers have different ones."""
        values = self.values(name) or []
        if len(set(values)) < 2:
            return self.number(name)
        if any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in values):
            raise LoadError(f"{self.full(name)} in {self._file.path} must hold whole numbers of at least 1")
        return values

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

    def refuse_changing(self, read: Mapping[str, str], kind: GgufArchitecture) -> None:
        """LoadError for a key that changes the mathematics and is not read; a warning for one that nobody knows."""
        unknown = []
        for key, value in self._file.metadata.items():
            name = key.removeprefix(self._prefix)
            usual = kind.values.get(name)
            if name == key or (usual is None and (name in read or name in ALSO_READ)):
                continue
            usual = CHANGING.get(name) if usual is None else usual
            if usual is None:
                unknown.append(key)
            elif isinstance(value, GgufArray | str) or value not in usual:
                shown = f"{value.count} values" if isinstance(value, GgufArray) else repr(value)
                raise LoadError(
                    f"{key} in {self._file.path} is {shown}; it changes the mathematics, and {self._prefix[:-1]} here has no "
                    "such key", hint="the file is of a newer model than this version knows",
                )  # fmt: skip
        if self._file.metadata.get(self.full("attention.causal"), True) not in kind.values.get(
            "attention.causal", (True,)
        ):
            raise LoadError(
                f"{self.full('attention.causal')} in {self._file.path} is false; only causal models are run"
            )
        if unknown:
            logger.warning("metadata keys that are not known, not read: %s", ", ".join(sorted(unknown)))
