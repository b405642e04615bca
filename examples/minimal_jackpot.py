"""All of Jackpot on one page: a small model generates, a larger one learns from its rollouts, and both are trained.

    python -m examples.minimal_jackpot      # less than a minute on one core of a CPU

The problems are sums, `12+34+5=`, which two transformers of 280,000 and 90,000 parameters solve step by step and
repeat after `#`: `46+5=51#51`. The models are the starters that come with jackpot. One iteration, as Algorithm 1 of
arXiv 2602.06107:

    1. the rollout model generates a group of responses to every prompt; its log-probs and its top k are kept
    2. both models score them, in one forward pass each
    3. OBRS rejects tokens that the policy would hardly generate, and weighs the others (examples/obrs.py)
    4. the policy takes a step on the corrected policy gradient                                   eq. 5
    5. the rollout model takes a step on its own policy gradient and towards the policy           eqs. 6 and 7

It needs torch and transformers. tests/examples/test_minimal_jackpot.py holds three iterations of it to those of
`jackpot train quickstart`: the same tokens, and the same metrics and weights up to rounding. What the trainer has and
this page does not: other engines, micro-batches, several steps on a batch, several processes, a resume, a report.

Shapes: `B` responses, `P` prompt and `T` response tokens, padded on the left and on the right, `V` vocabulary, `K` of
the top k. All log-probs are in nats, at temperature 1.
"""

import random
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from examples.obrs import acceptance, kappa, obrs, tis, topk_z

ITERATIONS, EVERY = 40, 10  # and iterations from one evaluation to the next
PROMPTS, GROUP = 32, 8
MAX_TOKENS, TOP_K = 32, 20
LAM, C1, CAP = 1.0, 3.0, 3.0  # of OBRS, and of the rollout model's TIS
CLIP, DISTILL = 0.2, 1.0  # of PPO's ratio, and the weight of eq. 7
LEARNING_RATE = {"policy": 2e-4, "rollout_model": 4e-4}
STARTERS = Path(__file__).parents[1] / "src/jackpot/models/starter_weights"
TOKENIZER = AutoTokenizer.from_pretrained(STARTERS / "policy")


class Problem(NamedTuple):
    """A sum to solve."""

    text: str
    answer: str


class Rollouts(NamedTuple):
    """Responses, and what the engine says of every sampled token. Masked entries are 0."""

    prompt_ids: Tensor  # [B, P]
    prompt_mask: Tensor  # [B, P] bool
    ids: Tensor  # [B, T]
    mask: Tensor  # [B, T] bool, up to the end of the response
    log_probs: Tensor  # [B, T] log p_inf of the sampled token
    top_ids: Tensor  # [B, T, K]
    top_log_probs: Tensor  # [B, T, K]
    texts: list[str]  # without a response's last token where that ends it; "" where it does not end


def problems(seed: int, number: int, held_out: bool = False) -> list[Problem]:
    """Draw sums of two or three numbers up to 40; a tenth of all is held out, in any order of the numbers."""
    draw, found = random.Random(seed), []
    while len(found) < number:
        terms = [draw.randint(1, 40) for _ in range(draw.randint(2, 3))]
        if (sum(term * term for term in terms) % 10 == 0) == held_out:
            found.append(Problem("+".join(map(str, terms)) + "=", str(sum(terms))))
    return found


def rewards(asked: list[Problem], rollouts: Rollouts) -> Tensor:
    """Return 1 for a response that ends, and whose text after the first `#` is the sum; else 0: [B]."""
    pairs = zip(asked, rollouts.texts, strict=True)
    return torch.tensor([float(text.partition("#")[2] == problem.answer) for problem, text in pairs])


