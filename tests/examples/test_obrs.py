"""examples/obrs.py, the file to copy, has the bits of the library on random inputs."""

import ast
import doctest

import pytest
import torch
from torch import Tensor

from examples import obrs as copied
from helpers.paths import ROOT
from jackpot import correct, estimate_z, obrs

pytestmark = pytest.mark.filterwarnings("ignore:all log-probs of one model are rounded")

SHAPE, V, K = (8, 30), 40, 8
LAMS = (0.7, 1.0, 2.0)


@pytest.fixture(params=[torch.bfloat16, torch.float32, torch.float64], ids=str)
def drawn(request: pytest.FixtureRequest) -> dict[str, Tensor]:
    """Two distributions, tokens of the first, some of which the second never gives, and a mask with an empty row."""
    rng = torch.Generator().manual_seed(3)
    policy, rollout = 2.0 * torch.randn(2, *SHAPE, V, generator=rng, dtype=torch.float64)
    policy[..., 5] = -torch.inf
    p_inf = rollout.log_softmax(-1)
    ids = torch.multinomial(p_inf.flatten(0, 1).exp(), 1, generator=rng).view(*SHAPE, 1)
    top, top_ids = p_inf.topk(K)
    top[:, :3, K // 2 :] = -torch.inf  # an engine that named fewer
    columns = {
        "policy_logits": policy,
        "rollout_logits": rollout,
        "rollout_top_log_probs": top,
        "rollout_log_probs": p_inf.gather(-1, ids)[..., 0],
        "target_log_probs": policy.log_softmax(-1).gather(-1, ids)[..., 0],
    }
    mask = torch.rand(SHAPE, generator=rng) < 0.8
    mask[1] = False
    assert columns["target_log_probs"][mask].isneginf().any()
    assert (columns["target_log_probs"] > columns["rollout_log_probs"])[mask].any()
    return {name: column.to(request.param) for name, column in columns.items()} | {
        "rollout_top_ids": top_ids,
        "uniforms": torch.rand(SHAPE, generator=rng, dtype=torch.float64),
        "response_mask": mask,
    }


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def given(drawn: dict[str, Tensor], *names: str) -> list[Tensor]:
    return [drawn[name] for name in names]


@pytest.mark.parametrize("lam", LAMS)
def test_the_parts_have_the_bits_of_the_librarys(drawn: dict[str, Tensor], lam: float) -> None:
    pair = given(drawn, "rollout_log_probs", "target_log_probs")
    expected = obrs.acceptance(*pair, lam)
    assert_same(copied.acceptance(*pair, lam), expected)
    kept = obrs.accept(expected, drawn["uniforms"])
    assert_same(copied.sampled_mask(expected, drawn["uniforms"]).bool(), kept)
    both = [drawn[name].log_softmax(-1) for name in ("rollout_logits", "policy_logits")]
    assert_same(copied.exact_z(*both, lam), obrs.exact_z(*both, lam))
    assert 0 < int(kept.sum()) < kept.numel()


@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("has_fill_ins", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_z_by_top_k_has_the_bits_of_estimate_z(drawn, lam: float, has_fill_ins: bool, temperature: float) -> None:
    whole = drawn["rollout_logits"].float().log_softmax(-1)
    lists = {name: drawn[name] for name in ("rollout_top_ids", "rollout_top_log_probs", "policy_logits")}
    settings = {
        "lam": lam,
        "temperature": temperature,
        "fill_ins": (lambda ids: whole.gather(-1, ids)) if has_fill_ins else None,
    }
    expected = estimate_z(**lists, **settings).value
    assert_same(copied.topk_z(**lists, **settings), expected)
    if has_fill_ins:
        assert (expected > estimate_z(**lists, lam=lam, temperature=temperature).value).any()


@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("mask", ["sampled", "expected"])
@pytest.mark.parametrize("normalizer", ["topk", "exact"])
def test_obrs_has_the_bits_of_correct(drawn, lam: float, mask: str, normalizer: str) -> None:
    pair, is_exact = given(drawn, "rollout_log_probs", "target_log_probs"), normalizer == "exact"
    lists = {name: drawn[name] for name in ("rollout_top_ids", "rollout_top_log_probs", "policy_logits")}
    logits = given(drawn, "rollout_logits", "policy_logits")
    z = obrs.exact_z(*(one.log_softmax(-1) for one in logits), lam) if is_exact else estimate_z(**lists, lam=lam).value
    expected = correct(
        "obrs",
        rollout_log_probs=pair[0],
        target_log_probs=pair[1],
        response_mask=drawn["response_mask"],
        z=z,
        uniforms=drawn["uniforms"],
        lam=lam,
        c1=1.0,
        mask=mask,
        kappa="none" if is_exact else "auto",
    )

    uniforms = drawn["uniforms"] if mask == "sampled" else None
    weights, accept_mask = copied.obrs(*pair, z, drawn["response_mask"], uniforms, lam, c1=1.0, z_is_exact=is_exact)
    assert_same(weights, expected.weights)
    assert_same(accept_mask, expected.accept_mask)
    assert (weights == 1.0).any() and ((weights > 0) & (weights < 1.0)).any()
    if not is_exact:
        accepted = copied.acceptance(*pair, lam)
        assert_same(copied.kappa(accepted, z, drawn["response_mask"]), expected.metrics["obrs/kappa"])
        assert expected.metrics["obrs/kappa"] > 1.01


def test_tis_has_the_bits_of_correct(drawn: dict[str, Tensor]) -> None:
    names = ("rollout_log_probs", "target_log_probs", "response_mask")
    expected = correct("tis", **{name: drawn[name] for name in names}, cap=1.2).weights
    found = copied.tis(*given(drawn, *names[:2]), cap=1.2)
    assert_same(found.where(drawn["response_mask"], 0.0), expected)
    assert (found == 1.2).any() or found.dtype == torch.bfloat16  # 1.2 rounded


def test_kappa_is_1_where_nothing_overlaps() -> None:
    nothing, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    assert copied.kappa(nothing, nothing, mask) == 1.0 == obrs.kappa(nothing.sum(), nothing.sum())


def test_its_example_runs_as_printed() -> None:
    done = doctest.testmod(copied)
    assert done.attempted > 10 and done.failed == 0


def test_it_is_short_and_imports_torch_alone() -> None:
    text = (ROOT / "examples" / "obrs.py").read_text()
    assert len(text.splitlines()) <= 150
    modules = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.name.partition(".")[0] for node in modules if isinstance(node, ast.Import) for name in node.names}
    names |= {node.module.partition(".")[0] for node in modules if isinstance(node, ast.ImportFrom)}
    assert names == {"math", "collections", "torch"}
