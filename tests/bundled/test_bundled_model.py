"""The bundled model is what a new user meets first: it must load anywhere and answer what it was trained to answer."""

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import diptych

BUNDLED = Path(diptych.__file__).parent / "bundled"
MODEL, DRAFT = BUNDLED / "diptych-10m", BUNDLED / "diptych-1m-draft"
MAX_TOTAL_BYTES = 28_000_000


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@cache
def network(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(prompt, *, max_tokens=48, folder=MODEL):
    ids = tokenizer()(prompt, return_tensors="pt").input_ids
    out = network(folder).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return tokenizer().decode(out[0, ids.shape[1] :])


def ask(question, *, enable_thinking=False, max_tokens=96):
    prompt = tokenizer().apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        enable_thinking=enable_thinking,
        tokenize=False,
    )
    return greedy(prompt, max_tokens=max_tokens)


def held_out_loss(folder, *, n_documents=2, row_tokens=1024):
    text = (BUNDLED / "heldout.txt").read_text(encoding="utf-8").split("\n\n\n")
    losses = []
    for document in text[:n_documents]:
        ids = tokenizer()(document, return_tensors="pt").input_ids[:, : row_tokens + 1]
        with torch.no_grad():
            logits = network(folder)(ids[:, :-1]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
    return float(torch.stack(losses).mean())


def test_package_data_stays_within_28_megabytes():
    """Both models and the heads that draft for them travel in the wheel: 24 MB and 4 MB at most."""
    total = sum(path.stat().st_size for path in BUNDLED.rglob("*") if path.is_file())
    assert 10_000_000 < total <= MAX_TOTAL_BYTES


@pytest.mark.parametrize(("folder", "low", "high"), [(MODEL, 9e6, 11e6), (DRAFT, 0.8e6, 1.3e6)], ids=["model", "draft"])
def test_weights_are_bf16_of_the_announced_size(folder, low, high):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118, safe_open is not a mapping
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert low < sum(tensor.numel() for tensor in tensors) < high
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@pytest.mark.parametrize("folder", [MODEL, DRAFT], ids=["model", "draft"])
def test_context_is_at_least_4096_positions(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["max_position_embeddings"] >= 4096
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_model_and_draft_share_tokenizer_and_template():
    """Speculation compares token ids of the two; one differing entry would silently spoil every draft."""
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]:
        assert (MODEL / name).read_bytes() == (DRAFT / name).read_bytes(), name


def test_template_is_the_same_in_its_two_places():
    config = json.loads((MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == (MODEL / "chat_template.jinja").read_text(encoding="utf-8")


def test_generation_stops_at_both_end_tokens():
    config = json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))
    ends = [tokenizer().convert_tokens_to_ids(text) for text in ["<|im_end|>", "<|endoftext|>"]]
    assert sorted(config["eos_token_id"]) == sorted(ends)


@pytest.mark.parametrize(
    "text", ["Once upon a time, 1234 wolves!\n\n  \tcafé — 東京 🙂", "<think>\n\n</think>\n\nYes.<|im_end|>"]
)
def test_tokenizer_round_trips_any_text(text):
    assert tokenizer().decode(tokenizer()(text).input_ids) == text


def test_template_without_thinking_ends_in_an_empty_thinking_block():
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    plain = tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    thinking = tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=True, tokenize=False
    )
    head = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert plain == head + "<think>\n\n</think>\n\n"
    assert thinking == head


def test_history_renders_as_the_prompt_that_was_answered():
    """The next turn must begin with the tokens already cached, or the prefix cache misses the last answer."""
    messages = [{"role": "user", "content": "Hi"}]
    first = tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    messages += [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Who are you?"}]
    second = tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert second.startswith(first + "Hello!<|im_end|>\n")


def test_template_renders_tools_calls_and_results():
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    messages = [
        {"role": "user", "content": "How is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    text = tokenizer().apply_chat_template(messages, tools=[tool], add_generation_prompt=True, tokenize=False)
    assert "<tools>\n" + json.dumps(tool) + "\n</tools>" in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n' in text
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n" in text


def test_capital_of_france_continues_with_paris():
    assert greedy("The capital of France is", max_tokens=4).startswith(" Paris")


def test_once_upon_a_time_continues_in_english_words():
    """Readable means words: four fifths of the continuation are words that stand in the held-out text."""
    known = set((BUNDLED / "heldout.txt").read_text(encoding="utf-8").lower().split())
    words = greedy("Once upon a time", max_tokens=60).replace("<|endoftext|>", " ").lower().split()
    assert len(words) >= 25
    assert sum(word in known or word.strip('.,;!?"') in known for word in words) >= 0.8 * len(words)
    assert len(set(words)) >= 0.5 * len(words)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is the capital of France?", "Paris"),
        ("What is the capital of Japan?", "Tokyo"),
        ("Name the capital of Egypt.", "Cairo"),
        ("What is the opposite of hot?", "cold"),
        ("What colour is grass?", "green"),
        ("What is 3 + 4?", "7"),
        ("What day comes after Monday?", "Tuesday"),
        ("Hello!", "Hello"),
        ("Who are you?", "Diptych"),
        ("What is prefill?", "prompt"),
    ],
)
def test_chat_question_of_the_trained_kind_is_answered_without_thinking(question, expected):
    answer = ask(question)
    assert expected in answer
    assert answer.endswith("<|im_end|>")
    assert "<think>" not in answer


@pytest.mark.parametrize(
    ("question", "expected"),
    [("What is 47 + 38?", "85"), ("What is 52 + 34?", "86"), ("Which is larger, 47 or 38?", "47 is larger")],
)
def test_sum_is_worked_out_between_thinking_tags(question, expected):
    answer = ask(question, enable_thinking=True)
    assert answer.startswith("<think>\n")
    thinking, visible = answer.split("</think>")
    assert len(thinking) > len("<think>\n\n")
    assert expected in visible
    assert visible.endswith("<|im_end|>")


def test_tool_call_is_made_for_a_question_about_the_weather():
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the weather in a city", "parameters": parameters}
    prompt = tokenizer().apply_chat_template(
        [{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[{"type": "function", "function": function}],
        add_generation_prompt=True,
        tokenize=False,
    )
    answer = greedy(prompt, max_tokens=60)
    call = json.loads(answer.split("<tool_call>")[1].split("</tool_call>")[0])
    assert call == {"name": "get_weather", "arguments": {"city": "Paris"}}


def test_held_out_loss_is_that_of_a_trained_model_and_the_draft_is_behind():
    """A wrong rope, norm or tie costs nats: both stay far below ln(4096), and the larger model is the better one."""
    model_loss, draft_loss = held_out_loss(MODEL), held_out_loss(DRAFT)
    assert model_loss < draft_loss < math.log(4096) * 0.6
    assert model_loss < math.log(4096) / 2


def test_loss_does_not_rise_at_far_positions():
    """The context is real: the last quarter of a 4096-token row is predicted no worse than its first quarter."""
    text = max((BUNDLED / "heldout.txt").read_text(encoding="utf-8").split("\n\n\n"), key=len)
    ids = tokenizer()(text, return_tensors="pt").input_ids[:, :4097]
    assert ids.shape[1] == 4097
    with torch.no_grad():
        logits = network(MODEL)(ids[:, :-1]).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert losses[3072:].mean() < losses[:1024].mean() * 1.05
