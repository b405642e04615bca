"""`jackpot.correct` and `jackpot.estimate_z`: equal to the two calls that they stand for, and their errors."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.own_correction import Plain
from jackpot import CORRECTIONS, CorrectionInputs, JackpotError, correct, estimate_z, make_correction, obrs

B = 6
T = 40
V = 50
K = 8
H = 16


def rollouts(seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """Return log-probs of sampled tokens under two distributions, a mask, the engine's top-k and the policy."""
    torch.manual_seed(seed)
    hidden, head = torch.randn(B, T, H, device=device), torch.nn.Linear(H, V, bias=False, device=device)
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


def arguments(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in ("rollout_log_probs", "target_log_probs", "response_mask", *names)}


def z_of(given: dict[str, Any], **options: Any) -> obrs.ZEstimate:
    return estimate_z(
        policy_logits=given["logits"], rollout_top_ids=given["ids"], rollout_top_log_probs=given["top"], **options
    )


@pytest.mark.parametrize("name", CORRECTIONS)
def test_one_call_equals_the_two_that_it_stands_for(name: str) -> None:
    given = rollouts()
    z, uniforms = z_of(given), torch.rand(B, T, dtype=torch.float64)
    found = correct(name, z=z, uniforms=uniforms, **arguments(given, "advantages"))
    correction = make_correction(name)
    inputs = CorrectionInputs(
        z=z, uniforms=uniforms, proximal_log_probs=given["target_log_probs"], **arguments(given, "advantages")
    )

    wanted = correction.apply(inputs, correction.measure(inputs))

    assert found.weights.equal(wanted.weights)
    assert found.accept_mask.equal(wanted.accept_mask)
    assert found.metrics["obrs/kappa"] == wanted.kappa

    mask = given["response_mask"]
    assert float(found.metrics["correction/accepted"]) == pytest.approx(float(wanted.accept_mask[mask].mean()))


def test_what_a_correction_does_not_read_may_be_left_out() -> None:
    given = rollouts()
    for name in CORRECTIONS:
        correction = make_correction(name)
        both = correct(name, z=z_of(given), **arguments(given, "advantages"))
        kept = {name: value for name, value in {"z": z_of(given), **given}.items() if name in correction.reads}

        found = correct(name, **arguments(given), **kept)

        assert found.weights.equal(both.weights)
        assert found.accept_mask.equal(both.accept_mask)
        assert ("obrs/z" in found.metrics) == ("z" in correction.reads)


def test_a_correction_of_the_published_protocol_alone_will_do() -> None:
    given = rollouts()
    wanted = correct("tis", cap=1.3, **arguments(given))

    for found in (correct(Plain(1.3), **arguments(given)), correct(Plain, cap=1.3, **arguments(given))):
        assert found.weights.equal(wanted.weights)
        assert found.accept_mask.equal(wanted.accept_mask)
        assert found.metrics == wanted.metrics
    with pytest.raises(JackpotError, match=r"settings {'cap': 2.0} were given beside a correction that has its own"):
        correct(Plain(1.3), cap=2.0, **arguments(given))
    with pytest.raises(JackpotError, match=r"correction Plain.* got the settings {'c': 1}"):
        correct(Plain, c=1, **arguments(given))


def test_drawn_numbers_follow_the_response_and_not_its_batch() -> None:
    given = rollouts()
    whole = correct("mask_only", **arguments(given)).accept_mask

    assert whole.equal(correct("mask_only", **arguments(given)).accept_mask)

    padded = {key: torch.nn.functional.pad(value[2:4], (0, 3)) for key, value in arguments(given).items()}
    padded["rollout_log_probs"] = torch.where(padded["response_mask"], padded["rollout_log_probs"], 7.0)

    assert correct("mask_only", **padded).accept_mask[:, :T].equal(whole[2:4])
    assert not correct("mask_only", seed=1, **arguments(given)).accept_mask.equal(whole)


def test_tokens_are_accepted_as_often_as_they_should_be() -> None:
    shape = (2000, 20)
    given = {
        "rollout_log_probs": torch.zeros(shape).index_fill(1, torch.tensor([0]), -1.0) - torch.rand(2000, 1),
        "response_mask": torch.ones(shape, dtype=torch.bool),
    }
    given["target_log_probs"] = given["rollout_log_probs"] + torch.tensor(0.3).log()

    accepted = correct("mask_only", **given).accept_mask

    assert (accepted.mean(0) - 0.3).abs().max() < 5 * (0.21 / 2000) ** 0.5

    pairs = torch.corrcoef(accepted.T) - torch.eye(20)
    assert pairs.abs().max() < 5 / 2000**0.5


def test_z_is_the_same_from_logits_and_hidden_states() -> None:
    given = rollouts()
    z = z_of(given, temperature=0.8, lam=1.3)
    lists = {"rollout_top_ids": given["ids"], "rollout_top_log_probs": given["top"]}

    other = estimate_z(hidden_states=given["hidden"], head=given["head"], temperature=0.8, lam=1.3, **lists)

    for one, two in zip(z, other, strict=True):
        assert torch.allclose(one, two, atol=1e-5)

    exact = obrs.exact_z(given["p_inf"], torch.log_softmax(given["logits"] / 0.8, -1), 1.3)
    assert (z.lower <= exact + 1e-5).all()
    assert (exact <= z.upper + 1e-5).all()

    filled = z_of(given, temperature=0.8, lam=1.3, fill_ins=lambda ids: given["p_inf"].gather(-1, ids))
    assert (filled.value >= z.value - 1e-6).all()
    assert (filled.value > z.value + 1e-3).any()
    assert (filled.value <= exact + 1e-5).all()


