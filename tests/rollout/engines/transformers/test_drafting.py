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


def drafted(model: PreTrainedModel, draft: PreTrainedModel, stops: tuple[int, ...] = (EOS,), **settings: Any):
    """Return an engine of copies of `model`, and of `draft`, which drafts for it; other names are of `engine.draft`."""
    engine = {name: settings.pop(name) for name in ("max_num_seqs", "enforce_eager") if name in settings}
    config = TransformersEngineConfig(draft=settings, **engine)
    drafter = make_engine(copy.deepcopy(draft))
    return TransformersEngine(
        copy.deepcopy(model), config, eos_token_ids=stops, version=Version(0, 0), drafter=drafter
    ), drafter


def near(model: PreTrainedModel, scale: float = 0.03) -> PreTrainedModel:
    """Return a model whose weights are a little off."""
    torch.manual_seed(5)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data += scale * torch.randn_like(parameter)
    return other


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
            kept = np.minimum(q, p / self._lam)
            rest = np.maximum(p - kept, 0.0)
            self._known[response] = [p, q, kept, (1.0 - kept.sum()) * rest / rest.sum()]
        return self._known[response]

    def prob(self, response: tuple[int, ...], start: int = 0, left: int = 0) -> float:
        """Return the probability of the tokens from `start` on, of which `left` more are drafts of the current pass."""
        if start == LENGTH:
            return 1.0
        p, _, kept, replaced = (one[response[start]] for one in self.distributions(response[:start]))
        after = self.prob(response, start + 1, min(self._tokens, LENGTH - start - 2))  # the next pass
        return kept * self.prob(response, start + 1, left - 1) + replaced * after if left > 0 else p * after


@pytest.mark.parametrize(("tokens", "lam"), [(3, 1.0), (2, 0.5)])
def test_responses_have_the_exact_distribution(tokens, lam):
    model, draft = tiny_model(0, VOCAB), tiny_model(3, VOCAB, num_hidden_layers=1)
    law, count = Law(model, draft, tokens, lam), 2000
    engine, _ = drafted(model, draft, (), tokens=tokens, lam=lam, max_num_seqs=2000)
    rollouts = engine.generate(
        [tiny_request(f"{i}", seed=i, prompt=PROMPT, max_new_tokens=LENGTH, num_top_log_probs=2) for i in range(count)]
    )
    seen = Counter(tuple(rollout.token_ids.tolist()) for rollout in rollouts)
    exact = {response: law.prob(response) for response in product(range(VOCAB), repeat=LENGTH)}
    assert sum(exact.values()) == pytest.approx(1.0)
    common = [response for response, prob in exact.items() if prob * count >= 5.0]
    observed = [seen[response] for response in common]
    expected = [exact[response] * count for response in common]
    assert len(common) > 30
    rest = [count - sum(observed)], [count - sum(expected)]
    assert chisquare(observed + rest[0], expected + rest[1]).pvalue > 1e-3
    assert 0.2 < engine.take_metrics()["draft/acceptance"] < 0.95
    for rollout in rollouts[:200]:  # the second token is drafted; the first never is, nor the last where k is 1
        response = tuple(rollout.token_ids.tolist())
        for place, token in enumerate(response[:2]):
            p, _, kept, replaced = law.distributions(response[:place])
            own = kept + replaced if place else p
            assert rollout.rollout_log_probs[place] == pytest.approx(np.log(own[token]), abs=1e-5)
            assert rollout.top_log_probs[place].numpy() == pytest.approx(np.log(np.sort(own)[::-1][:2]), abs=1e-5)


def test_exact_drafts_beside_relaxed_ones_are_those_of_lam_1():
    model, draft = tiny_model(0, VOCAB), tiny_model(3, VOCAB, num_hidden_layers=1)
    relaxed = [tiny_request(f"{i}", seed=i, prompt=PROMPT, max_new_tokens=6, num_top_log_probs=0) for i in range(4)]
    exact = [replace(one, uid=f"exact {one.uid}", exact_drafts=True) for one in relaxed]
    mixed = [one for pair in zip(relaxed, exact, strict=True) for one in pair]
    engines = [drafted(model, draft, (), tokens=3, lam=lam)[0] for lam in (0.3, 1.0)]
    ours, theirs = ([one.token_ids.tolist() for one in engine.generate(mixed)] for engine in engines)
    assert ours[1::2] == theirs[1::2] == theirs[::2] and ours[::2] != theirs[::2]


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
    engine, _ = drafted(model, near(model), tokens=5)
    rollouts = engine.generate(make_requests([CONTEXT - 10, 9, 2, 9], num_new=40))
    assert len({len(rollout.token_ids) for rollout in rollouts}) > 5
    assert 0.3 < engine.take_metrics()["draft/acceptance"] < 0.95
    for rollout, scores in zip(rollouts, engine.score(rollouts, 1.0), strict=True):
        assert torch.allclose(rollout.rollout_log_probs, scores, rtol=0.0, atol=1e-5)


