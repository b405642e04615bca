"""Our numbers against those that verl, TRL and AReaL themselves return on the same tensors.

recorded.json holds their answers and where they come from; run_peers.py makes it anew from the installed packages.
Where a peer's convention differs from ours, the comparison states the difference.
"""

import json
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jackpot.corrections import make_correction
from jackpot.objectives import advantages
from jackpot.objectives import losses as regularise
from jackpot.objectives import losses as surrogate
from jackpot.objectives.corrections import CorrectionInputs
from jackpot.objectives.kernels.linear_head import Head, linear_head
from jackpot.objectives.obrs import ZEstimate

HERE = Path(__file__).parent
VENV = HERE.parents[1] / ".venv-peers"
RECORDED = json.loads((HERE / "recorded.json").read_text())
RECORDED_CASES = RECORDED["cases"]
INTEGER_INPUTS = ("mask", "groups", "response_groups", "single_groups")
INPUTS = SimpleNamespace(
    **{
        name: torch.tensor(value, dtype=torch.int64 if name in INTEGER_INPUTS else torch.float64)
        for name, value in RECORDED["inputs"].items()
    }
)
MASK = INPUTS.mask.bool()
RESPONSES, LIMIT = MASK.shape
NONEMPTY_RESPONSES = int(MASK.any(-1).sum())  # responses that are not empty

SAFETY = math.exp(-20)  # verl: a response's ratio is never below, rollout_corr_helper.py SAFETY_BOUND

# (peer's case, what of it, correction, its numbers); "mask" is compared with accept_mask, all else with the product
# weights * accept_mask. verl's k1 is -log ratio, so its bounds are the reciprocals of ours.
CASES = [
    ("verl/is", "weights", "is", {}),
    ("verl/tis_2", "weights", "tis", {"cap": 2.0}),
    ("verl/tis_3", "weights", "tis", {"cap": 3.0}),
    ("verl/tis_20", "weights", "tis", {"cap": 20.0}),
    ("trl/token_truncate", "ratio", "tis", {"cap": 3.0}),
    ("trl/token_truncate_2", "ratio", "tis", {"cap": 2.0}),
    ("trl/token_truncate_20", "ratio", "tis", {"cap": 20.0}),
    ("areal/clamp_2", "weights", "tis", {"cap": 2.0}),
    ("verl/icepop", "weights", "icepop", {"low": 0.5, "high": 5.0}),
    ("verl/icepop_from_1", "weights", "icepop", {"low": 1.0, "high": 5.0}),
    ("verl/icepop_to_1", "weights", "icepop", {"low": 0.5, "high": 1.0}),
    ("verl/rs_token_k1", "mask", "icepop", {"low": 1 / 8.0, "high": 1 / 0.5}),
    ("trl/token_mask_band", "ratio", "icepop", {"low": 0.5, "high": 5.0}),
    ("areal/band", "weights", "icepop", {"low": 0.5, "high": 5.0}),
    ("trl/token_mask", "ratio", "drop", {"cap": 3.0}),
    ("trl/token_mask_2", "ratio", "drop", {"cap": 2.0}),
    ("areal/drop_2", "weights", "drop", {"cap": 2.0}),
    ("areal/drop_2", "mask", "drop", {"cap": 2.0}),
    ("areal/drop_5", "weights", "drop", {"cap": 5.0}),
    ("verl/seq_tis", "weights", "seq_tis", {"cap": 2.0}),
    ("trl/sequence_truncate", "ratio", "seq_tis", {"cap": 3.0}),
    ("trl/sequence_truncate_2", "ratio", "seq_tis", {"cap": 2.0}),
    ("verl/seq_icepop", "weights", "seq_mask", {"low": 0.5, "high": 2.0}),
    ("verl/seq_icepop_from_1", "weights", "seq_mask", {"low": 1.0, "high": 2.0}),
    ("verl/seq_icepop_to_1", "weights", "seq_mask", {"low": 0.5, "high": 1.0}),
    ("verl/rs_seq_sum_k1", "mask", "seq_mask", {"low": 1 / 8.0, "high": 1 / 0.5}),
    ("trl/sequence_mask", "ratio", "seq_mask", {"low": 0.0, "high": 3.0}),
    ("trl/sequence_mask_2", "ratio", "seq_mask", {"low": 0.0, "high": 2.0}),
    ("trl/sequence_mask_band", "ratio", "seq_mask", {"low": 0.5, "high": 2.0}),
    ("verl/geometric_tight", "mask", "geo_mask", {"low": 1 / 1.001, "high": 1 / 0.999}),
    ("verl/geometric", "mask", "geo_mask", {"low": 1 / 1.25, "high": 1 / 0.8}),
    ("verl/geometric_lopsided", "mask", "geo_mask", {"low": 1 / 2.0, "high": 1 / 0.9}),
    ("areal/geometric", "mask", "geo_mask", {"low": 0.8, "high": 1.25}),
    ("areal/geometric_lopsided", "mask", "geo_mask", {"low": 0.5, "high": 1.125}),
]

