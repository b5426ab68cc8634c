"""`diptych inspect MODEL`: what a file or a folder holds, the memory it will need, and both phases on this machine.

Headers are read, no matrix is: the answer comes in seconds for any size. What memory the weights take, as the files have them
and in other formats, is counted by the engine's own loader (`compute.loading.held`); both phases are the planner's.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from diptych.cli import working
from diptych.cli.plan_json import dump
from diptych.cli.tables import amount, duration, page, plain_table
from diptych.cost.kv_bytes import state_bytes
from diptych.cost.memory import engine_weight_bytes
from diptych.cost.parameters import active_parameter_count, kv_bytes_stored, parameter_count
from diptych.cost.planner import PhasePlan, Question, gpu_notes, make_plan, phase_plan
from diptych.cost.profile import LOCAL
from diptych.cost.roofline import NoRate, multiplies_in
from diptych.cost.setup import Setup, find_hardware, find_model, is_packed, model_path, refuse_packed
from diptych.cost.tables import kv_spec
from diptych.engine.text.template import ChatTemplate
from diptych.engine.text.tokenizer import Tokenizer
from diptych.engine.text.words import words_of
from diptych.ground.bounds import counted
from diptych.ground.errors import ConfigError, LoadError
from diptych.ground.formats import engine_quant, head_format, mean_bytes
from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape
from diptych.ground.specs import QuantSpec
from diptych.models.config import HfConfig, read_json
from diptych.models.contents import Contents, contents_of
from diptych.models.files import model_files
from diptych.models.gguf.checkpoint import read_config
from diptych.models.gguf.file import find_gguf, open_gguf
from diptych.models.latent import CacheShape
from diptych.models.pooling import sees_both_ways
from diptych.models.spec import ModelSpec

SHOWN_WEIGHTS = ("bf16", "q8_0", "int8", "int4")
SHOWN_KV = ("bf16", "int8")
SHOWN_CONTEXTS = (2048, 8192, 32_768, 131_072)
QUESTION = Question(prompt_tokens=512, output_tokens=128)


def app(args: Sequence[str] | None = None, prog_name: str = "diptych inspect") -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog=prog_name, description="Say what a model's files hold and what it will need.")
    parser.add_argument(
        "model", nargs="?", default="bundled", metavar="MODEL", help="a GGUF file, a folder, or a table's name"
    )
    parser.add_argument(
        "--hardware", "-d", default="local", metavar="NAME", help="device of the two phases (default: local)"
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    options = parser.parse_args(args)
    facts = facts_of(options.model, options.hardware)
    if options.as_json:
        print(dump(facts))
    else:
        _show(facts)
    if facts["refusal"] is not None:
        raise LoadError(f"the engine does not load it: {facts['refusal']}", hint=facts["refusal_hint"])


def facts_of(name: str, hardware: str) -> dict[str, Any]:
    """Everything the command says. Raises LoadError and ConfigError."""
    spec, path = find_model(name), model_files(model_path(name))
    contents = None if path is None else contents_of(path)
    held, refused = (None, None) if path is None else _held(path)
    kept = held.main_format if held is not None else None if contents is None else contents.kept
    formats: tuple[str, ...] = SHOWN_WEIGHTS if kept in (None, *SHOWN_WEIGHTS) else (kept, *SHOWN_WEIGHTS)
    if kept is not None and is_packed(name):
        formats = (kept,)
    return {
        "model": _model(spec),
        "contents": contents,
        "held": held,
        "refusal": None if refused is None else refused.message,
        "refusal_hint": None if refused is None else refused.hint,
        "words": None if path is None else _words(path),
        "memory": _memory(spec, {weights: _weight_bytes(spec, weights, path, held) for weights in formats}),
        **_phases(name, path, spec, hardware, formats, held),
    }


def _held(path: Path) -> tuple[working.Held | None, LoadError | None]:
    """What the engine holds of it, or why it would not load it."""
    try:
        return working.what_is_held(find_gguf(path) or path), None
    except LoadError as error:
        return None, error


def _model(spec: ModelSpec) -> dict[str, Any]:
    rope, moe = spec.attention.rope, spec.moe
    attention = spec.attention if spec.kv_layers else None
    return {
        "name": spec.name,
        "architecture": spec.architecture,
        "parameters": parameter_count(spec),
        "active_parameters": active_parameter_count(spec),
        "layers": spec.n_blocks,
        "hidden": spec.hidden,
        "ffn": None if spec.mlp is None else spec.mlp.ffn,
        "expert_ffn": None if moe is None else moe.expert_ffn,
        # None: no layer attends
        "heads": None if attention is None else attention.n_heads,
        "kv_heads": None if attention is None else attention.n_kv_heads,
        "head_dim": None if attention is None else attention.head_dim,
        # heads and their width, and that of their values where it is another
        "kv_shapes": [list(shape) for shape in dict.fromkeys(map(_kv_shape, spec.caches[: len(spec.kv_layers)]))],
        "experts": None if moe is None else moe.n_experts,
        "experts_per_token": None if moe is None else moe.experts_per_token,
        "vocab_size": spec.vocab_size,
        "is_tied": spec.is_tied and spec.has_head,
        "writes": spec.has_head,  # or embeds and scores texts alone
        "context_tokens": spec.max_context_tokens,
        "windowed_layers": sum(window is not None for window in spec.windows),
        "window": next((window for window in spec.windows if window is not None), None),
        "entries": _entries(spec),
        "rope": None if rope is None else rope.kind,
    }


def _entries(spec: ModelSpec) -> list[list[int]]:
    """Of how many layers, and of how many tokens is an entry that they see beside their window's tokens."""
    sizes = (layer.attention.entries for layer in spec.layers)
    counted = Counter(entries.tokens for entries in sizes if entries is not None)
    return [[n, tokens] for tokens, n in sorted(counted.items())]


