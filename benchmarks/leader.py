"""What the one process that leads a run computes on every token of a rollout batch, in CPU seconds: it deals the
responses out to micro-batches, which is serial however many GPUs train. Nothing is kept.

    OMP_NUM_THREADS=1 python benchmarks/leader.py --responses 256
"""

import argparse
import math
import random
import time

import torch
from torch import Tensor

from jackpot.core.types import Prompt, Rollout, Score, ScoredRollout
from jackpot.training.advantages import response_advantages
from jackpot.training.batching import mini_batches

SCALE, LIMIT, PROMPT, TOP, GROUP, BUDGET = (
    2089,
    8192,
    120,
    20,
    8,
    9216,
)  # joint_8b; SCALE gives 2,048 tokens in the mean


def rollouts(count: int) -> list[ScoredRollout]:
    draws, generator = random.Random(0), torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        prompt = Prompt(uid=f"p{number // GROUP}", text="", answer="", token_ids=tuple(range(1, PROMPT + 1)))
        tokens = min(LIMIT, math.ceil(draws.expovariate(1 / SCALE)))
        log_probs = torch.randn(tokens, TOP, generator=generator).log_softmax(-1)
        rollout = Rollout(
            uid=f"1/{prompt.uid}#{number % GROUP}",
            prompt=prompt,
            finish="stop",
            token_ids=torch.randint(150_000, (tokens,), generator=generator),
            rollout_log_probs=log_probs[:, 0].contiguous(),
            sampled_mask=torch.ones(tokens, dtype=torch.bool),
            top_ids=torch.randint(150_000, (tokens, TOP), generator=generator),
            top_log_probs=log_probs,
            versions=torch.zeros(tokens, 2, dtype=torch.int64),
        )
        made.append(ScoredRollout(rollout=rollout, score=Score(reward=float(draws.random() < 0.5))))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    scored = rollouts(given.responses)
    tokens = sum(len(one.rollout.token_ids) for one in scored)
    for _ in range(given.repetitions):
        start = time.process_time()
        samples = response_advantages("grpo", scored)
        [batches] = mini_batches(samples, mini_batch_size=len(samples), epochs=1, micro_batch_tokens=BUDGET, seed=0)
        spent = time.process_time() - start
        held = [
            value for batch in batches for name in batch.__slots__ if isinstance(value := getattr(batch, name), Tensor)
        ]
        size = sum(value.numel() * value.element_size() for value in held)
        print(
            f"{tokens:,} tokens, {len(batches)} micro-batches: {1e6 * spent / tokens:.2f} CPU microseconds and "
            f"{size / tokens:.0f} bytes a token"
        )


if __name__ == "__main__":
    main()
