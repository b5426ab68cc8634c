"""The two phases as an API: states can be cut, copied, saved, and always agree with the model run from scratch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.conftest import tiny_config

from diptych.compute.loading.quant import CHECKSUMS, checksum
from diptych.engine.load import LoadedModel
from diptych.engine.phases import FORMAT, TwoPhase
from diptych.ground.errors import CapacityError, LoadError, PromptTooLong, RequestError

TOKENS = [5, 77, 1024, 300, 9, 2048, 41, 42, 43, 7, 600, 601, 602, 8, 15, 16, 17, 18, 19, 20]


@pytest.fixture
def phases(loaded: LoadedModel) -> TwoPhase:
    return TwoPhase(loaded, tiny_config())


def test_decode_agrees_with_the_naive_mode(phases: TwoPhase) -> None:
    """The cache changes the cost of a token, not the token."""
    state = phases.prefill(TOKENS)
    for _ in range(6):
        naive_token, naive_logits = phases.decode_without_cache(state.token_ids)
        before = state.logits
        token, _ = phases.decode(state)
        assert token == naive_token
        torch.testing.assert_close(before, naive_logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 19])
def test_chunked_prefill_gives_the_same_state(phases: TwoPhase, chunk_tokens: int) -> None:
    """Where a prompt is cut may not show in its keys, values or logits."""
    whole, cut = phases.prefill(TOKENS), phases.prefill(TOKENS, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(whole.logits, cut.logits, atol=1e-4, rtol=1e-4)
    for layer in range(phases.model.spec.n_layers):
        for one, other in zip(phases.keys_values(whole, layer), phases.keys_values(cut, layer), strict=True):
            assert one.shape == (1, phases.model.spec.n_kv_heads, len(TOKENS), phases.model.spec.head_dim)
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_fork_is_independent(phases: TwoPhase) -> None:
    """Decoding a fork with another token leaves the original as it was."""
    state = phases.prefill(TOKENS)
    fork = phases.fork(state)
    phases.decode(fork, token_id=99)
    expected = phases.decode_without_cache(TOKENS)[0]
    assert phases.decode(state)[0] == expected
    assert fork.token_ids[-1] == 99


def test_truncate_goes_back_exactly(phases: TwoPhase) -> None:
    """After forgetting, the state is that of the shorter prompt, and its blocks are free again."""
    free_before = len(phases._free_block_ids)
    state = phases.prefill(TOKENS)
    phases.truncate(state, 5)
    fresh = phases.prefill(TOKENS[:5])
    torch.testing.assert_close(state.logits, fresh.logits, atol=1e-4, rtol=1e-4)
    assert state.token_ids == TOKENS[:5]
    phases.free(state)
    phases.free(fresh)
    assert len(phases._free_block_ids) == free_before


def test_saved_state_continues_as_if_never_saved(phases: TwoPhase, tmp_path: Path) -> None:
    """A state is data: what comes back must decode to the same tokens."""
    state = phases.prefill(TOKENS)
    phases.save(state, tmp_path / "state.safetensors")
    loaded = phases.load_state(tmp_path / "state.safetensors")
    assert [phases.decode(state)[0] for _ in range(5)] == [phases.decode(loaded)[0] for _ in range(5)]


def test_damaged_or_foreign_state_is_refused(phases: TwoPhase, tmp_path: Path) -> None:
    """A truncated file must not become a wrong answer."""
    path = tmp_path / "state.safetensors"
    phases.save(phases.prefill(TOKENS), path)
    path.write_bytes(path.read_bytes()[:1000])
    free_before = len(phases._free_block_ids)
    with pytest.raises(LoadError, match="cannot read"):
        phases.load_state(path)
    assert len(phases._free_block_ids) == free_before


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("token_ids", torch.arange(20, dtype=torch.int32)),
        ("token_ids", torch.full((20,), 5000)),
        ("token_ids", torch.full((20,), -1)),
        ("token_ids", torch.zeros(0, dtype=torch.int64)),
        ("token_ids", torch.zeros((4, 5), dtype=torch.int64)),
        ("token_ids", torch.zeros(300, dtype=torch.int64)),
        ("logits", torch.zeros(7)),
        ("logits", torch.zeros(4096, dtype=torch.int64)),
        ("layers.0.keys", torch.zeros(1)),
        ("layers.1.values", torch.zeros((2, 19, 16))),
        ("layers.1.values", torch.zeros((2, 20, 16), dtype=torch.int8)),
        ("layers.1.keys", None),
    ],
)
def test_a_state_of_wrong_shapes_is_refused_and_takes_no_block(
    phases: TwoPhase, tmp_path: Path, name: str, bad: torch.Tensor | None
) -> None:
    """It raised what torch raises, or wrote what it could, and kept the blocks it had taken."""
    path = tmp_path / "state.safetensors"
    phases.save(phases.prefill(TOKENS), path)
    tensors = load_file(path)
    if bad is None:
        del tensors[name]
    else:
        tensors[name] = bad
    sums = json.dumps({name: checksum(tensor) for name, tensor in tensors.items()})
    save_file(tensors, path, metadata={"format": FORMAT, "revision": phases.model.revision, CHECKSUMS: sums})
    free_before = len(phases._free_block_ids)
    with pytest.raises(LoadError):
        phases.load_state(path)
    assert len(phases._free_block_ids) == free_before


def test_a_flipped_bit_in_a_saved_state_is_refused(phases: TwoPhase, tmp_path: Path) -> None:
    """It was loaded and decoded: a wrong answer without a word."""
    path = tmp_path / "state.safetensors"
    phases.save(phases.prefill(TOKENS), path)
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    free_before = len(phases._free_block_ids)
    for place in range(begin, len(whole), (len(whole) - begin) // 40):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(LoadError, match="checksum"):
            phases.load_state(path)
    assert len(phases._free_block_ids) == free_before
    path.write_bytes(whole.replace(b"xxh3_64", b"xxh3_46"))
    with pytest.raises(LoadError, match="no list of checksums"):
        phases.load_state(path)
    path.write_bytes(whole)
    phases.load_state(path)


def test_a_freed_or_foreign_state_is_refused(phases: TwoPhase, tmp_path: Path) -> None:
    """A freed state went on from an empty cache, with the logits of a prompt that it no longer held."""
    state = phases.prefill(TOKENS)
    verbs = [
        phases.decode, phases.fork, lambda one: phases.extend(one, [1]), lambda one: phases.truncate(one, 1),
        lambda one: phases.keys_values(one, 0), lambda one: phases.save(one, tmp_path / "state"),
    ]  # fmt: skip
    other = TwoPhase(phases.loaded, tiny_config())
    for verb in [*verbs, phases.free]:
        with pytest.raises(RequestError, match="another TwoPhase"):
            verb(other.prefill(TOKENS))
    phases.free(state)
    for verb in verbs:
        with pytest.raises(RequestError, match="was freed"):
            verb(state)
    phases.free(state)
    assert len(phases._free_block_ids) == phases.kv.n_blocks


@pytest.mark.parametrize("bad", [1.5, "a", None, True, [1], -1, 10**30])
def test_numbers_of_wrong_kinds_are_refused_by_name(phases: TwoPhase, bad: object) -> None:
    """They ended in a raw TypeError, half-way."""
    state = phases.prefill(TOKENS)
    with pytest.raises(RequestError, match="n_tokens is"):
        phases.truncate(state, bad)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="layer is"):
        phases.keys_values(state, bad)  # type: ignore[arg-type]
    assert state.token_ids == TOKENS


def test_bad_input_names_the_limit(phases: TwoPhase) -> None:
    """The study API refuses like the serving one."""
    with pytest.raises(RequestError, match="state is None; it must be one that prefill, fork or load_state gave"):
        phases.decode(None)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="0 tokens"):
        phases.prefill([])
    with pytest.raises(RequestError, match="token id 5000"):
        phases.prefill([5000])
    with pytest.raises(PromptTooLong, match="257 tokens"):
        phases.prefill([1] * 257)
    state = phases.prefill(TOKENS)
    with pytest.raises(RequestError, match="n_tokens is 0"):
        phases.truncate(state, 0)
    with pytest.raises(CapacityError, match="KV blocks"):
        list(map(phases.fork, [state] * 10_000))


def test_a_state_is_saved_to_files_only(phases: TwoPhase, tmp_path: Path) -> None:
    """Files are renamed into place: saving to /dev/full as root replaced the device, and a folder ended in a raw error."""
    state = phases.prefill(TOKENS)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target in (pipe, tmp_path):
        with pytest.raises(RequestError, match="no regular file"):
            phases.save(state, target)
    assert pipe.is_fifo()
    with pytest.raises(RequestError, match="cannot write the state"):
        phases.save(state, tmp_path / "no such folder" / "state.safetensors")
