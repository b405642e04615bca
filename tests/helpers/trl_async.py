"""TRL's asynchronous trainer on a CPU: its attention in plain torch, rollouts of a starter, and a server of one."""

from __future__ import annotations

import queue
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from helpers.engines.scripted_server import ScriptedServer
from helpers.trl_runs import ON_A_CPU
from jackpot.models.hub import starter_path
from jackpot.models.load import load_model, load_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig

POLICY, WRITER = "starter:text_policy", "starter:text_rollout_model"
TOP, MAX_NEW = 5, 8  # entries of a top-k list, tokens of a turn
FOLDER = str(starter_path("text_policy"))


def attention(q, k, v, starts_q, starts_k, *_, softmax_scale, causal, window_size) -> Tensor:
    """Compute what `flash_attn_varlen_func` does on GPUs: a segment attends to its keys, aligned at the end."""
    assert causal and window_size == (-1, -1)
    parts = []
    for i in range(len(starts_q) - 1):
        queries, keys, values = (
            x[starts[i] : starts[i + 1]].transpose(0, 1) for x, starts in ((q, starts_q), (k, starts_k), (v, starts_k))
        )
        is_visible = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool).tril(
            keys.shape[1] - queries.shape[1]
        )
        mixed = scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=is_visible, scale=softmax_scale, enable_gqa=True
        )
        parts.append(mixed[0].transpose(0, 1))
    return torch.cat(parts)


def on_the_cpu(patch: Any, packing: ModuleType, trainer: ModuleType, worker: ModuleType) -> None:
    """Let TRL's trainer and worker run here: the kernel in plain torch, no name of a GPU, and a worker that asks for no
    installed vLLM, which it reaches by HTTP alone."""
    patch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention))
    patch.setattr(trainer, "get_peak_flops_per_device", lambda *_: None)
    patch.setattr(worker, "is_vllm_available", lambda: True)


def data() -> Dataset:
    """Return sixteen problems in words."""
    from datasets import Dataset

    rows = [(a, b) for a in range(2, 6) for b in range(3, 7)]
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"Ben has {a} plums and gets {b}. How many has Ben now?"}]}
            for a, b in rows
        ]
    )


def reward(completions: list[Any], **others: Any) -> list[float]:
    """Reward the number of different characters, which differs within a group."""
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def config(folder: Path, **changes: Any) -> AsyncGRPOConfig:
    """Return the settings of a short run."""
    from trl.experimental.async_grpo import AsyncGRPOConfig

    settings = dict(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=MAX_NEW,
        max_steps=3,
        token_budget=0,
        learning_rate=1e-3,
        seed=3,
    )
    return AsyncGRPOConfig(**ON_A_CPU | settings | changes)


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the arguments of TRL's asynchronous trainer."""
    from trl.chat_template_utils import qwen3_template

    tokenizer = load_tokenizer(POLICY)
    tokenizer.response_template = qwen3_template  # TRL knows none for this model's chat template
    return dict(
        model=FOLDER,
        reward_funcs=reward,
        args=config(folder, **changes),
        train_dataset=data(),
        processing_class=tokenizer,
    )


class QueuedSamples:
    """Samples that are already there: a rollout worker of TRL."""

    def __init__(self, samples: list[Any]) -> None:
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("no samples are left")


class NoTransfer:
    """A weight transfer of TRL where nobody is sent weights."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...
    def send_weights(self, iterator: Any) -> None:
        list(iterator)


@torch.no_grad()
def sample(model: Any, prompt: list[int], count: int, draws: torch.Generator, top: int) -> tuple[list[int], Any, Any]:
    """Sample `count` tokens: their ids, log-probs [T], and the `top` most probable ones."""
    ids, rows = list(prompt), []
    for _ in range(count):
        row = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
        rows.append(row)
        ids.append(int(torch.multinomial(row.exp(), 1, generator=draws)))
        if ids[-1] == model.generation_config.eos_token_id:
            break
    tokens, rows = torch.tensor(ids[len(prompt) :]), torch.stack(rows)
    return tokens.tolist(), rows.gather(-1, tokens[:, None])[:, 0], rows.topk(top)


@cache
def samples(groups: int, listed: bool) -> list[Any]:
    """Return completions of the smaller starter as TRL's worker hands them on; of two turns in the second group.

    Args:
        listed: whether each token comes with its top-k list.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    model, tokenizer = load_model(WRITER, torch.float32), load_tokenizer(WRITER)
    draws = torch.Generator().manual_seed(5)
    completions = []
    for group in range(groups):
        prompt = tokenizer(f"Ben has {group} plums and gets 3. How many has Ben now?\n")["input_ids"]
        for member in range(4):
            ids, mask = list(prompt), [0] * len(prompt)
            columns = []  # log-probs and lists of each part
            for turn in range(1 + (group == 1)):
                if turn:
                    ids, mask = ids + prompt[:3], mask + [0] * 3
                tokens, log_probs, top = sample(model, ids, MAX_NEW - member, draws, TOP)
                row = torch.cat([log_probs[:, None], top.indices.float(), top.values], -1)
                columns += [torch.zeros(len(ids) - sum(map(len, columns)), row.shape[1]), row]
                ids, mask = ids + tokens, mask + [1] * len(tokens)
            completions.append(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.array(ids),
                    completion_mask=np.array(mask),
                    old_log_probs=torch.cat(columns)[:, slice(None) if listed else 0].numpy(),
                    advantage=[1.0, -1.0, 0.5, -0.5][member],
                    model_version=1,
                    group_id=group,
                    metrics={"reward": 0.0},
                )
            )
    return completions


def made(cls: type, folder: Any, listed: bool, **more: Any) -> Any:
    """Return a trainer of TRL's kind on rollouts of another model, and the first micro-batch of its data loader."""
    two_batches = samples(2, listed) * 2  # as the data loader reads a batch ahead
    parts = {"rollout_worker": QueuedSamples(two_batches), "weight_transfer": NoTransfer()}
    trainer = cls(**arguments(folder) | parts, **more)
    trainer.model_version = 1
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer, trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


class StarterServer(ScriptedServer):
    """A server with vLLM's routes that samples from the starter, with the weights that it was last given."""

    def __init__(self) -> None:
        self.model = load_model(POLICY, torch.float32)
        self.draws = torch.Generator()
        super().__init__()
        head = self.model.lm_head.weight
        self.structure = f"(embed): Embedding(embedding_dim={head.shape[1]}, org_vocab_size={head.shape[0]})"
        self.settings["model_config"] |= {"max_model_len": 512, "max_logprobs": 20}

    def restart(self) -> None:
        self.tag = "default"
        self.weights = {name: tensor.numpy() for name, tensor in self.model.state_dict().items()}

    def load(self, folder: str) -> None:
        super().load(folder)
        self.model.load_state_dict({name: torch.from_numpy(array) for name, array in self.weights.items()})

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        self.draws.manual_seed(body["seed"])
        tokens, log_probs, top = sample(self.model, body["prompt"], body["max_tokens"], self.draws, body["logprobs"])
        columns = zip(tokens, log_probs.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
        tops = [
            {f"token_id:{token}": value}
            | {f"token_id:{top_id}": top_value for top_id, top_value in zip(ids, values, strict=True)}
            for token, value, ids, values in columns
        ]
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": log_probs.tolist(), "top_logprobs": tops}}
        return {"choices": [choice | {"finish_reason": "length", "prompt_token_ids": body["prompt"]}]}
