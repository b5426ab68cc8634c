"""Our kernels on a GPU beside torch's, in microseconds: products over tiles, over weights in codes, experts, attention,
latent attention.

    python benchmarks/gpu_kernels.py products codes attention latents experts

Each is launched over several copies of its weights, more than the L2 holds, from a recorded graph: the best of four replays.
`products` times every tile of TILES, to choose `tile_of` by, and says where one has other bits than the first; `codes` those
of CODED_TILES for weights in 4 and 8 bits, to choose `coded_tile_of` by, and beyond SOME rows what writing the values takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch

from diptych.compute.ops.gpu import products
from diptych.compute.ops.gpu.attention import attend, item_tokens
from diptych.compute.ops.gpu.latents import attend_latents, multiply_heads
from diptych.compute.ops.torch.device_codes import CodedWeight
from diptych.ground.formats import OFFSET_GRIDS, DeviceFormat

# outputs and inputs of a layer of Llama 3.1 8B and of Qwen2.5 0.5B; a gate has twice the rows
LAYERS = {
    "8B qkv": (6144, 4096, False), "8B o": (4096, 4096, False), "8B gate": (14336, 4096, True),
    "8B down": (4096, 14336, False), "0.5B qkv": (1152, 896, False), "0.5B gate": (4864, 896, True),
    "0.5B down": (896, 4864, False),
}  # fmt: skip
ROWS = (1, 16, 24, 128, 256, 512, 2048)
TILES = [
    (16, 64, 128, 4, 5), (16, 32, 256, 4, 4), (16, 32, 128, 4, 5), (16, 16, 512, 2, 3), (64, 64, 128, 4, 4),
    (64, 32, 128, 4, 5), (64, 16, 128, 4, 5), (64, 128, 64, 4, 4), (128, 64, 64, 4, 5), (128, 128, 64, 8, 4),
    (256, 128, 64, 8, 3),
]  # fmt: skip
CODED_TILES = [
    (16, 64, 4, 4),
    (16, 32, 4, 4),
    (16, 32, 4, 6),
    (16, 32, 4, 8),
    (16, 128, 8, 4),
    (32, 64, 4, 4),
    (32, 128, 8, 3),
]
CODED_ROWS = (1, 8, 16, 32, 64, 128, 512, 2048)
CODES = ("gpu4-g128-f16-zeros", "gpu4-g32-s8-minima", "gpu8-g32-f16", "gpu8-g128-f32-e4m3")
HEADS = {"8B": (32, 8, 128), "0.5B": (14, 2, 64)}
CHUNKS = [(1, 512, 1), (1, 4096, 1), (1, 32768, 1), (64, 2048, 1), (1, 512, 512), (1, 2048, 2048), (1, 8192, 2048)]
# heads, width of a head's key without positions and of its value; latents of 512 and 64 that turn
LATENT_HEADS = {"V2-Lite": (16, 128, 128), "GLM-4.7-Flash": (20, 192, 256), "V3": (128, 128, 128)}
RANK, TURNED = 512, 64
MIXTURES = {"128 of 768, 8 chosen": (128, 8, 2048, 768), "32 of 2,880, 4 chosen": (32, 4, 2880, 2880)}


def best_s(work: Callable[[], object]) -> float:
    """Of four replays."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times_s = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_s.append(begin.elapsed_time(end) / 1e3)
    return min(times_s[1:])


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """In bf16 on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


def time_products() -> Iterator[str]:
    """Every layer and number of rows."""
    for name, (n, k, is_gate) in LAYERS.items():
        full = 2 * n if is_gate else n
        copies = [random(full, k, scale=k**-0.5) for _ in range(max(1, min(24, int(3e8 // (full * k * 2)))))]
        for rows in ROWS:
            yield f"{name}, {rows} rows: {product_times(random(rows, k), copies, is_gate)}"


def product_times(x: torch.Tensor, copies: list[torch.Tensor], is_gate: bool) -> str:
    """By cuBLAS, and by each tile that has room for the rows."""
    kind = 1 if is_gate else products.PLAIN
    rows, found, first = len(x), [], None
    theirs_s = best_s(lambda: [x @ weight.T for weight in copies]) / len(copies)
    for tile in TILES:
        if (rows > 16 and tile[0] == 16) or (rows <= 64 and tile[0] > 64) or (is_gate and tile[0] > 128):
            continue
        products.tile_of = lambda *sizes, is_gate, tile=tile: tile
        ours_s = best_s(lambda: [products.multiply(x, weight, kind=kind) for weight in copies]) / len(copies)
        y = products.multiply(x, copies[0], kind=kind)
        first = y if first is None else first
        found.append((ours_s, tile, "" if torch.equal(first, y) else " OTHER BITS"))
    best = "; ".join(f"{s * 1e6:.1f} {tile}{other}" for s, tile, other in sorted(found)[:4])
    return f"cuBLAS {theirs_s * 1e6:.1f}; {best}"


def random_codes(n: int, k: int, name: str) -> CodedWeight:
    """Every code alike often, with scales that leave products of order one."""
    form = DeviceFormat.named(name)
    words = torch.randint(-(2**31), 2**31, (n, -(-k // form.inputs) * 32), device="cuda", dtype=torch.int32)
    shape = (words.shape[1] * 32 // form.bits // form.group, n)
    if form.scale == "s8":
        of_each = torch.tensor([k**-0.5 / 256, -(k**-0.5) / 32], device="cuda", dtype=torch.float16)
        factors = of_each.view(torch.int32).expand(shape[0] * form.group // 256, n).contiguous()
        return CodedWeight(words, in_twos(random_scales(shape, torch.int16)), factors, form, k)
    scales = random_scales(shape, torch.float32 if form.scale == "f32" else torch.float16) * (
        8 / (1 << form.bits) * k**-0.5
    )
    if form.grid in OFFSET_GRIDS:
        pairs = torch.stack((scales, torch.full_like(scales, 7.0)), -1)
        return CodedWeight(words, pairs.view(torch.int32)[..., 0], None, form, k)
    return CodedWeight(words, scales if form.scale == "f32" else in_twos(scales), None, form, k)


def in_twos(heads: torch.Tensor) -> torch.Tensor:
    """Those of two groups in a word."""
    return torch.stack((heads[::2], heads[1::2]), -1).view(torch.int32)[..., 0]


def random_scales(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Around a fifth; of whole numbers two of 6 bits."""
    if dtype == torch.int16:
        return torch.randint(1, 64, shape, device="cuda", dtype=dtype) * 257
    return (0.15 + 0.1 * torch.rand(shape, device="cuda")).to(dtype)


