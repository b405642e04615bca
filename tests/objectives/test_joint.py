"""The joint objective token by token, its scores, and what it reports, against numpy and loops."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.learners import loss_of, policy_objective
from helpers.sums import assert_equal_sums
from jackpot.core.types import TokenBatch
from jackpot.corrections import make_correction
from jackpot.objectives.corrections import CORRECTIONS
from jackpot.objectives.joint import (
    OldLogProbs,
    RolloutModelObjective,
    check_exact,
    policy_report,
    token_scores,
)
from jackpot.objectives.kernels.linear_head import Head, joint_linear_head, linear_head
from jackpot.objectives.losses import DISTILLATIONS, LOSS_AGG_MODES
from jackpot.objectives.obrs import ZEstimate

B, T = 4, 5  # responses of the batch, positions of a response
V, H, K = 7, 6, 3  # vocabulary, hidden size, length of the top-k lists
MAX_LENGTH = 9  # the longest response that the settings allow
LENGTHS = [5, 3, 0, 1]
RTOL = 1e-11
CLIPS = dict(clip_low=0.2, clip_high=0.3)


class Case:
    """Random heads, a batch whose third sequence is empty and whose second has a token that a tool inserted."""

    def __init__(self, seed=0, lam=0.8):
        self.generator = torch.Generator().manual_seed(seed)
        self.lam = lam
        self.attention_mask = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
        self.mask = self.attention_mask.clone()
        self.mask[1, 1] = False
        count = int(self.mask.sum())
        self.ids = torch.randint(V, (B, T), generator=self.generator)
        self.hidden = {role: self.normal(count, H) for role in ("policy", "rollout_model")}
        self.weight = {role: self.normal(V, H).requires_grad_() for role in ("policy", "rollout_model")}
        log_inf = torch.log_softmax(self.normal(B, T, V), -1)
        top = log_inf.topk(K)
        self.log_inf = log_inf
        self.batch = TokenBatch(
            uids=tuple("abcd"),
            prompt_ids=torch.zeros(1, 1, dtype=torch.int64),
            prompt_mask=torch.ones(1, 1, dtype=torch.bool),
            prompt_index=torch.zeros(B, dtype=torch.int64),
            response_ids=self.ids,
            attention_mask=self.attention_mask,
            response_mask=self.mask,
            response_index=self.mask.flatten().nonzero()[:, 0],
            rollout_log_probs=log_inf.gather(-1, self.ids[..., None])[..., 0] * self.mask,
            advantages=self.normal(B, 1) * self.attention_mask,
            uniforms=torch.rand(B, T, generator=self.generator, dtype=torch.float64),
            top_ids=top.indices,
            top_log_probs=top.values,
            versions=torch.zeros(B, T, 2, dtype=torch.int64),
        )

    def normal(self, *shape):
        """Draw normal numbers of float64."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def head(self):
        """Run the joint head on the sampled tokens."""
        sides = [Head(hidden=self.hidden[role], weight=self.weight[role]) for role in ("policy", "rollout_model")]
        return joint_linear_head(
            *sides,
            self.ids[self.mask],
            temperature=1.0,
            lam=self.lam,
            num_top=K,
            gather_ids=self.batch.top_ids[self.mask],
        )

    def scores(self, *, is_current=False, normalizer="topk", distill="forward"):
        """Score the batch; `is_current` marks the tokens that the rollout model sampled with these weights."""
        return token_scores(
            self.head(),
            self.batch,
            torch.as_tensor(is_current).expand(B, T),
            self.lam,
            normalizer,
            DISTILLATIONS[distill] if distill else None,
        )

    def anchor(self):
        """Old log-probs and Z of their own, unlike the current ones; masked entries 0 as `token_scores` leaves them."""
        old_log_probs, rollout_model_old_log_probs = (
            self.batch.rollout_log_probs + 0.4 * self.normal(B, T) for _ in range(2)
        )
        z = 0.3 + 0.1 * torch.rand(B, T, generator=self.generator, dtype=torch.float64)
        return OldLogProbs(
            old_log_probs=old_log_probs * self.mask,
            rollout_model_old_log_probs=rollout_model_old_log_probs * self.mask,
            # the value and the lower bound, the upper bound, the two masses and the union
            z=ZEstimate(*(component * self.mask for component in (z, z, z + 0.1, z + 0.5, z + 0.4, z + 0.3))),
        )

    def loss(self, policy, scores, anchor, *, rollout_model=None):
        """Compute the joint loss; without an objective of the rollout model this one is not trained."""
        return loss_of(policy, rollout_model, self.batch, scores, anchor, MAX_LENGTH)

    def log_softmax(self, role):
        """Compute the log-probs [N, V] with numpy."""
        logits = (self.hidden[role] @ self.weight[role].detach().T).numpy()
        logits = logits - logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def objective(name="obrs", **changes):
    """Return the objective of the policy: OBRS unless another correction is named."""
    settings = dict(lam=0.8, c1=1.1, c2=1.2, mask="sampled", kappa="none") if name == "obrs" else {}
    return policy_objective(name, **settings | CLIPS | changes)


