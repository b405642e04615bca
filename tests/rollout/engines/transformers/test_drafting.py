"""Drafts: the shared suite, the distribution of whole responses against enumeration, and what drafts save."""

import copy
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import PreTrainedModel

from helpers.engines.architectures import CONTEXT, EOS, make_engine, make_model, make_requests
from helpers.engines.conformance import NumberConformance, QueueConformance
from helpers.engines.reference import tiny_model, tiny_prompt, tiny_request
from helpers.waits import waits
from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.errors import EngineError
from jackpot.core.types import Version
from jackpot.models.load import eos_token_ids, load_model
from jackpot.rollout.engines.transformers.drafting import DraftedBatch
from jackpot.rollout.engines.transformers.engine import TransformersEngine


def drafted_engine(model: PreTrainedModel, draft: PreTrainedModel, stops: tuple[int, ...] = (EOS,), **settings: Any):
    """Return an engine of copies of `model`, and of `draft`, which drafts for it; other names are of `engine.draft`."""
    engine_settings = {name: settings.pop(name) for name in ("max_num_seqs", "enforce_eager") if name in settings}
    config = TransformersEngineConfig(draft=settings, **engine_settings)
    drafter = make_engine(copy.deepcopy(draft))
    return TransformersEngine(
        copy.deepcopy(model), config, eos_token_ids=stops, version=Version(0, 0), drafter=drafter
    ), drafter


def model_near(model: PreTrainedModel, scale: float = 0.03) -> PreTrainedModel:
    """Return a model whose weights are a little off."""
    torch.manual_seed(5)
    changed_model = copy.deepcopy(model)
    for parameter in changed_model.parameters():
        parameter.data += scale * torch.randn_like(parameter)
    return changed_model


@pytest.mark.slow
class TestDraftedEngine(QueueConformance, NumberConformance):
    """The draft has another architecture and follows nothing: most of what it proposes is rejected."""

    @staticmethod
    def make_engine(folder: Path, version: Version) -> TransformersEngine:
        model, draft = load_model(folder, torch.float32), tiny_model(7, num_hidden_layers=1, head_dim=16)
        settings = TransformersEngineConfig(max_num_seqs=32, draft={"tokens": "auto"})
        stops = eos_token_ids(model)
        drafter = TransformersEngine(draft, settings, eos_token_ids=stops, version=version)
        return TransformersEngine(model, settings, eos_token_ids=stops, version=version, drafter=drafter)


# The distribution

VOCAB, LENGTH, PROMPT = 4, 4, replace(tiny_prompt(3), token_ids=(2, 0, 3))


class Law:
    """The distribution of responses of `LENGTH` tokens by the definition of speculative sampling, in float64."""

    def __init__(self, model: PreTrainedModel, draft: PreTrainedModel, tokens: int, lam: float) -> None:
        self._models, self._tokens, self._lam = (model, draft), tokens, lam
        self._known: dict[tuple[int, ...], list[np.ndarray]] = {}

    @torch.no_grad()
    def distributions(self, response: tuple[int, ...]) -> list[np.ndarray]:
        """Return p, q, and the accepted and the replaced part of what stands behind the beginning of a response."""
        if response not in self._known:
            ids = torch.tensor([[*PROMPT.token_ids, *response]])
            p, q = (model(ids).logits[0, -1].double().softmax(-1).numpy() for model in self._models)
            accepted_mass = np.minimum(q, p / self._lam)
            missing_mass = np.maximum(p - accepted_mass, 0.0)
            replaced_mass = (1.0 - accepted_mass.sum()) * missing_mass / missing_mass.sum()
            self._known[response] = [p, q, accepted_mass, replaced_mass]
        return self._known[response]

    def prob(self, response: tuple[int, ...], start: int = 0, drafts_left: int = 0) -> float:
        """Return the probability of the tokens from `start` on; the current pass has `drafts_left` drafts of them."""
        if start == LENGTH:
            return 1.0
        p, _, accepted_prob, replaced_prob = (
            probabilities[response[start]] for probabilities in self.distributions(response[:start])
        )
        prob_with_next_pass = self.prob(response, start + 1, min(self._tokens, LENGTH - start - 2))
        if drafts_left <= 0:
            return p * prob_with_next_pass
        return accepted_prob * self.prob(response, start + 1, drafts_left - 1) + replaced_prob * prob_with_next_pass


