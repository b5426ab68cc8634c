"""BERT and its kin: states of encoders, held against sentence-transformers and transformers over the same files."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.embedding_files import judge, oracle
from tests.encoder_files import (
    JUDGES,
    KINDS,
    POSITIONS,
    make_cross_encoder,
    make_encoder,
    make_plain,
    make_reference_encoder,
)
from tests.engine.conftest import BACKENDS, tiny_config
from tests.thread_ranks import ThreadRanks

from diptych.compute.loading.related import PlacesTensor
from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.compute.ops.ranks import Ranks
from diptych.cost.exchange import gathered
from diptych.engine.llm import LLM
from diptych.engine.phases import TwoPhase
from diptych.ground.config import ComputeConfig, SchedulerConfig
from diptych.ground.errors import ExecutorError, LoadError, PromptTooLong, RequestError, UnsupportedModel
from diptych.models.config import HfConfig, read_json
from diptych.models.positions import Related
from diptych.models.read import read_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of sentence-transformers and what it brings

TEXTS = [
    "once upon a time there was a fox.",
    "the fox ran into the woods, and nobody saw it; then it came back and slept in the barn until noon.",
    "bread is made of flour.",
    "fox",
]
QUERIES = ["where did the fox go?", "what is bread?", "a fox", "the flour of the bread"]
FP32 = {"backend": "torch", "weights": "fp32", "kv": "fp32"}
LOGITS = {"activation_fn": "torch.nn.modules.linear.Identity"}
# kind -> pooling, and the class that its files name
AS_PUBLISHED = {
    "bert": ("mean", "Model"), "roberta": ("mean", "ForMaskedLM"), "xlm-roberta": ("cls", "Model"),
    "camembert": ("mean", "ForMaskedLM"), "electra": ("cls", "ForPreTraining"), "distilbert": ("mean", "ForMaskedLM"),
    "electra-small": ("mean", "Model"), "albert": ("mean", "ForMaskedLM"), "deberta-v2": ("cls", "ForMaskedLM"),
    "deberta-v2-apart": ("mean", "Model"), "deberta": ("cls", "ForMaskedLM"), "ernie": ("mean", "ForMaskedLM"),
    "data2vec-text": ("mean", "ForMaskedLM"), "jina_embeddings_v3": ("mean", "ForMaskedLM"),
    "mpnet": ("mean", "ForMaskedLM"), "nomic_bert": ("mean", "Model"), "gte": ("cls", "ForMaskedLM"),
    "eurobert": ("mean", "ForMaskedLM"), "ultrabert": ("mean", "ForMaskedLM"), "megatron-bert": ("cls", "ForPreTraining"),
    "xlm-roberta-xl": ("mean", "ForMaskedLM"), "roberta-prelayernorm": ("mean", "ForMaskedLM"),
    "roformer": ("mean", "ForMaskedLM"), "roformer-small": ("cls", "Model"), "rembert": ("mean", "ForMaskedLM"),
    "modernbert": ("cls", "ForMaskedLM"),
}  # fmt: skip


def fp32(path: Path, **settings: object) -> LLM:
    return LLM(path, **{**FP32, **settings})  # type: ignore[arg-type]


def vectors(llm: LLM, *arguments: object, **options: object) -> np.ndarray:
    return np.stack([one.vector for one in llm.embed(*arguments, **options)])  # type: ignore[arg-type]


def needs(backend: str) -> None:
    if backend == "cpu" and not cpu_kernels.is_available()[0]:
        pytest.skip(cpu_kernels.is_available()[1])


def change(path: Path, name: str = "config.json", **fields: object) -> None:
    config = json.loads((path / name).read_text()) if (path / name).is_file() else {}
    (path / name).write_text(json.dumps(config | fields))


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("encoders")
    return {
        kind: make_encoder(root / kind, kind, pooling=pooling, ending=ending)
        for kind, (pooling, ending) in AS_PUBLISHED.items()
    }


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("judges")
    return {kind: make_cross_encoder(root / kind, kind) for kind in JUDGES}


@cache
def published(path: Path) -> np.ndarray:
    """What sentence-transformers says of TEXTS: of several lengths together, so that it pads and masks."""
    return oracle(path).encode(TEXTS)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_sentence_transformers(encoders: dict[str, Path], kind: str) -> None:
    want = published(encoders[kind])
    llm = fp32(encoders[kind])
    got = vectors(llm, TEXTS)
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert np.abs(got[0] - got[1]).max() > 0.01
    with pytest.raises(RequestError, match="writes none"):
        llm.generate("fox")


@pytest.mark.native
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_agree_with_sentence_transformers(encoders: dict[str, Path], kind: str) -> None:
    needs("cpu")
    want = published(encoders[kind])
    for weights, kv, least in (("bf16", "bf16", 0.999), ("int8", "int8", 0.99)):
        got = vectors(LLM(encoders[kind], backend="cpu", threads=1, weights=weights, kv=kv), TEXTS)
        assert ((want * got).sum(axis=1) > least).all(), (weights, (want * got).sum(axis=1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kind", ["bert", "xlm-roberta", "mpnet", "modernbert", "albert", "electra-small", "deberta-v2"]
)
def test_neighbours_budgets_and_threads_change_no_bit(encoders: dict[str, Path], kind: str, backend: str) -> None:
    """Threads of torch are torch's own matter: one kind shows that they may be two."""
    needs(backend)
    texts = [" ".join(TEXTS), *TEXTS, TEXTS[0]]
    first: np.ndarray | None = None
    for step_tokens, threads in ((POSITIONS, 1), (128, 2 if backend == "cpu" or kind == "bert" else 1)):
        scheduler = SchedulerConfig(max_step_tokens=step_tokens, max_running_sequences=4, max_context_tokens=POSITIONS)
        compute = ComputeConfig(backend=backend, weights="fp32" if backend == "torch" else "bf16", threads=threads)
        llm = LLM(
            encoders[kind], tiny_config(backend, scheduler=scheduler, compute=compute, max_context_tokens=POSITIONS)
        )
        together = vectors(llm, texts)
        alone = np.concatenate([vectors(llm, text) for text in texts])
        first = together if first is None else first
        for got in (together, alone):
            np.testing.assert_allclose(got, first, atol=0 if backend == "cpu" else 1e-5)