def rollout_objective(**changes):
    """Return the objective of the rollout model: TIS, PPO and forward distillation unless changed."""
    settings = dict(
        correction=make_correction("tis", cap=1.2),
        proximal="old",
        clip_low=0.1,
        clip_high=0.15,
        ppo_weight=0.7,
        distill_weight=0.4,
        distill=DISTILLATIONS["forward"],
        aggregate=LOSS_AGG_MODES["token-mean"],
    )
    return RolloutModelObjective(**settings | changes)


def surrogate(ratio, advantage, low, high):
    """(S, dS / d log p_new)"""
    clipped_ratio = min(max(ratio, 1.0 - low), 1.0 + high)
    value = min(ratio * advantage, clipped_ratio * advantage)
    return value, ratio * advantage if value == ratio * advantage else 0.0


# The scores


def test_scores_lie_at_their_tokens_and_are_zero_elsewhere():
    case = Case()

    scores = case.scores(distill="reverse")
    log_p, log_q = case.log_softmax("policy"), case.log_softmax("rollout_model")
    p, q = np.exp(log_p), np.exp(log_q)
    chosen_ids = case.ids[case.mask].numpy()
    rows = np.arange(len(chosen_ids))

    expected_scores = {
        "log_probs": log_p[rows, chosen_ids],
        "rollout_model_log_probs": log_q[rows, chosen_ids],
        "entropy": -(p * log_p).sum(-1),
        "rollout_model_entropy": -(q * log_q).sum(-1),
        "kl_policy_rollout": (p * (log_p - log_q)).sum(-1),
        "kl_rollout_policy": (q * (log_q - log_p)).sum(-1),
        "distill_kl": (q * (log_q - log_p)).sum(-1),
        "policy_top_log_probs": -np.sort(-log_p, -1)[:, :K],
        "policy_top_ids": np.argsort(-log_p, -1)[:, :K],
    }

    for name, expected_values in expected_scores.items():
        score = getattr(scores, name).detach()
        np.testing.assert_allclose(score[case.mask].numpy(), expected_values, rtol=RTOL, err_msg=name)
        assert (score[~case.mask] == 0).all(), name


def test_z_uses_fill_ins_only_of_weights_still_in_training():
    case = Case()
    is_current = torch.zeros(B, T, dtype=torch.bool)
    is_current[0] = True

    z = case.scores(is_current=is_current).z

    log_p, log_q = case.log_softmax("policy"), case.log_softmax("rollout_model")
    for n, (row, t) in enumerate(case.mask.nonzero().tolist()):
        rollout_ids = case.batch.top_ids[row, t].tolist()
        kept_masses = [min(math.exp(case.log_inf[row, t, x]), math.exp(log_p[n, x]) / case.lam) for x in rollout_ids]
        if is_current[row, t]:
            fill_in_ids = [x for x in np.argsort(-log_p[n])[:K] if x not in rollout_ids]
            kept_masses += [min(math.exp(log_q[n, x]), math.exp(log_p[n, x]) / case.lam) for x in fill_in_ids]

        assert z.value[row, t].item() == pytest.approx(math.fsum(kept_masses), rel=RTOL)


def test_the_exact_normaliser_is_the_sum_over_the_vocabulary():
    case = Case()
    z = case.scores(is_current=True, normalizer="exact").z
    q, p = np.exp(case.log_softmax("rollout_model")), np.exp(case.log_softmax("policy"))
    np.testing.assert_allclose(z.value[case.mask].numpy(), np.minimum(q, p / case.lam).sum(-1), rtol=RTOL)
    assert torch.equal(z.lower, z.upper)


