"""Log-probs of written responses, computed in padded batches and a few rows at a time, equal those of the model's
plain forward pass over one response.
"""

import math

import numpy as np
import pytest
import torch

from helpers.engines.reference import tiny_model
from jackpot.core.errors import DataError
from jackpot.models import scoring
from jackpot.models.sampling import sampling_log_probs
from jackpot.models.scoring import exact_log_probs, forward_responses, logit_chunks, token_log_probs

PROMPTS = ((5, 3, 7), (5, 3, 7), (2,), (9, 4))
RESPONSES = ((4, 6, 8, 2), (3,), (7, 7), ())
TEMPERATURE = 0.7
THREE_ROWS = 3 * 24  # logits of three positions, with 24 tokens in the vocabulary


@pytest.fixture(scope="module")
def model():
    return tiny_model(0).eval().requires_grad_(False)


def plain_logits(model, prompt: tuple[int, ...], response: tuple[int, ...]) -> torch.Tensor:
    """Return the logits that predict a response's tokens, of a pass over this sequence alone."""
    return model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]


def test_a_forward_pass_gives_states_that_predict_each_token(model):
    hidden, ids, mask = forward_responses(model, PROMPTS, RESPONSES)

    assert mask.sum(-1).tolist() == [4, 1, 2, 0]
    assert ids[mask].tolist() == [4, 6, 8, 2, 3, 7, 7]

    logits = torch.cat([chunk for (chunk,) in logit_chunks(model, hidden[mask])])
    expected_logits = torch.cat([plain_logits(model, *pair) for pair in zip(PROMPTS, RESPONSES, strict=True)])
    torch.testing.assert_close(logits, expected_logits, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (6, 1.0), (0, 0.8)])
def test_token_log_probs_are_those_of_the_sampled_distribution(model, monkeypatch, top_k, top_p):
    hidden, ids, mask = forward_responses(model, PROMPTS, RESPONSES)

    log_probs = token_log_probs(model, hidden[mask], ids[mask], TEMPERATURE, top_k, top_p)

    expected_log_probs = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        rows = sampling_log_probs(plain_logits(model, prompt, response), TEMPERATURE, top_k, top_p)
        expected_log_probs += [float(row[token]) for row, token in zip(rows, response, strict=True)]

    np.testing.assert_allclose(log_probs, expected_log_probs, atol=1e-5)
    assert any(map(math.isinf, expected_log_probs)) == ((top_k, top_p) != (0, 1.0))

    monkeypatch.setattr(scoring, "MAX_LOGITS", THREE_ROWS)
    chunked_log_probs = token_log_probs(model, hidden[mask], ids[mask], TEMPERATURE, top_k, top_p)
    np.testing.assert_allclose(chunked_log_probs, log_probs, atol=1e-5)


def test_exact_log_probs_are_float64_a_few_positions_at_a_time(model, monkeypatch):
    monkeypatch.setattr(scoring, "MAX_LOGITS", THREE_ROWS)
    hidden, ids, mask = forward_responses(model, PROMPTS, RESPONSES)

    parts = list(exact_log_probs(model, TEMPERATURE, hidden[mask], ids[mask]))

    assert [len(part_log_probs) for part_log_probs, _ in parts] == [3, 3, 1]
    assert torch.cat([rows for _, rows in parts]).tolist() == [4, 6, 8, 2, 3, 7, 7]

    log_probs = torch.cat([part_log_probs for part_log_probs, _ in parts])
    assert log_probs.dtype == torch.float64
    np.testing.assert_allclose(log_probs.exp().sum(-1), 1.0, atol=1e-14)

    expected_logits = torch.cat([plain_logits(model, *pair) for pair in zip(PROMPTS, RESPONSES, strict=True)])
    expected_log_probs = (expected_logits.double() / TEMPERATURE).log_softmax(-1)
    np.testing.assert_allclose(log_probs, expected_log_probs, atol=1e-5)


def test_a_response_without_a_prompt_is_refused(model):
    with pytest.raises(DataError, match="empty"):
        forward_responses(model, [(), (1,)], [(2,), (3,)])
