"""`diptych simulate`: traces from files, clear errors, the same JSON every time, pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from diptych.cli.plan import app as plan
from diptych.cli.simulate import app, seconds
from diptych.cli.simulate_picture import busy_shares
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.sim.journal import head_line
from diptych.sim.statistics import Bin, Timeline

SERVICE = ["llama-3.1-8b", "--hardware", "h100-80gb-sxm"]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{s:02d}.6805900,{400 + 50 * s},{8 + s}\n" for s in range(40)
)


def trace(tmp_path: Path, text: str, name: str = "t.csv") -> list[str]:
    path = tmp_path / name
    path.write_text(text, "utf-8")
    return ["--trace", str(path)]


def mooncake(at_ms: float, **changes: object) -> str:
    row = {"timestamp": at_ms, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]}
    return json.dumps(row | changes) + "\n"


def journal(**changes: object) -> str:
    """One of a server, of one request."""
    seen = {"queue_s": 0.0, "prefill_s": 0.1, "ttft_s": 0.1, "tpot_s": 0.1}
    request = {"id": "ab", "arrival_s": 1.0, "came_s": 1.0, "end_s": 2.0, "prompt_tokens": 64, "cached_tokens": 0}
    request |= {"output_tokens": [5], "max_tokens": 5, "priority": 0, "blocks": [1, 2], "seen": seen}
    return f"{head_line(SchedulerConfig(), BlockConfig(n_blocks=9))}\n{json.dumps({'request': request | changes})}\n"


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    app([*SERVICE, *arguments, "--json"])
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        app([*SERVICE, *arguments])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_an_azure_trace_is_served_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts are the file's; played twice as fast it lasts half as long."""
    file = trace(tmp_path, AZURE)
    found = answer(capsys, *file)
    assert (found["n_complete"], found["output_tokens"]) == (40, sum(8 + s for s in range(40)))
    assert found == answer(capsys, *file)
    faster = answer(capsys, *file, "--speed", "2")
    assert faster["duration_s"] == pytest.approx(float(str(found["duration_s"])) / 2, rel=0.05)
    assert answer(capsys, *file, "--limit", "3")["n_requests"] == 3


def test_a_mooncake_trace_shares_its_prefixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two full blocks of 512 are shared by all but the first; the last id is a block of each one's own."""
    text = "".join(mooncake(3000 * i, hash_ids=[0, 1, 10 + i]) for i in range(6))
    found = answer(capsys, *trace(tmp_path, text, "m.jsonl"))
    assert found["prefix_hit_tokens"] == 5 * 1024
    assert answer(capsys, *trace(tmp_path, text, "m.jsonl"), "--no-prefix-cache")["prefix_hit_tokens"] == 0


def test_a_trace_that_is_spread_over_its_ticks_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON lines without hash ids were moved in time without a word."""
    text = "".join(mooncake(3000 * (i // 3), hash_ids=[]) for i in range(6))
    found = answer(capsys, *trace(tmp_path, text, "m.jsonl"))
    assert found["load"] == "trace m.jsonl, requests of one tick spread over it"
    assert answer(capsys, *trace(tmp_path, AZURE))["load"] == "trace t.csv"


def test_a_load_without_prefixes_leaves_states_their_places(capsys: pytest.CaptureFixture[str]) -> None:
    """42 sequences in place of 128: without a cache there were 64 states, of which a third was kept for prefixes."""
    service = ["qwen3-next-80b-a3b", "--hardware", "h100-80gb-sxm", "--tp", "4", "--rate", "5/s", "--requests", "4"]
    pages = []
    for more in ([], ["--shared-prefix", "64"]):
        app([*service, *more])
        pages.append(capsys.readouterr().out.splitlines()[1].partition(" tokens, ")[2])
    assert pages[0] == pages[1]
    assert pages[0].startswith(
        "128 sequences at one time (places for 192 states), steps of 2048 tokens at most, prefix"
    )


def test_processes_change_no_number_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells of a trace in which prefixes are shared and engines are full: the same report to the last bit."""
    rows = (mooncake(40 * i, output_length=5 + i % 90, hash_ids=[i % 4, 10 + i % 16, 99 + i]) for i in range(150))
    load = [*trace(tmp_path, "".join(rows), "m.jsonl"), "--engines", "3", "--cells", "3", "--router", "longest-prefix"]
    alone = answer(capsys, *load, "--processes", "1")
    assert alone == answer(capsys, *load, "--processes", "2")
    assert alone["n_complete"] == 150
    assert float(str(alone["prefix_hit_tokens"])) > 0


