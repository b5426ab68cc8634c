"""Packed weights kept between starts: what the cpu backend made of a checkpoint, to be mapped instead of made again.

An entry is a folder with one safetensors file as `diptych quantize` writes it (`loading.quant`), named by a digest of all that
decides its bytes: the checkpoint's files, its config, the format, the kernel set, the layout's version. It is written beside
its place and renamed, so that two processes, a full disk or a kill leave an entry or none; every tensor's checksum is checked
when it is read, and what fails is thrown away and made again. The folder is bounded: the entries unused for longest go first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from diptych.compute.loading.quant import PACKED_LAYOUT, QuantisedCheckpoint, TensorSource, write_tensors
from diptych.compute.ops.cpu.handles import INT4_GROUP
from diptych.compute.ops.cpu.loader import CpuLoader
from diptych.ground.errors import LoadError
from diptych.ground.version import VERSION
from diptych.models.files import WHOLE_FILE

logger = logging.getLogger("diptych.compute")

UNFINISHED = ".unfinished-"
SAMPLES, SAMPLE_BYTES = 16, 4096  # of each file, spread over it; whether it changed at all its times and its inode say
# smaller weights are packed in less time than it takes to explain why a folder has grown
WORTH_BYTES = 256 * 2**20
CALIBRATED_BYTES = 32 * 2**20  # likewise, of those that a text was read for, which takes longer than packing


class CachedCheckpoint(QuantisedCheckpoint):
    """An entry of the cache. It stands for the checkpoint that it was made from, also in the model's revision.

    Its file is written once, under another name, and never again; who throws it away leaves it to those that have it mapped.
    """

    is_lasting = True

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._origin = str(self.metadata.get("fingerprint"))

    def fingerprint(self) -> str:
        """That of the checkpoint that was packed."""
        return self._origin

    def _give_pages_back(self) -> None:
        """They stay: what is read here is used here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCache:
    """A folder of entries, at most `limit_bytes` together."""

    folder: Path
    limit_bytes: int
    worth_bytes: int = WORTH_BYTES

    def key(self, files: Sequence[Path], hf_config: Mapping[str, Any], *decides: str) -> str:
        """The name of the entry for these files, this config, and what else `decides`: formats, kernel set."""
        digest = hashlib.sha256(json.dumps(hf_config, sort_keys=True).encode())
        digest.update(
            f"{VERSION} {PACKED_LAYOUT} exponents orders tied nested planes fp8 fractions rates curves gates bounds feedback "
            f"powers {INT4_GROUP} "
            f"{' '.join(decides)}\n".encode()
        )
        for path in files:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                digest.update(f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n".encode())
                for number in range(SAMPLES):
                    file.seek(number * status.st_size // SAMPLES)
                    digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()[:32]

    def find(self, key: str) -> CachedCheckpoint | None:
        """The entry, mapped; None where there is none. A damaged one is thrown away."""
        entry = self.folder / key
        if not self._has(key):
            if _holds_nothing(entry):
                self.drop(key, f"it has no file {WHOLE_FILE}")
            return None
        try:
            found = CachedCheckpoint(entry)
        except (LoadError, OSError) as error:
            self.drop(key, str(error))
            return None
        with suppress(OSError):  # a folder that may only be read has no order to keep
            os.utime(entry)  # used now
        return found

    def _has(self, key: str) -> bool:
        """Whether there is an entry of that name that this process may see."""
        return os.path.isfile(self.folder / key / WHOLE_FILE)

    def drop(self, key: str, why: str) -> None:
        """Throw an entry away."""
        logger.warning("packed weights thrown away entry=%s reason=%s", self.folder / key, why.splitlines()[0])
        entry = self.folder / key
        if entry.is_symlink() or entry.is_file():
            with suppress(OSError):
                entry.unlink()
        shutil.rmtree(entry, ignore_errors=True)

    def store(self, key: str, loader: CpuLoader, source: TensorSource, *, is_calibrated: bool = False) -> None:
        """Write what `loader` packed, if that is worth it, while the start goes on: it takes as long as packing did.

        A process that is over before ends when it is written.
        """
        nbytes = int(loader.program.weight_bytes) + int(loader.program.table_bytes)
        if nbytes < (min(self.worth_bytes, CALIBRATED_BYTES) if is_calibrated else self.worth_bytes):
            return
        Thread(target=self._write, args=(key, loader, source, nbytes), name="packed weights").start()

    def _write(self, key: str, loader: CpuLoader, source: TensorSource, nbytes: int) -> None:
        """Says in the log, and raises nothing, where there is no room."""
        unfinished = self.folder / f"{UNFINISHED}{uuid.uuid4().hex}-{os.getpid()}"
        try:
            unfinished.mkdir(parents=True)
            if nbytes > self.limit_bytes or 2 * nbytes > shutil.disk_usage(self.folder).free:
                logger.info("packed weights not kept bytes=%d limit=%d free=%d", nbytes, self.limit_bytes,
                            shutil.disk_usage(self.folder).free)  # fmt: skip
                return
            self._make_room(nbytes)
            write_tensors(unfinished / WHOLE_FILE, loader, source, fingerprint=source.fingerprint())
            unfinished.rename(self.folder / key)
        except OSError as error:
            if not self._has(key):  # else another process was faster
                logger.warning("packed weights not kept folder=%s reason=%s", self.folder, error.strerror or error)
        except LoadError as error:  # the checkpoint is another meanwhile
            logger.warning("packed weights not kept folder=%s reason=%s", self.folder, error.message)
        else:
            logger.info("packed weights kept entry=%s bytes=%d", self.folder / key, nbytes)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _make_room(self, nbytes: int) -> None:
        """Throw away what was unused for longest until `nbytes` more fit, and what a killed process left half-written."""
        entries = sorted(self._entries(), key=lambda entry: entry[0])
        held = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            is_left = path.name.startswith(UNFINISHED) and not _is_running(path)
            if held + nbytes > self.limit_bytes or is_left:
                shutil.rmtree(path, ignore_errors=True)
                held -= size

    def _entries(self) -> Iterable[tuple[float, int, Path]]:
        for path in self.folder.iterdir():
            try:
                sizes = [file.stat().st_size for file in path.iterdir()]
                yield path.stat().st_mtime, sum(sizes), path
            except OSError:  # another process threw it away meanwhile, or it is no folder
                continue


def _holds_nothing(entry: Path) -> bool:
    """Whether what has an entry's name can never be one, and keeps others from its place; not what this process may not see."""
    try:
        return not stat.S_ISREG((entry / WHOLE_FILE).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return os.path.lexists(entry)
    except OSError:
        return False


def _is_running(unfinished: Path) -> bool:
    try:
        os.kill(int(unfinished.name.rpartition("-")[2]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
