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

SHAPE = (8, 30)  # responses and tokens
V, K = 40, 8  # vocabulary, entries of a top-k list
LAMS = (0.7, 1.0, 2.0)


@pytest.fixture(params=[torch.bfloat16, torch.float32, torch.float64], ids=str)
def columns(request: pytest.FixtureRequest) -> dict[str, Tensor]:
    """Two distributions, tokens of the first, some of which the second never gives, and a mask with an empty row."""
    rng = torch.Generator().manual_seed(3)
    policy, rollout = 2.0 * torch.randn(2, *SHAPE, V, generator=rng, dtype=torch.float64)
    policy[..., 5] = -torch.inf
    p_inf = rollout.log_softmax(-1)
    ids = torch.multinomial(p_inf.flatten(0, 1).exp(), 1, generator=rng).view(*SHAPE, 1)
    top, top_ids = p_inf.topk(K)
    top[:, :3, K // 2 :] = -torch.inf  # an engine that named fewer
    log_columns = {
        "policy_logits": policy,
        "rollout_logits": rollout,
        "rollout_top_log_probs": top,
        "rollout_log_probs": p_inf.gather(-1, ids)[..., 0],
        "target_log_probs": policy.log_softmax(-1).gather(-1, ids)[..., 0],
    }
    mask = torch.rand(SHAPE, generator=rng) < 0.8
    mask[1] = False
    assert log_columns["target_log_probs"][mask].isneginf().any()
    assert (log_columns["target_log_probs"] > log_columns["rollout_log_probs"])[mask].any()
    return {name: column.to(request.param) for name, column in log_columns.items()} | {
        "rollout_top_ids": top_ids,
        "uniforms": torch.rand(SHAPE, generator=rng, dtype=torch.float64),
        "response_mask": mask,
    }


def assert_same_bits(result: Tensor, expected: Tensor) -> None:
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


def select(columns: dict[str, Tensor], *names: str) -> list[Tensor]:
    return [columns[name] for name in names]


@pytest.mark.parametrize("lam", LAMS)
def test_the_parts_have_the_bits_of_the_librarys(columns: dict[str, Tensor], lam: float) -> None:
    log_probs = select(columns, "rollout_log_probs", "target_log_probs")
    distributions = [logits.log_softmax(-1) for logits in select(columns, "rollout_logits", "policy_logits")]

    acceptance = obrs.acceptance(*log_probs, lam)
    accept_mask = obrs.accept(acceptance, columns["uniforms"])

    assert_same_bits(copied.acceptance(*log_probs, lam), acceptance)
    assert_same_bits(copied.sampled_mask(acceptance, columns["uniforms"]).bool(), accept_mask)
    assert_same_bits(copied.exact_z(*distributions, lam), obrs.exact_z(*distributions, lam))
    assert 0 < int(accept_mask.sum()) < accept_mask.numel()  # some are accepted and some rejected


@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("has_fill_ins", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_z_by_top_k_has_the_bits_of_estimate_z(columns, lam: float, has_fill_ins: bool, temperature: float) -> None:
    full_log_probs = columns["rollout_logits"].float().log_softmax(-1)
    lists = {name: columns[name] for name in ("rollout_top_ids", "rollout_top_log_probs", "policy_logits")}
    settings = {
        "lam": lam,
        "temperature": temperature,
        "fill_ins": (lambda ids: full_log_probs.gather(-1, ids)) if has_fill_ins else None,
    }

    expected_z = estimate_z(**lists, **settings).value

    assert_same_bits(copied.topk_z(**lists, **settings), expected_z)
    if has_fill_ins:  # they add what the lists leave out
        assert (expected_z > estimate_z(**lists, lam=lam, temperature=temperature).value).any()


@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("mask", ["sampled", "expected"])
@pytest.mark.parametrize("normalizer", ["topk", "exact"])
def test_obrs_has_the_bits_of_correct(columns, lam: float, mask: str, normalizer: str) -> None:
    rollout, target, response_mask = select(columns, "rollout_log_probs", "target_log_probs", "response_mask")
    lists = {name: columns[name] for name in ("rollout_top_ids", "rollout_top_log_probs", "policy_logits")}
    distributions = [logits.log_softmax(-1) for logits in select(columns, "rollout_logits", "policy_logits")]
    is_exact = normalizer == "exact"
    z = obrs.exact_z(*distributions, lam) if is_exact else estimate_z(**lists, lam=lam).value

    expected = correct(
        "obrs",
        rollout_log_probs=rollout,
        target_log_probs=target,
        response_mask=response_mask,
        z=z,
        uniforms=columns["uniforms"],
        lam=lam,
        c1=1.0,
        mask=mask,
        kappa="none" if is_exact else "auto",
    )
    uniforms = columns["uniforms"] if mask == "sampled" else None
    weights, accept_mask = copied.obrs(rollout, target, z, response_mask, uniforms, lam, c1=1.0, z_is_exact=is_exact)

    assert_same_bits(weights, expected.weights)
    assert_same_bits(accept_mask, expected.accept_mask)
    assert (weights == 1.0).any()  # at the cap c1
    assert ((weights > 0) & (weights < 1.0)).any()
    if not is_exact:
        acceptance = copied.acceptance(rollout, target, lam)
        assert_same_bits(copied.kappa(acceptance, z, response_mask), expected.metrics["obrs/kappa"])
        assert expected.metrics["obrs/kappa"] > 1.01


def test_tis_has_the_bits_of_correct(columns: dict[str, Tensor]) -> None:
    names = ("rollout_log_probs", "target_log_probs", "response_mask")
    expected_weights = correct("tis", **{name: columns[name] for name in names}, cap=1.2).weights

    weights = copied.tis(columns["rollout_log_probs"], columns["target_log_probs"], cap=1.2)

    assert_same_bits(weights.where(columns["response_mask"], 0.0), expected_weights)
    assert (weights == 1.2).any() or weights.dtype == torch.bfloat16  # 1.2 rounded


def test_kappa_is_1_where_nothing_overlaps() -> None:
    zeros, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)

    assert copied.kappa(zeros, zeros, mask) == 1.0
    assert obrs.kappa(zeros.sum(), zeros.sum()) == 1.0


def test_its_example_runs_as_printed() -> None:
    result = doctest.testmod(copied)

    assert result.attempted > 10
    assert result.failed == 0


def test_it_is_short_and_imports_torch_alone() -> None:
    text = (ROOT / "examples" / "obrs.py").read_text()
    assert len(text.splitlines()) <= 150

    packages = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add(node.module.partition(".")[0])
    assert packages == {"math", "collections", "torch"}