# (peer's case, our advantage, rewards, what the peer adds to the standard deviation of a group, None if it has none)
ADVANTAGE_CASES = [
    ("verl/grpo", "grpo", "", 1e-6),
    ("verl/grpo_vectorized", "grpo", "", 1e-6),
    ("trl/grpo_group", "grpo", "", 1e-4),
    ("verl/dr_grpo", "dr_grpo", "", None),
    ("trl/grpo_none", "dr_grpo", "", None),
    ("verl/rloo", "rloo", "", None),
    ("verl/rloo_vectorized", "rloo", "", None),
    ("verl/single/rloo_vectorized", "rloo", "single_", None),
    ("trl/rloo", "rloo", "", None),
    ("verl/reinforce_pp", "reinforce_pp", "", None),
    ("verl/reinforce_pp_baseline", "reinforce_pp_baseline", "", None),
    ("verl/ragged/reinforce_pp", "reinforce_pp", "response_", None),
    ("verl/ragged/reinforce_pp_baseline", "reinforce_pp_baseline", "response_", None),
]

# (peer's case, our aggregate, ours / the peer's): only the denominators differ, and only if a response is empty
LOSS_CASES = [
    ("verl/ppo", "token-mean", 1.0),
    ("verl/ppo_tis/token-mean", "token-mean", 1.0),
    ("trl/ppo", "token-mean", 1.0),
    ("trl/ppo_tis/bnpo", "token-mean", 1.0),
    ("trl/ppo_tis/dapo", "token-mean", 1.0),
    ("verl/ppo_tis/seq-mean-token-mean", "seq-mean-token-mean", 1.0),
    ("trl/ppo_tis/grpo", "seq-mean-token-mean", RESPONSES / NONEMPTY_RESPONSES),  # TRL counts empty responses
    ("trl/ppo_tis/dr_grpo", "seq-mean-token-sum-norm", 1.0),
    # verl counts no empty responses
    ("verl/ppo_tis/seq-mean-token-sum-norm", "seq-mean-token-sum-norm", NONEMPTY_RESPONSES / RESPONSES),
]
AGGREGATE_CASES = [
    ("verl/agg/token-mean", "token-mean", 1.0),
    ("verl/agg/seq-mean-token-mean", "seq-mean-token-mean", 1.0),
    ("verl/agg/seq-mean-token-sum-norm", "seq-mean-token-sum-norm", NONEMPTY_RESPONSES / RESPONSES),
]

WITHOUT_COUNTERPART = {
    "verl/rs_seq_mean_k3": "no correction rejects by k3",
    "verl/rs_seq_max_k3": "no correction rejects by k3",
    "trl/token_truncate_band": "no correction raises small weights",
    "trl/sequence_truncate_band": "no correction raises small weights",
    "trl/grpo_batch": "group mean, batch deviation",
    "trl/rloo_normalized": "whitened over responses",
    "verl/single/grpo": "a group of one keeps its reward; it gets 0 here",
    "verl/single/rloo": "a group of one keeps its reward; it gets 0 here",
    "verl/single/reinforce_pp_baseline": "a group of one keeps its reward; it gets 0 here",
    "verl/ppo_dual_clip": "no dual clip",
    "trl/ppo_delta": "no cap on the ratio of the unclipped side",
    "verl/kl/k1": "has no gradient of its own",
}


