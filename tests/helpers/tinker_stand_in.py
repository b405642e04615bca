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
        self.calls: list[tuple[str, list[Any]]] = []  # name of the loss, and data
        self.gradients: list[list[Tensor]] = []  # of every step, before clipping

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    def forward_backward(
        self, data: list[Any], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Future[Any]:
        self.calls.append((loss_fn, data))
        outputs, total = [], 0.0
        for datum in data:
            inputs = {name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()}
            if inputs.keys() != INPUTS[loss_fn]:
                raise ValueError(f"{loss_fn} reads {sorted(INPUTS[loss_fn])}, not {sorted(inputs)}")
            ids = torch.tensor([datum.model_input.to_ints()])
            log_probs = self.model(ids).logits[0].float().log_softmax(-1)
            targets = inputs["target_tokens"]
            target_log_probs = log_probs.gather(-1, targets.reshape(len(log_probs), -1)).reshape(targets.shape)
            loss = loss_of(loss_fn, target_log_probs, inputs, loss_fn_config or {})
            loss.backward()
            total += loss.item()
            outputs.append({"logprobs": types().TensorData.from_torch(target_log_probs.detach())})
        return Future(SimpleNamespace(metrics={"loss:sum": total}, loss_fn_outputs=outputs))

    def optim_step(self, optim_params: Any) -> Future[Any]:
        parameters = list(self.model.parameters())
        self._optimizer = self._optimizer or torch.optim.AdamW(parameters)
        for group in self._optimizer.param_groups:
            group |= {"lr": optim_params.learning_rate, "betas": (optim_params.beta1, optim_params.beta2)}
            group |= {"eps": optim_params.eps, "weight_decay": optim_params.weight_decay}
        self.gradients.append([parameter.grad.clone() for parameter in parameters])
        if optim_params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, optim_params.grad_clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Future(SimpleNamespace(metrics={}))

    def save_weights_and_get_sampling_client(self) -> Future[StandInSamplingClient]:
        return Future(StandInSamplingClient(copy.deepcopy(self.model).eval()))


def loss_of(name: str, log_probs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Return a sum that Tinker documents: cross entropy, -ratio A, and PPO's minimum with a clipped ratio."""
    if name == "cross_entropy":
        return -(inputs["weights"] * log_probs).sum()
    ratio, advantages = (log_probs - inputs["logprobs"]).exp(), inputs["advantages"]
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
        sequences = [self._sequence(ids, index, sampling_params, topk_sample_logprobs) for index in range(num_samples)]
        response = SimpleNamespace(
            sequences=sequences, prompt_logprobs=None, topk_prompt_logprobs=None, target_prompt_logprobs=None
        )
        full_log_probs = self._model(ids).logits[0, :-1].float().log_softmax(-1)
        if include_prompt_logprobs:
            response.prompt_logprobs = [None, *full_log_probs.gather(-1, ids[0, 1:, None])[:, 0].tolist()]
        if topk_prompt_logprobs:
            log_probs, ids_of = full_log_probs.topk(topk_prompt_logprobs)
            response.topk_prompt_logprobs = [None, *map(listed, ids_of, log_probs)]
        if target_prompt_logprobs is not None:
            targets = target_prompt_logprobs.to_torch()
            if len(targets) != len(full_log_probs):
                raise ValueError(
                    f"target_prompt_logprobs has {len(targets)} rows, the prompt needs {len(full_log_probs)}"
                )
            values = torch.where(targets >= 0, full_log_probs.gather(-1, targets.clamp(min=0)), 0.0)
            response.target_prompt_logprobs = types().TensorData.from_torch(values)
        return Future(response)

    def _sequence(self, prompt: Tensor, index: int, params: Any, k: int) -> Any:
        """One token after the other, from the whole sequence each time."""
        random = torch.Generator().manual_seed(1_000_003 * (params.seed or 0) + index)
        ids = prompt
        log_probs, top = [], []  # of each token
        ends = self._model.generation_config.eos_token_id
        for _ in range(params.max_tokens):
            next_log_probs = (self._model(ids).logits[0, -1].float() / params.temperature).log_softmax(-1)
            token = torch.multinomial(next_log_probs.exp(), 1, generator=random)
            ids = torch.cat([ids, token[None]], dim=1)
            log_probs.append(next_log_probs[token].item())
            top.append(listed(*reversed(next_log_probs.topk(k))))
            if token.item() in (ends if isinstance(ends, list) else [ends]):
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
    """Return the module `tinker`: the installed one, or one with the types above."""
    if "tinker" not in sys.modules and importlib.util.find_spec("tinker") is None:
        module = ModuleType("tinker")
        module.__dict__.update(
            {kind.__name__: kind for kind in (TensorData, ModelInput, Datum, SamplingParams, AdamParams)}
        )
        module.TrainingClient, module.SamplingClient = StandInTrainingClient, StandInSamplingClient
        sys.modules["tinker"] = module
    return importlib.import_module("tinker")
