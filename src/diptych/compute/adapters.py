"""LoRA adapters as `peft` writes them: read, refused by name where they are more, and fitted to a model's projections.

An adapter adds s * B (A x) to what a projection gives (arXiv 2106.09685): A [r, K], B [N, r], s = alpha / r, or alpha / sqrt(r)
with rslora. What it holds beyond that (DoRA, biases, saved modules, embeddings) changes answers, so it is refused. Of experts
each has its own A and B: as modules of their own, or all of a layer in one (`target_parameters`), which are taken apart here.

    adapter = read_adapter(Path("my-adapter"), max_rank=64)
    number = model.add_adapter(adapter)     # LoadError where it does not fit, by the module's name and shape
    model.drop_adapter(number)
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from diptych.compute.loading.finite import are_finite
from diptych.compute.loading.views import ScaledTensor
from diptych.compute.loading.weights import FLOAT_DTYPES
from diptych.compute.ops.contract import LinearParts, WeightTensor
from diptych.ground.bounds import real, shown, whole
from diptych.ground.errors import CapacityError, LoadError
from diptych.models.config import NUMBER_LIMIT, SIZE_LIMIT, read_json
from diptych.models.families.encoders import ENCODERS
from diptych.models.families.table import AROUND_WRAPPED, WRAPPED_PREFIXES

logger = logging.getLogger("diptych.compute")

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# peft writes the weight of the head itself beside an adapter of it (save_embedding_layers)
_HEAD_COPY = "lm_head.base_layer.weight"
_HEAD_BIAS = "lm_head.base_layer.bias"
HEADS = ("lm_head", "embed_out", "output_projection", "decoder")  # what classes call it, by one or the other
COMPARED_ROWS = 4096  # of the head at one time
MOST_REPEATS = 2  # of a pattern for names: more could take for ever, as could a group that is repeated
_REPEATED_GROUP = re.compile(r"\)[*+{]")
MOST_EXPERTS = 1024
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
_STACK = re.compile(r"(.*experts)((?:\.base_layer)*)")
_EXPERT = re.compile(r"(?P<layer>(?:^|.*\.)layers\.\d+)\..*experts(?:\.base_layer)*\[(?P<number>\d+)\]")

# What changes the mathematics or the base, and the values that ask for nothing. Source: peft's LoraConfig, 0.21.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM", "FEATURE_EXTRACTION"),
    "bias": ("none",),
    # others take a part of the base weights away at the start of a training, and the checkpoint here still has it
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
_READ = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_parameters")
# of the training, of its library, of how the base's weights lie (fan_in_fan_out), or said again by the tensors
_WITHOUT_EFFECT = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """What an adapter adds to one module: b (a x), a [r, K] and b [N, r] in fp32, the scale in b."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter in memory. revision: a digest of its numbers and its modules; rank: the highest of any module.

    head_copy: the tensor in its file that says what the model's head is, where there is one.
    """

    path: Path
    modules: Mapping[str, LowRank]
    rank: int
    revision: str
    head_copy: str | None = None

    @property
    def n_parameters(self) -> int:
        """Elements of all A and B."""
        return sum(one.a.numel() + one.b.numel() for one in self.modules.values())

    def told(self) -> tuple[dict[str, Any], bytes]:
        """For another process: what JSON holds, and the tensors as a safetensors file."""
        tensors = {f"{side}.{name}": getattr(one, side) for name, one in self.modules.items() for side in "ab"}
        return {"path": str(self.path), "rank": self.rank, "revision": self.revision}, save(tensors)

    @classmethod
    def heard(cls, head: Mapping[str, Any], payload: bytes) -> Adapter:
        """What `told` said."""
        tensors = load(payload)
        names = [name.removeprefix("a.") for name in tensors if name.startswith("a.")]
        modules = {name: LowRank(a=tensors[f"a.{name}"], b=tensors[f"b.{name}"]) for name in names}
        return cls(path=Path(head["path"]), modules=modules, rank=head["rank"], revision=head["revision"])


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


def read_adapter(directory: Path, *, max_rank: int) -> Adapter:
    """The adapter in a folder. LoadError for what is none, or more than LoRA; CapacityError for a higher rank."""
    if not directory.is_dir():
        raise LoadError(f"no such folder: {directory}", hint=f"an adapter is a folder with {CONFIG_FILE}")
    if not (directory / WEIGHTS_FILE).is_file():
        raise LoadError(
            f"{directory} has no {WEIGHTS_FILE}",
            hint="pickled adapters (adapter_model.bin) are not read; save it with safe_serialization",
        )
    config = read_json(directory / CONFIG_FILE)
    _check_config(config, directory)
    digest = hashlib.sha256(b"lora 1\n")
    modules: dict[str, LowRank] = {}
    stacks = bool(config.get("target_parameters"))  # then ranks of all experts may lie in one module
    most_ranks = max_rank * (MOST_EXPERTS if stacks else 1)
    for module, sides in sorted(_read_sides(directory / WEIGHTS_FILE, most_ranks, max_rank).items()):
        if set(sides) != {"A", "B"}:
            raise LoadError(f"{directory} has lora_{next(iter(sides))} of {module} alone; A and B belong together")
        a, b = sides["A"], sides["B"]
        rank, scale = _scale(config, module, directory)
        n_experts = len(a) // rank if stacks and len(a) == b.shape[1] and len(a) % rank == 0 else 1
        if rank > max_rank:
            _refuse_rank(module, directory, rank, max_rank)
        if len(a) != rank * n_experts or b.shape[1] != len(a):
            raise LoadError(
                f"{module} in {directory} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; its config says rank {rank}"
            )
        digest.update(f"{module} {list(a.shape)} {list(b.shape)} {scale!r}\n".encode())
        for tensor in (a, b):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        _check_finite(LowRank(a=a, b=b), module, directory)
        a, b = a.float(), b.float() * scale
        if n_experts == 1:
            modules[module] = LowRank(a=a.contiguous(), b=b.contiguous())
            continue
        for e in range(
            n_experts
        ):  # as `ParamWrapper.get_delta_weight` of peft 0.21 reads them: ranks stand before experts in B
            modules[f"{module}[{e}]"] = LowRank(
                a=a[e * rank : (e + 1) * rank].contiguous(), b=b[:, e::n_experts].contiguous()
            )
    if not modules:
        raise LoadError(f"{directory / WEIGHTS_FILE} holds no tensors")
    rank = max(len(one.a) for one in modules.values())
    with safe_open(str(directory / WEIGHTS_FILE), framework="pt") as file:
        head_copy = next((name for name in file.keys() if name.endswith(_HEAD_COPY)), None)  # noqa: SIM118 - no mapping
    return Adapter(path=directory, modules=modules, rank=rank, revision=digest.hexdigest(), head_copy=head_copy)


def _check_config(config: Mapping[str, Any], directory: Path) -> None:
    for name, harmless in _FIXED.items():
        value = config.get(name, harmless[0])
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless):
            raise LoadError(
                f"{directory / CONFIG_FILE} has {name} {shown(value)}, which is not supported; it may be "
                + " or ".join(shown(one) for one in harmless),
                hint="plain LoRA is; merge_and_unload in peft makes any adapter part of the weights",
            )
    known = {*_FIXED, *_READ, *_WITHOUT_EFFECT}
    unknown = sorted(name for name, value in config.items() if name not in known and value)
    if unknown:
        logger.warning("adapter %s has settings that nobody here knows: %s", directory, ", ".join(unknown))


def _refuse_rank(module: str, path: Path, rank: int, max_rank: int) -> NoReturn:
    raise CapacityError(
        f"{module} in {path} has rank {rank}; at most {max_rank} is taken", hint="raise max_lora_rank (--max-lora-rank)"
    )


def _read_sides(path: Path, most_ranks: int, max_rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """A and B by module. LoadError for other tensors and for files that cannot be read, CapacityError for more ranks."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                if name.endswith(_HEAD_COPY):
                    continue  # compared with the model's own where it is fitted
                if name.endswith(_HEAD_BIAS):
                    raise LoadError(
                        f"{path} adapts a head with a bias ({name}), which is not supported",
                        hint="merge_and_unload in peft makes any adapter part of the weights",
                    )
                match = _TENSOR.fullmatch(name)
                if match is None or "lora_" in match["module"]:
                    raise LoadError(
                        f"{path} holds {name}, which is no lora_A or lora_B of a projection",
                        hint="DoRA, biases, embeddings and saved modules are not supported",
                    )
                view = file.get_slice(name)
                shape, dtype = view.get_shape(), view.get_dtype()
                if dtype not in FLOAT_DTYPES or len(shape) != 2:
                    raise LoadError(
                        f"{name} in {path} is {dtype} {list(shape)}; matrices of {', '.join(FLOAT_DTYPES)} can be read"
                    )
                rank = shape["AB".index(match["side"])]
                if rank > most_ranks:  # before it is read: it may be of any size
                    _refuse_rank(match["module"], path, rank, max_rank)
                # a copy: the file is mapped, and an adapter's file may be written anew while it is served
                found.setdefault(match["module"], {})[match["side"]] = file.get_tensor(name).clone()
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} is damaged or cut short: {error}", hint="copy the adapter again") from error
    return found


