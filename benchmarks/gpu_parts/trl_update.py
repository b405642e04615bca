"""Takes one update of given responses with TRL's GRPOTrainer: its own loss, forward and backward, clipping, AdamW.

What stands around it in TRL, generating and scoring, is left out, as it is from ours.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from gpu_parts.results import NotInstalled
from tokenizers import Tokenizer, models
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from jackpot.core.types import TrainingSample

FOLDER = "/tmp/jackpot-gpu-trl"  # TRL wants one; nothing is written


def make_update(
    model: PreTrainedModel, samples: Sequence[TrainingSample], micro_batch: int, in_bf16: bool
) -> Callable[[], None]:
    """Return a function that takes one optimizer step.

    Args:
        micro_batch: sequences of one forward pass; divides the number of samples.

    Raises:
        NotInstalled: TRL, or something that it needs, cannot be imported.
    """
    try:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    except (ImportError, RuntimeError) as error:  # transformers' lazy modules raise the second
        raise NotInstalled(f"TRL cannot be imported: {error}") from error
    group = sum(sample.rollout.prompt.uid == samples[0].rollout.prompt.uid for sample in samples)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<end>",
    )
    settings = GRPOConfig(
        output_dir=FOLDER,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=len(samples) // micro_batch,
        num_generations=group,
        max_completion_length=max(len(sample.rollout.token_ids) for sample in samples),
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        gradient_checkpointing=False,
        report_to=[],
        bf16=in_bf16,
        use_cpu=model.device.type == "cpu",
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "<end>"}] * group),
    )
    trainer.current_gradient_accumulation_steps = settings.gradient_accumulation_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    parts = [
        _inputs(samples[start : start + micro_batch], model.device) for start in range(0, len(samples), micro_batch)
    ]
    total = sum(part["completion_mask"].sum() for part in parts)
    model.train()

    def update() -> None:
        for part in parts:
            with torch.autocast(model.device.type, torch.bfloat16) if in_bf16 else nullcontext():
                loss = trainer.compute_loss(model, part | {"num_items_in_batch": total})
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def _inputs(samples: Sequence[TrainingSample], device: torch.device) -> dict[str, torch.Tensor]:
    """Return a micro-batch as TRL's trainer takes it: prompts padded on the left, responses on the right."""
    prompts = [torch.tensor(sample.rollout.prompt.token_ids) for sample in samples]
    responses = [sample.rollout.token_ids for sample in samples]
    inputs = {
        "prompt_ids": pad_sequence(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad_sequence([torch.ones_like(one) for one in prompts], batch_first=True, padding_side="left"),
        "completion_ids": pad_sequence(responses, batch_first=True),
        "completion_mask": pad_sequence([torch.ones_like(one) for one in responses], batch_first=True),
        "advantages": torch.stack([sample.advantages[0] for sample in samples]),
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}
