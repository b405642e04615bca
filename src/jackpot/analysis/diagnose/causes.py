"""The first half of the rules that diagnose a run: faults of the machine, engine, prompts, rewards or settings.

The rules are in causal order, so that an earlier finding can cause a later one; the rules of `rules.py` follow.
"""

from collections.abc import Mapping
from statistics import fmean

from jackpot.analysis.diagnose.explained import (
    by_filter,
    by_proximal,
    by_rejection,
    by_share,
    by_truncation,
    by_weights_of_rollout_model,
    unexplained,
)
from jackpot.analysis.diagnose.learning import (
    EVALUATED,
    REWARDS,
    cut_limit_from_start,
    entropy_limit,
    equal_rewards_limit,
    paid_length_limit,
    swapped_models_limit,
    unlearning_limit_if_rewards_rose,
    unless_rewards_fell,
    unless_risen,
)
from jackpot.analysis.diagnose.limits import (
    Group,
    Rule,
    above_start,
    clip_limit,
    if_kept_at_first,
    increase,
    is_loose,
    is_uncorrected,
    latest,
    lost_engines_limit,
    only_for,
    ratio_limit,
    rounding_limit,
    spread,
)

CLOSER = (
    "raise rollout_model.distill_weight or rollout_model.optimizer.learning_rate; lower policy.optimizer.learning_rate"
)
ANSWERS = "read answers (`jackpot sample RUN`): the template or the reward may be wrong"
SLOWER = "lower policy.optimizer.learning_rate"
EXACT = "it is exact in a sound run"
CHANCE = "more than chance makes of it"
CASES = "healthy runs of research/doctor keep it"
LOOKS: Mapping[Group, str] = {  # what to look at, by the group of a finding; RUN stands for the run's folder
    "bug": "the newest events in RUN/events.jsonl, and `jackpot report RUN`, Tokens, coloured by ratio",
    "data": "prompts, answers and rewards: `jackpot sample RUN`, and the tokens of `jackpot report RUN`",
    "precision": "`jackpot mismatch RUN`",
    "learning": "answers before and after: `jackpot sample RUN`",
    "signal": "prompts, answers and rewards: `jackpot sample RUN`",
    "mismatch": "the tokens of the largest ratio: `jackpot report RUN`, Tokens, coloured by ratio",
    "correction": "the tokens with the weight 0: `jackpot report RUN`, Tokens, coloured by weight",
    "models": "answers before and after: `jackpot sample RUN`",
    "length": "the longest answers: `jackpot sample RUN`",
    "disk": "RUN/events.jsonl",
}
OTHER_PROMPTS = "take other prompts (task), a larger batch.group_size, or batch.filter_groups={}"
CORRECT = "set objective.correction=tis or what jackpot replay advises for this run"
MORE_TOP = "raise sampling.num_top_log_probs"
FEWER_STEPS = "raise batch.mini_batch_size or lower batch.ppo_epochs (fewer steps an iteration)"
_ENGINE = "look at the event engine_check; set guard.check_engine=true, engine.dtype=fp32 and precision=fp32 to compare"
ENGINE_GAP = "mismatch/engine_gap"
GAPS = {  # metric of the mean |p_engine - p_training| -> the model that the engine holds
    ENGINE_GAP: "rollout model",
    "eval/rollout_model_engine_gap": "rollout model",
    "eval/policy_engine_gap": "policy",
}
WORSE = (  # (metric, text on what its fall means, aggregate of a window of values, settings that explain a fall)
    (EVALUATED[0], "the policy answers fewer held-out problems", latest, unexplained),
    (EVALUATED[1], "the policy earns less on held-out problems", latest, unexplained),
    (REWARDS, "the rollouts earn less", fmean, by_share),
)
NOTHING = "the run has learned nothing"
SAME = {  # metric that rises if the policy learns -> subject and verb of the sentence that the metric has not risen
    EVALUATED[0]: "the policy's accuracy is",
    EVALUATED[1]: "the policy's reward is",
    REWARDS: "the rollouts' rewards are",
}

