"""Low-rank adapters in a step's price: how many parameters one has, and steps whose sequences are spread over several.

>>> from diptych.cost.tables import model_spec
>>> loras = Loras.parse("4:16")
>>> loras.parameters(model_spec("qwen2.5-1.5b"))
18464768
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.ground.bounds import Bound
from diptych.ground.errors import ConfigError
from diptych.ground.formats import rows_dtype
from diptych.ground.shape import AdapterShape, ChunkShape, StepShape
from diptych.ground.specs import QuantSpec
from diptych.models.mlp import MlpSpec
from diptych.models.spec import AttentionLayer, ModelSpec

MOST_LORAS, MOST_RANK = 4096, 4096
USUAL_RANK = 16
PLAIN_BYTES = 2.0  # of an element of A or B
# The engine keeps them in int8 over rows of int8, with a scale for each rank and each output: 84.2 MB were held for four
# adapters of rank 16 on Qwen2.5-1.5B, which have 73.9 M elements.
INT8_BYTES = 1.14


@dataclass(frozen=True, slots=True, kw_only=True)
class Loras:
    """So many adapters of one rank, on every projection of attention and of dense MLPs; requests have them in turn."""

    count: int
    rank: int = USUAL_RANK

    def __post_init__(self) -> None:
        """Refuse impossible numbers."""
        Bound(int, 1, MOST_LORAS, "adapters").take("--lora", self.count, ConfigError)
        Bound(int, 1, MOST_RANK, "rank of an adapter").take("the rank in --lora", self.rank, ConfigError)

    @classmethod
    def parse(cls, text: str) -> Loras:
        """From "4" or "4:64"."""
        count, has_rank, rank = text.partition(":")
        if not all(
            part.isascii() and part.isdigit() and len(part) <= 10 for part in ((count, rank) if has_rank else (count,))
        ):
            raise ConfigError(
                f"cannot read {text[:40]!r} in --lora", hint="so many adapters, and their rank: --lora 4 or --lora 4:64"
            )
        return cls(count=int(count), rank=int(rank) if has_rank else USUAL_RANK)

    def __str__(self) -> str:
        """In words."""
        return f"{self.count} adapter{'s' if self.count > 1 else ''} of rank {self.rank}"

    def parameters(self, model: ModelSpec) -> int:
        """Elements of all A and B of one of them: rank times inputs and outputs of every projection."""
        return self.rank * sum(n * sum(_ends(model, layer.attention, layer.mlp)) for layer, n in model.layer_groups)

    def shape(self, model: ModelSpec, number: int) -> AdapterShape:
        """That of a request: they have them in turn."""
        return AdapterShape(number % self.count, self.parameters(model))

    def spread(self, model: ModelSpec, work: StepShape) -> StepShape:
        """The step with its sequences dealt over the adapters."""
        chunks: list[ChunkShape] = []
        first = 0
        for chunk in work.shapes:
            for turn in range(min(self.count, chunk.count)):
                count = len(range(turn, chunk.count, self.count))
                chunks.append(chunk._replace(count=count, adapter=self.shape(model, first + turn)))
            first += chunk.count
        return StepShape(chunks)


def adapter_parameters(work: StepShape) -> int:
    """Elements of A and B that a step reads: each of its adapters once."""
    return sum([one.parameters for one in work.adapters])


def adapter_bytes(quant: QuantSpec, *, is_ours: bool) -> float:
    """Bytes of an element of A or B; is_ours: as Diptych's engine keeps them."""
    return INT8_BYTES if is_ours and rows_dtype(quant.compute) == "int8" else PLAIN_BYTES


def _ends(model: ModelSpec, attention: AttentionLayer, mlp: object) -> list[int]:
    """Inputs and outputs of the projections of one layer that an adapter may have."""
    hidden, mla, state = model.hidden, attention.mla, attention.state
    if attention.is_absent:
        ends = []
    elif attention.beside:  # weights that layers share: none is attached to them
        return [2 * hidden]
    elif state is not None:
        gate = [hidden + state.rank, state.rank + state.gate_width] if state.rank else [hidden + state.gate_width]
        if state.is_selective and state.n_key_heads == 1:  # and what makes steps, keys and queries
            gate = [hidden + state.gate_width, state.width + state.rank + state.n_rates, state.rank + state.width]
        ends = [hidden + state.n_inputs, *gate, state.width + hidden]
    elif mla is None:
        q, n_kv = attention.n_heads * attention.head_dim, attention.own_kv_heads
        of_kv = 2 * hidden + attention.kv_width if n_kv else 0
        # the gate of heads lies behind q; where it is a tensor of its own, hidden inputs of it are not counted
        ends = [hidden + q + attention.gate_width, of_kv, attention.width + hidden]
    else:
        q, kv = attention.n_heads * (mla.nope_dim + mla.rope_dim), attention.n_heads * (mla.nope_dim + mla.v_dim)
        ends = (
            [hidden + q]
            if mla.q_rank is None
            else [hidden + mla.q_rank, mla.q_inputs + q + mla.is_mixed * attention.gate_width]
        )
        ends += [] if mla.is_mixed or not attention.has_gate else [hidden + attention.gate_width]
        ends += [attention.keeps_kv * (hidden + mla.row), attention.n_heads * mla.v_dim + hidden]
        # of groups of heads nothing is adapted; values and gates of entries are two projections
        ends += [] if mla.n_groups else [mla.kv_rank + kv]
        own = attention.own_index
        of_index = [] if own is None or own.entries is None else [(own.entries, own.head_dim)]
        of_rows = [] if attention.entries is None else [(attention.entries, mla.row)]
        ends += [2 * (hidden + entries.n_series * width) for entries, width in (*of_rows, *of_index)]
    if attention.own_index is not None and not attention.own_index.by_means:  # its queries alone
        n_inputs = hidden if mla is None or mla.q_rank is None else mla.q_rank
        ends.append(n_inputs + attention.own_index.n_heads * attention.own_index.head_dim)
    if isinstance(mlp, MlpSpec):
        ends.append((3 if mlp.is_gated else 2) * (hidden + mlp.ffn))
    return ends
