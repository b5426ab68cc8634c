"""Trains the heads that draft for a bundled model: `medusa` (four heads) and `eagle` (EAGLE-1: one layer), in minutes.

Both imitate the finished model: half of their rows are text of the training mixture, half is text that the model wrote itself,
as that is what they will see. The loss is the divergence from the model's own distribution, as for the draft model.
Layouts are those that people publish (`diptych.models.heads`); embedding and output projection are the model's, so they are
not stored twice.

Example:
    python -m training.heads eagle --corpus corpus --work build/heads --export src/diptych/bundled/diptych-10m-eagle
"""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import save_file
from torch import Tensor, nn

from diptych.engine.llm import LLM
from diptych.ground.request import SamplingParams
from training.data import Sampler, TrainingData
from training.export import load_exported, write_json
from training.model import MLP, Attention, CastLinear, Llama, ModelShape, RMSNorm, rope_tables
from training.train import Workers, lr_factor

ROW_TOKENS = 256
PROMPT_TOKENS = 32
ROWS = 8  # of one optimiser step
MICRO_ROWS = 2
EAGLE_FFN = 448
N_MEDUSA = 4
DEPTHS = 2  # passes of EAGLE over its own output


class Eagle(nn.Module):
    """EAGLE-1: the state behind token t + 1 from the state behind token t and token t + 1. Li et al., 2401.15077."""

    def __init__(self, target: Llama) -> None:
        super().__init__()
        of = target.shape
        self.shape = ModelShape(
            hidden_size=of.hidden_size, intermediate_size=EAGLE_FFN, n_layers=1, n_heads=of.n_heads,
            n_kv_heads=of.n_kv_heads, head_dim=of.head_dim, vocab_size=of.vocab_size, rms_norm_eps=of.rms_norm_eps,
            max_context_tokens=of.max_context_tokens, rope_theta=of.rope_theta,
        )  # fmt: skip
        self.fc = CastLinear(2 * of.hidden_size, of.hidden_size, bias=False)
        self.self_attn = Attention(self.shape)
        self.post_attention_layernorm = RMSNorm(of.hidden_size, of.rms_norm_eps)
        self.mlp = MLP(self.shape)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=of.hidden_size**-0.5 / 2)
        for last in (self.self_attn.o_proj, self.mlp.down_proj):
            nn.init.zeros_(last.weight)
        with torch.no_grad():  # begins as the state that it was given
            self.fc.weight[:, of.hidden_size :] = torch.eye(of.hidden_size)

    def forward(self, embedded_BTD: Tensor, hidden_BTD: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
        """States [B,T,D] behind the embedded tokens, from those before them."""
        x: Tensor = self.fc(torch.cat([embedded_BTD, hidden_BTD], dim=-1))
        x = x + self.self_attn(x, cos_Td, sin_Td)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def loss(self, target: Llama, tokens: Tensor) -> Tensor:
        """Sum over the rows' tokens of the divergence, over DEPTHS passes, each fed with the states of the one before."""
        hidden, log_p = _imitated(target, tokens)
        weight = target.model.embed_tokens.weight.to(hidden.dtype)
        n = tokens.shape[1] - DEPTHS
        cos, sin = (table.to(hidden.dtype) for table in rope_tables(self.shape, n))
        embedded = F.embedding(tokens, weight)
        fed, total = hidden[:, :n], torch.zeros(())
        for depth in range(1, DEPTHS + 1):
            fed = self(embedded[:, depth : depth + n], fed, cos, sin)
            log_q = F.log_softmax(F.linear(fed, weight).float(), dim=-1)
            total = total + 0.8 ** (depth - 1) * F.kl_div(
                log_q, log_p[:, depth : depth + n], log_target=True, reduction="sum"
            )
            total = total + 0.005 * F.smooth_l1_loss(fed.float(), hidden[:, depth : depth + n].float(), reduction="sum")
        return total

    def tensors(self) -> dict[str, Tensor]:
        """By the names of published EAGLE checkpoints."""
        named = dict(self.named_parameters())
        return {name if name == "fc.weight" else f"layers.0.{name}": tensor for name, tensor in named.items()}

    def config(self) -> dict[str, object]:
        """A Llama of one layer."""
        shape = self.shape
        return {
            "architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "attention_bias": False, "bias": False,
            "head_dim": shape.head_dim, "hidden_act": "silu", "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size, "max_position_embeddings": shape.max_context_tokens,
            "mlp_bias": False, "num_attention_heads": shape.n_heads, "num_hidden_layers": 1,
            "num_key_value_heads": shape.n_kv_heads, "rms_norm_eps": shape.rms_norm_eps, "rope_scaling": None,
            "rope_theta": shape.rope_theta, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "vocab_size": shape.vocab_size,
        }  # fmt: skip


class Medusa(nn.Module):
    """Head i guesses the token i + 1 places behind the next one, from the last state alone. Cai et al., 2401.10774."""

    def __init__(self, target: Llama) -> None:
        super().__init__()
        self.shape = target.shape
        width = target.shape.hidden_size
        self.heads = nn.ModuleList(CastLinear(width, width) for _ in range(N_MEDUSA))
        for head in self.heads:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def loss(self, target: Llama, tokens: Tensor) -> Tensor:
        """Sum over the rows' tokens and heads of the divergence."""
        hidden, log_p = _imitated(target, tokens)
        weight = target.model.embed_tokens.weight.to(hidden.dtype)
        n = tokens.shape[1] - N_MEDUSA
        total = torch.zeros(())
        for i, head in enumerate(self.heads, start=1):
            x = hidden[:, :n]
            x = x + F.silu(F.linear(x, head.weight.to(x.dtype), head.bias.to(x.dtype)))
            log_q = F.log_softmax(F.linear(x, weight).float(), dim=-1)
            total = total + 0.8 ** (i - 1) * F.kl_div(log_q, log_p[:, i : i + n], log_target=True, reduction="sum")
        return total

    def tensors(self) -> dict[str, Tensor]:
        """By the names of published Medusa checkpoints: head, block, then its linear layer."""
        named = {}
        for i, head in enumerate(self.heads):
            named |= {f"{i}.0.linear.weight": head.weight, f"{i}.0.linear.bias": head.bias}
        return named

    def config(self) -> dict[str, object]:
        """`original_lm_head`: the heads' states go through the model's own output projection."""
        return {
            "architectures": ["MedusaModel"], "model_type": "medusa", "medusa_num_heads": N_MEDUSA,
            "medusa_num_layers": 1, "hidden_size": self.shape.hidden_size, "vocab_size": self.shape.vocab_size,
            "original_lm_head": True, "torch_dtype": "bfloat16",
        }  # fmt: skip


KINDS = {"eagle": Eagle, "medusa": Medusa}


@torch.no_grad()
def _imitated(target: Llama, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Normed states [B,T,D] and log-probabilities [B,T,V] of the model."""
    hidden = target.hidden(tokens)
    logits = F.linear(hidden, target.model.embed_tokens.weight.to(hidden.dtype))
    return hidden, F.log_softmax(logits.float(), dim=-1)


def written_rows(model: Path, data: TrainingData, *, n_rows: int, seed: int) -> Tensor:
    """[n_rows, ROW_TOKENS] of what the model writes behind the beginnings of texts, half of it greedily."""
    rng = np.random.default_rng(seed)
    sources = (data.book_ids, data.synthetic_ids)
    prompts = []
    for i in range(n_rows):
        source = sources[i % 2]
        any_start = int(rng.integers(0, len(source) - PROMPT_TOKENS))
        start = int(rng.choice(data.synthetic_starts[:-50])) if i % 2 else any_start
        prompts.append([int(token) for token in source[start : start + PROMPT_TOKENS]])
    llm = LLM(str(model))
    rows: list[list[int]] = []
    for temperature, some in ((0.0, prompts[::2] + prompts[1::4]), (0.8, prompts[3::4])):
        params = SamplingParams(
            max_tokens=ROW_TOKENS - PROMPT_TOKENS, temperature=temperature, ignore_eos=True, seed=seed
        )
        rows += [[*done.prompt_token_ids, *done.choices[0].token_ids] for done in llm.generate(some, params)]
    return torch.tensor(rows)[torch.from_numpy(rng.permutation(len(rows)))]


def batches(data: TrainingData, written: Tensor, *, seed: int) -> Iterator[Tensor]:
    """[ROWS, ROW_TOKENS]: half text of the mixture, half written by the model."""
    sampler = Sampler(data, seed=seed)
    half, at = ROWS // 2, 0
    while True:
        texts, _ = sampler.batch(rows=ROWS - half, row_tokens=ROW_TOKENS, book_fraction=0.4)
        rows = [written[(at + k) % len(written)] for k in range(half)]
        at += half
        yield torch.cat([texts, torch.stack(rows)])


def train(
    head: Eagle | Medusa, target: Llama, rows: Iterator[Tensor], *, total_tokens: int, n_threads: int = 2
) -> float:
    """Muon for matrices, AdamW for the rest, by the schedule of the models; answers the mean loss of the last steps."""
    matrices = [p for p in head.parameters() if p.ndim == 2]
    others = [p for p in head.parameters() if p.ndim == 1]
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (torch.optim.Muon(matrices, lr=0.01, momentum=0.95, weight_decay=0.01), 0.01),
        (torch.optim.AdamW(others, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0), 0.003),
    ]
    workers = Workers(n_threads)
    step_tokens = ROWS * ROW_TOKENS
    n_steps = max(1, total_tokens // step_tokens)
    begin_s, recent = time.monotonic(), 0.0
    for step in range(n_steps):
        micro = [(tokens, tokens) for tokens in torch.split(next(rows), MICRO_ROWS)]
        loss = workers.gradients(
            lambda tokens, _: head.loss(target, tokens), [*matrices, *others], micro, n_targets=step_tokens
        )
        for optimizer, lr in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * lr_factor(step * step_tokens, total_tokens)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent = loss if step == 0 else 0.95 * recent + 0.05 * loss
        if step % 20 == 0 or step == n_steps - 1:
            print(f"step {step} of {n_steps}, loss {recent:.4f}, {time.monotonic() - begin_s:.0f} s", flush=True)
    return recent


def export_head(head: Eagle | Medusa, folder: Path) -> None:
    """Write config.json and model.safetensors (bf16)."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", head.config())
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.tensors().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main(
    kind: Annotated[str, typer.Argument(help=f"one of {', '.join(KINDS)}")],
    corpus: Annotated[Path, typer.Option(help="folder with the books as .txt")],
    export: Annotated[Path, typer.Option(help="folder to write")],
    model: Annotated[Path, typer.Option(help="the model to draft for")] = Path("src/diptych/bundled/diptych-10m"),
    work: Annotated[Path, typer.Option(help="folder for what is made on the way")] = Path("build/heads"),
    total_tokens: Annotated[int, typer.Option(help="length of the run")] = 2_000_000,
    documents: Annotated[int, typer.Option(help="synthetic documents to generate")] = 20_000,
    written: Annotated[int, typer.Option(help="rows that the model writes itself")] = 1600,
    seed: Annotated[int, typer.Option(help="of data, order and weights")] = 1,
    threads: Annotated[int, typer.Option(help="cores to use")] = 2,
) -> None:
    """Train one kind of head for a finished model."""
    torch.manual_seed(seed)
    work.mkdir(parents=True, exist_ok=True)
    shutil.copy(model / "tokenizer.json", work / "tokenizer.json")
    data = TrainingData.build(corpus, work, n_documents=documents, seed=seed)
    rows_path = work / f"written-{written}-{seed}.json"
    if not rows_path.exists():
        rows_path.write_text(json.dumps(written_rows(model, data, n_rows=written, seed=seed).tolist()))
    rows = batches(data, torch.tensor(json.loads(rows_path.read_text())), seed=seed)
    target = load_exported(model, compute_dtype=torch.bfloat16)
    head = KINDS[kind](target)
    loss = train(head, target, rows, total_tokens=total_tokens, n_threads=threads)
    export_head(head, export)
    print(f"{kind}: loss {loss:.4f} -> {export}")


if __name__ == "__main__":
    typer.run(main)
