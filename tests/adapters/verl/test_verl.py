"""Our corrections inside verl's own rollout correction, losses and writer of rollouts, as the package is installed."""

import ast
import importlib
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from helpers.paths import ROOT
from jackpot import CORRECTIONS, correct
from jackpot.analysis.replay.formats.verl import FORMAT
from jackpot.core.errors import ConfigError

pytestmark = pytest.mark.adapters
PAGE = (ROOT / "docs" / "frameworks.md").read_text()
SHAPE = (16, 24)
RATIOS = ["none", "is", "tis", "icepop", "drop", "seq_tis", "seq_mask", "geo_mask", "min_prefix"]
RATIOS += ["mask_only", "target_only", "coin_only"]


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """Two models that are apart, tools that replied in between, and an empty response."""
    random = torch.Generator().manual_seed(0)
    rollout = -3.0 * torch.rand(SHAPE, generator=random)
    old = (rollout + 0.7 * torch.randn(SHAPE, generator=random)).clamp(max=0.0)
    mask = (torch.rand(SHAPE, generator=random) > 0.2).long()
    mask[3] = 0
    return {"old_log_prob": old, "rollout_log_prob": rollout, "response_mask": mask}


def of_verl(proto) -> Tensor:
    """Return the weights that verl's loss is given."""
    return proto.batch["rollout_is_weights"]


def ours(name: str, tensors: dict[str, Tensor], **settings) -> Tensor:
    """Return the weights of `jackpot.correct`, 0 where a token is rejected."""
    mask = tensors["response_mask"].bool()
    log_probs = {"rollout_log_probs": tensors["rollout_log_prob"], "target_log_probs": tensors["old_log_prob"]}
    done = correct(name, **log_probs, response_mask=mask, **settings)
    return done.weights * done.accept_mask


def columns_of_z(plugin: ModuleType) -> dict[str, Tensor]:
    """Z of every token, as docs/verl.patch brings it; that of one cannot be known."""
    columns = {name: torch.full(SHAPE, 0.6) for name in plugin.Z_FIELDS}
    columns["jackpot_z_value"][0, 0] = torch.nan
    return columns


@pytest.mark.parametrize(
    ("named", "level", "threshold"),
    [
        ("jackpot:tis:cap=2", "token", 2.0),
        ("jackpot:is", "token", 1e12),
        ("jackpot:tis:cap=null", "token", 1e12),
        ("jackpot:tis:cap=.inf", "token", 1e12),
        ("jackpot:icepop", "token", "0.5_5.0"),
        ("jackpot:drop", "token", "1e-9_5.0"),
        ("jackpot:seq_tis", "sequence", 2.0),
        ("jackpot:seq_mask:low=0.1:high=10", "sequence", "0.1_10.0"),
    ],
)
def test_weights_are_verls_where_it_has_the_same_correction(plugin, tensors, named, level, threshold):
    proto, mask, _ = plugin.compute_rollout_correction_and_rejection_mask(**tensors, rollout_is=named)
    theirs, _, _ = plugin._verl_correction(**tensors, rollout_is=level, rollout_is_threshold=threshold)
    torch.testing.assert_close(of_verl(proto), of_verl(theirs), atol=0.0, rtol=1e-5)
    assert torch.equal(mask, tensors["response_mask"])


@pytest.mark.parametrize("name", RATIOS)
def test_every_correction_of_the_ratio_has_its_weights(plugin, tensors, name):
    proto, _, metrics = plugin.compute_rollout_correction_and_rejection_mask(**tensors, rollout_is=f"jackpot:{name}")
    assert torch.equal(of_verl(proto), ours(name, tensors))
    mask, weights = tensors["response_mask"].bool(), of_verl(proto)
    assert metrics["jackpot/correction/weight"] == pytest.approx(float(weights[mask].mean()), rel=1e-5)
    assert metrics["jackpot/correction/weight_max"] == pytest.approx(float(weights[mask].max()), rel=1e-5)


