"""TRL's asynchronous trainer with a correction of ours: the loss on its own data path, and a run behind a server."""

import importlib
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from helpers.engines.servers import VLLM_PYTHON, VLLMServer, save_untied, started
from helpers.trl_async import (
    FOLDER,
    POLICY,
    TOP,
    QueuedSamples,
    StarterServer,
    arguments,
    made,
    samples,
)
from jackpot import correct, estimate_z
from jackpot.core.errors import ConfigError, ModelError
from jackpot.models.load import load_model, load_tokenizer

pytestmark = pytest.mark.trl
CASES = [
    ("tis", {"cap": 1.3}),
    ("is", {}),
    ("f_tis", {"max_kl": 0.5}),
    ("seq_mask", {"high": 2.0}),
    ("obrs", {"lam": 0.9, "c1": 1.5}),
    ("obrs", {"mask": "expected"}),
    ("obrs", {"mask": "expected", "target": "new", "proximal": "new"}),
    ("obrs", {"mask": "expected", "target": "new", "proximal": "rollout"}),
]


@cache
def table() -> dict[str, torch.Tensor]:
    """The same samples, by another forward pass: the policy's log-probs [B, T, V] and the columns of the rollouts.

    TRL packs the costlier group first, which is the second, of two turns.
    """
    policy, rows = load_model(POLICY, torch.float32), []

    for sample in sorted(samples(2, listed=True), key=lambda sample: -sample.group_id):
        ids, at = torch.from_numpy(sample.input_ids), torch.from_numpy(sample.completion_mask).nonzero()[:, 0]
        with torch.no_grad():
            distributions = policy(ids[None]).logits[0].log_softmax(-1)[at - 1]
        row = torch.from_numpy(sample.old_log_probs)[at]
        rows.append((distributions, ids[at], row, torch.full((len(at),), sample.advantage)))

    columns = zip(*rows, strict=True)
    padded = [torch.nn.utils.rnn.pad_sequence(column, batch_first=True) for column in columns]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row[1])) for row in rows], batch_first=True).bool()
    return dict(zip(("distributions", "ids", "rows", "advantages"), padded, strict=True)) | {"mask": mask}


def test_without_a_correction_the_loss_is_that_of_trl(asynchronous, tmp_path):
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    losses, gradients = [], []
    for cls, more in ((AsyncGRPOTrainer, {}), (asynchronous.CorrectedAsyncGRPOTrainer, {"correction": "none"})):
        trainer, batch = made(cls, tmp_path, listed=False, **more)
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad for parameter in trainer.model.parameters()])
        assert trainer._metrics["train"]["ratio"][0] != 1.0

    assert torch.equal(*losses) and losses[0] != 0.0
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_loss_is_that_of_correct(asynchronous, tmp_path, monkeypatch, name, settings):
    """Of `jackpot.correct` on what another forward pass gives, by TRL's formula written out."""
    listed = name == "obrs"
    columns, drawn = table(), []
    trainer, batch = made(
        asynchronous.CorrectedAsyncGRPOTrainer, tmp_path, listed, correction={"name": name} | settings
    )
    uniforms = trainer._uniforms
    monkeypatch.setattr(trainer, "_uniforms", lambda mask: drawn.append(uniforms(mask)) or drawn[-1])

    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()

    mask, row = columns["mask"], columns["rows"]
    distributions = columns["distributions"]
    log_probs = distributions.gather(-1, columns["ids"][..., None])[..., 0]
    rollout = torch.where(mask, row[..., 0], 0.0)
    z = estimate_z(
        policy_logits=distributions,
        rollout_top_ids=row[..., 1 : 1 + TOP].long(),
        rollout_top_log_probs=row[..., 1 + TOP :],
        lam=settings.get("lam", 1.0),
    )
    is_own = settings.get("proximal") == "rollout"
    done = correct(
        name,
        rollout_log_probs=rollout,
        target_log_probs=torch.where(mask, log_probs, 0.0),
        proximal_log_probs=rollout if is_own else None,
        response_mask=mask,
        z=z if listed else None,
        advantages=columns["advantages"],
        uniforms=drawn[0],
        **{key: value for key, value in settings.items() if key not in ("target", "proximal")},
    )
    ratio = (log_probs - rollout).exp() if is_own else torch.ones_like(log_probs)
    a = columns["advantages"]
    surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    expected = -(done.weights * done.accept_mask * surrogate)[mask].sum() / mask.sum()

    torch.testing.assert_close(loss.detach(), expected, atol=1e-5, rtol=1e-5)
    assert trainer._metrics["train"]["jackpot/correction/weight"]
    assert any(parameter.grad.abs().max() > 0 for parameter in trainer.model.parameters())


