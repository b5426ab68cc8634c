"""A Hugging Face checkpoint of the llama or qwen2 family as an OpenVINO model with a KV cache inside, without torch.

The graph has the form that exporters write for OpenVINO (stateful, one attention op, rotary and norm in the patterns its
CPU plugin fuses). Runs in the peers' environment, so it imports nothing of Diptych.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

INT4_GROUP = 128  # the default of OpenVINO's weight compression


class SafeTensors:
    """One bf16 model.safetensors, mapped. Tensors come as their 16-bit patterns."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            self._header = json.loads(file.read(header_bytes))
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + header_bytes)

    def has(self, name: str) -> bool:
        """Whether the file holds a tensor of that name."""
        return name in self._header

    def bits(self, name: str) -> np.ndarray:
        """The tensor's bf16 patterns, uint16, in its shape."""
        entry = self._header[name]
        if entry["dtype"] != "BF16":
            raise ValueError(f"tensor {name} is {entry['dtype']}; this reader takes BF16 only")
        begin, end = entry["data_offsets"]
        return self._bytes[begin:end].view(np.uint16).reshape(entry["shape"])

    def float32(self, name: str) -> np.ndarray:
        """The tensor's values, exactly."""
        return (self.bits(name).astype(np.uint32) << 16).view(np.float32)


