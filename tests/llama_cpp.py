"""llama.cpp as the source package of llama-cpp-python carries it: fetched once, when a slow test asks."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.3.36"


def llama_cpp_source() -> Path:
    """The folder of llama.cpp; downloaded with pip into the system's folder for temporary files on first use."""
    root = Path(tempfile.gettempdir()) / f"diptych-llama-cpp-{VERSION}"
    source = root / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    if not source.is_dir():
        root.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-binary", ":all:", "--no-deps"]
        command += [f"llama-cpp-python=={VERSION}", "-d", str(root)]
        subprocess.run(command, check=True, timeout=600)
        with tarfile.open(root / f"llama_cpp_python-{VERSION}.tar.gz") as archive:
            archive.extractall(root, filter="data")
    return source
