"""Run folders as a run would leave them, with numbers that a test chooses or that are drawn from a seed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from helpers.runs import small_config
from jackpot.core.types import Prompt, Rollout, Score, TrainingSample
from jackpot.training.run_folder.rollouts import write_rollouts

TOP = 12  # entries of each top-k list


def run_folder(
    folder: Path, lines: Sequence[Mapping[str, Any]], *overrides: str, events: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """Write settings, metrics and events; each line gets its index as iteration unless it has another."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads(small_config(*overrides).model_dump_json())
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    write_lines(folder, lines)
    full_events = [{"iteration": 0, "time": 0.0} | dict(event) for event in events]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in full_events))
    return folder


def write_lines(folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write metrics.jsonl; each line gets its index as iteration unless it has another."""
    full_lines = [{"iteration": index, "time": 0.0} | dict(line) for index, line in enumerate(lines)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in full_lines))


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word."""
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(["<unk>", *words]))}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")))


def save_tokens(
    folder: Path,
    iteration: int,
    responses: Sequence[Sequence[str]],
    *,
    prompts: Sequence[str] | None = None,
    tool: int | None = None,
    seed: int = 0,
) -> Path:
    """Save responses of these words with random numbers, as a run does; the words make the vocabulary.

    Args:
        tool: the position that a tool wrote, in every response.
    """
    words = sorted({word for response in responses for word in response})
    tokenizer = word_tokenizer([*words, *(f"other{index}" for index in range(TOP))])
    random = np.random.default_rng(seed)
    items, traces = [], {}
    for index, response in enumerate(responses):
        length = len(response)
        ids = torch.tensor(tokenizer.convert_tokens_to_ids(list(response)))
        tops = [np.sort(np.log(random.dirichlet(np.ones(TOP), length)))[:, ::-1].copy() for _ in range(2)]
        top_ids = [np.argsort(random.random((length, TOP))) for _ in range(2)]
        sampled = torch.ones(length, dtype=torch.bool)
        if tool is not None:
            sampled[tool] = False
        rollout = Rollout(
            uid=f"{iteration}/{index}",
            prompt=Prompt(
                uid=f"p{index}", text=prompts[index] if prompts else f"prompt {index}", answer="42", token_ids=(1,)
            ),
            finish="stop",
            token_ids=ids,
            rollout_log_probs=torch.tensor(-random.exponential(1.0, length)),
            sampled_mask=sampled,
            top_ids=torch.tensor(top_ids[0]),
            top_log_probs=torch.tensor(tops[0]),
            versions=torch.tensor(np.stack([np.full(length, iteration - 1), np.arange(length) // 7], axis=1)),
        )
        reward = float(index % 2)
        advantages = torch.full((length,), reward - 0.5)
        items.append(
            TrainingSample(rollout=rollout, score=Score(reward=reward, correct=bool(reward)), advantages=advantages)
        )
        accepted = (random.random(length) < 0.8).astype(float)
        traces[rollout.uid] = {
            "old_log_probs": torch.tensor(-random.exponential(1.0, length)),
            "log_probs": torch.tensor(-random.exponential(1.0, length)),
            "rollout_model_log_probs": rollout.rollout_log_probs,
            "acceptance": torch.tensor(random.random(length)),
            "accept_mask": torch.tensor(accepted),
            "weights": torch.tensor(random.random(length) * 3.0),
            "z": torch.tensor(random.random(length)),
            "kl_rollout_policy": torch.tensor(random.exponential(0.2, length)),
            "policy_top_ids": torch.tensor(top_ids[1]),
            "policy_top_log_probs": torch.tensor(tops[1]),
        }
    config = small_config()
    path = write_rollouts(folder / "rollouts", iteration, items, traces, tokenizer, config)
    checkpoint = folder / "checkpoints" / "last" / "policy"
    checkpoint.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(checkpoint)
    return path
