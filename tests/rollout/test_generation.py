"""A generation batch goes through a checkpoint's file and is what it was."""

from dataclasses import fields, replace
from pathlib import Path

import torch

from jackpot.core.types import TOKEN_COLUMNS, Prompt, Rollout, Score, ScoredRollout
from jackpot.rollout.generation import GenerationBatch, PromptGroup

PROMPT = Prompt(uid="p", text="2+3=", answer="5", token_ids=(5, 11), other_answers=("five",))


def rollout(number: int, length: int) -> Rollout:
    return Rollout(
        uid=f"1/p#{number}",
        prompt=PROMPT if number < 2 else replace(PROMPT, uid="q", other_answers=()),
        finish="stop" if length else "aborted",
        token_ids=torch.arange(length) + number,
        rollout_log_probs=-torch.rand(length),
        sampled_mask=torch.arange(length) % 2 == 0,
        top_ids=torch.arange(2 * length).reshape(length, 2),
        top_log_probs=torch.full((length, 2), -torch.inf),
        versions=torch.full((length, 2), 7),
        sampled_by="policy" if number else "rollout_model",
    )


def test_a_batch_is_the_same_after_a_checkpoint(tmp_path: Path) -> None:
    rollouts = [rollout(0, 3), rollout(1, 0), rollout(2, 2)]
    rollouts[1] = replace(rollouts[1], top_ids=torch.zeros(0, 0, dtype=torch.int64), top_log_probs=torch.zeros(0, 0))
    scores = [Score(reward=0.5, correct=True), Score(reward=0.0, reward_error="timeout", reward_retries=2)]
    scores[1] = replace(scores[1], error_text="correct: took longer than 5 s")
    groups = [
        PromptGroup(members=[ScoredRollout(rollout=one, score=score)], has_equal_rewards=score.correct is None)
        for one, score in zip(rollouts[::2], scores, strict=True)
    ]
    batch = GenerationBatch(
        generated=rollouts, discarded={"1/p#1": "aborted"}, groups=groups, metrics={"draft/acceptance": 0.75}
    )
    torch.save(batch.state_dict(), tmp_path / "state.pt")
    again = GenerationBatch.from_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (again.discarded, again.metrics) == (batch.discarded, batch.metrics)
    assert [one.has_equal_rewards for one in again.groups] == [False, True]
    assert [[one.score for one in group.members] for group in again.groups] == [[score] for score in scores]
    assert again.groups[1].members[0].score.error_text == scores[1].error_text
    assert [group.members[0].rollout for group in again.groups] == again.generated[::2]
    for ours, theirs in zip(rollouts, again.generated, strict=True):
        for name in (field.name for field in fields(Rollout)):
            mine, other = getattr(ours, name), getattr(theirs, name)
            if name not in TOKEN_COLUMNS:
                assert mine == other
            elif len(mine):
                assert torch.equal(mine, other) and mine.dtype == other.dtype
            else:
                assert len(other) == 0
