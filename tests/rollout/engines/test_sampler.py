from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.rollout.engines.sampler import Sampler, uniforms


def test_numbers_depend_on_seed_and_position_alone() -> None:
    together = uniforms([1, 2, -3, 2**70 + 1], [0, 5, 9, 0])
    assert together[1] == uniforms([2], [5])[0]
    assert together[3] == together[0]  # seeds are taken modulo 2**64
    assert len({*together, *uniforms([1, 5], [5, 1])}) == 5


def test_numbers_are_uniform_along_both_axes() -> None:
    for numbers in (uniforms(range(4000), [7] * 4000), uniforms([7] * 4000, range(4000))):
        counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
        assert np.abs(counts - 400).max() < 80  # 4 standard deviations
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.06


@pytest.mark.parametrize("vocabulary", [3, 128, 300])
def test_tokens_follow_the_distribution(vocabulary: int) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)) * 2
    rows = 20_000
    ids, logprobs = Sampler().draw(
        logits[:, None].expand(-1, rows), [0.7] * rows, uniforms(range(rows), [3] * rows)
    )
    expected = torch.log_softmax(logits.double() / 0.7, 0)
    frequencies = torch.bincount(torch.tensor(ids), minlength=vocabulary) / rows
    spread = (expected.exp() * (1 - expected.exp()) / rows).sqrt()
    assert ((frequencies - expected.exp()).abs() <= 5 * spread + 1e-4).all()
    assert np.abs(np.array(logprobs) - expected[ids].numpy()).max() < 1e-5


def test_temperature_example() -> None:
    """Case 41: logits [2, 1, 0] at temperature 0.6 give token 1 the logprob -1.8692."""
    logits = torch.tensor([[2.0], [1.0], [0.0]])
    for number in np.linspace(0, 0.999, 50):
        (token,), (logprob,) = Sampler().draw(logits, [0.6], np.array([number]))
        if token == 1:
            assert logprob == pytest.approx(-1.8692, abs=1e-4)
            return
    raise AssertionError("token 1 was never drawn")


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((300, 4), float("-inf"))
    logits[[0, 130, 299]] = torch.tensor([0.0, 1.0, 2.0])[:, None]
    ids, _ = Sampler().draw(logits, [1.0] * 4, np.array([0.0, 0.2, 0.5, 1 - 2**-53]))
    assert ids == [0, 130, 299, 299]


def test_greedy_beside_sampled_rows_reports_temperature_one() -> None:
    logits = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
    ids, logprobs = Sampler().draw(logits, [0.0, 1.0], np.array([0.0, 0.0]))
    assert ids == [1, 0]
    assert logprobs == pytest.approx(torch.log_softmax(torch.tensor([0.0, 3.0]), 0)[[1, 0]].tolist())


def test_a_column_with_nan_gives_nan_and_leaves_the_others() -> None:
    """Case 40."""
    logits = torch.tensor([[0.0, 0.0], [float("nan"), 1.0]])
    _, logprobs = Sampler().draw(logits, [1.0, 1.0], np.array([0.5, 0.5]))
    assert np.isnan(logprobs[0])
    assert np.isfinite(logprobs[1])
