"""Text of more models for pictures and sound: decoders that are read, by the names that their wrappers give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import LOGIT_TOLERANCE
from safetensors.torch import load_file, save_file

from checkpoints import COMMON, VOCAB, enliven, make_checkpoint
from coded_files import gptq, quantised_checkpoints
from diptych.compute.adapters import read_adapter
from diptych.compute.ops.contract import Taps
from diptych.compute.pooler import read_tail
from diptych.compute.runner import load_model
from diptych.cost.parameters import parameter_count
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.models.config import HfConfig, read_json
from diptych.models.contents import contents_of
from diptych.models.read import load_model_file, read_model
from diptych.models.stored import check_stored
from lora import write_adapter
from stepping import Stepper
from wrapped_configs import MISSPELT, UNSCALED, WRAPPED

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
PROMPT_TOKENS = 23
# a wrapper whose class needs what is not installed, or whose files have other names -> a decoder, what precedes its names, and
# names beside it
PUBLISHED: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "FastVlmForConditionalGeneration": (
        "qwen2",
        {"model.": "model.language_model."},
        ("model.vision_tower.timm_model.stem.weight", "model.multi_modal_projector.linear_1.weight"),
    ),
    "PerceptionLMForConditionalGeneration": (
        "llama",
        {"model.": "model.language_model."},
        ("model.vision_tower.timm_model.pos_embed", "model.multi_modal_projector.linear_1.weight"),
    ),
    "NemotronH_Omni_Reasoning_V3": (
        "nemotron_h",
        {"": "language_model."},
        ("vision_model.radio_model.model.cls_token.weight", "mlp1.0.weight", "sound_encoder.encoder.x.weight",
         "sound_projection.linear1.weight"),
    ),
    "HyperCLOVAXVisionV2ForConditionalGeneration": (
        "hyperclovax",
        {"": "model.language_model."},
        ("model.vision_model.patch_embed.proj.weight", "model.vision_projector.weight"),
    ),
    "GotOcr2ForConditionalGeneration": (
        "qwen2", {"": "language_model."}, ("vision_tower.pos_embed", "multi_modal_projector.conv_upsampler1.weight")),
}  # fmt: skip


def logits_of(folder: Path, prompt: list[int], chunk: int | None) -> torch.Tensor:
    return Stepper(load_model(folder, REFERENCE)).prefill("it", prompt, chunk=chunk)


def make_prompt() -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(7))


def part_embedding(folder: Path) -> None:
    """Give the first table of Molmo 2's the rows that it has in published files; transformers writes two of equal size."""
    tensors = load_file(folder / "model.safetensors")
    words, more = (f"model.transformer.wte.{one}embedding" for one in ("", "new_"))
    rows = torch.cat([tensors[words], tensors[more]])
    tensors |= {words: rows[:VOCAB].clone(), more: rows[VOCAB:].clone()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_wrapped(name: str, folder: Path, **fields: Any) -> Any:
    """A small model of a wrapper's class, lively and written as transformers writes it. fields: of its decoder."""
    import transformers

    text, beside = WRAPPED[name]
    config = getattr(transformers, f"{name}Config")(text_config={**COMMON, **text, **fields}, **beside)
    config._attn_implementation = "eager"
    reference = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval().float()
    enliven(reference, 0)
    reference.save_pretrained(folder)
    if name == "Molmo2":
        part_embedding(folder)
    return reference


def rename(folder: Path, names: dict[str, str], beside: tuple[str, ...] = ()) -> None:
    """Give the tensors of a folder other beginnings, the first that fits, and put tensors of other parts beside them."""
    tensors = {}
    for name, one in load_file(folder / "model.safetensors").items():
        old = next((old for old in names if name.startswith(old)), None)
        tensors[name if old is None else names[old] + name.removeprefix(old)] = one
    tensors |= {name: torch.ones(3) for name in beside}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.filterwarnings("ignore")
def test_text_is_as_the_class_computes_it(name: str, tmp_path: Path) -> None:
    """What transformers writes of a wrapper is read as its class answers to text alone, and all that is beside it is left."""
    reference = write_wrapped(name, tmp_path)
    rename(tmp_path, MISSPELT.get(name, {}))
    spec = load_model_file(tmp_path)
    assert spec.is_wrapped
    check_stored(tmp_path, spec, parameter_count(spec))
    prompt = make_prompt()
    # those around BLIP's queries ask for a picture; their decoders do not
    asked = reference.language_model if hasattr(reference, "qformer") else reference
    expected = asked(prompt, use_cache=False).logits[0] * UNSCALED.get(name, 1.0)
    assert expected.std() > 0.3
    difference = logits_of(tmp_path, prompt[0].tolist(), 9) - expected
    assert difference.abs().max() < LOGIT_TOLERANCE * max(1.0, expected.std())


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["Qwen3ASR", "Janus", "GraniteSpeech", "GraniteDocling", "Emu3", "PaddleOCRVL", "MiniCPMV4_6"]
)
@pytest.mark.filterwarnings("ignore")
def test_states_without_a_head_are_those_of_the_class(name: str, tmp_path: Path) -> None:
    """As multimodal embedding models are saved: nothing precedes the parts, of which a decoder of one or of another family."""
    inner = write_wrapped(name, tmp_path / "whole").model
    inner.save_pretrained(tmp_path / "alone")
    spec = load_model_file(tmp_path / "alone")
    assert not spec.has_head
    check_stored(tmp_path / "alone", spec, parameter_count(spec))
    prompt = make_prompt()
    expected = inner(prompt, use_cache=False).last_hidden_state[0]
    model = load_model(tmp_path / "alone", REFERENCE)
    stepper, taps = Stepper(model), Taps(numbers=(spec.n_layers - 1,))
    batch = stepper.batch({"it": prompt[0].tolist()}, logits_rows=())
    model.forward(batch, stepper.kv, taps=taps)
    assert taps.states is not None
    got = read_tail(tmp_path / "alone", spec).normed(taps.states[0].numpy())
    assert expected.std() > 0.3
    assert (torch.from_numpy(got) - expected).abs().max() < LOGIT_TOLERANCE * expected.std()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaled", [[1], None, []], ids=["one layer", "all", "none"])
