"""What a config says of latent attention: ranks, and how wide the parts of heads are."""

from __future__ import annotations

from dataclasses import replace

from diptych.models.config import HfConfig
from diptych.models.families.family import Family
from diptych.models.latent import MlaSpec
from diptych.models.reading.heads import Heads

LATENT_EPS = 1e-6  # of the norms inside latent attention, in most families whatever the config says of the others


def latents(config: HfConfig, family: Family, heads: Heads, *, is_turned: bool) -> MlaSpec:
    """Of a layer. is_turned: it has rotary positions."""
    hidden = config.integer("hidden_size")
    mla = MlaSpec(
        q_rank=config.optional_integer("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=heads.width,
        v_dim=config.integer("v_head_dim", max(1, hidden // heads.n)),
        is_mixed=family.mixes_queries,
        norm_eps=config.number("rms_norm_eps") if family.norms_latents_alike else LATENT_EPS,
        n_groups=config.optional_integer("o_groups") or 0,
    )
    if family.scales_latents:
        q_scale = 1.0 if mla.q_rank is None else (hidden / mla.q_rank) ** 0.5
        mla = replace(mla, q_scale=q_scale, kv_scale=(hidden / mla.kv_rank) ** 0.5)
    if family.shares_latents and not is_turned:
        mla = replace(mla, nope_dim=mla.nope_dim + mla.rope_dim, rope_dim=0)
    return mla