@pytest.mark.parametrize(("tokens", "lam"), [(3, 1.0), (2, 0.5)])
def test_responses_have_the_exact_distribution(tokens, lam):
    model, draft = tiny_model(0, VOCAB), tiny_model(3, VOCAB, num_hidden_layers=1)
    law, count = Law(model, draft, tokens, lam), 2000
    engine, _ = drafted_engine(model, draft, stops=(), tokens=tokens, lam=lam, max_num_seqs=2000)

    rollouts = engine.generate(
        [tiny_request(f"{i}", seed=i, prompt=PROMPT, max_new_tokens=LENGTH, num_top_log_probs=2) for i in range(count)]
    )

    response_counts = Counter(tuple(rollout.token_ids.tolist()) for rollout in rollouts)
    exact_probs = {response: law.prob(response) for response in product(range(VOCAB), repeat=LENGTH)}

    assert sum(exact_probs.values()) == pytest.approx(1.0)

    common_responses = [response for response, prob in exact_probs.items() if prob * count >= 5.0]
    observed_counts = [response_counts[response] for response in common_responses]
    expected_counts = [exact_probs[response] * count for response in common_responses]

    assert len(common_responses) > 30

    # all rare responses are one class
    observed_counts.append(count - sum(observed_counts))
    expected_counts.append(count - sum(expected_counts))
    assert chisquare(observed_counts, expected_counts).pvalue > 1e-3
    assert 0.2 < engine.take_metrics()["draft/acceptance"] < 0.95

    for rollout in rollouts[:200]:  # the second token is drafted; the first never is, nor the last where k is 1
        response = tuple(rollout.token_ids.tolist())
        for position, token in enumerate(response[:2]):
            p, _, accepted_mass, replaced_mass = law.distributions(response[:position])
            token_probs = accepted_mass + replaced_mass if position else p
            assert rollout.rollout_log_probs[position] == pytest.approx(np.log(token_probs[token]), abs=1e-5)
            assert rollout.top_log_probs[position].numpy() == pytest.approx(
                np.log(np.sort(token_probs)[::-1][:2]), abs=1e-5
            )


def test_exact_drafts_beside_relaxed_ones_are_those_of_lam_1():
    model, draft = tiny_model(0, VOCAB), tiny_model(3, VOCAB, num_hidden_layers=1)
    relaxed_requests = [
        tiny_request(f"{i}", seed=i, prompt=PROMPT, max_new_tokens=6, num_top_log_probs=0) for i in range(4)
    ]
    exact_requests = [replace(request, uid=f"exact {request.uid}", exact_drafts=True) for request in relaxed_requests]
    mixed_requests = [request for pair in zip(relaxed_requests, exact_requests, strict=True) for request in pair]
    engines = [drafted_engine(model, draft, stops=(), tokens=3, lam=lam)[0] for lam in (0.3, 1.0)]

    tokens_at_03, tokens_at_1 = (
        [rollout.token_ids.tolist() for rollout in engine.generate(mixed_requests)] for engine in engines
    )

    # relaxed and exact requests take turns
    relaxed_tokens_at_03, exact_tokens_at_03 = tokens_at_03[::2], tokens_at_03[1::2]
    relaxed_tokens_at_1, exact_tokens_at_1 = tokens_at_1[::2], tokens_at_1[1::2]

    assert exact_tokens_at_03 == exact_tokens_at_1
    assert exact_tokens_at_1 == relaxed_tokens_at_1
    assert relaxed_tokens_at_03 != relaxed_tokens_at_1


@pytest.mark.parametrize(
    "name",
    [
        "qwen3 with windows",
        "deepseek_v3",
        pytest.param("diffllama", marks=pytest.mark.slow),
        pytest.param("gpt2", marks=pytest.mark.slow),
    ],
)
def test_log_probs_are_those_of_one_pass_of_the_policy(name):
    """Responses are longer than the window and end at different times, one of them at the end of the context."""
    model = make_model(name).double()
    engine, _ = drafted_engine(model, model_near(model), tokens=5)

    rollouts = engine.generate(make_requests([CONTEXT - 10, 9, 2, 9], num_new=40))

    assert len({len(rollout.token_ids) for rollout in rollouts}) > 5
    assert 0.3 < engine.take_metrics()["draft/acceptance"] < 0.95
    for rollout, scores in zip(rollouts, engine.score(rollouts, 1.0), strict=True):
        assert torch.allclose(rollout.rollout_log_probs, scores, rtol=0.0, atol=1e-5)


