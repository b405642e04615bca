"""Stands in for Tinker's service: its two clients over models of this process, with real samples and real gradients.

Methods have the names, parameters and results of tinker 0.38.0, as far as examples/tinker_loop.py goes. Where tinker is
installed its own types travel; else those at the end of this file, which have the same fields.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

INPUTS = {  # of each loss: what it reads
    "cross_entropy": {"target_tokens", "weights"},
    "importance_sampling": {"target_tokens", "logprobs", "advantages"},
    "ppo": {"target_tokens", "logprobs", "advantages"},
}
T = TypeVar("T")


@dataclass
class Future(Generic[T]):
    value: T

    def result(self) -> T:
        return self.value


class StandInTrainingClient:
    """`tinker.TrainingClient`, of all weights of a model, where the service trains LoRA.

    Args:
        model: is trained in place.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self._tokenizer = model, tokenizer
        self._optimizer: torch.optim.AdamW | None = None
        self.seen: list[tuple[str, list[Any]]] = []  # what was asked: loss and data
        self.gradients: list[list[Tensor]] = []  # of every step, before clipping

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    def forward_backward(
        self, data: list[Any], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Future[Any]:
        self.seen.append((loss_fn, data))
        outputs, total = [], 0.0
        for datum in data:
            given = {name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()}
            if given.keys() != INPUTS[loss_fn]:
                raise ValueError(f"{loss_fn} reads {sorted(INPUTS[loss_fn])}, not {sorted(given)}")
            ids = torch.tensor([datum.model_input.to_ints()])
            every = self.model(ids).logits[0].float().log_softmax(-1)
            targets = given["target_tokens"]
            chosen = every.gather(-1, targets.reshape(len(every), -1)).reshape(targets.shape)
            loss = loss_of(loss_fn, chosen, given, loss_fn_config or {})
            loss.backward()
            total += loss.item()
            outputs.append({"logprobs": types().TensorData.from_torch(chosen.detach())})
        return Future(SimpleNamespace(metrics={"loss:sum": total}, loss_fn_outputs=outputs))

    def optim_step(self, optim_params: Any) -> Future[Any]:
        own = list(self.model.parameters())
        self._optimizer = self._optimizer or torch.optim.AdamW(own)
        for group in self._optimizer.param_groups:
            group |= {"lr": optim_params.learning_rate, "betas": (optim_params.beta1, optim_params.beta2)}
            group |= {"eps": optim_params.eps, "weight_decay": optim_params.weight_decay}
        self.gradients.append([one.grad.clone() for one in own])
        if optim_params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(own, optim_params.grad_clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Future(SimpleNamespace(metrics={}))

    def save_weights_and_get_sampling_client(self) -> Future[StandInSamplingClient]:
        return Future(StandInSamplingClient(copy.deepcopy(self.model).eval()))


def loss_of(name: str, log_probs: Tensor, given: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """The sums that Tinker documents: cross entropy, -ratio A, and PPO's minimum with a clipped ratio."""
    if name == "cross_entropy":
        return -(given["weights"] * log_probs).sum()
    ratio, advantages = (log_probs - given["logprobs"]).exp(), given["advantages"]
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    clipped = ratio.clamp(config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


class StandInSamplingClient:
    """`tinker.SamplingClient` of fixed weights; every sample is a pure function of its seed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.no_grad()
    def sample(
        self,
        prompt: Any,
        num_samples: int,
        sampling_params: Any,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: Any | None = None,
    ) -> Future[Any]:
        ids = torch.tensor([prompt.to_ints()])
        sequences = [
            self._sequence(ids, number, sampling_params, topk_sample_logprobs) for number in range(num_samples)
        ]
        response = SimpleNamespace(
            sequences=sequences, prompt_logprobs=None, topk_prompt_logprobs=None, target_prompt_logprobs=None
        )
        every = self._model(ids).logits[0, :-1].float().log_softmax(-1)
        if include_prompt_logprobs:
            response.prompt_logprobs = [None, *every.gather(-1, ids[0, 1:, None])[:, 0].tolist()]
        if topk_prompt_logprobs:
            log_probs, ids_of = every.topk(topk_prompt_logprobs)
            response.topk_prompt_logprobs = [None, *map(listed, ids_of, log_probs)]
        if target_prompt_logprobs is not None:
            targets = target_prompt_logprobs.to_torch()
            if len(targets) != len(every):
                raise ValueError(f"target_prompt_logprobs has {len(targets)} rows, the prompt needs {len(every)}")
            found = torch.where(targets >= 0, every.gather(-1, targets.clamp(min=0)), 0.0)
            response.target_prompt_logprobs = types().TensorData.from_torch(found)
        return Future(response)

    def _sequence(self, prompt: Tensor, number: int, params: Any, k: int) -> Any:
        """One token after the other, from the whole sequence each time."""
        random = torch.Generator().manual_seed(1_000_003 * (params.seed or 0) + number)
        ids, log_probs, top = prompt, [], []
        end = self._model.generation_config.eos_token_id
        for _ in range(params.max_tokens):
            now = (self._model(ids).logits[0, -1].float() / params.temperature).log_softmax(-1)
            token = torch.multinomial(now.exp(), 1, generator=random)
            ids = torch.cat([ids, token[None]], dim=1)
            log_probs.append(now[token].item())
            top.append(listed(*reversed(now.topk(k))))
            if token.item() in (end if isinstance(end, list) else [end]):
                break
        tokens = ids[0, prompt.shape[1] :].tolist()
        return SimpleNamespace(tokens=tokens, logprobs=log_probs, topk_logprobs=top if k else None)


def listed(ids: Tensor, log_probs: Tensor) -> list[tuple[int, float]]:
    return list(zip(ids.tolist(), log_probs.tolist(), strict=True))


@dataclass
class TensorData:
    tensor: Tensor

    @classmethod
    def from_torch(cls, tensor: Tensor) -> TensorData:
        return cls(tensor)

    def to_torch(self) -> Tensor:
        return self.tensor


@dataclass
class ModelInput:
    tokens: list[int]

    @classmethod
    def from_ints(cls, tokens: list[int]) -> ModelInput:
        return cls(tokens)

    def to_ints(self) -> list[int]:
        return self.tokens


@dataclass
class Datum:
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData] = field(default_factory=dict)


@dataclass
class SamplingParams:
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1
    top_k: int = -1
    top_p: float = 1


@dataclass
class AdamParams:
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


def types() -> ModuleType:
    """The module `tinker`: the installed one, or one with the types above."""
    if "tinker" not in sys.modules and importlib.util.find_spec("tinker") is None:
        module = ModuleType("tinker")
        module.__dict__.update(
            {one.__name__: one for one in (TensorData, ModelInput, Datum, SamplingParams, AdamParams)}
        )
        module.TrainingClient, module.SamplingClient = StandInTrainingClient, StandInSamplingClient
        sys.modules["tinker"] = module
    return importlib.import_module("tinker")