CAUSES: tuple[Rule, ...] = (
    *(
        Rule(
            group="bug",
            metric=metric,
            high=0.0,
            aggregate=max,
            explanation=f"{subject} not finite",
            source=EXACT,
            suggestion=f"{SLOWER}; set precision=fp32; cap the weights: {CORRECT}",
            look="policy/grad_norm and mismatch/ratio_max just before: `jackpot report RUN`",
        )
        for metric, subject in (
            ("health/non_finite_tokens", "log-probs of training are"),
            ("response/non_finite", "log-probs of the engine are"),
            ("health/non_finite_steps", "gradients are"),
        )
    ),
    *(
        Rule(
            group="bug",
            metric=f"events/{kind}_lost",
            high=lost_engines_limit(kind),
            aggregate=latest,
            source="as often as it came back, and twice",
            explanation="an engine is dead or dies again and again",
            suggestion="read its own error, in the output of the run and at the event; give it more memory or time "
            "(engine, placement.timeout)",
        )
        for kind in ("peer", "server")
    ),
    Rule(
        group="bug",
        metric="events/stopped",
        high=0.0,
        aggregate=latest,
        explanation="the run stopped itself",
        source=EXACT,
        suggestion="mend what the reason names, and continue by the same command",
    ),
    Rule(
        group="bug",
        metric=ENGINE_GAP,
        high=if_kept_at_first(rounding_limit(ENGINE_GAP)),
        explained_by=by_truncation,
        aggregate=latest,
        source="what rounding explains",
        explanation="the engine goes on with old weights: its log-probs were right and are not any more",
        suggestion="mend what sends the weights (update_weights); set guard.check_engine=true",
    ),
    *(
        Rule(
            group="bug",
            metric=metric,
            high=rounding_limit(metric),
            explained_by=by_truncation,
            aggregate=latest,
            explanation=f"engine and training give the same tokens of the {model} different probabilities",
            suggestion=_ENGINE,
        )
        for metric, model in GAPS.items()
    ),
    Rule(
        group="bug",
        metric="obrs/acceptance_error",
        high=1.0,
        explained_by=by_filter,
        aggregate=latest,
        explanation="acceptance and Z differ by more than chance: the engine's sampled tokens and its top-k lists are "
        "not of one distribution",
        suggestion=_ENGINE,
    ),
    Rule(
        group="bug",
        metric="mismatch/ratio",
        low=ratio_limit(-0.1),
        high=ratio_limit(0.1),
        explained_by=by_truncation,
        explanation="the ratios of policy to engine do not average to 1: the engine samples from another distribution",
        suggestion="set sampling.top_p=1 and sampling.top_k=0, and guard.check_engine=true",
    ),
    Rule(
        group="bug",
        metric="mismatch/kl_k1",
        low=-0.02,
        explanation="a KL estimated from sampled tokens is negative: the engine does not sample as it reports",
        suggestion=_ENGINE,
    ),
    Rule(
        group="bug",
        metric="rollout_model/weight",
        low=0.9,
        high=1.1,
        explained_by=by_weights_of_rollout_model,
        explanation="the engine's weights are not those of the rollout model in training",
        suggestion="raise batch.mini_batch_size, or set rollout_model.update=iteration",
    ),
    Rule(
        group="bug",
        metric="response/aborted",
        high=0.0,
        aggregate=max,
        explanation="the engine aborted responses; events.jsonl names them",
        suggestion="read the engine's log; lower engine.max_num_seqs",
    ),
    Rule(
        group="bug",
        metric="events/corrupt_checkpoint",
        high=0.0,
        aggregate=latest,
        explanation="a checkpoint was corrupt, and an older one was used",
        suggestion="check the disk; raise checkpoint.keep",
    ),
    Rule(
        group="bug",
        metric="checkpoint/failed",
        high=0.0,
        aggregate=increase,
        explanation="checkpoints cannot be written, and a kill now loses everything since the newest one",
        suggestion="make room on the disk, lower checkpoint.keep or rollouts.keep",
    ),
    *(
        Rule(
            group="data",
            metric=f"saved/{name}",
            high=limit,
            aggregate=latest,
            source=CASES,
            explanation=text,
            suggestion=suggestion,
        )
        for name, limit, text, suggestion in (
            (
                "ambiguous_prompts",
                0.2,
                "the prompts are cut: one prompt stands for problems with different answers",
                "read the prompts as the model does (`prompt` in RUN/rollouts): mend the template, or what cuts them",
            ),
            (
                "repeated_prompts",
                0.45,
                "the same prompt comes again and again within a batch",
                "remove duplicates from the problems (task); shuffle them",
            ),
        )
    ),
    *(
        Rule(
            group="data",
            metric=metric,
            high=0.01,
            explanation=f"scoring {fault}, and those responses count as wrong or have reward 0",
            suggestion=f"read events.jsonl; {hint}",
        )
        for metric, fault, hint in (
            ("reward/timeouts", "takes longer than its limit", "raise task.reward_timeout or task.reward_workers"),
            ("reward/errors", "fails", "a reward function raises, ends its process or returns no number"),
        )
    ),
    Rule(
        group="data",
        metric="saved/end_inside",
        high=0.3,
        aggregate=latest,
        source=CASES,
        explanation="responses go on after an end-of-sequence token: the stop tokens are wrong",
        suggestion="set sampling.stop_token_ids, or the end-of-sequence token of the model's generation config",
    ),
    Rule(
        group="data",
        metric="saved/ended_by_stop_ids",
        high=unless_risen(0.9),
        aggregate=latest,
        source=CASES,
        explanation="a stop token ends the responses, and the policy is no better: it may end them too early",
        suggestion="read what the responses end with; set sampling.stop_token_ids=[]",
    ),
    Rule(
        group="data",
        metric="response/tokens",
        high=paid_length_limit,
        source="1.3 times the start, with a correlation of reward and length above 0.5",
        explanation="responses get longer and not better: the reward pays for length",
        suggestion="mend the reward; penalize length with objective.overlong_buffer",
        look="long answers and their rewards: `jackpot sample RUN`",
    ),
    Rule(
        group="data",
        metric="saved/right_earn",
        low=-0.5,
        aggregate=latest,
        source="right responses earn more than wrong ones",
        explanation="the reward has the wrong sign: right responses earn less than wrong ones",
        suggestion="turn the sign of the reward (task)",
    ),
    Rule(
        group="data",
        metric="saved/commonest",
        high=unless_rewards_fell(0.9),
        aggregate=latest,
        source=CASES,
        explanation="the policy gives the same answer to every problem, and the reward pays for it",
        suggestion="mend the reward or balance the answers of the problems (task); raise objective.entropy_coeff; "
        + SLOWER,
    ),
    Rule(
        group="data",
        metric="response/truncated",
        high=cut_limit_from_start,
        explanation="responses are cut at the limit before they can earn anything",
        suggestion="raise sampling.max_new_tokens",
    ),
    Rule(
        group="data",
        metric="reward/mean",
        low=equal_rewards_limit,
        aggregate=spread,
        source="rewards differ where there is anything to learn",
        explanation="the run never had a reward to learn from: all responses earn the same",
        suggestion=f"{ANSWERS}; {OTHER_PROMPTS}",
    ),
    Rule(
        group="data",
        metric="eval/rollout_model_accuracy",
        high=swapped_models_limit,
        aggregate=latest,
        source="2 standard errors at iteration 0, of a rollout model that costs more FLOPs than the policy",
        explanation="the models may be swapped: the rollout model answers better than the policy from the start",
        suggestion="exchange policy.path and rollout_model.path",
        look="`policy.path` and `rollout_model.path` in RUN/config.yaml; both models' answers: `jackpot sample RUN`",
    ),
    Rule(
        group="data",
        metric="correction/accepted",
        low=0.05,
        explained_by=by_rejection(0.05),
        explanation="the correction drops nearly every token",
        look=LOOKS["correction"],
        suggestion=f"widen its band (objective.correction.low, .high); {CORRECT}",
    ),
    Rule(
        group="data",
        metric="policy/clip_frac",
        low=clip_limit,
        aggregate=max,
        explained_by=by_proximal,
        source="with an approx_kl above 0.005 some ratios are outside of any usual clip",
        explanation="the clip never acts, however far the policy moves: its ratio is not to the policy before",
        look="`policy/clip_frac` beside `policy/approx_kl_k3`: `jackpot report RUN`",
        suggestion="set objective.correction.proximal=old; lower objective.clip_low and objective.clip_high",
    ),
    Rule(
        group="data",
        metric="policy/entropy",
        low=unless_rewards_fell(entropy_limit),
        explanation="the entropy of the policy has collapsed, and the reward pays for it: one answer in each state",
        suggestion=f"raise objective.entropy_coeff; {SLOWER}; mend the reward",
        look=LOOKS["models"],
    ),
    *(
        Rule(
            group="data",
            metric=EVALUATED[0],
            low=unlearning_limit_if_rewards_rose(EVALUATED[0], at_once=at_once),
            aggregate=latest,
            source=CHANCE,
            explanation="the reward pays for something else: rewards rise, and right answers become fewer",
            suggestion="mend the reward (task)",
        )
        for at_once in (True, False)
    ),
    *(
        Rule(
            group="data",
            metric=metric,
            high=only_for(applies, above_start(0.25, 2.0)),
            explanation=f"the rollout model and the policy are far apart, they drift, and {reason}",
            suggestion=suggestion,
            look=LOOKS["mismatch"],
        )
        for applies, reason, suggestion in (
            (is_uncorrected, "nothing corrects it", f"{CORRECT}; {CLOSER}"),
            (is_loose, "no distillation holds them together", f"{CLOSER}; set rollout_model.optimizer"),
        )
        for metric in ("mismatch/kl_rollout_policy", "mismatch/kl_policy_rollout")
    ),
    Rule(
        group="data",
        metric="saved/held_out",
        high=0.05,
        aggregate=latest,
        source=CASES,
        explanation="held-out problems are trained on, so evaluations show what is known by heart",
        suggestion="take other problems for evaluations (task.test)",
    ),
)
