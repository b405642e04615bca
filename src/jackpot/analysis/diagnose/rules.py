"""The whole table of rules: when a metric is unhealthy, why, and how to mend the run. docs/metrics.md lists the limits.

The rules are in causal order, so that an earlier finding can cause a later one.
"""

from statistics import fmean

from jackpot.analysis.diagnose.causes import (
    ANSWERS,
    CAUSES,
    CHANCE,
    CLOSER,
    CORRECT,
    FEWER_STEPS,
    GAPS,
    MORE_TOP,
    NOTHING,
    OTHER_PROMPTS,
    SAME,
    SLOWER,
    WORSE,
)
from jackpot.analysis.diagnose.explained import (
    by_cap,
    by_capped_weights,
    by_frozen_rollouts,
    by_one_loss,
    by_proximal,
    by_proximal_of_rollout_model,
    by_rejection,
    by_single_responses,
    by_unused_z,
    unexplained,
)
from jackpot.analysis.diagnose.learning import (
    REWARDS,
    cut_limit,
    entropy_limit,
    learning_limit,
    sparse_limit,
    unlearning_limit,
)
from jackpot.analysis.diagnose.limits import (
    Rule,
    above_start,
    below_start,
    generation_batches_limit,
    increase,
    latest,
    learns_alone_limit,
    quantization_limit,
)

