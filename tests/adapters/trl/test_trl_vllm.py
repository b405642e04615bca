"""TRL's own vLLM with top-k: the wrapper on what vLLM's CPU build really returned, recorded in vllm_recorded.json.

Its model is starter:text_policy, `logprobs=3`, `logprobs_mode="processed_logprobs"`, as TRL starts vLLM. TRL's
`extract_logprobs` turns vLLM's outputs into lists here as it does in a run; a run of TRL with vLLM has not been made.
"""

import json
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from jackpot.models.load import load_model

pytestmark = pytest.mark.trl
RECORDED = json.loads((Path(__file__).parent / "vllm_recorded.json").read_text())
REQUESTS = RECORDED["requests"]
TOP = 3


def generate(**arguments):
    """What `VLLMGeneration.generate` returns with logprobs=3."""
    from trl.generation.vllm_generation import extract_logprobs

    outputs = []
    for request in REQUESTS:
        entries = [{i: SimpleNamespace(logprob=p, rank=rank) for i, p, rank in token} for token in request["logprobs"]]
        outputs.append(SimpleNamespace(outputs=[SimpleNamespace(logprobs=entries)]))
    ids = [request["completion_ids"] for request in REQUESTS]
    return [request["prompt_ids"] for request in REQUESTS], ids, *extract_logprobs(outputs)


def test_the_first_entry_of_trl_is_not_always_the_sampled_token():
    _, completions, _, names = generate()
    tokens, entries = [token for row in completions for token in row], [entry for row in names for entry in row]
    first = [token == entry[0] for token, entry in zip(tokens, entries, strict=True)]
    sizes = set(map(len, entries))

    assert 0 < sum(first) < len(first)
    assert sizes == {TOP, TOP + 1}  # with the sampled token behind the top k, where it is not among them


def test_minus_infinity_of_a_server_is_not_of_the_support(adapter: ModuleType):
    """JSON has no infinity, and vLLM's server writes -9999 for a token that top-k left out."""
    listener = SimpleNamespace()
    answer = [[3]], [[5]], [[[-0.2, -1.7, -9999.0]]], [[[5, 6, 7]]]
    adapter.CorrectedGRPOTrainer._generate_by_vllm(listener, lambda **_: answer, 3)
    _, log_probs = listener._lists.padded(1)
    assert log_probs.tolist() == [[[pytest.approx(-0.2), pytest.approx(-1.7), -math.inf]]]


def test_trl_gets_the_sampled_token_and_we_keep_the_top_k(adapter: ModuleType):
    listener = SimpleNamespace()
    wrapped = adapter.CorrectedGRPOTrainer._generate_by_vllm

    _, completions, sampled, _ = wrapped(listener, generate, TOP, prompts=[], images=None, num_generations=1)
    width = max(map(len, completions)) + 2
    ids, log_probs = listener._lists.padded(width)

    assert ids.shape == log_probs.shape == (len(completions), width, TOP)

    policy = load_model(RECORDED["model"], torch.float32)
    for row, (request, reported) in enumerate(zip(REQUESTS, sampled, strict=True)):
        tokens = torch.tensor([request["prompt_ids"] + request["completion_ids"]])
        count = len(request["completion_ids"])
        with torch.no_grad():
            distributions = policy(tokens).logits[0, -count - 1 : -1].log_softmax(-1)
        expected = distributions.gather(-1, tokens[0, -count:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(reported)[:, 0], expected, atol=2e-4, rtol=1e-3)  # not lp[0] of TRL
        torch.testing.assert_close(log_probs[row, :count], distributions.topk(TOP).values, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(
            distributions.gather(-1, ids[row, :count]), distributions.topk(TOP).values, atol=2e-4, rtol=1e-3
        )
        assert not ids[row, count:].any() and not log_probs[row, count:].any()