def _kv_shape(cache: CacheShape) -> tuple[int, ...]:
    own = () if cache.value_dim in (0, cache.head_dim) else (cache.value_dim,)
    return cache.n_heads, cache.head_dim, *own


def _words(path: Path) -> dict[str, Any]:
    """Tokenizer and template, or why there are none: a model without words can still be planned."""
    try:
        tokenizer, template = words_of(find_gguf(path) or path)
    except LoadError as error:
        return {"error": error.message}
    return _named_words(tokenizer, template)


def _named_words(tokenizer: Tokenizer, template: ChatTemplate) -> dict[str, Any]:
    return {
        "kind": tokenizer.piece_kind.value,
        "tokens": tokenizer.vocab_size,
        "bos": tokenizer.bos_token,
        "begins": tokenizer.begin,
        "ends": [tokenizer.token(token_id) or f"token {token_id}" for token_id in tokenizer.eos_token_ids],
        "has_template": not template.is_default,
        "template_reads_tools": template.names("tools"),
    }


def _weight_bytes(spec: ModelSpec, weights: str, path: Path | None, held: working.Held | None) -> float:
    """What the engine would hold of the files; what it would hold of such a model, where they are not at hand or refused."""
    if path is None or held is None:
        return engine_weight_bytes(spec, weights)
    if weights != held.main_format:
        try:
            held = working.what_is_held(find_gguf(path) or path, weights) or held
        except (ConfigError, LoadError):  # packed in another format
            return engine_weight_bytes(spec, weights)
    return sum(held.nbytes.values())


def _memory(spec: ModelSpec, weight_bytes: Mapping[str, float]) -> dict[str, Any]:
    contexts = sorted({*(n for n in SHOWN_CONTEXTS if n < spec.max_context_tokens), spec.max_context_tokens})
    return {
        "weight_bytes": weight_bytes,
        "kv_bytes": {
            kv: {str(context): kv_bytes_stored(spec, kv_spec(kv), context, is_ours=True) for context in contexts}
            for kv in SHOWN_KV
        },
        "state_bytes": state_bytes(spec),  # of one sequence, whatever its length
    }


def _quant(weights: str, held: working.Held | None) -> QuantSpec:
    """Where layers hold several formats, experts and the rest are priced by the mean of theirs."""
    if held is None or held.main_format != weights:
        return engine_quant(weights, head_format(weights))
    quant = engine_quant(weights, held.head_format)
    dense = mean_bytes(held.dense) if held.dense else quant.weight_bytes
    return replace(quant, weight_bytes=dense, expert_weight_bytes=mean_bytes(held.experts) if held.experts else None)


