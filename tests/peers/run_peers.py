"""Runs the peers' own code on fixed tensors and writes what it returns. Needs requirements.txt, not Jackpot.

    .venv-peers/bin/python tests/peers/run_peers.py tests/peers/recorded.json

verl's functions are called as they are. TRL corrects inside trainer methods: those are called on a trainer made without
`__init__`, where generation, rewards and the model's log-probs are our tensors. AReaL is not importable without its
launchers: the definitions needed are executed out of its installed files. All in float64, where the peer allows it.
"""

import ast
import importlib.util
import inspect
import json
import math
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch

RESPONSE_LIMIT = 12
MASK = [
    "############",
    "#######.....",
    "####...#####",
    "............",
    "############",
    "############",
    "#####.......",
    "#########...",
    "##########..",
    "############",
]


def make_inputs():
    """Tensors as nested lists. Log-probs are multiples of 1/1024, so that their differences are exact in float32."""
    dice = random.Random(0)

    def grid(value, step=1024):
        return round(value * step) / step

    def normal(mean, std, count=RESPONSE_LIMIT, step=1024):
        return [grid(max(-8.5, min(8.5, dice.gauss(mean, std))), step) for _ in range(count)]

    tails = [6.0, -6.0, 3.5, -4.25, 1.0, 0.5, -0.125, 9.0, 9.0, 9.0, -9.0, 0.0]
    hole = [*normal(0.0, 0.5, 4), 5.0, 5.0, -5.0, *normal(0.0, 0.5, 5)]
    near_one = [1.0, -1.0, 0.5, -0.5, 0.25, -0.25, 0.125, -0.125, 5 / 1024, -1 / 1024, 7.0, 7.0]
    log_ratios = [
        [0.0, *normal(0.3, 0.5, 11)],
        tails,
        hole,
        normal(0.0, 3.0),  # an empty response
        normal(8.0, 0.3),  # the product overflows float32
        normal(-3.0, 0.3),  # the product is below verl's exp(-20)
        [0.0] * RESPONSE_LIMIT,
        normal(0.0, 0.1),
        near_one,  # the geometric mean is within 0.1% of 1
        normal(-0.45, 0.3),
    ]
    rollout = [[grid(dice.uniform(-4.0, -0.1)) for _ in row] for row in MASK]
    target = [[p + r for p, r in zip(*rows, strict=True)] for rows in zip(rollout, log_ratios, strict=True)]
    return {
        "mask": [[int(mark == "#") for mark in row] for row in MASK],
        "rollout_log_probs": rollout,
        "target_log_probs": target,
        "new_log_probs": [[p + d for p, d in zip(row, normal(0.0, 0.4), strict=True)] for row in target],
        "advantages": normal(0.0, 1.0, len(MASK)),
        "token_rewards": [normal(0.0, 1.0, step=64) for _ in MASK],
        "values": [normal(0.0, 1.0, step=64) for _ in MASK],
        "rewards": [1.0, 0.0, 0.25, 0.5, 1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5],
        "groups": [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2],
        "response_rewards": [1.0, 0.0, 0.5, 1.0, 0.25, 0.0, 0.0, 1.0, 1.0, 0.5],
        "response_groups": [0, 0, 0, 0, 0, 1, 1, 1, 1, 1],
        "single_rewards": [1.0, 0.0, 0.5, 1.0, 0.25],
        "single_groups": [0, 0, 1, 2, 2],
        "logits": [[grid(dice.gauss(0.0, 2.0)) for _ in range(5)] for _ in range(3)],
    }


class Recorder:
    """The cases: what was called, where it stands, with what, and what came back."""

    def __init__(self):
        self.cases = {}

    def add(self, name, function, arguments, **results):
        if name in self.cases:
            raise ValueError(f"{name} is recorded twice")
        self.cases[name] = {
            "source": function if isinstance(function, str) else source_of(function),
            "arguments": arguments,
            "results": {key: rounded_lists(value) for key, value in results.items()},
        }


