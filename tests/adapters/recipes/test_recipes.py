"""examples/frameworks: each file runs as it stands there, and agrees with each framework's own correction.

SkyRL, OpenRLHF and AReaL are installed without their dependencies, and the files of their losses are loaded past the
`__init__` of their packages. slime and prime-rl cannot be installed; recorded.json has what their functions are called
with and what they answered.
"""

import ast
import dataclasses
import importlib
import importlib.util
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.paths import ROOT
from jackpot import correct

pytestmark = pytest.mark.adapters
RECIPES = {
    path.stem.removeprefix("jackpot_"): path.read_text() for path in (ROOT / "examples" / "frameworks").glob("*.py")
}
RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
INPUTS = {name: [torch.tensor(row) for row in rows] for name, rows in RECORDED["inputs"].items()}
MASKS = [row.bool() for row in INPUTS["mask"]]
LENGTHS = [20, 13, 7, 20, 1, 11, 20, 4]  # of the responses of `batch`
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # to float32 rounding


@pytest.fixture(autouse=True)
def imports() -> Iterator[None]:
    """What a test imports or puts in its place is gone after it."""
    before = dict(sys.modules)
    yield
    for name in sys.modules.keys() - before.keys():
        if name.partition(".")[0] in ("skyrl", "openrlhf", "areal", "prime_rl", "deepspeed"):
            del sys.modules[name]


def recipe(framework: str, **changes: Any) -> ModuleType:
    """The module that the file of a framework makes."""
    module = ModuleType(f"jackpot_{framework}")
    exec(compile(RECIPES[framework], f"jackpot_{framework}.py", "exec"), vars(module))
    assert not changes or module.CORRECTION
    vars(module).update(changes)
    return module


def without_init(*packages: str) -> Path:
    """Make packages importable without their `__init__`, and return the folder of the first."""
    if (spec := importlib.util.find_spec(packages[0].partition(".")[0])) is None:
        pytest.skip(f"{packages[0]} is not installed here; `make test-adapters` has it where it can be had")
    root = Path(spec.submodule_search_locations[0])
    for package in packages:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(root.joinpath(*package.split(".")[1:]))]
    return root


def batch() -> dict[str, Tensor]:
    """Responses as padded tensors [B, T], with a policy that has moved since and is trained."""
    random = torch.Generator().manual_seed(0)
    rollout = -3.0 * torch.rand(8, 20, generator=random) - 0.01
    old = (rollout + 0.6 * torch.randn(8, 20, generator=random)).clamp(max=0.0)
    new = old + 0.3 * torch.randn(8, 20, generator=random)
    mask = (torch.arange(20) < torch.tensor(LENGTHS)[:, None]) & (torch.rand(8, 20, generator=random) > 0.1)
    mask[:, 0] = True
    advantages = torch.randn(8, 1, generator=random).expand(8, 20)
    return {"rollout": rollout, "old": old, "new": new.requires_grad_(), "mask": mask, "advantages": advantages}