def test_the_exact_normaliser_refuses_tokens_of_other_weights():
    case = Case()
    is_current = torch.ones(B, T, dtype=torch.bool)
    is_current[0, 1] = is_current[1, 1] = False  # the second is masked and does not count

    with pytest.raises(ValueError, match="1 of 8 tokens were not sampled from the weights"):
        check_exact(is_current, case.mask)

    is_current[0, 1] = True
    check_exact(is_current, case.mask)


def test_the_exact_normaliser_refuses_a_head_without_z():
    case = Case()
    head = replace(case.head(), exact_z=None)
    with pytest.raises(ValueError, match="give lam to the joint head"):
        token_scores(head, case.batch, torch.ones(B, T, dtype=torch.bool), case.lam, normalizer="exact", distill=None)


@pytest.mark.parametrize("lam", [0.5, 1.0, 4.0])
def test_a_policy_alone_is_its_own_rollout_model(lam):
    case = Case(lam=lam)
    policy_head = linear_head(
        Head(hidden=case.hidden["policy"], weight=case.weight["policy"]),
        case.ids[case.mask],
        temperature=1.0,
        num_top=V,
        gather_ids=case.batch.top_ids[case.mask],
    )
    all_current = torch.ones(B, T, dtype=torch.bool)

    scores = token_scores(policy_head, case.batch, all_current, lam, normalizer="exact", distill=None)

    assert torch.equal(scores.rollout_model_log_probs, scores.log_probs.detach())
    assert scores.log_probs.requires_grad
    assert not scores.rollout_model_log_probs.requires_grad
    for divergence in (scores.kl_policy_rollout, scores.kl_rollout_policy, scores.distill_kl):
        assert (divergence == 0).all()

    p = np.exp(case.log_softmax("policy"))
    np.testing.assert_allclose(scores.z.value[case.mask].numpy(), np.minimum(p, p / lam).sum(-1), rtol=RTOL)

    # the fill-ins of its own forward pass complete the top k of an engine that knows nothing
    blind_batch = replace(
        case.batch, top_ids=case.batch.top_ids[..., :0], top_log_probs=case.batch.top_log_probs[..., :0]
    )
    blind_head = replace(policy_head, gathered=policy_head.gathered[:, :0])
    blind_z = token_scores(blind_head, blind_batch, all_current, lam, normalizer="topk", distill=None).z

    np.testing.assert_allclose(blind_z.lower[case.mask].numpy(), np.minimum(p, p / lam).sum(-1), rtol=RTOL)


# The policy's loss


def metrics_and_trace(objective, loss, totals=None):
    """The metrics and columns of a micro-batch: those of both models, and those of the correction."""
    report = policy_report(objective, loss.terms, loss.correction, totals or {}, MAX_LENGTH)
    return loss.metrics | report.metrics, loss.trace | report.trace


@pytest.mark.parametrize("target", ["old", "new"])
@pytest.mark.parametrize("proximal", ["old", "new", "rollout"])
@pytest.mark.parametrize("mask", ["sampled", "expected"])
def test_the_policys_loss_and_gradient_are_the_equation(target, proximal, mask):
    case = Case(seed=3)
    scores, anchor = case.scores(), case.anchor()
    lam = case.lam
    c1, c2 = 1.1, 1.2  # those of `objective`
    scores.log_probs.retain_grad()
    settings = objective(target=target, proximal=proximal, mask=mask)

    loss = case.loss(settings, scores, anchor)
    loss.policy.backward()

    total, slopes = 0.0, torch.zeros(B, T, dtype=torch.float64)
    for row, t in case.mask.nonzero().tolist():
        index = row, t
        tensors_by_name = {
            "old": anchor.old_log_probs,
            "new": scores.log_probs,
            "rollout": case.batch.rollout_log_probs,
        }
        log_probs = {name: values[index].item() for name, values in tensors_by_name.items()}

        rho = math.exp(log_probs[target] - log_probs["rollout"])
        z = (anchor.z if target == "old" else scores.z).value[index].item()
        acceptance = min(1.0, rho / lam)
        accept = acceptance if mask == "expected" else float(case.batch.uniforms[index].item() < acceptance)
        weight = min(z * max(lam, rho), c1) * min(math.exp(log_probs[proximal] - log_probs[target]), c2)

        ratio = math.exp(log_probs["new"] - log_probs[proximal])
        value, slope = surrogate(ratio, case.batch.advantages[index].item(), low=0.2, high=0.3)
        total -= accept * weight * value
        slopes[index] = -accept * weight * slope

    assert loss.policy.item() == pytest.approx(total, rel=RTOL)
    torch.testing.assert_close(scores.log_probs.grad, slopes, rtol=RTOL, atol=1e-14)

    metrics, _ = metrics_and_trace(settings, loss)
    assert metrics["policy/loss"].total.item() == pytest.approx(total, rel=RTOL)
    assert metrics["policy/loss"].count.item() == case.mask.sum().item()


