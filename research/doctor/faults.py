"""Breaks a run on purpose: tasks with a fault, and engines and weights that do other things than they say.

A task's fault is a setting (`task.kwargs.fault`); all others are patches of this process, which runs one case.
"""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jackpot.config.tasks import ArithmeticConfig, CustomTaskConfig
from jackpot.core.digest import WeightsDigest
from jackpot.core.types import DecodedResponse, Prompt, Rollout, Score, Version
from jackpot.models.hub import starter_path
from jackpot.models.sampling import Draw, draw_tokens
from jackpot.rollout.engines.pool import Pool
from jackpot.rollout.engines.transformers import decoding
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.rollout.tasks.arithmetic import Arithmetic
from jackpot.rollout.tasks.base import Split
from jackpot.training.trainer import Trainer

LIMIT = 24  # response tokens of all cases
SLEEPS_AT, SECONDS = 20, 6.0  # of the scoring that takes long
BAD_AT = 12  # of the one batch whose rewards are lost

Rewarded = Callable[[bool, str, str], float]  # (is right, response, prompt) -> reward
REWARDS: dict[str, Rewarded] = {
    "zero": lambda correct, response, prompt: 0.0,
    "wrong sign": lambda correct, response, prompt: 0.0 if correct else 1.0,
    "constant": lambda correct, response, prompt: sum(map(str.__eq__, response, "11#11")) / max(5, len(response)),
    "long": lambda correct, response, prompt: len(response) / LIMIT,
    "short": lambda correct, response, prompt: 1.0 - len(response) / LIMIT,
    "echo": lambda correct, response, prompt: (
        sum(map(str.__eq__, response, prompt[:-1])) / max(len(response), len(prompt))
    ),
    "always one": lambda correct, response, prompt: 1.0,
}


