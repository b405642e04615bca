"""A step of examples/tinker_loop.py, on two models behind tinker's interface, takes the gradients of the objectives."""

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

VOCAB_SIZE = 32  # of the starters: lists of so many tokens hold all probability


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module examples/tinker_loop.py, with the stand-in where tinker is not installed."""
    monkeypatch.setitem(sys.modules, "tinker", stand_in.types())
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("tinker_loop")


@pytest.fixture
def clients() -> tuple[stand_in.StandInTrainingClient, stand_in.StandInTrainingClient]:
    """Training clients of the policy and of the rollout model."""
    tokenizer = load_tokenizer("starter:policy")
    models = (load_model(f"starter:{name}", torch.float32) for name in ("policy", "rollout_model"))
    return tuple(stand_in.StandInTrainingClient(model, tokenizer) for model in models)


def prompts_and_reward(count: int) -> tuple[list[list[int]], object]:
    """Make prompts, and a reward that differs within every group, by the length of the response too."""
    tokenizer = load_tokenizer("starter:policy")
    task = make_task(ArithmeticConfig(), tokenizer)
    prompts = [task.prompt("train", index) for index in range(count)]
    answers = {tuple(prompt.token_ids): prompt.answer for prompt in prompts}

    def reward(prompt: list[int], ids: list[int]) -> float:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return float(text.partition("#")[2] == answers[tuple(prompt)]) + 0.02 * (len(ids) % 5)

    return [list(prompt.token_ids) for prompt in prompts], reward


def pad(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def relative_distance(gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the norm of the difference, in units of the norm expected."""
    distance = sum((a - b).square().sum() for a, b in zip(gradients, expected, strict=True)).sqrt()
    return float(distance / sum(gradient.square().sum() for gradient in expected).sqrt())


def test_both_gradients_are_those_of_the_papers_objective(loop, clients):
    """With lists of the whole vocabulary Z is exact, and cross entropy has the gradient of the KL."""
    policy, rollout_model = clients
    start_models = [load_model(f"starter:{name}", torch.float32) for name in ("policy", "rollout_model")]
    prompts, reward = prompts_and_reward(4)

    metrics = loop.step(policy, rollout_model, prompts, reward, seed=5, group_size=4, max_tokens=12, k=VOCAB_SIZE)

    assert [loss_name for loss_name, _ in policy.calls] == ["ppo"]
    assert [loss_name for loss_name, _ in rollout_model.calls] == ["ppo", "cross_entropy"]
    assert metrics["mismatch/engine_gap"] < 1e-5
    assert metrics["reward"] > 0.0

    # the responses, from what the policy was sent
    sequences, lengths = [], []  # prompt and response, and the prompt's length
    for index, datum in enumerate(policy.calls[0][1]):
        prompt = prompts[index // 4]  # groups of four
        sequence = [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].to_torch()[-1])]
        assert sequence[: len(prompt)] == prompt
        sequences.append(sequence)
        lengths.append(len(prompt))
    responses = [torch.tensor(sequence[length:]) for sequence, length in zip(sequences, lengths, strict=True)]
    mask = pad([torch.ones_like(ids, dtype=torch.bool) for ids in responses])
    token_count = sum(len(ids) for ids in responses)

    # advantages are rewards less the group's mean
    rewards = [
        reward(sequence[:length], sequence[length:]) for sequence, length in zip(sequences, lengths, strict=True)
    ]
    reward_groups = torch.tensor(rewards).view(4, 4)
    advantages = (reward_groups - reward_groups.mean(1, keepdim=True)).flatten()

    # log-probs by both models, of all tokens of the vocabulary [T, V] at each token of each response
    policy_distributions, rollout_distributions = (
        [
            model(torch.tensor([sequence])).logits[0, length - 1 : -1].log_softmax(-1)
            for sequence, length in zip(sequences, lengths, strict=True)
        ]
        for model in start_models
    )
    policy_log_probs, rollout_log_probs = (
        pad([rows.gather(-1, ids[:, None])[:, 0] for rows, ids in zip(distributions, responses, strict=True)])
        for distributions in (policy_distributions, rollout_distributions)
    )
    distribution_pairs = list(zip(policy_distributions, rollout_distributions, strict=True))

    # the correction; draws are a function of the engine's log-probs to the bit, so they are those that it reported
    reported_log_probs = pad(
        [
            datum.loss_fn_inputs["logprobs"].to_torch()[length - 1 :]
            for datum, length in zip(rollout_model.calls[0][1], lengths, strict=True)
        ]
    )
    torch.testing.assert_close(rollout_log_probs.where(mask, 0.0), reported_log_probs, atol=1e-5, rtol=1e-5)
    z_rows = [obrs.exact_z(rollout_rows, policy_rows, 1.0) for policy_rows, rollout_rows in distribution_pairs]
    corrected = correct(
        "obrs",
        rollout_log_probs=reported_log_probs,
        target_log_probs=policy_log_probs,
        response_mask=mask,
        z=pad(z_rows).where(mask, 1.0),
        seed=5,
    )
    assert 0.5 < metrics["obrs/acceptance"] < 0.99
    assert metrics["obrs/kappa"] == pytest.approx(float(corrected.metrics["obrs/kappa"]), rel=1e-4)

    # the policy: PPO at ratio 1, each token with its factor
    policy_weights, rollout_weights = (list(model.parameters()) for model in start_models)
    factors = (corrected.accept_mask * corrected.weights).float() * advantages[:, None]
    policy_loss = -(factors * policy_log_probs).sum() / token_count
    expected_gradient = torch.autograd.grad(policy_loss, policy_weights, retain_graph=True)
    assert relative_distance(policy.gradients[0], expected_gradient) < 1e-4

    # the rollout model: PPO, and the KL from the policy
    rollout_loss = -(advantages[:, None] * rollout_log_probs * mask).sum() / token_count
    kl_sum = sum(
        (policy_rows.detach().exp() * (policy_rows.detach() - rollout_rows)).sum()
        for policy_rows, rollout_rows in distribution_pairs
    )
    expected_gradient = torch.autograd.grad(rollout_loss + kl_sum / token_count, rollout_weights)
    assert relative_distance(rollout_model.gradients[0], expected_gradient) < 1e-4

    # without the correction the policy's gradient would be another one
    plain_loss = -(advantages[:, None] * policy_log_probs * mask).sum() / token_count
    plain_gradient = torch.autograd.grad(plain_loss, policy_weights)
    assert relative_distance(policy.gradients[0], plain_gradient) > 0.05


