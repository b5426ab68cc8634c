"""`diptych plan` from the outside: text, JSON, picture, errors, and what it must not load."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from diptych.cli.plan import app
from diptych.cli.plan_json import dump
from diptych.cost.tables import device_names, model_names
from diptych.engine.load import bundled_dir
from diptych.ground.shape import StepShape
from started import Started


def run(capsys, *arguments: str) -> str:
    app(list(arguments))
    return capsys.readouterr().out


def fails(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        app(list(arguments))
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_text_answers_every_question_of_the_page(capsys):
    """One screen: both phases, time split, crossovers, memory, what-ifs, speculation, chunk, pools."""
    text = run(capsys, "llama-3.1-8b", "--hardware", "a100-80gb-sxm", "--batch", "4")
    for words in (
        "time to first token", "time per output token", "where a decode step's time goes", "turn compute bound at batch",
        "KV traffic equals weight traffic at batch", "largest batch", "longest context", "weights int4", "kv int8",
        "tensor parallel 8", "speculation", "stall budget", "pools at", "note: times",
    ):  # fmt: skip
        assert words in text


@pytest.mark.parametrize(("context", "prompt"), [(1024, 768), (8192, 2048)])
def test_the_prompt_that_nobody_names_fits_the_context(capsys, tmp_path, context, prompt):
    """A model of 1,024 positions was refused for the default's 2,176 tokens."""
    config = json.loads((bundled_dir() / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}), "utf-8")
    plan = json.loads(run(capsys, str(tmp_path), "--hardware", "a100-80gb-sxm", "--json"))["plan"]
    assert plan["question"]["prompt_tokens"] == prompt


def test_json_holds_the_numbers_with_their_units(capsys):
    """Machines read the same answer."""
    data = json.loads(run(capsys, "deepseek-v3", "--hardware", "h200-141gb-sxm", "--tp", "8", "--json"))
    assert data["plan"]["parameters"] == 671_026_419_200
    assert data["plan"]["decode"]["phase"] == "decode"
    assert 0 < data["plan"]["decode"]["bound_s"] < data["plan"]["decode"]["predicted_s"]
    assert {"what_if", "speculation", "chunk", "pools"} <= data.keys()


@pytest.mark.parametrize(("device", "is_told"), [("h200-141gb-sxm", True), ("h100-80gb-sxm", False)])
def test_a_bound_that_peaks_contradict_is_explained(capsys, device, is_told):
    """Prefill was bound by compute, and 137 FLOP per byte stood below a balance of 206 without a word."""
    words = ("deepseek-v3", "--hardware", device, "--tp", "8")
    prefill = json.loads(run(capsys, *words, "--json"))["plan"]["prefill"]
    assert prefill["intensity"] < prefill["balance"]
    assert (prefill["bound"] == "compute") is is_told
    told = "prefill is bound by compute as predicted: compute reaches less of its peak than memory" in run(
        capsys, *words
    )
    assert told is is_told


def test_picture_is_written(capsys, tmp_path):
    """--picture FILE; the ending chooses the format."""
    file = tmp_path / "plan.svg"
    run(capsys, "qwen3-8b", "--hardware", "rtx-4090", "--picture", str(file), "--json")
    assert file.read_text().count("<path") > 20
    assert "cannot write the picture" in fails(
        capsys, "qwen3-8b", "--hardware", "rtx-4090", "--picture", str(tmp_path / "no" / "plan.png")
    )


def test_ask_names_a_setup_and_its_reasons(capsys):
    """The issue's example."""
    arguments = ("llama-3.1-8b", "--ask", "ttft=500ms,tpot=50ms,rate=3/s,in=1500,out=200")
    text = run(capsys, *arguments, "--devices", "l40s,h100-80gb-sxm,a100-80gb-sxm", "--price", "l40s=0.9")
    assert "cheapest that surely meets it" in text
    assert "TTFT p95" in text
    assert "depends on something unmeasured" in text
    data = json.loads(run(capsys, "llama-3.1-70b", *arguments[1:], "--devices", "t4", "--weights", "bf16", "--json"))
    assert data["best"] is None
    assert data["rejected"]


def test_compare_puts_models_and_devices_in_one_table(capsys):
    """Every pair, once."""
    text = run(capsys, "compare", "llama-2-7b,qwen3-8b", "--hardware", "l40s,rtx-4090", "--prompt", "1000")
    for setup in ("llama-2-7b bf16 on l40s", "llama-2-7b bf16 on rtx-4090", "qwen3-8b bf16 on l40s"):
        assert text.partition("in brackets")[0].count(setup) == 1
    twice = run(capsys, "llama-2-7b,llama-2-7b", "--hardware", "l40s,l40s", "--batch", "1,1,2")
    assert twice.partition("in brackets")[0].count("llama-2-7b bf16 on l40s") == 2  # each row, and its notes, once


