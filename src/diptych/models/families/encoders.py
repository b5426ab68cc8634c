"""Encoders: every token attends to all others, and what comes out are states (embeddings, scores), no tokens."""

from __future__ import annotations

from typing import Any

from diptych.models.families.early import JUDGED_BY_MODERN_BERT, LIKE_MODERN_BERT, MODERN_BERT, NAMES_OF_MODERN_BERT
from diptych.models.families.family import Family, HeadLayer, TensorNames
from diptych.models.families.gpt import ALL_BIASES, GPT, NOT_GATED
from diptych.models.families.shared import BY_ATTENTION_BIAS, USUAL
from diptych.models.gates import Activation
from diptych.models.spec import Norms

BERT: dict[str, Any] = {
    **GPT, "vocab_size": 30_522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
    "rms_norm_eps": 1e-12}  # fmt: skip
LAYER_NORM_EPS = {"layer_norm_eps": "rms_norm_eps"}
# each part is normed behind it, with what it is added to, and so is the embedding; nothing is normed behind the last layer
AROUND_SUMS: dict[str, Any] = {"is_encoder": True, "norms": Norms.SUMS, "has_embedding_norm": True, **NOT_GATED}
NAMES_OF_BERT: dict[str, Any] = {
    "embedding": "embeddings.word_embeddings", "embedding_norm": "embeddings.LayerNorm",
    "positions": "embeddings.position_embeddings", "types": "embeddings.token_type_embeddings", "final_norm": None,
    "layers": "encoder.layer", "attention": "attention", "qkv": ("self.query", "self.key", "self.value"),
    "o": "output.dense", "mlp": ("",), "gate_up": ("intermediate.dense",), "down": "output.dense",
    "norms": {Norms.SUMS: (None, "attention.output.LayerNorm", None, "output.LayerNorm")}}  # fmt: skip
UNREAD_OF_BERT = ("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
                  "pooler_size_per_head", "pooler_type", "output_past")  # fmt: skip
# heads around encoders, which nobody needs for states: of masked words, of pairs of texts, of what was replaced
HEADS = ("cls.", "lm_head.", "discriminator_predictions.", "generator_predictions.", "generator_lm_head.", "vocab_")
LIKE_BERT: dict[str, Any] = {
    "fixed": {"position_embedding_type": ("absolute", None), "is_decoder": (False,), "add_cross_attention": (False,)},
    "renamed": LAYER_NORM_EPS, "positions_offset": 0,
    "ignored": (*HEADS, "pooler.", "classifier.", "position_ids"), **AROUND_SUMS, **ALL_BIASES}  # fmt: skip
LIKE_ROBERTA: dict[str, Any] = {
    **LIKE_BERT, "fixed": {**LIKE_BERT["fixed"], "pad_token_id": (1,)}, "unread": ("output_past",), "prefixes": ("roberta.",),
    "positions_offset": 2, "counts_offset": True, "names": TensorNames(**NAMES_OF_BERT),
    "classifier": (HeadLayer("classifier.dense", Activation.TANH), HeadLayer("classifier.out_proj"))}  # fmt: skip
OF_DEBERTA: dict[str, Any] = {
    "relative_attention": (True,), "position_biased_input": (False,), "pooler_hidden_act": ("gelu",)}  # fmt: skip
LIKE_DEBERTA: dict[str, Any] = {
    "classifier": (HeadLayer("pooler.dense", Activation.GELU), HeadLayer("classifier")), "prefixes": ("deberta.",),
    # files may have a table of positions, which nothing is added by
    "ignored": (*HEADS, "pooler.", "classifier.", "position_ids", "position_embeddings", "lm_predictions.",
                "mask_predictions."),
    "types_may_lack": True, **AROUND_SUMS, **ALL_BIASES}  # fmt: skip
# norms before each part and behind the last layer instead, where {norms} lie, as decoders have them
BEFORE_PARTS: dict[str, Any] = {"norms": Norms.BEFORE, "has_embedding_norm": False}


def _before(end: str, attention: str, mlp: str) -> dict[str, Any]:
    """Names of BERT with norms before each part, and one behind the last layer."""
    return {**NAMES_OF_BERT, "final_norm": end, "norms": {Norms.BEFORE: (attention, None, mlp, None)}}


