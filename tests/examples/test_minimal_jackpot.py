"""examples/minimal_jackpot.py, the method on one page: its tokens, metrics and weights are those of the trainer."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
import torch

from examples import minimal_jackpot as minimal
from helpers.paths import ROOT
from helpers.runs import run
from jackpot.config.recipes import resolve
from jackpot.config.tasks import ArithmeticConfig
from jackpot.core.prng import fold_in, key_tensor, uniforms
from jackpot.models.load import load_model, load_tokenizer
from jackpot.rollout.tasks.base import PromptStream
from jackpot.rollout.tasks.registry import make_task

STEPS, PROMPTS = 3, 6  # iterations, and problems of each


class TrainerRun(NamedTuple):
    """The trainer's iterations with the settings of the page."""

    folder: Path
    lines: list[dict]  # metrics of each iteration


@pytest.fixture(scope="module")
def trainer_run(tmp_path_factory: pytest.TempPathFactory) -> TrainerRun:
    """Three iterations of the trainer with the settings of the page."""
    folder = tmp_path_factory.mktemp("trained")
    rates = [f"{role}.optimizer.learning_rate={rate}" for role, rate in minimal.LEARNING_RATE.items()]
    batch = [f"batch.prompts={PROMPTS}", f"batch.group_size={minimal.GROUP}"]
    brevity = ["evaluation.problems=2", "evaluation.every=3", "checkpoint.every=3", "rollouts.every=1", "threads=1"]
    lines = run(resolve("quickstart", None, [f"iterations={STEPS}", *rates, *batch, *brevity]), folder)
    return TrainerRun(folder, lines[1:])  # without the line of the start


class Page(NamedTuple):
    """The iterations of the page, on the trainer's problems and random numbers."""

    jackpot: minimal.Jackpot
    metrics: list[dict[str, float]]
    rollouts: list[minimal.Rollouts]
    uids: list[list[str]]  # the trainer's names of the responses


@pytest.fixture(scope="module")
def page() -> Page:
    """As many iterations of the page as the trainer did."""
    page = Page(minimal.Jackpot(), metrics=[], rollouts=[], uids=[])
    generate = minimal.generate

    def recording_generate(*arguments) -> minimal.Rollouts:
        page.rollouts.append(generate(*arguments))
        return page.rollouts[-1]

    stream = PromptStream(make_task(ArithmeticConfig(max_operand=40), load_tokenizer("starter:policy")), "train", 0)
    positions = torch.arange(minimal.MAX_TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimal, "generate", recording_generate)
        for iteration in range(1, STEPS + 1):
            prompts = [prompt for prompt in stream.next(PROMPTS) for _ in range(minimal.GROUP)]
            problems = [minimal.Problem(prompt.text, prompt.answer) for prompt in prompts]
            uids = [f"{iteration}/{prompt.uid}#{index % minimal.GROUP}" for index, prompt in enumerate(prompts)]
            token_keys = key_tensor([fold_in("token", fold_in(0, "sample", uid)) for uid in uids])[:, None]
            coin_keys = key_tensor([fold_in(0, "accept", uid, 0) for uid in uids])[:, None]
            metrics = page.jackpot.iterate(problems, uniforms(token_keys, positions), uniforms(coin_keys, positions))
            page.metrics.append(metrics)
            page.uids.append(uids)
    return page


METRICS = (
    *("obrs/acceptance", "obrs/z", "obrs/kappa", "correction/accepted", "correction/weight"),
    *("policy/loss", "rollout_model/ppo_loss", "rollout_model/distill_loss", "reward/mean"),
    *("policy/grad_norm", "rollout_model/grad_norm"),
)


def test_its_rollouts_are_the_trainers(trainer_run: TrainerRun, page: Page) -> None:
    """The same tokens; their log-probs up to the rounding of sums in another order."""
    for iteration, (rollouts, uids) in enumerate(zip(page.rollouts, page.uids, strict=True), start=1):
        [path] = (trainer_run.folder / "rollouts").glob(f"*{iteration}.parquet")
        rows = {row["uid"]: row for row in pq.read_table(path).to_pylist()}
        assert rows.keys() == set(uids)

        for uid, ids, mask, log_probs in zip(uids, rollouts.ids, rollouts.mask, rollouts.log_probs, strict=True):
            assert ids[mask].tolist() == rows[uid]["token_ids"], uid
            assert log_probs[mask].tolist() == pytest.approx(rows[uid]["rollout_log_probs"], abs=1e-4)