RULES: tuple[Rule, ...] = (
    *CAUSES,
    *(
        Rule(
            group="precision",
            metric=metric,
            high=quantization_limit(metric),
            aggregate=latest,
            explanation=f"the quantized engine of the {model} is so far from training that the correction decides "
            "what the policy learns",
            suggestion="set objective.correction=tis where it is none; set engine.quantization=null and "
            "engine.kv_cache_dtype=null to compare; `jackpot mismatch RUN` shows the gap",
        )
        for metric, model in GAPS.items()
    ),
    *(
        Rule(
            group="learning",
            metric=metric,
            low=unlearning_limit(metric, at_once=True),
            explained_by=explained,
            aggregate=aggregate,
            source=CHANCE,
            explanation=f"the learning rate is too high: {who} than at the start, and never did better",
            suggestion=f"{SLOWER}; {CORRECT}; {ANSWERS}",
        )
        for metric, who, aggregate, explained in WORSE
    ),
    *(
        Rule(
            group="signal",
            metric=metric,
            high=sparse_limit(0.9),
            explained_by=explained,
            explanation=text,
            suggestion=f"{ANSWERS}; {OTHER_PROMPTS}",
        )
        for metric, explained, text in (
            (
                "reward/all_wrong",
                by_single_responses,
                "almost every group has reward 0, so there is no gradient",
            ),
            (
                "reward/all_right",
                by_single_responses,
                "almost every group is all right, so there is no gradient",
            ),
            ("reward/frac_zero_std", unexplained, "the groups have equal rewards and teach the policy nothing"),
        )
    ),
    Rule(
        group="signal",
        metric="sampling/gen_batches",
        high=generation_batches_limit,
        explanation="even all rounds of dynamic sampling do not find groups of unequal rewards",
        suggestion="take easier or harder prompts (task), or raise batch.group_size",
    ),
    *(
        Rule(
            group="signal",
            metric=f"{model}/skipped_steps",
            high=sparse_limit(0.5),
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
            suggestion=f"{CLOSER}; without a correction {CORRECT}",
        )
        for metric in ("mismatch/kl_rollout_policy", "mismatch/kl_policy_rollout")
    ),
    Rule(
        group="mismatch",
        metric="obrs/acceptance",
        low=0.5,
        explained_by=by_rejection(0.5),
        explanation="half of the tokens are rejected and carry no gradient",
        suggestion=f"take a closer rollout_model.path; {CLOSER}",
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
        low=below_start(0.001, 0.5),
        explanation="the policy almost never samples some tokens that the rollout model still samples",
        suggestion=CLOSER,
    ),
    Rule(
        group="mismatch",
        metric="mismatch/ratio_max",
        high=1000.0,
        explained_by=by_capped_weights,
        explanation="single tokens with huge ratios dominate the gradient: the correction does not cap their weights",
        suggestion=f"cap the weights: {CORRECT}",
    ),
    Rule(
        group="mismatch",
        metric="mismatch/ess",
        low=0.1,
        explanation="plain importance sampling would learn from a tenth of the batch",
        suggestion=f"{CORRECT}; {CLOSER}",
    ),
    *(
        Rule(
            group="correction",
            metric=metric,
            high=0.1,
            explained_by=by_cap(*caps),
            explanation=f"the cap decides the correction: {reason}",
            suggestion=suggestion,
        )
        for metric, caps, reason, suggestion in (
            (
                "correction/clip_frac",
                ("c1", "cap"),
                "more than a tenth of the tokens is at the cap",
                f"raise objective.correction.c1; raise objective.correction.cap; {CLOSER}",
            ),
            ("correction/clip_frac_c2", ("c2",), "the batch is stale", FEWER_STEPS),
        )
    ),
    Rule(
        group="correction",
        metric="obrs/kappa",
        low=0.8,
        high=1.2,
        explanation="Z from the top-k is far from the true Z",
        suggestion=MORE_TOP,
    ),
    Rule(
        group="correction",
        metric="obrs/kappa_z_above_1",
        high=0.8,
        explained_by=by_unused_z,
        explanation="kappa corrects the mean and distorts single tokens",
        suggestion=f"{MORE_TOP}, or with an exact Z set objective.correction.kappa=none",
    ),
    Rule(
        group="correction",
        metric="obrs/z_bound_width",
        high=0.1,
        explained_by=by_unused_z,
        explanation="the top-k misses much of both distributions, so Z is uncertain",
        suggestion=MORE_TOP,
    ),
    Rule(
        group="correction",
        metric="correction/ess",
        over="mismatch/ess",
        low=0.5,
        explained_by=by_rejection(0.5),
        explanation="the correction costs more effective samples than the mismatch itself",
        suggestion=f"widen its band or raise its cap (objective.correction); {CORRECT}",
    ),
    Rule(
        group="correction",
        metric="policy/clip_frac",
        high=0.3,
        explained_by=by_proximal,
        explanation="the clip of the policy's ratio takes much of the gradient",
        suggestion=f"{FEWER_STEPS}; lower policy.optimizer.learning_rate",
    ),
    Rule(
        group="correction",
        metric="rollout_model/clip_frac",
        high=0.3,
        explained_by=by_proximal_of_rollout_model,
        explanation="PPO's clip removes much of the rollout model's gradient",
        suggestion=f"{FEWER_STEPS}; lower rollout_model.optimizer.learning_rate",
    ),
    *(
        Rule(
            group="models",
            metric=f"{model}/entropy",
            low=entropy_limit,
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
            low=unlearning_limit(metric, at_once=False),
            explained_by=explained,
            aggregate=aggregate,
            explanation=f"{who} than before: what the run had learned is lost",
            suggestion=f"go on from the checkpoint `best`; {CORRECT}; lower policy.optimizer.learning_rate",
        )
        for metric, who, aggregate, explained in WORSE
    ),
    *(
        Rule(
            group="models",
            metric=metric,
            low=learning_limit(metric),
            source=CHANCE,
            explained_by=by_frozen_rollouts if metric == REWARDS else unexplained,
            aggregate=fmean if metric == REWARDS else latest,
            explanation=f"{NOTHING}: {subject} not measurably above the start",
            suggestion=f"raise policy.optimizer.learning_rate; {ANSWERS}; raise evaluation.problems to see more",
        )
        for metric, subject in SAME.items()
    ),
    Rule(
        group="models",
        metric="eval/rollout_model_accuracy",
        high=learns_alone_limit,
        aggregate=latest,
        explanation="the rollout model learns and the policy unlearns",
        suggestion=f"{CORRECT}; raise rollout_model.distill_weight",
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
        high=cut_limit,
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
