"""TRL's side of step.py, run by the Python of .venv-peers."""

import time
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers
import trl
import trl.trainer.utils
from datasets import Dataset
from floor import Products
from interleaved import Job, Result, answer
from step_task import LEARNING_RATE, peak_mib, prompt_text, reward, shape_of, summary, tokens_and_pairs
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Ends(TrainerCallback):
    """When training began and each step ended, CPU seconds, and the memory before the first."""

    def __init__(self, products: Products) -> None:
        self._products = products
        self.seconds: list[float] = []
        self.flops: list[dict[str, int]] = []
        self.before = 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.before = peak_mib()
        self.on_step_end(args, state, control)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds.append(time.process_time())
        self.flops.append(dict(self._products.by_dtype))


def work(job: Job) -> Result:
    torch.set_num_threads(1)
    if job.get("compact"):  # the head reads response positions only, as where there is Triton; the kernel stays torch's
        trl.trainer.utils._use_triton = lambda device: True
    shape, path = shape_of(job), str(Path(job["folder"]) / job["shape"] / "policy")
    config = GRPOConfig(
        output_dir=str(Path(job["folder"]) / "trl"),
        per_device_train_batch_size=shape.micro_batch,
        gradient_accumulation_steps=shape.prompts * shape.group // shape.micro_batch,
        num_generations=shape.group,
        max_completion_length=shape.new_tokens,
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
        bf16=job["dtype"] == "bf16",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        disable_tqdm=True,
    )
    products = Products()
    ends, tokens = Ends(products), []

    def rewards(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: object
    ) -> list[float]:
        lengths = [len(prompt.split()) for prompt in prompts[:: shape.group]]
        tokens.append(tokens_and_pairs(lengths, [len(one) for one in completion_ids]))
        return [reward(one) for one in completions]

    prompts = [{"prompt": prompt_text(shape, index)} for index in range(shape.prompts * job["steps"])]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(path),
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        callbacks=[ends],
    )
    with products if job.get("count") else nullcontext():
        trainer.train()
    result = summary(ends.seconds, tokens, ends.flops, ends.before, last=None)
    return result | {"trl": trl.__version__, "trl's transformers": transformers.__version__}


if __name__ == "__main__":
    answer(work)