def _kinds(name: str, *more: str) -> tuple[str, ...]:
    """The classes of transformers around an encoder whose states are read."""
    return tuple(f"{name}{ending}" for ending in ("Model", "ForMaskedLM", "ForSequenceClassification", *more))


ENCODERS: tuple[Family, ...] = (
    # bge, e5, gte, all-MiniLM, LaBSE
    Family(
        name="bert", architectures=_kinds("Bert", "ForPreTraining", "LMHeadModel"),
        keys=BERT,
        unread=UNREAD_OF_BERT,
        classifier=(HeadLayer("pooler.dense", Activation.TANH), HeadLayer("classifier")),
        names=TensorNames(**NAMES_OF_BERT),
        prefixes=("bert.",),
        **LIKE_BERT,
    ),
    # the first two rows of the table stand for no position, and count; one type of texts, as published
    Family(name="roberta", architectures=_kinds("Roberta", "ForCausalLM"), keys={**BERT, "vocab_size": 50_265}, **LIKE_ROBERTA),
    # bge-m3, multilingual-e5, bge-reranker
    Family(name="xlm-roberta", architectures=_kinds("XLMRoberta", "ForCausalLM"), keys=BERT, **LIKE_ROBERTA),
    Family(name="camembert", architectures=_kinds("Camembert", "ForCausalLM"), keys=BERT, **LIKE_ROBERTA),
    Family(
        name="data2vec-text", architectures=_kinds("Data2VecText", "ForCausalLM"), keys=BERT,
        **{**LIKE_ROBERTA, "prefixes": ("data2vec_text.",)},
    ),
    # where its files say so a row is added to each token for the task, of which there is one here
    Family(
        name="ernie", architectures=_kinds("Ernie", "ForPreTraining", "ForCausalLM"),
        keys={**BERT, "use_task_id": False, "task_type_vocab_size": 3},
        classifier=(HeadLayer("pooler.dense", Activation.TANH), HeadLayer("classifier")),
        names=TensorNames(**NAMES_OF_BERT),
        prefixes=("ernie.",),
        **LIKE_BERT,
    ),
    # norms before each part, and none of the embedding: of Megatron's BERT, of the larger XLM-RoBERTa
    Family(
        name="megatron-bert", architectures=_kinds("MegatronBert", "ForPreTraining", "ForCausalLM"),
        keys={**BERT, "vocab_size": 29_056, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
              "intermediate_size": 4096},
        unread=("tokenizer_type",),
        classifier=(HeadLayer("pooler.dense", Activation.TANH), HeadLayer("classifier")),
        names=TensorNames(**_before("encoder.ln", "attention.ln", "ln")),
        prefixes=("bert.",),
        **{**LIKE_BERT, **BEFORE_PARTS},
    ),
    Family(
        name="xlm-roberta-xl", architectures=_kinds("XLMRobertaXL", "ForCausalLM"),
        keys={**BERT, "vocab_size": 250_880, "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
              "intermediate_size": 10_240, "max_position_embeddings": 514, "type_vocab_size": 1, "rms_norm_eps": 1e-5},
        **{**LIKE_ROBERTA, **BEFORE_PARTS,
           "names": TensorNames(**_before("encoder.LayerNorm", "attention.self_attn_layer_norm", "LayerNorm"))},
    ),
    Family(
        name="roberta-prelayernorm", architectures=_kinds("RobertaPreLayerNorm", "ForCausalLM"),
        keys={**BERT, "vocab_size": 50_265},
        **{**LIKE_ROBERTA, "norms": Norms.BEFORE, "prefixes": ("roberta_prelayernorm.",),
           "names": TensorNames(**_before("LayerNorm", "attention.LayerNorm", "intermediate.LayerNorm"))},
    ),
    # rotary positions of neighbours in place of the table's
    Family(
        name="roformer", architectures=_kinds("RoFormer", "ForCausalLM"),
        keys={**BERT, "vocab_size": 50_000, "max_position_embeddings": 1536, "word_embed_proj_dim": None, "head_dim": None,
              "rope_theta": 10_000.0},
        fixed={**LIKE_BERT["fixed"], "rotary_value": (False,), "hidden_act": ("gelu",), "use_bias": (True,),
               "norm_type": ("layer_norm",)},
        unread=(*UNREAD_OF_BERT, "pooler_activation"),
        renamed={**LAYER_NORM_EPS, "embedding_size": "word_embed_proj_dim"},
        is_interleaved=True,
        classifier=(HeadLayer("classifier.dense", Activation.GELU), HeadLayer("classifier.out_proj")),
        names=TensorNames(words="embeddings_project", **NAMES_OF_BERT),
        prefixes=("roformer.",),
        ignored=(*LIKE_BERT["ignored"], "encoder.embed_positions."),
        **AROUND_SUMS,
        **ALL_BIASES,
    ),
    # rotary positions in place of the table's; its files have the names of the code that it was published with
    Family(
        name="jina_embeddings_v3", architectures=_kinds("JinaEmbeddingsV3"),
        keys={**BERT, "vocab_size": 250_002, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
              "intermediate_size": 4096, "max_position_embeddings": 8194, "type_vocab_size": 1, "rms_norm_eps": 1e-5,
              "rope_theta": 20_000.0, "head_dim": None},
        renamed=LAYER_NORM_EPS,
        classifier=(HeadLayer("classifier.dense", Activation.TANH), HeadLayer("classifier.out_proj")),
        names=TensorNames(**{
            **NAMES_OF_BERT, "embedding_norm": "emb_ln", "layers": "encoder.layers", "attention": "mixer", "qkv": ("Wqkv",),
            "o": "out_proj", "mlp": ("mlp.",), "gate_up": ("fc1",), "down": "fc2",
            "norms": {Norms.SUMS: (None, "norm1", None, "norm2")}}),
        prefixes=("roberta.",),
        ignored=(*HEADS, "pooler.", "classifier.", "position_ids", "rotary_emb.inv_freq"),
        **AROUND_SUMS,
        **ALL_BIASES,
    ),
    # of the small ones words have another width, and are projected
    Family(
        name="electra", architectures=_kinds("Electra", "ForPreTraining", "ForCausalLM"),
        keys={**BERT, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024,
              "word_embed_proj_dim": 128},
        classifier=(HeadLayer("classifier.dense", Activation.GELU), HeadLayer("classifier.out_proj")),
        names=TensorNames(words="embeddings_project", **NAMES_OF_BERT),
        prefixes=("electra.",),
        **{**LIKE_BERT, "renamed": {**LAYER_NORM_EPS, "embedding_size": "word_embed_proj_dim"}},
    ),
    # one layer again and again, over words that are narrower than it and projected
    Family(
        name="albert", architectures=_kinds("Albert", "ForPreTraining"),
        keys={**BERT, "vocab_size": 30_000, "hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 16_384,
              "hidden_act": "gelu_new", "word_embed_proj_dim": 128},
        unread=("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"),
        classifier=(HeadLayer("pooler", Activation.TANH), HeadLayer("classifier")),
        names=TensorNames(words="encoder.embedding_hidden_mapping_in", **{
            **NAMES_OF_BERT, "layers": "encoder.albert_layer_groups", "attention": "albert_layers.0.attention",
            "qkv": ("query", "key", "value"), "o": "dense", "mlp": ("albert_layers.0.",), "gate_up": ("ffn",),
            "down": "ffn_output",
            "norms": {Norms.SUMS: (None, "albert_layers.0.attention.LayerNorm", None,
                                   "albert_layers.0.full_layer_layer_norm")}}),
        prefixes=("albert.",),
        projects_words=True,
        shares_layers=True,
        **{**LIKE_BERT, "renamed": {**LAYER_NORM_EPS, "embedding_size": "word_embed_proj_dim"},
           "fixed": {**LIKE_BERT["fixed"], "num_hidden_groups": (1,), "inner_group_num": (1,)},
           "ignored": (*LIKE_BERT["ignored"], "predictions.", "sop_classifier.")},
    ),
    # the same of layers that are not one, and of heads as BERT's
    Family(
        name="rembert", architectures=_kinds("RemBert", "ForCausalLM"),
        keys={**BERT, "vocab_size": 250_300, "hidden_size": 1152, "num_hidden_layers": 32, "num_attention_heads": 18,
              "intermediate_size": 4608, "word_embed_proj_dim": 256},
        unread=("output_embedding_size", "embedding_size"),  # which its class does not read, and published files have
        classifier=(HeadLayer("pooler.dense", Activation.TANH), HeadLayer("classifier")),
        names=TensorNames(words="encoder.embedding_hidden_mapping_in", **NAMES_OF_BERT),
        prefixes=("rembert.",),
        projects_words=True,
        **{**LIKE_BERT, "renamed": {**LAYER_NORM_EPS, "input_embedding_size": "word_embed_proj_dim"}},
    ),
    # one kind of text alone
    Family(
        name="distilbert", architectures=_kinds("DistilBert"),
        keys={**{key: value for key, value in BERT.items() if key != "type_vocab_size"}, "num_hidden_layers": 6},
        fixed={"rms_norm_eps": (1e-12,)},  # of its class, which has no key for it
        unread=("sinusoidal_pos_embds", "tie_weights_", "output_past"),
        renamed={"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
                 "hidden_dim": "intermediate_size", "activation": "hidden_act"},
        positions_offset=0,
        classifier=(HeadLayer("pre_classifier", Activation.RELU), HeadLayer("classifier")),
        names=TensorNames(**{
            **NAMES_OF_BERT, "layers": "transformer.layer", "qkv": ("q_lin", "k_lin", "v_lin"), "o": "out_lin",
            "mlp": ("ffn.",), "gate_up": ("lin1",), "down": "lin2",
            "norms": {Norms.SUMS: (None, "sa_layer_norm", None, "output_layer_norm")}}),
        prefixes=("distilbert.",),
        ignored=(*HEADS, "classifier.", "position_ids"),
        **AROUND_SUMS,
        **ALL_BIASES,
    ),
    # what scores gain by distance beside learned positions, all layers the same; one kind of text alone
    Family(
        name="mpnet", architectures=_kinds("MPNet"),
        keys={**{key: value for key, value in BERT.items() if key != "type_vocab_size"}, "vocab_size": 30_527,
              "relative_attention_num_buckets": 32},
        # its class makes as many buckets, up to that distance, whatever the config says
        fixed={"pad_token_id": (1,), "relative_attention_num_buckets": (32,), "relative_attention_max_distance": (128,)},
        renamed=LAYER_NORM_EPS,
        positions_offset=2,
        counts_offset=True,
        classifier=(HeadLayer("classifier.dense", Activation.TANH), HeadLayer("classifier.out_proj")),
        names=TensorNames(**{
            **NAMES_OF_BERT, "qkv": ("attn.q", "attn.k", "attn.v"), "o": "attn.o",
            "norms": {Norms.SUMS: (None, "attention.LayerNorm", None, "output.LayerNorm")}}),
        prefixes=("mpnet.",),
        ignored=(*HEADS, "pooler.", "classifier.", "position_ids"),
        **AROUND_SUMS,
        **ALL_BIASES,
    ),
    # scores of contents and distances (DeBERTa 3, mDeBERTa, mxbai-rerank 1); no other positions, and no types
    Family(
        name="deberta-v2", architectures=_kinds("DebertaV2"),
        keys={**BERT, "vocab_size": 128_100, "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24,
              "intermediate_size": 6144, "type_vocab_size": 0, "rms_norm_eps": 1e-7, "head_dim": None,
              "word_embed_proj_dim": None, "pos_att_type": None, "query_pre_attn_scalar": None, "share_att_key": False,
              "position_buckets": -1, "max_relative_positions": -1, "norm_rel_ebd": "none"},
        fixed={**OF_DEBERTA, "conv_kernel_size": (0, None)},
        unread=("legacy", "z_steps", "conv_act", "conv_groups", "pooler_dropout", "pooler_hidden_size"),
        renamed={**LAYER_NORM_EPS, "embedding_size": "word_embed_proj_dim", "attention_head_size": "head_dim"},
        names=TensorNames(**{
            **NAMES_OF_BERT, "qkv": ("self.query_proj", "self.key_proj", "self.value_proj"),
            "distances": "encoder.rel_embeddings"}),
        **LIKE_DEBERTA,
    ),
    # the first: rows of distances as they are, a row for each of them; q, k and v lie by head, and keys have no biases
    Family(
        name="deberta", architectures=_kinds("Deberta"),
        keys={**BERT, "vocab_size": 50_265, "type_vocab_size": 0, "rms_norm_eps": 1e-7, "word_embed_proj_dim": None,
              "pos_att_type": None, "query_pre_attn_scalar": None, "max_relative_positions": -1},
        fixed={**OF_DEBERTA, "talking_head": (False, None)},
        unread=("legacy", "z_steps", "padding_idx", "pooler_dropout", "pooler_hidden_size"),
        renamed={**LAYER_NORM_EPS, "embedding_size": "word_embed_proj_dim"},
        names=TensorNames(qkv_by_head=True, **{
            **NAMES_OF_BERT, "qkv": ("self.in_proj",), "qkv_biases": ("self.q_bias", None, "self.v_bias"),
            "distances": "encoder.rel_embeddings", "of_distances": ("self.pos_q_proj", "self.pos_proj")}),
        **LIKE_DEBERTA,
    ),
    # rotary positions and gates, no biases but of norms
    Family(
        name="nomic_bert", architectures=_kinds("NomicBert"),
        keys={**BERT, "vocab_size": 30_528, "hidden_act": "silu", "max_position_embeddings": 2048, "rope_theta": 1000.0,
              "head_dim": None},
        fixed={"activation_function": ("swiglu",), "rotary_emb_fraction": (1.0,), "rotary_scaling_factor": (None,),
               "rotary_emb_scale_base": (None,), "num_experts": (None, 0), "scale_attn_weights": (True,),
               **dict.fromkeys(("prenorm", "causal", "parallel_block", "rotary_emb_interleaved", "qkv_proj_bias",
                                "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm", "scale_attn_by_inverse_layer_idx"),
                               (False, None))},
        unread=("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "max_trained_positions",
                "pad_vocab_size_multiple", "parallel_block_tied_norm", "use_xentropy"),
        renamed={**LAYER_NORM_EPS, "layer_norm_epsilon": "rms_norm_eps", "n_embd": "hidden_size",
                 "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
                 "n_positions": "max_position_embeddings", "rotary_emb_base": "rope_theta"},
        classifier=(HeadLayer("pooler.dense", Activation.TANH), HeadLayer("classifier")),
        names=TensorNames(**{
            **NAMES_OF_BERT, "embedding_norm": "emb_ln", "layers": "encoder.layers", "attention": "attn",
            "qkv": ("Wqkv",), "o": "out_proj", "mlp": ("mlp.",), "gate_up": ("fc12", "fc11"), "down": "fc2",
            "norms": {Norms.SUMS: (None, "norm1", None, "norm2")}}),
        prefixes=("nomic_bert.",),
        ignored=(*HEADS, "pooler.", "classifier.", "position_ids", "rotary_emb.inv_freq"),
        **{**AROUND_SUMS, "is_gated": True},
    ),
    # rotary positions and gates of exact GELU; the names of both are those of the published code (NewModel)
    Family(
        name="gte", architectures=(*_kinds("Gte"), *_kinds("New")), more_model_types=("new",),
        keys={**BERT, "vocab_size": 250_048, "max_position_embeddings": 8192, "type_vocab_size": 1, "rope_theta": 160_000.0,
              "head_dim": None, "pack_qkv": True},
        fixed={"pack_qkv": (True,), "position_embedding_type": ("rope",), "layer_norm_type": ("layer_norm",),
               "logn_attention_scale": (False,)},
        unread=("logn_attention_clip1", "unpad_inputs", "use_memory_efficient_attention"),
        renamed=LAYER_NORM_EPS,
        classifier=(HeadLayer("pooler.dense", Activation.TANH), HeadLayer("classifier")),
        names=TensorNames(up_first=True, **{
            **NAMES_OF_BERT, "qkv": ("qkv_proj",), "o": "o_proj", "mlp": ("mlp.",), "gate_up": ("up_gate_proj",),
            "down": "down_proj", "norms": {Norms.SUMS: (None, "attn_ln", None, "mlp_ln")}}),
        prefixes=("new.", "gte."),
        ignored=(*HEADS, "pooler.", "classifier.", "position_ids", "rotary_emb.inv_freq"),
        types_may_lack=True, qkv_bias=True, o_bias=True, down_bias=True,
        **{**AROUND_SUMS, "is_gated": True},
    ),
    # a Llama both ways; its heads judge by states that other layers bend before the mean, and are not read
    Family(
        name="eurobert", architectures=("EuroBertModel", "EuroBertForMaskedLM"),
        keys={**USUAL, "vocab_size": 128_256, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
              "num_attention_heads": 12, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "attention_bias": False,
              "mlp_bias": False},
        unread=("classifier_pooling", "clf_pooling"),
        mlp_bias="mlp_bias",
        ignored=(*HEADS, "rotary_emb.inv_freq"),
        is_encoder=True,
        **BY_ATTENTION_BIAS,
    ),
    # the same with windows to either side on two layers of three, which turn by another base
    Family(
        name="ultrabert", architectures=_kinds("Ultrabert"),
        keys={**USUAL, "max_position_embeddings": 32_768, "attention_bias": False, "mlp_bias": False, "sliding_window": 128,
              "layer_types": None, "attention_windows": None, "rope_theta": 2_560_000.0, "rope_local_base_freq": 10_000.0},
        unread=("classifier_pooling", "prediction_head_size"),
        mlp_bias="mlp_bias",
        full_every=3, local_theta="rope_local_base_freq",
        classifier=(HeadLayer("classifier"),),
        prefixes=("ultrabert.", "model."),
        ignored=(*HEADS, "head.", "classifier.", "rotary_emb.inv_freq"),
        is_encoder=True,
        **BY_ATTENTION_BIAS,
    ),
    # T5's encoder alone, as embedding models are made of it: no positions but those that scores gain by, which are not scaled
    *(Family(
        name=name, architectures=(architecture,),
        keys={"vocab_size": vocab, "hidden_size": 512, "num_hidden_layers": layers, "num_attention_heads": heads,
              "head_dim": 64, "intermediate_size": ffn, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
              "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "feed_forward_proj": act,
              "is_gated": None},
        fixed={"is_decoder": (False,), "is_encoder_decoder": (True, False)},
        unread=("num_decoder_layers", "dense_act_fn", "is_gated_act", "initializer_factor", "scale_decoder_outputs",
                "dropout_rate", "output_past", "tie_word_embeddings"),
        renamed={"d_model": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
                 "d_kv": "head_dim", "d_ff": "intermediate_size", "layer_norm_epsilon": "rms_norm_eps",
                 "n_positions": "max_position_embeddings"},
        attention_scale=1.0,
        is_gated="is_gated",
        names=TensorNames(
            embedding="shared", final_norm="encoder.final_layer_norm", layers="encoder.block",
            distances="encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            attention="layer.0.SelfAttention", qkv=("q", "k", "v"), o="o", mlp=("layer.1.DenseReluDense.",),
            gate_up=("wi_0", "wi_1"), down="wo", norms={Norms.BEFORE: ("layer.0.layer_norm", None, "layer.1.layer_norm", None)},
            others={"shared": "encoder.embed_tokens", "wi_0": "wi"}),
        prefixes=("",),
        ignored=("encoder.embed_tokens.",),
        is_encoder=True,
    ) for name, architecture, vocab, layers, heads, ffn, act in (
        ("t5", "T5EncoderModel", 32_128, 6, 8, 2048, "relu"), ("mt5", "MT5EncoderModel", 250_112, 8, 6, 1024, "gated-gelu"))),
    # as Ettin's decoders
    Family(
        name="modernbert", architectures=_kinds("ModernBert"),
        keys=MODERN_BERT,
        classifier=JUDGED_BY_MODERN_BERT,
        names=TensorNames(qkv=("Wqkv",), **NAMES_OF_MODERN_BERT),
        ignored=("decoder.", "head.", "classifier.", "rotary_emb.inv_freq"),
        is_encoder=True,
        **{**LIKE_MODERN_BERT, "fixed": {**LIKE_MODERN_BERT["fixed"], "norm_bias": (False,)}},
    ),
)  # fmt: skip