def test_a_response_does_not_depend_on_its_batch():
    model = make_model("llama").double()
    large_engine, small_engine = (
        drafted_engine(model, model_near(model), tokens="auto", max_num_seqs=size)[0] for size in (64, 4)
    )
    requests = make_requests([5, 9, 2], group=2, num_new=16)

    for rollout, rollout_of_small in zip(
        large_engine.generate(requests), small_engine.generate(requests[::-1])[::-1], strict=True
    ):
        assert torch.equal(rollout.token_ids, rollout_of_small.token_ids)
        assert rollout.finish == rollout_of_small.finish


# What drafts save


@pytest.mark.parametrize(("tokens", "passes"), [(1, 11), (4, 5), ("auto", 4)])
def test_a_draft_that_is_the_policy_is_accepted_whole(tokens, passes):
    """Of 21 tokens the first comes from the prompt, and each pass gives one more than was drafted; auto: 5, 7, 8."""
    model = make_model("llama").double()
    engine, _ = drafted_engine(model, model, stops=(), tokens=tokens)
    engine.generate(
        [
            replace(request, sampling=request.sampling.model_copy(update={"max_new_tokens": 21}))
            for request in make_requests([5, 9], group=2, num_new=20)
        ]
    )

    metrics = engine.take_metrics()

    assert metrics["draft/acceptance"] == 1.0
    assert metrics["draft/policy_passes_per_token"] == pytest.approx(passes / 21)
    assert metrics["draft/accepted_length"] == pytest.approx(20 / (passes - 1))
    assert metrics["draft/policy_reads"] == 1.0
    assert engine.take_metrics() == {}


def test_counts_taken_within_a_batch_are_not_lost():
    model = make_model("llama").double()
    engine, _ = drafted_engine(model, model, stops=(), tokens=2)
    requests = make_requests([5, 9], group=1, num_new=20)
    short_request, long_request = (
        replace(request, sampling=request.sampling.model_copy(update={"max_new_tokens": count}))
        for request, count in zip(requests, (3, 20), strict=True)
    )

    engine.submit([long_request])
    engine.generate([short_request])
    token_count = engine.take_draft_counts().tokens

    assert 3 < token_count < 23  # all of the short response, some of the 20 of the long one

    engine.collect(1)
    assert token_count + engine.take_draft_counts().tokens == 23


def test_a_pass_waits_for_its_draws_alone():
    """Positions, uniforms and tokens go to the device without a wait, however many are drafted."""
    model = make_model("llama")
    engine, _ = drafted_engine(model, model, stops=(), tokens=4)
    engine.submit(make_requests([5, 9], num_new=60))
    engine.collect(0)
    for _ in range(2):
        engine._step()
    batch = engine._batch
    host_names = ("rows", "stops", "limits", "records", "num_drafts", "prompt_lengths", "streams", "lengths", "tail")

    with waits(on_host=[getattr(batch, f"_{name}") for name in host_names]) as wait_list:
        engine._step()

    assert set(batch._lengths.tolist()) == {11}, wait_list  # one token of the prompt's pass and five of each of two
    assert len(wait_list) == 1, wait_list


@pytest.mark.slow
def test_the_number_of_drafts_follows_the_acceptance():
    model, requests = make_model("llama").double(), make_requests([5, 9], group=2, num_new=20)

    draft_reads = {}
    for tokens in (4, "auto"):
        engine, _ = drafted_engine(model, model_near(model, scale=0.3), tokens=tokens)
        engine.generate(requests)
        draft_reads[tokens] = engine.take_metrics()["draft/draft_reads"]

    assert draft_reads["auto"] < 0.8 * draft_reads[4]


def test_new_weights_of_the_rollout_model_draft_from_then_on():
    model = make_model("llama").double()
    engine, drafter = drafted_engine(model, model_near(model, scale=0.3), tokens=3)
    requests = make_requests([5, 9], group=2, num_new=20)
    engine.generate(requests)

    assert engine.take_metrics()["draft/acceptance"] < 0.7

    drafter.update_weights(model.named_parameters(), Version(1, 1))
    engine.generate(requests)
    assert engine.take_metrics()["draft/acceptance"] == 1.0