def token_slopes(name, case, ratios):
    """dS / d log p_new of every token, by loops over the responses."""
    slopes = torch.zeros(B, T, dtype=torch.float64)
    for row in range(B):
        tokens = [t for t in range(T) if case.mask[row, t]]
        surrogates = {
            t: surrogate(ratios[row][t], case.batch.advantages[row, t].item(), low=0.2, high=0.3) for t in tokens
        }
        for t in tokens:
            advantage, response_ratios = case.batch.advantages[row, t].item(), [ratios[row][u] for u in tokens]
            if name == "gspo":
                slopes[row, t] = surrogate(
                    math.prod(response_ratios) ** (1 / len(tokens)), advantage, low=0.2, high=0.3
                )[1]
            elif name == "gmpo":
                mean = math.prod(surrogates[u][0] / advantage for u in tokens) ** (1 / len(tokens))
                slopes[row, t] = mean * advantage if surrogates[t][1] else 0.0
            else:
                slopes[row, t] = advantage * min(max(ratios[row][t], 0.8), 1.3)
    return slopes


@pytest.mark.parametrize("name", ["gspo", "gmpo", "cispo"])
@pytest.mark.parametrize("correction", [*CORRECTIONS, "obrs expected"])
def test_every_surrogate_takes_every_corrections_weight(name, correction):
    case = Case(seed=3)
    case.batch.rollout_log_probs[:] += 0.5 * case.normal(B, T) * case.mask
    scores, anchor = case.scores(), case.anchor()
    scores.log_probs.retain_grad()
    correction, _, mask = correction.partition(" ")
    settings = objective(correction, surrogate=name, **({"mask": mask} if mask else {}))

    loss = case.loss(settings, scores, anchor)
    loss.policy.backward()

    ratios = (scores.log_probs.detach() - anchor.old_log_probs).exp().tolist()
    factor = loss.correction.weights * loss.correction.accept_mask

    torch.testing.assert_close(scores.log_probs.grad, -factor * token_slopes(name, case, ratios), rtol=RTOL, atol=1e-14)


def test_a_trust_region_follows_the_sign_of_the_advantages():
    case = Case(seed=3, lam=1.0)
    settings = objective("dppo", divergence="topk", max_tv=0.45, target="new", proximal="new")
    loss = case.loss(settings, case.scores(), case.anchor())

    log_p = case.log_softmax("policy")
    expected_mask = []
    for n, (row, t) in enumerate(case.mask.nonzero().tolist()):
        p, inf = np.exp(log_p[n]), case.log_inf[row, t].exp().numpy()
        listed_ids = case.batch.top_ids[row, t].numpy()
        rest_difference = abs((1 - p[listed_ids].sum()) - (1 - inf[listed_ids].sum()))
        variation = (np.abs(p[listed_ids] - inf[listed_ids]).sum() + rest_difference) / 2
        token, advantage = case.ids[row, t].item(), case.batch.advantages[row, t].item()
        expected_mask.append(float(variation <= 0.45 or (p[token] - inf[token]) * advantage < 0))

    assert loss.correction.accept_mask[case.mask].tolist() == expected_mask
    assert {0.0, 1.0} == set(expected_mask)


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("count", ["proposed", "accepted"])
@pytest.mark.parametrize("mask", ["sampled", "expected"])
def test_the_loss_is_divided_by_what_the_settings_count(aggregate, count, mask):
    case = Case(seed=4)
    scores, anchor = case.scores(), case.anchor()
    settings = objective(aggregate=aggregate, count=count, mask=mask)

    loss = case.loss(settings, scores, anchor)
    metrics, trace = metrics_and_trace(settings, loss)

    ratio = (scores.log_probs - anchor.old_log_probs).exp().tolist()
    accept_mask, weights = trace["accept_mask"].tolist(), trace["weights"].tolist()
    advantages = case.batch.advantages.tolist()
    rows = []
    for row in range(B):
        tokens = [t for t in range(T) if case.mask[row, t]]
        values = [surrogate(ratio[row][t], advantages[row][t], low=0.2, high=0.3)[0] for t in tokens]
        losses = -math.fsum(
            accept_mask[row][t] * weights[row][t] * value for t, value in zip(tokens, values, strict=True)
        )
        counts = len(tokens) if count == "proposed" else math.fsum(accept_mask[row][t] for t in tokens)
        rows.append((losses, counts))

    if aggregate == "seq-mean-token-mean":
        rows = [(losses / counts, 1) for losses, counts in rows if counts > 0]
    numerator = math.fsum(losses for losses, _ in rows)
    denominator = B * MAX_LENGTH if aggregate == "seq-mean-token-sum-norm" else math.fsum(counts for _, counts in rows)

    assert loss.policy.item() == pytest.approx(numerator, rel=RTOL)
    assert metrics["policy/loss"].value.item() == pytest.approx(numerator / denominator, rel=RTOL)