def time_codes() -> Iterator[str]:
    """Layers of 8B in bf16, and in codes by every tile."""
    for name, (n, k, is_gate) in LAYERS.items():
        if not name.startswith("8B"):
            continue
        full, kind = 2 * n if is_gate else n, 1 if is_gate else products.PLAIN
        plain = [random(full, k, scale=k**-0.5) for _ in range(max(1, int(3e8 // (full * k * 2))))]
        coded = {one: [random_codes(full, k, one) for _ in range(max(1, int(3e8 // (full * k // 2))))] for one in CODES}
        for rows in CODED_ROWS:
            x = random(rows, k)
            s = best_s(
                lambda x=x, plain=plain, kind=kind: [products.multiply(x, one, kind=kind) for one in plain]
            ) / len(plain)
            yield f"{name}, {rows} rows: bf16 {s * 1e6:.1f}, {plain[0].nbytes / s / 1e9:.0f} GB/s"
            for one, copies in coded.items():
                yield f"{name}, {rows} rows: {one} {coded_times(x, copies, is_gate)}"


def coded_times(x: torch.Tensor, copies: list[CodedWeight], is_gate: bool) -> str:
    """By the tile that is chosen, and by each."""
    kind, rows, chosen = 1 if is_gate else products.PLAIN, len(x), products.coded_tile_of
    bits, found, first = copies[0].format.bits, [], products.multiply(x, copies[0], kind=kind)

    def measured_s() -> float:
        return best_s(lambda: [products.multiply(x, weight, kind=kind) for weight in copies]) / len(copies)

    ours_s = measured_s()
    for bm, bn, warps, stages in CODED_TILES if rows <= products.SOME else ():
        if (rows > 16) != (bm > 16):
            continue
        tile = (bm, bn, 1024 // bits, warps, stages)
        products.coded_tile_of = lambda *sizes, tile=tile: tile
        other = "" if torch.equal(first, products.multiply(x, copies[0], kind=kind)) else " OTHER BITS"
        found.append((measured_s(), tile, other))
    products.coded_tile_of = chosen
    best = "; ".join(f"{s * 1e6:.1f} {tile}{other}" for s, tile, other in sorted(found)[:4])
    return f"{ours_s * 1e6:.1f}, {copies[0].nbytes / ours_s / 1e9:.0f} GB/s; {best}"


def time_attention() -> Iterator[str]:
    """Over a scattered cache, beside torch's over a dense one."""
    for name, heads in HEADS.items():
        for batch, context, new in CHUNKS:
            yield f"{name} heads, {batch} x {new} behind {context}: {attention_times(*heads, batch, context, new)}"


def attention_times(heads: int, kv_heads: int, d: int, batch: int, context: int, new: int) -> str:
    """Of one step."""
    table = scattered(batch, context)
    pool = random(2, table.numel() * 32, kv_heads, d)
    q, out = random(batch * new, heads, d), random(batch * new, heads * d)
    size = item_tokens(heads // kv_heads) if new > 1 else 1
    on_it = items_of(batch, context, new, size)
    dense = [plane.view(batch, -1, kv_heads, d).transpose(1, 2) for plane in pool]
    queries = q.view(batch, new, heads, d).transpose(1, 2)

    def ours() -> None:
        attend(
            q, pool[0], pool[1], out, on_it, table, block_tokens=32, most_rows=size, most_tokens=context,
            scale=d**-0.5, window=None, is_chunked=False, softcap=None, sinks=None,
        )  # fmt: skip

    def theirs() -> None:
        torch.nn.functional.scaled_dot_product_attention(queries, *dense, is_causal=new == context, enable_gqa=True)

    ours_s, theirs_s = best_s(ours), best_s(theirs)
    gb = 2 * batch * context * kv_heads * d * 2 / 1e9
    tflop = 4 * batch * heads * d * (new * context - new * (new - 1) / 2) / 1e12
    rates = f"{gb / ours_s:.0f} GB/s, {tflop / ours_s:.0f} TFLOP/s"
    return f"{ours_s * 1e6:.1f}, torch {theirs_s * 1e6:.1f}; {rates}"


def scattered(batch: int, context: int) -> torch.Tensor:
    """The table of contexts in blocks of 32."""
    n_blocks = -(-context // 32)
    return torch.randperm(batch * n_blocks, device="cuda").view(batch, n_blocks)


def items_of(batch: int, context: int, new: int, size: int) -> torch.Tensor:
    """As a step has them, of `size` tokens at most."""
    items = [
        (s, s * new + row, min(size, new - row), context - new + row)
        for row in reversed(range(0, new, size))
        for s in range(batch)
    ]
    return torch.tensor(items, device="cuda")


def time_latents() -> Iterator[str]:
    """Over a scattered cache; and what takes queries to the latents and outputs out of them."""
    for name, (heads, nope, value) in LATENT_HEADS.items():
        keys, values = random(heads, RANK, nope, scale=nope**-0.5), random(heads, value, RANK, scale=RANK**-0.5)
        for rows in ROWS:
            q, a = random(rows, heads, nope + TURNED), random(rows, heads, RANK)
            cos, sin = torch.rand(2, rows, TURNED // 2, device="cuda")
            into_s = best_s(partial(multiply_heads, q, keys, turn=(cos, sin)))
            from_s = best_s(partial(multiply_heads, a, values))
            yield f"{name}, {rows} rows: into latents {into_s * 1e6:.1f}, out of them {from_s * 1e6:.1f}"
        for batch, context, new in CHUNKS:
            yield f"{name} heads, {batch} x {new} behind {context}: {latent_times(heads, batch, context, new)}"


def latent_times(heads: int, batch: int, context: int, new: int) -> str:
    """Of one step."""
    table = scattered(batch, context)
    pool, out = random(table.numel() * 32, 1, RANK + TURNED), random(batch * new, heads * RANK)
    q = random(batch * new, heads, RANK + TURNED)
    size = item_tokens(heads) if new > 1 else 1
    on_it = items_of(batch, context, new, size)

    def ours() -> None:
        attend_latents(
            q, pool, out, on_it, table, rank=RANK, block_tokens=32, most_rows=size, most_tokens=context, scale=0.1
        )

    ours_s = best_s(ours)
    gb = batch * context * (RANK + TURNED) * 2 / 1e9
    tflop = 2 * (2 * RANK + TURNED) * batch * heads * (new * context - new * (new - 1) / 2) / 1e12
    return f"{ours_s * 1e6:.1f}; {gb / ours_s:.0f} GB/s, {tflop / ours_s:.0f} TFLOP/s"


def time_experts() -> Iterator[str]:
    """Routed at random."""
    for name, (n_experts, top, d, f) in MIXTURES.items():
        first, second = random(n_experts, 2 * f, d, scale=d**-0.5), random(n_experts, d, f, scale=f**-0.5)
        for rows in (1, 8, 64, 512, 2048):
            yield f"{name}, {rows} rows: {expert_times(rows, top, first, second)}"


def expert_times(rows: int, top: int, first: torch.Tensor, second: torch.Tensor) -> str:
    """Of one step."""
    n_experts, d, f = second.shape
    chosen = torch.rand(rows, n_experts, device="cuda").topk(top).indices
    weights, x = torch.full((rows, top), 1 / top, device="cuda"), random(rows, d)
    ours_s = best_s(lambda: products.mix(x, (first, None), (second, None), chosen, weights, kind=1))
    gb, tflop = len(chosen.unique()) * 6 * d * f / 1e9, 6 * rows * top * d * f / 1e12
    return f"{ours_s * 1e6:.1f}; {gb / ours_s:.0f} GB/s, {tflop / ours_s:.0f} TFLOP/s"


def main() -> None:
    """Print a line for each."""
    timed = {
        "products": time_products,
        "codes": time_codes,
        "attention": time_attention,
        "latents": time_latents,
        "experts": time_experts,
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="+", choices=timed)
    for what in parser.parse_args().what:
        for line in timed[what]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
