"""Lists when a metric is unhealthy: the limits of docs/metrics.md as a table.

The rules are in causal order: an earlier finding can cause a later one.
"""

import math
from collections.abc import Mapping
from statistics import fmean

from jackpot.analysis.diagnose.explained import (
    by_cap,
    by_capped_weights,
    by_filter,
    by_frozen_rollouts,
    by_one_loss,
    by_proximal,
    by_proximal_of_rollout_model,
    by_rejection,
    by_share,
    by_single_responses,
    by_truncation,
    by_unused_z,
    by_weights_of_rollout_model,
    unexplained,
)
from jackpot.analysis.diagnose.learning import (
    EVALUATED,
    REWARDS,
    behind_at_start,
    below_start_unless_risen,
    cut_from_start,
    fallen,
    longer,
    never_unequal,
    risen,
    unless_cut_earn,
    unless_learning,
    unless_rewards_fell,
    unless_risen,
)
from jackpot.analysis.diagnose.limits import (
    Group,
    Rule,
    above_first_alone,
    above_start,
    all_rounds,
    below_start,
    clipped,
    increase,
    is_loose,
    is_uncorrected,
    latest,
    near_1,
    quantizing,
    rounding,
    since_later,
    spread,
    together,
    unless_back,
    where,
)

_CLOSER = (
    "raise rollout_model.distill_weight or rollout_model.optimizer.learning_rate; lower policy.optimizer.learning_rate"
)
_ANSWERS = "read answers (`jackpot sample RUN`): the template or the reward may be wrong"
_SLOWER = "lower policy.optimizer.learning_rate"
EXACT = "it is exact in a sound run"
CHANCE = "more than chance makes of it"
CASES = "healthy runs of research/doctor keep it"
LOOKS: Mapping[Group, str] = {  # what to look at, by the group of the finding; RUN is the run's folder
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
_OTHER_PROMPTS = "take other prompts (task), a larger batch.group_size, or batch.filter_groups={}"
_CORRECT = "set objective.correction=tis or what jackpot replay advises for this run"
_MORE_TOP = "raise sampling.num_top_log_probs"
_FEWER_STEPS = "raise batch.mini_batch_size or lower batch.ppo_epochs (fewer steps an iteration)"
_ENGINE = "look at the event engine_check; set guard.check_engine=true, engine.dtype=fp32 and precision=fp32 to compare"
ENGINE_GAP = "mismatch/engine_gap"
_GAPS = {
    ENGINE_GAP: "rollout model",
    "eval/rollout_model_engine_gap": "rollout model",
    "eval/policy_engine_gap": "policy",
}
_WORSE = (  # metric, who is worse, its aggregate, which settings explain that
    (EVALUATED[0], "the policy answers fewer held-out problems", latest, unexplained),
    (EVALUATED[1], "the policy earns less on held-out problems", latest, unexplained),
    (REWARDS, "the rollouts earn less", fmean, by_share),
)
NOTHING = "the run has learned nothing"
SAME = {
    EVALUATED[0]: "the policy's accuracy is",
    EVALUATED[1]: "the policy's reward is",
    REWARDS: "the rollouts' rewards are",
}

RULES: tuple[Rule, ...] = (
    *(
        Rule(
            group="bug",
            metric=metric,
            high=0.0,
            aggregate=max,
            explanation=f"{what} not finite",
            source=EXACT,
            suggestion=f"{_SLOWER}; set precision=fp32; cap the weights: {_CORRECT}",
            look="policy/grad_norm and mismatch/ratio_max just before: `jackpot report RUN`",
        )
        for metric, what in (
            ("health/non_finite_tokens", "log-probs of training are"),
            ("response/non_finite", "log-probs of the engine are"),
            ("health/non_finite_steps", "gradients are"),
        )
    ),
    *(
        Rule(
            group="bug",
            metric=f"events/{kind}_lost",
            high=unless_back(kind),
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
    *(
        Rule(
            group="bug",
            metric=f"engine/{name}",
            low=low,
            high=high,
            explained_by=by_truncation,
            aggregate=latest,
            source="where no gap is, it is " + sound,
            explanation=text,
            suggestion=suggestion,
        )
        for name, low, high, sound, text, suggestion in (
            (
                "bf16",
                -math.inf,
                0.9,
                "0.004 by chance",
                "the engine's log-probs are rounded to bf16, 3 digits, and the ratios with them",
                "have the engine report log-probs in fp32",
            ),
            (
                "off_by_one",
                -math.inf,
                0.5,
                "0",
                "the engine's log-probs are off by one: they are those of the token next to it",
                "shift them where the rollouts are made; set guard.check_engine=true",
            ),
            (
                "of_other_model",
                -math.inf,
                0.5,
                "0",
                "the models are swapped: the engine's log-probs are those of the other model",
                "give the engine the weights of rollout_model.path; set guard.check_engine=true",
            ),
            (
                "temperature",
                0.96,
                1.04,
                "1",
                "the engine samples at another temperature than training: it is that many times sampling.temperature",
                "have the engine sample at sampling.temperature; set guard.check_engine=true",
            ),
        )
    ),
    Rule(
        group="bug",
        metric=ENGINE_GAP,
        high=since_later(rounding(ENGINE_GAP)),
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
            high=rounding(metric),
            explained_by=by_truncation,
            aggregate=latest,
            explanation=f"engine and training give the same tokens of the {model} different probabilities",
            suggestion=_ENGINE,
        )
        for metric, model in _GAPS.items()
    ),
    Rule(
        group="bug",
        metric="engine/draws",
        low=-5.0,
        high=5.0,
        explained_by=by_filter,
        aggregate=together,
        source="standard errors; chance exceeds 5 once in a million runs",
        explanation="the engine reports one distribution and samples from another: top-p, top-k or a temperature is "
        "not in its log-probs",
        suggestion="have it return processed log-probs, after temperature, top_p and top_k",
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
        low=near_1(-0.1),
        high=near_1(0.1),
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
        metric="events/rollback",
        high=0.0,
        aggregate=latest,
        explanation="the policy collapsed, and the run went back to an earlier checkpoint; events.jsonl says why",
        suggestion=f"lower policy.optimizer.learning_rate, or {_CORRECT}",
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
            explanation=f"scoring {what}, and those responses count as wrong or have reward 0",
            suggestion=f"read events.jsonl; {hint}",
        )
        for metric, what, hint in (
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
        high=longer,
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
        + _SLOWER,
    ),
    Rule(
        group="data",
        metric="response/truncated",
        high=cut_from_start,
        explanation="responses are cut at the limit before they can earn anything",
        suggestion="raise sampling.max_new_tokens",
    ),
    Rule(
        group="data",
        metric="reward/mean",
        low=never_unequal,
        aggregate=spread,
        source="rewards differ where there is anything to learn",
        explanation="the run never had a reward to learn from: all responses earn the same",
        suggestion=f"{_ANSWERS}; {_OTHER_PROMPTS}",
    ),
    Rule(
        group="data",
        metric="eval/rollout_model_accuracy",
        high=behind_at_start,
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
        suggestion=f"widen its band (objective.correction.low, .high); {_CORRECT}",
    ),
    Rule(
        group="data",
        metric="policy/clip_frac",
        low=clipped,
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
        low=unless_rewards_fell(below_start_unless_risen),
        explanation="the entropy of the policy has collapsed, and the reward pays for it: one answer in each state",
        suggestion=f"raise objective.entropy_coeff; {_SLOWER}; mend the reward",
        look=LOOKS["models"],
    ),
    *(
        Rule(
            group="data",
            metric=metric,
            high=where(applies, above_start(0.25, 2.0)),
            explanation=f"the rollout model and the policy are far apart, they drift, and {what}",
            suggestion=suggestion,
            look=LOOKS["mismatch"],
        )
        for applies, what, suggestion in (
            (is_uncorrected, "nothing corrects it", f"{_CORRECT}; {_CLOSER}"),
            (is_loose, "no distillation holds them together", f"{_CLOSER}; set rollout_model.optimizer"),
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
    *(
        Rule(
            group="precision",
            metric=metric,
            high=quantizing(metric),
            aggregate=latest,
            explanation=f"the quantized engine of the {model} is so far from training that the correction decides "
            "what the policy learns",
            suggestion="set objective.correction=tis where it is none; set engine.quantization=null and "
            "engine.kv_cache_dtype=null to compare; `jackpot mismatch RUN` shows the gap",
        )
        for metric, model in _GAPS.items()
    ),
    *(
        Rule(
            group="learning",
            metric=metric,
            low=fallen(metric, at_once=True),
            explained_by=explained,
            aggregate=aggregate,
            source=CHANCE,
            explanation=f"the learning rate is too high: {who} than at the start, and never did better",
            suggestion=f"{_SLOWER}; {_CORRECT}; {_ANSWERS}",
        )
        for metric, who, aggregate, explained in _WORSE
    ),
    *(
        Rule(
            group="signal",
            metric=metric,
            high=unless_learning(0.9),
            explained_by=explained,
            explanation=text,
            suggestion=f"{_ANSWERS}; {_OTHER_PROMPTS}",
        )
        for metric, explained, text in (
            (
                "reward/all_wrong",
                by_single_responses,
                "hardly a group has a right response, so the policy gets no signal",
            ),
            (
                "reward/all_right",
                by_single_responses,
                "hardly a group has a wrong response, so these prompts give no signal",
            ),
            ("reward/frac_zero_std", unexplained, "the groups have equal rewards and teach the policy nothing"),
        )
    ),
    Rule(
        group="signal",
        metric="sampling/gen_batches",
        high=all_rounds,
        explanation="even all rounds of dynamic sampling do not find groups of unequal rewards",
        suggestion="take easier or harder prompts (task), or raise batch.group_size",
    ),
    *(
        Rule(
            group="signal",
            metric=f"{model}/skipped_steps",
            high=0.5,
            explanation=f"most optimizer steps of the {model.replace('_', ' ')} are not taken; events.jsonl says why",
            suggestion="read the events skipped_step; for equal rewards set batch.filter_groups={}",
        )
        for model in ("policy", "rollout_model", "critic")
    ),
    *(
        Rule(
            group="mismatch",
            metric=metric,
            high=above_start(0.25, 2.0),
            explanation="the rollout model and the policy drift apart",
            suggestion=f"{_CLOSER}; without a correction {_CORRECT}",
        )
        for metric in ("mismatch/kl_rollout_policy", "mismatch/kl_policy_rollout")
    ),
    Rule(
        group="mismatch",
        metric="obrs/acceptance",
        low=0.5,
        explained_by=by_rejection(0.5),
        explanation="the policy would not sample half of the tokens, which teach it nothing",
        suggestion=f"take a closer rollout_model.path; {_CLOSER}",
    ),
    Rule(
        group="mismatch",
        metric="mismatch/prefix_ess",
        low=below_start(0.05, 0.5),
        explanation="the policy is trained on prefixes that it would not sample itself",
        suggestion="take a closer rollout_model.path, or a smaller sampling.max_new_tokens",
    ),
    Rule(
        group="mismatch",
        metric="mismatch/kept_mass",
        low=0.98,
        explanation="top-p or top-k take so much of the rollout model's mass that the policy's ratios are too small",
        suggestion="set sampling.top_p=1 and sampling.top_k=0, or a sampling.top_k of at most "
        "sampling.num_top_log_probs, with which training renormalizes too",
    ),
    Rule(
        group="mismatch",
        metric="mismatch/ratio_p1",
        low=0.001,
        explanation="the policy almost never samples some tokens that the rollout model still samples",
        suggestion=_CLOSER,
    ),
    Rule(
        group="mismatch",
        metric="mismatch/ratio_max",
        high=1000.0,
        explained_by=by_capped_weights,
        explanation="single tokens with huge ratios dominate the gradient: the correction does not cap their weights",
        suggestion=f"cap the weights: {_CORRECT}",
    ),
    Rule(
        group="mismatch",
        metric="mismatch/ess",
        low=0.1,
        explanation="plain importance sampling would learn from a tenth of the batch",
        suggestion=f"{_CORRECT}; {_CLOSER}",
    ),
    *(
        Rule(
            group="correction",
            metric=metric,
            high=0.1,
            explained_by=by_cap(*caps),
            explanation=f"the cap decides the correction: {what}",
            suggestion=suggestion,
        )
        for metric, caps, what, suggestion in (
            (
                "correction/clip_frac",
                ("c1", "cap"),
                "more than a tenth of the tokens is at the cap",
                f"raise objective.correction.c1; raise objective.correction.cap; {_CLOSER}",
            ),
            ("correction/clip_frac_c2", ("c2",), "the batch is stale", _FEWER_STEPS),
        )
    ),
    Rule(
        group="correction",
        metric="obrs/kappa",
        low=0.8,
        high=1.2,
        explanation="Z from the top-k is far from the true Z",
        suggestion=_MORE_TOP,
    ),
    Rule(
        group="correction",
        metric="obrs/kappa_z_above_1",
        high=0.8,
        explained_by=by_unused_z,
        explanation="kappa corrects the mean and distorts single tokens",
        suggestion=f"{_MORE_TOP}, or with an exact Z set objective.correction.kappa=none",
    ),
    Rule(
        group="correction",
        metric="obrs/z_bound_width",
        high=0.1,
        explained_by=by_unused_z,
        explanation="the top-k misses much of both distributions, so Z is uncertain",
        suggestion=_MORE_TOP,
    ),
    Rule(
        group="correction",
        metric="correction/ess",
        over="mismatch/ess",
        low=0.5,
        explained_by=by_rejection(0.5),
        explanation="the correction costs more effective samples than the mismatch itself",
        suggestion=f"widen its band or raise its cap (objective.correction); {_CORRECT}",
    ),
    Rule(
        group="correction",
        metric="policy/clip_frac",
        high=0.3,
        explained_by=by_proximal,
        explanation="the clip of the policy's ratio takes much of the gradient",
        suggestion=f"{_FEWER_STEPS}; lower policy.optimizer.learning_rate",
    ),
    Rule(
        group="correction",
        metric="rollout_model/clip_frac",
        high=0.3,
        explained_by=by_proximal_of_rollout_model,
        explanation="PPO's clip removes much of the rollout model's gradient",
        suggestion=f"{_FEWER_STEPS}; lower rollout_model.optimizer.learning_rate",
    ),
    *(
        Rule(
            group="models",
            metric=f"{model}/entropy",
            low=below_start_unless_risen,
            explanation=f"the entropy of the {model.replace('_', ' ')} has collapsed: one answer in each state",
            suggestion="lower policy.optimizer.learning_rate; raise objective.entropy_coeff",
        )
        for model in ("policy", "rollout_model")
    ),
    *(
        Rule(
            group="models",
            metric=f"{model}/grad_norm",
            high=above_start(5.0, 10.0),
            explanation=f"the gradient of the {model.replace('_', ' ')} has grown tenfold",
            suggestion=f"lower {model}.optimizer.learning_rate or {model}.optimizer.max_grad_norm",
        )
        for model in ("policy", "rollout_model")
    ),
    *(
        Rule(
            group="models",
            metric=metric,
            low=fallen(metric, at_once=False),
            explained_by=explained,
            aggregate=aggregate,
            explanation=f"{who} than before: what the run had learned is lost",
            suggestion="set guard.rollback={}, or go on from the checkpoint `best`; "
            f"{_CORRECT}; lower policy.optimizer.learning_rate",
        )
        for metric, who, aggregate, explained in _WORSE
    ),
    *(
        Rule(
            group="models",
            metric=metric,
            low=risen(metric),
            source=CHANCE,
            explained_by=by_frozen_rollouts if metric == REWARDS else unexplained,
            aggregate=fmean if metric == REWARDS else latest,
            explanation=f"{NOTHING}: {what} not measurably above the start",
            suggestion=f"raise policy.optimizer.learning_rate; {_ANSWERS}; raise evaluation.problems to see more",
        )
        for metric, what in SAME.items()
    ),
    Rule(
        group="models",
        metric="eval/rollout_model_accuracy",
        high=above_first_alone,
        aggregate=latest,
        explanation="the rollout model learns and the policy unlearns",
        suggestion=f"{_CORRECT}; raise rollout_model.distill_weight",
    ),
    Rule(
        group="models",
        metric="rollout_model/ppo_grad_norm",
        over="rollout_model/distill_grad_norm",
        low=0.1,
        high=30.0,
        explained_by=by_one_loss,
        explanation="one of reward and distillation dominates the training of the rollout model",
        suggestion="balance rollout_model.ppo_weight and rollout_model.distill_weight",
    ),
    Rule(
        group="models",
        metric="rollout_model/grad_cosine",
        low=-0.9,
        explanation="the gradients of reward and distillation oppose each other in the rollout model",
        suggestion="lower rollout_model.ppo_weight",
    ),
    Rule(
        group="models",
        metric="critic/explained_variance",
        low=0.0,
        after_steps=100,
        explanation="the critic adds noise to the advantages",
        suggestion="raise critic.optimizer.learning_rate",
    ),
    Rule(
        group="length",
        metric="response/truncated",
        high=unless_cut_earn,
        explanation="many responses are cut at the limit",
        suggestion="raise sampling.max_new_tokens, or penalize length with objective.overlong_buffer",
    ),
    Rule(
        group="disk",
        metric="seconds/slowest",
        high=6.0,
        aggregate=latest,
        source="6 times the median of that phase, more than 5 s and 3 iterations too much",
        explanation="a phase of an iteration took many times its median",
        suggestion="see which one (`seconds/*`) and what else the machine did; a slow reward, a stuck engine",
        look="`seconds/*` in `jackpot report RUN`, and RUN/events.jsonl at that iteration",
    ),
    Rule(
        group="disk",
        metric="files/failed",
        high=0.0,
        aggregate=increase,
        explanation="files of rollouts or evaluations cannot be written; events.jsonl names them",
        suggestion="make room on the disk, lower rollouts.keep",
    ),
)
