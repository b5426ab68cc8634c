"""Arg-max and draws of the native backend, on every kernel set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diptych.compute.ops.cpu import kernels as cpu

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.instruction_sets(), reason="the native kernels are not installed"),
]


def noise(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("vocab", [1, 15, 63, 64, 65, 1000])
def test_argmax_takes_the_first_of_equals_and_nan_before_all(isa: str, vocab: int) -> None:
    """Greedy text must not depend on how a row is walked; a NaN was passed over, and its neighbours drawn from."""
    logits = noise(7, vocab, seed=vocab)
    logits[1] = 2.0
    logits[2, vocab // 2 :] = logits[2].max() + 1
    logits[3, vocab // 2] = torch.nan
    logits[4] = -torch.inf
    logits[5, vocab // 3 :: 2] = torch.nan
    logits[6, 0], logits[6, vocab - 1] = torch.inf, torch.nan
    got = cpu._cpu.Program(isa, 2).argmax(logits)
    assert got.tolist() == logits.numpy().argmax(axis=1).tolist()


@pytest.mark.parametrize("vocab", [1, 15, 33, 1000, 70000])
def test_draws_follow_the_running_sum_of_the_softmax(isa: str, vocab: int) -> None:
    """A token is drawn for its own part of [0, 1); what is masked, never."""
    logits = noise(4, vocab, seed=vocab, scale=3.0)
    logits[1, 1::3] = -torch.inf
    logits[2] = 0.0
    logits[3] *= 10
    quantiles = np.append(np.linspace(0.0, 1.0, 60, endpoint=False), [np.nextafter(1.0, 0.0)])
    program = cpu._cpu.Program(isa, 2)
    for temperature in (0.2, 1.0, 3.0):
        weights = torch.exp((logits.double() - logits.max(dim=1, keepdim=True).values) / float(np.float32(temperature)))
        ends = (weights.cumsum(dim=1) / weights.sum(dim=1, keepdim=True)).numpy()
        for row in range(4):
            n = len(quantiles)
            temperatures = np.full(n, temperature, dtype=np.float32)
            ids, best, totals = program.draw(logits, np.full(n, row, dtype=np.int32), temperatures, quantiles)
            assert set(best) == {float(logits[row].max())}
            np.testing.assert_allclose(totals, float(weights[row].sum()), rtol=3e-6)
            assert all(weights[row, token_id] > 0 for token_id in ids)
            begins = np.where(np.array(ids) > 0, ends[row][np.array(ids) - 1], 0.0)
            assert np.all(begins <= quantiles + 3e-6)
            assert np.all(quantiles <= ends[row][ids] + 3e-6)


def test_draws_say_where_a_row_is_no_distribution(isa: str) -> None:
    """NaN among the logits must not become a plausible token, nor a row without any choice."""
    logits = noise(3, 100, seed=5)
    logits[0, 77] = torch.nan
    logits[1] = -torch.inf
    program = cpu._cpu.Program(isa, 1)
    arguments = np.ones(3, dtype=np.float32), np.full(3, 0.5)
    _, best, _ = program.draw(logits, np.arange(3, dtype=np.int32), *arguments)
    assert np.isnan(best[0])
    assert best[1] == -np.inf
    assert np.isfinite(best[2])
    with pytest.raises(ValueError, match="outside"):
        program.draw(logits, np.array([0, 1, 3], dtype=np.int32), *arguments)
    with pytest.raises(ValueError, match="temperature"):
        program.draw(logits, np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32), arguments[1])