def with_gradient(loss: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss, and its gradient by the log-probs."""
    return loss.detach(), torch.autograd.grad(loss, log_probs)[0]


def test_no_recipe_is_longer_than_thirty_lines():
    assert sorted(RECIPES) == ["areal", "openrlhf", "prime_rl", "skyrl", "slime"]
    for name, code in RECIPES.items():
        _, _, below_the_docstring = code.partition('\n"""\n\n')
        assert 10 < len(below_the_docstring.splitlines()) <= 30, name


# SkyRL


@pytest.fixture
def skyrl() -> ModuleType:
    """The module with SkyRL's losses."""
    without_init("skyrl.backends", "skyrl.backends.skyrl_train")
    return importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")


@pytest.mark.parametrize(
    ("correction", "theirs"),
    [
        ({"correction": "none"}, {}),
        ({"correction": "tis", "cap": 2.0}, {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0}),
        ({"correction": "seq_tis", "cap": 3.0}, {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 3.0}),
    ],
)
def test_skyrls_loss_with_its_own_tis_is_that_of_the_recipe(skyrl, correction, theirs):
    settings = skyrl.AlgorithmConfig()
    settings.policy_loss_type = "regular"
    for name, value in theirs.items():
        assert hasattr(settings.off_policy_correction, name)
        setattr(settings.off_policy_correction, name, value)

    responses = batch()
    arguments = (
        responses["new"],
        responses["old"],
        responses["advantages"],
        settings,
        responses["mask"].float(),
        responses["rollout"],
    )

    recipe("skyrl", CORRECTION=correction)
    registered = skyrl.PolicyLossRegistry.get("jackpot")
    ours, metrics = registered(*arguments)
    expected, _ = skyrl.PolicyLossRegistry.get("regular")(*arguments)

    for mine, its in zip(with_gradient(ours, responses["new"]), with_gradient(expected, responses["new"]), strict=True):
        torch.testing.assert_close(mine, its, **CLOSE)

    assert all(isinstance(value, float) for value in metrics.values())
    assert metrics["jackpot/mismatch/ratio_max"] > 2.0


def test_skyrl_sends_the_loss_to_its_workers_by_value(skyrl):
    cloudpickle = pytest.importorskip("cloudpickle")

    assert skyrl.cloudpickle is cloudpickle

    responses = batch()
    arguments = (
        responses["new"],
        responses["old"],
        responses["advantages"],
        skyrl.AlgorithmConfig(),
        responses["mask"].float(),
    )
    loss = recipe("skyrl").jackpot_loss

    sent = pickle.loads(cloudpickle.dumps(loss))

    assert torch.equal(sent(*arguments, responses["rollout"])[0], loss(*arguments, responses["rollout"])[0])


# slime


@pytest.mark.parametrize("answer", RECORDED["slime"]["answers"], ids=lambda answer: answer["function"])
def test_slime_gets_what_its_own_functions_answered(answer):
    loss, masks = torch.cat(INPUTS["pg_loss"]), INPUTS["mask"]
    keywords = dict.fromkeys(RECORDED["slime"]["keywords"]) | {
        "pg_loss": loss,
        "train_log_probs": INPUTS["log_probs"],
        "rollout_log_probs": INPUTS["rollout_log_probs"],
        "loss_masks": masks,
    }

    ours, kept, metrics = recipe("slime", CORRECTION=answer["correction"]).jackpot_tis(**keywords)

    expected, sampled = torch.tensor(answer["pg_loss"]), torch.cat(MASKS)
    torch.testing.assert_close(ours[sampled], expected[sampled], **CLOSE)
    assert not torch.equal(ours[sampled], loss[sampled])
    assert kept is masks
    assert all(value.shape == loss.shape for value in metrics.values())  # slime splits them by sample


def test_slimes_chunks_of_context_parallelism_are_an_error():
    halves = {"train_log_probs": [row[:2] for row in INPUTS["log_probs"]]}
    arguments = halves | {"rollout_log_probs": INPUTS["rollout_log_probs"], "loss_masks": INPUTS["mask"]}
    with pytest.raises(Exception, match="both must be"):
        recipe("slime").jackpot_tis(None, pg_loss=torch.cat(INPUTS["pg_loss"]), **arguments)


# prime-rl


@pytest.fixture
def prime_rl() -> ModuleType:
    """A module with the two classes of recorded.json, in the place of prime-rl's."""
    module = ModuleType("prime_rl.trainer.rl.loss")
    for name in ("LossInputs", "LossOutputs"):
        setattr(module, name, dataclasses.make_dataclass(name, RECORDED["prime-rl"][name]))
    for name in ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl"):
        sys.modules[name] = ModuleType(name)
    sys.modules[module.__name__] = module
    return module


@pytest.mark.parametrize("answer", RECORDED["prime-rl"]["answers"], ids=lambda answer: answer["function"])
def test_prime_rl_gets_the_gradient_of_its_own_loss(prime_rl, answer):
    loss_of = recipe("prime_rl").jackpot_loss
    rejected = 0.0

    for row, expected in enumerate(answer["gradients"]):
        log_probs = INPUTS["log_probs"][row].clone().requires_grad_()
        inputs = prime_rl.LossInputs(
            trainer_logprobs=log_probs,
            inference_logprobs=INPUTS["rollout_log_probs"][row],
            ref_logprobs=None,
            advantages=INPUTS["advantages"][row],
            loss_mask=MASKS[row],
            loss_weights=INPUTS["pg_loss"][row],
        )
        done = loss_of(inputs, **answer["correction"])
        [gradient] = torch.autograd.grad(done.loss, log_probs)
        torch.testing.assert_close(gradient, torch.tensor(expected), **CLOSE)
        assert all(value.dim() == 0 for value in done.metrics.values())  # prime-rl stacks these
        rejected += 1.0 - float(done.metrics["jackpot/correction/accepted"])

    assert rejected > 0.5


# OpenRLHF


@pytest.fixture
def openrlhf() -> ModuleType:
    """The module with OpenRLHF's losses."""
    without_init("openrlhf.models")
    sys.modules.setdefault("deepspeed", ModuleType("deepspeed"))  # which a file beside the losses imports
    return importlib.import_module("openrlhf.models.loss")


@pytest.mark.parametrize(
    ("correction", "level", "mode", "threshold"),
    [
        ({"correction": "tis", "cap": 2.0}, "token", "clip", [0.0, 2.0]),
        ({"correction": "icepop", "low": 0.5, "high": 2.0}, "token", "mask", [0.5, 2.0]),
    ],
)
@pytest.mark.parametrize("token_level_loss", [True, False])
def test_openrlhfs_loss_is_that_of_the_recipe(openrlhf, correction, level, mode, threshold, token_level_loss):
    responses = batch()
    settings = {"is_correction_level": level, "is_correction_mode": mode, "is_correction_threshold": threshold}
    settings |= {"token_level_loss": token_level_loss, "dual_clip": 3.0}
    arguments = {"action_mask": responses["mask"].float(), "rollout_log_probs": responses["rollout"]}
    first = responses["new"], responses["old"], responses["advantages"]
    theirs = openrlhf.PolicyLoss(**settings)(*first, **arguments)

    ours = recipe("openrlhf", CORRECTION=correction).PolicyLoss(**settings)(*first, **arguments)

    assert len(ours) == len(theirs)
    for mine, its in zip(
        with_gradient(ours[0], responses["new"]), with_gradient(theirs[0], responses["new"]), strict=True
    ):
        torch.testing.assert_close(mine, its, **CLOSE)

    torch.testing.assert_close(ours[3].float(), theirs[3], **CLOSE)  # vllm_kl
    if mode == "mask":
        torch.testing.assert_close(ours[4].float(), theirs[4], **CLOSE)  # is_filter_ratio

    plain = openrlhf.PolicyLoss(**settings | {"is_correction_level": "off"})(*first, **arguments)
    assert abs(float((plain[0] - ours[0]).detach())) > 1e-3


# AReaL


@pytest.fixture
def areal() -> ModuleType:
    """`areal.trainer.ppo.actor` with AReaL's own functions of the loss, and without what only logs."""
    root = without_init("areal", "areal.trainer", "areal.trainer.ppo")
    space = {"torch": torch, "dataclass": dataclasses.dataclass, "field": dataclasses.field, "Any": Any}
    space |= {"__name__": __name__, "ProxLogpMethod": None, "PROX_LOGP_METHOD_RECOMPUTE": "recompute"}
    space |= dict.fromkeys(("PROX_LOGP_METHOD_LOGLINEAR", "PROX_LOGP_METHOD_METRICS"))
    space |= {"infer_token_denominator": lambda data, mask: mask, "_log_version_staleness_stats": None}
    silent = SimpleNamespace(
        denominator=lambda **arguments: None, stat=lambda **arguments: None, scalar=lambda **arguments: None
    )
    space |= {"stats_tracker": silent, "_log_proximal_approximation_stats": lambda **arguments: None}

    names_by_file = {
        "api/cli_args.py": ["RejectionSamplingConfig"],
        "utils/functional/functional.py": [
            "RejectionSamplingResult",
            "_check_bounds",
            "apply_rejection_sampling",
            "ppo_actor_loss_fn",
        ],
        "trainer/ppo/actor.py": ["_resolve_proximal_logp", "grpo_loss_fn"],
    }

    for path, names in names_by_file.items():
        nodes = {node.name: node for node in ast.parse((root / path).read_text()).body if hasattr(node, "name")}
        exec(compile(ast.Module([nodes[name] for name in names], type_ignores=[]), path, "exec"), space)

    module = sys.modules["areal.trainer.ppo.actor"] = ModuleType("areal.trainer.ppo.actor")
    module.grpo_loss_fn, module.RejectionSamplingConfig = space["grpo_loss_fn"], space["RejectionSamplingConfig"]
    sys.modules["areal.trainer.ppo"].actor = module
    return module


def packed() -> tuple[dict[str, Tensor], Tensor]:
    """The batch as AReaL packs it, and the log-probs that are trained."""
    responses = batch()

    def pack(rows: Tensor) -> Tensor:
        return torch.cat([row[:length] for row, length in zip(rows, LENGTHS, strict=True)])

    names = {"logprobs": "rollout", "prox_logp": "old", "loss_mask": "mask", "advantages": "advantages"}
    data = {name: pack(responses[mine]) for name, mine in names.items()}
    data["cu_seqlens"] = torch.tensor([0, *LENGTHS]).cumsum(0)
    return data, pack(responses["new"].detach()).requires_grad_()


SETTINGS = {"eps_clip": 0.2, "eps_clip_higher": 0.28, "c_clip": 3.0, "use_decoupled_loss": True}


@pytest.mark.parametrize(
    ("correction", "theirs"),
    [
        ({"correction": "tis", "cap": 2.0}, {"level": "token", "action": "clamp", "metric": "ratio", "upper": 2.0}),
        ({"correction": "drop", "cap": 2.0}, {"level": "token", "action": "mask", "metric": "ratio", "upper": 2.0}),
    ],
)
def test_areals_loss_is_that_of_the_recipe(areal, correction, theirs):
    data, new = packed()
    areal_loss = areal.grpo_loss_fn
    sampling = areal.RejectionSamplingConfig(**theirs)
    expected = areal_loss(new, torch.zeros_like(new), data, **SETTINGS, rejection_sampling=sampling)

    recipe("areal", CORRECTION=correction)

    assert areal.grpo_loss_fn is not areal_loss

    ours = areal.grpo_loss_fn(new, torch.zeros_like(new), data, **SETTINGS, rejection_sampling=None)
    for mine, its in zip(with_gradient(ours, new), with_gradient(expected, new), strict=True):
        torch.testing.assert_close(mine, its, **CLOSE)

    plain = areal_loss(new, torch.zeros_like(new), data, **SETTINGS)
    assert abs(float((plain - ours).detach())) > 1e-3


def test_areals_packed_responses_are_taken_apart(areal):
    """A correction of whole responses weighs each by its own ratio."""
    data, new = packed()
    recipe("areal", CORRECTION={"correction": "seq_tis", "cap": 3.0})
    ours = areal.grpo_loss_fn(new, torch.zeros_like(new), data, **SETTINGS)

    responses = batch()
    weights = correct(
        "seq_tis",
        cap=3.0,
        rollout_log_probs=responses["rollout"],
        target_log_probs=responses["old"],
        response_mask=responses["mask"],
    ).weights
    ratio, advantages = (responses["new"] - responses["old"]).exp(), responses["advantages"]
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.28) * advantages)
    loss = torch.minimum(loss, 3.0 * advantages.abs())

    torch.testing.assert_close(ours, (weights * loss)[responses["mask"]].sum() / responses["mask"].sum(), **CLOSE)


