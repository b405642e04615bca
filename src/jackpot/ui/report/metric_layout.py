"""The sections of the report and the metrics in each, in the order in which one looks for a fault.

Every metric is drawn once, by the first entry that names it; the last section, "Everything else", takes the rest.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FirstOf:
    """An entry of the layout for a single chart, which shows the first of the entry's metrics that the runs have.

    The entry adds no charts by the sign of the advantage or by token position. Of its metrics, one that is a run's
    `Config.kl_metric` comes before the others.
    """

    metrics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CombinedChart:
    """An entry of the layout for one chart that shows several metrics together."""

    title: str
    metrics: dict[str, str]  # metric: its name in the legend
    note: str = ""


# A text is a regular expression: each metric whose whole name matches gets a chart, and further charts by the sign of
# the advantage and by token position.
Entry = str | FirstOf | CombinedChart


@dataclass(frozen=True, slots=True)
class LayoutSection:
    """A section of the report: its title, its introduction and its entries."""

    title: str
    intro: str
    entries: tuple[Entry, ...]
    is_folded: bool = False  # whether the page shows only the title, unless a value is beyond a limit


HEADLINE = "At a glance"
LAYOUT = (
    LayoutSection(
        HEADLINE,
        "Does the policy learn, how far is the rollout model from it, and which share of the tokens can train it?",
        (
            FirstOf(("eval/policy_accuracy", "eval/policy_reward")),
            FirstOf(("mismatch/kl_k3", "mismatch/kl_rollout_policy")),
            FirstOf(("obrs/acceptance",)),
        ),
    ),
    LayoutSection(
        "Accuracy and reward",
        "Does the policy learn? The evaluation gives both models the same held-out problems; rewards are those of the "
        "rollouts, so they measure the rollout model. A group whose responses are all right or all wrong has no "
        "advantage and teaches nothing.",
        (
            r"eval/policy_accuracy",
            r"eval/rollout_model_accuracy",
            r"eval/[^/]+/(mean|pass)_at_k",
            r"eval/.*_pass_at_k",
            r"eval/.*_reward",
            r"eval/.*reward_errors",
            r"eval/.*_stderr",
            r"reward/.*",
            r"sampling/.*",
        ),
    ),
    LayoutSection(
        "Sanity checks",
        "Is something broken? The engine's log-probs must equal those of training up to rounding, no number may be "
        "missing or infinite, and files must be writable. A fault here explains the sections below.",
        (
            r".*engine_gap(_max)?",
            r"rollout_model/weight",
            r"health/.*",
            r"response/(aborted|non_finite)",
            r".*/skipped_steps",
            r"(checkpoint|files)/.*",
        ),
        is_folded=True,
    ),
    LayoutSection(
        "Mismatch, before the correction",
        "How far is the rollout model from the policy? Ratios are p_policy / p_rollout_model of the sampled tokens, "
        "before any masking or clipping.",
        (
            r"mismatch/kl_rollout_policy",
            r"mismatch/kl_policy_rollout",
            r"mismatch/kl_.*",
            CombinedChart(
                "Ratio: median, and from the 1st to the 99th percentile",
                {
                    "mismatch/ratio_p50": "median",
                    "mismatch/ratio_p1": "1st percentile",
                    "mismatch/ratio_p99": "99th percentile",
                },
                "All three should stay around 1. A falling 1st percentile means that the policy has given up tokens "
                "which the rollout model still generates.",
            ),
            CombinedChart(
                "Ratio: median, and from the 0.1th to the 99.9th percentile",
                {
                    "mismatch/ratio_p50": "median",
                    "mismatch/ratio_p0.1": "0.1th percentile",
                    "mismatch/ratio_p99.9": "99.9th percentile",
                },
                "The tails of a plain importance weight.",
            ),
            r"mismatch/ratio.*",
            r"mismatch/ess",
            r"mismatch/prefix_ess",
            r"mismatch/.*",
        ),
    ),
    LayoutSection(
        "Rejection (OBRS)",
        "Which share of the tokens can train the policy, and at which positions? Acceptance is the mean of "
        "min(1, ratio / lam), its expectation is Z, and kappa is the factor that makes both agree over a step: 1 where "
        "the Z of the top k is exact; far from it, raise sampling.num_top_log_probs. These "
        "metrics exist for every correction.",
        (
            r"obrs/acceptance",
            CombinedChart("Acceptance and Z", {"obrs/acceptance": "acceptance", "obrs/z": "Z"}),
            r"obrs/acceptance_minus_z(_stderr)?",
            r"obrs/kappa",
            r"obrs/kappa_z_above_1",
            r"obrs/z_bound_width",
            CombinedChart(
                "Captured probability",
                {"obrs/rollout_mass": "of the rollout model", "obrs/target_mass": "of the policy"},
            ),
            r"obrs/.*",
        ),
    ),
    LayoutSection(
        "After the correction",
        "Which share of the batch is left, and how much do single tokens count? The weight is the final factor on a "
        "token's gradient; a rejected token has weight 0.",
        (
            r"correction/accepted",
            r"correction/weight",
            r"correction/weight_max",
            CombinedChart(
                "Effective sample size, before and after the correction",
                {"mismatch/ess": "before", "correction/ess": "after"},
            ),
            r"correction/ess",
            r"correction/clip_frac",
        ),
    ),
    LayoutSection(
        "Staleness",
        "How old are the rollouts, and what does that cost? The lag counts the optimizer steps that a model took since "
        "the token was generated. On a stale batch the cap c2 and PPO's clip cut off weights.",
        (
            r"lag/.*",
            CombinedChart(
                "How far the policy moved on the batch: KL(old ‖ new), from sampled tokens",
                {"policy/approx_kl_k1": "k1", "policy/approx_kl_weighted": "k1, weighted by p_old / p_inf"},
            ),
            r"policy/approx_kl_.*",
            r"correction/clip_frac_c2",
            r"(policy|rollout_model)/clip_frac",
            r"correction/.*",
        ),
        is_folded=True,
    ),
    LayoutSection(
        "Models",
        "Entropies, gradients and losses of the models. A loss does not measure progress.",
        (
            r".*/entropy",
            r".*/grad_norm",
            r"rollout_model/distill_kl",
            CombinedChart(
                "The two parts of the rollout model's gradient",
                {"rollout_model/ppo_grad_norm": "reward", "rollout_model/distill_grad_norm": "distillation"},
            ),
            r"rollout_model/grad_cosine",
            r"critic/.*",
            r"(policy|rollout_model)/.*",
        ),
        is_folded=True,
    ),
    LayoutSection(
        "Length, tokens, time",
        "How long are the responses, and which part of the run takes the time?",
        (
            r"response/.*",
            r"eval/(problems|.*[_/](tokens|truncated))",
            r"speed/.*",
            r"seconds/.*",
            r"cpu_seconds/.*",
            r"flops/.*",
            r"tokens/.*",
        ),
        is_folded=True,
    ),
    LayoutSection("Everything else", "Metrics that no other section names.", (r".*",), is_folded=True),
)

# Metrics that are drawn on a logarithmic axis.
LOGARITHMIC = r".*(ratio_max|ratio_p[\d.]+|weight_max|grad_norm|engine_gap(_max)?|z_bound_width|log_ratio_variance)"
