"""Every formula broken on purpose, one at a time: the test named beside it must notice.

A tuple is (file below src/jackpot, exact source, broken source, test that fails then). A snippet that no longer stands in
its file exactly once fails here, so the list cannot outlive the code.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import jackpot

TESTS = Path(__file__).parent
PACKAGE = Path(jackpot.__file__).parent

OBRS = "ops/test_obrs.py::test_"
REDUCE = "ops/test_reduce.py::test_"
HEAD = "ops/test_linear_head.py::test_"
CORRECTIONS = "objectives/test_corrections.py::test_"
SURROGATE = "objectives/test_surrogate.py::test_"
ADVANTAGES = "objectives/test_advantages.py::test_"
JOINT = "objectives/test_joint.py::test_"
PIPELINE = "objectives/test_pipeline.py::test_"
OPTIMIZER = "test_optimizer.py::test_"
LEARNER = "test_learner.py::test_"
BATCHING = "test_batching.py::test_"

MUTATIONS = {
    "ops/obrs.py": [
        ("(target_log_probs - rollout_log_probs - log_lam(lam)).clamp(max=0.0)", "(target_log_probs - rollout_log_probs + log_lam(lam)).clamp(max=0.0)", OBRS + "acceptance_is_the_ratio_over_lam_and_never_above_one"),
        ("- log_lam(lam)).clamp(max=0.0).exp()", "- log_lam(lam)).exp()", OBRS + "acceptance_is_the_ratio_over_lam_and_never_above_one"),
        ("return uniforms < acceptance", "return uniforms <= acceptance", OBRS + "the_coin_accepts_with_probability_a_and_is_certain_at_the_ends"),
        ("return uniforms < acceptance", "return uniforms > acceptance", OBRS + "the_coin_accepts_with_probability_a_and_is_certain_at_the_ends"),
        ("torch.minimum(rollout_log_probs, target_log_probs - log_lam(lam))", "torch.minimum(rollout_log_probs, target_log_probs)", OBRS + "z_is_the_expected_acceptance"),
        ("torch.minimum(rollout_log_probs, target_log_probs - log_lam(lam))", "torch.maximum(rollout_log_probs, target_log_probs - log_lam(lam))", OBRS + "z_at_lam_one_is_one_minus_total_variation"),
        ("return log_kept_mass(rollout_log_probs, target_log_probs, lam).exp().sum(-1)", "return log_kept_mass(rollout_log_probs, target_log_probs, lam).exp().mean(-1)", OBRS + "z_is_the_expected_acceptance"),
        ("return torch.log_softmax(log_kept_mass(rollout_log_probs, target_log_probs, lam), dim=-1)", "return log_kept_mass(rollout_log_probs, target_log_probs, lam)", OBRS + "post_rejection_is_the_distribution_of_accepted_tokens"),
        (".unsqueeze(-2)).all(-1)", ".unsqueeze(-2)).any(-1)", OBRS + "topk_bounds_and_masses_are_the_documented_ones_and_the_value_is_the_lower_bound"),
        ("filled = is_new & fill_valid.unsqueeze(-1)", "filled = is_new", OBRS + "topk_bounds_hold_the_exact_z_between_them"),
        ("unknown = is_new & ~fill_valid.unsqueeze(-1)", "unknown = is_new & fill_valid.unsqueeze(-1)", OBRS + "topk_bounds_hold_the_exact_z_between_them"),
        ("known = known + _masked_mass(log_kept_mass(fill_ins, target_top_log_probs, lam), filled)", "known = known + _masked_mass(log_kept_mass(fill_ins, target_top_log_probs, 1.0), filled)", OBRS + "topk_bounds_and_masses_are_the_documented_ones_and_the_value_is_the_lower_bound"),
        ("(rollout_top_log_probs.exp().sum(-1) + _masked_mass(fill_ins, filled))", "rollout_top_log_probs.exp().sum(-1)", OBRS + "topk_bounds_meet_at_the_exact_z_when_all_of_p_inf_is_captured"),
        ("rest = 1.0 - rollout_mass  # m", "rest = 0.5 * (1.0 - rollout_mass)  # m", OBRS + "topk_bounds_hold_the_exact_z_between_them"),
        ("- _masked_mass(target_top_log_probs, is_new)).clamp(min=0.0)", "- 0.0).clamp(min=0.0)", OBRS + "topk_bounds_and_masses_are_the_documented_ones_and_the_value_is_the_lower_bound"),
        ("kth = rollout_top_log_probs.min(-1, keepdim=True).values", "kth = rollout_top_log_probs.max(-1, keepdim=True).values", OBRS + "topk_bounds_and_masses_are_the_documented_ones_and_the_value_is_the_lower_bound"),
        ("unknown_mass + torch.minimum(rest, target_rest / scale))", "unknown_mass)", OBRS + "topk_bounds_hold_the_exact_z_between_them"),
        ("torch.minimum(rest, target_rest / scale)", "torch.minimum(rest, target_rest * scale)", OBRS + "topk_bounds_hold_the_exact_z_between_them"),
        ("ceiling = (1.0 / scale).clamp(max=1.0)", "ceiling = (1.0 / scale).clamp(max=0.9)", OBRS + "topk_bounds_hold_the_exact_z_between_them"),
        ("return ZEstimate(known, known, upper,", "return ZEstimate(upper, known, upper,", OBRS + "topk_bounds_and_masses_are_the_documented_ones_and_the_value_is_the_lower_bound"),
        ("acceptance_sum / z_sum.clamp(", "z_sum / acceptance_sum.clamp(", OBRS + "kappa_is_the_ratio_of_the_sums"),
        ("torch.maximum(target_log_probs - rollout_log_probs, floor)", "torch.minimum(target_log_probs - rollout_log_probs, floor)", OBRS + "the_weight_is_target_over_accepted_distribution"),
        ("(z.log() + torch.maximum(", "(torch.maximum(", OBRS + "the_weight_is_target_over_accepted_distribution"),
        ("reachable = (rollout * (target > 0)).sum(-1)", "reachable = rollout.sum(-1)", OBRS + "a_budget_above_the_reachable_mass_is_refused_and_says_what_is_reachable"),
        ("rho, order = torch.where(rollout > 0, target / rollout, math.inf).sort(-1)", "rho, order = torch.where(rollout > 0, target / rollout, 0.0).sort(-1)", OBRS + "lam_for_budget_counts_tokens_that_the_rollout_model_never_writes"),
        ("rollout_above = pad(from_here[..., 1:], (0, 1))", "rollout_above = from_here", OBRS + "lam_for_budget_is_accepted_at_exactly_that_rate"),
        ("rollout_above + target_up_to / rho, math.inf)", "rollout_above + target_up_to / rho, 0.0)", OBRS + "lam_for_budget_is_accepted_at_exactly_that_rate"),
        ("inside = inside.clamp(max=pad(rho[..., 1:], (0, 1), value=math.inf))", "inside = inside", OBRS + "lam_for_budget_is_accepted_at_exactly_that_rate"),
        (".squeeze(-1).clamp(min=smallest))", ".squeeze(-1).clamp(min=1.0))", OBRS + "obrs_at_the_budgets_lam_is_the_best_rule_with_that_budget"),
        ("if not lam > 0:", "if lam < 0:", OBRS + "a_lam_that_is_not_above_zero_is_refused"),
    ],
    "ops/reduce.py": [
        ("return torch.where(mask, values.double(), 0.0).sum()", "return (values.double() * mask).sum()", REDUCE + "what_stands_outside_the_mask_does_not_leak"),
        ("return (variance / self.count).sqrt()", "return variance.sqrt()", REDUCE + "a_mean_and_its_standard_error_are_those_of_the_masked_entries"),
        ("names = sorted(sums)", "names = list(sums)", REDUCE + "two_ranks_hold_the_sums_of_both"),
        ("dist.all_reduce(packed, op=dist.ReduceOp.MAX)", "dist.all_reduce(packed)", REDUCE + "two_ranks_hold_the_sums_of_both"),
    ],
    "ops/chunked_heads.py": [
        ("logits /= self.temperature", "logits *= self.temperature", HEAD + "one_head_is_the_full_softmax[plain-0.6-3]"),
        ("grad /= self.temperature", "grad *= self.temperature", HEAD + "one_head_is_the_full_softmax[plain-0.6-3]"),
        ("logits += self.bias", "logits -= self.bias", HEAD + "one_head_is_the_full_softmax[bias-1.0-3]"),
        ("bias_total += grad.sum(0)", "bias_total += grad[0]", HEAD + "one_head_is_the_full_softmax[bias-1.0-3]"),
        ("slope = 1.0 - logits.square()", "slope = 1.0 + logits.square()", HEAD + "one_head_is_the_full_softmax[soft_cap-1.0-3]"),
        ("-_expectation(probs, log_probs)]", "_expectation(probs, log_probs)]", HEAD + "one_head_is_the_full_softmax[plain-1.0-3]"),
        ("_expectation(p, log_p - log_q)", "_expectation(q, log_p - log_q)", HEAD + "two_heads_are_the_two_full_softmaxes[plain-0.4-3]"),
        ("_expectation(q, log_q - log_p)", "_expectation(p, log_q - log_p)", HEAD + "two_heads_are_the_two_full_softmaxes[plain-0.4-3]"),
        ("torch.minimum(q, p / plan.lam).sum(-1)", "torch.minimum(q, p * plan.lam).sum(-1)", HEAD + "two_heads_are_the_two_full_softmaxes[plain-0.4-3]"),
        ("grad = probs * -to_log_probs[:, None]", "grad = probs * to_log_probs[:, None]", HEAD + "gradcheck_of_one_head[plain]"),
        ("grad -= _weigh_(log_probs + entropy[:, None], probs, to_entropy)", "grad -= _weigh_(log_probs, probs, to_entropy)", HEAD + "gradcheck_of_one_head[plain]"),
        ("grad.addcmul_(policy.probs, to_forward[:, None], value=-1.0)", "grad.addcmul_(policy.probs, to_forward[:, None], value=1.0)", HEAD + "gradcheck_of_two_heads"),
        ("(rollout_model.log_probs - policy.log_probs).sub_(reverse_kl[:, None])", "(rollout_model.log_probs - policy.log_probs)", HEAD + "gradcheck_of_two_heads"),
    ],
    "ops/linear_head.py": [
        ("return JointOutput(*outputs, *values[4:], *constants[6:])", "return JointOutput(*outputs, *values[:3:-1], *constants[6:])", HEAD + "two_heads_are_the_two_full_softmaxes[plain-0.4-3]"),
        ("rollout_model = _head_of(self.rollout_model, rollout_model_hidden, self.rollout_model_soft_cap)", "rollout_model = _head_of(self.rollout_model, rollout_model_hidden, self.policy_soft_cap)", HEAD + "the_module_is_the_function_with_the_layers_own_parameters"),
    ],
    "objectives/advantages.py": [
        ("(counts - 1).clamp(min=1)).sqrt()", "counts).sqrt()", ADVANTAGES + "advantages_are_those_of_numpy"),
        ("centred / std.clamp(min=torch.finfo(std.dtype).tiny)", "centred / (std + 1e-4)", ADVANTAGES + "advantages_are_those_of_numpy"),
        ("return torch.where(equal, 0.0, rewards - mean)", "return rewards - mean", ADVANTAGES + "a_group_of_equal_rewards_gets_exactly_zero"),
        ("return torch.where(equal, 0.0, rewards - mean)", "return torch.where(equal, 0.0, rewards - rewards.mean())", ADVANTAGES + "advantages_are_those_of_numpy"),
        ("_group_sum(rewards, groups) / _group_sum(torch.ones_like(rewards), groups)", "_group_sum(rewards, groups) / len(rewards)", ADVANTAGES + "advantages_are_those_of_numpy"),
    ],
    "objectives/corrections.py": [
        ("ratio = (inputs.target_log_probs - inputs.rollout_log_probs).exp()", "ratio = (inputs.rollout_log_probs - inputs.target_log_probs).exp()", CORRECTIONS + "importance_sampling_weighs_by_the_whole_ratio"),
        ("ratio.clamp(max=self.cap)", "ratio.clamp(min=self.cap)", CORRECTIONS + "truncated_importance_sampling_caps_the_ratio"),
        ("share_capped=ratio > self.cap", "share_capped=ratio < self.cap", CORRECTIONS + "truncated_importance_sampling_caps_the_ratio"),
        ("z = (kappa * inputs.z.value.double()).to(rollout.dtype)", "z = inputs.z.value", CORRECTIONS + "kappa_spans_the_whole_step_and_sits_inside_the_clip"),
        ("weights = weight.clamp(max=self.c1) * to_proximal.clamp(max=self.c2)", "weights = (weight * to_proximal).clamp(max=self.c1)", CORRECTIONS + "obrs_is_its_equation_token_by_token"),
        ("weight.clamp(max=self.c1)", "weight", PIPELINE + "a_finite_c1_truncates_z_times_the_ratio_whatever_lam"),
        ("* to_proximal.clamp(max=self.c2)", "* to_proximal", CORRECTIONS + "obrs_is_its_equation_token_by_token"),
        ("to_proximal = (inputs.proximal_log_probs - target).exp()", "to_proximal = (target - inputs.proximal_log_probs).exp()", PIPELINE + "with_target_new_and_proximal_old_the_second_factor_carries_the_weight_over"),
        ("weight = obrs.weight(rollout, target, z, self.lam)", "weight = obrs.weight(rollout, target, z, 1.0)", PIPELINE + "the_pipeline_follows_the_target_at_the_states_of_the_rollout_model_up_to_z[2-0-2.5-sampled]"),
        ("accepted = obrs.acceptance(rollout, target, self.lam)\n", "accepted = obrs.acceptance(rollout, target, 1.0)\n", PIPELINE + "the_pipeline_follows_the_target_at_the_states_of_the_rollout_model_up_to_z[2-0-2.5-sampled]"),
        ('if self.totals == "none" or not totals:', "if not totals:", CORRECTIONS + "kappa_none_ignores_the_sums"),
        ('obrs.kappa(totals["acceptance"].total, totals["z"].total)', 'obrs.kappa(totals["z"].total, totals["acceptance"].total)', CORRECTIONS + "kappa_spans_the_whole_step_and_sits_inside_the_clip"),
        ('"expected": lambda acceptance, uniforms: acceptance,', '"expected": lambda acceptance, uniforms: torch.ones_like(acceptance),', CORRECTIONS + "the_expected_mask_is_the_mean_over_all_coins_with_no_variance_left"),
        ("torch.where(mask, weights, 0.0), torch.where(mask, kept, 0.0)", "weights * mask, kept * mask", CORRECTIONS + "what_stands_outside_the_mask_changes_nothing"),
        ("Mean.of(accepted - z.value, mask)", "Mean.of(accepted + z.value, mask)", CORRECTIONS + "measure_reports_acceptance_z_and_how_much_the_top_k_captured"),
        ("Mean.of(z > 1.0, mask)", "Mean.of(inputs.z.value > 1.0, mask)", CORRECTIONS + "kappa_z_above_one_is_counted_and_not_capped"),
        ("final = weights * kept", "final = weights", CORRECTIONS + "the_weight_metric_is_of_the_factor_that_multiplies_the_surrogate"),
        ('"is": lambda: ImportanceSampling(cap=math.inf),', '"is": lambda: ImportanceSampling(cap=2.0),', CORRECTIONS + "importance_sampling_weighs_by_the_whole_ratio"),
    ],
    "objectives/surrogate.py": [
        ("ratio = (log_probs - proximal_log_probs.detach()).exp()\n", "ratio = (proximal_log_probs.detach() - log_probs).exp()\n", SURROGATE + "the_surrogate_stops_only_where_the_policy_has_gone_far_enough"),
        ("(log_probs - proximal_log_probs.detach()).exp()", "(log_probs - proximal_log_probs).exp()", SURROGATE + "no_gradient_reaches_the_proximal_point"),
        ("ratio.clamp(1.0 - clip_low, 1.0 + clip_high)", "ratio.clamp(1.0 - clip_high, 1.0 + clip_low)", SURROGATE + "the_surrogate_stops_only_where_the_policy_has_gone_far_enough"),
        ("torch.minimum(ratio * advantages, clipped * advantages)", "torch.maximum(ratio * advantages, clipped * advantages)", SURROGATE + "the_surrogate_stops_only_where_the_policy_has_gone_far_enough"),
        ("torch.minimum(ratio * advantages, clipped * advantages)", "clipped * advantages", SURROGATE + "the_surrogate_stops_only_where_the_policy_has_gone_far_enough"),
        ("((ratio < 1.0 - clip_low) & (advantages < 0))", "((ratio < 1.0 - clip_low) & (advantages > 0))", SURROGATE + "the_clip_share_marks_where_the_clip_takes_the_gradient_away"),
        ("return losses.sum(), counted.sum()", "return losses.sum(), (counted > 0).sum()", SURROGATE + "an_aggregate_is_what_its_loop_says"),
        ("present = counts > 0", "present = counts >= 0", SURROGATE + "an_aggregate_is_what_its_loop_says"),
        ("losses.sum(-1) / torch.where(present, counts, 1.0)", "losses.mean(-1)", SURROGATE + "an_aggregate_is_what_its_loop_says"),
        ("float(losses.shape[0] * max_length)", "float(losses.shape[0] * losses.shape[1])", SURROGATE + "an_aggregate_is_what_its_loop_says"),
    ],
    "objectives/distill.py": [
        ('"forward": lambda head: head.forward_kl,', '"forward": lambda head: head.reverse_kl,', PIPELINE + "distillation_is_the_kl_at_every_state_that_the_rollout_model_visits"),
    ],
    "objectives/joint.py": [
        ("losses = -correction.accept_mask * correction.weights * surrogate", "losses = -correction.weights * surrogate", PIPELINE + "the_pipeline_follows_the_target_at_the_states_of_the_rollout_model_up_to_z[2-0-2.5-sampled]"),
        ("losses = -correction.accept_mask * correction.weights * surrogate", "losses = correction.accept_mask * correction.weights * surrogate", PIPELINE + "with_one_token_responses_it_is_the_on_policy_gradient_up_to_z"),
        ("z=anchor.z if objective.target == \"old\" else z,", "z=anchor.z,", PIPELINE + "with_target_and_proximal_new_the_new_policy_is_the_target_and_its_z_counts"),
        ("z=anchor.z if objective.target == \"old\" else z,", "z=z,", PIPELINE + "after_an_update_the_old_policy_is_the_target_and_the_ratio_leads_on_to_the_new_one"),
        ("target_log_probs=named[objective.target],", "target_log_probs=named[objective.proximal],", JOINT + "the_policys_loss_and_gradient_are_the_equation_token_by_token"),
        ("proximal_log_probs=named[objective.proximal],", "proximal_log_probs=named[objective.target],", JOINT + "the_policys_loss_and_gradient_are_the_equation_token_by_token"),
        ('"new": current.detach(),', '"new": current,', JOINT + "the_policys_loss_and_gradient_are_the_equation_token_by_token"),
        ("losses = objective.ppo_weight * ppo + objective.distill_weight * scores.distill_kl", "losses = objective.ppo_weight * ppo - objective.distill_weight * scores.distill_kl", PIPELINE + "distillation_is_the_kl_at_every_state_that_the_rollout_model_visits"),
        ("ppo = -weights * clipped_surrogate(log_probs, proximal,", "ppo = -clipped_surrogate(log_probs, proximal,", JOINT + "the_rollout_models_loss_and_gradient_are_eqs_6_and_7_over_all_response_tokens"),
        ("objective.aggregate(losses, mask.to(losses.dtype), max_length)", "objective.aggregate(losses, inputs.z.value, max_length)", JOINT + "the_rollout_model_divides_by_proposed_tokens_whatever_the_policy_counts"),
        ("named = references(anchor.rollout_model_old_log_probs, log_probs, batch.rollout_log_probs)", "named = references(anchor.old_log_probs, log_probs, batch.rollout_log_probs)", JOINT + "the_rollout_models_loss_and_gradient_are_eqs_6_and_7_over_all_response_tokens"),
        ("min(1.0, 1.0 / lam)", "min(1.0, lam)", JOINT + "a_policy_that_writes_for_itself_is_its_own_rollout_model"),
        ("fill_valid=current,", "fill_valid=torch.ones_like(current),", JOINT + "z_uses_fill_ins_only_where_the_writing_weights_are_still_in_training"),
        ("if not current.all():", "if not current.any():", JOINT + "the_exact_normaliser_refuses_tokens_of_other_weights_and_counts_them"),
        ('"accepted": lambda correction, mask: correction.accept_mask,', '"accepted": lambda correction, mask: (correction.accept_mask > 0).to(correction.weights.dtype),', JOINT + "the_loss_is_divided_by_what_the_settings_count"),
        ("out.index_put((mask,), values)", "out.index_put((mask,), values.detach())", JOINT + "the_policys_loss_and_gradient_are_the_equation_token_by_token"),
        ("Mean.of(log_ratio.exp() - 1.0 - log_ratio, mask)", "Mean.of(log_ratio.exp() - 1.0 + log_ratio, mask)", JOINT + "the_mismatch_is_reported_over_all_response_tokens_before_any_correction"),
        ("log_ratio = anchor.old_log_probs - batch.rollout_log_probs", "log_ratio = scores.log_probs - batch.rollout_log_probs", JOINT + "the_mismatch_is_reported_over_all_response_tokens_before_any_correction"),
        ("Max.of(batch.advantages.abs() * correction.accept_mask, batch.response_mask)", "Max.of(batch.advantages.abs(), batch.response_mask)", JOINT + "the_largest_advantage_is_reported_before_and_after_rejection"),
    ],
    "optimizer.py": [
        ("denominator or 1.0", "1.0", OPTIMIZER + "steps_are_adamw_on_the_mean_gradient"),
        ("denominator or 1.0", "denominator", OPTIMIZER + "a_denominator_of_zero_leaves_zero_gradients_zero"),
        ("(step + 1) / config.warmup_steps", "step / config.warmup_steps", OPTIMIZER + "the_learning_rate_warms_up_and_follows_its_schedule"),
        ("(step - config.warmup_steps) / span", "step / span", OPTIMIZER + "the_learning_rate_warms_up_and_follows_its_schedule"),
        ("0.5 * (1.0 + math.cos(math.pi * progress))", "1.0 + math.cos(math.pi * progress)", OPTIMIZER + "the_learning_rate_warms_up_and_follows_its_schedule"),
        ('group["lr"] = self.learning_rate', "pass", OPTIMIZER + "each_step_is_taken_at_its_scheduled_rate"),
        ('self.steps = state["steps"]', "pass", OPTIMIZER + "a_loaded_state_continues_bit_by_bit"),
        ("self.steps += 1\n        self.discard()", "self.steps += 1", OPTIMIZER + "steps_are_adamw_on_the_mean_gradient"),
    ],
    "learner.py": [
        ('optimizer.prepare(float(sums[f"{role}/loss"].count))', 'optimizer.prepare(float(sums["rollout_model/loss"].count))', LEARNER + "a_step_in_micro_batches_is_the_step_on_the_whole_batch[old-token-accepted-sampled]"),
        ("sums = add_sums(sums, loss.metrics)", "sums = dict(loss.metrics)", LEARNER + "a_step_in_micro_batches_is_the_step_on_the_whole_batch[old-token-accepted-sampled]"),
        ("if len(micro_batches) == 1:\n            return None, 0.0", "return None, 0.0", LEARNER + "kappa_is_the_one_of_the_whole_step"),
        ("anchor = micro.anchor or anchor_of(scores)\n", "anchor = anchor_of(scores)\n", LEARNER + "old_log_probs_of_several_steps_are_those_before_the_first_update[1]"),
        ("if not rows.keys() >= set(batch.uids):", "if not rows:", LEARNER + "old_log_probs_of_several_steps_are_those_before_the_first_update[1]"),
        ("(batch.versions[..., 1] == self.version.rollout_model) & self._faithful", "(batch.versions[..., 1] == self.version.rollout_model)", LEARNER + "fill_ins_are_used_only_while_the_writing_weights_are_in_training"),
        ("(batch.versions[..., 1] == self.version.rollout_model) & self._faithful", "torch.full_like(batch.response_mask, self._faithful)", LEARNER + "fill_ins_are_used_only_while_the_writing_weights_are_in_training"),
        ('normalizer = "topk" if is_anchored else self._objective.normalizer', "normalizer = self._objective.normalizer", LEARNER + "the_exact_normaliser_serves_every_step_on_a_batch_with_the_old_target"),
        ('self._previous = {name: sums[f"obrs/{name}"] for name in measured}', "self._previous = {}", LEARNER + "previous_kappa_is_that_of_the_step_before_and_one_at_first"),
        ('"previous": {name: list(entry) for name, entry in self._previous.items()},', '"previous": {},', LEARNER + "a_state_dict_round_trip_continues_bit_by_bit[previous]"),
        ("if not all(norm < float(\"inf\") for norm in norms.values()):", "if not norms[role] < float(\"inf\"):", LEARNER + "a_non_finite_gradient_skips_both_models_and_leaves_their_optimizers_as_they_were"),
        ('not sums["policy/largest_advantage"].value > 0', "False", LEARNER + "groups_of_equal_reward_skip_the_policy_and_train_the_rollout_model"),
        ('not sums["policy/largest_kept_advantage"].value > 0', "False", LEARNER + "when_everything_is_rejected_the_loss_is_zero_and_the_step_is_counted_as_skipped"),
        ("if norms[role] == 0.0:", "if False:", LEARNER + "a_rollout_model_that_nothing_pulls_is_not_moved_by_its_momentum"),
        ("rollout_model.requires_grad_(False)", "pass", LEARNER + "a_frozen_rollout_model_does_not_move_and_is_still_compared_with"),
        ("temperature=self._temperature,", "temperature=1.0,", LEARNER + "two_steps_are_those_of_the_float64_reference[changes5-1.5]"),
        ("(loss.policy + loss.rollout_model).backward()", "loss.policy.backward()", LEARNER + "two_steps_are_those_of_the_float64_reference[changes0-1.0]"),
    ],
}  # fmt: skip
CASES = [(file, *mutation) for file, mutations in MUTATIONS.items() for mutation in mutations]
IDS = [f"{file}:{snippet.splitlines()[0][:60]} -> {broken.splitlines()[0][:60]}" for file, snippet, broken, _ in CASES]


@pytest.fixture(scope="module")
def results() -> list[dict]:
    """What came of every mutation, and last of all tests together on the code as it is."""
    jobs = [{"file": file, "snippet": snippet, "broken": broken, "tests": [test]} for file, snippet, broken, test in CASES]
    jobs.append({"tests": sorted({test for *_, test in CASES})})
    server = subprocess.run(
        [sys.executable, TESTS / "mutation_server.py"], input=json.dumps(jobs), capture_output=True, text=True
    )
    assert server.returncode == 0, server.stderr
    return json.loads(server.stdout)


@pytest.mark.parametrize(("file", "snippet", "broken", "test"), CASES, ids=IDS)
def test_the_snippet_stands_in_the_code_exactly_once(file, snippet, broken, test):
    assert (PACKAGE / file).read_text().count(snippet) == 1
    assert snippet != broken


@pytest.mark.parametrize("number", range(len(CASES)), ids=IDS)
def test_the_named_test_notices_the_mutation(number, results):
    status, output = results[number]["status"], results[number]["output"]
    assert status != 0, f"{CASES[number][3]} still passes"
    assert status == 1, f"pytest ended with {status} instead of a failed test:\n{output}"


def test_the_named_tests_pass_on_the_code_as_it_is(results):
    assert results[-1]["status"] == 0, results[-1]["output"]
