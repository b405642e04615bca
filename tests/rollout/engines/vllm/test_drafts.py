"""vLLM's own decoding with a draft model: the shared suite, whole responses by enumeration, weights and counters."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import PreTrainedModel

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs this in .venv-vllm")

from helpers.engines.conformance import NEW, OLD, NumberConformance, QueueConformance
from helpers.engines.reference import tiny_model, tiny_prompt, tiny_request
from jackpot.config.engines import VLLMEngineConfig
from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout, Version
from jackpot.launch.engines import make_engine
from jackpot.rollout.engines.vllm.engine import VLLMEngine

pytestmark = pytest.mark.vllm
_OPEN: list[VLLMEngine] = []


@pytest.fixture(scope="module", autouse=True)
def _all_closed() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


def drafted_engine(policy: Path, draft: Path, version: Version = OLD, tokens: int = 3) -> tuple[VLLMEngine, VLLMEngine]:
    """Return an engine of the model in `policy`, and that of the model in `draft`, which drafts for it."""
    config = VLLMEngineConfig(kv_cache_memory_bytes=2**26, max_num_seqs=32, draft={"tokens": tokens})
    drafter = make_engine(config, str(draft), torch.device("cpu"), version)
    engine = make_engine(config, str(policy), torch.device("cpu"), version, drafter)
    _OPEN.extend([engine, drafter])
    return engine, drafter


class TestDraftedVLLMEngine(QueueConformance, NumberConformance):
    """The draft has another depth and other weights: most of what it proposes is rejected."""

    reserved = 6

    @staticmethod
    def make_engine(folder: Path, version: Version) -> VLLMEngine:
        draft = folder.parent / "draft"
        tiny_model(7, num_hidden_layers=1).save_pretrained(draft)
        return drafted_engine(folder, draft, version)[0]


VOCAB, LENGTH, PROMPT = 4, 4, replace(tiny_prompt(3), token_ids=(2, 0, 3))


def save_without_eos(folder: Path, model: PreTrainedModel) -> Path:
    """Save a model that never ends a response."""
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


def tokens_of(rollouts: list[Rollout]) -> dict[str, list[int]]:
    """Return {uid: tokens}."""
    return {rollout.uid: rollout.token_ids.tolist() for rollout in rollouts}


def test_responses_at_the_contexts_end_ignore_their_batch(folder, tmp_path):
    """vLLM drafts for no request where one is near the end, and pads prompts of one token that come late."""
    tiny_model(7, num_hidden_layers=1).save_pretrained(tmp_path)
    engine, _ = drafted_engine(folder, tmp_path)
    context = engine.capabilities.max_model_len
    full_requests = [tiny_request(f"full {i}", context - 1 - i, seed=i, max_new_tokens=30) for i in range(6)]
    long_requests = [tiny_request(f"long {i}", 5, seed=i, max_new_tokens=50) for i in range(8)]
    late_requests = [tiny_request(f"late {i}", 1, seed=i) for i in range(4)]

    single_tokens = {
        request.uid: tokens_of(engine.generate([request]))[request.uid]
        for request in (*full_requests, *long_requests, *late_requests)
    }

    assert tokens_of(engine.generate([*full_requests, *long_requests])) == {
        request.uid: single_tokens[request.uid] for request in (*full_requests, *long_requests)
    }

    engine.submit(long_requests)
    for index, request in enumerate(late_requests):
        engine.generate([tiny_request(f"short {index}", max_new_tokens=2)])
        engine.submit([request])

    assert tokens_of(engine.collect(12)) == {
        request.uid: single_tokens[request.uid] for request in (*long_requests, *late_requests)
    }


@torch.no_grad()
def test_responses_have_the_policys_exact_distribution(tmp_path):
    """The first token comes from the prompt, the other three are drafts of one pass where all are accepted."""
    policy, draft = tiny_model(0, VOCAB), tiny_model(3, VOCAB, num_hidden_layers=1)
    engine, _ = drafted_engine(
        save_without_eos(tmp_path / "policy", policy), save_without_eos(tmp_path / "draft", draft)
    )

    responses = torch.tensor(list(product(range(VOCAB), repeat=LENGTH)))
    ids = torch.cat([torch.tensor(PROMPT.token_ids).expand(len(responses), -1), responses], dim=1)
    log_probs = (policy(ids).logits[:, 2:-1].double() / 0.8).log_softmax(-1)
    exact_probs = log_probs.gather(2, responses[..., None]).sum((1, 2)).exp().numpy()

    count, sampling = 1500, {"temperature": 0.8, "max_new_tokens": LENGTH, "num_top_log_probs": 0}

    rollouts = engine.generate([tiny_request(f"{i}", seed=i, prompt=PROMPT, **sampling) for i in range(count)])

    response_counts = Counter(tuple(rollout.token_ids.tolist()) for rollout in rollouts)
    observed_counts = np.array([response_counts[tuple(response)] for response in responses.tolist()])
    is_common = exact_probs * count >= 5.0

    assert exact_probs.sum() == pytest.approx(1.0)
    assert is_common.sum() > 30

    # all rare responses are one class
    observed_classes, expected_classes = (
        [*counts[is_common], counts[~is_common].sum()] for counts in (observed_counts, exact_probs * count)
    )

    assert chisquare(observed_classes, expected_classes).pvalue > 1e-3
    assert 0.2 < engine.take_metrics()["draft/acceptance"] < 0.95


@pytest.mark.parametrize(("is_tied", "tokens", "passes"), [(True, 4, 5), (False, 1, 11)])
def test_new_weights_of_the_rollout_model_draft_from_then_on(tmp_path, is_tied, tokens, passes):
    """Of 21 tokens the first comes from the prompt; each pass gives one more than was drafted, if all are accepted."""
    policy, draft = (tiny_model(seed, tie_word_embeddings=is_tied) for seed in (0, 1))
    engine, drafter = drafted_engine(
        save_without_eos(tmp_path / "policy", policy), save_without_eos(tmp_path / "draft", draft), tokens=tokens
    )
    requests = [tiny_request(f"{i}", 5, seed=i, max_new_tokens=21) for i in range(8)]

    first_rollouts = engine.generate(requests)

    assert engine.take_metrics()["draft/acceptance"] < 0.7

    drafter.update_weights(policy.named_parameters(), NEW)
    updated_rollouts = engine.generate(requests)

    metrics = engine.take_metrics()

    assert metrics["draft/acceptance"] == 1.0
    assert metrics["draft/policy_passes_per_token"] == pytest.approx(passes / 21)
    assert metrics["draft/accepted_length"] == pytest.approx(20 / (passes - 1))
    assert metrics["draft/policy_reads"] == 1.0
    assert metrics["draft/draft_reads"] == (5 + tokens + (passes - 1) * (2 * tokens + 1)) / 25
    assert engine.take_metrics() == {}
    assert engine.version == OLD

    engine.submit(requests)
    with pytest.raises(EngineError, match="in flight"):
        drafter.update_weights(draft.named_parameters(), NEW)
    assert len(engine.collect(8)) == 8

    drafter.update_weights(draft.named_parameters(), NEW)  # and nothing is left of those in between
    last_rollouts = engine.generate(requests)
    assert tokens_of(first_rollouts) == tokens_of(last_rollouts)
    assert tokens_of(last_rollouts) != tokens_of(updated_rollouts)


def test_a_draft_of_another_vocabulary_is_refused(tmp_path):
    policy, draft = (
        save_without_eos(tmp_path / "policy", tiny_model(0)),
        save_without_eos(tmp_path / "draft", tiny_model(0, vocab_size=30)),
    )

    with pytest.raises(EngineError, match="vocabulary"):
        drafted_engine(policy, draft)
