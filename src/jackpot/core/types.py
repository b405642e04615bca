"""The data types that every layer shares, from a prompt to a training batch. Torch only.

Shapes: `B` sequences, `T` response tokens, `P` prompt tokens, `U` unique prompts, `K` top-k entries.
Log-probabilities are in nats and use the sampling temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from torch import Tensor

from jackpot.core.roles import Role

Finish = Literal["stop", "length", "aborted"]
RewardError = Literal["timeout", "crash", "invalid"]  # invalid: no number from -1e30 to 1e30


class Version(NamedTuple):
    """The weights of both models, identified by the optimizer steps that each model has taken.

    Example: Version(policy=8, rollout_model=8) after two iterations of four steps each.
    """

    policy: int  # optimizer steps that the policy has taken
    rollout_model: int  # optimizer steps that the rollout model has taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A problem as text and as token ids.

    Example: Prompt(uid="arithmetic/train/17", text="2+3=", answer="5", token_ids=(5, 11, 6, 12)).
    """

    uid: str  # unique within a run; names the data set and the position in it
    text: str  # the problem as the task states it, before any chat template
    answer: str  # the reference that the task's reward compares with
    token_ids: tuple[int, ...]  # [P] the prompt as the model reads it
    other_answers: tuple[str, ...] = ()  # further references: a response that equals any of them is right

    @property
    def answers(self) -> str:
        """Return all reference answers as one text for people to read."""
        return " or ".join((self.answer, *self.other_answers))


_Entry = TypeVar("_Entry")


def unique_rows(rows: Sequence[Sequence[_Entry]]) -> tuple[list[tuple[_Entry, ...]], list[int]]:
    """Return the distinct rows in order of appearance, and for each of `rows` its index among them.

    >>> unique_rows([[7, 8], [9], [7, 8]])
    ([(7, 8), (9,)], [0, 1, 0])
    """
    distinct: dict[tuple[_Entry, ...], int] = {}
    index = [distinct.setdefault(tuple(row), len(distinct)) for row in rows]
    return list(distinct), index


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """A response as the engine sampled it, on the CPU. `T` counts every response token, the stop token too.

    Example, with K = 2: the model answers "5" and stops.

        token_ids          [9, 1]
        rollout_log_probs  [-0.11, -0.01]
        sampled_mask       [True, True]
        top_ids            [[9, 8], [1, 9]]
        top_log_probs      [[-0.11, -2.3], [-0.01, -4.6]]
        versions           [[8, 8], [8, 8]]  (steps of policy and rollout model)

    A tool's answer between two turns of the model is part of the response, with `sampled_mask` False.
    """

    uid: str  # unique within a run: the prompt's uid and a number
    prompt: Prompt
    finish: Finish  # "stop": a stop token; "length": the token limit; "aborted": the engine gave the response up
    token_ids: Tensor  # [T] int64
    rollout_log_probs: Tensor  # [T] float32, of each token after temperature, top-p and top-k; 0 if it was not sampled
    sampled_mask: Tensor  # [T] bool, True where the model sampled the token, False where a tool or template inserted it
    top_ids: Tensor  # [T, K] int64, most probable first
    top_log_probs: Tensor  # [T, K] float32, -inf where top-p or top-k leaves the token out, or nothing was sampled
    versions: Tensor  # [T, 2] int64, the Version of the weights that sampled each token
    sampled_by: Role | None = None  # the run's model that sampled the response; None outside of a run's batches