def test_only_log_probs_carry_the_policys_gradient():
    """Acceptance, Z, kappa, rho, the proximal point and all of p_new outside the surrogate are constants."""
    case = Case(seed=5)
    for name in ("old", "new"):
        scores = case.scores()
        settings = objective(target=name, proximal="new", kappa="prepass")

        loss = case.loss(settings, scores, case.anchor())
        loss.policy.backward()
        assert case.weight["rollout_model"].grad is None

        metrics, trace = metrics_and_trace(settings, loss)
        assert not any(value.requires_grad for value in trace.values())
        assert not any(tensor.requires_grad for entry in metrics.values() for tensor in entry)

    assert not any(tensor.requires_grad for tensor in (OldLogProbs.of(scores).old_log_probs, *OldLogProbs.of(scores).z))


def test_the_anchor_of_untouched_weights_is_their_own_scores():
    scores = Case().scores()
    anchor = OldLogProbs.of(scores)

    assert torch.equal(anchor.old_log_probs, scores.log_probs)
    assert torch.equal(anchor.rollout_model_old_log_probs, scores.rollout_model_log_probs)
    assert not anchor.old_log_probs.requires_grad
    assert not anchor.rollout_model_old_log_probs.requires_grad
    assert anchor.z is scores.z


# The rollout model's loss


@pytest.mark.parametrize("proximal", ["old", "new", "rollout"])
@pytest.mark.parametrize("distill", ["forward", "reverse"])
def test_the_rollout_models_loss_and_gradient_are_eqs_6_and_7(proximal, distill):
    case = Case(seed=6)
    scores, anchor = case.scores(distill=distill), case.anchor()
    scores.rollout_model_log_probs.retain_grad()
    scores.distill_kl.retain_grad()

    # rejects every token of the policy's: the rollout model's loss must not see it
    rejecting_settings = objective(lam=1e6)
    loss = case.loss(rejecting_settings, scores, anchor, rollout_model=rollout_objective(proximal=proximal))

    assert loss.correction.accept_mask.sum() == 0
    assert loss.policy.item() == 0.0

    loss.rollout_model.backward()

    total, slopes = 0.0, torch.zeros(B, T, dtype=torch.float64)
    kl_sum, weight_sum = 0.0, 0.0
    clipped_count = 0
    log_p, log_q = case.log_softmax("policy"), case.log_softmax("rollout_model")
    for n, index in enumerate(map(tuple, case.mask.nonzero().tolist())):
        log_probs = {
            "old": anchor.rollout_model_old_log_probs[index].item(),
            "new": scores.rollout_model_log_probs[index].item(),
            "rollout": case.batch.rollout_log_probs[index].item(),
        }

        weight = min(math.exp(log_probs[proximal] - log_probs["rollout"]), 1.2)
        ratio = math.exp(log_probs["new"] - log_probs[proximal])
        value, slope = surrogate(ratio, case.batch.advantages[index].item(), low=0.1, high=0.15)
        base_log_probs, other_log_probs = (log_p, log_q) if distill == "forward" else (log_q, log_p)
        kl = math.fsum(np.exp(base_log_probs[n]) * (base_log_probs[n] - other_log_probs[n]))

        total += -0.7 * weight * value + 0.4 * kl
        slopes[index] = -0.7 * weight * slope
        kl_sum += kl
        weight_sum += weight
        clipped_count += slope == 0.0

    count = int(case.mask.sum())

    assert loss.rollout_model.item() == pytest.approx(total, rel=RTOL)
    torch.testing.assert_close(scores.rollout_model_log_probs.grad, slopes, rtol=RTOL, atol=1e-14)
    torch.testing.assert_close(scores.distill_kl.grad, 0.4 * torch.ones(B, T, dtype=torch.float64), rtol=RTOL, atol=0)

    values = {name: entry.value.item() for name, entry in loss.metrics.items() if name.startswith("rollout_model/")}
    assert values["rollout_model/loss"] == pytest.approx(total / count, rel=RTOL)
    assert values["rollout_model/distill_kl"] == pytest.approx(kl_sum / count, rel=RTOL)
    assert values["rollout_model/weight"] == pytest.approx(weight_sum / count, rel=RTOL)
    assert values["rollout_model/clip_frac"] == pytest.approx(clipped_count / count, rel=RTOL)


