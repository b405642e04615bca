"""OBRS with Z inside verl: the road from vLLM's answer to the policy loss, with docs/verl.patch (step_of_verl.py)."""

import math
import re
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.paths import ROOT
from jackpot import correct, estimate_z
from jackpot.core.errors import ConfigError, DataError
from jackpot.objectives.obrs import ZEstimate

pytestmark = pytest.mark.adapters
K, TEMPERATURE = 4, 0.8  # of step_of_verl.py: tokens in the sampler's lists
LAM = 1.2  # of the correction


def logits_of(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Compute what a model predicts at every token of the responses, one response at a time: [B, T, V]."""
    length = batch["responses"].shape[1]
    rows = []
    for ids, prompt, attended in zip(batch["input_ids"], batch["prompts"], batch["attention_mask"], strict=True):
        real = attended.bool()
        start = int(real[: len(prompt)].sum()) - 1
        logits = model(ids[real][None]).logits[0, start:-1] / TEMPERATURE
        rows.append(torch.nn.functional.pad(logits, (0, 0, 0, length - len(logits))))
    return torch.stack(rows)


def by_hand(step: dict[str, Any]) -> tuple[ZEstimate, Tensor]:
    """Estimate Z by both models' logits, without verl; and return log p of the policy, with its gradient."""
    batch, mask = step["batch"], step["batch"]["response_mask"].bool()
    policy = logits_of(step["policy"], batch)
    with torch.no_grad():
        top = logits_of(step["sampler"], batch).log_softmax(-1).topk(K)
    z = estimate_z(
        rollout_top_ids=top.indices, rollout_top_log_probs=top.values, policy_logits=policy.detach(), lam=LAM
    )
    log_probs = policy.log_softmax(-1).gather(-1, batch["responses"][..., None])[..., 0]
    return z, torch.where(mask, log_probs, 0.0)


@pytest.mark.parametrize("padding", ["padded", "packed"])
def test_weights_are_those_of_correct_and_estimate_z(steps, padding):
    step = steps[padding]
    batch, mask = step["batch"], step["batch"]["response_mask"].bool()
    z, log_probs = by_hand(step)

    for name, expected in zip(ZEstimate._fields, z, strict=True):
        torch.testing.assert_close(batch[f"jackpot_z_{name}"][mask], expected[mask], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch["old_log_probs"][mask], log_probs.detach()[mask], atol=1e-5, rtol=1e-5)

    columns = {"rollout_log_probs": batch["rollout_log_probs"], "target_log_probs": batch["old_log_probs"]}
    ours = {name: torch.where(mask, tensor, 0.0) for name, tensor in columns.items()}
    estimate = ZEstimate(*(torch.where(mask, batch[f"jackpot_z_{name}"], 0.0) for name in ZEstimate._fields))
    done = correct("obrs", **ours, response_mask=mask, z=estimate, lam=LAM, c1=2.0)
    assert torch.equal(batch["rollout_is_weights"], (done.weights * done.accept_mask).float())

    again = correct("obrs", **ours, response_mask=mask, z=z, lam=LAM, c1=2.0)
    torch.testing.assert_close(batch["rollout_is_weights"], again.weights * again.accept_mask, atol=1e-5, rtol=1e-4)
    assert 0.1 < float(done.accept_mask[mask].mean()) < 0.9 and float(z.value[mask].std()) > 0.02

    for name in ("obrs/z", "obrs/z_bound_width", "obrs/acceptance_minus_z", "obrs/kappa"):
        assert step["metrics"][f"jackpot/{name}"] == pytest.approx(float(done.metrics[name]), rel=1e-6)


@pytest.mark.parametrize("padding", ["padded", "packed"])
def test_the_gradient_of_verls_loss_is_that_of_obrs(steps, padding):
    """The first step on a batch: PPO's ratio is 1, so the gradient is that of -w A log p, over all sampled tokens."""
    step = steps[padding]
    batch, mask = step["batch"], step["batch"]["response_mask"].bool()
    _, log_probs = by_hand(step)
    weight = batch["rollout_is_weights"] * batch["advantages"] * mask
    loss = -(weight * log_probs).sum() / mask.sum()

    gradient = torch.autograd.grad(loss, list(step["policy"].parameters()))

    assert batch["advantages"][mask].std() > 0.1
    for (name, of_verl), expected in zip(step["gradient"].items(), gradient, strict=True):
        torch.testing.assert_close(of_verl, expected, atol=1e-5, rtol=1e-3, msg=name)


def test_lists_are_the_samplers_in_the_row_before_each_token(steps):
    batch = steps["padded"]["batch"]
    before = slice(batch["prompts"].shape[1] - 1, -1)
    with torch.no_grad():
        top = logits_of(steps["padded"]["sampler"], batch).log_softmax(-1).topk(K)
    mask = batch["response_mask"].bool()

    assert torch.equal(batch["teacher_ids"][:, before][mask].long(), top.indices[mask])
    torch.testing.assert_close(batch["teacher_logprobs"][:, before][mask], top.values[mask], atol=1e-5, rtol=1e-5)


def test_the_trainer_with_transfer_queue_has_the_same_weights(steps):
    """Up to the coins, drawn by the bits of log-probs: matrix products of one response may round apart."""
    batch, rows = steps["padded"]["batch"], steps["v1"]["rows"]
    mask, length = batch["response_mask"].bool(), batch["response_mask"].shape[1]
    named = ("rollout_log_probs", "old_log_probs", *(f"jackpot_z_{name}" for name in ZEstimate._fields))
    padded = {
        name: torch.stack([torch.nn.functional.pad(row[name], (0, length - len(row[name]))) for row in rows])
        for name in (*named, "rollout_is_weights")
    }

    for name in named:
        torch.testing.assert_close(padded[name][mask], batch[name][mask], atol=1e-5, rtol=1e-5, msg=name)

    estimate = ZEstimate(*(padded[f"jackpot_z_{name}"] for name in ZEstimate._fields))
    logs = {"rollout_log_probs": padded["rollout_log_probs"], "target_log_probs": padded["old_log_probs"]}
    done = correct("obrs", **logs, response_mask=mask, z=estimate, lam=LAM, c1=2.0)
    torch.testing.assert_close(padded["rollout_is_weights"], (done.weights * done.accept_mask).float())
    assert [len(row["rollout_is_weights"]) for row in rows] == mask.sum(-1).tolist()
    assert ["jackpot_lam" in names for names in steps["v1"]["asked"]] == [True, False]


def test_other_corrections_ask_for_no_z(run):
    step = run("jackpot:tis")["padded"]
    batch, mask = step["batch"], step["batch"]["response_mask"].bool()
    assert not [name for name in batch if name.startswith("jackpot_z_")]
    ratio = (batch["old_log_probs"] - batch["rollout_log_probs"]).exp().clamp(max=3.0)
    torch.testing.assert_close(batch["rollout_is_weights"][mask], ratio[mask])


def entry(log_prob: float, rank: int) -> SimpleNamespace:
    """One token in vLLM's answer."""
    return SimpleNamespace(logprob=log_prob, rank=rank)


def output(lists: list[np.ndarray], **others: Any) -> SimpleNamespace:
    """An agent loop's output: a tool replied with token 9 between the sampled 5 and 7."""
    defaults = {"prompt_ids": [1, 2], "response_ids": [5, 9, 7], "response_mask": [1, 0, 1]}
    return SimpleNamespace(
        **defaults | {"response_logprobs": [-0.5, 0.0, -3.0]} | others, extra_fields={"jackpot_top": lists}
    )


def test_lists_of_several_turns_stand_before_their_tokens(plugin):
    first = plugin.top_lists([{5: entry(-0.5, 1), 6: entry(-1.5, 2)}], 2)
    # the sampled token 7 is none of the top two, and vLLM names it first
    later = plugin.top_lists([{7: entry(-3.0, 4), 8: entry(-1.0, 2), 4: entry(-0.9, 1)}], 2)
    assert plugin.top_lists([{7: entry(-3.0, 4)}], 1) == {}
    plugin.join_top_lists(first, later)
    plugin.join_top_lists(first, {})
    got = output(first["jackpot_top"])

    plugin.align_top_lists(got, validate=False)

    empty = [-math.inf, -math.inf]
    assert got.extra_fields["teacher_ids"].tolist() == [[0, 0], [5, 6], [0, 0], [4, 8], [0, 0]]
    expected = torch.tensor([empty, [-0.5, -1.5], empty, [-0.9, -1.0], empty])
    assert torch.equal(got.extra_fields["teacher_logprobs"], expected)

    of_validation = output(first["jackpot_top"])
    plugin.align_top_lists(of_validation, validate=True)
    assert of_validation.extra_fields == {}


@pytest.mark.parametrize("log_probs", [[-0.5, 0.0, -3.0], [-0.6, 0.0, -3.0]])
def test_lists_of_other_tokens_are_an_error(plugin, log_probs):
    lists = [np.array([(5, -0.5), (6, -1.5)]), np.array([(4, -0.9), (8, -1.0)])]
    lists_of_response = lists if log_probs[0] == -0.6 else lists[:1]
    with pytest.raises(DataError, match="have none or that of another token"):
        plugin.align_top_lists(output(lists_of_response, response_logprobs=log_probs), validate=False)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("actor_rollout_ref.rollout.name", "sglang"),
        ("actor_rollout_ref.rollout.calculate_log_probs", True),
        ("actor_rollout_ref.actor.strategy", "megatron"),
        ("actor_rollout_ref.model.use_fused_kernels", True),
        ("distillation.enabled", True),
    ],
)
def test_settings_under_which_lists_do_not_arrive_are_an_error(plugin, setting, value):
    omegaconf = import_module("omegaconf").OmegaConf
    rollout = {"name": "vllm", "calculate_log_probs": 20}
    config = omegaconf.create({"actor_rollout_ref": {"rollout": rollout, "actor": {"strategy": "fsdp2"}}})
    omegaconf.update(config, "algorithm.rollout_correction.rollout_is", "jackpot:z_only:lam=2")

    assert plugin.z_request(config) == {"jackpot_lam": 2.0}

    omegaconf.update(config, setting, value)
    with pytest.raises(ConfigError, match=re.escape(setting)):
        plugin.z_request(config)

    omegaconf.update(config, "algorithm.rollout_correction.rollout_is", "token")
    assert plugin.z_request(config) == {}


def test_the_page_says_how_long_the_patch_is():
    lines = len((ROOT / "docs" / "verl.patch").read_text().splitlines())
    assert f"`docs/verl.patch`, of {lines} lines" in (ROOT / "docs" / "frameworks.md").read_text() and lines <= 100
