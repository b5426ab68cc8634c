"""Encoders of T5 as sentence-t5 and gtr-t5 are published, held against sentence-transformers over the same files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoints import enliven
from tests.embedding_files import adapted_oracle, make_adapter, oracle, quiet
from tests.encoder_files import unigram
from tests.engine.conftest import tiny_config

from diptych.compute.loading.views import DistancesTensor
from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.engine.llm import LLM
from diptych.ground.config import SchedulerConfig
from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.models.config import HfConfig
from diptych.models.positions import Distances
from diptych.models.read import read_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of sentence-transformers and what it brings

FOX = "the fox ran into the woods, and nobody saw it; then it came back and slept in the barn until noon. "
TEXTS = ["once upon a time there was a fox.", FOX, "bread is made of flour.", "fox", 3 * FOX]
# class, activation, buckets and how far they reach
KINDS = {"t5": ("T5", "relu", 32, 128), "flan": ("T5", "gated-gelu", 16, 20), "mt5": ("MT5", "gated-gelu", 32, 128)}
SIZES = {"d_model": 64, "d_kv": 24, "d_ff": 96, "num_layers": 3, "num_heads": 4}


def make(path: Path, kind: str) -> Path:
    """A mean of states, a layer to another width, normalised."""
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    quiet()
    name, act, buckets, reach = KINDS[kind]
    tok = unigram()
    config = getattr(transformers, f"{name}Config")(
        **SIZES, vocab_size=len(tok), pad_token_id=tok.pad_token_id, feed_forward_proj=act,
        relative_attention_num_buckets=buckets, relative_attention_max_distance=reach,
    )  # fmt: skip
    model = getattr(transformers, f"{name}EncoderModel")(config).eval().float()
    enliven(model, 0)
    for block in model.encoder.block:
        block.layer[0].SelfAttention.q.weight.data.mul_(0.2)  # nobody else divides scores
    base = path.parent / f"{path.name}-base"
    model.save_pretrained(base)
    tok.save_pretrained(base)
    torch.manual_seed(0)
    modules = [
        Transformer(str(base)),
        Pooling(64, "mean"),
        Dense(64, 48, bias=False, activation_function=torch.nn.Identity()),
    ]
    SentenceTransformer(modules=[*modules, Normalize()]).save_pretrained(str(path), create_model_card=False)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("t5")
    return {kind: make(root / kind, kind) for kind in KINDS}


def vectors(llm: LLM, texts: list[str]) -> np.ndarray:
    return np.stack([one.vector for one in llm.embed(texts)])


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_sentence_transformers(made: dict[str, Path], kind: str) -> None:
    """Plain MLPs and gated ones; tokens that lie farther apart than there are buckets."""
    want = oracle(made[kind]).encode(TEXTS)
    llm = LLM(made[kind], backend="torch", weights="fp32", kv="fp32")
    np.testing.assert_allclose(vectors(llm, TEXTS), want, atol=2e-5)
    assert len(llm.loaded.tokenizer.encode(TEXTS[-1])) > 128
    assert np.abs(want[0] - want[1]).max() > 0.01


@pytest.mark.parametrize("kind", ["t5", "flan"])
def test_adapters_are_those_of_peft(made: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Blocks have layers of their own, so that the name of either alone says nothing."""
    adapter = make_adapter(tmp_path / "adapter", made[kind])
    want = adapted_oracle(made[kind], adapter).encode(TEXTS)
    llm = LLM(made[kind], backend="torch", weights="fp32", kv="fp32", loras={"task": str(adapter)})
    got = np.stack([one.vector for one in llm.embed(TEXTS, adapter="task")])
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert np.abs(got - vectors(llm, TEXTS)).max() > 0.01