@pytest.mark.parametrize("distill", ["forward", "reverse"])
def test_distillation_never_reaches_the_policy(distill):
    case = Case()
    loss = case.loss(objective(), case.scores(distill=distill), case.anchor(), rollout_model=rollout_objective())
    loss.rollout_model.backward()

    assert case.weight["policy"].grad is None or (case.weight["policy"].grad == 0).all()
    assert case.weight["rollout_model"].grad.abs().sum() > 0


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_rollout_model_divides_by_proposed_tokens(aggregate):
    case = Case()
    loss = case.loss(
        objective(count="accepted"),
        case.scores(),
        case.anchor(),
        rollout_model=rollout_objective(aggregate=LOSS_AGG_MODES[aggregate]),
    )
    expected_count = {"token-mean": 8, "seq-mean-token-mean": 3, "seq-mean-token-sum-norm": B * MAX_LENGTH}[aggregate]

    assert loss.metrics["rollout_model/loss"].count.item() == expected_count


def test_a_rollout_model_out_of_training_has_no_loss_or_metric():
    case = Case()
    loss = case.loss(objective(), case.scores(), case.anchor())
    assert loss.rollout_model.item() == 0.0
    assert not loss.rollout_model.requires_grad
    assert "rollout_model/loss" not in loss.metrics


# What is reported


def test_the_mismatch_is_of_all_tokens_before_any_correction():
    case = Case(seed=7)
    scores, anchor = case.scores(), case.anchor()

    metrics = case.loss(objective(lam=1e6), scores, anchor).metrics

    rollout_log_probs = case.batch.rollout_log_probs[case.mask].numpy()
    old_log_probs = anchor.old_log_probs[case.mask].numpy()
    old_minus_new = old_log_probs - scores.log_probs.detach()[case.mask].numpy()
    log_p, log_q = case.log_softmax("policy"), case.log_softmax("rollout_model")
    expected_metrics = {
        "policy/approx_kl_k1": old_minus_new.mean(),
        "policy/approx_kl_k3": (np.exp(-old_minus_new) - 1 + old_minus_new).mean(),
        "policy/approx_kl_weighted": (np.exp(old_log_probs - rollout_log_probs) * old_minus_new).mean(),
        "mismatch/ratio": np.exp(old_log_probs - rollout_log_probs).mean(),
        "mismatch/ratio_max": np.exp(old_log_probs - rollout_log_probs).max(),
        "mismatch/kl_k3": (np.exp(old_log_probs - rollout_log_probs) - 1 - (old_log_probs - rollout_log_probs)).mean(),
        "mismatch/kl_rollout_policy": (np.exp(log_q) * (log_q - log_p)).sum(-1).mean(),
        "mismatch/kl_policy_rollout": (np.exp(log_p) * (log_p - log_q)).sum(-1).mean(),
        "policy/entropy": -(np.exp(log_p) * log_p).sum(-1).mean(),
        "rollout_model/entropy": -(np.exp(log_q) * log_q).sum(-1).mean(),
    }

    assert {name: metrics[name].value.item() for name in expected_metrics} == pytest.approx(expected_metrics, rel=1e-9)