def test_a_negative_advantage_has_a_bound_here(asynchronous, tmp_path):
    """The writer gave bad tokens e^6 times less than it did: TRL's loss grows with that ratio, ours does not."""
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    losses = []
    for cls, more in (
        (AsyncGRPOTrainer, {}),
        (asynchronous.CorrectedAsyncGRPOTrainer, {"correction": {"name": "tis", "cap": 2.0}}),
        (asynchronous.CorrectedAsyncGRPOTrainer, {"correction": {"name": "obrs", "c1": 2.0, "mask": "expected"}}),
    ):
        trainer, batch = made(cls, tmp_path, listed=more.get("correction", {}).get("name") == "obrs", **more)
        written = batch["old_log_probs"] if batch["old_log_probs"].dim() == 2 else batch["old_log_probs"][..., 0]
        written[batch["advantages"] < 0] -= 6.0
        losses.append(abs(float(trainer.compute_loss(trainer.model, batch).detach())))

    theirs, *ours = losses
    assert theirs > 50.0 and max(ours) < 2.0


def trained(asynchronous: ModuleType, folder: Any, url: str, model: str = FOLDER) -> Any:
    """A trainer after three steps with OBRS, whose rollouts and lists are a server's, and whose weights go there."""
    settings = arguments(folder, vllm_server_base_url=url, max_inflight_tasks=8, queue_maxsize=16) | {"model": model}
    trainer = asynchronous.CorrectedAsyncGRPOTrainer(
        **settings,
        weight_transfer=asynchronous.ServerWeights(),
        correction={"name": "obrs", "mask": "expected"},
        num_top_log_probs=TOP,
    )
    trainer.train()

    logs = [row for row in trainer.state.log_history if "jackpot/obrs/z" in row]
    assert len(logs) == trainer.state.global_step == 3
    assert logs[0]["jackpot/mismatch/kl_k3"] < 1e-6 < logs[-1]["jackpot/mismatch/kl_k3"]
    assert 0.5 < logs[0]["jackpot/obrs/z"] <= 1.0
    return trainer


def test_lists_and_weights_pass_between_trainer_and_server(asynchronous, tmp_path):
    """TRL's worker in its own process, over HTTP: the lists reach the loss, and new weights reach the server."""
    server = StarterServer()
    before = server.weights["model.norm.weight"].copy()
    try:
        trainer = trained(asynchronous, tmp_path, server.url)
    finally:
        server.close()

    assert {body["logprobs"] for path, body in server.asked if path == "/v1/completions"} == {TOP}
    assert server.count("reload_weights") == 5  # of the engine, of TRL's start, and of each step
    assert (server.weights["model.norm.weight"] != before).any()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(torch.from_numpy(server.weights[name]), parameter.detach())


@pytest.mark.sweep  # minutes until its server has started
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM's environment is not here: `make test-vllm` makes it")
def test_lists_and_weights_pass_between_trainer_and_vllm(asynchronous, tmp_path):
    """The same with a real vLLM server; `check_loaded` has compared what it holds with what was sent, each time."""
    untied = save_untied(Path(FOLDER), tmp_path / "untied")
    load_tokenizer(POLICY).save_pretrained(untied)
    with started(VLLMServer(untied, python=VLLM_PYTHON, environment={"PYTHONPATH": ""})) as [server]:
        trained(asynchronous, tmp_path / "out", server.url, str(untied))


def test_what_cannot_be_corrected_is_refused(asynchronous, tmp_path):
    def settings(**more: Any) -> dict[str, Any]:
        workers = {"rollout_worker": QueuedSamples([]), "weight_transfer": asynchronous.ServerWeights()}
        return arguments(tmp_path) | workers | more

    trainer = asynchronous.CorrectedAsyncGRPOTrainer
    with pytest.raises(ConfigError, match="normalizer 'exact'"):
        trainer(**settings(), correction={"name": "obrs", "normalizer": "exact"})
    with pytest.raises(ConfigError, match="did you mean 'obrs'"):
        trainer(**settings(), correction="obsr")
    with pytest.raises(ConfigError, match="weights_foldr"):
        trainer(**settings(weight_transfer=asynchronous.ServerWeights(weights_foldr="x")), correction="tis")

    adapter = pytest.importorskip("peft").LoraConfig(task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="leave weight_transfer out"):
        trainer(**settings(peft_config=adapter), correction="tis")

    plain, batch = made(trainer, tmp_path, listed=False, correction="obrs")
    with pytest.raises(ConfigError, match=r"samples are \[T\]"):
        plain.compute_loss(plain.model, batch)

    scaled, batch = made(trainer, tmp_path, listed=True, correction="obrs")
    scaled.temperature = 3.0  # in our head alone, as if the model scaled its logits itself
    with pytest.raises(ModelError, match="computes more"):
        scaled.compute_loss(scaled.model, batch)


def test_another_trainer_of_that_name_is_refused(adapter: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """As TRL 1.0 has it; made so with a TRL that has the right one."""
    name = "trl.experimental.async_grpo.packing"
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "jackpot.adapters.trl.asynchronous", raising=False)
    with pytest.raises(ImportError, match="use CorrectedGRPOTrainer"):
        importlib.import_module("jackpot.adapters.trl.asynchronous")
