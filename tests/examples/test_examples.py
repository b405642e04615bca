"""Every example of a recipe trains, and what it adds of its own (a task, a judge, a correction) does what it says."""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from examples import shrink
from helpers.commands import jackpot
from helpers.paths import ROOT
from helpers.runs import SMALL, read_lines, run
from jackpot.analysis.replay.settings import settings_of
from jackpot.config.recipes import resolve
from jackpot.config.tasks import RewardConfig
from jackpot.core.types import DecodedResponse, Prompt
from jackpot.corrections import construct_correction
from jackpot.models.load import load_model, load_tokenizer
from jackpot.objectives.corrections import CorrectionInputs
from jackpot.objectives.obrs import known_z
from jackpot.rollout.rewards.rewards import RewardFn
from jackpot.rollout.tasks.registry import make_task

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.yaml"))
SHORT = (*SMALL, "iterations=1", "sampling.max_new_tokens=48", "evaluation.problems=2")


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def assert_trained(lines: Sequence[Mapping[str, Any]]) -> None:
    """Check the metrics of a run of one iteration: some reward, and none that failed."""
    assert [line["iteration"] for line in lines] == [0, 1]
    assert lines[1]["reward/mean"] > 0.0
    assert lines[1]["reward/errors"] == 0.0


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "own_reward_model" else ()) for name in EXAMPLES[1:]],
)
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    """All but the first, which the next test runs by its command."""
    config = resolve(f"examples/{name}.yaml", None, SHORT)

    assert_trained(run(config, tmp_path))


def test_every_example_says_its_command_and_one_runs_by_it(tmp_path: Path) -> None:
    for name in EXAMPLES:
        assert f"jackpot train examples/{name}.yaml" in (ROOT / "examples" / f"{name}.yaml").read_text()

    process = jackpot("train", f"examples/{EXAMPLES[0]}.yaml", *SHORT, "--run", str(tmp_path / "run"), cwd=ROOT)

    assert process.returncode == 0, process.stderr
    assert_trained(read_lines(tmp_path / "run"))


def test_the_task_gives_part_of_the_reward_near_the_sum() -> None:
    config = resolve("examples/own_task.yaml", None, [])
    with closing(make_task(config.task, load_tokenizer(config.policy.path))) as task:
        prompt = task.prompt("test", 3)
        assert prompt == task.prompt("test", 3)
        assert prompt != task.prompt("train", 3)

        total = int(prompt.answer)
        responses = [f"#{total}", f"#{total + 10}", f"#{total + 11}", "#", ""]  # 10 off is still near
        scores = [task.score(prompt, response, finished=True) for response in responses]

    assert [score.reward for score in scores] == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert [score.correct for score in scores] == [True, False, False, False, False]
    assert task.score(prompt, f"#{total}", finished=False).reward == 0.0


def test_the_environment_asks_again_once_and_pays_half() -> None:
    config = resolve("examples/own_environment.yaml", None, [])
    with closing(make_task(config.task, load_tokenizer(config.policy.path))) as task:
        prompt = task.prompt("train", 0)
        right_answer, wrong_answer = f"1#{prompt.answer}", f"1#{prompt.answer}0"

        second_question = task.step(prompt, wrong_answer)
        assert second_question == f"?{prompt.text}"
        assert task.step(prompt, right_answer) is None
        assert task.step(prompt, wrong_answer + second_question + wrong_answer) is None

        texts = (
            right_answer,
            wrong_answer + second_question + right_answer,
            wrong_answer + second_question + wrong_answer,
        )
        assert [task.score(prompt, text, finished=True).reward for text in texts] == [1.0, 0.5, 0.0]


class Judge(BaseHTTPRequestHandler):
    """Rates a response by its length. The first request is refused (503), and the next two wait for each other."""

    requests: ClassVar[list[dict[str, str]]] = []
    next_two = threading.Barrier(2)

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(question)
        if len(self.requests) == 1:
            self.send_error(503)
            return
        if len(self.requests) <= 3:
            self.next_two.wait(60.0)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": len(question["response"])}).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_the_judge_is_asked_at_once_and_again_after_a_failure(monkeypatch) -> None:
    prompt = Prompt(uid="p", text="2+3=", answer="5", token_ids=())
    responses = [DecodedResponse(prompt, text, finished=True) for text in ("5", "no", "yes")]
    rewards = [RewardConfig(name="examples.own_judge:judged", timeout=60.0, retries=1, environment=("JUDGE_URL",))]

    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/rate")
        with closing(RewardFn(rewards, workers=1, timeout=60.0)) as reward_fn:
            scores = reward_fn.scores(responses, None)
        server.shutdown()

    assert [score.reward for score in scores] == [1.0, 2.0, 3.0]  # the lengths
    assert not any(score.reward_error for score in scores)
    assert sorted(score.reward_retries for score in scores) == [0, 0, 1]
    assert {"problem": "2+3=", "response": "yes", "reference": "5"} in Judge.requests
    assert len(Judge.requests) == 4  # three responses, one of them twice


def test_the_correction_is_smooth_and_never_above_its_cap() -> None:
    correction = construct_correction(resolve("examples/own_correction.yaml", None, []).objective.correction)
    ratio = torch.tensor([[0.01, 1.0, 3.0, 1000.0]])
    zeros, mask = torch.zeros_like(ratio), torch.ones_like(ratio, dtype=torch.bool)
    inputs = CorrectionInputs(
        rollout_log_probs=zeros,
        target_log_probs=ratio.log(),
        proximal_log_probs=ratio.log(),
        response_mask=mask,
        uniforms=zeros.double(),
        advantages=zeros,
        z=known_z(torch.ones_like(ratio)),
    )

    result = correction.apply(inputs, correction.measure(inputs))

    expected_weights = torch.tensor([[0.0099999629, 0.9645382126, 2.2847824670, 3.0]])  # 3 tanh(rho / 3), by hand
    torch.testing.assert_close(result.weights, expected_weights)
    assert result.accept_mask.eq(1.0).all()
    assert result.capped.tolist() == [[False, False, False, True]]


def test_replay_knows_a_runs_own_correction() -> None:
    config = resolve("examples/own_correction.yaml", None, [])

    [run_setting] = [setting for setting in settings_of(config, []) if setting.is_own]

    assert run_setting.name == "custom"
    assert dict(run_setting.changes) == {"import_path": "examples.own_correction:soft_cap", "kwargs": {"cap": 3.0}}
    assert run_setting.objective.correction.formula.__name__ == "soft_cap"


@pytest.mark.slow
def test_shrink_makes_a_smaller_model_that_is_nearer(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Two of three layers, whose distance from the policy shrinks in a few steps."""
    overrides = [
        *("iterations=4", "batch.prompts=8", "evaluation={every: 4, problems: 2}", "threads=1"),
        "sampling.max_new_tokens=16",
    ]

    shrink.shrink("starter:policy", tmp_path / "small", layers=2, recipe="quickstart", overrides=overrides)

    output = capsys.readouterr().out
    model = load_model(tmp_path / "small", torch.float32)
    assert model.config.num_hidden_layers == 2
    assert re.search(r"^layers \d,\d of 3 are kept$", output, re.MULTILINE)
    divergences = [float(digits) for digits in re.findall(r"iteration \d+: KL ([\d.]+)", output)]
    assert divergences[-1] < 0.7 * divergences[0]
    assert re.search(r"small-start +\d+% ", output)
    assert re.search(r"small +\d+% ", output)
