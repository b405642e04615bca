"""Does the quickstart learn inside TRL as it does in our own trainer? Seeds take turns, every run in its own process.

    python benchmarks/trl_learning.py                    # 250 iterations, seeds 101 to 103; make trl-learning
    python benchmarks/trl_learning.py --iterations 100 --seeds 1 2 3

Both see the same prompts, and the policy answers the same 512 held-out problems, before and after, with the same
uniforms. What differs: the trainer, TRL's standard deviation of a group, and the random numbers of responses.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from interleaved import Job, Result, answer, measure, table

from jackpot.core.statistics import Sample

ROOT = Path(__file__).resolve().parents[1]


def quickstart(job: Job) -> Any:
    from jackpot.config.recipes import resolve

    overrides = [f"{name}={job[name]}" for name in ("iterations", "seed")]
    return resolve("quickstart", None, [*overrides, "threads=1", f"evaluation.every={job['iterations']}"])


def ours(job: Job) -> Result:
    """Train as `jackpot train` does."""
    from jackpot.launch.start import train_run

    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        train_run(quickstart(job), Path(folder), lines.append)
    evaluated = [line for line in lines if "eval/policy_accuracy" in line]
    roles = {f"{role}_accuracy": evaluated[-1][f"eval/{role}_accuracy"] for role in ("policy", "rollout_model")}
    return roles | {"before": evaluated[0]["eval/policy_accuracy"]}


def trls(job: Job) -> Result:
    """Train the same inside TRL."""
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    import torch
    from datasets import Dataset
    from trl import GRPOConfig

    from jackpot.adapters.trl import JackpotGRPOTrainer
    from jackpot.models.hub import starter_path
    from jackpot.models.load import eos_token_ids, load_tokenizer
    from jackpot.rollout.tasks.base import PromptStream
    from jackpot.rollout.tasks.registry import make_task

    config, tokenizer = quickstart(job), load_tokenizer("starter:policy")
    task, optimizer, batch = make_task(config.task, tokenizer), config.policy.optimizer, config.batch
    prompts = PromptStream(task, "train", config.seed).next(batch.prompts * config.iterations)
    by_text = {prompt.text: prompt for prompt in prompts}

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        scored = zip(prompts, completions, completion_ids, strict=True)
        return [task.score(by_text[prompt], text, ids[-1] in ends).reward for prompt, text, ids in scored]

    with tempfile.TemporaryDirectory() as folder:
        trainer = JackpotGRPOTrainer(
            model=str(starter_path("policy")),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                seed=config.seed,
                max_steps=config.iterations,
                per_device_train_batch_size=batch.rollouts,
                num_generations=batch.group_size,
                max_completion_length=config.sampling.max_new_tokens,
                temperature=config.sampling.temperature,
                loss_type="dapo",
                beta=0.0,
                learning_rate=optimizer.learning_rate,
                lr_scheduler_type="constant",
                adam_beta1=optimizer.betas[0],
                adam_beta2=optimizer.betas[1],
                max_grad_norm=optimizer.max_grad_norm,
                shuffle_dataset=False,
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in prompts]),
            processing_class=tokenizer,
            rollout_model=config.rollout_model.model_dump(),
            correction=config.objective.correction.model_dump(),
        )
        ends = set(eos_token_ids(trainer.model))
        result = {"before": accuracy(config, task, tokenizer, trainer.model)}
        trainer.train()
    models = {"policy": trainer.model, "rollout_model": trainer.rollout_model}
    with torch.no_grad():
        return result | {f"{role}_accuracy": accuracy(config, task, tokenizer, one) for role, one in models.items()}


def accuracy(config: Any, task: Any, tokenizer: Any, model: Any) -> float:
    """Evaluate a model on the problems of a run's evaluations."""
    import copy

    from jackpot.core.types import Version
    from jackpot.models.load import eos_token_ids, load_model
    from jackpot.rollout.engines.transformers.engine import TransformersEngine
    from jackpot.rollout.evaluate import evaluate

    plain = load_model(model.name_or_path, model.dtype)  # without what TRL hangs on the model
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    engine = TransformersEngine(plain, config.engine, eos_token_ids=eos_token_ids(plain), version=Version(0, 0))
    problems = [task.prompt("test", index) for index in range(config.evaluation.problems)]
    return evaluate(engine, task, tokenizer, problems, config.sampling, config.seed, k=config.evaluation.k).accuracy


TRAINERS = {"jackpot train": ours, "JackpotGRPOTrainer": trls}


def work(job: Job) -> Result:
    """Train once, in this process."""
    import torch

    sys.path.insert(0, job["trl"])
    torch.set_num_threads(1)
    since = time.process_time()
    return TRAINERS[job["trainer"]](job) | {"cpu": time.process_time() - since}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=250)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--trl", type=Path, default=ROOT / ".venv-trl" / "newest", help="folder with TRL's package")
    args = parser.parse_args()
    found: dict[str, list[Result]] = {trainer: [] for trainer in args.trainers}
    for seed in args.seeds:
        for trainer, results in found.items():
            job = {"trainer": trainer, "iterations": args.iterations, "seed": seed, "trl": str(args.trl.resolve())}
            results.append(measure(Path(__file__), job))
    names = {"before": "before", "policy_accuracy": "policy", "rollout_model_accuracy": "rollout model"}
    rows = []
    for trainer, results in found.items():
        for name, label in names.items():
            sample = Sample(tuple(100.0 * result[name] for result in results))
            spread = "" if sample.deviation is None else f"{sample.mean:.1f} ± {sample.deviation:.1f}"
            rows.append([trainer, label, *(f"{value:.1f}" for value in sample.values), spread])
        rows.append([trainer, "CPU s", *(f"{result['cpu']:.0f}" for result in results), ""])
    table(["trainer", "", *(f"seed {seed}" for seed in args.seeds), "mean ± standard deviation"], rows)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        answer(work)
    else:
        main()