@pytest.mark.parametrize("kind", JUDGES)
def test_scores_are_those_of_the_cross_encoder(judges: dict[str, Path], kind: str) -> None:
    """BERT's texts of a pair are of two types, RoBERTa's of one; heads lie behind the first token."""
    want = judge(judges[kind]).predict(list(zip(QUERIES, TEXTS, strict=True)))
    llm = fp32(judges[kind])
    np.testing.assert_allclose(llm.score(QUERIES, TEXTS).scores, want, atol=2e-5)
    assert np.ptp(want) > 0.01
    with pytest.raises(RequestError, match="scores pairs, and gives no vectors"):
        llm.embed("fox")


@pytest.mark.parametrize("backend", BACKENDS)
def test_types_of_tokens_are_of_each_pair_alone(tmp_path: Path, backend: str) -> None:
    """Pairs of one step begin their second texts at places of their own, whatever stands beside them."""
    needs(backend)
    path = make_cross_encoder(tmp_path / "made", "bert")
    change(path, sentence_transformers=LOGITS)
    want = judge(path).predict(list(zip(QUERIES, TEXTS, strict=True)))
    weights, tolerance = ("fp32", 5e-5) if backend == "torch" else ("bf16", 0.05)
    scores = []
    for threads in (1, 2) if backend == "cpu" else (1,):
        compute = ComputeConfig(backend=backend, weights=weights, threads=threads)
        scheduler = SchedulerConfig(max_step_tokens=POSITIONS, max_running_sequences=4, max_context_tokens=POSITIONS)
        config = tiny_config(backend, scheduler=scheduler, compute=compute, max_context_tokens=POSITIONS)
        llm = LLM(path, config)
        alone = [llm.score(*pair).scores[0] for pair in zip(QUERIES, TEXTS, strict=True)]
        scores += [llm.score(QUERIES, TEXTS).scores, alone]
    np.testing.assert_allclose(scores[0], want, atol=tolerance)
    for got in scores[1:]:
        np.testing.assert_allclose(got, scores[0], atol=0 if backend == "cpu" else 1e-5)
    of_one_type = [of_first_type(path, llm, *pair) for pair in zip(QUERIES, TEXTS, strict=True)]
    assert np.abs(np.array(of_one_type) - want).min() > 4 * tolerance, "types change nothing here"


