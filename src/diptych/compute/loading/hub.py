"""Models by name: a path on disk, or a name on the Hugging Face hub, downloaded or found in the hub's cache.

    resolve_model("Qwen/Qwen3-0.6B")                    # the folder of a checkpoint
    resolve_model("unsloth/Qwen3-0.6B-GGUF:Q4_K_M")     # the GGUF file of that quantisation, all its parts fetched

What stands behind a colon is read as llama.cpp, Ollama and vLLM read it; links to the hub are names too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import huggingface_hub

from diptych.ground.errors import LoadError
from diptych.models.files import A_MODEL, first_line, has_weights, no_model
from diptych.models.gguf.file import PART, SUFFIX, find_gguf

logger = logging.getLogger("diptych.compute")

# what a model needs and nothing else: no Python files, no pickled weights
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "vocab.txt")
# the same weights a second time, in their makers' own layouts (Mistral's, gpt-oss's)
IGNORED = ("consolidated*", "original/*")
NO_HUB_NAMES = (SUFFIX, ".safetensors", ".json")
LINKS = ("https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/")
_REPOSITORY = re.compile(
    rf"(?P<repo>[\w.-]+/[\w.-]+?)(?::(?P<quant>[\w.-]+)|/(?:(?:blob|resolve)/main/)?(?P<file>.+\{SUFFIX}))?"
)
_QUANT = re.compile(
    r"(?:^|[-_.])(?P<quant>(?:UD-)?(?:I?Q|TQ)\d[A-Z0-9_]*|B?F16|FP16|F32|MXFP4[A-Z0-9_]*|NVFP4)$", re.IGNORECASE
)
_NO_MODELS = ("mmproj", "imatrix")  # towers of pictures, and what quantising was weighed by
# of a repository with several, where none is named: llama.cpp's choice
USUAL_QUANT = "Q4_K_M"


def resolve_model(name: str | Path) -> Path:
    """The folder of a checkpoint, or a GGUF file: a local path, or a hub name downloaded (or found in the hub's cache).

    Raises LoadError when there is neither.
    """
    path = Path(name).expanduser()
    gguf = find_gguf(path)
    if gguf is not None:
        return gguf
    named = None if path.exists() else _REPOSITORY.fullmatch(_without_link(str(name)))
    if named is None:
        return resolve_model_dir(name)
    repo = named["repo"]
    if named["quant"] is None and named["file"] is None:
        folder = resolve_model_dir(repo)
        if has_weights(folder):
            return folder
    found = _models_in(repo)
    if not found:
        raise LoadError(
            f"{repo} on the hub holds no safetensors and no GGUF file", hint="pickled checkpoints are not read"
        )
    return _fetched(repo, found[_chosen(repo, found, named["quant"], named["file"])])


def resolve_model_dir(name: str | Path, *, wanted: str = A_MODEL) -> Path:
    """The folder of a checkpoint: a local path, or a hub name downloaded (or found in the hub's cache).

    Raises LoadError when there is neither; wanted: what it then says is taken.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise no_model(path)
    if str(name).count("/") > 1 or str(name).startswith((".", "/", "~")) or path.suffix in NO_HUB_NAMES:
        raise LoadError(f"no such folder or file: {path}", hint=wanted)
    with _hub_errors(name):
        return Path(
            huggingface_hub.snapshot_download(str(name), allow_patterns=list(PATTERNS), ignore_patterns=list(IGNORED))
        )


def _without_link(name: str) -> str:
    return next((name.removeprefix(link) for link in LINKS if name.startswith(link)), name)


def _models_in(repo: str) -> dict[str, list[str]]:
    """The files of every GGUF model of a repository, parts in order, by the model's name without its part and ending."""
    models: dict[str, list[str]] = {}
    for name in sorted(_files_of(repo)):
        path = Path(name)
        if path.suffix == SUFFIX and not any(word in path.name for word in _NO_MODELS):
            part = PART.match(path.name)
            stem = path.name.removesuffix(SUFFIX) if part is None else part["stem"]
            models.setdefault(str(path.with_name(stem)), []).append(name)
    return models


def _files_of(repo: str) -> Sequence[str]:
    """Names of a repository's files; where the hub cannot be reached, of those that are in its cache."""
    errors = import_module("huggingface_hub.errors")
    with _hub_errors(repo):
        try:
            return [file.rfilename for file in huggingface_hub.HfApi().model_info(repo).siblings or ()]
        except (errors.RepositoryNotFoundError, errors.HFValidationError):
            raise
        except (OSError, errors.HTTPError) as error:
            cached = _cached_files(repo)
            if not cached:
                raise errors.LocalEntryNotFoundError(str(error)) from error
            return cached


def _cached_files(repo: str) -> list[str]:
    """Of the snapshot that was fetched last; of none, nothing."""
    try:
        all_known = huggingface_hub.scan_cache_dir().repos
    except huggingface_hub.CacheNotFound:
        return []
    known = [one for one in all_known if (one.repo_type, one.repo_id) == ("model", repo)]
    snapshots = [snapshot for one in known for snapshot in one.revisions]
    last = max(snapshots, key=lambda snapshot: snapshot.last_modified, default=None)
    return [] if last is None else [str(file.file_path.relative_to(last.snapshot_path)) for file in last.files]


def _chosen(repo: str, models: Mapping[str, object], quant: str | None, file: str | None) -> str:
    """Which of the models is meant. LoadError where it cannot be told."""
    if file is not None:
        part = PART.match(file.rpartition("/")[2])
        stem = file.removesuffix(SUFFIX) if part is None else str(Path(file).with_name(part["stem"]))
        if stem in models:
            return stem
        raise LoadError(f"{repo} on the hub has no file {file}", hint=_listed(repo, models))
    wanted = (quant or USUAL_QUANT).lower()
    for name in (wanted, f"ud-{wanted}"):  # Unsloth's own mixtures, where there is no other of the name
        alike = [model for model in models if _quant_of(model).lower() == name]
        if len(alike) == 1:
            if quant is None:
                logger.info("quantisation chosen name=%s:%s of=%d", repo, _quant_of(alike[0]), len(models))
            return alike[0]
    if quant is None and len(models) == 1:
        return next(iter(models))
    told = f"holds {len(models)} GGUF models" if quant is None else f"holds no one GGUF model called {quant!r}"
    raise LoadError(f"{repo} on the hub {told}", hint=_listed(repo, models))


def _quant_of(model: str) -> str:
    """How a file, or the folder of its parts, says that it is quantised; the file's whole name where neither does."""
    found = [_QUANT.search(name) for name in reversed(model.split("/"))]
    return next((one["quant"] for one in found if one is not None), model.rpartition("/")[2])


def _listed(repo: str, models: Mapping[str, object]) -> str:
    return f"name one as {repo}:NAME: {', '.join(sorted({_quant_of(model) for model in models}))}"


def _fetched(repo: str, files: Sequence[str]) -> Path:
    with _hub_errors(repo):
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=list(files))) / files[0]


@contextmanager
def _hub_errors(name: str | Path) -> Iterator[None]:
    """What the hub's client raises is a LoadError."""
    errors = import_module("huggingface_hub.errors")  # brings an HTTP client, which a folder on disk does not need
    try:
        yield
    except errors.GatedRepoError as error:
        raise LoadError(
            f"{name} is gated: the hub gives it to those who were granted access",
            hint="ask for it on the model's page there, then set HF_TOKEN or run `hf auth login`",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise LoadError(
            f"{name} is neither a folder nor a model on the hub",
            hint="a private one wants HF_TOKEN, or `hf auth login`",
        ) from error
    except errors.HFValidationError as error:
        raise LoadError(f"{name} is neither a folder nor a model on the hub: {first_line(error)}") from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        raise LoadError(
            f"{name} is not a folder, and the hub could not be reached: {first_line(error)}",
            hint="give the path of a downloaded checkpoint, or go online once to fill the hub's cache",
        ) from error