def test_a_table_asks_all_its_rows_the_same(capsys, tmp_path):
    """Beside a model of 1,024 positions the other's prompt was longer than the title said."""
    config = json.loads((bundled_dir() / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}), "utf-8")
    models = f"{tmp_path},llama-2-7b"
    plans = json.loads(run(capsys, "compare", models, "--hardware", "l40s", "--json"))["plans"]
    assert [plan["question"]["prompt_tokens"] for plan in plans] == [768, 768]
    assert run(capsys, "compare", models, "--hardware", "l40s").startswith("768 prompt tokens, context 896")


def test_names_in_brackets_are_told_whole(capsys, tmp_path):
    """A folder called model[red] was `model`: what stood in brackets was taken for a colour."""
    folder = tmp_path / "model[red]"
    folder.mkdir()
    (folder / "config.json").write_text((bundled_dir() / "config.json").read_text("utf-8"), "utf-8")
    ask = ("--ask", "ttft=1s,tpot=1s,rate=1,in=9,out=9", "--devices", "l40s,l4")
    for arguments in ((str(folder), "-d", "l40s"), ("compare", str(folder), "-d", "l40s"), (str(folder), *ask)):
        assert "model[red] bf16 on l4" in run(capsys, *arguments)


def test_a_step_of_adapters_is_told_in_all_its_parts(capsys):
    """A third of it was in no part."""
    text = run(capsys, "llama-3.1-8b", "-d", "h100", "--lora", "64:64", "--batch", "64")
    split = text.partition("where a decode step's time goes: ")[2].partition("\n")[0]
    assert ", adapters " in split
    assert 98 <= sum(int(share) for share in re.findall(r"\((\d+)%\)", split)) <= 102


def test_a_device_named_twice_is_tried_once(capsys):
    """By two of its names: the answer listed every setup on it twice."""
    ask = ("--ask", "ttft=1ms,tpot=1ms,rate=1,in=1500,out=200", "--tp", "1", "--weights", "bf16", "--json")
    answer = json.loads(run(capsys, "llama-2-7b", "--devices", "h100,h100-80gb-sxm", *ask))
    assert len(answer["rejected"]) == 1


def test_what_no_context_holds_is_refused_once(capsys):
    """It was a table with one reason for each of 277 setups."""
    ask = ("--ask", "ttft=1s,tpot=1s,rate=1,in=4000,out=97")
    assert "are 4097 tokens; llama-2-7b accepts at most 4096" in fails(capsys, "llama-2-7b", *ask)


def test_a_device_that_does_not_multiply_so_leaves_the_others(capsys):
    """One device without fp32 among all that were asked about was the whole answer."""
    ask = ("--ask", "ttft=1s,tpot=1s,rate=1,in=9,out=9", "--weights", "fp32", "--tp", "1")
    text = run(capsys, "qwen2.5-0.5b", "--devices", "l40s,mi300x", *ask)
    assert "meets it: qwen2.5-0.5b fp32 on l40s" in text
    assert "not tried: fp32 on mi300x: mi300x has no peak rate for fp32" in text


def test_an_option_that_an_answer_does_not_read_is_refused(capsys):
    """--ask took --batch, compare --picture, and did nothing with them."""
    ask = "ttft=500ms,tpot=50ms,rate=3/s,in=1500,out=200"
    assert "--ask does not read --batch, --prompt" in fails(
        capsys, "llama-3.1-8b", "--ask", ask, "--batch", "8", "--prompt", "5"
    )
    assert "compare does not read --picture" in fails(
        capsys, "compare", "llama-2-7b", "-d", "l40s", "--picture", "x.png"
    )
    assert "plan does not read --budget" in fails(capsys, "llama-2-7b", "-d", "l40s", "--budget", "3")
    text = run(capsys, "llama-3.1-8b", "--ask", ask, "--devices", "a100-80gb-sxm,rtx-4090", "--tp", "1")
    assert "not tried: llama-3.1-8b fp8 on a100-80gb-sxm" in text
    assert "on 2 x" not in text  # --tp is honoured


def test_several_batches_make_a_table_with_its_distance_from_the_rows(capsys):
    """`--batch 1,8` was refused; compare printed no notes at all."""
    text = run(capsys, "llama-3.1-8b", "--hardware", "a100-80gb-sxm", "--batch", "1,8")
    assert (
        text.count("llama-3.1-8b bf16 on a100-80gb-sxm, batch 8): decode, batch: 8 sequences; the rows go up to 1") == 1
    )
    assert "note: times: prefill: tensorrt-llm-2024" in text
    assert "must be a number of sequences" in fails(capsys, "llama-2-7b", "-d", "l40s", "--batch", "1,x")


