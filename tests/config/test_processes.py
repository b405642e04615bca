"""Which processes generate where `placement.engines` is auto, and which of their engines sleep in between."""

import pytest

from helpers.runs import small_config
from jackpot.config.config import Config
from jackpot.config.engines import sleeps
from jackpot.config.processes import check_ranks, place_engines
from jackpot.config.recipes import resolve
from jackpot.core.errors import ConfigError

VLLM = "engine={name: vllm}"
SERVERS = "{name: vllm_server, urls: 'http://127.0.0.1:%d'}"


def placed(config: Config, ranks: int, on_gpu: bool = True, local_ranks: int | None = None) -> tuple[int, bool, bool]:
    """How many engine processes there are, and whether the engine, and that of evaluations, sleep."""
    placed_config = place_engines(config, ranks, on_gpu, local_ranks)
    return (
        placed_config.placement.engines,
        sleeps(placed_config.engine),
        sleeps(placed_config.evaluation.engine or placed_config.engine),
    )


def test_ranks_on_gpus_have_engines_beside_them_that_sleep() -> None:
    assert placed(small_config(), 8) == placed(resolve("mixed", None, []), 8) == (8, True, True)
    assert placed(small_config(), 16, local_ranks=8) == (8, True, True)
    assert placed(small_config(), 1) == placed(small_config(), 2, on_gpu=False) == (0, False, False)


def test_one_of_two_engines_with_vllm_sleeps() -> None:
    assert placed(small_config(VLLM), 2) == placed(resolve("joint_8b", None, []), 2) == (2, True, False)
    assert placed(small_config(VLLM, "evaluation.engine={name: transformers}"), 2) == (2, True, True)
    assert placed(small_config(VLLM, "rollout_model=null", "objective.correction=none"), 2) == (2, True, True)
    assert placed(small_config(VLLM), 2, on_gpu=False) == (2, False, False)  # where vLLM cannot lead ranks either


def test_engines_that_generate_while_ranks_train_stay_awake() -> None:
    assert placed(small_config("batch.ahead=1"), 2) == (2, False, False)
    assert placed(small_config("rollout_model.share=0.0", "engine.draft.tokens=4"), 2) == (2, False, False)


def test_what_was_chosen_stays() -> None:
    chosen = small_config("placement.engines=3", "engine.enable_sleep_mode=true")
    assert place_engines(chosen, 8, on_gpu=True) is chosen
    assert placed(small_config("engine.enable_sleep_mode=false"), 2) == (2, False, False)

    servers = [f"engine={SERVERS % 1}", f"evaluation.engine={SERVERS % 2}"]
    assert placed(small_config(*servers), 8) == (0, False, False)


def test_settings_of_engine_processes_need_some() -> None:
    config = small_config("placement.chunk=4")
    assert place_engines(config, 2, on_gpu=True).placement.chunk == 4
    with pytest.raises(ConfigError, match="chunk is 4, but there are no engine processes"):
        place_engines(config, 1, on_gpu=True)


def test_vllm_cannot_lead_ranks() -> None:
    config = small_config(VLLM, "placement.engines=0")
    check_ranks(config, 1)
    with pytest.raises(ConfigError, match=r"leave placement\.engines out"):
        check_ranks(config, 2)
