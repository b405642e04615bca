"""Our side of step.py: the trainer as `jackpot train` runs it, on a task of made-up words."""

import time
from contextlib import nullcontext
from pathlib import Path

import torch
from floor import Products
from interleaved import Job, Result, answer
from step_task import LEARNING_RATE, Shape, peak_mib, prompt_text, reward, shape_of, summary, tokens_and_pairs
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from jackpot.analysis.plan.memory import plan_memory
from jackpot.analysis.plan.sizes import model_sizes
from jackpot.config.arms import build_config
from jackpot.config.config import Config
from jackpot.config.recipes import parse_override
from jackpot.core.types import Prompt, Score, ScoredRollout
from jackpot.launch import build, start
from jackpot.rollout.tasks.base import Split, Task
from jackpot.training.trainer import MetricsLine, Trainer

EOS = 1
SIZE_NAMES = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
SIZES = {
    shape: dict(zip(SIZE_NAMES, sizes, strict=True))
    for shape, sizes in {
        "fixed": (256, 768, 4, 4, 2),
        "ragged": (384, 1024, 8, 6, 2),
        "smollm2": (576, 1536, 30, 9, 3),
    }.items()
}


class Words(Task):
    """Prompts of made-up words."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shape: Shape) -> None:
        self._tokenizer, self._shape = tokenizer, shape

    def size(self, split: Split) -> int | None:
        return None

    def first_index(self, split: Split, seed: int) -> int:
        return 0  # as TRL's data set

    def prompt(self, split: Split, index: int) -> Prompt:
        text = prompt_text(self._shape, index)
        return Prompt(uid=f"{split}/{index}", text=text, answer="", token_ids=tuple(self._tokenizer.encode(text)))

    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        return Score(reward=reward(response), correct=False)


def make_model(shape: str, words: int, half: bool = False) -> PreTrainedModel:
    """The random model of a shape, or one of half its depth; on the meta device where that is the current one."""
    sizes = SIZES[shape]
    layers = sizes["num_hidden_layers"] // (2 if half else 1)
    common = {"vocab_size": words, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": EOS}
    common |= {"pad_token_id": 0, "max_position_embeddings": 1024, "head_dim": 64}
    settings = common | sizes | {"num_hidden_layers": layers}
    return Qwen3ForCausalLM(Qwen3Config(**settings)) if shape == "fixed" else LlamaForCausalLM(LlamaConfig(**settings))


def make_tokenizer(words: int) -> PreTrainedTokenizerBase:
    vocabulary = {"<unk>": 0, "<end>": EOS} | {f"w{number}": number for number in range(2, words)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "<unk>", "eos_token": "<end>", "pad_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **names)


def stop_ids(shape: Shape) -> list[int]:
    """The tokens that end a response: <end>, and as many of the last words as the shape says."""
    return [EOS, *range(shape.words - shape.stops, shape.words)]


def model_folder(job: Job, role: str) -> Path:
    """Where a shape's policy, its rollout model of the same sizes and one of `half` the depth stand; made once."""
    shape, folder = shape_of(job), Path(job["folder"]) / job["shape"]
    if not folder.exists():
        for seed, name in enumerate(("policy", "rollout_model", "half")):
            torch.manual_seed(seed)
            model = make_model(job["shape"], shape.words, half=name == "half")
            model.generation_config.eos_token_id = stop_ids(shape)
            model.save_pretrained(folder / name)
            make_tokenizer(shape.words).save_pretrained(folder / name)
    return folder / role


def make_models(job: Job) -> None:
    for shape in job["shapes"]:
        model_folder(job | {"shape": shape}, "policy")


def settings(job: Job) -> Config:
    shape, joint = shape_of(job), job["models"] == 2
    optimizer = {"learning_rate": LEARNING_RATE}
    rollout_model = {"path": str(model_folder(job, job.get("writer", "rollout_model"))), "optimizer": optimizer}
    return build_config(
        {
            "iterations": job["steps"] + 1,  # the last one evaluates and is not counted
            "policy": {"path": str(model_folder(job, "policy")), "optimizer": optimizer},
            "rollout_model": rollout_model if joint else None,
            "objective": {"correction": {"name": "obrs", "kappa": job.get("kappa", "auto")} if joint else "none"},
            "sampling": {"max_new_tokens": shape.new_tokens, "num_top_log_probs": 20 if joint else 0},
            "batch": {
                "prompts": shape.prompts,
                "group_size": shape.group,
                "micro_batch_tokens": shape.micro_batch * (shape.prompt[1] + shape.new_tokens),
            },
            "precision": job.get("dtype", "fp32"),
            "engine": {"dtype": job.get("dtype", "fp32")},
            "evaluation": {"every": 10**6, "problems": 1},
            "device": "cpu",
            "threads": 1,
        },
        overrides=[parse_override(text) for text in job.get("overrides", ())],
    )


def run(job: Job) -> Result:
    """One run. Every step ends where its line of metrics is written; the first two and the last are not counted."""
    config, ends, tokens, flops = settings(job), [], [], []
    build.make_task = lambda _, tokenizer: Words(tokenizer, shape_of(job))
    memory: list[float] = []
    products = Products()

    def listen(line: MetricsLine) -> None:
        memory.append(peak_mib())
        ends.append(time.process_time())
        flops.append(dict(products.by_dtype))

    trainer: Trainer = start.launch(config, Path(job["folder"]) / f"run-{time.time_ns()}", listen)
    learner = trainer._components.learner  # the one place that sees the rollouts of every step
    compute_advantages = learner.compute_advantages

    def count(scored: list[ScoredRollout]) -> list:
        rollouts = [one.rollout for one in scored]
        prompts = [len(one.prompt.token_ids) for one in rollouts[:: config.batch.group_size]]
        tokens.append(tokens_and_pairs(prompts, [len(one.token_ids) for one in rollouts]))
        return compute_advantages(scored)

    learner.compute_advantages = count
    with products if job.get("count") else nullcontext():
        trainer.train()
    trainer.close()
    return summary(ends, tokens, flops, memory[0], last=-1) | {"torch": torch.__version__}


def plan(job: Job) -> Result:
    """What `--dry-run` says of the same run, MiB."""
    config = settings(job)
    memory = plan_memory(config, model_sizes(config), shape_of(job).prompt[1])
    return {"peak_mib": memory.peak / 2**20}


ACTIONS = {"models": make_models, "plan": plan, "run": run}


def work(job: Job) -> Result | None:
    torch.set_num_threads(1)
    return ACTIONS[job.get("action", "run")](job)


if __name__ == "__main__":
    answer(work)