def test_a_page_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a person reads: the load, the limits, the latencies, the price."""
    picture = tmp_path / "p.png"
    load = ["--rate", "4/s", "--requests", "60", "--slo", "ttft=1s,tpot=80ms", "--usd-per-hour", "3"]
    app([*SERVICE, "--engines", "2", *load, "--picture", str(picture)])
    page = capsys.readouterr().out
    for words in (
        "2 engines, least-delay",
        "60 requests",
        "within TTFT 1 s, TPOT 80 ms",
        "time to first token",
        "at 6 USD",
    ):
        assert words in page
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_steps_are_the_live_page_s_feed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hello, then frames whose steps and tokens add up to what the engine did; nothing else changes."""
    file = tmp_path / "steps.txt"
    load = ["--rate", "4/s", "--requests", "30"]
    with_film, without = (answer(capsys, *load, *more) for more in (["--steps", str(file)], []))
    assert with_film == without
    events = [json.loads(line.removeprefix("data: ")) for line in file.read_text().split("\n\n") if line]
    hello, *frames = events
    assert (hello["kind"], hello["model"]) == ("hello", "llama-3.1-8b")
    assert [one["now_s"] for one in frames] == sorted(one["now_s"] for one in frames)
    steps = [step for frame in frames for step in frame["steps"]]
    assert 0 < len(steps) <= with_film["n_steps"]  # type: ignore[operator]
    assert sum(step["d"] for step in steps) == sum(frame["decode_tokens"] for frame in frames)
    last = frames[-1]["totals"]
    assert last["output_tokens"] == with_film["output_tokens"]
    assert last["finished"]["length"] == 30
    assert frames[-1]["requests"] == []
    assert "cannot write" in complaint(capsys, *load, "--steps", "/nowhere/steps.txt")
    before = file.read_text()
    assert "steps are written of one alone" in complaint(
        capsys, *load, "--engines", "2", "--cells", "2", "--steps", str(file)
    )
    assert [file.read_text()] == [one.read_text() for one in tmp_path.iterdir()] == [before], "what was there stays"


def test_steps_tell_drafts_and_prompts_that_another_engine_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rejected drafts were counted as tokens and none were told; of a decode pool's prompts only what it read itself."""
    file = tmp_path / "steps.txt"
    load = ["--rate", "4/s", "--requests", "20", "--steps", str(file)]

    def frames(*more: str) -> tuple[float, list[dict[str, Any]]]:
        written = float(str(answer(capsys, *load, *more)["output_tokens"]))
        return written, [json.loads(line.removeprefix("data: ")) for line in file.read_text().split("\n\n") if line][1:]

    written, drafting = frames("--speculate", "3", "--acceptance", "0.5", "--draft-cost", "0.02")
    steps = [step for frame in drafting for step in frame["steps"]]
    decoded = written - 20  # without the first ones, which prefill gives
    assert sum(step["d"] for step in steps) == sum(frame["decode_tokens"] for frame in drafting) == decoded
    drafted, kept = (sum(step["g"][place] for step in steps) for place in (0, 1))
    assert 0 < kept < drafted
    _, apart = frames("--prefill-hardware", "l40s", "--link", "50GB/s,10us")
    last = apart[-1]["totals"]
    assert last["computed_tokens"] + last["transferred_tokens"] == drafting[-1]["totals"]["computed_tokens"]