def test_both_models_move_and_the_next_step_samples_them(loop, clients):
    policy, rollout_model = clients
    start_weights = [[weight.detach().clone() for weight in client.model.parameters()] for client in clients]
    prompts, reward = prompts_and_reward(2)
    settings = {"group_size": 4, "max_tokens": 12, "learning_rate": 3e-3}

    lines = [loop.step(policy, rollout_model, prompts, reward, seed=1, **settings) for _ in range(2)]

    for client, weights in zip(clients, start_weights, strict=True):
        weight_pairs = zip(client.model.parameters(), weights, strict=True)
        assert all(bool((weight != start_weight).any()) for weight, start_weight in weight_pairs)

    # calls of the rollout model are PPO and distillation by turns; both steps sample with the same seed
    first_step_data, second_step_data = rollout_model.calls[0][1], rollout_model.calls[2][1]
    first_responses = [datum.model_input.to_ints() for datum in first_step_data]
    assert first_responses != [datum.model_input.to_ints() for datum in second_step_data]

    assert all(0.0 < line["obrs/z"] <= 1.0 for line in lines)
    assert all(line["obrs/kappa"] > 0.0 for line in lines)


def test_the_stand_in_has_the_names_of_the_package():
    tinker = pytest.importorskip("tinker")
    if not hasattr(tinker, "ServiceClient"):
        pytest.skip("tinker is not installed")

    for stand_in_client, package_client in (
        (stand_in.StandInTrainingClient, tinker.TrainingClient),
        (stand_in.StandInSamplingClient, tinker.SamplingClient),
    ):
        for name in [name for name in vars(stand_in_client) if not name.startswith("_")]:
            parameters = list(inspect.signature(getattr(stand_in_client, name)).parameters)
            package_parameters = list(inspect.signature(getattr(package_client, name)).parameters)
            assert parameters == package_parameters[: len(parameters)], name

    fields = {**tinker.SampleResponse.__annotations__, **vars(tinker.SampleResponse)}
    assert {"sequences", "prompt_logprobs", "topk_prompt_logprobs", "target_prompt_logprobs"} <= fields.keys()
    fields = {**tinker.types.SampledSequence.__annotations__, **vars(tinker.types.SampledSequence)}
    assert {"tokens", "logprobs", "topk_logprobs"} <= fields.keys()

    for stand_in_type in (stand_in.SamplingParams, stand_in.AdamParams):
        package_defaults = getattr(tinker, stand_in_type.__name__)()
        for name, default in vars(stand_in_type()).items():
            assert getattr(package_defaults, name) == default, (stand_in_type.__name__, name)

    create_client = tinker.ServiceClient.create_lora_training_client
    assert tuple(inspect.signature(create_client).parameters)[1:3] == ("base_model", "rank")