def test_everything_runs_where_tensors_have_no_numbers() -> None:
    given = rollouts(device="meta")
    for name in CORRECTIONS:
        found = correct(name, z=z_of(given), **arguments(given, "advantages"))
        assert found.weights.is_meta
        assert all(value.is_meta for value in found.metrics.values())


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
    given = rollouts()
    lists = {"rollout_top_ids": given["ids"], "rollout_top_log_probs": given["top"], "policy_logits": given["logits"]}
    with pytest.raises(JackpotError, match=re.escape(message)):
        estimate_z(**{**lists, **change})


@pytest.mark.parametrize("shape", [(K,), (3, K), (3, 0), (2, 3, 1)])
def test_z_has_the_shape_of_the_positions(shape: tuple[int, ...]) -> None:
    given = rollouts()
    hidden = torch.randn(*shape[:-1], H)
    logits = given["head"](hidden).detach()
    top, ids = torch.log_softmax(logits + torch.randn_like(logits), -1).topk(shape[-1], -1)
    lists = {"rollout_top_ids": ids, "rollout_top_log_probs": top}
    z = estimate_z(policy_logits=logits, **lists)

    other = estimate_z(hidden_states=hidden, head=given["head"], **lists)

    assert z.value.shape == shape[:-1]
    for one, two in zip(z, other, strict=True):
        assert one.shape == two.shape
        assert torch.allclose(one, two, atol=1e-5)


def test_an_id_without_a_token_says_nothing() -> None:
    given = rollouts()
    fill_ins = {"with": lambda ids: given["p_inf"].gather(-1, ids), "without": None}
    exact = obrs.exact_z(given["p_inf"], torch.log_softmax(given["logits"], -1), 1.0)
    short = given["top"].index_fill(-1, torch.arange(3, K), -torch.inf)
    for fill_in in fill_ins.values():
        found = []
        for ids in (given["ids"], given["logits"].topk(K, -1).indices, torch.zeros_like(given["ids"])):
            named = torch.where(short.isneginf(), ids, given["ids"])
            found.append(z_of(given | {"ids": named, "top": short}, fill_ins=fill_in))
        z = found[0]

        assert all(torch.equal(one, two) for other in found[1:] for one, two in zip(z, other, strict=True))
        assert (z.lower <= exact + 1e-5).all()
        assert (exact <= z.upper + 1e-5).all()
        assert (z.value <= z_of(given, fill_ins=fill_in).value + 1e-6).all()


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("own_point", [False, True])
def test_a_token_that_is_never_sampled_leaves_the_loss_finite(name: str, own_point: bool) -> None:
    given = rollouts()
    point = given["target_log_probs"] - 0.5 if own_point else None
    given["target_log_probs"][0, 0] = -torch.inf
    settings = {"c2": None} if name in ("obrs", "reweight_only", "target_only", "coin_only") else {}
    z = torch.full((B, T), 0.8)

    found = correct(name, z=z, proximal_log_probs=point, **arguments(given, "advantages"), **settings)

    assert given["response_mask"][0, 0]
    assert found.weights.isfinite().all()
    assert found.accept_mask.isfinite().all()

    if name in ("obrs", "mask_only", "coin_only", "tis", "target_only"):
        assert found.weights[0, 0] * found.accept_mask[0, 0] == 0.0


@pytest.mark.parametrize("fault", ["a token twice", "raw scores"])
def test_a_list_that_is_no_distribution_has_no_z(fault: str) -> None:
    given = rollouts()
    whole, place = z_of(given).value, (0, 0)
    given["top"][1, 0, -2:] = -torch.inf
    given["ids"][1, 0, -2:] = given["ids"][1, 0, 0]
    if fault == "a token twice":
        given["ids"][place][1] = given["ids"][place][0]
    else:
        given["top"][place] = 0.0

    z = z_of(given)

    assert z.value.isnan().nonzero().tolist() == [[*place]]

    others = torch.ones(B, T, dtype=torch.bool)
    others[0, 0] = others[1, 0] = False

    assert z.value[others].equal(whole[others])
    assert 0 < z.value[1, 0] <= whole[1, 0]

    given["response_mask"][place] = False
    assert correct("obrs", z=z, **arguments(given)).weights.isfinite().all()

    given["response_mask"][place] = True
    with pytest.raises(JackpotError, match=r"z holds 1 numbers that are not finite .* names a token twice"):
        correct("obrs", z=z, **arguments(given))


def test_masked_logits_give_the_z_of_a_truncated_policy() -> None:
    given = rollouts()
    is_kept = torch.zeros(B, T, V, dtype=torch.bool).scatter(-1, given["ids"], True)
    rollout = given["p_inf"].masked_fill(~is_kept, -torch.inf).log_softmax(-1)
    logits = given["logits"].masked_fill(~is_kept, -torch.inf)

    top = rollout.gather(-1, given["ids"])
    z = estimate_z(rollout_top_ids=given["ids"], rollout_top_log_probs=top, policy_logits=logits)

    exact = obrs.exact_z(rollout, logits.log_softmax(-1), 1.0)
    torch.testing.assert_close(z.value, exact)
    torch.testing.assert_close(z.upper, exact)
    torch.testing.assert_close(z.target_mass, torch.ones(B, T))