def source_of(function):
    """Return where a function is defined, as `package/file.py:line name`."""
    function = inspect.unwrap(function)
    path = Path(inspect.getsourcefile(function)).as_posix().split("site-packages/")[-1]
    return f"{path}:{inspect.getsourcelines(function)[1]} {function.__qualname__}"


def rounded_lists(value):
    """Return nested lists of numbers of 12 digits."""
    if isinstance(value, torch.Tensor):
        value = value.detach().tolist()
    if isinstance(value, list):
        return [rounded_lists(item) for item in value]
    return float(f"{value:.12g}")


# verl


def run_verl(record, inputs):
    """Record what verl's functions return."""
    from verl.trainer.ppo import core_algos as algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as correct
    from verl.utils import torch_functional

    mask, rollout, target = inputs.mask.double(), inputs.rollout_log_probs, inputs.target_log_probs

    def weigh(name, level, threshold):
        arguments = {"rollout_is": level, "rollout_is_threshold": threshold}
        weights = correct(target, rollout, mask, **arguments)[0].batch["rollout_is_weights"]
        record(name, correct, arguments, weights=weights)
        return weights

    weigh("verl/tis_2", "token", 2.0)
    weigh("verl/tis_3", "token", 3.0)
    weights = weigh("verl/tis_20", "token", 20.0)
    weigh("verl/is", "token", 1e12)
    weigh("verl/icepop", "token", "0.5_5.0")
    weigh("verl/icepop_from_1", "token", "1.0_5.0")
    weigh("verl/icepop_to_1", "token", "0.5_1.0")
    weigh("verl/seq_tis", "sequence", 2.0)
    weigh("verl/seq_icepop", "sequence", "0.5_2.0")
    weigh("verl/seq_icepop_from_1", "sequence", "1.0_2.0")
    weigh("verl/seq_icepop_to_1", "sequence", "0.5_1.0")

    def reject(name, option, threshold):
        arguments = {"rollout_rs": option, "rollout_rs_threshold": threshold}
        record(name, correct, arguments, mask=correct(target, rollout, mask, **arguments)[1])

    reject("verl/geometric_tight", "seq_mean_k1", "0.999_1.001")
    reject("verl/geometric", "seq_mean_k1", "0.8_1.25")
    reject("verl/geometric_lopsided", "seq_mean_k1", "0.9_2.0")
    reject("verl/rs_token_k1", "token_k1", "0.5_8.0")
    reject("verl/rs_seq_sum_k1", "seq_sum_k1", "0.5_8.0")
    reject("verl/rs_seq_mean_k3", "seq_mean_k3", 0.1)
    reject("verl/rs_seq_max_k3", "seq_max_k3", 1.0)

    def advantage(name, function, rewards, mask, groups=None, **arguments):
        group_arguments = {"index": groups.numpy()} if groups is not None else {}
        values, _ = function(rewards, mask, **group_arguments, **arguments)
        recorded_arguments = {key: vars(value) if key == "config" else value for key, value in arguments.items()}
        record(name, function, recorded_arguments, advantages=values)

    one_token = torch.ones(len(inputs.rewards), 1)
    outcome = inputs.rewards[:, None], one_token, inputs.groups
    single_outcome = inputs.single_rewards[:, None], torch.ones(len(inputs.single_rewards), 1), inputs.single_groups
    last_index = (mask * torch.arange(RESPONSE_LIMIT)).argmax(-1, keepdim=True)  # 0 of an empty response
    ragged_outcome = torch.zeros_like(mask).scatter(-1, last_index, inputs.response_rewards[:, None]), mask
    undiscounted = SimpleNamespace(gamma=1.0)
    advantage("verl/grpo", algos.compute_grpo_outcome_advantage, *outcome)
    advantage("verl/dr_grpo", algos.compute_grpo_outcome_advantage, *outcome, norm_adv_by_std_in_grpo=False)
    advantage("verl/grpo_vectorized", algos.compute_grpo_vectorized_outcome_advantage, *outcome)
    advantage("verl/rloo", algos.compute_rloo_outcome_advantage, *outcome)
    advantage("verl/rloo_vectorized", algos.compute_rloo_vectorized_outcome_advantage, *outcome)
    reinforce_pp = algos.compute_reinforce_plus_plus_outcome_advantage
    reinforce_pp_baseline = algos.compute_reinforce_plus_plus_baseline_outcome_advantage
    advantage("verl/reinforce_pp", reinforce_pp, *outcome[:2], config=undiscounted)
    advantage("verl/reinforce_pp_baseline", reinforce_pp_baseline, *outcome)
    advantage("verl/ragged/reinforce_pp", reinforce_pp, *ragged_outcome, config=undiscounted)
    advantage("verl/ragged/reinforce_pp_baseline", reinforce_pp_baseline, *ragged_outcome, inputs.response_groups)
    advantage("verl/single/grpo", algos.compute_grpo_outcome_advantage, *single_outcome)
    advantage("verl/single/rloo", algos.compute_rloo_outcome_advantage, *single_outcome)
    advantage("verl/single/rloo_vectorized", algos.compute_rloo_vectorized_outcome_advantage, *single_outcome)
    advantage("verl/single/reinforce_pp_baseline", reinforce_pp_baseline, *single_outcome)

    def gae(name, gamma, lam):
        function, arguments = algos.compute_gae_advantage_return, {"gamma": gamma, "lam": lam}
        values, returns = function(inputs.token_rewards, inputs.values, mask, **arguments)
        record(name, function, arguments, whitened_advantages=values, returns=returns)

    gae("verl/gae", 1.0, 0.95)
    gae("verl/gae_discounted", 0.99, 0.95)

    token_advantages = inputs.advantages[:, None].expand_as(target)

    def ppo(name, weights, mode="token-mean", clip_ratio_c=1e30):
        arguments = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": clip_ratio_c}
        arguments["loss_agg_mode"] = mode
        config = ActorSettings(clip_ratio=0.2, global_batch_info={}, **arguments)
        function = algos.compute_policy_loss_vanilla
        new_log_probs = inputs.new_log_probs.clone().requires_grad_()
        loss, _ = function(target, new_log_probs, token_advantages, mask, mode, config, weights)
        loss.backward()
        recorded_arguments = arguments | {"tis": None if weights is None else 20.0}
        record(name, function, recorded_arguments, loss=loss, gradient=new_log_probs.grad)

    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        loss = algos.agg_loss(inputs.values, mask, mode)
        record(f"verl/agg/{mode}", algos.agg_loss, {"loss_agg_mode": mode}, loss=loss)
        ppo(f"verl/ppo_tis/{mode}", weights, mode)
    ppo("verl/ppo", None)
    ppo("verl/ppo_dual_clip", None, clip_ratio_c=1.25)

    returns, clip = token_advantages, 0.2
    loss, _ = algos.compute_value_loss(inputs.token_rewards, returns, inputs.values, mask, clip)
    record("verl/value_loss", algos.compute_value_loss, {"cliprange_value": clip}, loss=loss)

    for kind in ("k1", "k2", "k3"):
        record(f"verl/kl/{kind}", algos.kl_penalty, {"kl_penalty": kind}, kl=algos.kl_penalty(target, rollout, kind))
    entropy = torch_functional.entropy_from_logits
    record("verl/entropy", entropy, {}, entropy=entropy(inputs.logits))


