"""examples/minimal_jackpot.py, the method on one page, has the numbers of the trainer."""

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

STEPS, PROMPTS = 3, 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Three iterations of the trainer with the settings of the page, and their metrics."""
    folder = tmp_path_factory.mktemp("trained")
    rates = [f"{role}.optimizer.learning_rate={rate}" for role, rate in minimal.LEARNING_RATE.items()]
    batch = [f"batch.prompts={PROMPTS}", f"batch.group_size={minimal.GROUP}"]
    quick = ["evaluation.problems=2", "evaluation.every=3", "checkpoint.every=3", "rollouts.every=1", "threads=1"]
    lines = run(resolve("quickstart", None, [f"iterations={STEPS}", *rates, *batch, *quick]), folder)
    return folder, lines[1:]


class Page(NamedTuple):
    """The iterations of the page, on the trainer's problems and random numbers."""

    jackpot: minimal.Jackpot
    metrics: list[dict[str, float]]
    rollouts: list[minimal.Rollouts]
    uids: list[list[str]]  # the trainer's names of the responses


@pytest.fixture(scope="module")
def page() -> Page:
    """Run as many iterations of the page."""
    done, generate = Page(minimal.Jackpot(), [], [], []), minimal.generate

    def recorded(*arguments) -> minimal.Rollouts:
        done.rollouts.append(generate(*arguments))
        return done.rollouts[-1]

    stream = PromptStream(make_task(ArithmeticConfig(max_operand=40), load_tokenizer("starter:policy")), "train", 0)
    positions = torch.arange(minimal.MAX_TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimal, "generate", recorded)
        for iteration in range(1, STEPS + 1):
            prompts = [prompt for prompt in stream.next(PROMPTS) for _ in range(minimal.GROUP)]
            uids = [f"{iteration}/{prompt.uid}#{index % minimal.GROUP}" for index, prompt in enumerate(prompts)]
            tokens = key_tensor([fold_in("token", fold_in(0, "sample", uid)) for uid in uids])[:, None]
            coins = key_tensor([fold_in(0, "accept", uid, 0) for uid in uids])[:, None]
            asked = [minimal.Problem(prompt.text, prompt.answer) for prompt in prompts]
            metrics = done.jackpot.iterate(asked, uniforms(tokens, positions), uniforms(coins, positions))
            done.metrics.append(metrics)
            done.uids.append(uids)
    return done


METRICS = (
    *("obrs/acceptance", "obrs/z", "obrs/kappa", "correction/accepted", "correction/weight"),
    *("policy/loss", "rollout_model/ppo_loss", "rollout_model/distill_loss", "reward/mean"),
    *("policy/grad_norm", "rollout_model/grad_norm"),
)


def test_its_rollouts_are_the_trainers(trained, page: Page) -> None:
    """The same tokens; their log-probs up to the rounding of sums in another order."""
    for iteration, (rollouts, uids) in enumerate(zip(page.rollouts, page.uids, strict=True), start=1):
        [path] = (trained[0] / "rollouts").glob(f"*{iteration}.parquet")
        rows = {row["uid"]: row for row in pq.read_table(path).to_pylist()}
        assert rows.keys() == set(uids)
        for uid, ids, mask, log_probs in zip(uids, rollouts.ids, rollouts.mask, rollouts.log_probs, strict=True):
            assert ids[mask].tolist() == rows[uid]["token_ids"], uid
            assert log_probs[mask].tolist() == pytest.approx(rows[uid]["rollout_log_probs"], abs=1e-4)


def test_its_metrics_are_the_trainers(trained, page: Page) -> None:
    for found, line in zip(page.metrics, trained[1], strict=True):
        assert found.keys() == set(METRICS)
        assert found == pytest.approx({name: line[name] for name in METRICS}, rel=2e-4, abs=1e-5)
        assert found["correction/accepted"] == pytest.approx(line["correction/accepted"], rel=1e-6)  # the same tokens
        assert found["correction/accepted"] < 0.99 and abs(found["policy/loss"]) > 1e-3 and found["obrs/kappa"] != 1.0


def test_its_weights_are_the_trainers(trained, page: Page) -> None:
    """AdamW's first steps go by the sign of a gradient, so that one near 0 may turn by rounding."""
    for role, model in page.jackpot.models.items():
        expected = load_model(trained[0] / "checkpoints" / f"step-{STEPS}" / role, torch.float32).state_dict()
        start = load_model(f"starter:{role}", torch.float32).state_dict()
        apart, moved = (
            sum(float((weight - other[name]).square().sum()) for name, weight in model.state_dict().items()) ** 0.5
            for other in (expected, start)
        )
        assert apart < 1e-3 * moved and moved > 0.1


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
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[1:]] == ["iteration", "0", "1", "2"]
    assert all(re.fullmatch(r" +\d+ +\d+\.\d% +\d+\.\d% *( +\d+\.\d%)?", line) for line in said[2:])


@pytest.mark.slow
def test_its_command_learns_as_printed() -> None:
    done = subprocess.run([sys.executable, "-m", "examples.minimal_jackpot"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    rows = [[float(word.strip("%")) for word in line.split()] for line in done.stdout.splitlines()[2:]]
    first, last = rows[0], rows[-1]
    assert last[0] == 40 and last[1] > first[1] + 8.0 and last[2] > first[2] + 5.0


def test_no_problem_is_both_trained_on_and_held_out() -> None:
    trained, held_out = (
        {tuple(sorted(one.text[:-1].split("+"))) for one in minimal.problems(0, 2000, part)} for part in (False, True)
    )
    assert not trained & held_out and len(held_out) > 500


def test_it_is_short() -> None:
    assert len((ROOT / "examples" / "minimal_jackpot.py").read_text().splitlines()) <= 250