def test_a_draft_of_nan_costs_its_passes_and_nothing_else():
    model = make_model("llama").double()
    engine, drafter = drafted_engine(model, model, tokens=3)
    drafter.update_weights(
        ((name, torch.full_like(tensor, torch.nan)) for name, tensor in model.named_parameters()), Version(1, 1)
    )
    rollouts = engine.generate(make_requests([5, 9], group=2, num_new=20))

    assert engine.take_metrics()["draft/acceptance"] == 0.0
    for rollout, scores in zip(rollouts, engine.score(rollouts, 1.0), strict=True):
        assert torch.allclose(rollout.rollout_log_probs, scores, rtol=0.0, atol=1e-5)


# Errors


def test_a_pass_that_fails_loses_no_request(monkeypatch):
    model, requests = make_model("llama").double(), make_requests([5, 9], group=2, num_new=20)
    engine, _ = drafted_engine(model, model_near(model), tokens=2)
    undisturbed_rollouts = engine.generate(requests)
    calls = []
    reorder = DraftedBatch._reorder

    def fail_once(batch: DraftedBatch, order: Tensor) -> None:
        calls.append(order)
        if len(calls) == 3:
            raise InterruptedError
        reorder(batch, order)

    monkeypatch.setattr(DraftedBatch, "_reorder", fail_once)

    engine.submit(requests)

    with pytest.raises(InterruptedError):
        engine.collect(len(requests))

    rollouts = {rollout.uid: rollout for rollout in engine.collect(100)}
    assert rollouts.keys() == {request.uid for request in requests}
    assert all(torch.equal(rollouts[rollout.uid].token_ids, rollout.token_ids) for rollout in undisturbed_rollouts)


def test_weights_of_the_policy_that_give_no_number_are_reported():
    model = make_model("llama")
    broken_policy = copy.deepcopy(model)
    broken_policy.model.embed_tokens.weight.data[7] = torch.nan  # read at some time
    engine, _ = drafted_engine(broken_policy, model, tokens=3)

    with pytest.raises(EngineError, match=r"no finite distribution for token \d+ of"):
        engine.generate(make_requests([5, 9], group=2, num_new=20))


@pytest.mark.parametrize(
    ("policy", "rollout_model", "settings", "message"),
    [
        ("llama", "llama", {"attn_implementation": "eager"}, "the policy LlamaForCausalLM"),
        ("llama", "gemma2", {}, "the rollout model Gemma2ForCausalLM"),
        ("nemotron", "llama", {}, "the policy NemotronForCausalLM"),
    ],
)
def test_models_without_an_attention_for_drafts_are_refused(policy, rollout_model, settings, message):
    drafter = make_engine(make_model(rollout_model))
    config = TransformersEngineConfig(draft={}, **settings)
    with pytest.raises(EngineError, match=message):
        TransformersEngine(make_model(policy), config, eos_token_ids=[], version=Version(0, 0), drafter=drafter)


def test_a_drafter_with_exact_attention_is_refused():
    def start(**settings: Any) -> None:
        drafter = make_engine(tiny_model(0), **settings)
        config = TransformersEngineConfig(draft={})
        TransformersEngine(tiny_model(0), config, eos_token_ids=[], version=Version(0, 0), drafter=drafter)

    with pytest.raises(EngineError, match=r"rollout model has engine.quantization=fp8 and no draft.* engine.draft={}"):
        start(quantization="fp8")

    start(quantization="fp8", draft={})


def test_a_draft_of_another_vocabulary_is_refused():
    drafter = make_engine(tiny_model(0, vocab_size=30))
    config = TransformersEngineConfig(draft={})
    with pytest.raises(EngineError, match="24 and 30"):
        TransformersEngine(tiny_model(0), config, eos_token_ids=[], version=Version(0, 0), drafter=drafter)


def test_the_context_is_the_smaller_of_both():
    model = make_model("llama")
    engine, _ = drafted_engine(model, make_model("llama", max_position_embeddings=CONTEXT // 2))
    assert engine.capabilities.max_model_len == CONTEXT // 2
