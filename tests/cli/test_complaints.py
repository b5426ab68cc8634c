"""Commands where something is wrong around them: disks, pipes, names, Ctrl-C. Never a traceback, always a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import started
from diptych.cli.options import check_writable
from diptych.ground.clock import sleep_s
from started import Started

FULL = Path("/dev/full")
PLAN = ("plan", "llama-3.1-8b", "--hardware", "h100-80gb-sxm")


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return started.run(*arguments, env=os.environ | {"COLUMNS": "80", "HF_HUB_OFFLINE": "1"}, **options)


@pytest.mark.skipif(not FULL.is_char_device(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", [("--help",), PLAN, ("generate", "hi", "--max-tokens", "4", "-q")])
def test_a_full_disk_is_said(arguments: tuple[str, ...]) -> None:
    """`diptych generate > /dev/full` ended in a traceback, and --help in "Exception ignored"."""
    with FULL.open("w") as full:
        done = run(*arguments, stdout=full)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: cannot write the output: No space left on device"


@pytest.mark.parametrize("arguments", [("--help",), PLAN])
def test_a_reader_that_leaves_ends_the_command_quietly(arguments: tuple[str, ...]) -> None:
    """`diptych plan | head` said exit code 1, as if the plan were wrong; 141 is what a shell expects."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = run(*arguments, stdout=write_end)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_output_is_no_error() -> None:
    """`diptych --help >&-`: there is no standard output at all."""
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m diptych --version >&-"], stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not FULL.is_char_device(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", [("no-command",), ("plan", "no-model", "-d", "l40s"), ("embed", "--no")])
@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_errors_that_nobody_can_read_stay_off_the_output(arguments: tuple[str, ...], where: str) -> None:
    """Without a standard error they went to standard output, as if they were the answer; with a full one the code was 1."""
    command = f"{sys.executable} -m diptych {' '.join(arguments)} {where}"
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize(
    ("rest", "encoding", "out", "err"),
    [
        ("- <&-", "utf-8", b"", b"error: prompt has 0 tokens"),
        ("- < words", "utf-8:strict", b"", b"error: text has a lone surrogate (U+DCE9) at character 3"),
        ("'\u6771 hi'", "latin-1", rb"\u6771 hi", b""),
    ],
)
def test_streams_and_letters_that_are_not_there_are_no_traceback(
    rest: str, encoding: str, out: bytes, err: bytes, tmp_path: Path
) -> None:
    """No standard input, bytes in it that are no text, and text that a locale cannot write: each ended in a traceback."""
    (tmp_path / "words").write_bytes("abc\u00e9 d".encode("latin-1"))
    command = f"{sys.executable} -m diptych generate -q --max-tokens 1 {rest}"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False, cwd=tmp_path, env=environment)
    assert done.stdout.startswith(out)
    assert done.stderr.startswith(err)
    assert (done.returncode == 0) == (err == b""), done.stderr


def test_files_that_cannot_be_written_are_named_before_measuring(tmp_path: Path) -> None:
    """`lab --out` and `lab calibrate --out` ended in a traceback, the second after a minute of measuring."""
    file = tmp_path / "file"
    file.write_text("")
    for arguments in (("lab", "--only", "kv-cache", "-o", str(file)), ("lab", "calibrate", "--out", str(file / "x"))):
        done = run(*arguments)
        assert done.returncode == 2
        assert f"error: cannot read or write {file}" in done.stderr
        assert "Traceback" not in done.stderr
    # the usual place, too, of which nothing is known before the measuring is over
    done = started.run("lab", "calibrate", env=os.environ | {"DIPTYCH_HOME": str(file)})
    assert done.returncode == 2
    assert f"error: cannot read or write {file}" in done.stderr


def test_a_file_that_can_be_written_is_not_left_there_empty(tmp_path: Path) -> None:
    """Ctrl-C in `lab calibrate --out` left a profile of no bytes, which nothing could read."""
    new, old = tmp_path / "folder" / "new.json", tmp_path / "old.json"
    old.write_text("{}")
    check_writable(new)
    check_writable(old)
    assert [one.name for one in new.parent.iterdir()] == []
    assert old.read_text() == "{}"


def test_a_prompt_that_is_refused_is_not_printed(tmp_path: Path) -> None:
    """A megabyte of prompt stood above the one line that said why it was refused."""
    prompt = tmp_path / "long.txt"
    prompt.write_text("word " * 9000)
    done = run("generate", "--prompt-file", str(prompt))
    assert (done.returncode, done.stdout) == (2, "")
    assert "tokens; a context of 4096 takes at most 4095" in done.stderr


def test_a_context_that_ends_the_answer_is_said_before() -> None:
    """`--max-tokens` beyond the context was clipped in silence."""
    done = run("generate", "hi", "--max-tokens", "300", "--max-context-tokens", "8", "-q")
    assert done.returncode == 0
    assert "the context holds 8 tokens and the prompt takes 1, so at most 7 are written, not 300" in done.stderr


