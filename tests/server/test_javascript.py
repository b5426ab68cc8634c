"""The JavaScript clients people have (`javascript/package.json` pins them), where node and npm are at hand.

npm fetches them once, without running their scripts, into the user's cache; offline it finds them there or in its own. Where it
cannot, the test is skipped with what npm said.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from server_process import ServerProcess

HERE = Path(__file__).parent / "javascript"
PINS = ("package.json", "package-lock.json")
INSTALL = (
    "ci",
    "--ignore-scripts",
    "--prefer-offline",
    "--no-audit",
    "--no-fund",
    "--fetch-retries=0",
    "--fetch-timeout=20000",
)


@pytest.fixture(scope="module")
def clients() -> Path:
    """A folder with the script and everything it imports; its name has the pins' digest, so that new pins get a new one."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in PINS)).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diptych-tests" / f"javascript-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "installed").exists():
        for name in PINS:
            shutil.copy(HERE / name, folder)
        try:
            done = subprocess.run([npm, *INSTALL], cwd=folder, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            pytest.skip("npm took over two minutes")
        if done.returncode != 0:
            pytest.skip(f"npm could not fetch the clients: {done.stderr[-300:]}")
        (folder / "installed").touch()
    shutil.copy(HERE / "clients.mjs", folder)
    return folder


def test_openai_anthropic_and_vercel_s_ai_in_their_default_modes(clients: Path, server: ServerProcess) -> None:
    """Whole and streamed, a stored conversation, agents with a tool, structured objects; one text through all protocols."""
    done = subprocess.run(
        ["node", "clients.mjs"],
        cwd=clients,
        env={**os.environ, "DIPTYCH_URL": server.url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "all clients agree", done.stderr
    assert done.returncode == 0