def test_metrics_stand_before_and_after_masking(plugin, tensors):
    rejection = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_4.0"}
    log_ratio = (tensors["old_log_prob"] - tensors["rollout_log_prob"]).double()
    every, ratio = tensors["response_mask"].bool(), log_ratio.exp()
    unrejected = every & (-log_ratio >= math.log(0.8)) & (-log_ratio <= math.log(4.0))
    band, every_one = (ratio >= 0.5) & (ratio <= 1.1), torch.ones_like(every)
    cases = [
        ("jackpot:icepop:high=1.1", {}, ratio * band, band),
        ("token", {"rollout_is_threshold": "0.5_1.1"}, ratio * band, band),
        ("token", {"rollout_is_threshold": 1.8}, ratio.clamp(max=1.8), every_one),
        (None, {}, torch.ones_like(ratio), every_one),
    ]

    for rollout_is, threshold, weight, accepted in cases:
        proto, mask, metrics = plugin.compute_rollout_correction_and_rejection_mask(
            **tensors, rollout_is=rollout_is, **threshold, **rejection
        )
        assert (proto is None) == (rollout_is is None) and torch.equal(mask.bool(), unrejected)
        verl_metrics = plugin._verl_correction(**tensors, **rejection)[2]
        assert {name: metrics[name] for name in verl_metrics} == verl_metrics
        kept = unrejected & accepted
        factor = (weight * unrejected)[every]
        assert 0.2 < kept.sum() / every.sum() < 0.95
        expected = {
            "mismatch/ratio": ratio[every].mean(),
            "mismatch/ratio_max": ratio[every].max(),
            "mismatch/kl_k3": (ratio - 1.0 - log_ratio)[every].mean(),
            "obrs/acceptance": ratio[every].clamp(max=1.0).mean(),
            "kept/mismatch/ratio": ratio[kept].mean(),
            "kept/mismatch/ratio_max": ratio[kept].max(),
            "kept/mismatch/kl_k1": -log_ratio[kept].mean(),
            "kept/mismatch/kl_k3": (ratio - 1.0 - log_ratio)[kept].mean(),
            "correction/accepted": kept.sum() / every.sum(),
            "correction/weight": factor.mean(),
            "correction/weight_max": factor.max(),
            "correction/ess": factor.sum() ** 2 / factor.square().sum() / len(factor),
            "unusable_tokens": 0.0,
        }
        for name, value in expected.items():
            assert metrics[f"jackpot/{name}"] == pytest.approx(float(value), rel=1e-5), name


def test_the_page_names_every_metric_that_the_plug_in_adds(plugin, tensors):
    _, _, metrics = plugin.compute_rollout_correction_and_rejection_mask(
        **tensors, **columns_of_z(plugin), rollout_is="jackpot:obrs"
    )
    assert {name for name in metrics if name.startswith("jackpot/") and f"`{name}`" not in PAGE} == set()


def test_tokens_without_a_log_prob_are_left_out_and_counted(plugin, tensors):
    row, position = tensors["response_mask"].nonzero()[5].tolist()
    rollout, old = tensors["rollout_log_prob"].clone(), tensors["old_log_prob"].clone()
    rollout[row, position], old[0] = torch.nan, -torch.inf

    proto, _, metrics = plugin.compute_rollout_correction_and_rejection_mask(
        old, rollout, tensors["response_mask"], rollout_is="jackpot:tis"
    )

    assert of_verl(proto)[row, position] == 0.0 and not of_verl(proto)[0].any() and of_verl(proto).isfinite().all()
    assert metrics["jackpot/unusable_tokens"] == pytest.approx(1.0 / int(tensors["response_mask"].sum()))


def test_tokens_without_log_probs_alone_have_the_weight_0(plugin, tensors):
    unknown = tensors | {"rollout_log_prob": torch.full(SHAPE, torch.nan)}

    proto, _, metrics = plugin.compute_rollout_correction_and_rejection_mask(**unknown, rollout_is="jackpot:tis")

    assert (of_verl(proto) == 0).all()
    assert metrics["jackpot/correction/accepted"] == 0


def test_the_page_says_of_every_correction_whether_it_can_be_had(plugin, tensors):
    rows = re.findall(r"^\| `(\w+)`.*\| (?:`(jackpot:\S+)`|error: ).*\|$", PAGE, re.MULTILINE)

    assert [name for name, _ in rows] == list(dict.fromkeys(name for name, _ in rows))
    assert {name for name, _ in rows} == set(CORRECTIONS)

    for name, named in rows:
        if named:
            columns = tensors | columns_of_z(plugin)
            proto, _, _ = plugin.compute_rollout_correction_and_rejection_mask(**columns, rollout_is=named)
            assert of_verl(proto).isfinite().all()
        else:
            with pytest.raises(ConfigError, match=f"correction {name} "):
                plugin.compute_rollout_correction_and_rejection_mask(**tensors, rollout_is=f"jackpot:{name}")