# The fields of a `Rollout` with one entry for each token.
TOKEN_COLUMNS = ("token_ids", "rollout_log_probs", "sampled_mask", "top_ids", "top_log_probs", "versions")


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A task's score of one response."""

    reward: float  # what training maximizes
    correct: bool | None = None  # whether the response is right; accuracies count this. None: the task has no verdict
    reward_error: RewardError | None = None  # why scoring failed; the response counts as wrong, the failed reward as 0
    reward_retries: int = 0  # calls that were repeated because they failed
    error_text: str | None = field(default=None, compare=False)  # which reward failed, its error, and where in its file


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRollout:
    """A response with its score."""

    rollout: Rollout
    score: Score


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """A scored response with the advantages that the learner trains on.

    Example: with GRPO and rewards 1, 0, 0, 0 in its group, the first response has advantages [1.5, 1.5].
    """

    rollout: Rollout
    score: Score
    advantages: Tensor  # [T] float32; one number for all tokens where the response as a whole has the advantage
    values: Tensor | None = None  # [T] float32, the critic's values before the first update; None: no critic
    returns: Tensor | None = None  # [T] float32, what the critic learns to predict


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBlock:
    """The shape of a block: several sequences of a `PackedRow`, whose attention is computed in one call.

    Within the block each sequence is padded to the longest one, and its queries attend to its own keys alone.
    """

    rows: int  # number of sequences
    queries: int  # number of query tokens of each sequence, with padding
    keys: int  # number of key tokens of each sequence, with padding
    is_square: bool  # whether queries and keys are the same tokens, so that plain causal attention serves
    masks: int  # number of different attention masks: 1 where all rows have the same mask, else one for each row


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """The tokens of a micro-batch as one row without padding: `S` tokens, each prompt before its responses.

    The last token of a response is left out, for it predicts nothing. A prompt with several responses stands once: it
    attends to itself, and each of its responses to the prompt and to itself. Every index is that of a token in the row.

    There are two plans to compute attention, with equal results: the fields `block_*` plan blocks of padded rows, which
    every kernel takes; `cu_*` and `sequence_keys` plan sequences of their own lengths, for kernels of variable lengths.

    Example as in `TokenBatch`, with responses of (8, 9, 1), (1) and (9, 1) tokens:

        token_ids    [5, 6, 8, 9, 7, 9]
        positions    [0, 1, 2, 3, 0, 1]
        predicting   [[1, 2, 3], [1, 0, 0], [4, 5, 0]]
        cu_queries   [0, 2, 4, 6]  (the first prompt; 8, 9 behind it; the second prompt with its only response)
        cu_keys      [0, 2, 6, 8]
        sequence_keys    [0, 1, 0, 1, 2, 3, 4, 5]
    """

    token_ids: Tensor  # [S] int64
    positions: Tensor  # [S] int64, counted from the first token of the prompt
    predicting: Tensor  # [B, T] int64, the index of the token whose state predicts each response token; 0 where padded
    blocks: tuple[AttentionBlock, ...]
    block_queries: Tensor  # [sum of rows * queries] int64, indices of the blocks' queries; padding repeats the last one
    block_keys: Tensor  # [sum of rows * keys] int64, indices of the blocks' keys; padding repeats the last one
    block_positions: Tensor  # [sum of masks * queries] int64, last key that each query sees, as an index in its keys
    block_outputs: Tensor  # [S] int64, where each token stands in block_queries
    cu_queries: Tensor  # [sequences + 1] int32, cumulative lengths: where each sequence of queries ends in the row
    cu_keys: Tensor  # [sequences + 1] int32, cumulative lengths: where the sequence's keys end in sequence_keys
    sequence_keys: Tensor  # [keys of all sequences] int64, indices of the keys of each sequence, one after the other
    longest: tuple[int, int]  # most queries and most keys of any sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """Rollouts as padded tensors: each distinct prompt once, padded on the left; responses padded on the right.

    Example: two responses to the prompt (5, 6) and one to (7,), with responses of 3, 1 and 2 tokens:

        prompt_ids      [[5, 6], [0, 7]]
        prompt_mask     [[1, 1], [0, 1]]
        prompt_index    [0, 0, 1]  (the row of prompt_ids that each response answers)
        attention_mask  [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
        response_index  [0, 1, 2, 3, 6, 7]  (where the flat response_mask, here attention_mask, is True)
    """

    uids: tuple[str, ...]  # [B] uid of each rollout
    prompt_ids: Tensor  # [U, P] int64, the distinct prompts' token ids
    prompt_mask: Tensor  # [U, P] bool, False where padded
    prompt_index: Tensor  # [B] int64, the row of prompt_ids that each response answers
    response_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] bool, False where padded
    response_mask: Tensor  # [B, T] bool, the tokens that the model sampled; a subset of attention_mask
    response_index: Tensor  # [N] int64, indices of the True entries in the flat response_mask [B * T], ascending
    rollout_log_probs: Tensor  # [B, T] float32, 0 where masked
    advantages: Tensor  # [B, T] float32
    uniforms: Tensor  # [B, T] float64 in [0, 1), the random numbers of OBRS's acceptance mask
    top_ids: Tensor  # [B, T, K] int64, the engine's most probable tokens
    top_log_probs: Tensor  # [B, T, K] float32, log-probs of `top_ids`
    versions: Tensor  # [B, T, 2] int64, the Version of the weights that sampled each token
    by_policy: Tensor | None = None  # [B] bool, responses that the policy sampled; None: one model sampled all
    values: Tensor | None = None  # [B, T] float32, the critic's values before the first update; None: no critic
    returns: Tensor | None = None  # [B, T] float32, what the critic learns to predict
    packed: PackedRow | None = None  # the same tokens for models that read no padding; None: they read padded tensors

    def at_sampled(self, column: Tensor) -> Tensor:
        """Select the values of the N sampled tokens from `column`: [B, T, ...] -> [N, ...]; keep the gradient."""
        return column.flatten(0, 1).index_select(0, self.response_index)

    def spread(self, values: Tensor) -> Tensor:
        """Put the N sampled tokens' values in their places, 0 elsewhere: [N, ...] -> [B, T, ...]; keep the gradient."""
        flat = values.new_zeros((self.response_mask.numel(), *values.shape[1:]))
        return flat.index_copy(0, self.response_index, values).unflatten(0, self.response_mask.shape)


class DecodedResponse(NamedTuple):
    """A response as text, the input of a reward function."""

    prompt: Prompt
    text: str  # the response without special tokens
    finished: bool  # False where the response was cut at the length limit or aborted
    turns: tuple[str, ...] = ()  # the model's own text in each of its turns; a single one where no tool replies
    last_turn_ended: bool = True  # False where the last turn was cut; True also where only the tool's reply is missing