def test_ctrl_c_in_generate_reports_what_there_was() -> None:
    """The text stopped, and with it everything that was measured was gone."""
    command = ("generate", "Once", "--max-tokens", "4000", "--ignore-eos")
    with Started(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(60)  # many tokens: it is decoding
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert out.endswith("\n")
    assert "stopped by Ctrl-C" in err
    assert "decode" in err


def test_ctrl_c_in_the_lab_keeps_what_was_finished(tmp_path: Path) -> None:
    """A real signal within an experiment: a report of those before it, a word on resuming, and a run that does so."""
    command = ("lab", "--longest-tokens", "128", "--repeat", "2", "-o", str(tmp_path), "--only", "kv-cache")
    assert run(*command, "--budget", "0").returncode == 0
    saved = tmp_path / "kv-cache.json"
    saved.write_text(saved.read_text().replace('"is_noisy": true', '"is_noisy": false'))  # else it is measured again
    more = ("--only", "decode-position", "--budget", "600")
    with Started(*command, *more, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        # kv-cache was taken over, and told: results.json is there a moment before, when it is not yet counted
        assert any(" · " in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
        process.wait(timeout=120)
    assert process.returncode == 130
    assert "stopped by Ctrl-C: 1 of 2 experiments are finished" in err
    assert "the same command goes on from there" in err
    assert "Traceback" not in err
    assert "kv-cache" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "decode-position.json").exists()
    again = run(*command, "--only", "decode-position", "--budget", "0")
    assert again.returncode == 0
    assert "1 of 2 results were found" in again.stderr
    assert (tmp_path / "decode-position.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="children are counted in /proc")
@pytest.mark.parametrize(("ends", "begun"), [(signal.SIGTERM, 1), (signal.SIGTERM, 2), (signal.SIGINT, 2)])
def test_processes_that_simulate_end_with_the_command(ends: signal.Signals, begun: int) -> None:
    """After SIGTERM they went on, and at last told of a broken pipe and of semaphores; just begun, of an end of input."""
    load = ("simulate", "llama-3.1-8b", "-d", "l40s", "--rate", "9/s", "--requests", "200000", "--engines", "2")
    command = [sys.executable, "-m", "diptych", *load, "--cells", "2", "--processes", "2"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # background jobs of a shell inherit it ignored
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 1 + begun:  # that simulate, and the tracker of their semaphores
        assert process.poll() is None
        sleep_s(0.001)
    if ends == signal.SIGINT:
        os.killpg(process.pid, ends)
    else:
        process.send_signal(ends)
    out, err = process.communicate(timeout=60)  # until nobody holds the pipes
    assert (process.returncode, out, err) == (128 + ends, "", "")


def test_options_are_checked_before_standard_input_is_read() -> None:
    """`generate - --temperature nan` waited for the end of a standard input that nobody closed."""
    command = ("generate", "-", "--temperature", "nan")
    with Started(*command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(timeout=60) == 2
        finally:
            process.kill()
        assert process.stderr is not None
        assert "temperature is nan" in process.stderr.read()


def test_each_answer_of_a_chat_ends_its_line() -> None:
    """In a file they ran together: their line breaks went to standard error."""
    done = run("chat", "--max-tokens", "20", input="What is the capital of France?\nhi\n")
    assert done.returncode == 0
    assert done.stdout.startswith("The capital of France is Paris.\n")
    assert done.stdout.endswith("\n")


def test_chat_reports_no_cold_start() -> None:
    """The third turn's report said 64.4 ms "from a cold start" for 3.8: the loading was counted in each."""
    done = run("chat", "--max-tokens", "4", input="hi\nhi\n/report\n")
    assert done.returncode == 0
    assert "TTFT" in done.stderr
    assert "load" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "hi", "--device", "gpu"), "hint: a CUDA device is named cuda"),
        (("generate", "hi", "-m", "qwen2.5-0.5b"), "as --shape qwen2.5-0.5b"),
        (("generate", "hi", "--max-tokens", "-1"), "between 0 and 2147483647"),
        (("generate", "hi", "--n", "2000000"), "n is 2000000; it must be a whole number between 1 and 64"),
        (("serve", "--api-key", "", "--port", "0"), "the API key is empty"),  # "$KEY", unset: it once served everybody
        (
            ("serve", "--workers", "1", "--runtime-lora", "--port", "0"),
            "--runtime-lora is for one engine in this process",
        ),
        (("generate", "--prompt-file", "/"), "cannot read the prompt from /: Is a directory"),
    ],
)
def test_messages_lead_on(arguments: tuple[str, ...], message: str) -> None:
    """Each hint must be one that works when it is followed."""
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "ConnectError" not in done.stderr


def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    """Whatever it is called; to be told of "a folder" would not help."""
    file = tmp_path / "model.bin"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    done = run("generate", "hi", "-m", str(file))
    assert done.returncode == 2
    assert "reaches to byte 16; the file has 8" in done.stderr


@pytest.mark.native
def test_the_bundled_model_is_quantised_by_its_name(tmp_path: Path) -> None:
    """`bundled` is a model for every other command."""
    folder = tmp_path / "q[/b]"  # it ended in a traceback of what writes lines in colours
    done = run("quantize", "bundled", "-o", str(folder))
    assert done.returncode == 0, done.stderr
    assert f"{folder.name}: " in done.stderr
    assert (folder / "model.safetensors").stat().st_size > 1e6


def test_a_gguf_file_is_not_packed_and_called_one(tmp_path: Path) -> None:
    """It was "a file that is no GGUF"."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    done = run("quantize", str(file), "-o", str(tmp_path / "q"))
    assert done.returncode == 2
    assert "m.gguf is a GGUF file, and what is packed is a folder" in done.stderr


def test_bench_shows_every_number_in_80_columns() -> None:
    """Rates were cut off as `665.8…` on the terminal that most people have; in a file there was nothing at all."""
    done = run(
        "bench", "--prompt-tokens", "64", "--batch", "16", "--new-tokens", "4", "--repeat", "1", stdout=subprocess.PIPE
    )
    assert done.returncode == 0, done.stderr
    assert "prefill" in done.stdout
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
