"""The JavaScript clients people have, where node and they are at hand.

npm install --prefix DIR openai @anthropic-ai/sdk ai @ai-sdk/openai zod; DIPTYCH_NODE_MODULES=DIR/node_modules pytest ...
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from server_process import ServerProcess

MODULES = os.environ.get("DIPTYCH_NODE_MODULES")


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.skipif(MODULES is None, reason="DIPTYCH_NODE_MODULES names no folder with the clients")
def test_openai_anthropic_and_vercel_s_ai_in_their_default_modes(server: ServerProcess, tmp_path: Path) -> None:
    """Whole and streamed, a stored conversation, an agent with a tool, a structured object."""
    (tmp_path / "node_modules").symlink_to(Path(MODULES or "").resolve())
    script = tmp_path / "clients.mjs"
    script.write_text((Path(__file__).parent / "clients.mjs").read_text())
    done = subprocess.run(
        ["node", str(script)],
        env={**os.environ, "DIPTYCH_URL": server.url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all clients agree"