def test_its_metrics_are_the_trainers(trainer_run: TrainerRun, page: Page) -> None:
    for metrics, line in zip(page.metrics, trainer_run.lines, strict=True):
        assert metrics.keys() == set(METRICS)
        assert metrics == pytest.approx({name: line[name] for name in METRICS}, rel=2e-4, abs=1e-5)
        assert metrics["correction/accepted"] == pytest.approx(line["correction/accepted"], rel=1e-6)  # the same tokens

        # none has a value at which the comparison says nothing
        assert metrics["correction/accepted"] < 0.99
        assert abs(metrics["policy/loss"]) > 1e-3
        assert metrics["obrs/kappa"] != 1.0


def distance(weights: dict[str, torch.Tensor], other_weights: dict[str, torch.Tensor]) -> float:
    """Return the Euclidean distance of two models."""
    return sum(float((weight - other_weights[name]).square().sum()) for name, weight in weights.items()) ** 0.5


def test_its_weights_are_the_trainers(trainer_run: TrainerRun, page: Page) -> None:
    """AdamW's first steps go by the sign of a gradient, so that one near 0 may turn by rounding."""
    for role, model in page.jackpot.models.items():
        checkpoint = trainer_run.folder / "checkpoints" / f"step-{STEPS}" / role
        trainer_weights = load_model(checkpoint, torch.float32).state_dict()
        start_weights = load_model(f"starter:{role}", torch.float32).state_dict()

        weights = model.state_dict()
        distance_to_trainer = distance(weights, trainer_weights)
        distance_to_start = distance(weights, start_weights)
        assert distance_to_trainer < 1e-3 * distance_to_start
        assert distance_to_start > 0.1


def test_it_prints_how_both_models_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Two iterations and 24 problems in place of 40 and 512: what they say of the models is noise."""
    problems = minimal.problems
    monkeypatch.setattr(minimal, "ITERATIONS", 2)
    monkeypatch.setattr(minimal, "EVERY", 1)
    monkeypatch.setattr(minimal, "PROMPTS", 3)
    monkeypatch.setattr(
        minimal, "problems", lambda seed, number, held_out=False: problems(seed, min(number, 24), held_out)
    )

    minimal.main()

    printed_lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed_lines[1:]] == ["iteration", "0", "1", "2"]
    assert all(re.fullmatch(r" +\d+ +\d+\.\d% +\d+\.\d% *( +\d+\.\d%)?", line) for line in printed_lines[2:])


@pytest.mark.slow
def test_its_command_learns_as_printed() -> None:
    command = [sys.executable, "-m", "examples.minimal_jackpot"]

    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert process.returncode == 0, process.stderr
    assert not process.stderr
    rows = [[float(word.strip("%")) for word in line.split()] for line in process.stdout.splitlines()[2:]]
    _, first_policy, first_rollout_model, *_ = rows[0]  # percents of right answers
    iteration, last_policy, last_rollout_model, *_ = rows[-1]
    assert iteration == 40
    assert last_policy > first_policy + 8.0
    assert last_rollout_model > first_rollout_model + 5.0


def test_no_problem_is_both_trained_on_and_held_out() -> None:
    training_sums, held_out_sums = (  # as sorted summands: 2+3= and 3+2= are one problem
        {tuple(sorted(problem.text[:-1].split("+"))) for problem in minimal.problems(0, 2000, held_out=held_out)}
        for held_out in (False, True)
    )

    assert not training_sums & held_out_sums
    assert len(held_out_sums) > 500


def test_it_is_short() -> None:
    assert len((ROOT / "examples" / "minimal_jackpot.py").read_text().splitlines()) <= 250
