"""Two ranks that share the weights of all models take the steps of one process that holds them."""

import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from helpers.sharded import (
    RANKS,
    compared,
    config_of,
    learner_of,
    moments_of,
    on_ranks,
    samples_of,
    save,
    save_models,
    train,
)
from jackpot.core.digest import weights_digest
from jackpot.core.errors import ModelError
from jackpot.core.shards import local
from jackpot.launch.build import load_models
from jackpot.models import gathered
from jackpot.models.load import load_model
from jackpot.training.batching import deal, plain_batches

CLIPPED = [f"{role}.optimizer.max_grad_norm=0.01" for role in ("policy", "rollout_model")]
CRITIC = ("objective.advantage=gae", "critic={optimizer: {learning_rate: 1e-3}}")
PREPASS = "objective.correction.kappa=prepass"
REPAIR = "objective.correction.kappa_tolerance=0"
ACCEPTED = (
    *("objective.count=accepted", "objective.correction.target=new"),
    "rollout_model.distill_control={target: 0.06, horizon: 1}",
)


class Case(NamedTuple):
    """A run on two ranks, and by how much it may differ from that of one process."""

    overrides: tuple[str, ...] = (PREPASS,)
    budget: int = 80  # tokens of a micro-batch
    micro_batches: int = 2
    one_token: int = 0  # responses cut to one token
    tolerance: float = 0.0  # above 0 where a rank adds two micro-batches up
    pads: bool = False