def recorded_result(case, key):
    """What the peer returned in this case under this name."""
    return torch.tensor(RECORDED_CASES[case]["results"][key], dtype=torch.float64)


def our_correction(name, settings, dtype=torch.float64):
    """Our correction of the recorded inputs; it reads neither coins, advantages nor Z."""
    target, zeros = INPUTS.target_log_probs.to(dtype), torch.zeros(MASK.shape, dtype=dtype)
    inputs = CorrectionInputs(
        rollout_log_probs=INPUTS.rollout_log_probs.to(dtype),
        target_log_probs=target,
        proximal_log_probs=target,
        response_mask=MASK,
        uniforms=zeros.double(),
        advantages=zeros,
        z=ZEstimate(*[zeros] * 6),
    )
    return make_correction(name, **settings).apply(inputs, {})


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-10), (torch.float32, 3e-5)], ids=["64", "32"])
@pytest.mark.parametrize(("case", "key", "name", "settings"), CASES, ids=lambda value: str(value))
def test_corrections_weigh_and_reject_as_the_peers_do(case, key, name, settings, dtype, rtol):
    correction = our_correction(name, settings, dtype)
    our_result = correction.accept_mask if key == "mask" else correction.weights * correction.accept_mask
    peer_result = recorded_result(case, key) * MASK  # TRL leaves 1 where masked and one column for a response
    rtol = max(rtol, 1e-6) if case.startswith("areal") else rtol  # AReaL computes in float32

    torch.testing.assert_close(
        our_result.double(), peer_result, rtol=rtol, atol=2 * SAFETY if case == "verl/seq_tis" else 0.0
    )


def our_advantages_of(name, prefix):
    """Our advantages of the rewards whose names begin with `prefix`, each with its groups."""
    lengths = [MASK.sum(-1)] if prefix == "response_" else []
    rewards, groups = getattr(INPUTS, prefix + "rewards"), getattr(INPUTS, prefix + "groups")
    return advantages.compute_advantages(name, rewards, groups, *lengths)


