"""The nouns that every layer shares. Torch only.

Shapes: `B` sequences, `T` response tokens, `P` prompt tokens, `U` unique prompts, `K` top-k entries.
Log-probabilities are in nats and use the sampling temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

Finish = Literal["stop", "length", "aborted"]
RewardError = Literal["timeout", "crash"]
Role = Literal["policy", "rollout_model", "critic"]


class Version(NamedTuple):
    """Which weights: how many optimizer steps each model has taken."""

    policy: int
    rollout_model: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem. `uid` is unique within a run and says where the prompt came from."""

    uid: str
    text: str
    answer: str  # the reference that the task's reward compares with
    token_ids: tuple[int, ...]  # [P]


def unique_rows(prompts: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the distinct rows of token ids in their first order, and for every given row the place of its equal."""
    rows: dict[tuple[int, ...], int] = {}
    index = [rows.setdefault(tuple(prompt), len(rows)) for prompt in prompts]
    return list(rows), index


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One response, as the engine sampled it, on the CPU. `T` counts every response token, the stop token too."""

    uid: str
    prompt: Prompt
    finish: Finish
    token_ids: Tensor  # [T] int64
    rollout_log_probs: Tensor  # [T] float32, of the sampled token after temperature, top-p and top-k; 0 if not sampled
    sampled_mask: Tensor  # [T] bool, False where somebody else (a tool, a template) wrote the token
    top_ids: Tensor  # [T, K] int64, most probable first
    top_log_probs: Tensor  # [T, K] float32, -inf outside the support of a truncated distribution and if not sampled
    versions: Tensor  # [T, 2] int64, a Version for every token


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A task's score of one response."""

    reward: float
    correct: bool
    reward_error: RewardError | None = None  # why scoring failed; the response then counts as wrong, with reward 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRollout:
    """One response with the score that its reward comes from."""

    rollout: Rollout
    score: Score


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """One scored response with the advantages that the learner trains on."""

    rollout: Rollout
    score: Score
    advantages: Tensor  # [T] float32; one number for all tokens where the response as a whole has the advantage


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """Some rollouts as tensors: prompts once each and padded on the left, responses padded on the right."""

    uids: tuple[str, ...]  # B
    prompt_ids: Tensor  # [U, P] int64
    prompt_mask: Tensor  # [U, P] bool
    prompt_index: Tensor  # [B] int64, row of prompt_ids
    response_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] bool, every token that exists
    response_mask: Tensor  # [B, T] bool, the tokens that the model sampled; a subset of attention_mask
    rollout_log_probs: Tensor  # [B, T] float32, 0 where masked
    advantages: Tensor  # [B, T] float32
    uniforms: Tensor  # [B, T] float64 in [0, 1), the coins of OBRS
    top_ids: Tensor  # [B, T, K] int64
    top_log_probs: Tensor  # [B, T, K] float32
    versions: Tensor  # [B, T, 2] int64


class DecodedResponse(NamedTuple):
    """One response as text, as a task scores it."""

    prompt: Prompt
    text: str  # without special tokens
    finished: bool  # False where it was cut at the length limit or aborted