def test_users_are_a_load(capsys: pytest.CaptureFixture[str]) -> None:
    """Their conversations share the system prompt and their own history."""
    found = answer(
        capsys, "--users", "5", "--requests", "30", "--think", "1s", "--turns", "3", "--shared-prefix", "320"
    )
    assert found["n_complete"] == 30
    assert float(str(found["prefix_hit_tokens"])) > 25 * 320


def test_two_pools_are_a_service(capsys: pytest.CaptureFixture[str]) -> None:
    """Each pool has its own lines; what went over the link is counted in prompts, bytes and time."""
    pools = ["--engines", "2", "--prefill-hardware", "l40s", "--prefill-engines", "2", "--link", "50GB/s,10us"]
    load = ["--rate", "8/s", "--requests", "40", "--local-prefill", "0s"]
    found = answer(capsys, *pools, *load)
    assert found["n_sent"] == found["n_complete"] == 40
    assert len(found["pools"]) == 2  # type: ignore[arg-type]
    app([*SERVICE, *pools, *load])
    page = capsys.readouterr().out
    for words in (
        "decode on 2 engines",
        "prefill on 2 engines",
        "link: 50 GB/s",
        "40 prompts handed over",
        "prefill pool:",
    ):
        assert words in page
    assert answer(capsys, *pools, *load, "--cells", "2")["n_complete"] == 40


def test_two_pools_say_whose_times_are_whose(capsys: pytest.CaptureFixture[str]) -> None:
    """Two notes told of times of prefill and decode, and not of which device."""
    load = ["--rate", "4/s", "--requests", "9", "--prefill-hardware", "l40s", "--link", "50GB/s,10us"]
    app([*SERVICE, *load])
    page = capsys.readouterr().out
    assert "note: times where answers are written: prefill: tensorrt-llm, of services, fitted on this device" in page
    assert "note: times where prompts are read: prefill: tensorrt-llm-2024" in page


def test_a_name_in_brackets_is_told_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app([*SERVICE, *trace(tmp_path, AZURE, "[bold]day[x].csv")])
    assert "load: trace [bold]day[x].csv\n" in capsys.readouterr().out


