"""What `jackpot simulate` says of real pairs of models equals their own forward pass, one response at a time."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.engines.reference import rollout_of, save_longer, save_tiny_model, tiny_model, tiny_prompt
from helpers.runs import small_config
from jackpot.analysis.replay.replay import replay
from jackpot.analysis.replay.settings import settings_of
from jackpot.analysis.simulate import candidates
from jackpot.analysis.simulate.candidates import PairBench, pair_states, saved_responses, simulate_candidates
from jackpot.config.recipes import resolve
from jackpot.core.errors import ConfigError
from jackpot.models import scoring
from jackpot.models.hub import starter_path
from jackpot.models.load import load_tokenizer

TEMPERATURE = 0.8


@pytest.fixture
def few_corrections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge two corrections, where what is asked does not depend on the others."""
    judge_only(monkeypatch, "none", "tis")


def judge_only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Judge only the corrections of these names."""
    monkeypatch.setattr(candidates, "settings_of", lambda config, _: settings_of(config, names))


def log_probs(model, prompt: list[int], response: list[int], temperature: float) -> np.ndarray:
    """Of every token of the vocabulary at every token of the response: [T, V] float64, in one plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].double().numpy()
    logits = logits / temperature
    return (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )


def test_states_are_both_models_softmax_at_every_sampled_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches and chunks so small that responses and batches are cut."""
    monkeypatch.setattr(candidates, "FORWARD_TOKENS", 24)
    monkeypatch.setattr(scoring, "MAX_LOGITS", 3 * 24)
    policy, writer = tiny_model(0).eval(), tiny_model(1).eval()
    draw = np.random.default_rng(0)
    responses = [draw.integers(2, 24, length).tolist() for length in (5, 1, 9, 3)]
    rollouts = [rollout_of(tiny_prompt(3 + row, row), ids) for row, ids in enumerate(responses)]
    tool = rollouts[2].sampled_mask.clone()
    tool[2:5] = False
    rollouts[2] = replace(rollouts[2], sampled_mask=tool)

    chunks = list(pair_states(policy, writer, rollouts, TEMPERATURE))

    assert max(map(len, chunks)) == 3 and sum(map(len, chunks)) == 15
    for model, name in ((writer, "rollout"), (policy, "target")):
        expected = np.concatenate(
            [
                log_probs(model, list(rollout.prompt.token_ids), rollout.token_ids.tolist(), TEMPERATURE)[
                    rollout.sampled_mask.numpy()
                ]
                for rollout in rollouts
            ]
        )
        log_probs_of_states = torch.cat([getattr(chunk, name) for chunk in chunks])
        assert log_probs_of_states.dtype == torch.float64
        np.testing.assert_allclose(log_probs_of_states.numpy(), expected, atol=2e-5)

    written = torch.cat([rollout.token_ids[rollout.sampled_mask] for rollout in rollouts])
    assert torch.cat([chunk.token_ids for chunk in chunks])[:, 0].equal(written)


@pytest.mark.usefixtures("few_corrections")
def test_a_longer_output_layer_is_read_as_in_a_run(tmp_path: Path) -> None:
    config = small_config("sampling.max_new_tokens=8")
    save_longer("starter:rollout_model", tmp_path)

    measured = []
    for path in ("starter:rollout_model", str(tmp_path)):
        [candidate] = simulate_candidates(config, [path], prompts=2, seed=4)
        measured.append(replace(candidate, name="", parameters=0, answer={}))

    assert measured[0] == measured[1]


@pytest.mark.usefixtures("few_corrections")
def test_a_candidate_has_the_means_over_what_it_wrote() -> None:
    config = small_config()
    bench = PairBench(config, "starter:policy", ["starter:rollout_model"], prompts=8, seed=4)
    written = bench.answers("starter:rollout_model")
    candidate = bench.measure("starter:rollout_model")

    models = [
        AutoModelForCausalLM.from_pretrained(starter_path(role), dtype=torch.float32)
        for role in ("policy", "rollout_model")
    ]
    both = [
        [
            log_probs(model, list(response.prompt.token_ids), response.token_ids.tolist(), 1.0)
            for response in written.rollouts
        ]
        for model in models
    ]
    target, rollout = (np.concatenate(rows) for rows in both)
    p, q = np.exp(target), np.exp(rollout)
    kept = np.minimum(p, q)
    z = kept.sum(1)
    near = {"rel": 1e-4, "abs": 1e-6}

    assert candidate.states == len(z) == written.tokens and candidate.responses == 8
    assert candidate.kl_policy_rollout == pytest.approx((p * (target - rollout)).sum(1).mean(), **near)
    assert candidate.kl_rollout_policy == pytest.approx((q * (rollout - target)).sum(1).mean(), **near)
    assert candidate.kl_after == pytest.approx((p * (target - np.log(kept / z[:, None]))).sum(1).mean(), **near)
    assert candidate.acceptance == pytest.approx(z.mean(), **near) and candidate.low_acceptance == (z < 0.5).mean()
    assert candidate.acceptance_spread == pytest.approx(z.std(), **near)

    rho = p / q
    tis, accepted = np.minimum(rho, 3), np.minimum(rho, 1)
    weight = np.minimum(z[:, None] * np.maximum(rho, 1), 3)
    expected = accepted * weight

    def mean(moment: np.ndarray) -> float:
        return (q * moment).sum(1).mean()

    assert candidate.tis_cut == pytest.approx(1 - mean(tis), **near)
    assert candidate.obrs_cut == pytest.approx(1 - mean(expected) / z.mean(), **near)
    assert candidate.tis_ess == pytest.approx(mean(tis) ** 2 / mean(tis**2), **near)
    assert candidate.obrs_ess == pytest.approx(mean(expected) ** 2 / mean(accepted * weight**2), **near)
    assert candidate.expected_ess == pytest.approx(mean(expected) ** 2 / mean(expected**2), **near)

    together = mean(tis * expected) / math.sqrt(mean(tis**2) * mean(expected**2))
    assert candidate.agreement == pytest.approx(together, **near)

    ratios = np.array(
        [
            (at[range(len(ids)), ids] - by[range(len(ids)), ids]).sum()
            for at, by, ids in zip(*both, [response.token_ids.tolist() for response in written.rollouts], strict=True)
        ]
    )

    assert candidate.sequence_log_ratio == pytest.approx(ratios.mean(), **near)
    assert candidate.sequence_ess == pytest.approx(np.exp(ratios).sum() ** 2 / (8 * np.exp(2 * ratios).sum()), **near)
    assert (
        candidate.accuracy == written.accuracy and candidate.policy_accuracy == bench.answers("starter:policy").accuracy
    )
    assert (candidate.parameters, candidate.policy_parameters) == (88_512, 280_416)


@pytest.mark.usefixtures("few_corrections")
def test_a_closer_candidate_has_a_smaller_gap() -> None:
    same, other = simulate_candidates(small_config(), ["starter:policy", "starter:rollout_model"], prompts=4, seed=0)

    assert (same.name, other.name) == ("starter:policy", "starter:rollout_model")
    assert (
        same.kl_policy_rollout < 1e-9
        and same.acceptance == pytest.approx(1.0)
        and same.parameters == same.policy_parameters
    )
    assert same.sequence_ess == pytest.approx(1.0) and same.answer["verdict"] == "cannot tell"
    assert other.kl_policy_rollout > 0.01 and other.acceptance < 0.99 and other.answer["verdict"] == "cannot tell"


@pytest.mark.usefixtures("few_corrections")
def test_a_model_that_knows_nothing_is_too_far_away(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, seed=0, vocab_size=32)
    load_tokenizer("starter:policy").save_pretrained(tmp_path)
    [far] = simulate_candidates(small_config(), [str(tmp_path)], prompts=60, seed=0)
    assert far.acceptance < 0.5 and far.low_acceptance > 0.5 and far.answer["verdict"] == "too far"


def _plain(value):
    """Return what JSON can hold."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_simulate_advises_what_replay_advises(tmp_path: Path, monkeypatch) -> None:
    """The rollouts of a simulation as a dump, without the columns of any run."""
    names = ("none", "tis", "prefix", "dppo", "obrs")
    responses = []
    judge_only(monkeypatch, *names)

    def keep(*arguments):
        responses.extend(saved_responses(*arguments))
        return responses

    monkeypatch.setattr(candidates, "saved_responses", keep)
    [candidate] = simulate_candidates(small_config(), [], prompts=180, seed=0)

    rows = [{name: _plain(getattr(row, name)) for name in row.__dataclass_fields__} for row in responses]
    path = tmp_path / "dump.jsonl"
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in rows))
    replayed = replay(path, names=names).answer.numbers()

    assert replayed["correction"] == candidate.answer["correction"] == "tis"

    simulated, expected = (
        {row["label"]: row["worth"] for row in answer["candidates"]} for answer in (candidate.answer, replayed)
    )
    for label in ("none", "tis", "obrs expected", "prefix low=1 high=1", "dppo"):
        assert simulated[label] == pytest.approx(expected[label], rel=1e-6), label
    assert candidate.answer["generation"] and not replayed["generation"]  # a dump does not say what its models cost
    assert "scored by starter:policy" in candidate.answer["measured_on"]