def test_a_response_does_not_depend_on_its_batch():
    model = make_model("llama").double()
    together, alone = (drafted(model, near(model), tokens="auto", max_num_seqs=size)[0] for size in (64, 4))
    requests = make_requests([5, 9, 2], group=2, num_new=16)
    for one, other in zip(together.generate(requests), alone.generate(requests[::-1])[::-1], strict=True):
        assert torch.equal(one.token_ids, other.token_ids) and one.finish == other.finish


# What drafts save


@pytest.mark.parametrize(("tokens", "passes"), [(1, 11), (4, 5), ("auto", 4)])
def test_a_draft_that_is_the_policy_is_accepted_whole(tokens, passes):
    """Of 21 tokens the first comes from the prompt, and each pass gives one more than was drafted; auto: 5, 7, 8."""
    model = make_model("llama").double()
    engine, _ = drafted(model, model, stops=(), tokens=tokens)
    engine.generate(
        [
            replace(one, sampling=one.sampling.model_copy(update={"max_new_tokens": 21}))
            for one in make_requests([5, 9], group=2, num_new=20)
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
    engine, _ = drafted(model, model, stops=(), tokens=2)
    requests = make_requests([5, 9], group=1, num_new=20)
    short, long = (
        replace(request, sampling=request.sampling.model_copy(update={"max_new_tokens": count}))
        for request, count in zip(requests, (3, 20), strict=True)
    )
    engine.submit([long])
    engine.generate([short])
    tokens = engine.take_draft_counts().tokens
    assert 3 < tokens < 23
    engine.collect(1)
    assert tokens + engine.take_draft_counts().tokens == 23


def test_a_pass_waits_for_its_draws_alone():
    """Positions, uniforms and tokens go to the device without a wait, however many are drafted."""
    model = make_model("llama")
    engine, _ = drafted(model, model, stops=(), tokens=4)
    engine.submit(make_requests([5, 9], num_new=60))
    engine.collect(0)
    for _ in range(2):
        engine._step()
    batch = engine._batch
    of_host = ("rows", "stops", "limits", "records", "num_drafts", "prompt_lengths", "streams", "lengths", "tail")
    with waits(on_host=[getattr(batch, f"_{name}") for name in of_host]) as found:
        engine._step()
    assert set(batch._lengths.tolist()) == {11} and len(found) == 1, found


@pytest.mark.slow
def test_the_number_of_drafts_follows_the_acceptance():
    model, requests = make_model("llama").double(), make_requests([5, 9], group=2, num_new=20)
    reads = {}
    for tokens in (4, "auto"):
        engine, _ = drafted(model, near(model, 0.3), tokens=tokens)
        engine.generate(requests)
        reads[tokens] = engine.take_metrics()["draft/draft_reads"]
    assert reads["auto"] < 0.8 * reads[4]


def test_new_weights_of_the_rollout_model_draft_from_then_on():
    model = make_model("llama").double()
    engine, drafter = drafted(model, near(model, 0.3), tokens=3)
    requests = make_requests([5, 9], group=2, num_new=20)
    engine.generate(requests)
    assert engine.take_metrics()["draft/acceptance"] < 0.7
    drafter.update_weights(model.named_parameters(), Version(1, 1))
    engine.generate(requests)
    assert engine.take_metrics()["draft/acceptance"] == 1.0


def test_a_draft_of_nan_costs_its_passes_and_nothing_else():
    model = make_model("llama").double()
    engine, drafter = drafted(model, model, tokens=3)
    drafter.update_weights(
        ((name, torch.full_like(one, torch.nan)) for name, one in model.named_parameters()), Version(1, 1)
    )
    rollouts = engine.generate(make_requests([5, 9], group=2, num_new=20))
    assert engine.take_metrics()["draft/acceptance"] == 0.0
    for rollout, scores in zip(rollouts, engine.score(rollouts, 1.0), strict=True):
        assert torch.allclose(rollout.rollout_log_probs, scores, rtol=0.0, atol=1e-5)


# Errors


def test_a_pass_that_fails_loses_no_request(monkeypatch):
    model, requests = make_model("llama").double(), make_requests([5, 9], group=2, num_new=20)
    engine, _ = drafted(model, near(model), tokens=2)
    undisturbed, calls = engine.generate(requests), []
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
    found = {rollout.uid: rollout for rollout in engine.collect(100)}
    assert found.keys() == {request.uid for request in requests}
    assert all(torch.equal(found[rollout.uid].token_ids, rollout.token_ids) for rollout in undisturbed)


def test_weights_of_the_policy_that_give_no_number_are_reported():
    model = make_model("llama")
    broken = copy.deepcopy(model)
    broken.model.embed_tokens.weight.data[7] = torch.nan  # read at some time
    engine, _ = drafted(broken, model, tokens=3)
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
        drafting = TransformersEngineConfig(draft={})
        TransformersEngine(tiny_model(0), drafting, eos_token_ids=[], version=Version(0, 0), drafter=drafter)

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
    engine, _ = drafted(model, make_model("llama", max_position_embeddings=CONTEXT // 2))
    assert engine.capabilities.max_model_len == CONTEXT // 2
