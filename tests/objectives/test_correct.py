"""`jackpot.correct` and `jackpot.estimate_z` equal the calls that they stand for, hold their bounds, and name what they
cannot compute.
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.own_correction import Plain
from jackpot import CORRECTIONS, CorrectionInputs, JackpotError, correct, estimate_z, make_correction, obrs

B = 6  # responses
T = 40  # tokens of each
V = 50  # vocabulary
K = 8  # tokens in the engine's lists
H = 16  # width of hidden states


def rollouts(seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """Return log-probs of sampled tokens under two distributions, a mask, the engine's top-k and the policy."""
    torch.manual_seed(seed)
    hidden = torch.randn(B, T, H, device=device)
    head = torch.nn.Linear(H, V, bias=False, device=device)
    logits = head(hidden).detach()
    p_inf = torch.log_softmax(logits + 0.7 * torch.randn(B, T, V, device=device), -1)
    token = torch.multinomial(p_inf.flatten(0, 1).exp(), 1).view(B, T, 1)
    top, ids = p_inf.topk(K, -1)
    return {
        "rollout_log_probs": p_inf.gather(-1, token)[..., 0],
        "target_log_probs": torch.log_softmax(logits, -1).gather(-1, token)[..., 0],
        "response_mask": torch.arange(T, device=device) < torch.randint(1, T, (B, 1), device=device),
        "advantages": torch.randn(B, 1, device=device).expand(B, T),
        "ids": ids,
        "top": top,
        "p_inf": p_inf,
        "logits": logits,
        "hidden": hidden,
        "head": head,
    }


