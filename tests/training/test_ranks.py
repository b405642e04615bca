"""Two ranks with half of the batch each take the steps that one process takes on the whole."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from helpers.ranks import run_rank, step
from helpers.runs import small_config
from jackpot.launch.build import make_components

CASES = {
    "accepted tokens, target new": (
        *("objective.count=accepted", "objective.correction.target=new"),
        *("rollout_model.distill_control.horizon=1", "rollout_model.distill_control.target=0.06"),
    ),
}
# A large eps makes AdamW's step linear in the gradient: equal steps mean equal gradients.
GRADIENT_DESCENT = [
    f"{model}.optimizer.{setting}"
    for model in ("policy", "rollout_model")
    for setting in ("eps=1.0", "learning_rate=1.0")
]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_take_the_steps_of_one(case: str, tmp_path: Path) -> None:
    config = small_config(*CASES[case], *GRADIENT_DESCENT)
    mp.start_processes(run_rank, args=(config, tmp_path), nprocs=2, start_method="fork")  # nothing is imported again
    whole = step(config, 0, 1)
    start = make_components(config).learner
    before = {"distill_weight": torch.tensor(config.rollout_model.distill_weight)}
    before |= {f"{role}/{name}": w for role in ("policy", "rollout_model") for name, w in start.weights(role)}
    for rank in range(2):
        ours = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        for name, expected in whole.items():
            moved = expected - before[name]
            assert torch.allclose(ours[name] - before[name], moved, rtol=1e-3, atol=1e-3 * float(moved.abs().max()))
    assert 0.81 < whole["distill_weight"] < 1.43  # neither error was clipped
    assert any(not torch.equal(whole[name], before[name]) for name in whole if name.startswith("policy"))
