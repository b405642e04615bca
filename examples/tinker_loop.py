"""The whole of Jackpot as a client of Tinker: a small model generates, a large one is trained with OBRS, and both move.

    TINKER_API_KEY=... python examples/tinker_loop.py

It needs `pip install tinker`, and two models of the service with one vocabulary. docs/frameworks.md says what a step
asks of the service, and what the service cannot give.

Status: never run on its target (the service of Tinker). The tests run it on a stand-in with tinker's interface.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tinker
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import jackpot

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}  # of PPO's ratio, both models


@dataclass
class Response:
    """One response of T tokens, with K most probable tokens of both models at each. Log-probs in nats."""

    prompt: list[int]
    ids: list[int]
    advantage: float
    rollout: Tensor  # [T], by the rollout model that sampled
    rollout_top: tuple[Tensor, Tensor]  # ids and log-probs, [T, K]
    old: Tensor | None = None  # [T], by the policy
    old_at_rollout_top: Tensor | None = None  # [T, K]
    old_top: tuple[Tensor, Tensor] | None = None

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.ids


def pairs(top: Sequence[Sequence[tuple[int, float]]]) -> tuple[Tensor, Tensor]:
    """Ids and log-probs [T, K] of lists of (id, log-prob); a short list is padded with probability 0."""
    width = max(map(len, top))
    rows = [[*one, *[(-1 - place, -torch.inf) for place in range(width - len(one))]] for one in top]
    return tuple(torch.tensor([[entry[part] for entry in row] for row in rows]) for part in (0, 1))


def generate(sampler, prompts, reward, group_size: int, max_tokens: int, k: int, seed: int) -> list[Response]:
    """Ask the rollout model for a group of responses to each prompt; advantages are rewards less the group's mean."""
    asked = []
    for number, prompt in enumerate(prompts):
        params = tinker.SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed * len(prompts) + number)
        question = tinker.ModelInput.from_ints(prompt)
        asked.append(sampler.sample(question, group_size, params, topk_sample_logprobs=k))
    responses = []
    for prompt, future in zip(prompts, asked, strict=True):
        found = future.result().sequences
        rewards = [reward(prompt, one.tokens) for one in found]
        for one, value in zip(found, rewards, strict=True):
            advantage, log_probs = value - sum(rewards) / len(rewards), torch.tensor(one.logprobs)
            responses.append(Response(prompt, one.tokens, advantage, log_probs, pairs(one.topk_logprobs)))
    return responses


def score(judge, responses: Sequence[Response], k: int) -> None:
    """Ask the policy how probable the tokens are, and the rollout model's top k: one prefill for each response."""
    asked = []
    for one in responses:
        ids = torch.full((len(one.whole) - 1, one.rollout_top[0].shape[1]), -1)
        ids[len(one.prompt) - 1 :] = one.rollout_top[0]
        asked.append(
            judge.sample(
                tinker.ModelInput.from_ints(one.whole),
                1,
                tinker.SamplingParams(max_tokens=1),
                include_prompt_logprobs=True,
                topk_prompt_logprobs=k,
                target_prompt_logprobs=tinker.TensorData.from_torch(ids),
            )
        )
    for one, future in zip(responses, asked, strict=True):
        found, start = future.result(), len(one.prompt)
        one.old = torch.tensor(found.prompt_logprobs[start:])
        known = one.rollout_top[1].isfinite()
        one.old_at_rollout_top = torch.where(known, found.target_prompt_logprobs.to_torch()[start - 1 :], -torch.inf)
        one.old_top = pairs(found.topk_prompt_logprobs[start:])


def correct(responses: Sequence[Response], seed: int) -> jackpot.Corrected:
    """OBRS of all responses together, so that kappa is that of the whole step."""

    def padded(rows: list[Tensor], value: float = 0.0) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_value=value)

    def z(one: Response) -> Tensor:
        ids, log_probs = one.rollout_top  # its log-probs at the policy's top k are not asked for: no fill-ins
        none, never = torch.zeros_like(one.old_top[1]), torch.zeros_like(one.rollout, dtype=torch.bool)
        return jackpot.obrs.topk_z(log_probs, one.old_at_rollout_top, ids, *one.old_top, none, never, lam=1.0).value

    return jackpot.correct(
        "obrs",
        rollout_log_probs=padded([one.rollout for one in responses]),
        target_log_probs=padded([one.old for one in responses]),
        response_mask=padded([torch.ones_like(one.rollout) for one in responses]).bool(),
        z=padded([z(one) for one in responses], 1.0),
        seed=seed,
    )