def of_first_type(path: Path, llm: LLM, query: str, document: str) -> float:
    """What the oracle says of a pair whose tokens are all of the first type."""
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    ids = llm.loaded.tokenizer.encode_pair(query, document).token_ids
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


def test_types_that_are_not_one_behind_the_other_are_refused(tmp_path: Path) -> None:
    path = make_cross_encoder(tmp_path / "made", "bert")
    words = json.loads((path / "tokenizer.json").read_text())
    words["post_processor"]["pair"][-1]["SpecialToken"]["type_id"] = 0
    (path / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(UnsupportedModel, match=r"types \[0, 1\], and not"):
        fp32(path).score(QUERIES[0], TEXTS[0])


def test_a_mean_under_a_head_is_the_mean(tmp_path: Path) -> None:
    """ModernBERT says what its head reads; another word is refused."""
    path = make_cross_encoder(tmp_path / "made", "modernbert", classifier_pooling="mean")
    want = judge(path).predict(list(zip(QUERIES, TEXTS, strict=True)))
    np.testing.assert_allclose(fp32(path).score(QUERIES, TEXTS).scores, want, atol=2e-5)
    change(path, classifier_pooling="max")
    with pytest.raises(UnsupportedModel, match="classifier_pooling"):
        fp32(path)


@pytest.mark.parametrize(
    ("kind", "said", "refused"),
    [
        # GatorTron's, Google's and RoFormer-Sim's, as published
        ("megatron-bert", {"num_layers": 3, "position_embedding_type": "absolute", "tokenizer_type": "BertWordPieceCase"}, {
            "position_embedding_type": "relative_key"}),
        ("rembert", {"embedding_size": 24, "embedding_dropout_prob": 0}, {"is_decoder": True}),
        ("roformer", {"directionality": "bidi", "norm_type": "layer_norm", "pooler_activation": "linear", "use_bias": True}, {
            "rotary_value": True, "use_bias": False, "hidden_act": "relu", "is_decoder": True}),
    ],
)  # fmt: skip
def test_words_of_published_configs_are_read_or_refused(
    encoders: dict[str, Path], tmp_path: Path, kind: str, said: dict[str, Any], refused: dict[str, Any]
) -> None:
    path = Path(shutil.copytree(encoders[kind], tmp_path / "made"))
    change(path, **said)
    np.testing.assert_allclose(vectors(fp32(path), TEXTS), published(encoders[kind]), atol=2e-5)
    raw = read_json(path / "config.json")
    for key, value in refused.items():
        with pytest.raises(LoadError, match=f"{key} in .* is {value!r}; of {kind}, only"):
            read_model(HfConfig({**raw, key: value}))


def as_published(path: Path, **fields: object) -> None:
    """UltraBERT's config as its makers wrote it: a window and a base for each layer."""
    config = json.loads((path / "config.json").read_text())
    for key in ("layer_types", "rope_parameters", "sliding_window"):
        del config[key]
    (path / "config.json").write_text(json.dumps(config | fields))


def test_windows_and_bases_of_each_layer_are_those_of_two_kinds(encoders: dict[str, Path], tmp_path: Path) -> None:
    """UltraBERT's own files say both by layer, with 0 or null where a layer attends to everything."""
    path = Path(shutil.copytree(encoders["ultrabert"], tmp_path / "made"))
    for whole in (0, None):
        as_published(encoders_config(encoders, path), attention_windows=[6, 6, whole], rope_theta=[1e3, 1e3, 1e4])
        np.testing.assert_allclose(vectors(fp32(path), TEXTS), published(encoders["ultrabert"]), atol=2e-5)
    for fields, named in (
        ({"attention_windows": [6, 8, 0]}, "attention_windows in .* holds 6 and others"),
        ({"attention_windows": [6, 0]}, "layer_types in .* has 2 entries; the model has 3"),
        ({"attention_windows": ["a", 6, 0]}, "attention_windows in .* whole numbers"),
        ({"attention_windows": 6}, "attention_windows in .* whole numbers"),
        ({"attention_windows": [6, 6, 0], "layer_types": ["full_attention"] * 3}, "say different things"),
        ({"rope_theta": [1e3, 2e3, 1e4]}, "rope_theta in .* holds 1000 and others"),
        ({"rope_theta": [1e3, 1e4]}, "rope_theta in .* has 2 numbers"),
    ):
        as_published(encoders_config(encoders, path), **fields)
        with pytest.raises(LoadError, match=named):
            fp32(path)


def encoders_config(encoders: dict[str, Path], path: Path) -> Path:
    """`path` with UltraBERT's config as it was."""
    shutil.copy(encoders["ultrabert"] / "config.json", path)
    return path


def test_logits_where_the_files_say_so(tmp_path: Path) -> None:
    """ms-marco-MiniLM's scores are logits: its config names Identity."""
    path = make_cross_encoder(tmp_path / "made", "bert")
    change(path, sentence_transformers=LOGITS)
    want = judge(path).predict(list(zip(QUERIES, TEXTS, strict=True)))
    assert want.max() > 1 or want.min() < 0
    np.testing.assert_allclose(fp32(path).score(QUERIES, TEXTS).scores, want, atol=5e-5)


def test_an_encoder_without_a_pooling_is_averaged(tmp_path: Path) -> None:
    """As sentence-transformers does with such a folder, and normalised as other vectors here."""
    path = make_plain(tmp_path / "made", "bert")
    want = oracle(path).encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(vectors(fp32(path), TEXTS), want, atol=2e-5)


def test_the_first_token_is_the_first_behind_an_instruction_that_is_not_pooled(tmp_path: Path) -> None:
    """As sentence-transformers 6 takes it; what stands before is read all the same."""
    path = make_encoder(tmp_path / "made", "bert", pooling="cls")
    change(path, "1_Pooling/config.json", include_prompt=False)
    llm = fp32(path)
    for prompt in ("the bread of ", ""):
        want = oracle(path).encode(TEXTS, prompt=prompt)
        np.testing.assert_allclose(vectors(llm, TEXTS, instruction=prompt), want, atol=2e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta", "mpnet", "deberta-v2-apart"])
def test_the_longest_text_is_read_and_a_longer_one_refused(encoders: dict[str, Path], kind: str) -> None:
    """RoBERTa's table has two rows more than there are positions; the last one must be used. MPNet's tokens lie farther
    from each other than distances have buckets of their own.
    """
    llm = fp32(encoders[kind])
    model, tok = reference_over(encoders[kind], kind)
    n_ids = len(tok)
    ids = [tok.cls_token_id, *(5 + i % (n_ids - 6) for i in range(POSITIONS - 2)), tok.sep_token_id]
    with torch.no_grad():
        state = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(dim=0).numpy()
    np.testing.assert_allclose(vectors(llm, [ids])[0], state / np.linalg.norm(state), atol=2e-5)
    with pytest.raises(PromptTooLong, match=f"{POSITIONS + 1} tokens; a context of {POSITIONS}"):
        llm.embed([[*ids, 5]])


def reference_over(path: Path, kind: str) -> Any:
    import transformers

    model = transformers.AutoModel.from_pretrained(path).eval()
    return model, make_reference_encoder(kind)[1]


def test_max_seq_length_bounds_a_text(tmp_path: Path) -> None:
    """all-MiniLM's files say 256 of 512 positions; a text is refused, not cut."""
    path = make_encoder(tmp_path / "made", "bert")
    change(path, "sentence_bert_config.json", max_seq_length=16, do_lower_case=False)
    llm = fp32(path)
    assert len(llm.embed(TEXTS[3])) == 1
    with pytest.raises(PromptTooLong, match="at most 16 of one text"):
        llm.embed(TEXTS[1])


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_texts_become_small_letters_where_files_say_so(tmp_path: Path, kind: str) -> None:
    """As bge's files do; of a pair, too."""
    path, pairs = make_encoder(tmp_path / "made", kind), make_cross_encoder(tmp_path / "pairs", kind)
    texts = [text.title() for text in TEXTS]
    as_written = vectors(fp32(path), texts)
    for folder in (path, pairs):
        change(folder, "sentence_bert_config.json", do_lower_case=True)
    got = vectors(fp32(path), texts)
    np.testing.assert_allclose(got, oracle(path).encode(texts), atol=2e-5)
    np.testing.assert_allclose(got, vectors(fp32(path), TEXTS), atol=2e-5)
    assert kind == "bert" or np.abs(got - as_written).max() > 0.01  # whose words are in small letters anyway
    judged, small = (
        fp32(pairs).score(query, some).scores for query, some in ((QUERIES[0].upper(), texts), (QUERIES[0], TEXTS))
    )
    np.testing.assert_allclose(judged, small, atol=2e-5)


def test_old_names_of_norms_are_read(tmp_path: Path) -> None:
    """bert-base-uncased calls the weight of a norm gamma, and its bias beta."""
    path = make_encoder(tmp_path / "made", "bert", ending="ForMaskedLM")
    want = oracle(path).encode(TEXTS)
    tensors = load_file(path / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    np.testing.assert_allclose(vectors(fp32(path), TEXTS), want, atol=2e-5)


@pytest.mark.parametrize("kind", ["deberta", "deberta-v2"])
def test_published_files_of_deberta_are_read(tmp_path: Path, kind: str) -> None:
    """Their configs name no class, say both products in one word, and beside them may lie a table of positions nobody reads."""
    path = make_plain(tmp_path / "made", kind, ending="ForMaskedLM")
    model, ids = reference_over(path, kind)[0], [2, 5, 30, 12, *range(20, 60), 3]
    with torch.no_grad():
        state = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(dim=0).numpy()
    tensors = load_file(path / "model.safetensors")
    tensors["deberta.embeddings.position_embeddings.weight"] = torch.ones(POSITIONS, 64)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    ours = read_json(path / "config.json")
    del ours["architectures"]
    (path / "config.json").write_text(json.dumps({**ours, "pos_att_type": "c2p|p2c", "padding_idx": 0}))
    np.testing.assert_allclose(vectors(fp32(path), [ids])[0], state / np.linalg.norm(state), atol=2e-5)


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_a_list_of_pieces_is_all_that_a_tokenizer_needs(tmp_path: Path, kind: str) -> None:
    """Older folders have vocab.txt and no tokenizer.json; tests/engine/text/test_wordpiece.py has the rest."""
    path = make_encoder(tmp_path / "made", kind)
    before = vectors(fp32(path), TEXTS)
    ids = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    (path / "tokenizer.json").unlink()
    (path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in sorted(ids, key=ids.__getitem__)))
    np.testing.assert_array_equal(vectors(fp32(path), TEXTS), before)
    np.testing.assert_allclose(before, oracle(path).encode(TEXTS), atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention"),
        ("roberta", {"pad_token_id": 0}, "pad_token_id"),
        ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings"),
        ("albert", {"num_hidden_groups": 3}, "num_hidden_groups"),
        ("albert", {"inner_group_num": 2}, "inner_group_num"),
        ("deberta", {"talking_head": True}, "talking_head"),
        ("deberta", {"pos_att_type": "p2c"}, "pos_att_type in .* is 'p2c'"),
        ("deberta", {"position_buckets": 8}, "position_buckets"),
        ("deberta-v2", {"relative_attention": False}, "relative_attention"),
        ("deberta-v2", {"position_biased_input": True}, "position_biased_input"),
        ("deberta-v2", {"pos_att_type": "c2p"}, "pos_att_type in .* is 'c2p'"),
        ("deberta-v2", {"conv_kernel_size": 3}, "conv_kernel_size"),
        ("deberta-v2", {"norm_rel_ebd": "rms_norm"}, "norm_rel_ebd"),
        ("deberta-v2", {"embedding_size": 32}, "embedding_size"),
        ("deberta-v2", {"position_buckets": 80}, "position_buckets in .* is 80 and max_relative_positions 40"),
        ("deberta-v2", {"pooler_hidden_act": "tanh"}, "pooler_hidden_act"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets"),
        ("mpnet", {"relative_attention_max_distance": 64}, "relative_attention_max_distance"),
        ("nomic_bert", {"rotary_scaling_factor": 2}, "rotary_scaling_factor"),
        ("nomic_bert", {"num_experts": 8}, "num_experts"),
        ("eurobert", {"architectures": ["EuroBertForSequenceClassification"]}, "EuroBertForSequenceClassification"),
        ("modernbert", {"norm_bias": True}, "norm_bias"),
    ],
)
def test_what_changes_the_mathematics_is_refused_by_name(
    encoders: dict[str, Path], kind: str, fields: dict[str, Any], named: str
) -> None:
    config = read_json(encoders[kind] / "config.json") | fields
    with pytest.raises(LoadError, match=named):
        read_model(HfConfig(config))


def test_code_of_its_own_is_not_taken_for_bert(tmp_path: Path) -> None:
    """Jina's files call themselves BERT, and bring code that attends otherwise."""
    path = make_encoder(tmp_path / "made", "bert")
    change(path, auto_map={"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"})
    with pytest.raises(UnsupportedModel, match="code of its own"):
        fp32(path)


def test_published_words_of_nomic_are_read(encoders: dict[str, Path]) -> None:
    """nomic-embed-text's files have GPT-2's words for an encoder; what they name is the same model."""
    ours = read_json(encoders["nomic_bert"] / "config.json")
    published = {
        "activation_function": "swiglu", "architectures": ["NomicBertModel"], "causal": False, "model_type": "nomic_bert",
        "layer_norm_epsilon": 1e-12, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "n_embd": 64, "n_head": 4, "n_inner": 96,
        "n_layer": 3, "n_positions": POSITIONS, "prenorm": False, "qkv_proj_bias": False, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None, "type_vocab_size": 2, "use_rms_norm": False, "vocab_size": ours["vocab_size"],
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "parallel_block": False,
    }  # fmt: skip
    assert read_model(HfConfig(published), name="it") == read_model(HfConfig(ours), name="it")


GTE = {
    "architectures": ["NewModel"], "attention_probs_dropout_prob": 0.0, "classifier_dropout": None, "hidden_act": "gelu",
    "auto_map": {"AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig",
                 "AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    "hidden_dropout_prob": 0.1, "hidden_size": 64, "intermediate_size": 96, "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm", "logn_attention_clip1": False, "logn_attention_scale": False,
    "max_position_embeddings": POSITIONS, "model_type": "new", "num_attention_heads": 4, "num_hidden_layers": 3,
    "pack_qkv": True, "pad_token_id": 0, "position_embedding_type": "rope", "rope_scaling": {"factor": 2.0, "type": "ntk"},
    "rope_theta": 5000, "type_vocab_size": 0, "unpad_inputs": False, "use_memory_efficient_attention": False,
}  # fmt: skip


def test_published_files_of_gte_are_read(tmp_path: Path) -> None:
    """gte-base-en-v1.5 has code of its own, no types, and turns by a base that is stretched once, and a little slower."""
    path = make_plain(tmp_path / "made", "gte", type_vocab_size=0)
    model, ids = reference_over(path, "gte")[0], [2, 5, 30, 12, *range(20, 60), 3]
    steps = torch.arange(0, 16, 2) / 16
    model.rotary_emb.inv_freq.copy_((5000 * 2.0) ** -steps / 2.0 ** (2 / 16))
    with torch.no_grad():
        state = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(dim=0).numpy()
    ours = read_json(path / "config.json")
    (path / "config.json").write_text(json.dumps({**GTE, "vocab_size": ours["vocab_size"]}))
    np.testing.assert_allclose(vectors(fp32(path), [ids])[0], state / np.linalg.norm(state), atol=2e-5)
    change(path, rope_scaling=None)
    assert np.abs(vectors(fp32(path), [ids])[0] - state / np.linalg.norm(state)).max() > 1e-3


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.9}}, "mixed_b"),
        ({"rope_scaling": {"type": "ntk", "factor": 0.5}}, "factor in .* is 0.5; it must be at least 1"),
        ({"pack_qkv": False}, "pack_qkv"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type"),
        ({"logn_attention_scale": True}, "logn_attention_scale"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type"),
    ],
)
def test_what_else_the_code_of_gte_can_do_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        read_model(HfConfig({**GTE, "vocab_size": 99, **fields}))


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_an_encoder_cannot_be_had(encoders: dict[str, Path], backend: str) -> None:
    """Its embedding stood where an output projection would be, packed a second time, and gave logits of nothing."""
    needs(backend)
    with TwoPhase(encoders["bert"], backend=backend) as phases, pytest.raises(ExecutorError, match="output projection"):
        phases.prefill([5, 6, 7])