@torch.no_grad()
def generate(model: torch.nn.Module, asked: list[Problem], uniforms: Tensor) -> Rollouts:
    """Sample a response to each problem, token t of row i by the inverse CDF at `uniforms[i, t]`, [B, MAX_TOKENS]."""
    prompts = TOKENIZER([one.text for one in asked], padding=True, padding_side="left", return_tensors="pt")
    prompt_ids, prompt_mask = prompts.input_ids, prompts.attention_mask.bool()
    mask, ids, cache, columns = prompt_mask, prompt_ids, None, []
    is_open = torch.ones(len(asked), dtype=torch.bool)

    while is_open.any() and len(columns) < MAX_TOKENS:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model(ids, attention_mask=mask.long(), position_ids=positions, past_key_values=cache, use_cache=True)
        log_probs, cache = out.logits[:, -1].log_softmax(-1), out.past_key_values  # p_inf, [B, V]

        running = log_probs.double().exp().cumsum(-1)
        ids = torch.searchsorted(running, uniforms[:, len(columns), None] * running[:, -1:], right=True)
        top_log_probs, top_ids = log_probs.topk(TOP_K)
        columns.append((ids[:, 0], is_open, log_probs.gather(-1, ids)[:, 0], top_ids, top_log_probs))
        mask = torch.cat([mask, is_open[:, None]], dim=1)
        is_open = is_open & (ids[:, 0] != TOKENIZER.eos_token_id)

    ids, mask, log_probs, top_ids, top_log_probs = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
    ids, log_probs = ids.where(mask, 0), log_probs.where(mask, 0.0)
    texts = TOKENIZER.batch_decode(ids, skip_special_tokens=True)
    texts = [text * (not cut) for text, cut in zip(texts, is_open.tolist(), strict=True)]
    return Rollouts(prompt_ids, prompt_mask, ids, mask, log_probs, top_ids, top_log_probs, texts)


def score(model: torch.nn.Module, rollouts: Rollouts) -> Tensor:
    """Compute the log-probs of the whole vocabulary at every response token, with gradient: [B, T, V]."""
    ids = torch.cat([rollouts.prompt_ids, rollouts.ids], dim=1)
    mask = torch.cat([rollouts.prompt_mask, rollouts.mask], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask.long(), position_ids=positions, use_cache=False).logits
    return logits[:, rollouts.prompt_ids.shape[1] - 1 : -1].log_softmax(-1)


def surrogate(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """PPO's min(r A, clip(r) A), r = p / p_old: [B, T]. In the first step on a batch r is 1, with a gradient."""
    ratio = (log_probs - old_log_probs).exp()
    return torch.minimum(ratio * advantages, ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * advantages)


def group_advantages(rewards: Tensor) -> Tensor:
    """GRPO's (r - mean) / std over the responses to one prompt, [B, 1]; 0 where all have the same reward."""
    groups = rewards.view(-1, GROUP)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / groups.std(1, keepdim=True)).where(centred != 0, 0.0).view(-1, 1)