@pytest.mark.parametrize(("case", "name", "prefix", "epsilon"), ADVANTAGE_CASES)
def test_advantages_are_those_of_the_peers(case, name, prefix, epsilon):
    our_advantages = our_advantages_of(name, prefix)
    if epsilon is not None:
        groups, rewards = INPUTS.groups, INPUTS.rewards
        std = torch.stack([rewards[groups == group].std() for group in groups])
        our_advantages = our_advantages * std / (std + epsilon)

    peer_advantages = recorded_result(case, "advantages")
    if prefix == "response_":
        our_advantages = our_advantages[:, None] * MASK
    elif peer_advantages.ndim == 2:
        our_advantages = our_advantages[:, None]

    # verl adds 1e-8 to a variance before it whitens; its vectorised forms compute in float32
    rtol = 1e-6 if "reinforce" in case or "vectorized" in case else 1e-10

    torch.testing.assert_close(our_advantages, peer_advantages, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("case", ["verl/gae", "verl/gae_discounted"])
def test_gae_and_returns_are_those_of_verl(case):
    arguments = RECORDED_CASES[case]["arguments"]
    our_advantages, returns = advantages.gae(INPUTS.token_rewards, INPUTS.values, MASK, **arguments)

    # verl's returns go on where masked, and its advantages are whitened over the tokens afterwards
    torch.testing.assert_close(returns[MASK], recorded_result(case, "returns")[MASK], rtol=1e-10, atol=1e-12)

    whitened_advantages = (our_advantages[MASK] - our_advantages[MASK].mean()) / our_advantages[MASK].std()
    torch.testing.assert_close(
        whitened_advantages, recorded_result(case, "whitened_advantages")[MASK], rtol=1e-7, atol=1e-12
    )


def aggregate(name, losses, token_weights):
    """Compute our mean of the losses."""
    numerator, denominator = surrogate.LOSS_AGG_MODES[name](losses, token_weights, LIMIT)
    return numerator / denominator


@pytest.mark.parametrize(("case", "name", "ratio"), LOSS_CASES)
def test_losses_and_gradients_are_those_of_the_peers(case, name, ratio):
    arguments = RECORDED_CASES[case]["arguments"]
    low, high = (arguments.get(f"clip_ratio_{end}", arguments.get(f"epsilon_{end}")) for end in ("low", "high"))
    correction = our_correction("tis", {"cap": arguments["tis"]}) if arguments["tis"] else our_correction("none", {})
    new_log_probs = INPUTS.new_log_probs.clone().requires_grad_()
    token_advantages = INPUTS.advantages[:, None].expand_as(MASK)

    surrogate_value = surrogate.clipped_surrogate(
        new_log_probs, INPUTS.target_log_probs, token_advantages, MASK, low, high
    ).value
    factor = correction.weights * correction.accept_mask

    loss = aggregate(name, -factor * surrogate_value, correction.accept_mask)
    loss.backward()

    # verl adds 1e-8 to a response's count of tokens
    for our_value, key in ((loss.detach(), "loss"), (new_log_probs.grad, "gradient")):
        torch.testing.assert_close(our_value / ratio, recorded_result(case, key), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(("case", "name", "ratio"), AGGREGATE_CASES)
def test_aggregates_are_those_of_verl(case, name, ratio):
    our_loss = aggregate(name, INPUTS.values * MASK, MASK.double())
    torch.testing.assert_close(our_loss / ratio, recorded_result(case, "loss"), rtol=1e-8, atol=0.0)


def test_the_value_loss_is_that_of_verl():
    returns = INPUTS.advantages[:, None].expand_as(MASK)
    error, _ = surrogate.clipped_value_error(INPUTS.token_rewards, INPUTS.values, returns, 0.2)
    our_loss = aggregate("token-mean", error * MASK, MASK.double())
    torch.testing.assert_close(our_loss, recorded_result("verl/value_loss", "loss"), rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_kl_of_sampled_tokens_is_that_of_verl(kind):
    our_kl = regularise.SAMPLED_KL[kind](INPUTS.target_log_probs, INPUTS.rollout_log_probs)
    if kind == "k3":
        our_kl = our_kl.clamp(max=10.0)  # verl's
    torch.testing.assert_close(our_kl, recorded_result(f"verl/kl/{kind}", "kl"), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", ["verl/entropy", "trl/entropy"])
def test_the_entropy_is_that_of_the_peers(case):
    logits = INPUTS.logits
    head = Head(hidden=logits, weight=torch.eye(logits.shape[1], dtype=logits.dtype))

    our_entropy = linear_head(head, torch.zeros(len(logits), dtype=torch.int64), temperature=1.0).entropy
    torch.testing.assert_close(our_entropy, recorded_result(case, "entropy"), rtol=1e-10, atol=0.0)


def test_every_recorded_case_is_compared():
    tables = [*CASES, *ADVANTAGE_CASES, *LOSS_CASES, *AGGREGATE_CASES]
    single_cases = {"verl/gae", "verl/gae_discounted", "verl/value_loss", "verl/kl/k2", "verl/kl/k3"}
    compared_cases = {row[0] for row in tables} | single_cases | {"verl/entropy", "trl/entropy"}
    assert compared_cases | set(WITHOUT_COUNTERPART) == set(RECORDED_CASES)
    assert not compared_cases & set(WITHOUT_COUNTERPART)


@pytest.mark.slow
def test_the_peers_still_return_what_is_recorded(tmp_path):
    if not (VENV / "ready").exists():
        pytest.skip("the peers are not installed: make test-peers")

    path = tmp_path / "live.json"
    subprocess.run([VENV / "bin/python", HERE / "run_peers.py", path], check=True, timeout=300)

    live_run = json.loads(path.read_text())

    assert live_run["inputs"] == RECORDED["inputs"]
    assert live_run["cases"].keys() == RECORDED_CASES.keys()

    for case, recorded_case in RECORDED_CASES.items():
        live_case = live_run["cases"][case]
        assert live_case["source"] == recorded_case["source"], case
        assert live_case["arguments"] == recorded_case["arguments"], case
        for key, value in recorded_case["results"].items():
            recorded_value, live_value = torch.tensor(value).double(), torch.tensor(live_case["results"][key]).double()
            torch.testing.assert_close(live_value, recorded_value, rtol=1e-6, atol=1e-9, msg=f"{case} {key}")