def test_areal_correcting_twice_or_not_at_all_is_an_error(areal):
    data, new = packed()
    recipe("areal")
    sampling = areal.RejectionSamplingConfig(level="token", action="clamp", metric="ratio", upper=2.0)

    for change in ({"rejection_sampling": sampling}, {"use_decoupled_loss": False}):
        with pytest.raises(ValueError, match="set rejection_sampling: null"):
            areal.grpo_loss_fn(new, torch.zeros_like(new), data, **SETTINGS | change)


# All of them, with a correction whose acceptance mask is apart from its weights


@pytest.mark.parametrize("framework", sorted(RECIPES))
def test_a_rejected_token_has_no_gradient(framework, request: pytest.FixtureRequest):
    coin = {"correction": "coin_only"}
    if framework in ("slime", "prime_rl"):  # their rows are shorter: one response each
        rollout, old = (INPUTS[name][0][None] for name in ("rollout_log_probs", "log_probs"))
        mask, advantages = MASKS[0][None], INPUTS["advantages"][0][None]
        rollout = rollout + 1.0  # so that most are rejected
        new = old.clone().requires_grad_()
    else:
        rollout, old, new, mask, advantages = batch().values()

    if framework != "slime":
        request.getfixturevalue(framework)
    module = recipe(framework, **{} if framework == "prime_rl" else {"CORRECTION": coin})

    if framework == "skyrl":
        settings = request.getfixturevalue("skyrl").AlgorithmConfig()
        loss = module.jackpot_loss(new, old, advantages, settings, mask.float(), rollout)[0]
    elif framework == "openrlhf":
        loss = module.PolicyLoss()(new, old, advantages, action_mask=mask.float(), rollout_log_probs=rollout)[0]
    elif framework == "areal":
        data, new = packed()
        loss = request.getfixturevalue("areal").grpo_loss_fn(new, torch.zeros_like(new), data, **SETTINGS)
    elif framework == "slime":
        inputs = {"train_log_probs": old, "rollout_log_probs": rollout, "loss_masks": mask.float()}
        loss = module.jackpot_tis(None, pg_loss=-new[0], **inputs)[0][mask[0]].sum()
    else:
        inputs = (new[0], rollout[0], None, torch.ones_like(advantages[0]), mask[0], None)
        loss = module.jackpot_loss(request.getfixturevalue("prime_rl").LossInputs(*inputs), **coin).loss

    [gradient] = torch.autograd.grad(loss, new)
    done = correct(**coin, rollout_log_probs=rollout, target_log_probs=old, response_mask=mask)
    rejected = mask & (done.accept_mask == 0.0)
    if framework == "areal":
        rejected = torch.cat([row[:length] for row, length in zip(rejected, LENGTHS, strict=True)])

    assert rejected.any()
    assert not gradient[rejected].any()
