"""Headers of GGUF files: the reader of the `gguf` package as oracle, and files that lie about themselves."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from diptych.engine.text.gguf_vocabulary import gguf_tokenizer
from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig, read_json
from diptych.models.gguf.checkpoint import read_config
from diptych.models.gguf.file import BLOCK_TYPES, GgufArray, find_gguf, open_gguf, shortest
from diptych.models.read import read_model


def write(path: Path, alignment: int | None = None) -> Path:
    """A small file with every kind of value, three tensors and a whole vocabulary."""
    out = gguf.GGUFWriter(str(path), "llama")
    if alignment is not None:
        out.add_custom_alignment(alignment)
    out.add_context_length(64)
    out.add_embedding_length(32)
    out.add_block_count(1)
    out.add_feed_forward_length(64)
    out.add_head_count(2)
    out.add_head_count_kv(1)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(5e5)
    out.add_tokenizer_model("llama")
    out.add_token_list(["<unk>", "<s>", "</s>", "a", "b", "ab", *(f"<0x{byte:02X}>" for byte in range(16))])
    out.add_token_scores([-float(i) for i in range(22)])
    out.add_token_types([2, 3, 3, 1, 1, 1, *[6] * 16])
    out.add_bool("a.bool", True)
    for number, add in enumerate(
        (out.add_uint8, out.add_int8, out.add_uint16, out.add_int16, out.add_uint64, out.add_int64)
    ):
        add(f"a.{number}", 100 + number)
    out.add_float64("a.double", 1 / 3)
    out.add_array("a.bools", [True, False])
    out.add_array("a.floats", [0.5, 1e-5])
    rng = np.random.default_rng(0)
    out.add_tensor("token_embd.weight", rng.standard_normal((22, 32), dtype=np.float32))
    out.add_tensor("blk.0.ffn_up.weight", gguf.quantize(rng.standard_normal((64, 32), dtype=np.float32), Q8),
                   raw_dtype=Q8)  # fmt: skip
    out.add_tensor("output_norm.weight", rng.standard_normal(32, dtype=np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


Q8 = gguf.GGMLQuantizationType.Q8_0


def test_a_header_is_walked_once_while_somebody_holds_it(tmp_path: Path) -> None:
    """Weights and words are read by different rooms; half a million texts of a vocabulary were passed over twice."""
    path = write(tmp_path / "m.gguf")
    held = open_gguf(path)
    assert open_gguf(path).mapped(0) is held.mapped(0)
    os.replace(write(tmp_path / "other.gguf"), path)
    assert open_gguf(path).mapped(0) is not held.mapped(0)


def test_types_have_the_sizes_of_the_package() -> None:
    """A block of one byte more reads every tensor behind it wrongly."""
    known = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    ours = {number: (kind.name, kind.elements, kind.nbytes) for number, kind in BLOCK_TYPES.items()}
    assert ours.pop(42) == ("Q2_0", 64, 18)  # which llama.cpp has, and no package yet
    assert ours.items() <= known.items()


@pytest.mark.parametrize("alignment", [None, 8, 512, 2048, 4096])
def test_a_header_says_what_the_packages_reader_says(alignment: int | None, tmp_path: Path) -> None:
    """Keys, arrays, shapes, types and where each tensor begins."""
    path = write(tmp_path / "m.gguf", alignment)
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    for key, value in ours.metadata.items():
        expected = theirs.fields[key].contents()
        found = value.values() if isinstance(value, GgufArray) else value
        assert found == pytest.approx(expected) if not isinstance(found, str) else found == expected, key
    assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
    for tensor in theirs.tensors:
        one = ours.tensors[tensor.name]
        assert (one.shape, one.type.name) == (tuple(reversed([int(n) for n in tensor.shape])), tensor.tensor_type.name)
        assert (one.begin, one.nbytes) == (int(tensor.data_offset), int(tensor.n_bytes))
    assert ours.floats("output_norm.weight") == pytest.approx(theirs.tensors[-1].data.tolist())


@pytest.mark.parametrize("value", [1e-5, 1e-6, 5e5, 10_000.0, 0.1, 1 / 3, 3.4028234663852886e38, float("inf"), 0.0])
def test_a_float_is_the_shortest_decimal_that_is_it(value: float) -> None:
    """1e-05 came back as 9.999999747378752e-06: another model, for whoever compares configs."""
    stored = struct.unpack("<f", struct.pack("<f", value))[0]
    assert struct.pack("<f", shortest(stored)) == struct.pack("<f", value)
    assert len(repr(shortest(stored))) <= len(repr(stored))


def test_pipes_and_devices_are_no_models(tmp_path: Path) -> None:
    """To open a pipe waits for a writer that never comes, and /dev/zero has no end: `diptych inspect` hung on both."""
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    assert find_gguf(pipe) is None
    assert find_gguf(tmp_path) is None
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(LoadError, match="no regular file"):
            read_json(path)


def test_a_folder_with_one_model_is_that_model(tmp_path: Path) -> None:
    """And with two it is neither; beside a config.json it is a checkpoint."""
    path = write(tmp_path / "m.gguf")
    assert find_gguf(tmp_path) == find_gguf(path) == path
    write(tmp_path / "mmproj-m.gguf")
    assert find_gguf(tmp_path) == path
    write(tmp_path / "n.gguf")
    with pytest.raises(LoadError, match="holds 2 GGUF models"):
        find_gguf(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None


def header(*, version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HUGE = 2**63
LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes"),
    "another file": (b"PK\x03\x04" * 8, "begins with .* not with GGUF"),
    "version 1": (header(version=1), "has GGUF version 1"),
    "big-endian": (header(version=0x03000000), "is big-endian"),
    "tensors without end": (header(tensors=HUGE), f"names {HUGE} tensors; at most"),
    "keys without end": (header(keys=HUGE), f"names {HUGE} metadata keys; at most"),
    "cut in a key": (header(keys=1, rest=b"\x05"), "reaches to byte 32; the file has 25"),
    "key of a gigabyte": (header(keys=1, rest=struct.pack("<Q", 2**30)), "names 1073741824 bytes of one text"),
    "text behind the end": (header(keys=1, rest=text(b"k") + struct.pack("<IQ", 8, 2**20)), "the file has 45"),
    "array behind the end": (header(keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 4, HUGE)), "the file has 49"),
    "texts without end": (header(keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, HUGE)), f"k in .* has {HUGE} texts"),
    "texts behind the end": (header(keys=1, rest=text(b"k") + struct.pack("<IIQQ", 9, 8, 4, 1) + b"a"), "the file has 58"),
    "array of arrays": (header(keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, 2)), "is an array of type 9"),
    "unknown type": (header(keys=1, rest=text(b"k") + struct.pack("<I", 13)), "k in .* has type 13"),
    "no UTF-8": (header(keys=1, rest=text(b"\xff")), "is no UTF-8"),
    "no truth": (header(keys=1, rest=text(b"k") + struct.pack("<IB", 7, 2)), "is 2; it must be 0 or 1"),
    "key twice": (header(keys=2, rest=(text(b"k") + struct.pack("<IB", 7, 1)) * 2), "'k' is twice"),
    "alignment 0": (header(keys=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 0)), "general.alignment .* is 0"),
    "alignment 3": (header(keys=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 3)), "general.alignment .* is 3"),
    "nine dimensions": (header(tensors=1, rest=tensor(b"t", (1,) * 9, 0, 0)), "has 9 dimensions"),
    "no values": (header(tensors=1, rest=tensor(b"t", (0, 4), 0, 0)), "greater than 0"),
    "size that overflows": (header(tensors=1, rest=tensor(b"t", (2**33, 2**33), 0, 0)), "t in .* reaches to byte"),
    "half a block": (header(tensors=1, rest=tensor(b"t", (48, 2), 8, 0)), "a multiple of 32"),
    "unread type": (header(tensors=1, rest=tensor(b"t", (32,), 9, 0)), "has type Q8_1; F32"),
    "type of old": (header(tensors=1, rest=tensor(b"t", (32,), 31, 0)), "has type Q4_0_4_4; F32"),
    "offset between": (header(tensors=1, rest=tensor(b"t", (1,), 0, 5) + bytes(64)), "which is no multiple of 32"),
    "offset behind the end": (header(tensors=1, rest=tensor(b"t", (1,), 0, 2**60)), "t in .* reaches to byte"),
    "one in another": (header(tensors=2, rest=tensor(b"t", (16,), 0, 0) + tensor(b"u", (16,), 0, 32) + bytes(256)),
                       "lies in the tensor before it"),
    "tensor twice": (header(tensors=2, rest=tensor(b"t", (8,), 0, 0) + tensor(b"t", (8,), 0, 32) + bytes(256)), "t is twice"),
    "part without its name": (header(keys=1, rest=text(b"split.count") + struct.pack("<IH", 2, 3)), "is one of 3 parts"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "message"), LIES.values(), ids=LIES)
def test_a_header_that_lies_is_refused_by_what_it_says(data: bytes, message: str, tmp_path: Path) -> None:
    """Counts and offsets come from whoever made the file."""
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(LoadError, match=message) as refused:
        open_gguf(path)
    assert refused.value.hint


def test_a_count_of_parts_is_a_whole_number(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    path.write_bytes(header(keys=1, rest=text(b"split.count") + struct.pack("<If", 6, 3.0)))
    with pytest.raises(LoadError, match=r"is one of 3\.0 parts"):
        open_gguf(path)


def mutated(data: bytes, rng: random.Random, n_header: int) -> bytes:
    """The file with one to three things wrong: bytes, numbers of 4 or 8 bytes, a cut, or a piece twice."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(n_header, len(changed)))
        numbers = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(data), rng.getrandbits(64))
        kind = rng.randrange(5)
        if kind == 0:
            changed[at] = rng.randrange(256)
        elif kind == 1:
            changed[at : at + 8] = struct.pack("<Q", rng.choice(numbers) % 2**64)
        elif kind == 2:
            changed[at : at + 4] = struct.pack("<I", rng.choice(numbers) % 2**32)
        elif kind == 3:
            del changed[at : at + rng.choice((1, 4, 8, len(changed)))]
        else:
            changed[at:at] = changed[at : at + rng.randint(1, 64)]
        if not changed:
            break
    return bytes(changed)


def read_all(path: Path) -> None:
    """All that the planner and the tokenizer take out of a file."""
    file = open_gguf(path)
    for stored in file.tensors.values():
        assert 0 <= stored.begin < stored.begin + stored.nbytes <= len(file.mapped(stored.part))
    gguf_tokenizer(file)
    read_model(HfConfig(read_config(file), path=str(path)))


def storm(tmp_path: Path, n: int, seed: int) -> int:
    path = write(tmp_path / "m.gguf")
    data, n_header = path.read_bytes(), open_gguf(path).tensors["token_embd.weight"].begin
    rng, refused = random.Random(seed), 0
    for number in range(n):
        path.write_bytes(mutated(data, rng, n_header))
        try:
            read_all(path)
        except LoadError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"mutation {number} of seed {seed}: {error!r}") from error
    return refused


def test_a_damaged_file_is_refused_or_read_and_never_crashes(tmp_path: Path) -> None:
    """Every error is ours, by name; whatever is read lies in the file."""
    assert storm(tmp_path, 3000, seed=1) > 1500


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_a_million_damaged_files(seed: int, tmp_path: Path) -> None:
    """As above, for longer."""
    assert storm(tmp_path, 100_000, seed=100 + seed) > 50_000