@pytest.mark.usefixtures("few_corrections")
def test_without_candidates_the_recipes_model_is_measured() -> None:
    measured = simulate_candidates(small_config(), [], prompts=5, seed=1)
    assert [candidate.name for candidate in measured] == ["starter:rollout_model"]
    assert measured == simulate_candidates(small_config(), [], prompts=5, seed=1)

    benches = [PairBench(small_config(), "starter:policy", ["starter:rollout_model"], 5, seed) for seed in (1, 2)]
    first, second = ({prompt.uid for prompt in bench.prompts} for bench in benches)
    assert len(first) == len(second) == 5 and first != second


@pytest.mark.usefixtures("few_corrections")
def test_no_more_than_the_most_states_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "MOST_STATES", 30)
    [candidate] = simulate_candidates(small_config(), [], prompts=10, seed=0)
    assert 10 < candidate.states <= 30 and candidate.responses == 10


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rollout-model PATH"):
        simulate_candidates(resolve("quickstart", "on_policy", []), [], prompts=2, seed=0)
    with pytest.raises(ConfigError, match="twice"):
        simulate_candidates(small_config(), ["starter:policy"] * 2, prompts=2, seed=0)
    with pytest.raises(ConfigError, match=r"top_p 0\.9.*sampling\.top_p=1\.0"):
        simulate_candidates(small_config("sampling.top_p=0.9"), [], prompts=2, seed=0)
