"""The worked example of docs/agents.md, run as it stands there: the page tells what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from server_process import ServerProcess

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text()


def without_times(text: str) -> list[str]:
    """What is the same on every machine."""
    return re.sub(r"; prefill .*|, [0-9.]+ ms", "", text).strip().splitlines()


def test_the_agent_of_the_page_does_what_the_page_says(server: ServerProcess) -> None:
    code, told = re.findall(r"```(?:python|text)\n(.*?)```", PAGE, re.DOTALL)
    run = code.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # the sentence at the end is the model's, and may change with the kernels' instruction set
    assert without_times(done.stdout)[:-1] == without_times(told)[:-1]
