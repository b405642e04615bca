"""`jackpot mismatch` with the real vLLM as sampler and as learner."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs this in .venv-vllm")

from helpers.engines.servers import VLLMServer, save_untied, started
from jackpot.analysis.mismatch.mismatch import MismatchPair, measure_mismatch
from jackpot.analysis.mismatch.sides import mismatch_config
from jackpot.models.hub import starter_path
from jackpot.models.load import load_tokenizer

pytestmark = pytest.mark.vllm

VLLM = {"name": "vllm", "kv_cache_memory_bytes": 2**28, "max_num_seqs": 32}


def measured_pairs(
    samplers: list[dict[str, Any]], learners: list[dict[str, Any]], model: str = "starter:policy", **sampling: Any
) -> list[MismatchPair]:
    """Measure every sampler against every learner on 32 responses."""
    changes = [{"responses": 32, "threads": 1, "sampling": {"max_new_tokens": 16} | sampling}]
    config = mismatch_config(model, [[side] for side in samplers], [[side] for side in learners], changes)
    return list(measure_mismatch(config, lambda text: None).pairs)


def test_only_float32_vllm_is_transformers_up_to_rounding():
    pairs = measured_pairs([VLLM, VLLM | {"dtype": "bf16"}], [{"dtype": "fp32"}])
    fp32_numbers, bf16_numbers = (pair.numbers for pair in pairs)

    assert [pair.name for pair in pairs] == ["vllm fp32", "vllm bf16"]
    assert fp32_numbers.kl_is_exact
    assert pairs[0].top_log_probs == 32
    assert fp32_numbers.max_gap < 1e-4
    assert fp32_numbers.kl[0].value < 1e-9
    assert 1e-4 < bf16_numbers.gap.value < 0.02
    assert bf16_numbers.kl[0].value > 1e-6
    assert all(response_numbers.max_gap < 0.2 for response_numbers in bf16_numbers.each)


def test_a_wide_head_of_vllm_is_that_of_transformers():
    bf16_side, wide_side = {"dtype": "bf16"}, {"dtype": "bf16", "head_dtype": "fp32"}
    pairs = measured_pairs([VLLM | bf16_side, VLLM | wide_side], [bf16_side, wide_side])
    gaps = {pair.name.replace("transformers", "t"): pair.numbers.gap.value for pair in pairs}
    assert gaps.pop("vllm bf16 head fp32 | t bf16 head fp32") < min(gaps.values()), gaps


def test_vllm_gives_single_tokens_and_no_distributions():
    equal_pair, bf16_pair = measured_pairs([VLLM], [VLLM, {"dtype": "bf16"}])

    assert equal_pair.numbers.max_gap < 1e-5
    assert equal_pair.numbers.kl is None
    assert equal_pair.numbers.bands["entropy"]
    assert bf16_pair.numbers.gap.value > 1e-4
    assert bf16_pair.numbers.kl_is_exact


def test_a_truncated_vllm_is_compared_on_what_it_can_draw():
    [pair] = measured_pairs([VLLM], [{"dtype": "fp32"}], top_p=0.8)
    assert pair.numbers.max_gap < 1e-4
    assert pair.numbers.support.value < 0.999


def test_a_server_of_two_ranks_is_transformers_up_to_rounding(tmp_path: Path):
    """Its weights are those that it was sent after it had started, as in a run."""
    folder = save_untied(starter_path("policy"), tmp_path / "untied")
    load_tokenizer("starter:policy").save_pretrained(folder)
    with started(VLLMServer(folder, tensor_parallel_size="2")) as [server]:
        [pair] = measured_pairs([{"name": "vllm_server", "urls": (server.url,)}], [{"dtype": "fp32"}], str(folder))

    assert 0.0 < pair.numbers.max_gap < 1e-4
    assert pair.numbers.kl_is_exact
