"""A vLLM server that is honest or not: a real tiny model decodes behind vLLM's HTTP routes, and a `Lie` meddles."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache

from helpers.engines.reference import tiny_model
from helpers.engines.scripted_server import ScriptedServer

Body = dict[str, Any]  # of a completions call
Choice = dict[str, Any]  # of its answer
GATHERING = 0.03  # seconds in which requests that come are decoded together


class Step(NamedTuple):
    """Holds one step of decoding `B` responses over `V` tokens."""

    logits: Tensor  # [B, V] float32, of the model
    drawn: Tensor  # [B, t] int64, the tokens before
    asked: Body  # settings, those of the first request
    batch: int  # number of the rollout batch, from 1

    def log_probs(self, biased: Tensor | None = None, **changes: float) -> Tensor:
        """Return the log-probs after temperature, top-k and top-p, as asked or changed."""
        settings: Body = {**self.asked, **changes}
        logits = (self.logits if biased is None else biased) / settings["temperature"]
        if settings["top_k"]:
            logits = logits.masked_fill(logits < logits.topk(settings["top_k"]).values[:, -1:], -torch.inf)
        order = logits.sort(dim=-1, descending=True)
        mass_before = order.values.softmax(-1).cumsum(-1) - order.values.softmax(-1)
        is_tail = mass_before >= settings["top_p"]  # in the order of probability
        is_dropped = is_tail.scatter(1, order.indices, is_tail)
        return logits.masked_fill(is_dropped & (settings["top_p"] < 1.0), -torch.inf).log_softmax(-1)


def honest(step: Step) -> tuple[Tensor, Tensor]:
    """Return the distributions that a server samples from, and that it reports: the same."""
    return step.log_probs(), step.log_probs()


@dataclass(frozen=True, kw_only=True)
class Lie:
    """What a server does otherwise than it was asked to; without changes, nothing."""

    request: Callable[[Body], Body] = lambda body: body
    draw: Callable[[Step], tuple[Tensor, Tensor]] = honest
    answers: Callable[[list[Choice]], list[Choice]] = lambda choices: choices  # of requests that came together
    load: Callable[[dict[str, Tensor], int], dict[str, Tensor]] = lambda weights, batch: weights
    tag: Callable[[str, int], str] = lambda tag, batch: tag  # the version that it reports


class ModelServer(ScriptedServer):
    """Serves a tiny model, with eager attention: another kernel than the learner's.

    Args:
        most: requests that are decoded together.
    """

    def __init__(self, lie: Lie, dtype: torch.dtype = torch.float32, most: int = 64) -> None:
        self._lie, self._most = lie, most
        self.batch = -1  # number of the weights that it has, from 0
        self._waiting: list[tuple[Body, asyncio.Future[Choice]]] = []
        self.model = tiny_model(seed=0).eval()
        self.model.to(dtype=dtype)  # pyright: ignore[reportArgumentType]
        self.model.set_attn_implementation("eager")
        super().__init__()
        self.settings["model_config"]["dtype"] = str(dtype)
        self.script["/v1/completions"] = self._wait

    def load(self, folder: str) -> None:
        weights = load_file(Path(folder) / "model.safetensors")
        self.weights = {name: tensor.view(torch.uint8).numpy() for name, tensor in weights.items()}
        self.batch += 1  # 0: those that the engine sends when it connects
        self.model.load_state_dict(self._lie.load(weights, self.batch), strict=False)

    def _usual(self, path: str, body: Body) -> Body:
        usual = super()._usual(path, body)
        return usual | {"weight_version": self._lie.tag(self.tag, self.batch)} if path == "/weight_info" else usual

    def _completion(self, body: Body) -> Body:
        return {}

    async def _wait(self, body: Body, usual: Body) -> Body:
        loop = asyncio.get_running_loop()
        self._waiting.append((body, loop.create_future()))
        if len(self._waiting) == 1:
            loop.call_later(GATHERING, self._answer_waiting)
        return {"choices": [await self._waiting[-1][1]]}

    def _answer_waiting(self) -> None:
        """Decode the requests that wait, at most `most` at once, and answer them."""
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), self._most):
            bodies, futures = zip(*waiting[start : start + self._most], strict=True)
            try:
                choices = self._decode(list(bodies))
            except Exception as error:  # ends the requests, and so the test
                choices = [error] * len(bodies)
            for future, choice in zip(futures, choices, strict=True):
                if isinstance(choice, Exception):
                    future.set_exception(choice)
                else:
                    future.set_result(choice)

    @torch.no_grad()
    def _decode(self, requests: list[Body]) -> list[Choice]:
        """Sample responses to some requests together, as the lie has it."""
        bodies = [self._lie.request(dict(body)) for body in requests]
        longest = max(len(body["prompt"]) for body in bodies)
        length = max(body["max_tokens"] for body in bodies)
        padding = torch.tensor([longest - len(body["prompt"]) for body in bodies])[:, None]
        ids = torch.tensor([[0] * (longest - len(body["prompt"])) + body["prompt"] for body in bodies])
        draws = torch.tensor(np.array([np.random.default_rng(body["seed"]).random(length) for body in bodies]))

        cache = DynamicCache()
        drawn = torch.zeros(len(bodies), 0, dtype=torch.int64)
        reported = []  # [B, V] of each step
        for step in range(length):
            columns = torch.arange(longest + step)[None]
            logits = self.model(
                input_ids=ids,
                attention_mask=(columns >= padding).long(),
                position_ids=(columns[:, -ids.shape[1] :] - padding).clamp(min=0),
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
            sampled_log_probs, reported_log_probs = self._lie.draw(Step(logits.float(), drawn, bodies[0], self.batch))
            sums = sampled_log_probs.double().exp().cumsum(-1)
            ids = torch.searchsorted(sums, draws[:, step : step + 1] * sums[:, -1:], right=True)
            drawn = torch.cat([drawn, ids], 1)
            reported.append(reported_log_probs)

        # the prompts of the answer are those of the requests, whatever the lie has made of them
        answered = [body | {"prompt": request["prompt"]} for body, request in zip(bodies, requests, strict=True)]
        rows = zip(answered, drawn, torch.stack(reported, 1), strict=True)
        return self._lie.answers([_choice(body, row.tolist(), log_probs) for body, row, log_probs in rows])


def _choice(body: Body, tokens: list[int], log_probs: Tensor) -> Choice:
    """Return the answer to one request: its tokens [T] up to a stop token, and the distributions [T, V] of these."""
    ends = [index for index, token in enumerate(tokens[: body["max_tokens"]]) if token in body["stop_token_ids"]]
    tokens = tokens[: ends[0] + 1 if ends else body["max_tokens"]]
    log_probs = log_probs.clamp(min=-9999.0)
    sampled_log_probs = log_probs[torch.arange(len(tokens)), tokens].tolist()
    top = log_probs[: len(tokens)].topk(body["logprobs"])
    rows = zip(tokens, sampled_log_probs, top.indices.tolist(), top.values.tolist(), strict=True)
    return {
        "finish_reason": "stop" if ends else "length",
        "token_ids": tokens,
        "prompt_token_ids": body["prompt"],
        "logprobs": {
            "token_logprobs": sampled_log_probs,
            "top_logprobs": [
                {f"token_id:{token}": value}
                | {f"token_id:{top_id}": log for top_id, log in zip(ids, logs, strict=True)}
                for token, value, ids, logs in rows
            ],
        },
    }
