"""What can be wrong with a checkpoint, each as an error that names the thing, the number and the limit."""

from __future__ import annotations

import json
import mmap
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import psutil
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from checkpoints import CLASSES, MORE, make_checkpoint
from diptych.compute.loading import weights
from diptych.compute.loading.hub import resolve_model_dir
from diptych.compute.loading.mapped_file import MappedFile
from diptych.compute.loading.weights import Checkpoint
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError, LoadError, UnsupportedModel
from diptych.models.families.encoders import ENCODERS
from diptych.models.families.table import SUPPORTED, WRAPPERS
from diptych.models.families.wrapped import WRAPPED
from diptych.models.files import INDEX_FILE
from republished import REPUBLISHED

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
LAST = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


def edit_config(path: Path, **fields: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def refusal(path: Path, error: type[Exception] = LoadError) -> str:
    with pytest.raises(error) as caught:
        load_model(path, REFERENCE)
    return str(caught.value)


def test_missing_tensor_is_named(path: Path) -> None:
    edit_tensors(path, lambda tensors: tensors.pop(LAST))
    message = refusal(path)
    assert LAST in message
    assert "[64, 96]" in message


def test_mis_shaped_tensor_is_named_with_both_shapes(path: Path) -> None:
    edit_tensors(path, lambda tensors: tensors.update({LAST: torch.zeros(64, 95)}))
    message = refusal(path)
    assert LAST in message
    assert "[64, 95]" in message
    assert "[64, 96]" in message


def test_unexpected_dtype_is_named(path: Path) -> None:
    edit_tensors(path, lambda tensors: tensors.update({LAST: torch.zeros(64, 96, dtype=torch.int8)}))
    message = refusal(path)
    assert LAST in message
    assert "I8" in message


@pytest.mark.parametrize("kept", [0, 4, 300, 0.5, 0.999])
def test_truncated_file_is_refused(path: Path, kept: float) -> None:
    """An interrupted download must not become a model that talks nonsense."""
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    message = refusal(path)
    assert "model.safetensors" in message
    assert "damaged or cut short" in message


def test_garbage_file_is_refused(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\xff" * 4096)
    assert "damaged" in refusal(path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": 2}, "model.layers.2"),
        ({"num_hidden_layers": 4}, "model.layers.3"),
        ({"hidden_size": 128}, "embed_tokens"),
        ({"vocab_size": 161}, "embed_tokens"),
        ({"attention_bias": False}, "self_attn"),
        ({"mlp_bias": False}, "mlp"),
        ({"num_key_value_heads": 4}, "k_proj"),
        ({"intermediate_size": 97}, "gate_proj"),
    ],
    ids=str,
)
def test_config_that_contradicts_the_tensors(path: Path, fields: dict, named: str) -> None:
    """Fewer layers or biases than the file holds would load and be wrong; more would be missing."""
    edit_config(path, **fields)
    assert named in refusal(path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"head_dim": 25}, "head_dim"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8}}, "low_freq_factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
    ids=str,
)
def test_impossible_config_field_is_named(path: Path, fields: dict, named: str) -> None:
    edit_config(path, **fields)
    assert named in refusal(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00\xff"])
def test_unreadable_config_is_refused(path: Path, text: str) -> None:
    (path / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in refusal(path)


@pytest.mark.parametrize("architectures", [["RwkvForCausalLM"], [], None, "LlamaForCausalLM", [["x"]]], ids=str)
def test_unsupported_architecture_is_refused_with_where_the_list_stands(path: Path, architectures: object) -> None:
    edit_config(path, architectures=architectures)
    message = refusal(path, UnsupportedModel)
    assert "is not supported" in message
    assert "hint: docs/models.md lists what is" in message
    assert not any(name in message for name in SUPPORTED), "it was 8 kB"


def test_every_required_family_is_supported() -> None:
    """What is called supported is held against transformers somewhere: by a tiny checkpoint of its architecture."""
    checked = {architecture for _, architecture, _ in (*CLASSES.values(), *MORE.values())}
    checked.remove("SearchedForCausalLM")  # the oracle's own (tests/searched.py); files say DeciLMForCausalLM
    wrapped = {
        "Gemma3ForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "MllamaForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen4ExpForConditionalGeneration",
        *(f"{name}ForConditionalGeneration" for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")),
        *(f"{name}ForConditionalGeneration" for name in ("Glm4v", "Glm46V", "Glm4vMoe")),
        *(f"{name}ForConditionalGeneration" for name in ("Aria", "CohereCompass")),
        *(f"{name}ForConditionalGeneration" for name in ("Apertus1p5", "HYV4VL")),  # tests/compute/test_wrappers.py
        *WRAPPERS,
        *(
            architecture for family in WRAPPED for architecture in family.architectures
        ),  # tests/compute/test_wrappers.py
        "MiniMaxM3VLForCausalLM",  # the text alone: tests/compute/test_variants.py
        *(
            architecture for family in ENCODERS for architecture in family.architectures
        ),  # tests/engine/test_encoders.py
    }
    # Llamas there; and how files write what transformers writes otherwise
    elsewhere = {*wrapped, "InternLM3ForCausalLM", "IQuestCoderForCausalLM", "ExaoneMoEForCausalLM", "PhiMoEForCausalLM",
                 "StableLMEpochForCausalLM", "Phi4MMForCausalLM", "BailingMoeV3ForCausalLM", "MPTForCausalLM",
                 "SarvamMoEForCausalLM", "SarvamMLAForCausalLM",
                 "MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM",  # tests/compute/test_lightning.py
                 *(architecture for architecture, _, _ in REPUBLISHED.values())}  # fmt: skip
    assert set(SUPPORTED) == {*checked, *elsewhere}


def test_missing_shard_is_named(tmp_path: Path) -> None:
    path = make_checkpoint("olmo2", tmp_path, max_shard_size="60KB")
    lost = sorted(path.glob("*.safetensors"))[1]
    lost.unlink()
    assert lost.name in refusal(path)


def test_index_may_not_point_outside_its_folder(tmp_path: Path) -> None:
    """An index is data from the network; a path in it must not open other files."""
    path = make_checkpoint("olmo2", tmp_path, max_shard_size="60KB")
    index = path / INDEX_FILE
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../../secret.safetensors"}}))
    assert "outside" in refusal(path)


def test_pickled_weights_are_not_read(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert "safetensors" in refusal(path)


def test_folder_that_is_not_there() -> None:
    with pytest.raises(LoadError, match="no such folder or file"):
        resolve_model_dir("./nowhere/at/all")


def test_offline_hub_name_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network the user must learn what to do, not see a stack of HTTP errors."""

    def refuse(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(LoadError) as caught:
        resolve_model_dir("someone/some-model")
    assert "someone/some-model" in str(caught.value)
    assert "hint" in str(caught.value)


def test_hub_download_takes_no_code_and_no_pickles(monkeypatch: pytest.MonkeyPatch, original: Path) -> None:
    """Nor the weights a second time: gpt-oss and Mistral publish them in a layout of their own too, which came along."""
    theirs = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja", "model.py",
              "pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors", "metal/model.bin"]  # fmt: skip
    fetched = []

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        found = filter_repo_objects(theirs, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        fetched.append((name, list(found)))
        return str(original)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model_dir("someone/some-model") == original
    assert fetched == [("someone/some-model", theirs[:4])]


def test_progress_rises_to_the_total(original: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(original, REFERENCE, progress=lambda done, total: seen.append((done, total)))
    done = [value for value, _ in seen]
    assert done == sorted(done)
    assert len(seen) > 10
    assert seen[-1][0] == seen[-1][1] == (original / "model.safetensors").stat().st_size


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system cannot drop mapped pages")
@pytest.mark.parametrize("n_together", [1, 3])
def test_reading_a_checkpoint_keeps_few_of_its_pages(tmp_path: Path, n_together: int) -> None:
    """Packed weights grow while the file is read; pages of both at once would be twice the model.

    Stacked tensors (q, k, v) are all read before the first is used: pages given back in between used to stay for good.
    """
    n, per_tensor = 48, 2**20
    save_file(
        {f"{i}": torch.full((per_tensor,), float(i), dtype=torch.bfloat16) for i in range(n)},
        tmp_path / "model.safetensors",
    )
    checkpoint = Checkpoint(tmp_path)
    tensors = [checkpoint.tensor(f"{i}", per_tensor) for i in range(n)]
    shared_before = psutil.Process().memory_info().shared
    highest = 0
    for begin in range(0, n, n_together):
        together = [tensor.read() for tensor in tensors[begin : begin + n_together]]
        assert [float(values.amax()) for values in together] == list(range(begin, begin + n_together))
        highest = max(highest, psutil.Process().memory_info().shared - shared_before)
    assert highest < 2 * weights.RESIDENT_BYTES < n * per_tensor * 2 / 2
    checkpoint.finish(lambda name: False)
    assert psutil.Process().memory_info().shared - shared_before < weights.RESIDENT_BYTES / 2
    assert float(tensors[0].read().amax()) == 0.0  # dropped pages come back from the file
    assert float(tensors[7].read().amin()) == 7.0


def test_tensor_of_the_compute_dtype_is_not_copied(tmp_path: Path) -> None:
    """Weights are mapped: reading twice gives the same memory, so a 7B model is not held twice."""
    path = make_checkpoint("llama", tmp_path)
    tensor = Checkpoint(path).tensor("model.embed_tokens.weight", 160, 64)
    assert tensor.read().data_ptr() == tensor.read().data_ptr()


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
def test_a_mapped_file_gives_what_safetensors_gives(shift: int, tmp_path: Path) -> None:
    """Wherever its bytes begin, in every dtype; a header is padded with spaces by who writes it, to eight bytes or to none."""
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (2, 3, 48), dtype=torch.uint8, generator=draw)
    dtypes = (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    )  # fmt: skip
    tensors = {str(dtype): bits.clone().view(dtype) for dtype in dtypes}
    tensors |= {"bool": bits > 9, "one": torch.tensor(3.0), "none": torch.empty(0, 4), "odd": bits[0, 0, :7].clone()}
    save_file(tensors, tmp_path / "whole", metadata={"made": "here"})
    raw = (tmp_path / "whole").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    path = tmp_path / "shifted"
    path.write_bytes((size + shift).to_bytes(8, "little") + raw[8 : 8 + size] + b" " * shift + raw[8 + size :])
    file = MappedFile(path)
    with safe_open(path, framework="pt") as plain:
        assert file.metadata() == plain.metadata()
        assert set(file.keys()) == set(plain.keys()) == tensors.keys()
        for name, wanted in tensors.items():
            expected, found = plain.get_tensor(name), file.get_tensor(name)
            assert (found.dtype, found.shape, found.is_contiguous()) == (wanted.dtype, wanted.shape, True)
            assert found.view(-1).view(torch.uint8).tolist() == expected.view(-1).view(torch.uint8).tolist()
            values = expected.flatten()
            sample = values[len(values) // 2 :][:5].view(torch.uint8)
            assert file.middle(name, 5) == bytes(sample.tolist())
    with pytest.raises(SafetensorError, match="does not contain tensor other"):
        file.get_tensor("other")


def test_revision_tells_models_apart(original: Path, tmp_path: Path) -> None:
    """The revision keys caches and saved states: equal only where keys and values are equal."""
    same = load_model(original, REFERENCE)
    again = load_model(shutil.copytree(original, tmp_path / "again"), REFERENCE)
    assert same.revision == again.revision
    assert same.n_parameters == sum(t.numel() for t in load_file(original / "model.safetensors").values())
    others = {
        "other weights": load_model(make_checkpoint("llama", tmp_path / "other", seed=1), REFERENCE),
        "other format": load_model(original, ComputeConfig(backend="torch", device="cpu", weights="bf16")),
        "other kv": load_model(original, ComputeConfig(backend="torch", device="cpu", weights="fp32", kv="bf16")),
    }
    edit_config(tmp_path / "again", rms_norm_eps=1e-3)
    others["other config"] = load_model(tmp_path / "again", REFERENCE)
    revisions = {same.revision, *(model.revision for model in others.values())}
    assert len(revisions) == 1 + len(others)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (ComputeConfig(backend="torch", weights="int8"), "int8"),
        (ComputeConfig(backend="torch", kv="int8"), "int8"),
        (ComputeConfig(backend="torch", device="cuda:99"), "cuda:99"),
    ],
    ids=lambda value: value if isinstance(value, str) else "config",
)
def test_what_the_torch_backend_lacks_is_a_config_error(original: Path, config: ComputeConfig, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model(original, config)
    assert named in str(caught.value)


def test_every_layer_that_drafts_is_left_alone(tmp_path: Path) -> None:
    """Step 3.7 has three of them behind its last layer, and says so in the config of its text."""
    folder = make_checkpoint("step3p7", tmp_path)
    plain = load_model(str(folder), ComputeConfig(backend="torch", device="cpu"))
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config["text_config"]["num_nextn_predict_layers"] = 3
    drafts = {
        name.replace(".3.", f".{4 + i}."): one.clone()
        for name, one in tensors.items()
        if ".layers.3." in name
        for i in range(3)
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | drafts, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_model(str(folder), ComputeConfig(backend="torch", device="cpu")).n_parameters >= plain.n_parameters
    config["text_config"]["num_nextn_predict_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=r"does not call for, the first is .*layers\.6\."):
        load_model(str(folder), ComputeConfig(backend="torch", device="cpu"))
