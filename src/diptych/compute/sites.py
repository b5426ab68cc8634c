"""Where adapters may be attached to a model: its projections by their modules' names, whatever files and classes call them.

    sites = Sites()
    sites.note(parts, linear)      # by a loader, with each projection that it takes
    sites.fit(adapter)             # [(site, what is added there), ..]

An adapter that does not fit is refused by the module's name and shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from safetensors import safe_open

from diptych.compute.adapters import WEIGHTS_FILE, Adapter, LowRank
from diptych.compute.loading.views import ScaledTensor
from diptych.compute.ops.contract import LinearParts, WeightTensor
from diptych.ground.errors import LoadError
from diptych.models.families.encoders import ENCODERS
from diptych.models.families.table import AROUND_WRAPPED, WRAPPED_PREFIXES

HEADS = ("lm_head", "embed_out", "output_projection", "decoder")  # what classes call it, by one or the other
COMPARED_ROWS = 4096  # of the head at one time
# of all rows, or of some that a view picks; files of Phi-4-multimodal hold adapters of their own beside it
_WEIGHT = re.compile(r"(\.base_layer)?\.weight(\[\d+\.\.\])?$")
# what a class in transformers calls its modules -> how their tensors are called in files
_IN_FILES = (
    (".self_attn.g_proj", ".self_attn.gate_proj"),  # LFM3
    (".gate_proj", ".linear_gate"),  # HY V4
    # Hunyuan 3, Laguna, Step 3.7
    *((".mlp.shared_experts.", theirs) for theirs in (".mlp.shared_mlp.", ".mlp.shared_expert.", ".share_expert.")),
    (".forget_gate.", "."), (".mlp.", ".block_sparse_moe."),  # Kimi Linear
    (".self_attn.indexer.", ".self_attn.index_"),  # MiniMax M3
    (".self_attn.forget_gate.", ".attention."), (".self_attn.o_proj", ".attention.dense"),  # Ling 3.0
    (".self_attn.", ".attention."),
    # DeepSeek V4
    (".self_attn.q_a_proj", ".attn.wq_a"), (".self_attn.q_b_proj", ".attn.wq_b"), (".self_attn.kv_proj", ".attn.wkv"),
    (".self_attn.o_b_proj", ".attn.wo_b"), (".self_attn.compressor.indexer.q_b_proj", ".attn.indexer.wq_b"),
    *((f".self_attn.compressor.{ours}{one}_proj", f".attn.{theirs}compressor.w{one}")
      for ours, theirs in (("", ""), ("indexer.", "indexer.")) for one in ("kv", "gate")),
    *((f".mlp.shared_experts.{ours}_proj", f".ffn.shared_experts.{theirs}")
      for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))),
    # Mistral Large 4
    (".self_attn.q_proj", ".attention.wq"), (".self_attn.o_proj", ".attention.wo"),
    (".self_attn.kv_a_proj_with_mqa", ".attention.wkv_a_with_mqa"),
    *((f".mlp.{before}{ours}_proj", f".{before or 'feed_forward.'}{theirs}") for before in ("", "shared_experts.")
      for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))),
    # encoders: Jina 3, Nomic
    (".self_attn.o_proj", ".mixer.out_proj"), (".self_attn.o_proj", ".attn.out_proj"),
    (".mlp.gate_proj", ".mlp.fc12"), (".mlp.up_proj", ".mlp.fc11"), (".mlp.down_proj", ".mlp.fc2"),
)  # fmt: skip
# what classes have apart, what files have it in, and which part of that it is: of heads, of gate and up, or of what reads a
# state's input, whose last two, betas and decays, are as many each
_IN_ONE = (
    *((f".self_attn.{part}_proj", f".{whole}", i) for i, part in enumerate("qkv")
      for whole in ("attention.query_key_value", "attention.qkv_proj", "mixer.Wqkv", "attn.Wqkv")),
    *((f".mlp.{part}_proj", ".mlp.up_gate_proj", i) for i, part in enumerate(("gate", "up"))),
    *((f".linear_attn.in_proj_{part}", ".linear_attn.in_proj", i) for i, part in enumerate(("qkv", "z", "b", "a"))),
)  # fmt: skip
# what classes have before the names of layers, whatever the files call it: of decoders, and of wrappers around them
_BEFORE_LAYERS = {"", "model.", "transformer.", *WRAPPED_PREFIXES, *(f"{around}model." for around in AROUND_WRAPPED)}
# what heads around encoders have before the names of those
_BEFORE_ENCODERS = sorted({prefix for family in ENCODERS for prefix in family.prefixes})
# layers are called so in files and classes; a class may say it otherwise than the file
_LAYERS = re.compile(r"(?:^|\.)((?:layers|layer|block|h)\.\d.*)")
_EXPERT = re.compile(r"(?P<layer>(?:^|.*\.)layers\.\d+)\..*experts(?:\.base_layer)*\[(?P<number>\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an adapter may be attached: outputs [begin, end) of a projection, a module of the checkpoint or some of its rows.

    linear: the backend's handle of the projection. row_order: which row of the checkpoint's each output is, where they were
    put in another order, or repeated, or others are read by another projection.
    """

    linear: Any
    begin: int
    end: int
    n_inputs: int
    row_order: torch.Tensor | None = None

    @property
    def n_outputs(self) -> int:
        """Here: of the module's."""
        return self.end - self.begin

    @property
    def n_rows(self) -> int:
        """Of the checkpoint's that are here, however often."""
        return self.n_outputs if self.row_order is None else len(self.row_order.unique())

    @property
    def order(self) -> torch.Tensor:
        """Which row of the checkpoint's each output is."""
        return torch.arange(self.n_outputs) if self.row_order is None else self.row_order

    def of(self, low_rank: LowRank) -> LowRank:
        """What an adapter of the module adds here."""
        order = self.row_order
        return low_rank if order is None else replace(low_rank, b=low_rank.b[order].contiguous())