@pytest.mark.native
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_agree_and_neighbours_change_no_bit(made: dict[str, Path], kind: str) -> None:
    if not cpu_kernels.is_available()[0]:
        pytest.skip(cpu_kernels.is_available()[1])
    want = oracle(made[kind]).encode(TEXTS)
    for weights, kv, least in (("bf16", "bf16", 0.999), ("int8", "int8", 0.99)):
        got = []
        for threads in (1, 2):
            scheduler = SchedulerConfig(max_step_tokens=512, max_running_sequences=4, max_context_tokens=512)
            config = tiny_config("cpu", scheduler=scheduler, max_context_tokens=512)
            llm = LLM(made[kind], config, weights=weights, kv=kv, threads=threads)
            got += [vectors(llm, TEXTS), np.concatenate([vectors(llm, [text]) for text in TEXTS])]
        assert ((want * got[0]).sum(axis=1) > least).all(), (weights, (want * got[0]).sum(axis=1))
        assert all((one == got[0]).all() for one in got[1:])


def test_what_is_published_beside_an_encoder_changes_nothing(made: dict[str, Path]) -> None:
    """sentence-t5's config still describes the decoder that it has not, and how long texts were in training."""
    ours = json.loads((made["t5"] / "config.json").read_text())
    published = {
        "architectures": ["T5EncoderModel"], "d_ff": 96, "d_kv": 24, "d_model": 64, "decoder_start_token_id": 0,
        "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "relu", "gradient_checkpointing": False,
        "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5",
        "n_positions": 512, "num_decoder_layers": 12, "num_heads": 4, "num_layers": 3, "output_past": True, "pad_token_id": 0,
        "relative_attention_num_buckets": 32, "task_specific_params": {"summarization": {"num_beams": 4}}, "use_cache": True,
        "vocab_size": ours["vocab_size"],
    }  # fmt: skip
    assert read_model(HfConfig(published), name="it") == read_model(HfConfig(ours), name="it")


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, UnsupportedModel, "an encoder beside the decoder"),
        ({"architectures": ["UMT5EncoderModel"], "model_type": "umt5"}, UnsupportedModel, "umt5|UMT5"),
        ({"feed_forward_proj": "gated-relu"}, LoadError, "hidden_act"),
        ({"feed_forward_proj": "relu-gated"}, LoadError, "feed_forward_proj in .* is 'relu-gated'"),
        ({"is_decoder": True}, LoadError, "is_decoder"),
        ({"relative_attention_num_buckets": 6}, LoadError, "relative_attention_num_buckets in .* is 6"),
        ({"relative_attention_max_distance": 8}, LoadError, "relative_attention_max_distance 8"),
        ({"relative_attention_max_distance": 70_000}, LoadError, "at most 65536"),
    ],
)
def test_what_changes_the_mathematics_is_refused_by_name(
    fields: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        read_model(
            HfConfig({"architectures": ["T5EncoderModel"], "model_type": "t5", **SIZES, "vocab_size": 99, **fields})
        )


@pytest.mark.parametrize(("n_buckets", "reach"), [(32, 128), (32, 127), (16, 20), (8, 3), (64, 1000), (4, 2)])
def test_every_distance_has_the_bucket_of_transformers(n_buckets: int, reach: int) -> None:
    """At the edges of buckets a logarithm in another precision falls on the other side."""
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
    from transformers.models.t5.modeling_t5 import T5Attention

    values = torch.arange(n_buckets).float()[:, None].repeat(1, 2)
    table: Any = SimpleNamespace(
        name="table", shape=values.shape, dtype=values.dtype, random_seed=None, read=lambda: values
    )
    got = DistancesTensor(table, Distances(n_buckets=n_buckets, reach=reach)).read()
    steps = torch.arange(-2 * reach, 2 * reach + 1)
    want = T5Attention._relative_position_bucket(steps, True, n_buckets, reach).float()
    assert torch.equal(got[0], want[reach:-reach])
    assert (want[:reach] == got[1, 0]).all()
    assert (want[-reach:] == got[1, -1]).all()
    assert torch.equal(MPNetEncoder.relative_position_bucket(steps, n_buckets, reach).float(), want)