def _plans(setup: Setup, question: Question, *, both_ways: bool) -> tuple[PhasePlan, PhasePlan | None]:
    """Both phases of a question; of a model that writes nothing there is one, and it draws no token."""
    if setup.model.has_head:
        plan = make_plan(setup, question)
        return plan.prefill, plan.decode
    chunk = ChunkShape(Phase.PREFILL, question.prompt_tokens, 0, samples=False, both_ways=both_ways)
    return phase_plan(setup, StepShape((chunk,))), None


def _config(path: Path) -> HfConfig:
    gguf = find_gguf(path)
    if gguf is not None:
        return HfConfig(read_config(open_gguf(gguf)), path=str(gguf))
    file = path / "config.json" if path.is_dir() else path
    return HfConfig(read_json(file), path=str(file))


def _phases(
    name: str, path: Path | None, spec: ModelSpec, hardware: str, formats: Sequence[str], held: working.Held | None
) -> dict[str, Any]:
    try:
        device, calibration = find_hardware(hardware)
        if calibration.is_local and device.kind == "gpu":
            refuse_packed(name)
    except ConfigError as error:
        if hardware not in LOCAL:
            raise
        return {"phases": {}, "phases_missing": error.message, "hint": error.hint}
    half = max(1, spec.max_context_tokens // 2)
    question = replace(
        QUESTION, prompt_tokens=min(QUESTION.prompt_tokens, half), output_tokens=min(QUESTION.output_tokens, half)
    )

    both_ways = not spec.has_head and path is not None and sees_both_ways(_config(path))

    def phases_of(quant: QuantSpec) -> dict[str, Any] | None:
        """None where the device does not multiply in it, or nobody measured how fast."""
        try:
            if not multiplies_in(device, quant.compute):
                return None
            setup = Setup(model=spec, hardware=device, quant=quant, kv=kv_spec("bf16"), tp=1, calibration=calibration)
            return _phase_facts(*_plans(setup, question, both_ways=both_ways))
        except NoRate:
            return None

    # of files in several formats, most of it 16 bits, the engine reads all values on a GPU
    are_values = calibration.is_local and device.kind == "gpu"
    plans = {
        weights: phases_of(_quant(weights, None if weights == "bf16" and are_values else held)) for weights in formats
    }
    return {
        "hardware": device.name,
        "phases": {weights: one for weights, one in plans.items() if one is not None},
        "notes": gpu_notes(spec, device, calibration),
    }


def _phase_facts(prefill: PhasePlan, decode: PhasePlan | None) -> dict[str, Any]:
    return {
        "prompt_tokens": prefill.new_tokens,
        "prefill_s": prefill.predicted_s,
        "prefill_tokens_per_s": prefill.tokens_per_s,
        "prefill_bound": prefill.bound,
        # None: it writes nothing
        "decode_s": decode and decode.predicted_s,
        "decode_tokens_per_s": decode and decode.tokens_per_s,
        "decode_bound": decode and decode.bound,
    }


def _show(facts: dict[str, Any]) -> None:
    console, model = page(), facts["model"]
    shapes = [f"{n} of {' and '.join(map(str, widths))}" for n, *widths in model["kv_shapes"]]
    console.print(f"[bold]{escape(model['name'])}[/bold]: {escape(model['architecture'])}")
    ffn = model["ffn"] or model["expert_ffn"]
    console.print(
        f"{_count(model['parameters'])} parameters, {_count(model['active_parameters'])} active per token; "
        f"{counted(model['layers'], 'layer')} of width {model['hidden']}"
        + (f", MLP {ffn}" if ffn else "")
        + (f", {model['experts_per_token']} of {counted(model['experts'], 'expert')}" if model["experts"] else "")
        + (f"; {model['heads']} heads on {' or '.join(shapes)}" if model["heads"] else "; states alone, no attention")
    )
    windows = (
        f"; {model['windowed_layers']} layer{'s see' if model['windowed_layers'] > 1 else ' sees'} "
        f"{counted(model['window'], 'token')}"
        if model["window"]
        else ""
    )
    windows += "".join(f", {n} of them beside entries of {tokens} tokens" for n, tokens in model["entries"])
    console.print(
        f"vocabulary {model['vocab_size']}{', tied' if model['is_tied'] else ''}; context {model['context_tokens']} tokens, "
        f"rope {model['rope'] or 'none'}{windows}"
    )
    if facts["words"] is not None:
        console.print(_words_line(facts["words"], writes=model["writes"]), markup=False)
    if facts["contents"] is not None:
        _show_contents(console, facts["contents"])
    if facts["held"] is not None:
        parts = sorted(facts["held"].nbytes.items(), key=lambda part: -part[1])
        text = ", ".join(f"{name} {amount(n).strip()}B" for name, n in parts)
        scratch = facts["held"].scratch
        beside = f"beside it {amount(scratch).strip()}B for all threads that multiply"
        console.print(f"in memory as the files have it: {text}; {beside}")
    _show_memory(console, facts["memory"])
    _show_phases(console, facts)


def _count(n: int) -> str:
    return amount(n).strip()


def _words_line(words: dict[str, Any], *, writes: bool) -> str:
    if "error" in words:
        return f"tokenizer: none ({words['error']})"
    template = "a chat template" + (" that reads tools" if words["template_reads_tools"] else "")
    answers = f"answers end with {', '.join(words['ends']) or 'nothing'}; " if writes else ""
    return (
        f"tokenizer: {words['kind']}, {words['tokens']} tokens, {words['begins'] or 'nothing'} before each text; {answers}"
        f"{template if words['has_template'] else 'no chat template'}"
    )


def _show_contents(console: Any, contents: Contents) -> None:
    title = (
        f"{contents.container}, {counted(len(contents.files), 'file')}, {amount(contents.file_bytes)}B, "
        f"{contents.bits:.2f} bits a weight"
    )
    table = plain_table(title, "part", "stored as", "tensors", "parameters", "bytes", "bits each")
    for group in contents.groups:
        table.add_row(group.part, escape(group.stored), str(group.tensors), _count(group.parameters),
                      f"{amount(group.nbytes)}B", f"{group.bits:.2f}" if group.parameters else "")  # fmt: skip
    console.print(table)


def _show_memory(console: Any, memory: dict[str, Any]) -> None:
    kv_bytes = memory["kv_bytes"]
    contexts = list(next(iter(kv_bytes.values())))
    states = memory["state_bytes"]
    heads, what = [f"at {context}" for context in contexts], "the KV cache and states" if states else "the KV cache"
    if not any(nbytes for by_context in kv_bytes.values() for nbytes in by_context.values()):  # all rows would be equal
        kv_bytes, contexts = {"any": next(iter(kv_bytes.values()))}, contexts[:1]
        heads, what = ["at any length"], "the states"
    table = plain_table(f"memory: weights and {what} of one sequence", "--weights", "--kv", "weights", *heads)
    for weights, weight_bytes in memory["weight_bytes"].items():
        for kv, by_context in kv_bytes.items():
            cells = (f"{amount(weight_bytes + by_context[context] + states)}B" for context in contexts)
            table.add_row(weights, kv, f"{amount(weight_bytes)}B", *cells)
    console.print(table)


def _show_phases(console: Any, facts: dict[str, Any]) -> None:
    if not facts["phases"]:
        missing = facts.get("phases_missing", "this device has no rate for any format")
        console.print(f"phases: {missing}", markup=False)
        if facts.get("hint"):
            console.print(f"hint: {facts['hint']}", markup=False)
        return
    tokens = next(iter(facts["phases"].values()))["prompt_tokens"]
    writes = facts["model"]["writes"]
    what = "the two phases" if writes else "prefill, as nothing is written,"
    names = ["--weights", "prefill", "rate", "bound by", *(["decode", "rate", "bound by"] if writes else [])]
    table = plain_table(f"{what} on {facts['hardware']}, predicted: a prompt of {tokens} tokens, one sequence", *names)
    for weights, phase in facts["phases"].items():
        read = [
            duration(phase["prefill_s"]),
            f"{phase['prefill_tokens_per_s']:,.0f} tok/s",
            phase["prefill_bound"].value,
        ]
        written = [] if not writes else [
            duration(phase["decode_s"]), f"{phase['decode_tokens_per_s']:,.1f} tok/s", phase["decode_bound"].value,
        ]  # fmt: skip
        table.add_row(weights, *read, *written)
    console.print(table)
    for note in facts["notes"]:
        console.print(f"note: {note}", markup=False)
