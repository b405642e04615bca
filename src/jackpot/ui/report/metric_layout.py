"""Places every metric in a section of the report, in the order in which one looks for a fault.

Every metric is drawn once, by the first entry that names it; the last section, "Everything else", takes the rest.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metrics:
    """A chart of each metric whose whole name matches `pattern`, with its parts by sign and by position."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Together:
    """One chart of several metrics."""

    title: str
    metrics: dict[str, str]  # metric: its name in the legend


@dataclass(frozen=True, slots=True)
class Fan:
    """One chart of quantiles: a line with a band for a single arm, three lines for each of several arms."""

    title: str
    middle: str
    low: str
    high: str
    ends: tuple[str, str]  # names of low and high in the legend
    note: str


@dataclass(frozen=True, slots=True)
class Against:
    """One chart with a point for every iteration: one metric over another."""

    title: str
    x: str
    y: str
    note: str


@dataclass(frozen=True, slots=True)
class Spread:
    """A heatmap of how the tokens of the saved rollouts are distributed, iteration by iteration."""

    column: str  # a key of `distributions.COLUMNS`


Entry = Metrics | Together | Fan | Against | Spread


@dataclass(frozen=True, slots=True)
class Part:
    """One section of the report."""

    title: str
    intro: str
    entries: tuple[Entry, ...]


PARTS = (
    Part(
        "Accuracy and reward",
        "Does the policy learn? The evaluation gives both models the same held-out problems; rewards are those of the "
        "rollouts, so they measure the rollout model. A group whose responses are all right or all wrong has no "
        "advantage and teaches nothing.",
        (
            Metrics(r"eval/policy_accuracy"),
            Metrics(r"eval/rollout_model_accuracy"),
            Metrics(r"eval/[^/]+/(mean|pass)_at_k"),
            Metrics(r"eval/.*_pass_at_k"),
            Metrics(r"eval/.*_reward"),
            Metrics(r"eval/.*reward_errors"),
            Metrics(r"reward/.*"),
            Metrics(r"sampling/.*"),
        ),
    ),
    Part(
        "Bugs",
        "Is the fault a bug? The engine's log-probs must equal those of training up to rounding, no number may be "
        "missing or infinite, and files must be writable. A fault here explains the sections below.",
        (
            Metrics(r".*engine_gap(_max)?"),
            Metrics(r"rollout_model/weight"),
            Metrics(r"health/.*"),
            Metrics(r"response/(aborted|non_finite)"),
            Metrics(r".*/skipped_steps"),
            Metrics(r"(checkpoint|files)/.*"),
        ),
    ),
    Part(
        "Mismatch, before the correction",
        "How far is the rollout model from the policy? Ratios are p_policy / p_rollout_model of the sampled tokens, "
        "before any masking or clipping.",
        (
            Metrics(r"mismatch/kl_rollout_policy"),
            Metrics(r"mismatch/kl_policy_rollout"),
            Metrics(r"mismatch/kl_.*"),
            Fan(
                "Ratio: median, and from the 1st to the 99th percentile",
                "mismatch/ratio_p50",
                "mismatch/ratio_p1",
                "mismatch/ratio_p99",
                ("1st percentile", "99th percentile"),
                "The band should stay around 1. A falling lower edge means that the policy has given up tokens "
                "which the rollout model still generates.",
            ),
            Fan(
                "Ratio: median, and from the 0.1th to the 99.9th percentile",
                "mismatch/ratio_p50",
                "mismatch/ratio_p0.1",
                "mismatch/ratio_p99.9",
                ("0.1th percentile", "99.9th percentile"),
                "The tails of a plain importance weight.",
            ),
            Spread("ratio"),
            Metrics(r"mismatch/ratio.*"),
            Metrics(r"mismatch/ess"),
            Metrics(r"mismatch/prefix_ess"),
            Metrics(r"mismatch/.*"),
        ),
    ),
    Part(
        "Rejection (OBRS)",
        "Which share of the tokens can train the policy, and at which positions? Acceptance is the mean of "
        "min(1, ratio / lam), its expectation is Z, and kappa is the factor that makes both agree over a step. These "
        "metrics exist for every correction.",
        (
            Metrics(r"obrs/acceptance"),
            Together("Acceptance and Z", {"obrs/acceptance": "acceptance", "obrs/z": "Z"}),
            Metrics(r"obrs/acceptance_minus_z(_stderr)?"),
            Against(
                "Z against kappa",
                "obrs/z",
                "obrs/kappa",
                "One point for each iteration. At kappa = 1 the Z of the top-k is exact; far from it, raise "
                "sampling.num_top_log_probs.",
            ),
            Metrics(r"obrs/kappa"),
            Metrics(r"obrs/kappa_z_above_1"),
            Metrics(r"obrs/z_bound_width"),
            Together(
                "Captured probability",
                {"obrs/rollout_mass": "of the rollout model", "obrs/target_mass": "of the policy"},
            ),
            Metrics(r"obrs/.*"),
        ),
    ),
    Part(
        "After the correction",
        "Which share of the batch is left, and how much do single tokens count? The weight is the final factor on a "
        "token's gradient; a rejected token has weight 0.",
        (
            Metrics(r"correction/accepted"),
            Spread("weight"),
            Metrics(r"correction/weight"),
            Metrics(r"correction/weight_max"),
            Together(
                "Effective sample size, before and after the correction",
                {"mismatch/ess": "before", "correction/ess": "after"},
            ),
            Metrics(r"correction/ess"),
            Metrics(r"correction/clip_frac"),
        ),
    ),
    Part(
        "Staleness",
        "How old are the rollouts, and what does that cost? The lag counts the optimizer steps that a model took since "
        "the token was generated. On a stale batch the cap c2 and PPO's clip cut off weights.",
        (
            Metrics(r"lag/.*"),
            Together(
                "How far the policy moved on the batch: KL(old ‖ new), from sampled tokens",
                {"policy/approx_kl_k1": "k1", "policy/approx_kl_weighted": "k1, weighted by p_old / p_inf"},
            ),
            Metrics(r"policy/approx_kl_.*"),
            Metrics(r"correction/clip_frac_c2"),
            Metrics(r"(policy|rollout_model)/clip_frac"),
            Metrics(r"correction/.*"),
        ),
    ),
    Part(
        "Models",
        "Entropies, gradients and losses of the models. A loss does not measure progress.",
        (
            Metrics(r".*/entropy"),
            Metrics(r".*/grad_norm"),
            Metrics(r"rollout_model/distill_kl"),
            Together(
                "The two parts of the rollout model's gradient",
                {"rollout_model/ppo_grad_norm": "reward", "rollout_model/distill_grad_norm": "distillation"},
            ),
            Metrics(r"rollout_model/grad_cosine"),
            Metrics(r"critic/.*"),
            Metrics(r"(policy|rollout_model)/.*"),
        ),
    ),
    Part(
        "Length, tokens, time",
        "How long are the responses, and which part of the run takes the time?",
        (
            Metrics(r"response/.*"),
            Metrics(r"eval/.*[_/](tokens|truncated)"),
            Metrics(r"speed/.*"),
            Metrics(r"seconds/.*"),
            Metrics(r"cpu_seconds/.*"),
            Metrics(r"flops/.*"),
            Metrics(r"tokens/.*"),
        ),
    ),
    Part("Everything else", "Metrics that no other section names.", (Metrics(r".*"),)),
)

LOGARITHMIC = r".*(ratio_max|ratio_p[\d.]+|weight_max|grad_norm|engine_gap(_max)?|z_bound_width|log_ratio_variance)"
