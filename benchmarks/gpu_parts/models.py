"""Makes models of published shapes with random weights, rollouts for them, and a learner that trains on these."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from gpu_parts.machine import Machine
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from jackpot.config.arms import build_config
from jackpot.config.config import Config
from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.core.types import Prompt, Rollout, Score, TrainingSample, Version
from jackpot.launch.build import make_learner
from jackpot.models.cost import forward_cost, head_cost
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.training.joint_learner import JointLearner

NUM_TOP = 20
VOCABULARY, TINY_VOCABULARY = 151_936, 512
SHAPES = {  # hidden size, size between the two matrices of an MLP
    "Qwen3 1.7B": (2048, 6144),
    "Qwen3 0.6B": (1024, 3072),
}
TINY_SHAPES = {"Qwen3 1.7B": (64, 96), "Qwen3 0.6B": (32, 64)}


def make_model(name: str, device: torch.device, tiny: bool, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model of a published shape, in a tiny one of the same family."""
    hidden, between = (TINY_SHAPES if tiny else SHAPES)[name]
    config = Qwen3Config(
        vocab_size=TINY_VOCABULARY if tiny else VOCABULARY,
        hidden_size=hidden,
        intermediate_size=between,
        num_hidden_layers=2 if tiny else 28,
        num_attention_heads=4 if tiny else 16,
        num_key_value_heads=2 if tiny else 8,
        head_dim=16 if tiny else 128,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(len(name) + hidden)
    with torch.device(device):
        return Qwen3ForCausalLM(config).to(dtype).eval()


def make_config(precision: str, num_models: int = 2, overrides: Mapping[str, Any] | None = None) -> Config:
    """Return the settings of a run; OBRS with two models, no correction with one."""
    optimizer = {"learning_rate": 1e-6}
    correction = {"name": "obrs"} if num_models == 2 else "none"
    return build_config(
        {
            "iterations": 100,
            "policy": {"path": "policy", "optimizer": optimizer},
            "rollout_model": {"path": "rollout model", "optimizer": optimizer} if num_models == 2 else None,
            "precision": precision,
            "objective": {"correction": correction},
            "sampling": {"max_new_tokens": 4096, "num_top_log_probs": NUM_TOP},
            "batch": {"prompts": 4, "group_size": 8},
        },
        overrides=[overrides or {}],
    )


def head_kernels(machine: Machine) -> list[dict[str, Any]]:
    """Return the settings of all kernels of the head but `auto`; none on a CPU, where some do not run."""
    setting = Config.model_fields.get("head_kernel")
    names = get_args(setting.annotation) if setting and machine.has_gpu else ()
    return [{"head_kernel": name} for name in names if name != "auto"]


def learner_of(config: Config, models: Sequence[PreTrainedModel], mesh: DeviceMesh | None = None) -> JointLearner:
    """Return a learner of the policy, and of the rollout model behind it if there is one."""
    by_role = dict(zip(("policy", "rollout_model"), models, strict=False))
    config = config.model_copy(update={"device": models[0].device.type})
    return make_learner(config, by_role, list(by_role), mesh)


def random_samples(
    vocabulary: int, prompts: int, group: int, prompt_length: int, longest: int, shortest: int
) -> list[TrainingSample]:
    """Return responses of random tokens with lengths spread evenly from `shortest` to `longest`, as sampled from a
    distribution whose log-probs are 0.3 nats around those of a model that knows nothing."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(2, vocabulary, shape, generator=generator)  # noqa: E731
    count, samples, prompt_ids = prompts * group, [], draw(prompts, prompt_length).tolist()
    for number in range(count):
        length = shortest + (longest - shortest) * (number * 7 % count) // max(1, count - 1)
        top = 0.3 * torch.randn(length, NUM_TOP, generator=generator) - math.log(vocabulary)
        top, drawn = top.sort(-1, descending=True).values, torch.randint(NUM_TOP, (length, 1), generator=generator)
        top_ids = (draw(length, 1) + torch.arange(NUM_TOP) * 7 - 2) % (vocabulary - 2) + 2  # no id twice
        rollout = Rollout(
            uid=f"{number // group}/{number % group}",
            prompt=Prompt(uid=str(number // group), text="", answer="", token_ids=tuple(prompt_ids[number // group])),
            finish="stop",
            token_ids=top_ids.gather(1, drawn)[:, 0],
            rollout_log_probs=top.gather(1, drawn)[:, 0],
            sampled_mask=torch.ones(length, dtype=torch.bool),
            top_ids=top_ids,
            top_log_probs=top,
            versions=torch.zeros(length, 2, dtype=torch.int64),
        )
        advantages = torch.full((length,), 1.0 if number % 2 else -1.0)
        samples.append(TrainingSample(rollout=rollout, score=Score(reward=0.0, correct=False), advantages=advantages))
    return samples


def training_flops(models: Sequence[PreTrainedModel], samples: Sequence[TrainingSample]) -> float:
    """Count what forward and backward cannot do without: each prompt once, the head on responses only, no padding."""
    prompts = {sample.rollout.prompt.token_ids for sample in samples}
    lengths = [(len(sample.rollout.prompt.token_ids), len(sample.rollout.token_ids)) for sample in samples]
    prompt_tokens, tokens = sum(map(len, prompts)), sum(length for _, length in lengths)
    pairs = sum(len(ids) * (len(ids) + 1) / 2 for ids in prompts)
    pairs += sum(length * prompt + length * (length + 1) / 2 for prompt, length in lengths)
    flops = 0.0
    for model in models:
        cost, head = forward_cost(model), head_cost(model)
        flops += (cost.per_token - head) * (prompt_tokens + tokens) + head * tokens + cost.per_pair * pairs
    return 3.0 * flops


def make_engine(model: PreTrainedModel, rows: int, **settings: Any) -> TransformersEngine:
    """Return an engine that takes the model over."""
    config = TransformersEngineConfig(max_num_seqs=rows, **settings)
    return TransformersEngine(model, config, eos_token_ids=[], version=Version(0, 0))


def make_requests(rows: int, num_new: int, prompt_length: int, vocabulary: int, label: str = "") -> list[Request]:
    """Return requests of prompts that 8 rows share."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, vocabulary, (-(-rows // 8), prompt_length), generator=generator).tolist()
    prompts = [Prompt(uid=str(number), text="", answer="", token_ids=tuple(row)) for number, row in enumerate(ids)]
    sampling = Sampling(max_new_tokens=num_new, num_top_log_probs=NUM_TOP)
    return [Request(uid=f"{label}{row}", prompt=prompts[row // 8], seed=row, sampling=sampling) for row in range(rows)]


def device_model(name: str, machine: Machine, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return make_model(name, machine.device, machine.tiny, dtype)