@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_molmo_2_around_olmo_3(kind: str, scaled: list[int] | None, tmp_path: Path) -> None:
    """Molmo 2 O norms whole rows of q and k, and behind each part; positions are scaled in the layers that a list names."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 16} if kind == "yarn" else {}
    fields = {"qk_norm_type": "olmo", "norm_after": True, "rope_scaling_layers": scaled, "rope_parameters": rope}
    reference = write_wrapped("Molmo2", tmp_path, **fields)
    check_stored(tmp_path, spec := load_model_file(tmp_path), parameter_count(spec))
    assert [layer.attention.rope.kind == kind for layer in spec.layers if layer.attention.rope] == [
        scaled is None or i in scaled for i in range(3)
    ]
    prompt = make_prompt()
    expected = reference(prompt, use_cache=False).logits[0]
    assert (logits_of(tmp_path, prompt[0].tolist(), 9) - expected).abs().max() < LOGIT_TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", ["HunYuanVL", "PaddleOCRVL"])
@pytest.mark.filterwarnings("ignore")
def test_text_of_flat_configs(name: str, tmp_path: Path) -> None:
    """As they were published first: the decoder's keys beside those of the tower, HunyuanOCR's rotation by its own name."""
    reference = write_wrapped(name, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    flat = {**written.pop("text_config"), **written}
    rope = flat.pop("rope_parameters")
    if name == "HunYuanVL":
        rope = {**rope, "rope_type": "xdrope", "xdrope_section": rope.pop("mrope_section")}
        flat |= {"attention_head_dim": flat["head_dim"], "org_vocab_size": VOCAB, "use_qk_norm": True, "num_experts": 1}
    flat |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    check_stored(tmp_path, spec := load_model_file(tmp_path), parameter_count(spec))
    prompt = make_prompt()
    expected = reference(prompt, use_cache=False).logits[0]
    assert (logits_of(tmp_path, prompt[0].tolist(), 9) - expected).abs().max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("name", PUBLISHED)
def test_text_by_names_of_published_files(name: str, tmp_path: Path) -> None:
    """The decoder alone and the wrapper around it say the same, to the bit."""
    family, names, beside = PUBLISHED[name]
    path, prompt = make_checkpoint(family, tmp_path), make_prompt()[0].tolist()
    alone = logits_of(path, prompt, None)
    config = json.loads((path / "config.json").read_text())
    rename(path, names, beside)
    section = "llm_config" if family == "nemotron_h" else "text_config"
    tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
    (path / "config.json").write_text(json.dumps({"architectures": [name], section: config, **tied}))
    spec = load_model_file(path)
    check_stored(path, spec, parameter_count(spec))
    assert torch.equal(logits_of(path, prompt, None), alone)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_up_and_gate_is_what_merged_weights_give(tmp_path: Path) -> None:
    """Up comes first in Molmo 2's projection, in an adapter's as in the file's."""
    write_wrapped("Molmo2", tmp_path)
    prompt = make_prompt()[0].tolist()
    adapter = write_adapter(tmp_path / "adapter", tmp_path, {"ff_proj": 3})
    stepper = Stepper(model := load_model(tmp_path, REFERENCE))
    stepper.adapters = {"it": model.add_adapter(read_adapter(adapter, max_rank=8))}
    adapted, plain = (stepper.step({one: prompt})[one] for one in ("it", "plain"))
    parts = load_file(adapter / "adapter_model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [one for one in tensors if "ff_proj" in one]:
        a, b = (parts[f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight"] for side in "AB")
        tensors[name] = tensors[name] + 2.0 * b @ a
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert (adapted - plain).abs().max() > 0.5
    assert (adapted - logits_of(tmp_path, prompt, None)).abs().max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("where", ["model.language_model.", "language_model.model.", "model."])
def test_an_adapter_fits_by_the_names_of_classes(where: str, tmp_path: Path) -> None:
    """Files of before transformers 5 have other names than its classes, which adapters are trained on; a tower's are none."""
    path, prompt = make_checkpoint("qwen2", tmp_path / "base"), make_prompt()[0].tolist()
    adapter = write_adapter(tmp_path / "adapter", path, {"q_proj": 3})
    rename(path, {"": "language_model."})
    config = json.loads((path / "config.json").read_text())
    wrapped = {"architectures": ["GotOcr2ForConditionalGeneration"], "text_config": config}
    (path / "config.json").write_text(json.dumps(wrapped))
    tensors = load_file(adapter / "adapter_model.safetensors")

    def adapted(before: str) -> torch.Tensor:
        named = {name.replace("model.model.layers.", f"model.{before}layers."): one for name, one in tensors.items()}
        save_file(named, adapter / "adapter_model.safetensors")
        stepper = Stepper(model := load_model(path, REFERENCE))
        stepper.adapters = {"it": model.add_adapter(read_adapter(adapter, max_rank=8))}
        return stepper.step({"it": prompt})["it"]

    assert torch.equal(adapted(where), adapted("language_model.model."))
    assert (adapted(where) - logits_of(path, prompt, None)).abs().max() > 0.5
    with pytest.raises(LoadError, match="does not have"):
        adapted("model.vision_tower.")


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Qwen2_5Omni", "Qwen3OmniMoe"])
def test_what_writes_is_found_in_a_model_that_speaks(name: str, tmp_path: Path) -> None:
    """Files of the whole model, as Qwen published them: a section of a section, and names behind `thinker.`."""
    reference = write_wrapped(f"{name}Thinker", tmp_path)
    parts = {part: f"thinker.{part}" for part in ("visual.", "audio_tower.")}
    names = {"thinker.": "thinker.", **{f"model.{part}": where for part, where in parts.items()}, **parts,
             "model.language_model.": "thinker.model.", "model.": "thinker.model.", "lm_head.": "thinker.lm_head."}  # fmt: skip
    rename(tmp_path, names, ("talker.model.layers.0.x.weight", "talker.codec_head.weight", "token2wav.x.weight",
                             "code2wav.decoder.0.weight"))  # fmt: skip
    thinker = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": [f"{name}ForConditionalGeneration"], "enable_audio_output": True, "thinker_config": thinker,
             "talker_config": {"text_config": {"hidden_size": 8}}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(whole))
    spec = load_model_file(tmp_path)
    check_stored(tmp_path, spec, parameter_count(spec))
    prompt = make_prompt()
    expected = reference(prompt, use_cache=False).logits[0]
    assert (logits_of(tmp_path, prompt[0].tolist(), 9) - expected).abs().max() < LOGIT_TOLERANCE


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["Blip2ForConditionalGeneration"], "text_config": {"model_type": "t5"}}, "encoder beside"),
        ({"architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma"}, "attends both ways"),
    ],
)
def test_what_is_around_a_decoder_may_be_the_reason(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        read_model(HfConfig(config))


def test_what_the_config_of_the_decoder_says_of_weights_is_read(tmp_path: Path) -> None:
    """Kimi K2.5's files say it there alone, and the first of their matrices was missing: the download might be incomplete."""
    fields = {
        "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    }  # fmt: skip
    original = make_checkpoint("deepseek_v3", tmp_path / "original", **fields)
    folders = quantised_checkpoints(original, tmp_path, gptq(4, 32, symmetric=False))
    prompt = make_prompt()[0].tolist()
    expected = logits_of(folders[1], prompt, None)
    for folder in folders:
        inner = {**read_json(folder / "config.json"), "model_type": "kimi_k2"}
        config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": inner}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        torch.testing.assert_close(logits_of(folder, prompt, None), expected, atol=LOGIT_TOLERANCE, rtol=0)
    coded, plain = (sum(group.parameters for group in contents_of(folder).groups) for folder in folders)
    assert coded == plain
