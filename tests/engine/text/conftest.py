"""The chat templates that llama-cpp-python carries, for the slow tests."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

PACKAGE = "llama-cpp-python==0.3.36"


@pytest.fixture(scope="session")
def all_sources(request: pytest.FixtureRequest) -> dict[str, str]:
    """Every template of the package, which is fetched once."""
    folder = request.config.cache.mkdir("chat_templates")
    if not list(folder.glob("*.tar.gz")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-binary",
            ":all:",
            "--no-deps",
            "-d",
            str(folder),
        ]
        fetched = subprocess.run([*command, PACKAGE], capture_output=True, text=True, timeout=500)
        if fetched.returncode:
            pytest.skip(f"{PACKAGE} cannot be fetched: {fetched.stderr[-200:]}")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        found = {}
        for member in archive:
            path = Path(member.name)
            content = (
                archive.extractfile(member) if path.parent.name == "templates" and path.suffix == ".jinja" else None
            )
            if content is not None:
                found[path.stem] = content.read().decode()
    return found
