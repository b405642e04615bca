"""benchmarks/split_models.py: ranks that share a model or its tokens out, against one process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import PreTrainedModel

from benchmarks.split_models import compare, decode, read, split_tensors
from helpers.engines.architectures import VOCAB_SIZE, make_model
from jackpot.core.errors import ModelError

RANKS, PROMPT = 2, 4
NAMES = ("qwen3", "qwen3_moe")
SIZES = {"num_hidden_layers": 2, "num_key_value_heads": 2}


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (3, 12), generator=torch.Generator().manual_seed(0))  # 11 are read: not even


def _rank(rank: int, folder: Path, models: dict[str, PreTrainedModel]) -> None:
    """Run one rank, which saves its numbers of every model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    with pytest.raises(ModelError, match=r"2 ranks cannot share out .*num_key_value_heads.: 1"):
        split_tensors(make_model("qwen3", num_key_value_heads=1, num_hidden_layers=1))
    torch.save({name: _numbers(model) for name, model in models.items()}, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def _numbers(model: PreTrainedModel) -> dict[str, Any]:
    """Read and decode with the ranks sharing the work in every way; and count the weights that this rank keeps."""
    ids, results = tokens(), {}
    for split in ("heads", "keys"):
        results[f"read {split}"] = read(model, ids, split)
    results["decode keys"] = decode(model, ids, PROMPT, "keys")
    results["read after"] = read(model, ids, split=None)

    split_model = copy.deepcopy(model)
    split_tensors(split_model)

    sizes = {
        name: weight.to_local().numel()
        for name, weight in split_model.named_parameters()
        if hasattr(weight, "to_local")
    }
    sizes |= {name: weight.numel() for name, weight in split_model.named_parameters() if "experts" in name}

    results |= {
        "read tensor": read(split_model, ids, "tensor"),
        "decode tensor": decode(split_model, ids, PROMPT, "tensor"),
    }
    return {"results": results, "sizes": sizes}


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: make_model(name, **SIZES).eval() for name in NAMES}


@pytest.fixture(scope="module")
def split(models: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The numbers of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(_rank, args=(folder, models), nprocs=RANKS, start_method="fork")  # nothing is imported again
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_compute_what_one_process_does_up_to_rounding(name: str, models, split) -> None:
    model, ids = models[name], tokens()
    each = [of_rank[name] for of_rank in split]
    alone = {"read": read(model, ids, split=None), "decode": decode(model, ids, PROMPT, split=None)}
    with torch.no_grad():
        exact = model(ids).logits[:, :-1].double().log_softmax(-1)

    for log_probs, _ in alone.values():
        torch.testing.assert_close(log_probs, exact, atol=1e-5, rtol=0.0)

    for how, (log_probs, experts) in each[0]["results"].items():
        torch.testing.assert_close(log_probs, alone[how.split()[0]][0], atol=1e-5, rtol=0.0)
        assert log_probs.equal(each[1]["results"][how][0])
        expected = alone["read"][1]
        assert experts is None if name == "qwen3" else experts.equal(expected) and experts.shape[-2:] == (2, 2)

    assert len(each[0]["sizes"]) == (15 if name == "qwen3" else 13)
    assert all(2 * size == model.get_parameter(at).numel() for at, size in each[0]["sizes"].items())


def test_two_sides_are_compared_on_the_tokens_that_exist() -> None:
    model, ids = make_model("qwen3_moe", **SIZES).eval(), tokens()
    exists = torch.ones(3, 12 - PROMPT, dtype=torch.bool)
    exists[0, 3:] = False
    plain = read(model, ids, split=None)

    same = compare(plain, plain, ids, PROMPT, exists)

    assert same.tokens == exists.sum() and same.max_gap == same.log_gap.value == same.other_token.value == 0.0

    log_probs, experts = plain
    changed = (log_probs.clone(), experts.clone())
    changed[0][0, PROMPT - 1 :] = changed[0][0, PROMPT - 1 :].flip(-1)  # the first row's response, and no other
    changed[1][1, PROMPT - 1] += 1

    mismatch = compare(plain, changed, ids, PROMPT, exists)

    assert [response.max_gap > 0.0 for response in mismatch.each] == [True, False, False]
    assert mismatch.other_token.value == 3 / mismatch.tokens and mismatch.other_experts.value == 1 / mismatch.tokens

    rows = [log_probs[0, PROMPT - 1 + at] for at in range(3)]
    gaps = [(row - row.flip(-1))[ids[0, PROMPT + at]].abs().item() for at, row in enumerate(rows)]
    assert mismatch.log_gap.value == pytest.approx(sum(gaps) / mismatch.tokens)
