"""Names on the Hugging Face hub, by its own client and over HTTP: which files of a repository are fetched, and what is said."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from diptych.compute.loading.hub import resolve_model
from diptych.ground.errors import LoadError
from gguf_files import gguf_reference, write_gguf

COMMIT = "c" * 40
QUANTS = ("Q2_K", "Q4_K_M", "UD-Q4_K_M", "UD-Q4_K_XL", "BF16")
BYTES = b"GGUF of which nothing is read"
MANY = {
    "README.md": b"words",
    "config.json": b"{}",
    "mmproj-F16.gguf": BYTES,
    "imatrix_of_it.gguf": BYTES,
    "Small-3-UD-Q4_K_XL.gguf": BYTES,
    **{f"Small-3-{quant}.gguf": BYTES for quant in QUANTS},
    **{f"Q8_0/Small-3-Q8_0-{part:05}-of-00002.gguf": BYTES for part in (1, 2)},
}
REPOSITORIES: dict[str, dict[str, bytes]] = {
    "some/Small-3-GGUF": MANY,
    "some/only": {"only.Q5_K_S.gguf": BYTES},
    "some/unusual": {"a-Q2_K.gguf": BYTES, "a-Q8_0.gguf": BYTES},
    "some/both": {"model.safetensors": b"", "config.json": b"{}", "a-Q8_0.gguf": BYTES},
    "some/gated": {"model.safetensors": b"", "config.json": b"{}"},
    "some/pickled": {"config.json": b"{}", "pytorch_model.bin": b"."},
}
RESOLVE = """
import json, sys
from pathlib import Path
from diptych.compute.loading.hub import resolve_model
from diptych.ground.errors import LoadError
for name in sys.argv[1:]:
    try:
        path = resolve_model(name)
        folder = path if path.is_dir() else path.parent
        root = next(one for one in (folder, *folder.parents) if one.parent.name == "snapshots")
        found = str(path.relative_to(root)), sorted(str(one.relative_to(root)) for one in root.rglob("*.*"))
    except LoadError as error:
        found = error.message, error.hint
    print(json.dumps(found))
"""


class Hub(BaseHTTPRequestHandler):
    """What the hub's client asks for of repositories, and nothing else."""

    def log_message(self, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        asks_api = parts[:2] == ["api", "models"]
        files = REPOSITORIES.get("/".join(parts[2:4] if asks_api else parts[:2]))
        name = "/".join(parts[4:])
        if parts[1] == "gated" and not asks_api:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if files is None or (not asks_api and name not in files):
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound" if files is None else "EntryNotFound"})
        if parts[4:5] == ["tree"]:
            tree = [{"type": "file", "path": one, "size": len(files[one]), "oid": COMMIT} for one in files]
            return self._send(200, json.dumps(tree).encode(), {})
        if asks_api:
            listed = {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": [{"rfilename": one} for one in files]}
            return self._send(200, json.dumps(listed).encode(), {})
        digest = hashlib.sha256(name.encode() + files[name]).hexdigest()
        return self._send(200, files[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body)), "Content-Type": "application/json"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def resolved(names: list[str], cache: Path, **variables: str) -> list[list]:
    """For each name, in one fresh process, [what it is, files in the cache of its repository then], or what is said of it."""
    env = (
        os.environ | {"HF_HOME": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"} | variables
    )
    command = [sys.executable, "-c", RESOLVE, *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_quantisation_behind_a_colon_is_fetched_and_nothing_else(endpoint: str, tmp_path: Path) -> None:
    """As llama.cpp, Ollama and vLLM read names; the next time without the hub."""
    cases = {
        "some/Small-3-GGUF:Q2_K": ["Small-3-Q2_K.gguf"],
        "some/Small-3-GGUF:q4_k_xl": ["Small-3-UD-Q4_K_XL.gguf"],
        "some/Small-3-GGUF:Q8_0": [f"Q8_0/Small-3-Q8_0-{part:05}-of-00002.gguf" for part in (1, 2)],
        "hf.co/some/Small-3-GGUF:BF16": ["Small-3-BF16.gguf"],
        "https://huggingface.co/some/Small-3-GGUF/blob/main/Small-3-UD-Q4_K_M.gguf": ["Small-3-UD-Q4_K_M.gguf"],
    }
    found = resolved(list(cases), tmp_path, HF_ENDPOINT=endpoint)
    here: set[str] = set()
    for (first, *rest), (what, files) in zip(cases.values(), found, strict=True):
        here |= {first, *rest}
        assert (what, set(files)) == (first, here)
    names = [*cases, "some/Small-3-GGUF:Q3_K_S", "some/only:Q5_K_S"]
    *again, missing, unknown = resolved(names, tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert [what for what, _ in again] == [what for what, _ in found]
    assert "Q3_K_S" in missing[0]
    assert "UD-Q4_K_XL" in missing[1]
    assert "the hub could not be reached" in unknown[0]
    elsewhere = resolved(["some/only:Q5_K_S"], tmp_path / "none", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert "the hub could not be reached" in elsewhere[0][0]


def test_without_a_quantisation_the_usual_one_is_meant_or_all_are_named(endpoint: str, tmp_path: Path) -> None:
    names = ["Small-3-GGUF", "only", "both", "unusual", "pickled", "unusual:Q4", "nothing:Q4", "nothing", "gated"]
    found = resolved([f"some/{name}" for name in names], tmp_path, HF_ENDPOINT=endpoint)
    usual, only, both, unusual, pickled, other, *nothing, gated = found
    assert usual[0] == "Small-3-Q4_K_M.gguf"
    assert only[0] == "only.Q5_K_S.gguf"
    assert both == [".", ["config.json", "model.safetensors"]], "safetensors come before GGUF, which is not fetched"
    assert unusual == [
        "some/unusual on the hub holds 2 GGUF models",
        "name one as some/unusual:NAME: Q2_K, Q8_0",
    ]
    assert pickled[0] == "some/pickled on the hub holds no safetensors and no GGUF file"
    assert other[0] == "some/unusual on the hub holds no one GGUF model called 'Q4'"
    for told in nothing:
        assert told[0] == "some/nothing is neither a folder nor a model on the hub"
        assert "HF_TOKEN" in told[1]
    assert gated[0] == "some/gated is gated: the hub gives it to those who were granted access"


def test_a_file_or_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some").mkdir()
    write_gguf(gguf_reference("llama"), Path("some/model:Q8_0"))
    assert resolve_model("some/model:Q8_0") == Path("some/model:Q8_0")
    Path("some/folder").mkdir()
    write_gguf(gguf_reference("llama"), Path("some/folder/a.gguf"))
    assert resolve_model("some/folder") == Path("some/folder/a.gguf")
    with pytest.raises(LoadError, match="no such folder or file"):
        resolve_model("./some/other:Q8_0")
