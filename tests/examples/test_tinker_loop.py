"""examples/tinker_loop.py on two of our models behind tinker's interface, against the objectives computed directly."""

import importlib
import inspect
import sys
from types import ModuleType

import pytest
import torch

from helpers import tinker_stand_in as stand_in
from helpers.paths import ROOT
from jackpot import correct, obrs
from jackpot.config.tasks import ArithmeticConfig
from jackpot.models.load import load_model, load_tokenizer
from jackpot.rollout.tasks.registry import make_task

WHOLE = 32  # the starters' vocabulary: lists of so many hold all probability


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "tinker", stand_in.types())
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("tinker_loop")


@pytest.fixture
def clients() -> tuple[stand_in.StandInTrainingClient, stand_in.StandInTrainingClient]:
    tokenizer = load_tokenizer("starter:policy")
    both = (load_model(f"starter:{name}", torch.float32) for name in ("policy", "rollout_model"))
    return tuple(stand_in.StandInTrainingClient(one, tokenizer) for one in both)


def problems(number: int) -> tuple[list[list[int]], object]:
    """Prompts, and a reward that no group has alike."""
    task = make_task(ArithmeticConfig(), load_tokenizer("starter:policy"))
    prompts = [task.prompt("train", place) for place in range(number)]
    answers = {tuple(one.token_ids): one.answer for one in prompts}
    tokenizer = load_tokenizer("starter:policy")

    def reward(prompt: list[int], ids: list[int]) -> float:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return float(text.partition("#")[2] == answers[tuple(prompt)]) + 0.02 * (len(ids) % 5)

    return [list(one.token_ids) for one in prompts], reward