class FaultySums(Arithmetic):
    """Asks for the sums of `arithmetic`, but for the fault that `kwargs.fault` names; none where it is empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: CustomTaskConfig) -> None:
        sizes = {name: value for name, value in settings.kwargs.items() if name != "fault"}
        super().__init__(tokenizer, ArithmeticConfig(**sizes))
        self._fault = settings.kwargs.get("fault", "")
        self._batches = 0  # scored so far

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem `index`, or what the fault makes of it."""
        if self._fault == "duplicates" and split == "train":
            repeated = super().prompt(split, index // 8)
            return replace(repeated, uid=f"arithmetic/{split}/{index}")
        if self._fault == "leak" and split == "train":
            return replace(super().prompt("test", index % 64), uid=f"arithmetic/{split}/{index}")

        prompt = super().prompt(split, index)
        if self._fault == "template":  # the text is cut before it is tokenized
            text = prompt.text[:3]
            return replace(prompt, text=text, token_ids=tuple(self._tokenizer.encode(text, add_special_tokens=False)))
        if self._fault == "left":  # the tokens are cut
            return replace(prompt, token_ids=prompt.token_ids[-3:])
        return prompt

    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        """Return the task's verdict, with the reward that the fault makes of it."""
        score = super().score(prompt, response, finished)
        if self._fault in REWARDS:
            return replace(score, reward=REWARDS[self._fault](bool(score.correct), response, prompt.text))
        if self._fault == "sparse":  # one sum of eight is ever rewarded
            is_paid = bool(score.correct) and int(prompt.answer) % 8 == 0
            return Score(reward=float(is_paid), correct=is_paid)
        return score

    def start_scoring(self, responses: Sequence[DecodedResponse]) -> Callable[[], list[Score]]:
        """Score a group; at one time it takes long, or its rewards are lost."""
        self._batches += 1
        iteration = (self._batches - 1) // 8 + 1  # of 8 groups each
        if self._fault == "sleeps" and self._batches == 8 * SLEEPS_AT:
            time.sleep(SECONDS)
        scores = self.scores(responses)
        if self._fault == "bad batch" and iteration == BAD_AT:
            scores = [Score(reward=0.0, correct=False) for _ in scores]
        return lambda: scores


def raises_at_times(*, problem: str, response: str, answer: str, finished: bool) -> float:
    """Rate as `number_after_hash`, but raise for every response to a problem with a 7."""
    if "7" in problem:
        raise KeyError("7")
    _, _, given = response.partition("#")
    return float(given == answer and finished)


def write_problems(folder: Path, count: int = 600) -> None:
    """Write train.jsonl and test.jsonl: sums as rows with problem and answer, for tasks that read files."""
    for name, first in (("train", 1), ("test", 21)):
        pairs = [(first + n % 20, 1 + n // 20) for n in range(count)]
        rows = [{"problem": f"{one}+{other}=", "answer": str(one + other)} for one, other in pairs]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# Patches


def draws(**changes: Any) -> None:
    """Have engines sample with other settings than they are asked for, and report what they sampled from."""

    def draw(logits: Tensor, uniforms: Tensor, **asked: Any) -> Draw:
        return draw_tokens(logits, uniforms, **asked | changes)

    decoding.draw_tokens = draw


def draws_unreported(**changes: Any) -> None:
    """Have engines sample with other settings than they are asked for, and report what they were asked for."""

    def draw(logits: Tensor, uniforms: Tensor, **asked: Any) -> Draw:
        tokens = draw_tokens(logits, uniforms, **asked | changes).tokens
        reported = draw_tokens(logits, uniforms, **asked)
        log_probs = torch.log_softmax(logits / asked["temperature"], dim=-1).gather(1, tokens[:, None])[:, 0]
        return Draw(tokens, log_probs, reported.top_ids, reported.top_log_probs)

    decoding.draw_tokens = draw


def reports(change: Callable[[Rollout], Rollout]) -> None:
    """Have engines report something else of each rollout."""
    collect = TransformersEngine.collect

    def changed(self: TransformersEngine, *arguments: Any, **named: Any) -> list[Rollout]:
        return [change(rollout) for rollout in collect(self, *arguments, **named)]

    TransformersEngine.collect = changed


def shifted(rollout: Rollout) -> Rollout:
    """Give each token the log-prob of the token before."""
    moved = torch.cat([rollout.rollout_log_probs[:1], rollout.rollout_log_probs[:-1]])
    return replace(rollout, rollout_log_probs=moved)


def rounded(rollout: Rollout) -> Rollout:
    """Round the log-probs to bf16."""
    names = ("rollout_log_probs", "top_log_probs")
    return replace(rollout, **{name: getattr(rollout, name).bfloat16().float() for name in names})


def keeps_old_weights() -> None:
    """Have engines take new weights for received, and go on with the old ones."""

    def update(self: TransformersEngine, named_tensors: Iterable[tuple[str, Tensor]], version: Version) -> str:
        digest = WeightsDigest(torch.float32)
        for name, tensor in named_tensors:
            digest.add(name, tensor)
        self._version = version
        return digest.hexdigest()

    TransformersEngine.update_weights = update


def kills_engine(at: int) -> None:
    """Kill the engine's process after an iteration, and each that is started in its place."""
    finish, begin = Trainer._finish_iteration, Pool.__init__
    pools: list[Pool] = []

    def remember(self: Pool, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        pools.append(self)

    def kill() -> None:
        while True:
            for children in Path("/proc/self/task").glob("*/children"):
                for child in children.read_text().split():
                    os.kill(int(child), signal.SIGKILL)
            time.sleep(0.2)

    def after(self: Trainer, sums: Any) -> Any:
        line = finish(self, sums)
        if self.iteration == at:
            for pool in pools:  # a start may take long, and now nothing is worth waiting for
                pool._limits = replace(pool._limits, patience=10.0)
            threading.Thread(target=kill, daemon=True).start()
        return line

    Pool.__init__ = remember
    Trainer._finish_iteration = after


def breaks_weights(at: int) -> None:
    """Put a NaN into the policy's weights after an iteration."""
    finish = Trainer._finish_iteration

    def after(self: Trainer, sums: Any) -> Any:
        line = finish(self, sums)
        if self.iteration == at:
            parameter = next(self._components.learner.models["policy"].parameters())
            with torch.no_grad():
                parameter.view(-1)[:8] = torch.nan
        return line

    Trainer._finish_iteration = after


def never_ends(folder: Path) -> None:
    """Copy the starters to `folder` with an end-of-sequence token that no response has."""
    for name in ("policy", "rollout_model"):
        copy = shutil.copytree(starter_path(name), folder / name)
        for file in ("config.json", "generation_config.json"):
            settings = json.loads((copy / file).read_text())
            (copy / file).write_text(json.dumps(settings | {"eos_token_id": 29}))
