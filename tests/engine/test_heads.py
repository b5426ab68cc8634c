"""Medusa and EAGLE heads: the guesses of a plain computation in torch, in every published layout, and no answer changed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.engine.conftest import tiny_config
from tests.engine.test_drafters import counts
from tests.engine.test_speculation import BASE, CASES, PROMPTS, SAMPLED, plain, said, unpriced

from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.control.speculation import NOTHING, EveryGuess, Wanted
from diptych.engine.drafters import open_drafters
from diptych.engine.llm import LLM
from diptych.engine.load import LoadedModel, load
from diptych.ground.config import EngineConfig, engine_config
from diptych.ground.errors import ConfigError, LoadError
from diptych.models.config import HfConfig
from diptych.models.heads import read_eagle
from diptych.models.read import read_model

D, V, HEADS, KV, HEAD, FFN, DRAFTED = 64, 4096, 4, 2, 16, 96, 700
LAYER = {
    "hidden_size": D, "intermediate_size": FFN, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512, "vocab_size": V, "hidden_act": "silu",
    "num_hidden_layers": 1, "model_type": "llama",
}  # fmt: skip
TAPS = [2, 1, 2]  # the layer that the state enters, as configs count; the last of transformers is normed


def random_layer(generator: torch.Generator, width: int) -> dict[str, torch.Tensor]:
    """A decoder layer whose q, k and v read `width` inputs."""

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 1.5 * shape[-1] ** -0.5

    return {
        "self_attn.q_proj.weight": rand(HEADS * HEAD, width),
        "self_attn.k_proj.weight": rand(KV * HEAD, width),
        "self_attn.v_proj.weight": rand(KV * HEAD, width),
        "self_attn.o_proj.weight": rand(D, HEADS * HEAD),
        "mlp.gate_proj.weight": rand(FFN, D),
        "mlp.up_proj.weight": rand(FFN, D),
        "mlp.down_proj.weight": rand(D, FFN),
        "post_attention_layernorm.weight": 1 + 0.3 * torch.randn(D, generator=generator),
    }


def make_heads(folder: Path, layout: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of random heads in a layout, and its tensors by the names of that layout."""
    g = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 1.5 * shape[-1] ** -0.5

    def ones(n: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(n, generator=g)

    config: dict[str, Any]
    if layout.startswith("medusa"):
        named = {f"{i}.0.linear.weight": rand(D, D) for i in range(3)}
        named |= {f"{i}.0.linear.bias": rand(D) for i in range(3)} | {f"{i}.1.weight": rand(V, D) for i in range(3)}
        config = {"medusa_num_heads": 3, "medusa_num_layers": 1}
        if layout == "medusa_vllm":
            config = {"num_heads": 3, "num_hidden_layers": 1, "hidden_size": D, "vocab_size": V, "model_type": "medusa"}
            names = {".0.linear.": ".layers.0.", ".1.weight": ".weight"}
            named = {_renamed_medusa(name, names): tensor for name, tensor in named.items()}
        elif layout == "medusa_shared":
            named = {name: tensor for name, tensor in named.items() if not name.endswith(".1.weight")}
    elif layout in ("eagle1", "eagle1_speculators"):
        layer = random_layer(g, D)
        prefix, fc = ("layers.0.", "fc") if layout == "eagle1" else ("transformer.", "fusion_fc")
        named = {f"{prefix}{name}": tensor for name, tensor in layer.items()}
        named |= {f"{fc}.weight": rand(D, 2 * D), f"{fc}.bias": rand(D)}
        config = LAYER | {"architectures": ["LlamaForCausalLMEagle"]}
        if layout == "eagle1_speculators":
            config = {"speculators_model_type": "eagle", "transformer_layer_config": LAYER}
    else:
        layer = random_layer(g, 2 * D) | {"input_layernorm.weight": ones(D), "hidden_norm.weight": ones(D)}
        prefix = "midlayer." if layout == "eagle3" else "layers.0."
        named = {f"{prefix}{name}": tensor for name, tensor in layer.items()}
        kept = torch.randperm(V, generator=g)[:DRAFTED].sort().values
        named |= {"fc.weight": rand(D, 3 * D), "norm.weight": ones(D), "lm_head.weight": rand(DRAFTED, D)}
        named |= {"d2t": kept - torch.arange(DRAFTED), "t2d": torch.isin(torch.arange(V), kept)}
        config = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
        config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS}}
        if layout == "eagle3_speculators":
            config = {
                "speculators_model_type": "eagle3",
                "transformer_layer_config": LAYER,
                "draft_vocab_size": DRAFTED,
            }
            config |= {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": TAPS}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / "model.safetensors")
    return folder, named


def _renamed_medusa(name: str, names: dict[str, str]) -> str:
    i, rest = name.split(".", 1)
    return f"lm_heads.{i}.weight" if rest == "1.weight" else f"blocks.{i}{names['.0.linear.']}{rest.split('.')[-1]}"


LAYOUTS = ("medusa", "medusa_vllm", "medusa_shared", "eagle1", "eagle1_speculators", "eagle3", "eagle3_speculators")


class Reference:
    """Heads computed densely over a whole text, from the hidden states that transformers gives."""

    def __init__(self, target: Path, layout: str, named: dict[str, torch.Tensor]) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.layout = layout
        self.named = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in named.items()}
        if layout.startswith("eagle"):
            roots = ("layers.0.", "midlayer.", "transformer.")
            self.layer = {n.removeprefix(r): t for n, t in self.named.items() for r in roots if n.startswith(r)}

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], n: int) -> list[int]:
        """Greedy guesses behind `tokens`."""
        ids = torch.tensor([list(tokens)])
        out = self.model.model(ids[:, :-1], output_hidden_states=True)  # the newest token has no state yet
        if self.layout.startswith("medusa"):
            return self._medusa(out.last_hidden_state[0, -1])[:n]
        if self.layout.startswith("eagle1"):
            states = out.last_hidden_state[0]
        else:
            states = torch.cat([out.hidden_states[i][0] for i in TAPS], dim=-1) @ self.named["fc.weight"].T
        known, drafts = list(tokens), []
        for _ in range(n):
            x, logits = self._eagle(states, torch.tensor(known[1:]))
            best = int(logits[-1].argmax())
            drafts.append(best + int(self.named["d2t"][best]) if "d2t" in self.named else best)
            states, known = torch.cat([states, x[-1:]]), [*known, drafts[-1]]
        return drafts

    def _medusa(self, h: torch.Tensor) -> list[int]:
        found = []
        for i in range(3):
            block = "blocks.{}.layers.0" if self.layout == "medusa_vllm" else "{}.0.linear"
            block = block.format(i)
            x = h + F.silu(self.named[f"{block}.weight"] @ h + self.named[f"{block}.bias"])
            head = {"medusa": f"{i}.1.weight", "medusa_vllm": f"lm_heads.{i}.weight"}.get(self.layout)
            found.append(int(((self.named[head] if head else self.model.lm_head.weight) @ x).argmax()))
        return found

    def _eagle(self, states: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer, e = self.layer, self.model.model.embed_tokens(ids)
        if self.layout.startswith("eagle1"):
            name = "fc" if self.layout == "eagle1" else "fusion_fc"
            x = torch.cat([e, states], dim=-1) @ self.named[f"{name}.weight"].T + self.named[f"{name}.bias"]
            read = x
        else:
            normed = self._norm(states, layer["hidden_norm.weight"])
            x = normed if self.layout == "eagle3_speculators" else states
            read = torch.cat([self._norm(e, layer["input_layernorm.weight"]), normed], dim=-1)
        x = x + self._attention(read)
        h = self._norm(x, layer["post_attention_layernorm.weight"])
        gated = F.silu(h @ layer["mlp.gate_proj.weight"].T) * (h @ layer["mlp.up_proj.weight"].T)
        x = x + gated @ layer["mlp.down_proj.weight"].T
        if self.layout.startswith("eagle1"):
            return x, x @ self.model.lm_head.weight.T
        return x, self._norm(x, self.named["norm.weight"]) @ self.named["lm_head.weight"].T

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, 1e-6)

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        n = len(x)
        angles = torch.outer(torch.arange(n).float(), 10000.0 ** -(torch.arange(0, HEAD, 2) / HEAD))
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

        def heads(name: str, count: int) -> torch.Tensor:
            return (x @ self.layer[f"self_attn.{name}.weight"].T).view(n, count, HEAD).transpose(0, 1)

        def turned(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat([-second, first], -1) * sin

        q, k, v = turned(heads("q_proj", HEADS)), turned(heads("k_proj", KV)), heads("v_proj", KV)
        k, v = (one.repeat_interleave(HEADS // KV, 0) for one in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return a.transpose(0, 1).reshape(n, -1) @ self.layer["self_attn.o_proj.weight"].T


def headed(loaded: LoadedModel, config: EngineConfig, folder: Path, layout: str, **settings: Any) -> LLM:
    """An engine with these heads, whose depths are not priced."""
    llm = LLM(loaded, config, speculate=layout[:6].rstrip("13_"), draft_model=str(folder), **settings)
    return unpriced(llm)


def watched(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """(text so far, drafts) of every proposal from now on."""
    drafting = llm.engine.stepper.executor.drafting
    seen: list[tuple[list[int], list[int]]] = []
    texts: dict[int, list[int]] = {}
    drafter = drafting._all[0]._drafter
    begin, follow, propose = drafter.begin, drafter.follow, drafter.propose

    def begun(start: Any) -> None:
        texts[start.seq_id] = list(start.prompt_token_ids)
        begin(start)

    def followed(chunks: Any, token_ids: Any) -> None:
        for chunk, given in zip(chunks, token_ids, strict=True):
            if given:
                texts[chunk.seq_id][chunk.end_pos - len(chunk.draft_token_ids) :] = given
        follow(chunks, token_ids)

    def proposed(chunks: Any, token_ids: Any, *rest: Any) -> Any:
        found = propose(chunks, token_ids, *rest)
        seen.extend((list(texts[seq_id]), list(drafts)) for seq_id, drafts in found.items())
        return found

    drafter.begin, drafter.follow, drafter.propose = begun, followed, proposed
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_guess_what_a_plain_computation_does(
    loaded: LoadedModel, tiny_dir: Path, tmp_path: Path, layout: str
) -> None:
    """Beside neighbours, with prompts in chunks, behind rejected drafts: every state and every key where it belongs.

    In fp32 on torch to the token; on the cpu backend bf16 turns a guess now and then, as these random heads are sure of none.
    """
    folder, named = make_heads(tmp_path, layout)
    reference = Reference(tiny_dir, layout, named)
    llm = headed(loaded, tiny_config(), folder, layout, max_draft_tokens=3)
    seen = watched(llm)
    params = replace(BASE, max_tokens=14)
    got = llm.generate(PROMPTS, params)
    assert llm.engine.stepper.executor.drafting.failures == 0
    assert counts(got)[0] > 0
    checked = seen[:: max(1, len(seen) // 25)]
    expected = [reference.drafts(text, len(drafts)) for text, drafts in checked]
    right = [drafts == best for (_, drafts), best in zip(checked, expected, strict=True)]
    assert len(right) > 20
    first = [drafts[0] == best[0] for (_, drafts), best in zip(checked, expected, strict=True)]
    if loaded.model.backend_name == "torch":
        assert sum(right) >= len(right) - 1
    else:
        assert sum(first) > 0.7 * len(first)
        assert sum(right) > 0.5 * len(right)


@pytest.fixture
def exact(loaded: LoadedModel) -> LoadedModel:
    """The cpu backend."""
    if loaded.model.backend_name != "cpu":
        pytest.skip("bit for bit on the cpu backend only")
    return loaded


@pytest.mark.parametrize("layout", ["medusa", "eagle1", "eagle3"])
@pytest.mark.parametrize("name", ["greedy", "sampled_logprobs", "sampled_penalties", "choices", "json", "regex"])
def test_answers_are_those_without(exact: LoadedModel, tmp_path: Path, layout: str, name: str) -> None:
    """Wrong as they are, random heads reach no answer; the second time prompts come from the prefix cache."""
    config = tiny_config()
    wanted = plain(exact, CASES[name])
    llm = headed(exact, config, make_heads(tmp_path, layout)[0], layout)
    got = llm.generate(PROMPTS, CASES[name])
    assert [said(done) for done in got] == [said(done) for done in wanted]
    assert counts(got)[0] > 0 or (layout, name) == ("eagle3", "regex"), "its vocabulary has none of those words"
    if name != "choices":
        again = llm.generate(PROMPTS, CASES[name])
        assert [[c.token_ids for c in d.choices] for d in again] == [[c.token_ids for c in d.choices] for d in wanted]
    assert llm.engine.stepper.executor.drafting.failures == 0


@pytest.mark.parametrize("layout", ["medusa", "eagle1", "eagle3"])
def test_answers_survive_preemption(exact: LoadedModel, tmp_path: Path, layout: str) -> None:
    """States that the drafter missed are a gap, behind which it begins anew."""
    config = tiny_config(max_context_tokens=96)
    config = replace(config, kv_memory_bytes=14 * exact.model.kv_bytes_per_block(config.block_tokens))
    params = replace(SAMPLED, max_tokens=40)
    prompts = [list(range(40 + i, 85 + i)) for i in range(4)]
    wanted = LLM(exact, config).generate(prompts, params)
    llm = headed(exact, config, make_heads(tmp_path, layout)[0], layout)
    got = llm.generate(prompts, params)
    assert llm.engine.stats().preemptions > 0
    assert [c.token_ids for d in got for c in d.choices] == [c.token_ids for d in wanted for c in d.choices]
    assert llm.engine.stepper.executor.drafting.failures == 0
    llm.engine.core.check()


class Fickle(EveryGuess):
    """Gives sequences up and takes them back at random, in prompts and in answers."""

    def __init__(self, seed: int) -> None:
        super().__init__(rows=64)
        self.rng = random.Random(seed)

    def read(self, estimates: Sequence[object], end: int, n: int) -> Wanted | None:
        return None if self.rng.random() < 0.4 else (self.rng.randrange(len(estimates)), n)

    def ask(self, options: Any, **settings: Any) -> list[Wanted]:
        return [
            (self.rng.randrange(len(some)), n) if some and self.rng.random() < 0.7 else NOTHING
            for some, (_, n) in zip(options, super().ask(options, **settings), strict=True)
        ]


@pytest.mark.parametrize("layout", ["draft", "medusa", "eagle1", "eagle3"])
def test_answers_are_those_without_whoever_is_given_up(
    exact: LoadedModel, tiny_dir: Path, tmp_path: Path, layout: str
) -> None:
    """What a drafter has missed is read later (draft) or never (heads); a draft model equal to the model stays right."""
    config = tiny_config()
    params = replace(SAMPLED, max_tokens=50)
    wanted = plain(exact, params)
    if layout == "draft":
        llm = LLM(exact, config, speculate="draft", draft_model=str(tiny_dir))
    else:
        llm = headed(exact, config, make_heads(tmp_path, layout)[0], layout)
    for seed in (1, 2):
        llm.engine.core._scheduler.drafts.depths = Fickle(seed)
        got = llm.generate(PROMPTS, params)  # the second time from the prefix cache
        assert [done.choices[0].token_ids for done in got] == [done.choices[0].token_ids for done in wanted]
        drafted, accepted = counts(got)
        assert drafted > 0
        assert layout != "draft" or drafted == accepted
    assert llm.engine.stats().drafter_faults == 0


@pytest.mark.native
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_in_packed_formats(tiny_dir: Path, tmp_path: Path, weights: str) -> None:
    """Heads of a packed model are int8, and answers stay those of the model."""
    if not cpu_kernels.is_available()[0]:
        pytest.skip(cpu_kernels.is_available()[1])
    config = tiny_config("cpu")
    config = replace(config, compute=replace(config.compute, weights=weights, kv="int8"))
    loaded = load(str(tiny_dir), config)
    wanted = LLM(loaded, config).generate(PROMPTS, SAMPLED)
    for layout in ("medusa", "eagle1", "eagle3"):
        llm = headed(loaded, config, make_heads(tmp_path / layout, layout)[0], layout)
        assert [said(done) for done in llm.generate(PROMPTS, SAMPLED)] == [said(done) for done in wanted]
        assert llm.engine.stepper.executor.drafting.failures == 0


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("medusa", {"hidden_size": 128}, r"hidden_size in .* is 128; the model's is 64"),
        ("medusa", {"medusa_num_heads": 0}, "medusa_num_heads 0"),
        ("eagle1", {"vocab_size": 4000}, r"vocab_size in .* is 4000; the model's is 4096"),
        ("eagle1", {"num_hidden_layers": 2}, "num_hidden_layers in .* is 2; an EAGLE head has 1"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, r"the model has 3 layers"),
        ("eagle3", {"target_hidden_size": 128}, r"target_hidden_size in .* is 128; the model's is 64"),
        ("eagle3", {"draft_vocab_size": 600}, r"has shape \[700, 64\]; the config expects \[600, 64\]"),
        ("eagle3_speculators", {"speculators_model_type": "mlp"}, "'mlp'; eagle and eagle3 are read"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    loaded: LoadedModel, tiny_dir: Path, tmp_path: Path, layout: str, changes: dict[str, Any], message: str
) -> None:
    """With both numbers, before anything is drafted."""
    folder, _ = make_heads(tmp_path, layout)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    kind = "medusa" if layout == "medusa" else "eagle"
    config = engine_config(tiny_config(loaded.model.backend_name), speculate=kind, draft_model=str(folder))
    with pytest.raises((ConfigError, LoadError), match=message):
        open_drafters(config, loaded.model, directory=tiny_dir)


def test_published_configs_are_read() -> None:
    """The shapes of heads people use, from their config.json: yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, and speculators' for it."""
    llama = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}  # fmt: skip
    target = read_model(HfConfig(llama))
    layer = llama | {"num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
    safe = layer | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}
    eagle = read_eagle(safe, target, "config.json")
    assert (eagle.version, eagle.layer.vocab_size, eagle.n_words) == (3, 32000, 128256)
    assert eagle.taps == (1, 15, 28), "behind layers 1, 15 and 28, which is before 2, 16 and 29"
    same = {"speculators_model_type": "eagle3", "draft_vocab_size": 32000, "transformer_layer_config": layer}
    assert read_eagle(same, target, "config.json").layer == eagle.layer
    first = read_eagle(layer | {"architectures": ["LlamaForCausalLM"]}, target, "config.json")
    assert (first.version, first.taps) == (1, (31,))