def pad(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def relative(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    apart = sum((a - b).square().sum() for a, b in zip(found, expected, strict=True)).sqrt()
    return float(apart / sum(one.square().sum() for one in expected).sqrt())


def test_both_gradients_are_those_of_the_papers_objective(loop, clients):
    """With lists of the whole vocabulary Z is exact, and cross entropy has the gradient of the KL."""
    policy, rollout_model = clients
    start = [load_model(f"starter:{name}", torch.float32) for name in ("policy", "rollout_model")]
    prompts, reward = problems(4)
    found = loop.step(policy, rollout_model, prompts, reward, seed=5, group_size=4, max_tokens=12, k=WHOLE)
    assert [name for name, _ in policy.seen] == ["ppo"]
    assert [name for name, _ in rollout_model.seen] == ["ppo", "cross_entropy"]
    assert found["mismatch/engine_gap"] < 1e-5 and found["reward"] > 0.0

    rows, lengths = [], []
    for place, one in enumerate(policy.seen[0][1]):
        whole = [*one.model_input.to_ints(), int(one.loss_fn_inputs["target_tokens"].to_torch()[-1])]
        lengths.append(len(prompts[place // 4]))
        assert whole[: lengths[-1]] == prompts[place // 4]
        rows.append(whole)
    rewards = torch.tensor([reward(row[:at], row[at:]) for row, at in zip(rows, lengths, strict=True)]).view(4, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    tokens = sum(len(row) - at for row, at in zip(rows, lengths, strict=True))
    every = [  # log-probs of both models at every position of every response, [T, vocabulary]
        [one(torch.tensor([row])).logits[0, at - 1 : -1].log_softmax(-1) for row, at in zip(rows, lengths, strict=True)]
        for one in start
    ]
    ids = [torch.tensor(row[at:]) for row, at in zip(rows, lengths, strict=True)]
    chosen = [[a.gather(-1, b[:, None])[:, 0] for a, b in zip(one, ids, strict=True)] for one in every]
    mask = pad([torch.ones_like(one, dtype=torch.bool) for one in ids])
    old, drawn = (pad(one) for one in chosen)
    z = pad([obrs.exact_z(b, a, 1.0) for a, b in zip(*every, strict=True)]).where(mask, 1.0)
    # the draws are a function of the engine's log-probs to the bit, so they are those that it reported
    reported = pad(
        [
            one.loss_fn_inputs["logprobs"].to_torch()[at - 1 :]
            for one, at in zip(rollout_model.seen[0][1], lengths, strict=True)
        ]
    )
    torch.testing.assert_close(drawn.where(mask, 0.0), reported, atol=1e-5, rtol=1e-5)
    given = dict(target_log_probs=old, response_mask=mask, z=z, seed=5)
    done = correct("obrs", rollout_log_probs=reported, **given)
    assert 0.5 < found["obrs/acceptance"] < 0.99
    assert found["obrs/kappa"] == pytest.approx(float(done.metrics["obrs/kappa"]), rel=1e-4)

    factor = (done.accept_mask * done.weights).float() * advantages[:, None]
    loss = -(factor * old).sum() / tokens  # the ratio is 1
    expected = torch.autograd.grad(loss, list(start[0].parameters()), retain_graph=True)
    assert relative(policy.gradients[0], expected) < 1e-4
    own = -(advantages[:, None] * drawn * mask).sum() / tokens
    kl = sum((a.detach().exp() * (a.detach() - b)).sum() for a, b in zip(*every, strict=True)) / tokens
    expected = torch.autograd.grad(own + kl, list(start[1].parameters()))
    assert relative(rollout_model.gradients[0], expected) < 1e-4
    plain = torch.autograd.grad(-(advantages[:, None] * old * mask).sum() / tokens, list(start[0].parameters()))
    assert relative(policy.gradients[0], plain) > 0.05  # without the correction it is another one


def test_both_models_move_and_the_next_step_samples_them(loop, clients):
    policy, rollout_model = clients
    before = [[one.detach().clone() for one in client.model.parameters()] for client in clients]
    prompts, reward = problems(2)
    settings = {"group_size": 4, "max_tokens": 12, "learning_rate": 3e-3}
    lines = [loop.step(policy, rollout_model, prompts, reward, seed=1, **settings) for _ in range(2)]
    for client, start in zip(clients, before, strict=True):
        assert all(bool((one != other).any()) for one, other in zip(client.model.parameters(), start, strict=True))
    first, second = (rollout_model.seen[place][1] for place in (0, 2))  # PPO's of two steps, with the same seed
    assert [one.model_input.to_ints() for one in first] != [one.model_input.to_ints() for one in second]
    assert all(0.0 < line["obrs/z"] <= 1.0 and line["obrs/kappa"] > 0.0 for line in lines)


def test_the_stand_in_has_the_names_of_the_package():
    tinker = pytest.importorskip("tinker")
    if not hasattr(tinker, "ServiceClient"):
        pytest.skip("tinker is not installed")
    for ours, theirs in (
        (stand_in.StandInTrainingClient, tinker.TrainingClient),
        (stand_in.StandInSamplingClient, tinker.SamplingClient),
    ):
        for name in [name for name in vars(ours) if not name.startswith("_")]:
            own = list(inspect.signature(getattr(ours, name)).parameters)
            assert own == list(inspect.signature(getattr(theirs, name)).parameters)[: len(own)], name
    fields = {**tinker.SampleResponse.__annotations__, **vars(tinker.SampleResponse)}
    assert {"sequences", "prompt_logprobs", "topk_prompt_logprobs", "target_prompt_logprobs"} <= fields.keys()
    fields = {**tinker.types.SampledSequence.__annotations__, **vars(tinker.types.SampledSequence)}
    assert {"tokens", "logprobs", "topk_logprobs"} <= fields.keys()
    for one in (stand_in.SamplingParams, stand_in.AdamParams):
        theirs = getattr(tinker, one.__name__)()
        assert all(getattr(theirs, name) == getattr(one(), name) for name in vars(one())), one.__name__
    assert tuple(inspect.signature(tinker.ServiceClient.create_lora_training_client).parameters)[1:3] == (
        "base_model",
        "rank",
    )
