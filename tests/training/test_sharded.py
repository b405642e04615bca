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
    config = config_of(folder, *case.overrides)
    samples = samples_of(folder, [1] * case.one_token)

    def work(rank):
        return train(learner_of(config, True), config, samples, case.budget, rank, RANKS, case.pads)

    ranks = on_ranks(work, home)
    whole = train(learner_of(config, False), config, samples, case.budget, 0, 1, case.pads)
    assert whole["micro_batches"] == case.micro_batches
    assert len(whole["gradients"]) == len(ranks[0]["gradients"]) > 1
    assert all(one.any() for one in whole["gradients"])
    assert compared(ranks[0]["gradients"], whole["gradients"]) <= case.tolerance
    assert compared(ranks[0]["weights"].values(), whole["weights"].values()) <= case.tolerance
    assert ranks[0]["digests"] == whole["digests"] or case.tolerance
    scores = ranks[0]["scores"] | ranks[1]["scores"]
    assert scores.keys() == whole["scores"].keys()
    assert compared([scores[uid] for uid in whole["scores"]], whole["scores"].values()) <= case.tolerance
    assert {*ranks[0]["traced"], *ranks[1]["traced"]} == {*whole["traced"]}
    for ours, wanted in zip(ranks[0]["metrics"], whole["metrics"], strict=True):
        assert ours.keys() == wanted.keys()
        for name, value in wanted.items():
            rounding = 2e-5 if case.tolerance else 1e-12
            torch.testing.assert_close(ours[name], value, rtol=rounding, atol=rounding, equal_nan=True, msg=name)


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_take_the_steps_of_one(name, folder, tmp_path):
    check(QUICK[name], folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_two_ranks_take_the_steps_of_one_with(name, folder, tmp_path):
    check(SLOW[name], folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("longer", ["policy", "rollout_model"])
def test_two_ranks_cut_an_output_layer_as_one_does(longer, folder, tmp_path):
    """An untied one and a tied one."""
    shutil.copytree(folder, tmp_path / "models")
    model = load_model(folder / longer, torch.float32)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    model.save_pretrained(tmp_path / "models" / longer)
    check(Case(), tmp_path / "models", tmp_path)


@pytest.mark.slow
def test_what_rounds_otherwise_is_the_same_each_time(folder, tmp_path):
    case, config, samples = SLOW["four micro-batches"], config_of(folder, PREPASS), samples_of(folder)

    def work(rank):
        return train(learner_of(config, True), config, samples, case.budget, rank, RANKS)

    first, second = (on_ranks(work, tmp_path / name)[0] for name in ("first", "second"))
    assert first["digests"] == second["digests"]
    assert all(map(torch.equal, first["gradients"], second["gradients"]))


def check_weights_are_current(folder: Path, tmp_path: Path) -> None:
    """Score, change the weights, and compare scores, a saved folder and what is sent with those of one process."""
    config, samples = config_of(folder), samples_of(folder)
    batches = plain_batches([item.rollout for item in samples], 60, 0)

    def change(learner):
        with torch.no_grad():
            for model in learner.models.values():
                for parameter in model.parameters():
                    local(parameter).mul_(1.1)

    def work(rank):
        learner = learner_of(config, True)
        alone = [isinstance(one.get_input_embeddings(), FSDPModule) for one in learner.models.values()]
        assert alone == [True, False]  # the rollout model's belongs to its head
        mine = deal(batches, RANKS)[rank]
        learner.score("policy", mine, config.sampling)
        change(learner)
        save(learner, config, tmp_path / "saved")
        return learner.score("policy", mine, config.sampling) | {
            "sent": torch.tensor(len(list(learner.weights("policy"))))
        }

    ranks = on_ranks(work, tmp_path)
    learner = learner_of(config, False)
    change(learner)
    wanted = learner.score("policy", batches, config.sampling)
    sent = [int(one.pop("sent")) for one in ranks]
    found = ranks[0] | ranks[1]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[uid], row) for uid, row in wanted.items())
    assert sent == [len(list(learner.weights("policy"))), 0]
    for role in ("policy", "rollout_model"):
        saved = dict(load_model(tmp_path / "saved" / role, torch.float32).named_parameters())
        assert all(torch.equal(saved[name], weight) for name, weight in learner.weights(role))


@pytest.mark.slow
def test_a_pass_without_gradient_reads_whole_weights(folder, tmp_path):
    check_weights_are_current(folder, tmp_path)


ADAPTED = (PREPASS, "policy.lora={rank: 4, alpha: 8}", *CRITIC)


def check_continued(overrides: tuple[str, ...], saved_by: int, ranks: tuple[int, ...], folder: Path, home: Path):
    """Save after one step, take two more, and let other numbers of ranks take these from what was saved; the files of
    each rank that saved."""
    config, samples = config_of(folder, *overrides), samples_of(folder)

    def steps(learner, rank, size, number):
        return train(learner, config, samples, 80, rank, size, rollout_batches=number)

    def first(rank):
        learner = learner_of(config, saved_by > 1)
        steps(learner, rank, saved_by, 1)
        files = save(learner, config, home / "saved")
        saved = moments_of(learner)
        return {"files": files, "moments": saved} | steps(learner, rank, saved_by, 2)

    def again(rank, size):
        learner = learner_of(config, size > 1, home / "saved")
        return {"moments": moments_of(learner)} | steps(learner, rank, size, 2)

    before = on_ranks(first, home / "first", saved_by) if saved_by > 1 else [first(0)]
    for size in ranks:
        after = on_ranks(partial(again, size=size), home / str(size), size)[0] if size > 1 else again(0, 1)
        assert after["moments"].keys() == before[0]["moments"].keys()
        assert all(torch.equal(after["moments"][name], one) for name, one in before[0]["moments"].items())
        assert any(one.any() for one in after["moments"].values())
        tolerance = 1e-6 if size != saved_by else 0.0
        assert compared(after["weights"].values(), before[0]["weights"].values()) <= tolerance
        assert compared(after["gradients"], before[0]["gradients"]) <= tolerance
    return [one["files"] for one in before]