@pytest.mark.native
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_ranks_have_the_bits_of_one(
    encoders: dict[str, Path], tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of positions and types are whole on each rank, and a step tells all of them where second texts begin."""
    needs("cpu")
    monkeypatch.setattr(Ranks, "_start", ThreadRanks._start)
    path = make_cross_encoder(tmp_path / "made", "bert", dtype=torch.bfloat16)
    settings = {"backend": "cpu", "weights": weights}
    one, ranked = (LLM(path, tp=ranks, threads=ranks, **settings) for ranks in (1, 2))
    assert ranked.score(QUERIES, TEXTS).scores == one.score(QUERIES, TEXTS).scores
    ranked.close()
    for kind in (
        "xlm-roberta",
        "mpnet",
        "albert",
        "deberta-v2",
        "deberta",
    ):  # a rank has what its heads know of distances
        one, ranked = (LLM(encoders[kind], tp=ranks, threads=ranks, **settings) for ranks in (1, 2))
        assert (vectors(one, TEXTS) == vectors(ranked, TEXTS)).all()
        model = ranked.loaded.model
        assert model.program.n_meetings == gathered(model.spec, tp=2, weights=weights).meetings  # type: ignore[attr-defined]
        ranked.close()


@pytest.mark.parametrize(("n_buckets", "reach", "farthest"), [(256, 512, 511), (8, 40, 199), (0, 24, 40)])
def test_each_distance_has_the_row_of_transformers(n_buckets: int, reach: int, farthest: int) -> None:
    """Of DeBERTa 3's sizes, and of small ones past their reach, with buckets and without."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    related = Related(n_buckets=n_buckets, reach=reach, is_shared=True, is_normed=True)
    tokens = torch.zeros(1, farthest + 1, 1)
    apart = build_relative_position(tokens, tokens, bucket_size=n_buckets or -1, max_position=reach)[0]
    half = n_buckets or reach
    want = torch.cat([apart[0].flip(0), apart[1:, 0]]).add(half).clamp(0, 2 * half - 1)
    assert torch.equal(PlacesTensor(related, farthest).read().long(), want)
