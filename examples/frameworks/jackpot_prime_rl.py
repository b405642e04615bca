"""A correction of Jackpot in prime-rl, as a custom loss. Read at prime-rl 559b447.

    [trainer.loss]
    type = "custom"
    import_path = "jackpot_prime_rl.jackpot_loss"

    [trainer.loss.kwargs]
    correction = "dppo"
    max_tv = 0.2

prime-rl calls the function for one sequence at a time, with the log-probs of the current policy: PPO's ratio is 1, as
with our `proximal: new`. It replaces prime-rl's own mask and its KL to the sampler (`kl_tau`). A weight of the `rl`
stream is kept. No other model may generate: prime-rl's configuration refuses that.
"""

from prime_rl.trainer.rl.loss import LossInputs, LossOutputs

import jackpot


def jackpot_loss(inputs: LossInputs, **correction) -> LossOutputs:
    log_probs, mask = inputs.trainer_logprobs, inputs.loss_mask
    weights, accept_mask, metrics = jackpot.correct(
        **correction,
        rollout_log_probs=inputs.inference_logprobs[None],
        target_log_probs=log_probs.detach()[None],
        response_mask=mask[None],
        advantages=inputs.advantages[None],
    )
    loss = -(accept_mask * weights)[0] * inputs.advantages * log_probs
    if inputs.loss_weights is not None:
        loss = loss * inputs.loss_weights
    return LossOutputs(loss=loss[mask].sum(), metrics={f"jackpot/{name}": one for name, one in metrics.items()})
