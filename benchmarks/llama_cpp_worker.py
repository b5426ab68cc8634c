"""llama.cpp as a peer (peer_worker.py says what a worker answers).

The checkpoint is written as GGUF in bf16 and quantised by llama.cpp itself, both once (kept in DIR/llama-cpp-WEIGHTS): Q8_0 for
int8, Q4_0, which it repacks for the processor, for int4, or one of its own mixtures. Batches go to `llama_decode` as its
server's do: the next token of every running sequence, then prompts as far as the batch reaches. With flash attention or without
it, and with the file mapped (its default) or read into huge pages, whichever is faster for the shape.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from peer_worker import PeerWorker, made_once, serve
from safetensors import deserialize

import llama_cpp as ll

BATCH = 2048  # tokens of one llama_decode: a prompt of any case, or the sixteen of a batch, are read whole
MICRO_BATCH = 512  # its default
CONTEXT_UNIT = 256  # a sequence's context is rounded up to this many tokens
FLASH = {"flash attention": ll.LLAMA_FLASH_ATTN_TYPE_ENABLED, "no flash attention": ll.LLAMA_FLASH_ATTN_TYPE_DISABLED}
DEFAULT, HUGE = "file mapped", "huge pages"
TUNABLE = "glibc.malloc.hugetlb=1"  # what is allocated asks for huge pages, as the system's setting `madvise` wants it
PR_SET_THP_DISABLE = 41  # linux/prctl.h
QUANTISED = {
    "int8": ll.LLAMA_FTYPE_MOSTLY_Q8_0,
    "int4": ll.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q2_k": ll.LLAMA_FTYPE_MOSTLY_Q2_K,
    "q3_k_m": ll.LLAMA_FTYPE_MOSTLY_Q3_K_M,
    "q4_k_m": ll.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q5_k_m": ll.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "q6_k": ll.LLAMA_FTYPE_MOSTLY_Q6_K,
}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
MODEL = "model.gguf"


def converted(checkpoint: Path, weights: str) -> Path:
    """The model as GGUF, made when it is missing; a file is what it is."""
    if checkpoint.is_file():
        return checkpoint

    def make(directory: Path) -> None:
        directory.mkdir()
        if weights == "bf16":
            write_gguf(checkpoint, directory / MODEL)
            return
        options = ll.llama_model_quantize_default_params()
        options.ftype = QUANTISED[weights]
        source, target = converted(checkpoint, "bf16"), directory / MODEL
        if ll.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options)) != 0:
            raise RuntimeError(f"llama.cpp does not quantise {source}")

    return made_once(checkpoint / f"llama-cpp-{weights}", make) / MODEL


def write_gguf(checkpoint: Path, path: Path) -> None:
    """A llama or qwen2 checkpoint as GGUF in bf16, without a vocabulary. KeyError for another family."""
    config = json.loads((checkpoint / "config.json").read_text())
    family, n_heads, n_layers = config["model_type"], config["num_attention_heads"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or config["hidden_size"] // n_heads
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], n_layers)
    out = gguf.GGUFWriter(path, family)
    out.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    out.add_tokenizer_model("no_vocab")
    out.add_vocab_size(config["vocab_size"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(n_layers)
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(n_heads)
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_key_length(head_dim)
    out.add_value_length(head_dim)
    out.add_rope_dimension_count(head_dim)
    out.add_rope_freq_base(config.get("rope_theta", 10000.0))
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, raw in deserialize((checkpoint / "model.safetensors").read_bytes()):
        tensor = np.frombuffer(raw["data"], np.uint16).reshape(raw["shape"])  # the bits of bf16
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            # its rotary pairs are neighbours; Hugging Face's are half a head apart
            tensor = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if tensor.ndim == 1:
            out.add_tensor(target, (tensor.astype(np.uint32) << 16).view(np.float32))
        else:
            out.add_tensor(target, tensor.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


class LlamaCpp(PeerWorker):
    """One model, and a context for the shape of work at hand."""

    ways = tuple(f"{pages}, {flash}" for pages in (DEFAULT, HUGE) for flash in FLASH)

    def __init__(self) -> None:
        self._threads = 0
        self._path = Path()
        self._models: dict[str, Any] = {}  # by the pages that hold it
        self._vocab_size = 0
        self._context: Any = None
        self._shape: tuple[object, ...] = ()
        self._batch = ll.llama_batch_init(BATCH, 0, 1)
        self._pending: list[list[int]] = []  # of each sequence: tokens that the model has not read
        self._left: list[int] = []  # of each sequence: tokens to write
        self._read: list[int] = []  # of each sequence: tokens read

    def convert(self, checkpoint: str, weights: str) -> dict[str, Any]:
        """The file that `load` would open."""
        return {"path": str(converted(Path(checkpoint), weights))}

    def load(self, checkpoint: str, weights: str, threads: int) -> dict[str, Any]:
        """Convert where needed, and load."""
        self._path = converted(Path(checkpoint), weights)
        ll.llama_backend_init()
        self._threads = threads
        self._vocab_size = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self._model(HUGE)))
        features = ll.llama_print_system_info().decode()
        own = self._path.name == MODEL  # which is called by its folder
        details = {
            "file": self._path.parent.name if own else self._path.name,
            "GLIBC_TUNABLES": TUNABLE,
            "features": features,
        }
        version = f"(llama-cpp-python {ll.__version__})"
        return {"engine": "llama.cpp", "version": version, "details": details, "ways": self.ways}

    def _model(self, pages: str) -> Any:
        if pages not in self._models:
            options = ll.llama_model_default_params()
            options.use_mmap = pages == DEFAULT
            prctl = ctypes.CDLL(None).prctl
            prctl(PR_SET_THP_DISABLE, int(pages == DEFAULT), 0, 0, 0)  # what it repacks lies in small pages, too
            model = ll.llama_model_load_from_file(str(self._path).encode(), options)
            prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0)
            if not model:
                raise RuntimeError(f"llama.cpp does not load {self._path}")
            self._models[pages] = model
        return self._models[pages]

    def logits(self, prompt: list[int], probe: list[int]) -> dict[str, Any]:
        """With flash attention."""
        self.prepare(f"{HUGE}, flash attention", [prompt], [1])
        self.begin([prompt], [1])
        self._decode([(0, len(prompt))])
        return {"logits": self._row(len(prompt) - 1)[probe].tolist()}

    def prepare(self, way: str, prompts: list[list[int]], lengths: list[int]) -> None:
        """A context as large as this work needs; the last one is kept while the work stays the same."""
        longest = max(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True))
        longest = -(-longest // CONTEXT_UNIT) * CONTEXT_UNIT
        shape = (way, len(prompts), longest)
        if shape == self._shape:
            return
        if self._context:
            ll.llama_free(self._context)
        pages, _, flash = way.partition(", ")
        options = ll.llama_context_default_params()
        options.n_ctx, options.n_seq_max = longest * len(prompts), len(prompts)
        options.n_batch, options.n_ubatch = BATCH, MICRO_BATCH
        options.n_threads = options.n_threads_batch = self._threads
        options.flash_attn_type = FLASH[flash]
        options.no_perf = True
        self._context = ll.llama_init_from_model(self._model(pages), options)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {shape}")
        self._shape = shape

    def begin(self, prompts: list[list[int]], lengths: list[int]) -> None:
        """Forget what was read."""
        ll.llama_memory_clear(ll.llama_get_memory(self._context), True)
        self._pending, self._left, self._read = [list(p) for p in prompts], list(lengths), [0] * len(prompts)

    def step(self) -> Iterator[int]:
        """One llama_decode; greedy tokens of the sequences that are read to their end."""
        room, parts = BATCH, []
        live = [number for number, left in enumerate(self._left) if left]
        for number in sorted(live, key=lambda one: len(self._pending[one]) > 1):  # running sequences before prompts
            length = min(room, len(self._pending[number]))
            if length:
                parts.append((number, length))
                room -= length
        for number, row in self._decode(parts):
            self._pending[number] = [int(self._row(row).argmax())]
            self._left[number] -= 1
            yield number

    def _decode(self, parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Read (sequence, number of tokens) parts. Of the sequences read to their end: (sequence, its row of the batch)."""
        batch, row, ends = self._batch, 0, []
        for number, length in parts:
            tokens, self._pending[number] = self._pending[number][:length], self._pending[number][length:]
            for position, token in enumerate(tokens, self._read[number]):
                batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, position, 1, 0
                batch.seq_id[row][0] = number
                row += 1
            self._read[number] += length
            if not self._pending[number]:
                batch.logits[row - 1] = 1
                ends.append((number, row - 1))
        batch.n_tokens = row
        status = ll.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {row} tokens ended with {status}")
        return ends

    def _row(self, row: int) -> np.ndarray:
        return np.ctypeslib.as_array(ll.llama_get_logits_ith(self._context, row), shape=(self._vocab_size,))


if __name__ == "__main__":
    if TUNABLE not in os.environ.get("GLIBC_TUNABLES", ""):  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "GLIBC_TUNABLES": TUNABLE})
    serve(LlamaCpp())