def datum(one: Response, **columns: Tensor) -> tinker.Datum:
    """What the loss reads at every token: columns [T] or [T, K] of the response, and 0 before it."""
    inputs = {"target_tokens": torch.tensor(one.whole[1:])} | {
        name: torch.cat([torch.zeros(len(one.prompt) - 1, *column.shape[1:], dtype=column.dtype), column])
        for name, column in columns.items()
    }
    tensors = {name: tinker.TensorData.from_torch(column) for name, column in inputs.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(one.whole[:-1]), loss_fn_inputs=tensors)


def step(
    policy: tinker.TrainingClient,
    rollout_model: tinker.TrainingClient,
    prompts: Sequence[list[int]],
    reward: Callable[[list[int], list[int]], float],
    *,
    seed: int,
    group_size: int = 8,
    max_tokens: int = 64,
    k: int = 20,
    learning_rate: float = 1e-4,
    distill_weight: float = 1.0,
) -> dict[str, float]:
    """Generate, correct, and take an optimizer step of both models; losses are sums over tokens, so each has 1/N."""
    sampler, judge = (one.save_weights_and_get_sampling_client().result() for one in (rollout_model, policy))
    responses = generate(sampler, prompts, reward, group_size, max_tokens, k, seed)
    score(judge, responses, k)
    corrected = correct(responses, seed)
    share = 1.0 / sum(len(one.ids) for one in responses)
    factors = corrected.accept_mask * corrected.weights * share
    train, own, distill = [], [], []
    for one, factor in zip(responses, factors, strict=True):  # weights >= 0 commute with PPO's minimum
        train.append(datum(one, logprobs=one.old, advantages=one.advantage * factor[: len(one.ids)].float()))
        own.append(datum(one, logprobs=one.rollout, advantages=torch.full_like(one.rollout, one.advantage * share)))
        chosen, log_probs = one.old_top
        weights = log_probs.softmax(-1) * distill_weight * share
        distill.append(datum(one, target_tokens=chosen.clamp(min=0), weights=weights))
    adam = tinker.AdamParams(learning_rate=learning_rate, grad_clip_norm=1.0)
    waiting = [
        policy.forward_backward(train, "ppo", CLIP),
        policy.optim_step(adam),
        rollout_model.forward_backward(own, "ppo", CLIP),
        rollout_model.forward_backward(distill, "cross_entropy"),  # adds to the gradient
        rollout_model.optim_step(adam),
    ]
    done = [future.result() for future in waiting]
    read = [
        one["logprobs"].to_torch()[-len(asked.ids) :]
        for asked, one in zip(responses, done[2].loss_fn_outputs, strict=True)
    ]
    gaps = [(one.rollout.exp() - log_probs.exp()).abs() for one, log_probs in zip(responses, read, strict=True)]
    mean = sum(reward(one.prompt, one.ids) for one in responses) / len(responses)
    found = {"reward": mean, "mismatch/engine_gap": float(torch.cat(gaps).mean())}
    return found | {name: float(value) for name, value in corrected.metrics.items()}


def main() -> None:
    """Train on sums, with two models of the service."""
    service = tinker.ServiceClient()
    names = ("Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-4B")
    policy, rollout_model = (service.create_lora_training_client(base_model=name, rank=32) for name in names)
    tokenizer = policy.get_tokenizer()
    if tokenizer.get_vocab() != rollout_model.get_tokenizer().get_vocab():
        raise SystemExit(f"{names[0]} and {names[1]} have different vocabularies: choose two models of one")

    def reward(prompt: list[int], ids: list[int]) -> float:
        left, _, right = tokenizer.decode(prompt).removesuffix("=").partition("+")
        return float(tokenizer.decode(ids).strip().startswith(str(int(left) + int(right))))

    for number in itertools.count():
        draw = random.Random(number)
        texts = [f"{draw.randrange(1000)}+{draw.randrange(1000)}=" for _ in range(32)]
        print(number, step(policy, rollout_model, [tokenizer.encode(text) for text in texts], reward, seed=number))


if __name__ == "__main__":
    main()
