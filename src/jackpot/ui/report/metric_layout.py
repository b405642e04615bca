"""Which metric stands where in a report: the order in which one looks for what is wrong.

Every entry is drawn once; a metric that no entry names comes last, under "Everything else".
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metrics:
    """Each metric that the whole of `pattern` matches, and those derived from it by sign and by position."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Together:
    """Several metrics in one chart."""

    title: str
    metrics: dict[str, str]  # metric: what the legend calls it


@dataclass(frozen=True, slots=True)
class Fan:
    """Quantiles: of one arm a line with a band, of several three lines each."""

    title: str
    middle: str
    low: str
    high: str
    ends: tuple[str, str]  # what low and high are called
    note: str


@dataclass(frozen=True, slots=True)
class Against:
    """A point for every iteration."""

    title: str
    x: str
    y: str
    note: str


@dataclass(frozen=True, slots=True)
class Spread:
    """How a column of the saved rollouts is distributed over the iterations: a key of `distributions.COLUMNS`."""

    column: str


Entry = Metrics | Together | Fan | Against | Spread


@dataclass(frozen=True, slots=True)
class Part:
    title: str
    intro: str
    entries: tuple[Entry, ...]


PARTS = (
    Part(
        "Accuracy and reward",
        "Does the policy learn? The evaluation asks both models the same held-out problems; rewards are of what was "
        "written for training, so they are the rollout model's. Where every response of a group is right, or every one "
        "is wrong, nothing is learnt.",
        (
            Metrics(r"eval/policy_accuracy"),
            Metrics(r"eval/rollout_model_accuracy"),
            Metrics(r"eval/[^/]+/(mean|pass)_at_k"),
            Metrics(r"eval/.*_pass_at_k"),
            Metrics(r"eval/.*_reward"),
            Metrics(r"reward/.*"),
            Metrics(r"sampling/.*"),
        ),
    ),
    Part(
        "Bugs",
        "Is it a bug and no algorithm? The engine's numbers must be those of training up to rounding, nothing may be "
        "missing or infinite, and files must be writable. Whatever is wrong here explains what follows.",
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
        "before anything is masked or capped.",
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
                "The whole should stay around 1. A lower edge that falls: the policy has given up tokens that the "
                "rollout model keeps writing.",
            ),
            Fan(
                "Ratio: median, and from the 0.1th to the 99.9th percentile",
                "mismatch/ratio_p50",
                "mismatch/ratio_p0.1",
                "mismatch/ratio_p99.9",
                ("0.1th percentile", "99.9th percentile"),
                "The tails that a plain importance weight would have to live with.",
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
        "How much of the text can teach the policy, and where? Acceptance is the mean of min(1, ratio / lam); its "
        "expectation is Z, and kappa is what makes the two agree over a step. All of it is measured for every "
        "correction.",
        (
            Metrics(r"obrs/acceptance"),
            Together("Acceptance and Z", {"obrs/acceptance": "acceptance", "obrs/z": "Z"}),
            Metrics(r"obrs/acceptance_minus_z(_stderr)?"),
            Against(
                "Z against kappa",
                "obrs/z",
                "obrs/kappa",
                "One point for each iteration. On the line kappa = 1 the Z of the top-k is the true one; far from it, "
                "more of the top-k has to be captured.",
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
        "What is left of the batch, and how much do single tokens count? The weight is the final factor on a token's "
        "gradient, 0 where it was rejected.",
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
        "How old is the text, and what does that cost? The lag counts the optimizer steps that a model took since the "
        "token was written. A stale batch runs into the cap c2 and into PPO's clip.",
        (
            Metrics(r"lag/.*"),
            Together(
                "How far the policy moved on the batch: KL(old ‖ new), from sampled tokens",
                {"policy/approx_kl_k1": "k1", "policy/approx_kl_weighted": "k1, weighted by p_old / p_inf"},
            ),
            Metrics(r"policy/approx_kl_.*"),
            Metrics(r"correction/clip_frac_c2"),
            Metrics(r"(policy|rollout_model)/clipped"),
            Metrics(r"correction/.*"),
        ),
    ),
    Part(
        "Models",
        "What training does to the models: entropies, gradients, losses. A loss is no measure of progress.",
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
        "How long responses are, and where the seconds go.",
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
    Part("Everything else", "Metrics that no other section knows.", (Metrics(r".*"),)),
)

LOGARITHMIC = r".*(ratio_max|ratio_p[\d.]+|weight_max|grad_norm|engine_gap(_max)?|z_bound_width|log_ratio_variance)"
