"""A correction of Jackpot in AReaL, whose loss is wrapped. Read at AReaL 1.0.4 and 4aef98d.

`PPOActor` looks `grpo_loss_fn` up in its module at every update, so importing this file in every process that trains
replaces it: at the top of a script that torchrun starts, or, where a controller starts the workers, in the module that
its engine class comes from. Needed: `actor.use_decoupled_loss: true`, `prox_logp_method: recompute` and
`rejection_sampling: null`. Weights ride on the advantages; packed sequences are taken apart for corrections of whole
responses.
"""

import torch
from areal.trainer.ppo import actor
from torch.nn.utils.rnn import pad_sequence

import jackpot

CORRECTION = {"correction": "tis", "cap": 2.0}
theirs = actor.grpo_loss_fn


def grpo_loss_fn(logprobs, entropy, input_data, *args, rejection_sampling=None, use_decoupled_loss=False, **others):
    if rejection_sampling is not None or not use_decoupled_loss or input_data.get("prox_logp") is None:
        raise ValueError("set rejection_sampling: null, use_decoupled_loss: true and prox_logp_method: recompute")
    lengths = input_data["cu_seqlens"].diff().tolist()
    names = ("logprobs", "prox_logp", "loss_mask", "advantages")
    rollout, old, mask, advantages = (pad_sequence(input_data[name].split(lengths), batch_first=True) for name in names)
    weights, accept_mask, _ = jackpot.correct(
        **CORRECTION, rollout_log_probs=rollout, target_log_probs=old, response_mask=mask.bool(), advantages=advantages
    )
    rows = (weights * accept_mask * advantages).unbind()
    corrected = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
    settings = {"rejection_sampling": None, "use_decoupled_loss": True, **others}
    return theirs(logprobs, entropy, input_data | {"advantages": corrected}, *args, **settings)


actor.grpo_loss_fn = grpo_loss_fn
