"""Our side of step.py: the trainer as `jackpot train` runs it, on a task of made-up words."""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from step_task import GROUP, LEARNING_RATE, MICRO_BATCH, WORDS, peak_mib, prompt_text, reward
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from jackpot.analysis.plan.memory import plan_memory
from jackpot.analysis.plan.sizes import model_sizes
from jackpot.config.build import build_config
from jackpot.config.recipes import parse_override
from jackpot.config.run import Config
from jackpot.core.types import Prompt, Score
from jackpot.launch import local
from jackpot.rollout.tasks.base import Split, Task
from jackpot.training.trainer import MetricsLine, Trainer

LONGEST_PROMPT = 53


class Words(Task):
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def size(self, split: Split) -> int | None:
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        text = prompt_text(index)
        return Prompt(uid=f"{split}/{index}", text=text, answer="", token_ids=tuple(self._tokenizer.encode(text)))

    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        return Score(reward=reward(response), correct=False)


def make_models(job: dict) -> None:
    """Policy and rollout model of one shape and different weights, and their tokenizer."""
    folder = Path(job["folder"])
    vocabulary = {"<unk>": 0, "<end>": 1} | {f"w{number}": number for number in range(2, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", pad_token="<unk>", padding_side="left"
    )
    for seed, name in enumerate(("policy", "rollout_model")):
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=WORDS,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)


def settings(job: dict) -> Config:
    folder = Path(job["folder"])
    optimizer = {"learning_rate": LEARNING_RATE}
    joint = job["what"] == "joint"
    return build_config(
        {
            "iterations": job["steps"] + 1,  # the last one evaluates and is not counted
            "policy": {"path": str(folder / "policy"), "optimizer": optimizer},
            "rollout_model": {"path": str(folder / "rollout_model"), "optimizer": optimizer} if joint else None,
            "objective": {} if joint else {"correction": "none"},
            "sampling": {"max_new_tokens": job["new_tokens"], "num_top_log_probs": 20 if joint else 0},
            "batch": {
                "prompts": job["prompts"],
                "group_size": job.get("group", GROUP),
                "micro_batch_tokens": MICRO_BATCH * (LONGEST_PROMPT + job["new_tokens"]),
            },
            "evaluation": {"every": 10**6, "problems": 1},
            "device": "cpu",
            "threads": 1,
        },
        overrides=[parse_override(text) for text in job.get("overrides", ())],
    )


def run(job: dict) -> dict:
    config, ends, marks = settings(job), [], {}
    local.make_task = lambda _, tokenizer: Words(tokenizer)

    def listen(line: MetricsLine) -> None:
        marks.setdefault("before", peak_mib())
        ends.append(time.process_time())
        marks["tokens"] = line.get("tokens/rollout", 0)

    folder = Path(job["folder"]) / f"run-{time.time_ns()}"
    trainer: Trainer = local.launch(config, folder, listen)
    trainer.train()
    trainer.close()
    steps = [after - before for before, after in pairwise(ends)][2:-1]
    peak = peak_mib()
    return {
        "step": sum(steps) / len(steps),
        "tokens": marks["tokens"],
        "peak_mib": peak,
        "own_mib": peak - marks["before"],
        "torch": torch.__version__,
    }


def plan(job: dict) -> dict:
    """What `--dry-run` says of the same run, MiB."""
    config = settings(job)
    memory = plan_memory(config, model_sizes(config), LONGEST_PROMPT)
    return {"peak_mib": memory.peak / 2**20}


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    action = plan if job.get("plan") else {"models": make_models}.get(job["what"], run)
    print("RESULT " + json.dumps(action(job) or {}))


if __name__ == "__main__":
    main()