def test_a_closed_pipe_ends_as_in_other_commands():
    """`diptych plan ... | head` ended with 1, as if something had failed."""
    process = Started("plan", "--list", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert (process.wait(30), process.stderr.read()) == (141, "")
    process.stderr.close()


def test_list_names_everything(capsys):
    """Names are the interface, so they must be findable."""
    data = json.loads(run(capsys, "--list", "--json"))
    assert data["models"] == list(model_names())
    assert {"bf16", "int8"} <= {*data["kv"]}
    text = run(capsys, "--list")
    for name in (*model_names(), *device_names()):
        assert name in text


def test_a_config_file_is_a_model(capsys, tmp_path):
    """Any Hugging Face config.json works, by file or folder."""
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "parameters" in run(capsys, str(tmp_path), "--hardware", "t4")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("llama-9b", "--hardware", "t4"), "nearest names"),
        (("llama-2-7b", "--hardware", "a100-80gb-smx"), "a100-80gb-sxm"),
        (("llama-2-7b", "--hardware", "t4", "--weights", "int3"), "unknown weight format 'int3'"),
        (("llama-2-7b", "--hardware", "t4", "--stack", "vlm"), "unknown software"),
        (("llama-2-7b", "--hardware", "t4", "--tp", "5"), "cannot be split evenly"),
        (("llama-2-7b", "--hardware", "t4", "--batch", "0"), "batch is 0"),
        (("llama-2-7b", "--hardware", "t4", "--batch", "9" * 5000), "--batch is '999"),
        (("compare", ",", "--hardware", "t4"), "MODEL is ','; it must name one at least"),
        (("llama-2-7b", "--hardware", ","), "--hardware is ','; it must name one at least"),
        (("llama-2-7b", "--hardware", "t4", "--prompt", "99999"), "at most 4096"),
        (("llama-2-7b", "--hardware", "t4", "--stall-budget", "soon"), "stall budget is 'soon'"),
        (("llama-2-7b", "extra", "--hardware", "t4"), "did not expect 'extra'"),
        (("llama-2-7b", "--ask", "ttft=1s"), "does not say tpot"),
        (("llama-2-7b", "--ask", "ttft=1s,tpot=1s,rate=1,in=9,out=9", "--price", "t4"), "cannot read --price 't4'"),
        (("./nowhere/config.json", "--hardware", "t4"), "no file"),
        (("accuracy", "--rows", "./nowhere.csv"), "cannot read nowhere.csv"),
    ],
)
def test_errors_name_what_is_wrong(capsys, arguments, words):
    """Exit code 2, one line with the number or the nearest names, no traceback."""
    err = fails(capsys, *arguments)
    assert err.startswith("error: ")
    assert words in err


def test_plan_loads_no_tensor_library():
    """Answering in under half a second rests on this: no torch, numpy, matplotlib, typer or pydantic on the way."""
    code = (
        "import sys\nfrom diptych.cli.plan import app\napp(['llama-2-7b', '--hardware', 't4'])\n"
        "print([m for m in ('torch','numpy','matplotlib','typer','pydantic') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "time to first token" in done.stdout


def test_a_step_of_a_row_is_told_chunk_by_chunk():
    """`plan accuracy --json` ended in a traceback: the row that a summary names has the step that was timed."""
    (told,) = json.loads(dump({"work": StepShape.decode(batch=3, context_tokens=9)}))["work"]
    assert (told["phase"], told["new_tokens"], told["start_pos"], told["count"]) == ("decode", 1, 8, 3)


def test_several_of_anything_make_a_table(capsys):
    """Two devices were one of an unknown name, and so were two models and two formats, where two batches were a table."""
    for several in (("-d", "l40s,rtx-4090"), ("-d", "l40s", "--weights", "bf16,int4")):
        assert run(capsys, "llama-2-7b", *several).count("note") >= 2
    text = run(capsys, "llama-2-7b,qwen3-8b", "-d", "l40s")
    assert "llama-2-7b bf16 on l40s" in text
    assert "qwen3-8b bf16 on l40s" in text


def test_a_rate_is_read_as_elsewhere(capsys):
    """--ask and simulate take 3/s, and here it was no number."""
    plan = json.loads(run(capsys, "llama-2-7b", "-d", "l40s", "--rate", "40/min", "--json"))["plan"]
    assert plan["question"]["requests_per_s"] == pytest.approx(40 / 60)
    assert "rate is '-1'" in fails(capsys, "llama-2-7b", "-d", "l40s", "--rate", "-1")


NO_KERNEL_HAS = (
    "group4-g0-f16", "group4-g32-xyz", "group4-gx-f16", "group8-g48-f16", "group4-g128-s8", "group4-g32-s8-zeros",
    "group4-g32-e8m0-zeros", "group4-g32-e8m0-minima", "group4-g32-e8m0-minima16", "group4-g32-f32-minima16",
    "group4-g32-s8-minima16",
)  # fmt: skip


@pytest.mark.parametrize("name", NO_KERNEL_HAS)
def test_a_format_that_no_kernel_has_is_no_name(capsys, name):
    """A group of none divided by it, and a scale of no type was priced as one of 16 bits."""
    assert f"unknown weight format '{name}'" in fails(capsys, "llama-2-7b", "-d", "l40s", "--weights", name)


def test_a_limit_has_its_unit(capsys):
    ask = "ttft=0.5ms,tpot=50ms,rate=3/s,in=1500,out=200"
    text = run(capsys, "llama-3.1-8b", "--ask", ask, "--devices", "l40s", "--tp", "1", "--weights", "bf16")
    assert "the limit is 0.5 ms" in " ".join(text.split())