class Sites:
    """The sites of a model by their modules' names, noted by a loader as it takes the projections."""

    def __init__(self) -> None:
        self._by_module: dict[str, list[Site]] = {}  # more than one where its outputs are read apart
        self._head: WeightTensor | None = None
        # (layer, expert) -> modules of gate and up, of down
        self._of_experts: dict[tuple[str, int], list[list[str]]] = {}
        self._shared: set[str] = set()  # what layers call modules that several of them have
        self.has_multiplied = False  # as `Blueprint` has it

    def note(self, parts: LinearParts, linear: object, *, module: str | None = None) -> list[str]:
        """The tensors of a projection are its modules, stacked along the outputs; answers their names.

        module: the name of the only one, where its tensor has another.
        """
        begin = 0
        names = []
        for tensor in parts.weights:
            end = begin + tensor.shape[0]
            names.append(module or _WEIGHT.sub("", tensor.name))
            role = getattr(linear, "role", None)
            if role is not None and role.is_shared:
                self._shared.add(_in_layer(names[-1]))
            elif not isinstance(tensor, ScaledTensor):  # where what an adapter adds would have to be multiplied, too
                self._by_module.setdefault(names[-1], []).append(
                    Site(linear=linear, begin=begin, end=end, n_inputs=tensor.shape[1], row_order=tensor.row_order)
                )
            begin = end
        return names

    def note_head(self, tensor: WeightTensor, linear: object) -> None:
        """The output projection, which may be the embedding."""
        self._head = tensor
        self.note(LinearParts(weights=(tensor,)), linear, module=HEADS[0])

    def note_expert(self, number: int, gate_up: tuple[LinearParts, object], down: tuple[LinearParts, object]) -> None:
        """Both projections of an expert, with their handles."""
        for parts, linear in (gate_up, down):
            names = self.note(parts, linear)
            layer = re.match(r"(?:.*\.)?(layers\.\d+)\.", names[0])
            if layer is not None:
                self._of_experts.setdefault((layer[1], number), []).append(names)

    def fit(self, adapter: Adapter) -> list[tuple[Site, LowRank]]:
        """Each module of the adapter at its site. LoadError, by name and shape, where one has none or another shape."""
        if self.has_multiplied:
            raise LoadError(
                f"adapter {adapter.path} does not fit weights that a converter has multiplied by the model's multipliers",
                hint="load the checkpoint that the GGUF file was made from",
            )
        if adapter.head_copy is not None:
            self._check_head(adapter, adapter.head_copy)
        tails = {_known(_tail(module)): module for module in self._by_module}
        prefixes = _BEFORE_LAYERS | {module.removesuffix(_tail(module)) for module in self._by_module}
        bare = {one.removeprefix(before) for one in prefixes for before in _BEFORE_ENCODERS}
        prefixes |= bare | {f"{before}{one}" for one in bare for before in _BEFORE_ENCODERS}
        fitted: dict[str, list[tuple[Site, LowRank]]] = {}
        for module, low_rank in self._of_modules(adapter, tails):
            own = module if module in HEADS else _tail(module)
            tail = HEADS[0] if module in HEADS else _known(own)
            name = _in_file(tail, tails)
            sites = self._part(tail, tails) if name is None else self._by_module[name]
            name = name or tail
            if not sites or name in fitted or module.removesuffix(own) not in prefixes:
                self._refuse(adapter, module)
            n_outputs, n_inputs = sum(site.n_rows for site in sites), sites[0].n_inputs
            if low_rank.b.shape[0] != n_outputs or low_rank.a.shape[1] != n_inputs:
                raise LoadError(
                    f"adapter {adapter.path} has lora_A {list(low_rank.a.shape)} and lora_B {list(low_rank.b.shape)} for "
                    f"{module}; the model's weight there is [{n_outputs}, {n_inputs}]",
                    hint="the adapter was trained on another model",
                )
            fitted[name] = [(site, site.of(low_rank)) for site in sites]
        return [one for some in fitted.values() for one in some]

    def _part(self, tail: str, tails: Mapping[str, str]) -> list[Site]:
        """Of what a class has apart and the checkpoint in one: its rows as a site of their own. None where there is no such
        module, or its rows lie in another order (GPT-NeoX's by head).
        """
        for ending, joined, number in _IN_ONE:
            found = self._by_module.get(tails.get(tail.removesuffix(ending) + joined, ""), [])
            if not tail.endswith(ending) or not found:
                continue
            sites = sorted(found, key=lambda one: int(one.order[0]))
            if len(sites) == 1:
                widths = [n for _, n in sites[0].linear.role.sites]
            else:
                widths = [site.n_outputs for site in sites]
                widths[-1:] = [widths[-1] // 2] * 2
            if number >= len(widths):
                return []
            first, width = sum(widths[:number]), widths[number]
            rows = torch.cat([site.order for site in sites])[first : first + width]
            is_in_order = torch.equal(rows, torch.arange(width) + rows[0])
            return _cut(sites, first, width) if is_in_order else []
        return []

    def _check_head(self, adapter: Adapter, name: str) -> None:
        """Refuse an adapter whose file brings another head than the model's."""
        head: WeightTensor | None = getattr(self._head, "plain", self._head)  # as the file has it, not balanced
        assert head is not None, "every model has a head"
        with safe_open(str(adapter.path / WEIGHTS_FILE), framework="pt") as file:
            copy = file.get_slice(name)
            is_same = list(copy.get_shape()) == list(head.shape)
            for begin in range(0, head.shape[0] if is_same else 0, COMPARED_ROWS):
                rows = slice(begin, begin + COMPARED_ROWS)
                own = head.part(rows, head.shape[1])
                is_same = is_same and bool((copy[rows].to(own.dtype) == own).all())
        if not is_same:
            raise LoadError(
                f"adapter {adapter.path} brings {name}, which is not the model's own head",
                hint="the adapter was trained on another model, or the head was trained too",
            )

    def _of_modules(self, adapter: Adapter, tails: Mapping[str, str]) -> Iterator[tuple[str, LowRank]]:
        """The adapter's parts by module of the checkpoint: of an expert in a stack, by the shapes of its projections."""
        for module, low_rank in adapter.modules.items():
            found = _EXPERT.fullmatch(module)
            if found is None:
                yield from _apart(module, low_rank, tails)
                continue
            prefix, _, layer = found["layer"].rpartition("layers.")
            shape = [len(low_rank.b), low_rank.a.shape[1]]
            projections = self._of_experts.get((f"layers.{layer}", int(found["number"])), [])
            shapes = {}
            for names in projections:
                sites = [site for name in names for site in self._by_module[name]]
                shapes[names[0]] = [sum(site.n_outputs for site in sites), sites[0].n_inputs]
            modules = next((names for names in projections if shapes[names[0]] == shape), [])
            if not modules:
                raise LoadError(
                    f"adapter {adapter.path} has an expert {module} of shape {shape}; the model's experts there have "
                    + (" and ".join(str(one) for one in shapes.values()) or "none of that number"),
                    hint="the adapter was trained on another model",
                )
            for name in modules:
                (site,) = self._by_module[name]
                yield f"{prefix}{_tail(name)}", replace(low_rank, b=low_rank.b[site.begin : site.end].contiguous())

    def _refuse(self, adapter: Adapter, module: str) -> NoReturn:
        if _in_layer(module) in self._shared:
            raise LoadError(
                f"adapter {adapter.path} adapts {module}, whose weights several layers share; one that a layer has of its own "
                "cannot be attached to them"
            )
        kinds = sorted({one.partition("[")[0].rpartition(".")[2] for one in self._by_module})
        raise LoadError(
            f"adapter {adapter.path} adapts {module}, which this model does not have, cannot adapt, or has been given already",
            hint=f"what can be adapted in its {len(self._by_module)} modules: {', '.join(kinds)}",
        )


def _in_file(tail: str, tails: Mapping[str, str]) -> str | None:
    """The checkpoint's module of that name, or of what files call it. tails: of its modules."""
    by_other_names = (tails.get(tail.replace(*one)) for one in _IN_FILES)
    return tails.get(tail) or next((one for one in by_other_names if one is not None), None)


def _apart(module: str, low_rank: LowRank, tails: Mapping[str, str]) -> Iterator[tuple[str, LowRank]]:
    """A module, or the two that the checkpoint has of what a class has in one (MiniMax M3's gate and up)."""
    halves = [module.replace(".gate_up_proj", f".{one}_proj") for one in ("gate", "up")]
    n_rows = len(low_rank.b)
    is_one, are_two = (all(_in_file(_known(_tail(one)), tails) for one in names) for names in ([module], halves))
    if n_rows % 2 or is_one or not are_two:
        yield module, low_rank
        return
    for half, b in zip(halves, low_rank.b.chunk(2), strict=True):
        yield half, replace(low_rank, b=b.contiguous())


def _cut(sites: Sequence[Site], first: int, n_rows: int) -> list[Site]:
    """Rows of a module in the order of its sites, as a site of their own."""
    for site in sites:
        if first < site.n_outputs:
            begin = site.begin + first
            return [replace(site, begin=begin, end=begin + n_rows, row_order=None)]
        first -= site.n_outputs
    return []


def _in_layer(module: str) -> str:
    """What a layer calls it."""
    return re.sub(r"^(?:layers|h)\.\d+\.", "", _tail(module))


def _tail(module: str) -> str:
    """A module's name from its layers on, which a wrapper around the language model does not change."""
    found = _LAYERS.search(module)
    return module if found is None else found[1]


def _known(tail: str) -> str:
    """The same, whatever layers are called."""
    return re.sub(r"^(?:layer|block|h)\.", "layers.", tail)


def by_linear(
    fitted: Iterable[tuple[Site, LowRank]], number: Callable[[Any], int]
) -> dict[int, list[tuple[Site, LowRank]]]:
    """The fitted modules of each projection in the order of their outputs, by a number of its handle."""
    found: dict[int, list[tuple[Site, LowRank]]] = {}
    for site, low_rank in fitted:
        found.setdefault(number(site.linear), []).append((site, low_rank))
    for several in found.values():
        several.sort(key=lambda one: one[0].begin)
    return found