def _scale(config: Mapping[str, Any], module: str, directory: Path) -> tuple[int, float]:
    """(rank, scale) of a module, by the rules of peft's patterns."""

    def of(name: str, pattern: str, default: object) -> object:
        patterns = config.get(pattern) or {}
        if not isinstance(patterns, dict):
            raise LoadError(f"{directory / CONFIG_FILE} has {pattern} {shown(patterns)}; it must be an object")
        key = next((key for key in patterns if _matches(key, called, directory)), None)
        return config.get(name, default) if key is None else patterns[key]

    called = _in_patterns(module, config.get("target_parameters"))
    rank, said = whole(of("r", "rank_pattern", 8)), of("lora_alpha", "alpha_pattern", 8)
    alpha = real(said)
    if rank is None or not 1 <= rank <= SIZE_LIMIT:
        raise LoadError(
            f"{directory / CONFIG_FILE} has no rank for {module}: r must be a whole number from 1 to {SIZE_LIMIT}"
        )
    if alpha is None or abs(alpha) > NUMBER_LIMIT:
        raise LoadError(
            f"{directory / CONFIG_FILE} has lora_alpha {shown(said)} for {module}; it must be a number of at most "
            f"{NUMBER_LIMIT:g}"
        )
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _in_patterns(module: str, parameters: object) -> str:
    """What patterns call a module: of stacked experts the parameter that is adapted, and it says so by its wrappers alone.

    They lie around each other in the order of the module's parameters, so that the outermost is of the last one, down.
    """
    found = _STACK.fullmatch(module)
    if found is None or not isinstance(parameters, list):
        return module
    named = {str(one).rpartition(".")[2] for one in parameters} - {"weight"}  # of routers
    inside = found[2].count("base_layer")
    in_order = sorted(named, key=lambda name: "down" in name)
    return f"{found[1]}.{in_order[-1 - inside]}" if inside < len(in_order) else module


def _matches(pattern: str, module: str, directory: Path) -> bool:
    if len(re.findall(r"[*+{]", pattern)) > MOST_REPEATS or _REPEATED_GROUP.search(pattern):
        raise LoadError(
            f"{directory / CONFIG_FILE} has the pattern {shown(pattern)}, with more than {MOST_REPEATS} repetitions, or with a "
            "repeated group"
        )
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as error:
        raise LoadError(f"{directory / CONFIG_FILE} has the pattern {shown(pattern)}: {error}") from error


def _check_finite(low_rank: LowRank, module: str, directory: Path) -> None:
    if not (are_finite(low_rank.a) and are_finite(low_rank.b)):
        raise LoadError(f"{module} in {directory} has a weight that is not finite", hint="the adapter is damaged")


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
