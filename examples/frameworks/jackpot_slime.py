"""A correction of Jackpot in slime, as the function of `--custom-tis-function-path`. Read at slime 624b824 (0.3.1).

Put this file on PYTHONPATH and start slime with

    --use-tis --custom-tis-function-path jackpot_slime.jackpot_tis

`--tis-clip` and `--tis-clip-low` are not read. slime gives lists with a tensor for each sample, and divides by what it
counted before, so rejected tokens stay in the denominator. With `--context-parallel-size` above 1 it gives chunks of
log-probs beside whole masks: an error here.
"""

import torch
from torch.nn.utils.rnn import pad_sequence

import jackpot

CORRECTION = {"correction": "tis", "cap": 2.0}


def jackpot_tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **others):
    old, rollout, mask = (
        pad_sequence(list(rows), batch_first=True) for rows in (train_log_probs, rollout_log_probs, loss_masks)
    )
    weights, accept_mask, metrics = jackpot.correct(
        **CORRECTION, rollout_log_probs=rollout, target_log_probs=old, response_mask=mask.bool()
    )
    factor = torch.cat([row[: len(one)] for row, one in zip(weights * accept_mask, train_log_probs, strict=True)])
    shown = {f"jackpot/{name}": value.to(factor).expand_as(factor) for name, value in metrics.items()}
    return pg_loss * factor, loss_masks, shown
