"""Tiny random checkpoints of embedding and reranking models, in the layouts that sentence-transformers writes and publishes.

    path = make_embedder(tmp_path / "qwen3-embedding", family="qwen3", pooling="lasttoken")
    want = oracle(path).encode(texts)

The vocabulary is that of the bundled tokenizer. `oracle` and `judge` are sentence-transformers itself over the same files.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from tests.checkpoints import enliven, make_reference

from diptych.engine.load import bundled_dir

PROMPTS = {"query": "Instruct: find what fits\nQuery:", "document": ""}
PAIR_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}I: {{ m.content }}\n{% elif m.role == 'query' %}Q: {{ m.content }}\n"
    "{% elif m.role == 'document' %}D: {{ m.content }}\n{% endif %}{% endfor %}A:"
)
# token ids that stand for "yes" and "no" in the rerankers made here
YES, NO = 500, 1941


def tokenizer(*, ends: bool = False, template: str | None = None, words: tuple[str, ...] = ()) -> Any:
    """The bundled one. ends: every text ends with <|im_end|>, as Qwen3-Embedding's do with <|endoftext|>."""
    import tokenizers
    import transformers

    made = transformers.AutoTokenizer.from_pretrained(str(bundled_dir()))
    made.chat_template = template
    made.padding_side = "left"
    made.add_tokens(list(words))
    if ends:
        end = made.eos_token
        made.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, made.eos_token_id)]
        )
    return made


def quiet() -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()


def make_embedder(
    path: Path,
    *,
    family: str = "qwen3",
    pooling: str = "lasttoken",
    include_prompt: bool = True,
    has_head: bool = True,
    prompts: dict[str, str] | None = None,
    max_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """An embedding model as they are published: no `model.` before the names. has_head: the config says ...ForCausalLM."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    quiet()
    tok = tokenizer(ends=True)
    base = path.parent / f"{path.name}-base"
    model = make_reference(family, vocab_size=len(tok), pad_token_id=tok.pad_token_id, **fields)
    model.model.to(dtype).save_pretrained(base)
    tok.save_pretrained(base)
    modules = [
        Transformer(str(base)),
        Pooling(model.config.hidden_size, pooling, include_prompt=include_prompt),
        Normalize(),
    ]
    made = SentenceTransformer(modules=modules, prompts=PROMPTS if prompts is None else prompts)
    made.save_pretrained(str(path), create_model_card=False)
    reading = {"max_seq_length": max_tokens or 200, "do_lower_case": False}  # what published models have
    (path / "sentence_bert_config.json").write_text(json.dumps(reading))
    if has_head:
        config = json.loads((path / "config.json").read_text())
        config["architectures"] = [f"{config['architectures'][0].removesuffix('Model')}ForCausalLM"]
        (path / "config.json").write_text(json.dumps(config))
    shutil.rmtree(base)
    return path


def make_reranker(path: Path, *, template: str | None = PAIR_TEMPLATE, prompts: dict[str, str] | None = None) -> Path:
    """A language model that judges by the logits of two tokens, with a template for query and document."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    quiet()
    tok = tokenizer(template=template)
    base = path.parent / f"{path.name}-base"
    make_reference("qwen3", vocab_size=len(tok), pad_token_id=tok.pad_token_id).save_pretrained(base)
    tok.save_pretrained(base)
    modules = [Transformer(str(base), transformer_task="text-generation"), LogitScore(YES, NO)]
    name = next(iter(prompts)) if prompts else None
    CrossEncoder(modules=modules, prompts=prompts or {}, default_prompt_name=name).save_pretrained(
        str(path), create_model_card=False
    )
    shutil.rmtree(base)
    return path


def make_classifier(path: Path, *, n_labels: int = 1, family: str = "Qwen3", name: str | None = None) -> Path:
    """A decoder under a classification head, as transformers saves it. name: of its class, if not the family's."""
    import transformers

    quiet()
    tok = tokenizer()
    kind = "modernbert-decoder" if family == "ModernBertDecoder" else family.lower()
    config = make_reference(kind, vocab_size=len(tok), pad_token_id=tok.pad_token_id).config
    config.num_labels = n_labels
    model = getattr(transformers, f"{name or family}ForSequenceClassification")(config).eval().float()
    enliven(model, 0)
    model.save_pretrained(path)
    tok.save_pretrained(path)
    return path


def oracle(path: Path) -> Any:
    """sentence-transformers over the same files."""
    from sentence_transformers import SentenceTransformer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SentenceTransformer(str(path), device="cpu")


def judge(path: Path) -> Any:
    """Its cross-encoder over the same files."""
    from sentence_transformers import CrossEncoder

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CrossEncoder(str(path), device="cpu")


def make_adapter(path: Path, base: Path, *, seed: int = 0, only: str = "") -> Path:
    """An adapter of random numbers for every projection of the model in a folder whose name has `only`, as peft saves it."""
    import peft

    quiet()
    model = oracle(base)[0].auto_model
    config = peft.LoraConfig(
        task_type="FEATURE_EXTRACTION", target_modules=_projections(model, only), r=4, lora_alpha=6
    )
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if re.search("lora_[AB]", name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
    adapted.save_pretrained(path)
    return path


def _projections(model: torch.nn.Module, only: str) -> list[str]:
    """By the names that the class has for them."""
    named = [name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and re.search(only, name)]
    return [name for name in named if not name.startswith("pooler")]


def adapted_oracle(path: Path, adapter: Path) -> Any:
    made = oracle(path)
    made.load_adapter(str(adapter))
    return made
