"""Tiny random encoders as they are published, BERT and its kin, with tokenizers of their kinds, as sentence-transformers saves.

path = make_encoder(tmp_path / "bge", "bert", pooling="cls")
want = oracle(path).encode(texts)          # `embedding_files.oracle`
pairs = make_cross_encoder(tmp_path / "ms-marco", "bert")
"""

from __future__ import annotations

import shutil
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.checkpoints import enliven
from tests.embedding_files import quiet

LETTERS = string.ascii_lowercase
WORDS = ("the", "fox", "bread", "once", "upon", "##ing", "##ed", "of", "flour")
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
POSITIONS = 200


@dataclass(frozen=True, slots=True)
class Kind:
    """An encoder's classes begin with `name`. positions: rows of its table, or what it takes."""

    name: str
    tokenizer: str
    fields: dict[str, Any]
    positions: int = POSITIONS


TURNS = {kind: {"rope_type": "default", "rope_theta": theta}
         for kind, theta in (("full_attention", 1e4), ("sliding_attention", 1e3))}  # fmt: skip
RELATED = {
    "relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
    "max_relative_positions": 40, "type_vocab_size": 0,
}  # fmt: skip
KINDS: dict[str, Kind] = {
    "bert": Kind("Bert", "wordpiece", {}),
    "roberta": Kind("Roberta", "unigram", {"type_vocab_size": 1}, POSITIONS + 2),
    "xlm-roberta": Kind("XLMRoberta", "unigram", {"type_vocab_size": 1}, POSITIONS + 2),
    "camembert": Kind("Camembert", "unigram", {"type_vocab_size": 1}, POSITIONS + 2),
    "data2vec-text": Kind("Data2VecText", "unigram", {"type_vocab_size": 1}, POSITIONS + 2),
    "jina_embeddings_v3": Kind("JinaEmbeddingsV3", "unigram", {"type_vocab_size": 1}),
    "megatron-bert": Kind("MegatronBert", "wordpiece", {}),
    "xlm-roberta-xl": Kind("XLMRobertaXL", "unigram", {"type_vocab_size": 1}, POSITIONS + 2),
    "roberta-prelayernorm": Kind("RobertaPreLayerNorm", "unigram", {"type_vocab_size": 1}, POSITIONS + 2),
    "roformer": Kind("RoFormer", "wordpiece", {}),
    "roformer-small": Kind("RoFormer", "wordpiece", {"embedding_size": 24}),
    "rembert": Kind("RemBert", "wordpiece", {"input_embedding_size": 24, "output_embedding_size": 32}),
    "electra": Kind("Electra", "wordpiece", {"embedding_size": 64}),
    "electra-small": Kind("Electra", "wordpiece", {"embedding_size": 24}),
    "albert": Kind("Albert", "albert", {"embedding_size": 24}),
    "ernie": Kind("Ernie", "wordpiece", {"use_task_id": True}),
    "distilbert": Kind("DistilBert", "wordpiece", {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}),
    "mpnet": Kind("MPNet", "mpnet", {}, POSITIONS + 2),
    "nomic_bert": Kind("NomicBert", "wordpiece", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}}),
    "gte": Kind("Gte", "wordpiece", {"type_vocab_size": 2}),
    # buckets of one distance each up to 4, of ever more up to 40, beyond which texts go on
    "deberta-v2": Kind("DebertaV2", "deberta", {**RELATED, "share_att_key": True, "norm_rel_ebd": "layer_norm"}),
    "deberta-v2-apart": Kind("DebertaV2", "deberta", RELATED),
    # the first: q, k and v by head, without buckets, and texts beyond its reach
    "deberta": Kind("Deberta", "bytes", {key: value for key, value in RELATED.items() if key != "position_buckets"}),
    "eurobert": Kind("EuroBert", "wordpiece", {"num_key_value_heads": 2}),
    "ultrabert": Kind("Ultrabert", "wordpiece", {"sliding_window": 6, "num_key_value_heads": 2, "rope_parameters": TURNS}),
    # two of three layers attend to some positions on either side
    "modernbert": Kind("ModernBert", "wordpiece", {"num_hidden_layers": 4, "local_attention": 12, "rope_parameters": TURNS}),
}  # fmt: skip


JUDGES = [kind for kind in KINDS if kind != "eurobert"]  # whose heads are read


def wordpiece() -> Any:
    """[CLS] text [SEP], and the second text of a pair is of type 1."""
    import transformers

    marks = [*string.digits, *".,?!;'", *LETTERS]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *marks, *(f"##{one}" for one in LETTERS), *WORDS]
    return transformers.BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)})