class ActorSettings(SimpleNamespace):
    """The settings of verl's ActorConfig that its loss reads."""

    def get(self, key, default=None):
        return getattr(self, key, default)


# TRL


def run_trl(record, inputs):
    """Record what the methods of TRL's trainers return."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
    from trl.trainer.utils import entropy_from_logits

    method = GRPOTrainer._generate_and_score_completions
    rewards = torch.zeros(len(inputs.mask))

    def weigh(name, mode, **bounds):
        arguments = {"mode": mode} | bounds
        settings = {f"vllm_importance_sampling_{key}": value for key, value in arguments.items()}
        trainer = trl_trainer(GRPOTrainer, GRPOConfig, use_vllm=True, num_generations=2, **settings)
        result = trl_score(trainer, inputs.mask, inputs.target_log_probs, inputs.rollout_log_probs, rewards)
        record(name, method, arguments, ratio=result["importance_sampling_ratio"])
        return result

    clip_default = GRPOConfig.__dataclass_fields__["vllm_importance_sampling_clip_max"].default
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        weigh(f"trl/{mode}", mode, clip_max=clip_default)
        weigh(f"trl/{mode}_2", mode, clip_max=2.0)
        weigh(f"trl/{mode}_band", mode, clip_min=0.5, clip_max=5.0 if mode == "token_mask" else 2.0)

    completions = weigh("trl/token_truncate_20", "token_truncate", clip_max=20.0)

    def ppo(name, is_corrected, **arguments):
        settings = {"epsilon_low": 0.2, "epsilon_high": 0.28, "use_vllm": is_corrected} | arguments
        trainer = trl_trainer(GRPOTrainer, GRPOConfig, **settings)
        new_log_probs = inputs.new_log_probs.clone().requires_grad_()
        trainer._get_per_token_logps_and_entropies = lambda *a, **k: (
            new_log_probs,
            torch.zeros_like(new_log_probs),
            None,
        )
        loss = trainer._compute_loss(trainer.model, completions | {"advantages": inputs.advantages})
        loss.backward()
        recorded_arguments = arguments | {
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "tis": 20.0 if is_corrected else None,
        }
        record(name, GRPOTrainer._compute_loss, recorded_arguments, loss=loss, gradient=new_log_probs.grad)

    for kind in ("grpo", "bnpo", "dr_grpo", "dapo"):
        ppo(f"trl/ppo_tis/{kind}", is_corrected=True, loss_type=kind)
    ppo("trl/ppo", is_corrected=False, loss_type="bnpo")
    ppo("trl/ppo_delta", is_corrected=False, loss_type="bnpo", delta=1.25)

    def advantage(name, trainer_class, config_class, **arguments):
        trainer = trl_trainer(trainer_class, config_class, num_generations=4, use_vllm=False, **arguments)
        one_token = torch.ones(len(inputs.rewards), 1, dtype=torch.int64)
        result = trl_score(trainer, one_token, one_token.double(), None, inputs.rewards)
        record(name, trainer_class._generate_and_score_completions, arguments, advantages=result["advantages"])

    for scale in ("group", "batch", "none"):
        advantage(f"trl/grpo_{scale}", GRPOTrainer, GRPOConfig, scale_rewards=scale)
    advantage("trl/rloo", RLOOTrainer, RLOOConfig, normalize_advantages=False, beta=0.0)
    advantage("trl/rloo_normalized", RLOOTrainer, RLOOConfig, normalize_advantages=True, beta=0.0)
    record("trl/entropy", entropy_from_logits, {}, entropy=entropy_from_logits(inputs.logits))


def trl_trainer(trainer_class, config_class, **settings):
    """A trainer with the config's defaults and nothing of `__init__`."""
    defaults = {f.name: f.default for f in config_class.__dataclass_fields__.values() if f.init}
    trainer = object.__new__(trainer_class)
    attributes = defaults | {
        "args": SimpleNamespace(**defaults | {"steps_per_generation": 1, "delta": settings.get("delta")}),
        "accelerator": SimpleNamespace(
            device=torch.device("cpu"),
            process_index=0,
            num_processes=1,
            gather=lambda value: value,
            reduce=lambda value, reduction: value,
        ),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "pad_to_multiple_of": None,
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "num_iterations": 1,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": RESPONSE_LIMIT,
        "reward_weights": torch.ones(1),
        "reward_funcs": ["reward"],
        "reward_func_names": ["reward"],
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    for key, value in (attributes | settings).items():
        setattr(trainer, key, value)
    return trainer


def trl_score(trainer, mask, log_probs, rollout_log_probs, rewards):
    """The trainer's own scoring of these responses; tokens masked within a response are a tool's."""
    lengths = [max((t + 1 for t, is_sampled in enumerate(row) if is_sampled), default=0) for row in mask.tolist()]
    ids = [[1] * length for length in lengths]

    def cut(rows):
        return [row[:length] for row, length in zip(rows.tolist(), lengths, strict=True)]

    if type(trainer).__name__ == "GRPOTrainer":
        rollout = None if rollout_log_probs is None else cut(rollout_log_probs)
        generation = [[1]] * len(ids), ids, cut(mask), ids, rollout, {}, None, None
    else:
        generation = [[1]] * len(ids), ids, ids
    trainer._generate = lambda prompts: generation
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (log_probs, None, None)
    trainer._calculate_rewards = lambda *args: rewards[:, None].clone()
    return trainer._generate_and_score_completions([{"prompt": "p"}] * len(ids))


# AReaL


def run_areal(record, inputs):
    """Record what AReaL's rejection sampling returns."""
    functional = "areal/utils/functional/functional.py"
    definition_names = "RejectionSamplingResult", "_check_bounds", "apply_rejection_sampling"
    config = definitions("areal/api/cli_args.py", ["RejectionSamplingConfig"])
    namespace = definitions(functional, definition_names, **config)
    source = f"{functional}:{namespace['lines']['apply_rejection_sampling']} apply_rejection_sampling"

    def reject(name, **arguments):
        settings = config["RejectionSamplingConfig"](**arguments)
        log_probs = inputs.target_log_probs, inputs.rollout_log_probs
        result = namespace["apply_rejection_sampling"](*log_probs, inputs.mask, None, settings)
        record(name, source, arguments, weights=result.behave_imp_weight, mask=result.loss_mask)

    reject("areal/drop_5", level="token", action="mask", metric="ratio", upper=5.0)
    reject("areal/drop_2", level="token", action="mask", metric="ratio", upper=2.0)
    reject("areal/band", level="token", action="mask", metric="ratio", lower=0.5, upper=5.0)
    reject("areal/clamp_2", level="token", action="clamp", metric="ratio", upper=2.0)
    reject("areal/geometric", level="sequence", action="mask", metric="ratio", lower=0.8, upper=1.25)
    reject("areal/geometric_lopsided", level="sequence", action="mask", metric="ratio", lower=0.5, upper=1.125)


def definitions(path, names, **names_in_scope):
    """These top-level definitions of an installed file, executed; `lines` says where each stands. KeyError if gone."""
    package, _, path_inside = path.partition("/")
    file = Path(importlib.util.find_spec(package).submodule_search_locations[0]) / path_inside
    nodes = {node.name: node for node in ast.parse(file.read_text()).body if hasattr(node, "name")}
    module = ast.Module([nodes[name] for name in names], type_ignores=[])
    namespace = {"__name__": __name__, "torch": torch, "dataclass": dataclass, "field": field} | names_in_scope
    exec(compile(module, file, "exec"), namespace)
    return namespace | {"lines": {name: nodes[name].lineno for name in names}}


def main(path):
    torch.set_default_dtype(torch.float64)
    inputs = make_inputs()
    recorder = Recorder()
    tensors = SimpleNamespace(**{name: torch.tensor(value) for name, value in inputs.items()})
    for run in (run_verl, run_trl, run_areal):
        run(recorder.add, tensors)
    for name, case in recorder.cases.items():
        if not all(map(math.isfinite, flat(case["results"]))):
            raise ValueError(f"{name} is not finite")
    document = {
        "origin": {
            "packages": {name: version(name) for name in ("verl", "trl", "areal", "torch")},
            "command": ".venv-peers/bin/python tests/peers/run_peers.py tests/peers/recorded.json",
            "date": date.today().isoformat(),
        },
        "inputs": inputs,
        "cases": recorder.cases,
    }
    Path(path).write_text(lines(document) + "\n")


def flat(value):
    """All numbers of nested lists and dicts in one list."""
    if isinstance(value, dict | list):
        return [x for item in (value.values() if isinstance(value, dict) else value) for x in flat(item)]
    return [value]


def lines(value, indent=""):
    """JSON with one innermost list or plain value a line."""
    if isinstance(value, dict) and value:
        rows = [f"{indent} {json.dumps(key)}: {lines(item, indent + ' ')}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + ",\n".join(f"{indent} {lines(item, indent + ' ')}" for item in value) + f"\n{indent}]"
    return json.dumps(value)


if __name__ == "__main__":
    main(sys.argv[1])
