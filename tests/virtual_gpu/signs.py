"""What `correct` notices of log-probs on a GPU, where reading a sign at once would wait for the device."""

import torch

from jackpot import correct
from jackpot.core.errors import DataError
from virtual_gpu.cuda import waits

SHAPE = (16, 20)


def waits_and_errors() -> list[tuple[list[str], str]]:
    """Return, for two calls with shifted log-probs and one with healthy ones: waits of the host, and the error."""
    rng = torch.Generator().manual_seed(0)
    rollout = -4.0 * torch.rand(*SHAPE, generator=rng)
    target = (rollout - 0.1 * torch.rand(*SHAPE, generator=rng)).cuda()
    rollout = rollout.cuda()
    return [_correct(rollout, columns) for columns in (target.roll(1, 1), target.roll(1, 1), target)]


def _correct(rollout: torch.Tensor, target: torch.Tensor) -> tuple[list[str], str]:
    mask = torch.ones(SHAPE, dtype=torch.bool, device="cuda")
    waits.take()
    try:
        correct("tis", rollout_log_probs=rollout, target_log_probs=target, response_mask=mask)
    except DataError as error:
        return sorted(waits.take()), str(error)
    return sorted(waits.take()), ""
