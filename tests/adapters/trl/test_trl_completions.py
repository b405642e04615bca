"""The completions that TRL's own writer logs with the columns of the hint are replayed."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from helpers.trl_runs import ROLLOUT_MODEL, arguments
from jackpot.analysis.replay.formats import FORMATS
from jackpot.analysis.replay.formats.base import read_files
from jackpot.analysis.replay.replay import replay
from jackpot.core.errors import DataError

pytestmark = pytest.mark.trl


def logged(trainer: type) -> type:
    """The class of the hint, from the hint itself."""
    lines = FORMATS["trl"].how.splitlines()
    start = next(index for index, line in enumerate(lines) if "class Logged" in line)
    end = next(index for index, line in enumerate(lines) if "return output" in line)
    names = {"GRPOTrainer": trainer}
    exec("\n".join(line[4:] for line in lines[start : end + 1]), names)
    return names["Logged"]


@pytest.mark.parametrize("is_corrected", [True, False])
def test_what_trl_logs_with_the_hint_is_replayed(is_corrected: bool, adapter: ModuleType, tmp_path):
    """Without vLLM TRL has no log-probs of the policy as it was: the model that the run began with gives them."""
    import trl

    kind: Callable = logged(adapter.CorrectedGRPOTrainer if is_corrected else trl.GRPOTrainer)
    more = {"correction": "tis"} if is_corrected else {}
    rollouts = adapter.EngineRollouts(ROLLOUT_MODEL)
    trainer = kind(**arguments(tmp_path, max_steps=1, log_completions=True), rollout_func=rollouts, **more)

    trainer.train()

    files = FORMATS["trl"].files(tmp_path)
    assert [file.name for file in files] == ["completions_00001.parquet"]

    with pytest.raises(DataError, match="give --model PATH"):
        replay(tmp_path)

    result = replay(tmp_path, names=["tis"], model="starter:policy")
    assert result.format == "trl" and float(result.run["responses"].value) == 32 and not result.problems
    assert 0.01 < float(result.run["total_variation"].value) < 0.2

    batch = trainer._buffered_inputs[0]
    responses = list(read_files(FORMATS["trl"], files, print))
    written = {
        (*response.prompt_ids.tolist(), *response.token_ids.tolist()): response.rollout_log_probs
        for response in responses
    }
    asked, answered = batch["prompt_mask"].bool(), batch["completion_mask"].bool()

    for row, log_probs in enumerate(batch["sampling_per_token_logps"]):
        prompt, ids = batch["prompt_ids"][row][asked[row]], batch["completion_ids"][row][answered[row]]
        saved = written[(*prompt.tolist(), *ids.tolist())]
        torch.testing.assert_close(saved.float(), log_probs[answered[row]], rtol=0.0, atol=0.0)

    assert torch.tensor([response.advantages[0] for response in responses]).std() > 0.1
