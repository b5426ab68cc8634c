"""LoRA adapters as `peft` writes them: read, and refused by name where they are more. `sites` fits them to a model.

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from diptych.compute.loading.finite import are_finite
from diptych.compute.loading.weights import FLOAT_DTYPES
from diptych.ground.bounds import real, shown, whole
from diptych.ground.errors import CapacityError, LoadError
from diptych.models.config import NUMBER_LIMIT, SIZE_LIMIT, read_json

logger = logging.getLogger("diptych.compute")

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# peft writes the weight of the head itself beside an adapter of it (save_embedding_layers)
_HEAD_COPY = "lm_head.base_layer.weight"
_HEAD_BIAS = "lm_head.base_layer.bias"
MOST_REPEATS = 2  # of a pattern for names: more could take for ever, as could a group that is repeated
_REPEATED_GROUP = re.compile(r"\)[*+{]")
MOST_EXPERTS = 1024
_STACK = re.compile(r"(.*experts)((?:\.base_layer)*)")

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
