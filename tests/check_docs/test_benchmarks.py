"""docs/benchmarks.md is what its generator writes of the committed results, and each claim of a floor is a count."""

import importlib
from types import ModuleType

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers.paths import ROOT
from jackpot.models.cost import forward_cost, head_cost


@pytest.fixture(scope="module")
def benchmarks() -> ModuleType:
    """benchmarks/all.py, which is no package; the scripts there import each other by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module("all")


def test_the_page_is_what_its_generator_writes(benchmarks: ModuleType) -> None:
    assert benchmarks.PAGE.read_text() == benchmarks.page()


def test_every_result_file_names_commit_and_command(benchmarks: ModuleType) -> None:
    files = {path.stem for path in benchmarks.FOLDER.glob("*.jsonl")}
    assert files <= benchmarks.BENCHMARKS.keys()
    for name in files:
        about = benchmarks.Results.read(benchmarks.FOLDER / f"{name}.jsonl").about
        assert f"benchmarks/{name}.py" in about["command"] and len(about["commit"]) >= 7 and about["machine"], name


def test_the_floor_of_a_sequence_is_one_forward_pass(benchmarks: ModuleType) -> None:
    """With attention counted as causal and the head at response positions; torch counts the whole square."""
    step, floor = benchmarks.step, importlib.import_module("floor")
    model = step.make_model("fixed", 4096).eval()
    prompt, response = 5, 3

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), floor.Products() as products:
        model(torch.arange(prompt + response)[None], logits_to_keep=response)
    cost, length = forward_cost(model), prompt + response

    work = importlib.import_module("step_task").tokens_and_pairs([prompt], [response])
    assert work == {"prompt_tokens": prompt, "tokens": response, "pairs": length * (length + 1) // 2}

    upper_triangle = cost.per_pair * length * (length - 1) // 2
    floor_flops = floor.forward_flops(cost.per_token, head_cost(model), cost.per_pair, work)
    assert products.by_dtype["fp32"] - upper_triangle == pytest.approx(floor_flops, rel=1e-3)