def arguments(batch: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return what every correction takes of a batch, and what is named besides."""
    return {name: batch[name] for name in ("rollout_log_probs", "target_log_probs", "response_mask", *names)}


def z_of(batch: dict[str, Any], **options: Any) -> obrs.ZEstimate:
    """Estimate Z of a batch from its logits and lists."""
    return estimate_z(
        policy_logits=batch["logits"], rollout_top_ids=batch["ids"], rollout_top_log_probs=batch["top"], **options
    )


@pytest.mark.parametrize("name", CORRECTIONS)
def test_one_call_equals_the_two_that_it_stands_for(name: str) -> None:
    batch = rollouts()
    z = z_of(batch)
    uniforms = torch.rand(B, T, dtype=torch.float64)

    result = correct(name, z=z, uniforms=uniforms, **arguments(batch, "advantages"))

    correction = make_correction(name)
    inputs = CorrectionInputs(
        z=z, uniforms=uniforms, proximal_log_probs=batch["target_log_probs"], **arguments(batch, "advantages")
    )
    expected = correction.apply(inputs, correction.measure(inputs))

    assert result.weights.equal(expected.weights)
    assert result.accept_mask.equal(expected.accept_mask)
    assert result.metrics["obrs/kappa"] == expected.kappa

    mask = batch["response_mask"]
    assert float(result.metrics["correction/accepted"]) == pytest.approx(float(expected.accept_mask[mask].mean()))


def test_what_a_correction_does_not_read_may_be_left_out() -> None:
    batch = rollouts()
    for name in CORRECTIONS:
        correction = make_correction(name)
        full_result = correct(name, z=z_of(batch), **arguments(batch, "advantages"))
        read_inputs = {key: value for key, value in {"z": z_of(batch), **batch}.items() if key in correction.reads}

        result = correct(name, **arguments(batch), **read_inputs)

        assert result.weights.equal(full_result.weights)
        assert result.accept_mask.equal(full_result.accept_mask)
        assert ("obrs/z" in result.metrics) == ("z" in correction.reads)


def test_a_correction_of_the_published_protocol_alone_will_do() -> None:
    batch = rollouts()
    expected = correct("tis", cap=1.3, **arguments(batch))

    for result in (correct(Plain(1.3), **arguments(batch)), correct(Plain, cap=1.3, **arguments(batch))):
        assert result.weights.equal(expected.weights)
        assert result.accept_mask.equal(expected.accept_mask)
        assert result.metrics == expected.metrics

    with pytest.raises(JackpotError, match=r"settings {'cap': 2.0} were given beside a correction that has its own"):
        correct(Plain(1.3), cap=2.0, **arguments(batch))
    with pytest.raises(JackpotError, match=r"correction Plain.* got the settings {'c': 1}"):
        correct(Plain, c=1, **arguments(batch))


def test_drawn_numbers_follow_the_response_and_not_its_batch() -> None:
    batch = rollouts()
    full_mask = correct("mask_only", **arguments(batch)).accept_mask

    assert full_mask.equal(correct("mask_only", **arguments(batch)).accept_mask)

    padded_part = {key: torch.nn.functional.pad(value[2:4], (0, 3)) for key, value in arguments(batch).items()}
    padded_part["rollout_log_probs"] = torch.where(padded_part["response_mask"], padded_part["rollout_log_probs"], 7.0)

    assert correct("mask_only", **padded_part).accept_mask[:, :T].equal(full_mask[2:4])
    assert not correct("mask_only", seed=1, **arguments(batch)).accept_mask.equal(full_mask)


def test_tokens_are_accepted_as_often_as_they_should_be() -> None:
    shape = (2000, 20)
    batch = {
        "rollout_log_probs": torch.zeros(shape).index_fill(1, torch.tensor([0]), -1.0) - torch.rand(2000, 1),
        "response_mask": torch.ones(shape, dtype=torch.bool),
    }
    batch["target_log_probs"] = batch["rollout_log_probs"] + torch.tensor(0.3).log()

    accept_mask = correct("mask_only", **batch).accept_mask

    # five standard errors of 2000 draws, whose variance is 0.3 times 0.7
    assert (accept_mask.mean(0) - 0.3).abs().max() < 5 * (0.21 / 2000) ** 0.5

    correlations = torch.corrcoef(accept_mask.T) - torch.eye(20)
    assert correlations.abs().max() < 5 / 2000**0.5


def test_z_of_logits_and_of_states_is_equal_and_holds_bounds() -> None:
    batch = rollouts()
    lists = {"rollout_top_ids": batch["ids"], "rollout_top_log_probs": batch["top"]}

    z = z_of(batch, temperature=0.8, lam=1.3)
    z_from_states = estimate_z(hidden_states=batch["hidden"], head=batch["head"], temperature=0.8, lam=1.3, **lists)

    for field, field_from_states in zip(z, z_from_states, strict=True):
        assert torch.allclose(field, field_from_states, atol=1e-5)

    exact_z = obrs.exact_z(batch["p_inf"], torch.log_softmax(batch["logits"] / 0.8, -1), 1.3)
    assert (z.lower <= exact_z + 1e-5).all()
    assert (exact_z <= z.upper + 1e-5).all()

    filled_z = z_of(batch, temperature=0.8, lam=1.3, fill_ins=lambda ids: batch["p_inf"].gather(-1, ids))
    assert (filled_z.value >= z.value - 1e-6).all()
    assert (filled_z.value > z.value + 1e-3).any()
    assert (filled_z.value <= exact_z + 1e-5).all()


def test_corrections_run_on_meta_tensors_without_reading_numbers() -> None:
    batch = rollouts(device="meta")
    for name in CORRECTIONS:
        result = correct(name, z=z_of(batch), **arguments(batch, "advantages"))
        assert result.weights.is_meta
        assert all(value.is_meta for value in result.metrics.values())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("obrs", {}, "correction obrs reads z, which is not given: estimate it with jackpot.estimate_z from"),
        ("f_tis", {}, "correction f_tis reads advantages, which is not given: pass those of the policy loss"),
        ("tis", {"cap": -1.0}, "correction tis: cap"),
        ("tsi", {}, "unknown correction 'tsi'; did you mean 'tis'?"),
        ("tis", {"response_mask": torch.ones(B, T)}, "response_mask is [6, 40] torch.float32; it must"),
        ("tis", {"target_log_probs": torch.zeros(B, T, 1)}, "target_log_probs is [6, 40, 1] and response_mask"),
        ("tis", {"target_log_probs": torch.ones(B, T, dtype=torch.int64)}, "target_log_probs is torch.int64"),
        (
            "tis",
            {"target_log_probs": torch.zeros(B, T, device="meta")},
            "target_log_probs is on meta and",
        ),
        ("tis", {"rollout_log_probs": torch.full((B, T), -torch.inf)}, "rollout_log_probs holds "),
        ("tis", {"z": torch.full((B, T), torch.nan)}, "z holds "),
        ("obrs", {"z": 0.9}, "z is of type float and response_mask [6, 40]; both must be tensors"),
        ("tis", {"rollout_log_probs": None}, "rollout_log_probs is of type NoneType"),
        ("tis", {"response_mask": [[True]]}, "response_mask is of type list; it must be [B, T] torch.bool"),
        ("tis", {"rollout_log_probs": torch.full((B, T), 0.5)}, "rollout_log_probs is above 0 at most tokens"),
        ("obrs", {"z": torch.full((B, T), 0.7), "lam": 2.0}, "from 0.7 to 0.7; at lam = 2 Z is in [0, 0.5]"),
        ("obrs", {"z": torch.full((B, T), -0.1)}, "z holds numbers from -0.1 to -0.1"),
        ("mask_only", {"uniforms": torch.ones(B, T)}, "uniforms holds numbers outside of [0, 1)"),
    ],
)
def test_what_cannot_be_corrected_is_named(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(JackpotError, match=re.escape(message)):
        correct(name, **{**arguments(rollouts()), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy_logits": None}, "the policy's distribution is needed once"),
        ({"hidden_states": torch.zeros(B, T, H)}, "the policy's distribution is needed once"),
        ({"rollout_top_ids": torch.zeros(B, T, K)}, "rollout_top_ids is [6, 40, 8] torch.float32"),
        ({"rollout_top_log_probs": torch.zeros(B, T)}, "they must be [..., K], int64 and float"),
        (
            {"policy_logits": torch.zeros(B, T - 1, V)},
            "policy_logits is [6, 39, 50] on cpu, rollout_top_ids",
        ),
        ({"rollout_top_ids": [1]}, "rollout_top_ids is of type list; it must be a tensor"),
        (
            {"rollout_top_ids": torch.arange(V, V + K).expand(B, T, K)},
            "ids from 50 to 57; the policy's vocabulary",
        ),
        ({"temperature": 0.0}, "temperature is 0.0 and lam 1.0; both must be above 0"),
        ({"fill_ins": lambda ids: ids[..., 0]}, "fill_ins returned [6, 40]; it must be [6, 40, 8]"),
        (
            {"policy_logits": None, "hidden_states": torch.zeros(B, T, H), "head": torch.zeros(V, H)},
            "head is [50, 16]; it must be the policy's output layer",
        ),
    ],
)
def test_what_z_cannot_be_estimated_from_is_named(change: dict[str, Any], message: str) -> None:
    batch = rollouts()
    lists = {"rollout_top_ids": batch["ids"], "rollout_top_log_probs": batch["top"], "policy_logits": batch["logits"]}
    with pytest.raises(JackpotError, match=re.escape(message)):
        estimate_z(**{**lists, **change})


@pytest.mark.parametrize("shape", [(K,), (3, K), (3, 0), (2, 3, 1)])
def test_z_has_the_shape_of_the_positions(shape: tuple[int, ...]) -> None:
    batch = rollouts()
    hidden = torch.randn(*shape[:-1], H)
    logits = batch["head"](hidden).detach()
    top, ids = torch.log_softmax(logits + torch.randn_like(logits), -1).topk(shape[-1], -1)
    lists = {"rollout_top_ids": ids, "rollout_top_log_probs": top}

    z = estimate_z(policy_logits=logits, **lists)
    z_from_states = estimate_z(hidden_states=hidden, head=batch["head"], **lists)

    assert z.value.shape == shape[:-1]
    for field, field_from_states in zip(z, z_from_states, strict=True):
        assert field.shape == field_from_states.shape
        assert torch.allclose(field, field_from_states, atol=1e-5)


def test_an_id_whose_log_prob_is_minus_infinity_says_nothing() -> None:
    batch = rollouts()
    fill_ins = (lambda ids: batch["p_inf"].gather(-1, ids), None)
    exact_z = obrs.exact_z(batch["p_inf"], torch.log_softmax(batch["logits"], -1), 1.0)
    short_top = batch["top"].index_fill(-1, torch.arange(3, K), -torch.inf)

    for fill_in in fill_ins:
        estimates = []
        for ids in (batch["ids"], batch["logits"].topk(K, -1).indices, torch.zeros_like(batch["ids"])):
            listed_ids = torch.where(short_top.isneginf(), ids, batch["ids"])
            estimates.append(z_of(batch | {"ids": listed_ids, "top": short_top}, fill_ins=fill_in))
        z, *other_estimates = estimates

        for other_z in other_estimates:
            assert all(torch.equal(field, other_field) for field, other_field in zip(z, other_z, strict=True))
        assert (z.lower <= exact_z + 1e-5).all()
        assert (exact_z <= z.upper + 1e-5).all()
        assert (z.value <= z_of(batch, fill_ins=fill_in).value + 1e-6).all()


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("has_proximal", [False, True])
def test_a_token_that_is_never_sampled_leaves_the_loss_finite(name: str, has_proximal: bool) -> None:
    batch = rollouts()
    proximal_log_probs = batch["target_log_probs"] - 0.5 if has_proximal else None
    batch["target_log_probs"][0, 0] = -torch.inf
    settings = {"c2": None} if name in ("obrs", "reweight_only", "target_only", "coin_only") else {}
    z = torch.full((B, T), 0.8)
    assert batch["response_mask"][0, 0]  # the token counts

    result = correct(name, z=z, proximal_log_probs=proximal_log_probs, **arguments(batch, "advantages"), **settings)

    assert result.weights.isfinite().all()
    assert result.accept_mask.isfinite().all()

    if name in ("obrs", "mask_only", "coin_only", "tis", "target_only"):
        assert result.weights[0, 0] * result.accept_mask[0, 0] == 0.0


@pytest.mark.parametrize("fault", ["a token twice", "raw scores"])
def test_a_list_that_is_no_distribution_has_no_z(fault: str) -> None:
    batch = rollouts()
    full_z = z_of(batch).value
    position = (0, 0)
    batch["top"][1, 0, -2:] = -torch.inf
    batch["ids"][1, 0, -2:] = batch["ids"][1, 0, 0]

    if fault == "a token twice":
        batch["ids"][position][1] = batch["ids"][position][0]
    else:
        batch["top"][position] = 0.0

    z = z_of(batch)

    assert z.value.isnan().nonzero().tolist() == [[*position]]

    is_other = torch.ones(B, T, dtype=torch.bool)
    is_other[0, 0] = False
    is_other[1, 0] = False
    assert z.value[is_other].equal(full_z[is_other])
    assert 0 < z.value[1, 0] <= full_z[1, 0]

    batch["response_mask"][position] = False
    assert correct("obrs", z=z, **arguments(batch)).weights.isfinite().all()

    batch["response_mask"][position] = True
    with pytest.raises(JackpotError, match=r"z holds 1 numbers that are not finite .* names a token twice"):
        correct("obrs", z=z, **arguments(batch))


def test_masked_logits_give_the_z_of_a_truncated_policy() -> None:
    batch = rollouts()
    is_kept = torch.zeros(B, T, V, dtype=torch.bool).scatter(-1, batch["ids"], True)
    rollout = batch["p_inf"].masked_fill(~is_kept, -torch.inf).log_softmax(-1)
    logits = batch["logits"].masked_fill(~is_kept, -torch.inf)
    top = rollout.gather(-1, batch["ids"])

    z = estimate_z(rollout_top_ids=batch["ids"], rollout_top_log_probs=top, policy_logits=logits)

    exact_z = obrs.exact_z(rollout, logits.log_softmax(-1), 1.0)
    torch.testing.assert_close(z.value, exact_z)
    torch.testing.assert_close(z.upper, exact_z)
    torch.testing.assert_close(z.target_mass, torch.ones(B, T))