@pytest.mark.parametrize(
    ("named", "settings", "message"),
    [
        ("jackpot:obrs", {}, "reads Z, and the batch has none: apply docs/verl.patch"),
        ("jackpot:dppo", {}, "verl computes after its rollout correction"),
        ("jackpot:ppo_is", {}, "bypass_mode"),
        ("jackpot:tis_adjusted", {}, "loss_type: reinforce"),
        ("jackpot:tos", {}, "did you mean 'tis'"),
        ("jackpot:tis:low=2", {}, "low"),
        ("jackpot:tis:2", {}, "'2' is no setting here; write jackpot:tis:SETTING=VALUE"),
        ("jackpot:tis", {"rollout_is_threshold": 5.0}, "rollout_is_threshold 5.0"),
        ("jackpot:tis", {"rollout_is_batch_normalize": True}, "put numbers into the name"),
    ],
)
def test_what_verl_lacks_is_an_error_that_names_it(plugin, tensors, named, settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        plugin.compute_rollout_correction_and_rejection_mask(**tensors, rollout_is=named, **settings)


ALONE = """
import sys, torch
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
tensors = torch.load(sys.argv[1])
names = {"old_log_prob": "old_log_probs", "rollout_log_prob": "rollout_log_probs", "response_mask": "response_mask"}
batch = DataProto.from_dict({names[name]: tensor for name, tensor in tensors.items()})
batch, metrics = compute_rollout_correction_and_add_to_batch(batch, {"rollout_is": "jackpot:coin_only"})
torch.save(batch.batch["rollout_is_weights"], sys.argv[2])
print(metrics["jackpot/correction/accepted"])
"""


def test_verl_loads_the_plugin_by_its_own_variable_alone(plugin, tensors, tmp_path: Path):
    torch.save(tensors, tmp_path / "in.pt")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("VERL_USE_EXTERNAL_MODULES", None)
    variable = re.search(r"VERL_USE_EXTERNAL_MODULES=(\S+) ", PAGE)[1]
    command = [sys.executable, "-c", ALONE, tmp_path / "in.pt", tmp_path / "out.pt"]

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=250)

    assert "Invalid rollout_is: jackpot:coin_only" in run().stderr

    done = run(VERL_USE_EXTERNAL_MODULES=variable)
    assert done.returncode == 0, done.stderr[-2000:]
    assert torch.equal(torch.load(tmp_path / "out.pt"), ours("coin_only", tensors))
    assert 0.5 < float(done.stdout.splitlines()[-1]) < 1.0


class Settings(SimpleNamespace):
    """What verl's losses read of its ActorConfig."""

    def get(self, key, default=None):
        return getattr(self, key, default)


def loss_settings(**more) -> Settings:
    """Return settings of verl's loss with PPO's clip at 0.8 and 1.28."""
    clips = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e30}
    return Settings(**clips, loss_agg_mode="token-mean", global_batch_info={}, **more)