class Graph:
    """Builds the model once. weights: bf16, int8 (symmetric per output channel) or int4 (symmetric, groups of 128).

    The constants of the model lie in arrays owned here: keep the Graph as long as the model.
    """

    def __init__(self, directory: Path, weights: str) -> None:
        self._config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self._tensors = SafeTensors(directory / "model.safetensors")
        self._weights = weights
        config = self._config
        self._n_heads: int = config["num_attention_heads"]
        self._n_kv_heads: int = config["num_key_value_heads"]
        self._head_dim: int = config.get("head_dim") or config["hidden_size"] // self._n_heads
        self._sinks: list[Any] = []
        self._shared: list[np.ndarray] = []

    def build(self) -> ov.Model:
        """Inputs input_ids [B,T], position_ids [B,T], key_positions [L], beam_idx [B]; output logits [B,V] of the last T."""
        ids, positions = _input("input_ids", 2), _input("position_ids", 2)
        key_positions, beams = _input("key_positions", 1), _input("beam_idx", 1, np.int32)
        seen = ops.less_equal(key_positions, ops.unsqueeze(positions, ops.constant([1, 3])))  # [B,1,T,L]
        mask = ops.select(seen, ops.constant(np.float32(0.0)), ops.constant(np.float32(-65504.0)))
        cos, sin = self._rotary(positions)
        hidden, table = self._embed(ids)
        batch = ops.gather(ops.shape_of(ids), ops.constant([0]), ops.constant(0))
        for layer in range(self._config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            normed = self._norm(hidden, prefix + "input_layernorm.weight")
            attended = self._attention(normed, f"{prefix}self_attn.", layer, (cos, sin, mask, beams, batch))
            hidden = ops.add(hidden, attended)
            normed = self._norm(hidden, prefix + "post_attention_layernorm.weight")
            gate = ops.swish(self._linear(normed, prefix + "mlp.gate_proj"))
            gated = ops.multiply(gate, self._linear(normed, prefix + "mlp.up_proj"))
            hidden = ops.add(hidden, self._linear(gated, prefix + "mlp.down_proj"))
        last = ops.gather(hidden, ops.constant(-1), ops.constant(1))  # [B,D]: logits of the last token only
        head = "lm_head.weight" if self._tensors.has("lm_head.weight") else None
        normed = self._norm(last, "model.norm.weight")
        logits = ops.matmul(normed, self._matrix(head, keep_int8=True) if head else table, False, True)
        logits.output(0).get_tensor().set_names({"logits"})
        return ov.Model([ops.result(logits)], self._sinks, [ids, positions, key_positions, beams], "peer")

    def _embed(self, ids: Any) -> tuple[Any, Any]:
        """The rows of ids [B,T,D], and the whole table [V,D] for a tied head."""
        name = "model.embed_tokens.weight"
        rows = ops.gather(self._bf16(name), ids, ops.constant(0))
        return ops.convert(rows, np.float32), self._matrix(name, keep_int8=True)

    def _attention(self, normed: Any, prefix: str, layer: int, shared: tuple[Any, ...]) -> Any:
        cos, sin, mask, beams, batch = shared
        query = self._rotate(self._heads(self._linear(normed, prefix + "q_proj"), self._n_heads), cos, sin)
        key = self._rotate(self._heads(self._linear(normed, prefix + "k_proj"), self._n_kv_heads), cos, sin)
        value = self._heads(self._linear(normed, prefix + "v_proj"), self._n_kv_heads)
        key, value = (
            self._repeat(self._cached(now, f"past.{layer}.{kind}", beams, batch))
            for now, kind in ((key, "key"), (value, "value"))
        )
        mixed = ops.scaled_dot_product_attention(query, key, value, mask)
        flat = ops.reshape(
            ops.transpose(mixed, ops.constant([0, 2, 1, 3])), ops.constant([0, 0, self._n_heads * self._head_dim]), True
        )
        return self._linear(flat, prefix + "o_proj")

    def _heads(self, flat: Any, n_heads: int) -> Any:
        split = ops.reshape(flat, ops.constant([0, 0, n_heads, self._head_dim]), True)
        return ops.transpose(split, ops.constant([0, 2, 1, 3]))

    def _cached(self, now: Any, variable: str, beams: Any, batch: Any) -> Any:
        rest = ops.constant(np.array([self._n_kv_heads, 0, self._head_dim], dtype=np.int64))
        empty = ops.broadcast(ops.constant(np.float32(0.0)), ops.concat([batch, rest], 0))
        shape = ov.PartialShape([-1, self._n_kv_heads, -1, self._head_dim])
        past = ops.read_value(empty, variable, np.float32, shape)
        both = ops.concat([ops.gather(past, beams, ops.constant(0)), now], 2)
        self._sinks.append(ops.assign(both, variable))
        return both

    def _repeat(self, kv: Any) -> Any:
        """Each KV head beside every query head that reads it, in the form the plugin folds into its attention."""
        repeats = self._n_heads // self._n_kv_heads
        if repeats == 1:
            return kv
        wide = ops.broadcast(
            ops.unsqueeze(kv, ops.constant(2)), ops.constant([1, 1, repeats, 1, 1]), broadcast_spec="BIDIRECTIONAL"
        )
        return ops.reshape(wide, ops.constant([0, self._n_heads, -1, self._head_dim]), True)

    def _rotary(self, positions: Any) -> tuple[Any, Any]:
        """cos and sin [B,1,T,d]."""
        if self._config.get("rope_scaling"):
            raise ValueError("rope_scaling is not built here; choose a shape without it")
        exponent = np.arange(0, self._head_dim, 2, dtype=np.float64) / self._head_dim
        inverse = (1.0 / self._config.get("rope_theta", 10_000.0) ** exponent).astype(np.float32)
        steps = ops.convert(ops.unsqueeze(positions, ops.constant([1, 3])), np.float32)
        half = ops.multiply(steps, ops.constant(inverse.reshape(1, 1, 1, -1)))
        angles = ops.concat([half, half], -1)
        return ops.cos(angles), ops.sin(angles)

    def _rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        half = self._head_dim // 2
        left, right = (
            ops.slice(x, ops.constant([begin]), ops.constant([end]), ops.constant([1]), ops.constant([3]))
            for begin, end in ((0, half), (half, np.iinfo(np.int64).max))
        )
        turned = ops.concat([ops.multiply(right, ops.constant(np.float32(-1.0))), left], -1)
        return ops.add(ops.multiply(x, cos), ops.multiply(turned, sin))

    def _norm(self, x: Any, name: str) -> Any:
        mean = ops.reduce_mean(ops.power(x, ops.constant(np.float32(2.0))), ops.constant([-1]), True)
        root = ops.sqrt(ops.add(mean, ops.constant(np.float32(self._config["rms_norm_eps"]))))
        scaled = ops.multiply(x, ops.divide(ops.constant(np.float32(1.0)), root))
        return ops.multiply(scaled, ops.constant(self._tensors.float32(name)))

    def _linear(self, x: Any, name: str) -> Any:
        product = ops.matmul(x, self._matrix(f"{name}.weight"), False, True)
        if not self._tensors.has(f"{name}.bias"):
            return product
        return ops.add(product, ops.constant(self._tensors.float32(f"{name}.bias").reshape(1, 1, -1)))

    def _bf16(self, name: str) -> Any:
        bits = self._tensors.bits(name)
        return self._constant(bits, bits.shape, ov.Type.bf16)

    def _constant(self, array: np.ndarray, shape: Sequence[int], dtype: ov.Type) -> Any:
        """A constant of a type that numpy lacks. OpenVINO reads the array in place and does not keep it alive."""
        self._shared.append(array)
        return ops.constant(ov.Tensor(array, ov.Shape(list(shape)), dtype))

    def _matrix(self, name: str, *, keep_int8: bool = False) -> Any:
        """The weights [N,K] with their decompression. keep_int8: embedding and head stay int8 under int4, as exporters do."""
        if self._weights == "bf16":
            wide = ops.convert(self._bf16(name), np.float32)
            wide.get_rt_info()["decompression_0"] = ""
            return wide
        values_NK = self._tensors.float32(name)
        if self._weights == "int8" or keep_int8:
            scale_N1 = np.maximum(np.abs(values_NK).max(1, keepdims=True) / 127.0, 1e-8).astype(np.float16)
            steps = np.rint(values_NK / scale_N1.astype(np.float32)).clip(-127, 127).astype(np.int8)
            small = ops.multiply(ops.convert(ops.constant(steps), np.float16), ops.constant(scale_N1))
            return ops.convert(small, np.float32)
        return self._int4(values_NK)

    def _int4(self, values_NK: np.ndarray) -> Any:
        n, k = values_NK.shape
        group = math.gcd(k, INT4_GROUP)
        values_NGK = values_NK.reshape(n, k // group, group)
        scale = np.maximum(np.abs(values_NGK).max(2, keepdims=True) / 7.0, 1e-8).astype(np.float16)
        steps = np.rint(values_NGK / scale.astype(np.float32)).clip(-8, 7).astype(np.int8) & 0xF
        pairs = steps.reshape(-1, 2)
        packed = (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8)
        constant = self._constant(packed, (n, k // group, group), ov.Type.i4)
        small = ops.multiply(ops.convert(constant, np.float16), ops.constant(scale))
        return ops.convert(ops.reshape(small, ops.constant([n, k]), False), np.float32)


def _input(name: str, rank: int, dtype: Any = np.int64) -> Any:
    node = ops.parameter([-1] * rank, dtype, name)
    node.output(0).get_tensor().set_names({name})
    return node