def test_the_largest_advantage_is_of_before_and_after_rejection():
    case = Case(seed=8)
    advantages = case.batch.advantages.abs()
    sampled_indices = list(map(tuple, case.mask.nonzero().tolist()))
    settings = objective()
    loss = case.loss(settings, case.scores(), case.anchor())
    metrics, trace = metrics_and_trace(settings, loss)
    largest_advantage = max(advantages[index].item() for index in sampled_indices)

    assert metrics["policy/largest_advantage"].value.item() == largest_advantage

    largest_kept_advantage = max(advantages[index].item() for index in sampled_indices if trace["accept_mask"][index])
    assert metrics["policy/largest_kept_advantage"].value.item() == largest_kept_advantage

    settings = objective(lam=1e6)
    loss = case.loss(settings, case.scores(), case.anchor())
    rejected_metrics, _ = metrics_and_trace(settings, loss)

    assert rejected_metrics["policy/largest_kept_advantage"].value.item() == 0.0
    assert rejected_metrics["policy/largest_advantage"].value.item() == largest_advantage


def test_the_clipped_share_counts_tokens_without_gradient():
    case = Case(seed=9)
    scores, anchor = case.scores(), case.anchor()

    loss = case.loss(objective(), scores, anchor)
    clip_fraction = metrics_and_trace(objective(), loss)[0]["policy/clip_frac"]

    ratios = (scores.log_probs - anchor.old_log_probs).exp()
    slopes = [
        surrogate(ratios[index].item(), case.batch.advantages[index].item(), low=0.2, high=0.3)[1]
        for index in map(tuple, case.mask.nonzero().tolist())
    ]

    assert 0 < slopes.count(0.0) < len(slopes)
    assert clip_fraction.value.item() == pytest.approx(slopes.count(0.0) / len(slopes), rel=RTOL)


def test_the_trace_holds_what_the_loss_used():
    case = Case(seed=10)
    scores, anchor = case.scores(), case.anchor()
    settings = objective(mask="expected")

    _, trace = metrics_and_trace(settings, case.loss(settings, scores, anchor))

    acceptance = (anchor.old_log_probs - case.batch.rollout_log_probs - math.log(case.lam)).exp().clamp(max=1.0)

    torch.testing.assert_close(trace["acceptance"][case.mask], acceptance[case.mask], rtol=RTOL, atol=0)
    torch.testing.assert_close(trace["accept_mask"], acceptance * case.mask, rtol=RTOL, atol=0)
    assert torch.equal(trace["z"], anchor.z.value)
    assert torch.equal(trace["old_log_probs"], anchor.old_log_probs)
    assert torch.equal(trace["log_probs"], scores.log_probs.detach())
    assert torch.equal(trace["policy_top_ids"], scores.policy_top_ids)


def mask_like(mask, values):
    """The mask [B, T] in the shape of values [B, T] or [B, T, K]."""
    return mask if values.dim() == 2 else mask[..., None].expand_as(values)


@pytest.mark.parametrize("garbage_value", [math.nan, math.inf])
@pytest.mark.parametrize("proximal", ["old", "new", "rollout"])
def test_values_at_unsampled_tokens_change_no_loss_or_gradient(garbage_value, proximal):
    """Padding and tool tokens are ignored in top-k lists, uniforms and Z."""
    case, anchor = Case(seed=11), Case(seed=11).anchor()

    def loss_and_gradients(batch):
        case.batch = batch
        policy_settings, rollout_settings = objective(proximal=proximal), rollout_objective()
        scores = case.scores()
        loss = case.loss(policy_settings, scores, anchor, rollout_model=rollout_settings)
        case.weight["policy"].grad = case.weight["rollout_model"].grad = None
        (loss.policy + loss.rollout_model).backward()
        return loss, scores.z, case.weight["policy"].grad, case.weight["rollout_model"].grad

    clean_loss, clean_z, *clean_gradients = loss_and_gradients(case.batch)

    float_columns = {name: getattr(case.batch, name) for name in ("uniforms", "top_log_probs")}
    soiled_columns = {
        name: torch.where(mask_like(case.mask, values), values, garbage_value) for name, values in float_columns.items()
    }
    soiled_loss, soiled_z, *soiled_gradients = loss_and_gradients(replace(case.batch, **soiled_columns))

    assert clean_loss.policy.item() == soiled_loss.policy.item()
    assert clean_loss.rollout_model.item() == soiled_loss.rollout_model.item()
    assert all(torch.equal(*pair) for pair in zip(clean_z, soiled_z, strict=True))
    assert all(torch.equal(*pair) for pair in zip(clean_gradients, soiled_gradients, strict=True))

    metrics_of_both = (metrics_and_trace(objective(proximal=proximal), loss)[0] for loss in (clean_loss, soiled_loss))
    assert_equal_sums(*metrics_of_both)