def of_policy(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The log-probs of a policy that has moved, to be trained, and advantages of both signs."""
    random = torch.Generator().manual_seed(1)
    new = tensors["old_log_prob"] + 0.3 * torch.randn(SHAPE, generator=random)
    return new.requires_grad_(), torch.randn(SHAPE[0], 1, generator=random).expand(SHAPE)


def test_verls_loss_with_our_weights_is_our_loss(plugin, tensors):
    algos = importlib.import_module("verl.trainer.ppo.core_algos")
    proto, mask, _ = plugin.compute_rollout_correction_and_rejection_mask(**tensors, rollout_is="jackpot:coin_only")
    new, advantages = of_policy(tensors)
    old = tensors["old_log_prob"]

    loss, _ = algos.compute_policy_loss_vanilla(
        old, new, advantages, mask, "token-mean", loss_settings(), of_verl(proto)
    )

    ratio = (new - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    expected = -(ours("coin_only", tensors) * surrogate).sum() / mask.sum()

    torch.testing.assert_close(loss, expected)

    gradient, by_us = (torch.autograd.grad(value, new, retain_graph=True)[0] for value in (loss, expected))
    torch.testing.assert_close(gradient, by_us)
    assert gradient.any()


def test_verls_bypass_loss_takes_weights_of_the_policy_now(plugin, tensors):
    """`loss_type: reinforce`: -w A log p_new, w = min(p_new / p_inf, cap), which is our `tis` with `proximal: new`."""
    algos = importlib.import_module("verl.trainer.ppo.core_algos")
    new, advantages = of_policy(tensors)
    mask, rollout = tensors["response_mask"].bool(), tensors["rollout_log_prob"]
    settings = Settings(rollout_correction={"loss_type": "reinforce", "rollout_is": "jackpot:tis:cap=1.5"})

    loss, metrics = algos.compute_policy_loss_bypass_mode(
        rollout, new, advantages, mask, "token-mean", loss_settings(policy_loss=settings)
    )
    [gradient] = torch.autograd.grad(loss, new)

    weight = (new.detach() - rollout).exp().clamp(max=1.5)
    torch.testing.assert_close(gradient, torch.where(mask, -weight * advantages, 0.0) / mask.sum())
    assert metrics["jackpot/correction/weight"] == pytest.approx(float(weight[mask].mean()), rel=1e-5)


def test_replay_reads_what_verls_own_writer_writes(plugin, tensors, tmp_path: Path):
    """`_log_rollout_data` and `_write_generations` of the installed trainer, with the lines put where the hint says."""
    hint = textwrap.dedent(re.findall(r"(?:^    .*\n)+", FORMAT.how, re.MULTILINE)[-1])
    path = Path(importlib.util.find_spec("verl").submodule_search_locations[0]) / "trainer" / "ppo" / "ray_trainer.py"
    source = path.read_text()
    [trainer] = [node for node in ast.parse(source).body if getattr(node, "name", "") == "RayPPOTrainer"]
    methods = {node.name: node for node in trainer.body if isinstance(node, ast.FunctionDef)}
    logs = textwrap.dedent(ast.get_source_segment(source, methods["_log_rollout_data"], padded=True))

    [indent] = re.findall(r"^( *)self\._dump_generations\(", logs, re.MULTILINE)
    logs = logs.replace(f"{indent}self._dump", textwrap.indent(hint, indent) + f"{indent}self._dump")
    inside = {"json": json, "os": os, "DataProto": None, "marked_timer": lambda *a, **k: nullcontext()}
    exec(logs, inside)
    writer = "_write_generations" if "_write_generations" in methods else "_dump_generations"  # since 0.8, before
    exec(textwrap.dedent(ast.get_source_segment(source, methods[writer], padded=True)), inside)

    rows = {name: tensor[:3] for name, tensor in tensors.items()}
    batch = {
        "prompts": torch.full((3, 2), 7),
        "responses": torch.arange(3 * SHAPE[1]).view(3, -1),
        "attention_mask": torch.ones(3, 2 + SHAPE[1], dtype=torch.long),
        "response_mask": rows["response_mask"],
        "rollout_log_probs": rows["rollout_log_prob"],
        "old_log_probs": rows["old_log_prob"],
        "advantages": torch.ones(3, SHAPE[1]),
        "token_level_scores": torch.zeros(3, SHAPE[1]),
    }

    class Batch:
        non_tensor_batch: ClassVar = {}

        def __iter__(self):
            return iter([self] * 3)

    Batch.batch = batch
    fake = SimpleNamespace(tokenizer=SimpleNamespace(batch_decode=lambda ids, **others: ["a"] * 3), global_steps=4)
    first = ([fake], {}) if writer == "_dump_generations" else ([], {"global_steps": 4})
    fake._dump_generations = lambda **arguments: inside[writer](*first[0], **first[1], **arguments)

    inside["_log_rollout_data"](fake, Batch(), {}, {}, str(tmp_path))

    warnings: list[str] = []
    [file] = FORMAT.files(tmp_path)
    assert FORMAT.recognizes(file, warnings.append)
    responses = list(FORMAT.read(file, warnings.append, []))
    assert warnings == [] and len(responses) == 3

    for row, response in enumerate(responses):
        mask = batch["response_mask"][row].bool()
        assert response.token_ids.tolist() == batch["responses"][row].tolist()
        torch.testing.assert_close(response.rollout_log_probs.float()[mask], batch["rollout_log_probs"][row][mask])
        torch.testing.assert_close(response.old_log_probs.float()[mask], batch["old_log_probs"][row][mask])
