"""vLLM samples from the first rows of an output layer where the run's other model has no more."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.engines.reference import VOCAB_SIZE, tiny_model, tiny_request
from jackpot.config.engines import VLLMEngineConfig
from jackpot.core.types import Version
from jackpot.launch.engines import make_engine
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.engines.vllm.library import mask_rows


def test_logits_beyond_are_masked_wherever_vllm_takes_them() -> None:
    logits = torch.randn(2, 5)
    model = SimpleNamespace(compute_logits=lambda hidden: None if hidden is None else logits + hidden)

    mask_rows(3, model)
    masked_logits = model.compute_logits(torch.ones(2, 1))

    assert masked_logits[:, :3].equal(logits[:, :3] + 1.0)
    assert (masked_logits[:, 3:] == -torch.inf).all()
    assert model.compute_logits(None) is None, "of a rank that has no logits"


@pytest.mark.vllm
@pytest.mark.parametrize("settings", [{}, {"dtype": "bf16", "quantization": "int8_w8a8"}])
def test_tokens_beyond_the_limit_are_never_sampled_nor_listed(settings: dict[str, str], tmp_path: Path) -> None:
    """New weights keep it so, and the log-probs are those of an output layer that was saved shorter."""
    pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs this in .venv-vllm")
    model = tiny_model(0, VOCAB_SIZE + 5, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "long")
    model.resize_token_embeddings(VOCAB_SIZE)
    model.save_pretrained(tmp_path / "cut")
    weights = list(tiny_model(1, VOCAB_SIZE + 5, tie_word_embeddings=False).named_parameters())

    def engine(name: str) -> Engine:
        config = VLLMEngineConfig(kv_cache_memory_bytes=2**28, max_num_seqs=32, **settings)
        return make_engine(config, str(tmp_path / name), torch.device("cpu"), Version(0, 0), None, VOCAB_SIZE)

    requests = [tiny_request(f"{seed}", seed=seed, num_top_log_probs=VOCAB_SIZE) for seed in range(16)]
    with closing(engine("long")) as masked_engine, closing(engine("cut")) as short_engine:
        assert masked_engine.capabilities.vocab_size == masked_engine.capabilities.num_top_log_probs
        assert masked_engine.capabilities.num_top_log_probs == VOCAB_SIZE

        for is_updated in (False, True):
            if is_updated:
                masked_engine.update_weights(weights, Version(1, 1))
                short_weights = [
                    (name, tensor[:VOCAB_SIZE] if len(tensor) == VOCAB_SIZE + 5 else tensor) for name, tensor in weights
                ]
                short_engine.update_weights(short_weights, Version(1, 1))

            rollouts = masked_engine.generate(requests)
            for rollout, short_rollout in zip(rollouts, short_engine.generate(requests), strict=True):
                assert rollout.token_ids.max() < VOCAB_SIZE
                assert rollout.top_ids.max() < VOCAB_SIZE
                torch.testing.assert_close(rollout.top_log_probs.exp().sum(-1), torch.ones(len(rollout.token_ids)))
                torch.testing.assert_close(
                    rollout.top_log_probs[0], short_rollout.top_log_probs[0], rtol=0.0, atol=0.02
                )
            torch.testing.assert_close(
                masked_engine.score(rollouts, 1.0), short_engine.score(rollouts, 1.0), rtol=0.0, atol=0.1
            )
