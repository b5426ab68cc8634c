"""The synthetic text teaches facts and sums: what is wrong here, the model says wrongly for ever."""

import re

import pytest
from tokenizers import Tokenizer
from training.arithmetic import arithmetic_question
from training.chat_format import SPECIAL_TOKENS, Turn, render_chat, render_tool_call
from training.data import encode_documents
from training.synthetic import Random, make_documents, weather_tool
from training.tokenizer import train_tokenizer, write_tokenizer
from transformers import AutoTokenizer


def text_of(parts):
    return "".join(text for text, _ in parts)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [text_of(parts) for parts in make_documents(300, seed=5)]
    write_tokenizer(train_tokenizer(texts, vocab_size=600), folder)
    return folder


def test_same_seed_gives_the_same_documents_and_another_seed_others():
    assert make_documents(200, seed=3) == make_documents(200, seed=3)
    assert make_documents(200, seed=3) != make_documents(200, seed=4)


def test_every_sum_in_every_chain_of_thought_is_right():
    """Each `a + b = c` that the generator writes is recomputed here."""
    rng = Random(1)
    checked = 0
    for index in range(3000):
        _, thinking, answer = arithmetic_question(rng, is_easy=index % 2 == 0)
        for left, sign, right, result in re.findall(r"(?<!\+ )\b(\d+) ([-+*]) (\d+) = (\d+)", thinking + " " + answer):
            expected = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign]
            if f"{left} {sign} {right} {sign}" not in thinking and f"{sign} {left} {sign} {right}" not in thinking:
                assert int(result) == expected, thinking
                checked += 1
        for left, middle, right, result in re.findall(r"(\d+) \+ (\d+) \+ (\d+) = (\d+)", thinking):
            assert int(left) + int(middle) + int(right) == int(result), thinking
    assert checked > 3000


def test_answer_is_what_the_chain_of_thought_concludes():
    rng = Random(2)
    for _ in range(500):
        question, thinking, answer = arithmetic_question(rng, is_easy=False)
        conclusion = answer.rstrip(".")
        if "larger" in answer or "smaller" in answer:
            left, sign, right = re.search(r"So (\d+) ([<>]) (\d+)\.$", thinking).groups()
            wants_larger = "larger" in question
            assert conclusion.split()[0] == (left if (sign == ">") == wants_larger else right)
        else:
            assert thinking.rstrip(".").endswith(conclusion.split(" = ")[1])


def test_rendered_dialogue_is_what_the_template_renders(model_folder):
    """Training text and template must agree to the byte, or the model never sees at work what it learnt."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    turns = [Turn(user="Hi", answer="Hello!"), Turn(user="Who?", answer="Me.")]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Me."},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text_of(render_chat(turns, system="Be brief.")) == rendered


def test_rendered_tool_dialogue_is_what_the_template_renders(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    call = render_tool_call("get_weather", {"city": "Rome"})
    turns = [Turn(user="Weather?", answer=call), Turn(user="sunny", answer="It is sunny.", is_tool_result=True)]
    tool_call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [tool_call]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    tools = [weather_tool("get_weather")]
    rendered = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert text_of(render_chat(turns, tools=tools)) == rendered


def test_thinking_prompt_is_what_the_template_asks_for(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    messages = [{"role": "user", "content": "2 + 2"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=True, tokenize=False)
    parts = render_chat([Turn(user="2 + 2", answer="4.", thinking="I know.")])
    assert parts[0] == (prompt, False)
    assert parts[1] == ("<think>\nI know.\n</think>\n\n4.<|im_end|>", True)


def test_documents_encoded_in_parts_equal_the_whole_text_encoded(model_folder):
    """Parts are encoded apart to know the loss mask; a merge across their border would be seen at work only."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    documents = make_documents(150, seed=9)
    ids, mask, starts = encode_documents(tokenizer, documents)
    ends = [*starts[1:], len(ids)]
    assert len(ids) == len(mask)
    for parts, start, end in zip(documents, starts, ends, strict=True):
        assert ids[start:end].tolist() == tokenizer.encode(text_of(parts) + "<|endoftext|>").ids


def test_loss_counts_answers_and_not_questions(model_folder):
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    ids, mask, _ = encode_documents(tokenizer, [render_chat([Turn(user="Say yes.", answer="Yes!")])])
    assert tokenizer.decode(ids[mask].tolist(), skip_special_tokens=False) == "Yes!<|im_end|>"


def test_special_tokens_have_the_first_ids_and_digits_stand_alone(model_folder):
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    assert [tokenizer.token_to_id(text) for text in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]
