"""Measures how soon a broken engine is found, and whether a sound one is ever suspected.

    python benchmarks/engine_faults.py             # tokens until the guard stops a run, for each fault (5 minutes)
    python benchmarks/engine_faults.py --runs 200  # honest runs: what diagnose says about acceptance and Z (10 minutes)

Both print the tables of docs/vllm.md and docs/metrics.md. One thread, on a CPU.
"""

import argparse
import contextlib
import itertools
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from jackpot.analysis.diagnose.limits import MetricHistory
from jackpot.config.recipes import resolve
from jackpot.core.errors import EngineError
from jackpot.core.prng import fold_in
from jackpot.core.types import Rollout, Version
from jackpot.launch.engines import make_engine
from jackpot.launch.start import launch
from jackpot.models.load import load_tokenizer
from jackpot.models.sampling import Draw, draw_tokens
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.transformers import decoding
from jackpot.rollout.tasks.registry import make_task
from jackpot.training.reported_lists import ReportedLists, SamplingEvidence

MODEL, BATCH = "starter:rollout_model", 64  # responses of a batch
LIMIT = 100_000  # tokens after which an engine counts as not found
DrawFn = Callable[..., Draw]


def drawn_by(**changes: float) -> DrawFn:
    """Return a draw with other settings than it was asked for, which reports the distribution it was asked for."""

    def draw(logits: torch.Tensor, uniforms: torch.Tensor, **asked: Any) -> Draw:
        tokens = draw_tokens(logits, uniforms, **asked | changes).tokens
        reported = draw_tokens(logits, uniforms, **asked)
        log_probs = torch.log_softmax(logits / asked["temperature"], dim=-1).gather(1, tokens[:, None])[:, 0]
        return Draw(tokens, log_probs, reported.top_ids, reported.top_log_probs)

    return draw


FAULTS: dict[str, DrawFn] = {
    "none": draw_tokens,
    "temperature 1.05": drawn_by(temperature=1.05),
    "temperature 1.1": drawn_by(temperature=1.1),
    "temperature 1.3": drawn_by(temperature=1.3),
    "temperature 0.9": drawn_by(temperature=0.9),
    "temperature 0.7": drawn_by(temperature=0.7),
    "top_p 0.95": drawn_by(top_p=0.95),
    "top_k 2": drawn_by(top_k=2),
}


def batches(draw: DrawFn, seed: int) -> Iterator[list[Rollout]]:
    """Generate batches of the quickstart's rollouts with an engine that draws by `draw`."""
    config, tokenizer = resolve("quickstart", None, []), load_tokenizer(MODEL)
    decoding.draw_tokens = draw
    with (
        contextlib.closing(make_engine(config.engine, MODEL, torch.device("cpu"), Version(0, 0))) as engine,
        contextlib.closing(make_task(config.task, tokenizer)) as task,
    ):
        for start in itertools.count(step=4 * BATCH):
            prompts = [task.prompt("train", index) for index in range(start, start + 4 * BATCH)]
            rollouts = engine.generate(
                [
                    Request(uid=one.uid, prompt=one, seed=fold_in(seed, one.uid), sampling=config.sampling)
                    for one in prompts
                ]
            )
            yield from (rollouts[part : part + BATCH] for part in range(0, len(rollouts), BATCH))


def tokens_until_found(draw: DrawFn, seed: int) -> tuple[float, float]:
    """Return the tokens until the guard refuses the engine, inf if it does not, and the largest evidence before."""
    evidence, tokens, largest = SamplingEvidence(), 0, -math.inf
    for rollouts in batches(draw, seed):
        lists = ReportedLists.of(rollouts)
        tokens += len(lists.token_ids)
        try:
            largest = max(largest, evidence.add(lists))
        except EngineError:
            return tokens, largest
        if tokens > LIMIT:
            return math.inf, largest
    raise AssertionError


def print_faults(seeds: int) -> None:
    """Print the table of docs/vllm.md."""
    print("| samples at, and reports temperature 1 | tokens until found, median | least to most |\n|---|---|---|")
    for name, draw in FAULTS.items():
        found = sorted(tokens_until_found(draw, seed) for seed in range(seeds))
        tokens = [each for each, _ in found]
        if tokens[0] == math.inf:
            print(f"| {name} | not in {LIMIT:,}; evidence at most {max(largest for _, largest in found):.2f} of 1 | |")
        else:
            print(f"| {name} | {statistics.median(tokens):,.0f} | {tokens[0]:,.0f} to {tokens[-1]:,.0f} |", flush=True)


HONEST = ((), ("sampling.num_top_log_probs=4",), ("objective.correction.lam=1.5",), ("batch.ppo_epochs=2",))


def print_honest(runs: int, iterations: int = 30) -> None:
    """Train honest quickstart runs on small batches, and print how near `diagnose` came to suspecting the engine."""
    torch.set_num_threads(1)
    largest = []
    for number in range(runs):
        config = resolve(
            "quickstart",
            None,
            [
                f"iterations={iterations}",
                f"seed={number}",
                "batch.prompts=4",
                "evaluation.every=1000",
                "evaluation.problems=1",
                "threads=1",
                *HONEST[number % len(HONEST)],
            ],
        )
        lines: list[dict[str, Any]] = []
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.closing(launch(config, Path(folder) / "run", lines.append)) as trainer,
        ):
            trainer.train()
        series = MetricHistory(lines, [], config).series("obrs/acceptance_error")
        largest.append(max(value for _, value in series))
        if number % 20 == 19:
            print(
                f"{number + 1} runs, {sum(value > 1 for value in largest)} alarms, largest {max(largest):.2f}",
                flush=True,
            )
    quantiles = statistics.quantiles(largest, n=20)
    print(
        f"obrs/acceptance_error, largest of {iterations - 4} values in each of {runs} runs: median "
        f"{statistics.median(largest):.2f}, 95 % {quantiles[-1]:.2f}, largest {max(largest):.2f}; alarms "
        f"{sum(value > 1 for value in largest)}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=0, help="honest runs to train in place of the table of faults")
    parser.add_argument("--seeds", type=int, default=8, help="seeds of each fault")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_honest(arguments.runs) if arguments.runs else print_faults(arguments.seeds)
