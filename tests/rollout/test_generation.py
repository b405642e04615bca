"""A generation batch goes through a checkpoint's file and is what it was."""

from dataclasses import fields, replace
from pathlib import Path

import torch

from jackpot.core.types import TOKEN_COLUMNS, Prompt, Rollout, Score, ScoredRollout
from jackpot.rollout.generation import GenerationBatch, PromptGroup

PROMPT = Prompt(uid="p", text="2+3=", answer="5", token_ids=(5, 11), other_answers=("five",))


def make_rollout(index: int, length: int) -> Rollout:
    """Return a rollout of this length; the first one is of the rollout model, those from 2 on of prompt q."""
    return Rollout(
        uid=f"1/p#{index}",
        prompt=PROMPT if index < 2 else replace(PROMPT, uid="q", other_answers=()),
        finish="stop" if length else "aborted",
        token_ids=torch.arange(length) + index,
        rollout_log_probs=-torch.rand(length),
        sampled_mask=torch.arange(length) % 2 == 0,
        top_ids=torch.arange(2 * length).reshape(length, 2),
        top_log_probs=torch.full((length, 2), -torch.inf),
        versions=torch.full((length, 2), 7),
        sampled_by="policy" if index else "rollout_model",
    )


def test_a_batch_is_the_same_after_a_checkpoint(tmp_path: Path) -> None:
    rollouts = [make_rollout(index=0, length=3), make_rollout(index=1, length=0), make_rollout(index=2, length=2)]
    rollouts[1] = replace(rollouts[1], top_ids=torch.zeros(0, 0, dtype=torch.int64), top_log_probs=torch.zeros(0, 0))

    scores = [Score(reward=0.5, correct=True), Score(reward=0.0, reward_error="timeout", reward_retries=2)]
    scores[1] = replace(scores[1], error_text="correct: took longer than 5 s")

    groups = [
        PromptGroup(members=[ScoredRollout(rollout=rollout, score=score)], has_equal_rewards=score.correct is None)
        for rollout, score in zip((rollouts[0], rollouts[2]), scores, strict=True)
    ]
    batch = GenerationBatch(
        generated=rollouts, discarded={"1/p#1": "aborted"}, groups=groups, metrics={"draft/acceptance": 0.75}
    )

    torch.save(batch.state_dict(), tmp_path / "state.pt")
    loaded_batch = GenerationBatch.from_state(torch.load(tmp_path / "state.pt", weights_only=True))

    assert (loaded_batch.discarded, loaded_batch.metrics) == (batch.discarded, batch.metrics)
    assert [group.has_equal_rewards for group in loaded_batch.groups] == [False, True]
    assert [[member.score for member in group.members] for group in loaded_batch.groups] == [
        [score] for score in scores
    ]
    assert loaded_batch.groups[1].members[0].score.error_text == scores[1].error_text
    assert [group.members[0].rollout for group in loaded_batch.groups] == [
        loaded_batch.generated[0],
        loaded_batch.generated[2],
    ]

    for saved_rollout, loaded_rollout in zip(rollouts, loaded_batch.generated, strict=True):
        for name in (field.name for field in fields(Rollout)):
            saved_value, loaded_value = getattr(saved_rollout, name), getattr(loaded_rollout, name)
            if name not in TOKEN_COLUMNS:
                assert saved_value == loaded_value
            elif len(saved_value):
                assert torch.equal(saved_value, loaded_value)
                assert saved_value.dtype == loaded_value.dtype
            else:
                assert len(loaded_value) == 0