@pytest.mark.slow
def test_what_two_ranks_save_continues_in_one_process(folder, tmp_path):
    files = check_continued((PREPASS,), 2, (1,), folder, tmp_path)
    for rank, own in enumerate(files):
        end = f"-0000{rank + 1}-of-00002.safetensors"
        roles = ("policy", "rollout_model")
        assert {*own} == {f"{role}/model{end}" for role in roles} | {f"moments/{role}{end}" for role in roles}

    first, second = ([own[name]["size"] for name in sorted(own)] for own in files)
    assert all(max(pair) / sum(pair) < 0.7 for pair in zip(first, second, strict=True))


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

    def recorded(mine, pieces, dst):
        messages.append(RANKS * len(mine))
        gather(mine, pieces, dst=dst)

    def work(rank):
        learner, sent = change(learner_of(config, True)), {}
        for role in ("policy", "rollout_model"):
            messages.clear()
            sent[role] = dict(learner.weights(role, torch.bfloat16))
            sent[f"{role}, messages"] = list(messages)
        return sent

    monkeypatch.setattr(gathered, "BUCKET", bucket)
    monkeypatch.setattr(dist, "gather", recorded)
    whole = change(learner_of(config, False))
    first, second = on_ranks(work, tmp_path)

    for role in ("policy", "rollout_model"):
        wanted, found = dict(whole.weights(role)), first[role]
        assert second[role] == {}
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], one.bfloat16()) for name, one in wanted.items())
        sizes, largest = first[f"{role}, messages"], max(one.nbytes for one in wanted.values())
        assert len(sizes) > 2
        assert max(sizes) <= max(bucket, largest)

    plain = sum(one.nbytes for one in first["rollout_model"].values())
    assert plain <= sum(first["rollout_model, messages"]) < 1.1 * plain


@pytest.mark.slow
def test_no_rank_holds_a_whole_model_while_it_loads_its_part(tmp_path):
    """Of bf16 files, with a reference, a critic and an adapter; the weights are those that one process loads."""
    save_models(tmp_path, torch.bfloat16, hidden_size=256, intermediate_size=768, num_hidden_layers=8)
    config = config_of(tmp_path, "policy.lora={rank: 4, alpha: 8}", "objective.reference={kl_loss_coef: 0.1}", *CRITIC)
    models = load_models(config, None, torch.device("cpu"))
    wanted = {name: weights_digest(model.named_parameters(), torch.float32) for name, model in models.items()}
    size = sum(one.nbytes for model in models.values() for one in model.parameters())
    add_shards, peaks = gathered.fully_shard, []

    def measured(module, **options):
        peaks.append(own_memory())
        return add_shards(module, **options)

    def work(rank):
        gathered.fully_shard = measured  # in this process
        before = own_memory()
        learner = learner_of(config, True)
        grown = max(*peaks, own_memory()) - before
        held = {name: gathered.gather(one.named_parameters()) for name, one in learner._gathered.models.items()}
        digests = {name: weights_digest(one, torch.float32) for name, one in held.items()}
        return {"digests": digests, "grown": grown, "reference": learner._forward.reference.digest}

    ranks = on_ranks(work, tmp_path)
    assert ranks[0]["digests"] == wanted
    assert ranks[1]["reference"] == wanted["reference"]
    for rank in ranks:
        assert rank["grown"] < size, "half of it are its own parts"


def own_memory() -> int:
    """Bytes of this process, without pages of files that it has mapped."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def test_a_rank_with_nothing_to_read_gets_an_empty_micro_batch(folder):
    batches = plain_batches([item.rollout for item in samples_of(folder)], 60, 0)
    assert len(batches) == 3

    dealt = deal(batches, 2)
    assert [[batch.uids for batch in rank] for rank in dealt] == [
        [batches[0].uids, batches[2].uids],
        [batches[1].uids, ()],
    ]
    assert dealt[1][1].response_mask.shape[0] == 0 == len(dealt[1][1].response_index)
    assert [len(rank) for rank in deal(batches[:1], 3)] == [1, 1, 1]


def test_weights_that_sharding_would_untie_are_refused(folder, monkeypatch):
    monkeypatch.setattr(gathered, "fully_shard", _each_apart)
    models = load_models(config_of(folder), None, torch.device("cpu"))
    with pytest.raises(ModelError, match=r"lm_head\.weight, model\.embed_tokens\.weight of the rollout_model"):
        gathered.shard(models, SimpleNamespace(device_type="cpu"), False)


def _each_apart(module, **options):
    """What FSDP does to a tied weight whose two modules are wrapped apart."""
    for model in getattr(module, "models", {}).values():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return module