class Jackpot:
    """Policy, rollout model and their optimizers."""

    def __init__(self) -> None:
        self.models = {name: AutoModelForCausalLM.from_pretrained(STARTERS / name).eval() for name in LEARNING_RATE}
        self.optimizers = {
            name: torch.optim.AdamW(model.parameters(), LEARNING_RATE[name], betas=(0.9, 0.99), weight_decay=0.0)
            for name, model in self.models.items()
        }

    def iterate(self, asked: list[Problem], uniforms: Tensor, coins: Tensor) -> dict[str, float]:
        """Generate, correct, and take a step of both models; return what to look at.

        Args:
            asked: the problems of the B responses, those of a group one after the other.
            uniforms: [B, MAX_TOKENS] float64 in [0, 1), which draw the tokens.
            coins: [B, MAX_TOKENS] float64 in [0, 1), which draw the rejections.
        """
        rollouts = generate(self.models["rollout_model"], asked, uniforms)
        reward = rewards(asked, rollouts)
        losses, metrics = self.losses(rollouts, group_advantages(reward), coins[:, : rollouts.ids.shape[1]])

        sum(losses.values()).backward()  # eq. 8; the models share no parameter, so each has its own gradient
        for name, model in self.models.items():
            metrics[f"{name}/grad_norm"] = clip_grad_norm_(model.parameters(), 1.0)
            self.optimizers[name].step()
            self.optimizers[name].zero_grad()

        metrics |= {name: loss.detach() for name, loss in losses.items()} | {"reward/mean": reward.mean()}
        return {name: float(value) for name, value in metrics.items()}

    def losses(
        self, rollouts: Rollouts, advantages: Tensor, coins: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute the three terms of eq. 8, means over all sampled tokens, and the metrics of the correction."""
        mask, p_inf = rollouts.mask, rollouts.log_probs
        policy, own = (score(model, rollouts) for model in self.models.values())  # [B, T, V]
        policy_now, own_now = (one.gather(-1, rollouts.ids[..., None])[..., 0] for one in (policy, own))  # [B, T]
        policy_old, own_old = policy_now.detach(), own_now.detach()  # before the step, which is the only one

        def mean(values: Tensor) -> Tensor:
            return values.where(mask, 0.0).sum() / mask.sum()

        # Z over the top k of both; the rollout model still has the weights that sampled, so it knows the policy's top k
        z = topk_z(
            rollouts.top_ids,
            rollouts.top_log_probs,
            policy.detach(),  # log-probs serve as logits
            LAM,
            fill_ins=lambda ids: own.detach().gather(-1, ids),
        )
        weights, accept_mask = obrs(p_inf, policy_old, z, mask, coins, LAM, C1)
        own_weights = tis(p_inf, own_old, CAP)  # 1 but for rounding: the engine is the model itself

        divergence = (policy.detach().exp() * (policy.detach() - own)).sum(-1)  # KL(policy || rollout model), [B, T]
        losses = {
            "policy/loss": -mean(accept_mask * weights * surrogate(policy_now, policy_old, advantages)),  # eq. 5
            "rollout_model/ppo_loss": -mean(own_weights * surrogate(own_now, own_old, advantages)),  # eq. 6
            "rollout_model/distill_loss": DISTILL * mean(divergence),  # eq. 7
        }

        accepted = acceptance(p_inf, policy_old, LAM)
        return losses, {
            "obrs/acceptance": mean(accepted),
            "obrs/z": mean(z),
            "obrs/kappa": kappa(accepted, z, mask),
            "correction/accepted": mean(accept_mask),
            "correction/weight": mean(accept_mask * weights),
        }

    def accuracy(self, name: str, asked: list[Problem]) -> float:
        """Return the share of held-out sums that a model gets right, one sample each."""
        uniforms = torch.rand(len(asked), MAX_TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        return float(rewards(asked, generate(self.models[name], asked, uniforms)).mean())


def main() -> None:
    """Train both models and print how they do on sums that they are never trained on."""
    disable_progress_bar()
    torch.set_num_threads(1)  # the models are too small for more
    jackpot, test = Jackpot(), problems(seed=0, number=512, held_out=True)
    rng = torch.Generator().manual_seed(0)

    def evaluate(iteration: int, note: str = "") -> None:
        policy, rollout_model = (jackpot.accuracy(name, test) for name in jackpot.models)
        print(f"{iteration:9} {policy:9.1%} {rollout_model:15.1%} {note}", flush=True)

    print("held-out sums right, and the tokens of the rollout model that the policy keeps")
    print("iteration    policy   rollout model   kept")
    evaluate(0)

    for iteration in range(1, ITERATIONS + 1):
        asked = [one for one in problems(iteration, PROMPTS) for _ in range(GROUP)]
        uniforms, coins = torch.rand(2, len(asked), MAX_TOKENS, dtype=torch.float64, generator=rng)
        metrics = jackpot.iterate(asked, uniforms, coins)
        if iteration % EVERY == 0:
            evaluate(iteration, f"{metrics['correction/accepted']:6.1%}")


if __name__ == "__main__":
    main()