QUICK = {"three micro-batches": Case((PREPASS, *ACCEPTED), budget=60, micro_batches=3)}
SLOW = {
    "one micro-batch, clipped gradients": Case((PREPASS, *CLIPPED), budget=400, micro_batches=1),
    "three, read again for kappa, on a sampler's support": Case(
        (REPAIR, "sampling.top_k=4"), budget=60, micro_batches=3, tolerance=1e-6
    ),
    "four micro-batches": Case(budget=45, micro_batches=4, tolerance=1e-6),
    "one-token responses": Case(budget=30, one_token=12),
    "one-token responses in one of two micro-batches, padded": Case(budget=90, one_token=6, tolerance=3e-6, pads=True),
    "bf16, output layers in fp32, activations checkpointed": Case(
        (PREPASS, "precision=bf16", "head_dtype=fp32", "activation_checkpointing=true")
    ),
    "fp8 in bf16": Case((PREPASS, "precision=fp8", "engine.quantization=fp8", "engine.dtype=bf16")),
    "reference, lora and critic": Case(
        (PREPASS, "objective.reference={kl_loss_coef: 0.1}", "policy.lora={rank: 4, alpha: 8}", *CRITIC)
    ),
    "update once an iteration, offload": Case(
        (PREPASS, "rollout_model.update=iteration", "batch.mini_batch_size=6", "placement.offload=true")
    ),
    "frozen rollout model, two epochs, dealt anew": Case(
        ("rollout_model.optimizer=null", "batch.ppo_epochs=2", "batch.mini_batch_size=6"), budget=40, micro_batches=4
    ),
    "frozen policy": Case(("policy.optimizer=null", "objective.correction=none")),
    "policy alone": Case(("rollout_model=null", "objective.correction=none")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


def check(case: Case, folder: Path, home: Path) -> None:
    """Two ranks give the gradients, weights, digests, scores, traces and metrics of one process."""
    config = config_of(folder, *case.overrides)
    samples = samples_of(folder, [1] * case.one_token)

    def work(rank):
        return train(learner_of(config, is_sharded=True), config, samples, case.budget, rank, RANKS, pads=case.pads)

    rank_results = on_ranks(work, home)
    lone_result = train(
        learner_of(config, is_sharded=False), config, samples, case.budget, rank=0, ranks=1, pads=case.pads
    )

    assert lone_result["micro_batches"] == case.micro_batches
    assert len(lone_result["gradients"]) > 1
    assert len(rank_results[0]["gradients"]) == len(lone_result["gradients"])
    assert all(gradient.any() for gradient in lone_result["gradients"])
    assert compared(rank_results[0]["gradients"], lone_result["gradients"]) <= case.tolerance
    assert compared(rank_results[0]["weights"].values(), lone_result["weights"].values()) <= case.tolerance
    assert rank_results[0]["digests"] == lone_result["digests"] or case.tolerance

    scores = rank_results[0]["scores"] | rank_results[1]["scores"]
    assert scores.keys() == lone_result["scores"].keys()
    assert compared([scores[uid] for uid in lone_result["scores"]], lone_result["scores"].values()) <= case.tolerance

    assert {*rank_results[0]["traced"], *rank_results[1]["traced"]} == {*lone_result["traced"]}

    for rank_metrics, lone_metrics in zip(rank_results[0]["metrics"], lone_result["metrics"], strict=True):
        assert rank_metrics.keys() == lone_metrics.keys()
        for name, value in lone_metrics.items():
            rounding = 2e-5 if case.tolerance else 1e-12
            torch.testing.assert_close(
                rank_metrics[name], value, rtol=rounding, atol=rounding, equal_nan=True, msg=name
            )


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_take_the_steps_of_one(name, folder, tmp_path):
    check(QUICK[name], folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_two_ranks_take_the_steps_of_one_with(name, folder, tmp_path):
    check(SLOW[name], folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("longer_role", ["policy", "rollout_model"])
def test_two_ranks_cut_an_output_layer_as_one_does(longer_role, folder, tmp_path):
    """An untied one and a tied one."""
    shutil.copytree(folder, tmp_path / "models")
    model = load_model(folder / longer_role, torch.float32)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    model.save_pretrained(tmp_path / "models" / longer_role)

    check(Case(), tmp_path / "models", tmp_path)


@pytest.mark.slow
def test_what_rounds_otherwise_is_the_same_each_time(folder, tmp_path):
    case, config, samples = SLOW["four micro-batches"], config_of(folder, PREPASS), samples_of(folder)

    def work(rank):
        return train(learner_of(config, is_sharded=True), config, samples, case.budget, rank, RANKS)

    first_result, second_result = (on_ranks(work, tmp_path / name)[0] for name in ("first", "second"))

    assert first_result["digests"] == second_result["digests"]
    assert all(torch.equal(*pair) for pair in zip(first_result["gradients"], second_result["gradients"], strict=True))


def check_weights_are_current(folder: Path, tmp_path: Path) -> None:
    """Score, change the weights, and compare scores, a saved folder and what is sent with those of one process."""
    config, samples = config_of(folder), samples_of(folder)
    batches = plain_batches([item.rollout for item in samples], budget=60, seed=0)

    def change(learner):
        with torch.no_grad():
            for model in learner.models.values():
                for parameter in model.parameters():
                    local(parameter).mul_(1.1)

    def work(rank):
        learner = learner_of(config, is_sharded=True)
        apart = [isinstance(model.get_input_embeddings(), FSDPModule) for model in learner.models.values()]
        assert apart == [True, False]  # the rollout model's embeddings belong to its head

        share = deal(batches, RANKS)[rank]
        learner.score("policy", share, config.sampling)
        change(learner)
        save(learner, config, tmp_path / "saved")
        return learner.score("policy", share, config.sampling) | {
            "sent": torch.tensor(len(list(learner.weights("policy"))))
        }

    rank_results = on_ranks(work, tmp_path)

    learner = learner_of(config, is_sharded=False)
    change(learner)
    expected_scores = learner.score("policy", batches, config.sampling)
    sent_counts = [int(rank_result.pop("sent")) for rank_result in rank_results]
    scores = rank_results[0] | rank_results[1]

    assert scores.keys() == expected_scores.keys()
    assert all(torch.equal(scores[uid], row) for uid, row in expected_scores.items())
    assert sent_counts == [len(list(learner.weights("policy"))), 0]
    for role in ("policy", "rollout_model"):
        saved_weights = dict(load_model(tmp_path / "saved" / role, torch.float32).named_parameters())
        assert all(torch.equal(saved_weights[name], weight) for name, weight in learner.weights(role))


@pytest.mark.slow
def test_a_pass_without_gradient_reads_whole_weights(folder, tmp_path):
    check_weights_are_current(folder, tmp_path)


ADAPTED = (PREPASS, "policy.lora={rank: 4, alpha: 8}", *CRITIC)


def check_continued(overrides: tuple[str, ...], saved_by: int, ranks: tuple[int, ...], folder: Path, home: Path):
    """Save after one step, take two more, and let other numbers of ranks take these from what was saved; the files of
    each rank that saved."""
    config, samples = config_of(folder, *overrides), samples_of(folder)

    def take_steps(learner, rank, size, count):
        return train(learner, config, samples, 80, rank, size, rollout_batches=count)

    def save_and_go_on(rank):
        learner = learner_of(config, is_sharded=saved_by > 1)
        take_steps(learner, rank, saved_by, count=1)
        files = save(learner, config, home / "saved")
        moments = moments_of(learner)
        return {"files": files, "moments": moments} | take_steps(learner, rank, saved_by, count=2)

    def load_and_go_on(rank, size):
        learner = learner_of(config, is_sharded=size > 1, checkpoint=home / "saved")
        return {"moments": moments_of(learner)} | take_steps(learner, rank, size, count=2)

    first_results = on_ranks(save_and_go_on, home / "first", saved_by) if saved_by > 1 else [save_and_go_on(0)]
    first_result = first_results[0]
    for size in ranks:
        if size > 1:
            result = on_ranks(partial(load_and_go_on, size=size), home / str(size), size)[0]
        else:
            result = load_and_go_on(0, size=1)

        assert result["moments"].keys() == first_result["moments"].keys()
        assert all(torch.equal(result["moments"][name], moment) for name, moment in first_result["moments"].items())
        assert any(moment.any() for moment in result["moments"].values())
        tolerance = 1e-6 if size != saved_by else 0.0
        assert compared(result["weights"].values(), first_result["weights"].values()) <= tolerance
        assert compared(result["gradients"], first_result["gradients"]) <= tolerance
    return [rank_result["files"] for rank_result in first_results]


@pytest.mark.slow
def test_what_two_ranks_save_continues_in_one_process(folder, tmp_path):
    files_by_rank = check_continued((PREPASS,), saved_by=2, ranks=(1,), folder=folder, home=tmp_path)

    roles = ("policy", "rollout_model")
    for rank, rank_files in enumerate(files_by_rank):
        end = f"-0000{rank + 1}-of-00002.safetensors"
        assert {*rank_files} == {f"{role}/model{end}" for role in roles} | {f"moments/{role}{end}" for role in roles}

    first_sizes, second_sizes = ([files[name]["size"] for name in sorted(files)] for files in files_by_rank)
    assert all(max(pair) / sum(pair) < 0.7 for pair in zip(first_sizes, second_sizes, strict=True))  # about half each


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "ranks"), [(2, (2, 3)), (1, (2,))])
def test_any_number_of_ranks_continues_what_any_number_has_saved(saved_by, ranks, folder, tmp_path):
    """An adapter, a whole model and a critic."""
    check_continued(ADAPTED, saved_by, ranks, folder, tmp_path)


def test_weights_are_gathered_in_buckets_of_the_engines_dtype(folder, tmp_path, monkeypatch):
    """An adapter's layers in fp32, as their sum is cast; nothing is whole on the second rank."""
    config = config_of(folder, "policy.lora={rank: 4, alpha: 8}")
    bucket, gather, messages = 2**14, dist.gather, []

    def change(learner):
        with torch.no_grad():
            for model in learner.models.values():
                for parameter in model.parameters():
                    local(parameter).add_(0.01)
        return learner

    def recorded(rank_bytes, pieces, dst):
        messages.append(RANKS * len(rank_bytes))
        gather(rank_bytes, pieces, dst=dst)

    def work(rank):
        learner, sent_weights = change(learner_of(config, is_sharded=True)), {}
        for role in ("policy", "rollout_model"):
            messages.clear()
            sent_weights[role] = dict(learner.weights(role, torch.bfloat16))
            sent_weights[f"{role}, messages"] = list(messages)
        return sent_weights

    monkeypatch.setattr(gathered, "BUCKET", bucket)
    monkeypatch.setattr(dist, "gather", recorded)
    lone_learner = change(learner_of(config, is_sharded=False))
    first_rank, second_rank = on_ranks(work, tmp_path)

    for role in ("policy", "rollout_model"):
        lone_weights, gathered_weights = dict(lone_learner.weights(role)), first_rank[role]
        assert second_rank[role] == {}
        assert gathered_weights.keys() == lone_weights.keys()
        assert all(torch.equal(gathered_weights[name], weight.bfloat16()) for name, weight in lone_weights.items())

        sizes = first_rank[f"{role}, messages"]
        largest = max(weight.nbytes for weight in lone_weights.values())
        assert len(sizes) > 2
        assert max(sizes) <= max(bucket, largest)

    weight_bytes = sum(weight.nbytes for weight in first_rank["rollout_model"].values())
    assert weight_bytes <= sum(first_rank["rollout_model, messages"]) < 1.1 * weight_bytes


def process_memory() -> int:
    """Bytes of this process, without pages of files that it has mapped."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.mark.slow
def test_no_rank_holds_a_whole_model_while_it_loads_its_part(tmp_path):
    """Of bf16 files, with a reference, a critic and an adapter; the weights are those that one process loads."""
    save_models(tmp_path, torch.bfloat16, hidden_size=256, intermediate_size=768, num_hidden_layers=8)
    config = config_of(tmp_path, "policy.lora={rank: 4, alpha: 8}", "objective.reference={kl_loss_coef: 0.1}", *CRITIC)
    models = load_models(config, None, torch.device("cpu"))
    expected_digests = {name: weights_digest(model.named_parameters(), torch.float32) for name, model in models.items()}
    model_bytes = sum(weight.nbytes for model in models.values() for weight in model.parameters())

    add_shards, peaks = gathered.fully_shard, []

    def measured(module, **options):
        peaks.append(process_memory())
        return add_shards(module, **options)

    def work(rank):
        gathered.fully_shard = measured  # in this process
        first_memory = process_memory()
        learner = learner_of(config, is_sharded=True)
        growth = max(*peaks, process_memory()) - first_memory
        weights = {name: gathered.gather(model.named_parameters()) for name, model in learner._gathered.models.items()}
        digests = {name: weights_digest(tensors, torch.float32) for name, tensors in weights.items()}
        return {"digests": digests, "growth": growth, "reference": learner._forward.reference.digest}

    ranks = on_ranks(work, tmp_path)

    assert ranks[0]["digests"] == expected_digests
    assert ranks[1]["reference"] == expected_digests["reference"]
    for rank in ranks:
        assert rank["growth"] < model_bytes, "half of it are its own parts"


def test_a_rank_with_nothing_to_read_gets_an_empty_micro_batch(folder):
    batches = plain_batches([item.rollout for item in samples_of(folder)], budget=60, seed=0)
    assert len(batches) == 3

    dealt = deal(batches, 2)
    assert [[batch.uids for batch in rank] for rank in dealt] == [
        [batches[0].uids, batches[2].uids],
        [batches[1].uids, ()],
    ]
    assert dealt[1][1].response_mask.shape[0] == 0
    assert len(dealt[1][1].response_index) == 0

    assert [len(rank) for rank in deal(batches[:1], 3)] == [1, 1, 1]


def untied_by_sharding(module, **options):
    """What FSDP does to a tied weight whose two modules are wrapped apart."""
    for model in getattr(module, "models", {}).values():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return module


def test_weights_that_sharding_would_untie_are_refused(folder, monkeypatch):
    monkeypatch.setattr(gathered, "fully_shard", untied_by_sharding)
    models = load_models(config_of(folder), None, torch.device("cpu"))

    with pytest.raises(ModelError, match=r"lm_head\.weight, model\.embed_tokens\.weight of the rollout_model"):
        gathered.shard(models, SimpleNamespace(device_type="cpu"), offload=False)
