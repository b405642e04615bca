"""TRL's side of step.py, run by the Python of .venv-peers."""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from step_task import GROUP, LEARNING_RATE, MICRO_BATCH, peak_mib, prompt_text, reward
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Ends(TrainerCallback):
    """When each step ended, CPU seconds, and the memory before the first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.before = 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.before = peak_mib()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds.append(time.process_time())


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    path = str(Path(job["folder"]) / "policy")
    sequences = job["prompts"] * GROUP
    config = GRPOConfig(
        output_dir=str(Path(job["folder"]) / "trl"),
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=sequences // MICRO_BATCH,
        num_generations=GROUP,
        max_completion_length=job["new_tokens"],
        max_steps=job["steps"],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",  # divided by all tokens of the step, as ours
        logging_steps=10**6,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        disable_tqdm=True,
    )
    ends, lengths = Ends(), []

    def rewards(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [reward(one) for one in completions]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(path),
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt_text(i)} for i in range(job["prompts"] * job["steps"])]),
        callbacks=[ends],
    )
    trainer.train()
    steps = [after - before for before, after in pairwise(ends.seconds)][1:]
    peak = peak_mib()
    result = {
        "step": sum(steps) / len(steps),
        "tokens": sum(lengths) / job["steps"],
        "peak_mib": peak,
        "own_mib": peak - ends.before,
        "trl": trl.__version__,
        "trl's transformers": transformers.__version__,
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