def mpnet() -> Any:
    """<s> text </s>, pairs as RoBERTa's, of pieces as BERT's."""
    import transformers

    marks = [*string.digits, *".,?!;'", *LETTERS]
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", *marks, *(f"##{one}" for one in LETTERS), *WORDS, "<mask>"]
    return transformers.MPNetTokenizer(vocab={piece: i for i, piece in enumerate(pieces)})


def unigram() -> Any:
    """<s> text </s>, and </s></s> between the texts of a pair, which have one type."""
    import transformers

    special = [(one, 0.0) for one in ("<s>", "<pad>", "</s>", "<unk>")]
    return transformers.XLMRobertaTokenizer(vocab=[*special, *pieces(), ("<mask>", 0.0)])


def pieces() -> list[tuple[str, float]]:
    """Of texts, each with its score."""
    letters = [(f"{before}{one}", -3.0) for before in ("▁", "") for one in LETTERS]
    marks = [(one, -4.0) for one in (*string.ascii_uppercase, *string.digits, *".,?!;'", "▁")]
    words = [(f"▁{word}", -1.5) for word in WORDS if word.isalpha()]
    return [*letters, *marks, *words]


def albert() -> Any:
    """[CLS] text [SEP], the second text of a pair of type 1; in small letters, without accents.

    The names of inputs are those of transformers 4, which such models were trained with: later ones leave types out.
    """
    import transformers

    special = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return transformers.AlbertTokenizer(vocab=[*((one, 0.0) for one in special), *pieces()], model_input_names=inputs)


def deberta() -> Any:
    """[CLS] text [SEP]; the second text of a pair is of type 1, which such models have no row for."""
    import transformers

    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    vocab = [*((one, 0.0) for one in special), *pieces(), ("[MASK]", 0.0)]
    return transformers.DebertaV2Tokenizer(vocab=vocab)


def of_bytes() -> Any:
    """[CLS] text [SEP], of bytes and what they merge to."""
    import tokenizers
    import transformers

    special = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
    bytes_ = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "f"), ("Ġf", "o"), ("Ġfo", "x"), ("t", "h"), ("th", "e"), ("Ġ", "the")]
    vocab = [*special, *bytes_, *("".join(pair) for pair in merges), "[MASK]"]
    return transformers.DebertaTokenizer(vocab={piece: i for i, piece in enumerate(vocab)}, merges=merges)


TOKENIZERS = {
    "wordpiece": wordpiece, "mpnet": mpnet, "unigram": unigram, "albert": albert, "deberta": deberta, "bytes": of_bytes,
}  # fmt: skip


def make_reference_encoder(kind: str, ending: str = "Model", **fields: Any) -> Any:
    """The transformers model, fp32, with lively random weights, and its tokenizer."""
    import transformers

    quiet()
    entry = KINDS[kind]
    tok = TOKENIZERS[entry.tokenizer]()
    sizes = {} if kind == "distilbert" else SIZES
    asked = {**sizes, "vocab_size": len(tok), "max_position_embeddings": entry.positions, **entry.fields, **fields}
    config = getattr(transformers, f"{entry.name}Config")(pad_token_id=tok.pad_token_id, **asked)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{entry.name}{ending}")(config).eval().float()
    enliven(model, 0)
    if entry.name == "RoFormer":  # what turns lies beside the weights, and is no weight
        table = model.base_model.encoder.embed_positions
        table.weight.data.copy_(table.create_weight())
    return model, tok


def make_encoder(
    path: Path,
    kind: str,
    *,
    pooling: str = "mean",
    ending: str = "Model",
    dtype: torch.dtype = torch.float32,
    is_normalised: bool = True,
    **fields: Any,
) -> Path:
    """An embedding model in sentence-transformers' layout. ending: of the class that its files name."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    base = make_plain(path.parent / f"{path.name}-base", kind, ending=ending, dtype=dtype, **fields)
    modules = [Transformer(str(base)), Pooling(64, pooling), *([Normalize()] if is_normalised else [])]
    SentenceTransformer(modules=modules).save_pretrained(str(path), create_model_card=False)
    if ending != "Model":  # sentence-transformers saves what it has loaded: the encoder alone
        for name in ("config.json", "model.safetensors"):
            shutil.copy(base / name, path / name)
    shutil.rmtree(base)
    return path


def make_plain(
    path: Path, kind: str, *, ending: str = "Model", dtype: torch.dtype = torch.float32, **fields: Any
) -> Path:
    """As transformers saves it, and nothing that says how it is pooled."""
    model, tok = make_reference_encoder(kind, ending, **fields)
    model.to(dtype).save_pretrained(path)
    tok.save_pretrained(path)
    return path


def make_cross_encoder(path: Path, kind: str, *, n_labels: int = 1, **fields: Any) -> Path:
    """A model that judges pairs by a head over its first token, or the mean."""
    return make_plain(path, kind, ending="ForSequenceClassification", num_labels=n_labels, **fields)
