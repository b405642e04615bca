"""Breaks every formula on purpose, one operator at a time: a test must notice.

`FORMULAS` names functions and the tests, whole files or single ones, of which at least one has to fail. A mutant that
computes the same stands in `EQUIVALENT` with the reason.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jackpot
from helpers.paths import TESTS
from mutants.operators import mutants

pytestmark = pytest.mark.mutants
PACKAGE = Path(jackpot.__file__).parent
CORRECTIONS = (
    *(f"objectives/test_{name}corrections.py" for name in ("", "ratio_", "signed_")),
    "objectives/test_attribution.py",
)
ROLLOUT_MODEL_STEPS = "training/test_rollout_model_steps.py"


def learner_tests(*names: str) -> tuple[str, ...]:
    """Name single tests of the learner: all of them take half a minute."""
    return tuple(f"training/test_learner.py::test_{name}" for name in names)


KAPPA = (
    *learner_tests(
        "kappa_is_the_one_of_the_whole_step",
        "a_prepass_is_taken_only_where_kappa_needs_it",
    ),
    "training/test_kappa.py::test_with_regularizers_auto_reads_twice",
    "training/test_kappa.py::test_each_step_begins_with_the_kappa_of_the_step_before",
)
REPAIR = tuple(
    f"training/test_kappa.py::test_{name}"
    for name in (
        "weights_that_differ_by_rounding_alone_are_not_repaired",
        "the_error_is_estimated_as_the_equation_says",
        "only_sequences_with_a_gradient_at_a_cap_are_read_again",
        "no_more_is_repaired_than_the_tolerance_needs",
        "the_repaired_step_is_that_which_knows_kappa_before",
        "a_cap_on_one_of_two_ranks_leaves_the_step_of_one",
    )
)
SKIPPED = learner_tests(
    "equal_rewards_skip_the_policy_alone",
    "a_model_that_nothing_pulls_has_no_momentum",
    "a_step_whose_tokens_are_all_rejected_is_skipped",
    "rejected_advantages_alone_are_nothing_to_learn",
    "a_step_without_any_token_moves_nothing_and_says_so",
    "a_non_finite_gradient_skips_both_models",
)
AGES = learner_tests(
    "fill_ins_need_the_writing_weights_in_training",
    "the_engine_is_compared_on_tokens_of_equal_weights",
    "the_kept_mass_is_that_of_what_the_engine_may_sample",
)
STEP_SIZE = learner_tests("the_rate_is_scaled_by_the_root_of_the_ess")
STEP = learner_tests(
    "a_single_step_costs_no_extra_forward_pass",
    "old_log_probs_are_those_before_the_first_update",
    "two_steps_are_those_of_the_float64_reference",
)
ANNEALED = "training/test_mixed_runs.py::test_a_killed_annealed_run_ends_as_the_whole_run"
MIXED = tuple(
    f"training/test_mixed_runs.py::test_{name}"
    for name in (
        "kappa_is_each_models_own",
        "a_mixed_step_is_the_sum_of_each_models_rollouts",
        "each_engine_is_compared_with_its_own_model",
    )
)
NOT_CARRIED = "training/test_kappa.py::test_kappa_is_one_where_the_models_do_not_overlap"
FORMULAS = {  # "file::function": tests
    **dict.fromkeys(
        ["models/drafts.py::verify", "models/drafts.py::tokens_per_verification"], ("models/test_drafts.py",)
    ),
    **dict.fromkeys(
        [f"objectives/obrs.py::{name}" for name in ("acceptance", "accept", "log_kept_mass", "exact_z", "weight")],
        ("objectives/test_obrs.py", *CORRECTIONS),
    ),
    "objectives/kernels/linear_head.py::LinearHead.z_for_budget": learner_tests(
        "a_budget_chooses_lam_so_that_z_is_the_budget",
        "a_budget_rejects_evenly_what_the_policy_generated",
    ),
    **dict.fromkeys(
        [f"objectives/kernels/support.py::{name}" for name in ("support_log_probs", "_RowProducts.backward")],
        ("objectives/kernels/test_support.py",),
    ),
    "objectives/obrs.py::topk_z": ("objectives/test_topk_z.py",),
    "objectives/obrs.py::kappa": CORRECTIONS,
    **dict.fromkeys(
        [
            f"objectives/losses.py::{name}"
            for name in ("_clipped", "clipped_surrogate", "_gspo", "_gmpo", "_cispo", "oapl")
        ],
        ("objectives/test_losses.py",),
    ),
    "objectives/losses.py::clipped_value_error": ("objectives/test_losses.py", "training/test_critic.py"),
    "objectives/losses.py::_seq_mean_token_mean": ("objectives/test_losses.py",),
    "objectives/losses.py::_seq_mean_token_sum_norm": ("objectives/test_losses.py",),
    "objectives/losses.py::k2": ("objectives/test_regularizers.py",),
    "objectives/losses.py::k3": ("objectives/test_regularizers.py",),
    **dict.fromkeys(
        [f"objectives/advantages.py::{name}" for name in ("grpo", "dr_grpo", "rloo", "opo", "oapl", "gae")],
        ("objectives/test_advantages.py",),
    ),
    **dict.fromkeys(
        [
            f"objectives/corrections/ratios.py::{name}"
            for name in ("tis", "icepop", "ipo", "difference", "seq_mask", "min_prefix")
        ],
        CORRECTIONS,
    ),
    **dict.fromkeys(
        [f"objectives/corrections/signed.py::{name}" for name in ("prefix", "f_tis", "dppo", "dppo_topk", "_tis_but")],
        CORRECTIONS,
    ),
    "objectives/corrections/budgeted.py::_capped": CORRECTIONS,
    "objectives/corrections/base.py::step_kappas": (*CORRECTIONS, *MIXED),
    **dict.fromkeys(
        [f"objectives/joint.py::{name}" for name in ("policy_terms", "policy_loss")],
        ("objectives/test_joint.py", "objectives/test_regularizers.py"),
    ),
    "objectives/joint.py::rollout_model_loss": ("objectives/test_joint.py",),
    "training/kappa.py::StepTotals.before_backward": KAPPA,
    **dict.fromkeys(
        [
            f"training/kappa.py::{name}"
            for name in ("KappaRepair.apply", "KappaRepair._repair", "KappaRepair._backward", "_delta", "_to_repair")
        ],
        REPAIR,
    ),
    "training/joint_optimizer.py::JointOptimizer.step": (ROLLOUT_MODEL_STEPS, *STEP_SIZE),
    "training/joint_optimizer.py::JointOptimizer._prepare": (ROLLOUT_MODEL_STEPS,),
    "training/joint_optimizer.py::JointOptimizer._reason_to_skip": (*SKIPPED, ROLLOUT_MODEL_STEPS),
    "training/joint_learner.py::JointLearner.train": (ROLLOUT_MODEL_STEPS, ANNEALED),
    "training/joint_learner.py::JointLearner.compute_old_log_probs": STEP,
    **dict.fromkeys(
        [f"training/joint_learner.py::JointLearner.{name}" for name in ("update", "_backward")],
        (*STEP, ROLLOUT_MODEL_STEPS, NOT_CARRIED),
    ),
    "training/gap_evidence.py::token_gaps": (*AGES, *MIXED),
    "objectives/metrics.py::lag": (ROLLOUT_MODEL_STEPS,),
    "training/joint_forward.py::JointForward.weights_are_current": (*AGES, *MIXED),
    "training/components.py::RunComponents.next_writers": (
        "training/test_drafted_runs.py::test_who_generates_or_drafts_next_needs_new_weights",
    ),
    "training/joint_optimizer.py::GradientAccumulator.add": (ROLLOUT_MODEL_STEPS,),
    "training/joint_optimizer.py::GradientSplit._measure": (ROLLOUT_MODEL_STEPS,),
    "training/joint_optimizer.py::split_numbers": (ROLLOUT_MODEL_STEPS,),
    "training/optimizer.py::ModelOptimizer.reduce": ("training/test_optimizer.py",),
    **dict.fromkeys(
        [
            f"training/iteration_metrics.py::{name}"
            for name in ("training_sums", "metric_values", "throughput", "_of_many")
        ],
        ("training/test_iteration_metrics.py",),
    ),
    **dict.fromkeys(
        [f"training/trainer.py::Trainer.{name}" for name in ("_finish_iteration", "_saves_rollouts", "_is_last")],
        (
            "training/test_trainer.py::test_evaluations_and_rollouts_are_due_as_the_settings_say",
            "training/test_trainer.py::test_other_weights_than_were_sent_end_the_run",
        ),
    ),
}
EQUIVALENT = {  # the name of a mutant: why it computes the same
    "KappaRepair.apply: (delta / (scale * old.weights)).abs() -> delta / (scale * old.weights)": (
        "where weights are min(kappa u, c), all differences of a step have one sign"
    ),
    "topk_z: (1.0 / scale).clamp(max=1.0) -> (1.0 / scale).clamp(min=1.0)": "it mends rounding alone",
    "dppo: advantages * log_ratio -> advantages / log_ratio": "where rho is 1 the total variation is 0",
    "clipped_value_error: (held > free).detach() -> held > free": "a comparison carries no gradient",
    "_clipped: ratio.detach() -> ratio": "clamp carries no gradient where the ratio is beyond the bound",
}

CASES = [
    (formula, number, mutant.name)
    for formula in FORMULAS
    for number, mutant in enumerate(mutants((PACKAGE / formula.split("::")[0]).read_text(), formula.split("::")[1]))
]


@pytest.fixture(scope="module")
def results() -> list[dict]:
    """Return what came of every mutant, and last, on the code as it is, of all tests that failed."""
    jobs = [
        {"file": str(PACKAGE / file), "function": function, "number": number, "tests": FORMULAS[formula]}
        for formula, number, _ in CASES
        for file, function in [formula.split("::")]
    ]
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    server = subprocess.run(
        [sys.executable, TESTS / "mutants" / "server.py"],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert server.returncode == 0, server.stderr
    return json.loads(server.stdout)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{formula}: {name}" for formula, _, name in CASES])
def test_a_test_notices_the_mutant(case, results):
    _, _, name = CASES[case]
    assert results[case]["failed"] is not None, results[case]["text"]

    survives = results[case]["failed"] == ""
    assert survives == (name in EQUIVALENT), f"{name}: {'survives' if survives else 'is noticed and is in EQUIVALENT'}"


def test_what_noticed_a_mutant_passes_on_the_code_as_it_is(results):
    """Where the mutants ran, and as they ran; the tests' other cases `make test` runs as well."""
    assert results[-1]["failed"] == "", f"{results[-1]['failed']}\n{results[-1]['text']}"


def test_every_exception_is_a_mutant():
    assert EQUIVALENT.keys() <= {name for _, _, name in CASES}
