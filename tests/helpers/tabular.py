"""A policy that is a table: one row of logits for every prefix, so that all sequences and coins can be enumerated.

Tables are [S, V] float64, S the number of prefixes. The head is the real one: its hidden states are one-hot rows and
its weight is the table's transpose, so that `weight.grad.T` is the gradient of the table. All reference numbers are
numpy's.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

from jackpot.core.types import TokenBatch
from jackpot.objectives.joint import TokenScores, token_scores
from jackpot.objectives.kernels.linear_head import Head, joint_linear_head

VOCAB, EOS = 3, 2  # tokens 0, 1 and the end of a sequence


@dataclass(frozen=True)
class World:
    """All prefixes and all whole sequences of at most `horizon` tokens; a sequence ends at EOS or at the horizon."""

    horizon: int

    @property
    def prefixes(self):
        words = (word for length in range(self.horizon) for word in itertools.product(range(VOCAB), repeat=length))
        return [word for word in words if EOS not in word]

    @property
    def sequences(self):
        words = [(*prefix, token) for prefix in self.prefixes for token in range(VOCAB)]
        return [word for word in words if word[-1] == EOS or len(word) == self.horizon]

    def steps(self, sequence):
        """Return (index of the prefix, token) of each position."""
        indices = {prefix: index for index, prefix in enumerate(self.prefixes)}
        return [(indices[sequence[:t]], token) for t, token in enumerate(sequence)]

    def random_table(self, generator, spread=1.0):
        """Return a table of normal logits."""
        return generator.normal(scale=spread, size=(len(self.prefixes), VOCAB))


def probabilities(table):
    """Return the softmax of each row."""
    exp = np.exp(table - table.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def sequence_probability(world, table, sequence):
    """Return the probability that a table writes a sequence."""
    p = probabilities(table)
    return math.prod(p[step] for step in world.steps(sequence))


def visits(world, table):
    """Return d(s), the probability that each prefix is reached."""
    visit_probs = np.zeros(len(world.prefixes))
    for index, prefix in enumerate(world.prefixes):
        p = probabilities(table)
        visit_probs[index] = math.prod(p[step] for step in world.steps(prefix))
    return visit_probs


def values(world, table, rewards):
    """Return Q(s, a) = E[reward | prefix s, then token a], the rest written by `table`: [S, V]."""
    q = np.zeros((len(world.prefixes), VOCAB))
    for index, prefix in enumerate(world.prefixes):
        for token in range(VOCAB):
            start = (*prefix, token)
            continuations = [s for s in world.sequences if s[: len(start)] == start]
            weights = [sequence_probability(world, table, s) for s in continuations]
            q[index, token] = sum(w * rewards[s] for w, s in zip(weights, continuations, strict=True)) / sum(weights)
    return q


def score_gradient(world, table, coefficients):
    """Return sum_s sum_a coefficients[s, a] grad log p(a | s), with the softmax's gradient written out: [S, V]."""
    return coefficients - coefficients.sum(-1, keepdims=True) * probabilities(table)


def batch_of(world, rollout_table, sequences, advantages, uniforms, num_top=VOCAB):
    """Return the sequences as an engine would hand them over. `uniforms` [B, T]; prompts do not matter."""
    count, width = len(sequences), max(map(len, sequences))
    log_inf = torch.from_numpy(np.log(probabilities(rollout_table)))
    mask = torch.zeros(count, width, dtype=torch.bool)
    ids = torch.zeros(count, width, dtype=torch.int64)
    rollout = torch.zeros(count, width, dtype=torch.float64)
    top_ids = torch.zeros(count, width, num_top, dtype=torch.int64)
    top_log_probs = torch.zeros(count, width, num_top, dtype=torch.float64)
    for row, sequence in enumerate(sequences):
        for t, (state, token) in enumerate(world.steps(sequence)):
            mask[row, t] = True
            ids[row, t] = token
            rollout[row, t] = log_inf[state, token]
            top_log_probs[row, t], top_ids[row, t] = log_inf[state].topk(num_top)
    return TokenBatch(
        uids=tuple(map(str, range(count))),
        prompt_ids=torch.zeros(1, 1, dtype=torch.int64),
        prompt_mask=torch.ones(1, 1, dtype=torch.bool),
        prompt_index=torch.zeros(count, dtype=torch.int64),
        response_ids=ids,
        attention_mask=mask,
        response_mask=mask,
        response_index=mask.flatten().nonzero()[:, 0],
        rollout_log_probs=rollout,
        advantages=torch.tensor(advantages, dtype=torch.float64)[:, None] * mask,
        uniforms=uniforms,
        top_ids=top_ids,
        top_log_probs=top_log_probs,
        versions=torch.zeros(count, width, 2, dtype=torch.int64),
    )


def weight_of(table):
    """Return the head's weight [V, S] for a table, a leaf."""
    return torch.from_numpy(table.T.copy()).requires_grad_()


def scores_of(
    world, batch, sequences, policy_weight, rollout_weight, lam, *, num_top=0, is_current=False, distill=None
) -> TokenScores:
    """Return what `token_scores` makes of the two heads at these sequences."""
    states = torch.tensor([state for sequence in sequences for state, _ in world.steps(sequence)])
    hidden = torch.nn.functional.one_hot(states, len(world.prefixes)).double()
    head = joint_linear_head(
        Head(hidden=hidden, weight=policy_weight),
        Head(hidden=hidden, weight=rollout_weight),
        batch.response_ids[batch.response_mask],
        temperature=1.0,
        lam=lam,
        num_top=num_top,
        gather_ids=batch.top_ids[batch.response_mask],
    )
    current = torch.full_like(batch.response_mask, is_current)
    return token_scores(head, batch, current, lam, "topk", distill)