def test_a_picture_without_an_ending_is_the_file_that_was_named(tmp_path: Path) -> None:
    """It said "picture: p" and wrote p.png."""
    app([*SERVICE, "--rate", "8/s", "--requests", "9", "--picture", str(tmp_path / "p")])
    assert (tmp_path / "p").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (app, ["m-of-no-table", "-d", "l40s", "--rate", "8/s"]),
        (plan, ["m-of-no-table", "-d", "l40s", "--users", "9", "--slo", "ttft=1s,tpot=80ms"]),
        (plan, ["llama-3.1-8b", "-d", "l40s"]),
    ],
)
def test_pictures_have_the_endings_that_help_tells(
    app, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A still one was written to .gif, and what no picture ends in was refused behind minutes of simulation."""
    with pytest.raises(SystemExit):
        app([*words, "--picture", str(tmp_path / "p.gif")])
    assert "p.gif ends in .gif; it must be .png, .svg or .pdf" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "begins"), [("p", b"\x89PNG"), ("p.PNG", b"\x89PNG"), ("p.pdf", b"%PDF"), ("p.svg", b"<?xml")]
)
def test_a_plans_picture_is_the_file_that_was_named(name: str, begins: bytes, tmp_path: Path) -> None:
    """It said "picture: p" and wrote p.png."""
    plan(["llama-3.1-8b", "-d", "l40s", "--picture", str(tmp_path / name)])
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_one_is_counted_in_the_singular(capsys: pytest.CaptureFixture[str]) -> None:
    """It said "1 requests in 2 s" and "steps of 1 sequences"."""
    app([*SERVICE, "--users", "1", "--requests", "1", "--max-running-sequences", "1"])
    page = capsys.readouterr().out
    for words in ("1 user,", "1 sequence at one time", "1 request in ", "of 1 sequence;", "0 preemptions"):
        assert words in page
    assert re.search(r"\b1 [a-z]{3,}s\b", page) is None


def test_no_stretch_of_a_picture_is_more_than_full() -> None:
    """Steps counted where they ended: a stretch was 108 % busy, and the one before less than it was."""
    bins = [Bin(prefill_s=1.0), Bin(), Bin(mixed_s=3.0, decode_s=1.0), Bin(decode_s=1.0)]
    report = Mock(timeline=Timeline(bin_s=2.0, bins=bins), service=Mock(n_engines=1))
    shares = [[0.5, 0.0, 0.0, 0.0], [0.0, 0.75, 0.75, 0.0], [0.0, 0.25, 0.25, 0.5]]
    assert busy_shares(report) == [pytest.approx(part) for part in shares]


def test_a_picture_of_a_service_that_refuses_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no latency to draw, and matplotlib warned of its legend on standard error."""
    path = tmp_path / "none.png"
    found = answer(capsys, "--rate", "3/s", "--requests", "4", "--prompt", "200000", "--picture", str(path))
    assert found["refused"] == {"PromptTooLong": 4}
    assert path.stat().st_size > 0


@pytest.mark.parametrize("nothing", ["0", "0us", "0.0s", "0min"])
def test_no_time_is_no_time_in_any_unit(nothing: str) -> None:
    """0us "must be a positive time", where 0ms was taken."""
    assert seconds(nothing, "think time") == 0.0


def test_a_picture_that_cannot_be_written_costs_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """The page of a long simulation was lost with it."""
    with pytest.raises(SystemExit):
        app([*SERVICE, "--rate", "8/s", "--requests", "9", "--picture", "/nowhere/p.png"])
    printed = capsys.readouterr()
    assert "9 completed" in printed.out
    assert "cannot write the picture /nowhere/p.png" in printed.err


def test_every_token_has_its_place_in_the_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    """Rejected drafts counted as output, and so did a token for every prompt that was handed over."""
    load = ["--rate", "8/s", "--requests", "40", "--shared-prefix", "640"]
    pools = ["--prefill-hardware", "h100", "--link", "50GB/s", "--local-prefill", "0s"]
    for service in ([], ["--speculate", "4"], pools, [*pools, "--speculate", "4"], ["--kv-tokens", "5000"]):
        found = answer(capsys, *load, *service)
        bins = found["timeline"]["bins"]  # type: ignore[index]
        assert sum(one["output_tokens"] for one in bins) == found["output_tokens"], service
        assert found["prefix_query_tokens"] == found["prompt_tokens"], "a prompt is looked up once, wherever it is read"
        assert found["prefix_hit_tokens"] == found["cached_tokens"] > 0


def test_both_pools_lie_on_their_devices_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """The pool that prefills had the experts of every device whole, whatever was asked."""
    layout = ["--hardware", "h200-141gb-sxm", "--prefill-hardware", "h200-141gb-sxm", "--tp", "4", "--ep", "4"]
    app(["qwen3-30b-a3b", *layout, "--link", "50GB/s", "--rate", "8/s", "--requests", "4", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [pool["setup"] for pool in found["service"]["pools"]] == [
        "qwen3-30b-a3b bf16 on 4 x h200-141gb-sxm (tp 4 ep 4)"
    ] * 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (mooncake(0) + mooncake(-5), "line 2 cannot be read: its time is -0.005 s; it must be 0 or later"),
        (mooncake(float("nan")), "line 1 cannot be read: its time is nan s"),
        (mooncake(0, input_length=-1), "its prompt has -1 tokens; it must be from 0 to 2147483647"),
        (mooncake(0, output_length=10**12), "its answer has 1000000000000 tokens"),
        (mooncake(0, input_length=float("inf")), "line 1 cannot be read"),
        (mooncake(0, input_length=2_000_000_000), "request 0 has a prompt of 2000000000 tokens; at most 16777216"),
        ("{]\n", "line 1 cannot be read"),
        ('{"core": 1}\n', "line 1 cannot be read"),
        ("", "is empty; a trace is CSV with the columns TIMESTAMP,"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has 0 requests; a trace needs at least 1"),
        (journal(arrival_s="soon"), "line 2 cannot be read: arrival_s is 'soon'; it must be a number"),
        (journal(prompt_tokens=-5), "line 2 cannot be read: prompt_tokens is -5; it must be a whole number"),
        (journal(output_tokens=[10**12]), "line 2 cannot be read: it has [0, 1000000000000] tokens"),
        (journal(prompt_tokens=2**31 - 1), "is 2147483647; it must be a whole number between 1 and 16777216"),
        (journal(max_tokens="all"), "line 2 cannot be read: max_tokens is 'all'; it must be a whole number"),
        (journal(priority=None), "line 2 cannot be read: priority is None; it must be a whole number"),
        (journal(blocks={}), "line 2 cannot be read: its blocks are {}"),
        (journal(id=7), "line 2 cannot be read: its id is 7; it must be a text"),
        (journal(adapter=1.5), "line 2 cannot be read: its adapter is 1.5; it must be a text"),
        (journal(adapter="a", adapter_parameters="b"), "line 2 cannot be read: adapter_parameters is 'b'"),
        (
            journal(seen={"queue_s": None, "prefill_s": 0.1, "ttft_s": None, "tpot_s": None}),
            "line 2 cannot be read: seen queue_s is None; it must be a number",
        ),
        (journal() + '{"step": ' + "[" * 100_000 + "\n", "line 3 cannot be read"),
        (journal() + f'{{"step": [1, 2, 1, {10**400}, []]}}\n', "line 3 cannot be read: its step has"),
        (journal().replace('"type": "BlockConfig"', '"type": "Pool"'), "line 1 cannot be read"),
        (journal(blocks=["a"]), "line 2 cannot be read: its blocks are ['a']"),
        (journal(drafts=[[[1, 2]]]), "line 2 cannot be read"),
        (journal(seen={}), "line 2 cannot be read"),
        (journal().replace('"request": {', '"request": {}, "": {'), "line 2 cannot be read"),
        (journal().replace('"id"', '"name"'), "line 2 cannot be read: it has no 'id'"),
        (journal() + '{"step": [1]}\n', "line 3 cannot be read"),
        (journal() + '{"step": [2, 1, 0, 0, []]}\n', "line 3 cannot be read: its step ends at 1 s and begins at 2 s"),
        (journal() + '{"step": [1, 2, -3, 5, []]}\n', "line 3 cannot be read: its step has [-3, 5]"),
        (journal() + '{"step": [1, 2, 3, 2, []]}\n', "a context at least a token for each sequence"),
        (journal() + '{"step": [1, 2, 0, 0, [[-4, 0, 1, 0]]]}\n', "its step has [0, 0, -4, 0]"),
        ("a,b\n1,2\n", "has no column ContextTokens, GeneratedTokens, TIMESTAMP"),
    ],
)
def test_a_damaged_trace_is_told_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    """Negative times were sorted in and shifted, as if they were the beginning."""
    assert words in complaint(capsys, *trace(tmp_path, text, "t"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "a load is one of --trace, --rate and --users; given: none"),
        (["--rate", "1/s", "--users", "3"], "given: --rate and --users"),
        (["--rate", "1/s", "--turns", "3"], "--rate does not read --turns"),
        (["--users", "3", "--speed", "2"], "--users does not read --speed"),
        (["--rate", "0/s"], "rate is '0/s'; it must be a positive number"),
        (["--rate", "1/s", "--requests", "1000000000000"], "--requests is 1000000000000"),
        (["--users", "10000000"], "--users is 10000000"),
        (["--users", "0"], "--users is 0"),
        (["--rate", "1/s", "--engines", "0"], "engines is 0"),
        (["--rate", "1/s", "--kv-tokens", "5"], "the KV pool is 5 tokens; it must be at least one block of 32"),
        (["--rate", "1/s", "--slo", "ttft"], "cannot read 'ttft' in --slo"),
        (["--rate", "1/s", "--slo", "ttft=1s,ttft=2s"], "cannot read 'ttft=2s' in --slo"),
        (["--rate", "1/s", "--usd-per-hour", "nan"], "--usd-per-hour is nan"),
        (["--rate", "1/s", "--prompt", "0:5"], "--prompt is '0:5'; it must be N or LOW:HIGH"),
        (["--rate", "1/s", "--output", "9:3"], "--output is '9:3'; it must be N or LOW:HIGH"),
        (["--trace", "/nowhere/t.csv"], "cannot read the trace /nowhere/t.csv: No such file"),
        (["--rate", "1/s", "--tp", "3"], "3"),
        (["--rate", "1/s", "--seed", "1", "--router", "luck"], "router is 'luck'"),
        (["--rate", "1/s", "--link", "50GB/s"], "--link is of a pool that prefills"),
        (["--rate", "1/s", "--prefill-engines", "2"], "--prefill-engines is of a pool that prefills"),
        (["--rate", "1/s", "--prefill-hardware", "l40s"], "two pools need a link"),
        (["--rate", "1/s", "--prefill-hardware", "l40s", "--link", "400Gb/s"], "cannot read the link '400Gb/s'"),
        (["--rate", "1/s", "--prefill-hardware", "l40s", "--link", "0GB/s"], "the link carries 0 bytes a second"),
        (["--rate", "1/s", "--prefill-hardware", "toaster", "--link", "1GB/s"], "toaster"),
        (["--rate", "1/s", "--prefill-hardware", "l40s", "--link", "1GB/s", "--prefill-engines", "0"], "engines is 0"),
        (["--rate", "1/s", "--cells", "3", "--engines", "4"], "4 engines cannot be divided into 3 cells"),
        (["--rate", "1/s", "--cells", "0"], "cannot be dealt to 0 cells"),
        (["--rate", "1/s", "--cells", "2", "--engines", "2", "--processes", "0"], "processes is 0"),
        (["--rate", "1/s", "--prompt", "1:9999999999"], "a prompt may have 9999999999 tokens; at most 16777216"),
        (["--users", "3", "--shared-prefix", "99999999999"], "at most 16777216 can be simulated"),
        (["--users", "3", "--turns", "100000000"], "turns is 100000000"),
        (["--users", "3", "--lora", "4:0"], "--lora is 0"),
        (["--users", "3", "--lora", "many"], "cannot read 'many' in --lora"),
        (["--rate", "1/s", "--block-tokens", "0"], "block tokens is 0"),
        (["--rate", "1/s", "--prefixes", "4"], "a load without --shared-prefix does not read --prefixes"),
        (["--rate", "1/s", "--processes", "4"], "a service of one cell does not read --processes"),
        (
            ["--rate", "1/s", "--prefills-alone", "--stall-budget", "9ms"],
            "--prefills-alone does not read --stall-budget",
        ),
        (["--rate", "1/s", "--acceptance", "0.9"], "a service without --speculate does not read --acceptance"),
        (
            ["--rate", "1/s", "--prefill-hardware", "l40s", "--link", "1GB/s", "--prefill-tp", "0"],
            "tensor parallel degree is 0",
        ),
        (["--rate", "1/s", "--hardware", "local", "--stack", "vllm"], "the stack is 'vllm'; this machine is priced by"),
    ],
)
def test_impossible_options_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    """What, the number, the limit; nothing is simulated first."""
    found = complaint(capsys, *arguments)
    assert words in found
    assert found.startswith("error: ")
    assert "Traceback" not in found


def test_numbers_are_whole_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 40 columns the table of latencies had rows and no numbers."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    app(["llama-3.1-8b", "-d", "l40s", "--rate", "3/s", "--requests", "3", "--prompt", "9", "--output", "4"])
    row = next(line for line in capsys.readouterr().out.splitlines() if "end to end" in line)
    assert len(re.findall(r"\d+(?:\.\d+)?", row)) == 6, row
