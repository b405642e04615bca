"""The reward_fn in its processes: which rewards it gives, its limits, what a hostile answer or a bad function costs."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import jackpot
from jackpot.config.tasks import RewardConfig, VerdictConfig
from jackpot.core.errors import ConfigError, TrainingError
from jackpot.core.types import DecodedResponse, Prompt, RewardError, Score
from jackpot.rollout.rewards.pool import CallLimits, RewardWorkerPool
from jackpot.rollout.rewards.rewards import RewardFn
from jackpot.rollout.rewards.worker import GRACE

PATIENCE = 60.0  # seconds until something that must happen counts as not happening
TIMEOUT = 1.0  # seconds for one job
BOMB = r"\boxed{9^{9^{9^9}}}"  # C code that holds the interpreter's lock for ever
FINE, WRONG = r"\boxed{9 \cdot 2}", r"\boxed{9 \cdot 3}"  # algebra


def answer(response: str, reference: str = "18", finished: bool = True) -> DecodedResponse:
    """Return a response to the one problem of this file."""
    return DecodedResponse(Prompt(uid="p", text="What is it?", answer=reference, token_ids=(1,)), response, finished)


def score(reward: float, correct: bool, error: RewardError | None = None) -> Score:
    return Score(reward=reward, correct=correct, reward_error=error)


def reward_fn_of(*rewards: str | RewardConfig, workers: int = 1, timeout: float = TIMEOUT) -> RewardFn:
    """Return a reward_fn of the rewards, each one a name or a config."""
    configs = [RewardConfig(name=reward) if isinstance(reward, str) else reward for reward in rewards]
    return RewardFn(configs, workers=workers, timeout=timeout)


def reward_of(name: str, **limits: float) -> RewardConfig:
    """Return the config of a function of helpers/reward_functions.py."""
    return RewardConfig(name=f"helpers.reward_functions:{name}", **limits)


SAYS = "helpers.reward_functions:says"


def says_item(response: str) -> dict[str, object]:
    """Return one job of the function `says`."""
    return {"problem": "p", "response": response, "answer": "1", "finished": True}


def is_alive(process: int) -> bool:
    """Return whether the process exists and is no zombie."""
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1][:3]
    except OSError:
        return False


def wait_until(has_happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not has_happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def reward_fn() -> Iterator[RewardFn]:
    """Yield a reward_fn that gives 1 for what is right."""
    with closing(reward_fn_of("correct")) as correct_fn:
        yield correct_fn


@pytest.fixture(scope="module")
def says() -> Iterator[RewardFn]:
    """Yield a reward_fn that gives 10 for what is right and 1 for all, unless the response has it do something else."""
    correct = RewardConfig(name="correct", weight=10.0)
    with closing(reward_fn_of(correct, "helpers.reward_functions:says", timeout=0.5)) as says_fn:
        yield says_fn


def test_plain_answers_and_algebra_are_scored_in_order(reward_fn):
    right_responses = [r"\boxed{18}", FINE, "#### 18", r"\boxed{\sqrt{324}}"]
    wrong_responses = [r"\boxed{19}", WRONG, "18", r"\boxed{}", r"\boxed{\sqrt{325}}"]
    responses = [*right_responses, *wrong_responses] * 2

    assert reward_fn.scores([]) == []

    scores = reward_fn.scores([answer(response) for response in responses])

    assert scores == [
        score(float(response in right_responses), correct=response in right_responses) for response in responses
    ]


def test_a_bomb_costs_its_own_reward_and_nothing_else(reward_fn, monkeypatch):
    questions = []
    submit = reward_fn._verifier.submit

    def record_and_submit(comparisons, limit):
        questions.extend(comparison["answer"] for comparison in comparisons)
        return submit(comparisons, limit)

    monkeypatch.setattr(reward_fn._verifier, "submit", record_and_submit)
    start_time = time.monotonic()

    scores = reward_fn.scores([answer(response) for response in (FINE, BOMB, WRONG, FINE, BOMB, r"\boxed{x}")])

    assert [score.reward_error for score in scores] == [None, "timeout", None, None, "timeout", None]
    assert [score.correct for score in scores] == [True, False, False, True, False, False]
    assert scores[1].error_text == "correct: took longer than 1 s"
    assert questions.count("9^{9^{9^9}}") == 1  # equal bombs are one question
    assert time.monotonic() - start_time < 2 * TIMEOUT + PATIENCE

    assert reward_fn.scores([answer(FINE)]) == [score(1.0, correct=True)]


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" + "9" * 10_000_000 + "}",
        r"\boxed{" * 1_000_000,
        "#### " + "9" * 10_000_000,
        r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n^n}}",
        "\\boxed{\0}",
        "\\boxed{\ud800}",
    ],
    ids=["10 MB", "boxes", "hashes", "sum", "NUL", "surrogate"],
)
def test_hostile_answers_are_wrong_and_harm_nobody(reward_fn, response):
    hostile_score, fine_score = reward_fn.scores([answer(response), answer(FINE)])
    assert not hostile_score.correct
    assert hostile_score.reward == 0.0
    assert fine_score == score(1.0, correct=True)


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("killed", "crash"),
        ("quit", "crash"),
        ("raise", "crash"),
        ("hoard", "crash"),
        ("sleep", "timeout"),
        ("spin", "timeout"),
    ],
)
def test_a_reward_function_that_fails_costs_its_own_part_only(says, word, error):
    right_answer = r" and \boxed{18}"

    scores = says.scores([answer("fine" + right_answer), answer(word + right_answer), answer("fine" + right_answer)])

    assert scores[0] == score(11.0, correct=True)  # 10 for what is right and 1 of the function
    assert scores[2] == score(11.0, correct=True)
    assert scores[1] == score(10.0, correct=True, error=error)

    end_message = "helpers.reward_functions:says: its process ended twice"
    assert scores[1].error_text.startswith(end_message) is (word in ("killed", "quit"))


def test_what_a_reward_function_prints_is_no_answer(says):
    assert says.scores([answer(r"print \boxed{18}")]) == [score(11.0, correct=True)]


def test_a_function_that_keeps_memory_makes_no_other_fail():
    with closing(reward_fn_of(reward_of("says", timeout=PATIENCE, memory=0.2))) as says_fn:
        scores = says_fn.scores([answer(f"leak {index}") for index in range(5)])  # 300 MiB, and the limit is 205 MiB
    assert scores == [score(1.0, correct=False)] * 5


def test_the_child_of_a_reward_function_ends_at_its_timeout(says, tmp_path):
    note = tmp_path / "child"
    assert says.scores([answer(f"child {note}")])[0].reward_error == "timeout"
    wait_until(lambda: not is_alive(int(note.read_text())))


def test_a_process_that_ended_between_two_calls_is_replaced():
    with closing(reward_fn_of(reward_of("process"))) as process_fn:
        [first_score] = process_fn.scores([answer("")])
        os.kill(int(first_score.reward), signal.SIGKILL)

        [second_score, third_score] = process_fn.scores([answer("")] * 2)

    # each reward is the id of the process
    assert first_score.reward != second_score.reward
    assert second_score.reward == third_score.reward
    assert third_score.reward > 0


def test_a_process_outlives_the_alarm_of_a_call_that_has_ended():
    timeout = 0.5
    with closing(reward_fn_of(reward_of("process"), timeout=timeout)) as process_fn:
        [first_score] = process_fn.scores([answer("")])
        time.sleep(timeout + GRACE + 0.2)  # seconds in which an alarm that was not taken back ends the process
        [second_score] = process_fn.scores([answer("")])

    assert first_score.reward == second_score.reward  # the id of the process
    assert first_score.reward > 0


def test_a_limit_of_infinity_is_none():
    with closing(reward_fn_of(reward_of("one"), timeout=math.inf)) as endless_fn:
        assert endless_fn.scores([answer("")]) == [score(1.0, correct=False)]


def test_rewards_are_summed_by_their_weights():
    rewards = [
        RewardConfig(name="format", weight=0.25),
        RewardConfig(name="helpers.reward_functions:length", weight=2.0),
    ]

    with closing(reward_fn_of(*rewards)) as weighted_fn:
        scores = weighted_fn.scores([answer(r"\boxed{18}"), answer(r"\boxed{1}\boxed{18}"), answer("18")])

    # 0.25 for the format, which one box has alone, and 2 for each of 10, 19 and 2 characters
    assert scores == [score(0.25 + 20.0, correct=True), score(38.0, correct=True), score(4.0, correct=False)]


def test_a_function_gets_problem_response_answer_and_finished():
    with closing(reward_fn_of("helpers.reward_functions:arguments")) as arguments_fn:
        responses = [answer("Say \\boxed{5}", "5", finished=False), answer("Say \\boxed{5}", "5", finished=True)]
        assert [score.reward for score in arguments_fn.scores(responses)] == [1.0, 0.0]


def test_a_reward_that_is_no_number_or_huge_is_refused(capfd):
    bad_rewards = ["infinite", "words", "nothing", "huge"]

    with closing(reward_fn_of(reward_of("returns"))) as returns_fn:
        scores = returns_fn.scores([answer(word) for word in bad_rewards])
    assert scores == [score(0.0, correct=False, error="invalid")] * 4

    error_output = capfd.readouterr().err
    assert error_output.count("Traceback") == 1  # once, and not for each answer
    assert "a number from -1e30 to 1e30" in error_output


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("raises", r"RuntimeError: no judge answers \(.*/reward_functions\.py, line \d+\)"),
        ("returns", r"InvalidReward: helpers\.reward_functions:returns returned None; a reward is .*"),
        ("judged", r"took longer than 0\.2 s"),
    ],
)
def test_why_a_reward_failed_stands_in_its_score(name, text):
    response = {"judged": "sleep", "returns": "nothing"}.get(name, "3")

    with closing(reward_fn_of(reward_of(name, timeout=0.2))) as failing_fn:
        [failed_score] = failing_fn.scores([answer(response)])

    assert re.fullmatch(rf"helpers\.reward_functions:{name}: {text}", failed_score.error_text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("corect", "unknown reward 'corect'; did you mean 'correct'.* Valid: correct, format, package.module:function"),
        ("a b:c", "unknown reward 'a b:c'"),
        ("os.path", "unknown reward 'os.path'"),
        ("no_such_module:f", "'no_such_module:f' cannot be imported: ModuleNotFoundError.* must lie in the current"),
        ("helpers.reward_functions:none", "'helpers.reward_functions:none' cannot be imported: AttributeError"),
        ("helpers.reward_functions:number", "reward_functions:number' is a int; name a class or a function"),
    ],
)
def test_a_reward_that_does_not_exist_is_refused_at_the_start(name, message):
    with pytest.raises(ConfigError, match=message):
        reward_fn_of("correct", name)


def test_async_calls_are_awaited_together():
    with closing(reward_fn_of(reward_of("together"))) as together_fn:
        assert together_fn.scores([answer("5")] * 5) == [score(1.0, correct=False)] * 5


def test_each_async_call_has_a_limit_of_its_own():
    error_of_response = {"fine": None, "raise": "crash", "sleep": "timeout"}
    with closing(reward_fn_of(reward_of("judged", timeout=1.0))) as judged_fn:
        scores = judged_fn.scores([answer(text) for text in error_of_response])

    assert [score.reward_error for score in scores] == [*error_of_response.values()]
    assert scores[0].reward == 1.0


@pytest.mark.parametrize(("text", "error"), [("block", "timeout"), ("exit", "crash")])
def test_a_process_that_async_calls_end_costs_what_was_undone(text, error):
    with closing(reward_fn_of(reward_of("judged", timeout=0.5))) as judged_fn:
        scores = judged_fn.scores([answer("fine"), answer(text), answer("fine")])

    assert scores[1] == score(0.0, correct=False, error=error)
    if text == "exit":  # a blocked process may take the others with it
        assert scores[0] == score(1.0, correct=False)
        assert scores[2] == score(1.0, correct=False)


def test_a_function_with_a_parameter_responses_gets_batches():
    with closing(reward_fn_of(reward_of("batch", batch_size=3), workers=2)) as batch_fn:
        assert [score.reward for score in batch_fn.scores([answer("")] * 7)] == [3.0] * 6 + [1.0]


def test_a_failed_batch_costs_the_rewards_of_its_call():
    with closing(reward_fn_of(reward_of("batch", batch_size=3), workers=2)) as batch_fn:
        invalid_result = [score(0.0, correct=False, error="invalid"), score(2.0, correct=False)]
        assert batch_fn.scores([answer("none"), answer("")]) == invalid_result

        failed_call = [score(0.0, correct=False, error="crash")] * 2  # of both answers
        assert batch_fn.scores([answer("raise"), answer("")]) == failed_call
        assert batch_fn.scores([answer("short"), answer("")]) == failed_call

        ended_process = [score(0.0, correct=False, error="crash"), score(1.0, correct=False)]  # each is tried alone
        assert batch_fn.scores([answer("exit"), answer("")]) == ended_process


def test_an_async_function_gets_batches_too():
    with closing(reward_fn_of(reward_of("async_batch"))) as async_fn:
        assert [score.reward for score in async_fn.scores([answer("")] * 7)] == [7.0] * 7


def test_a_call_that_failed_is_repeated_and_counted(tmp_path):
    with closing(reward_fn_of(reward_of("fails_once", retries=1))) as failing_fn:
        scores = failing_fn.scores([answer(str(tmp_path / "a")), answer(str(tmp_path / "b"))])
        assert scores == [Score(reward=1.0, correct=False, reward_retries=1)] * 2

        [failed_score] = failing_fn.scores([answer(str(tmp_path / "no" / "folder"))])
        assert failed_score == Score(reward=0.0, correct=False, reward_error="crash", reward_retries=1)


def test_a_killed_worker_costs_nothing_if_the_call_fits_alone(tmp_path):
    with closing(reward_fn_of(reward_of("runs_until", timeout=PATIENCE), workers=2)) as waiting_fn:
        scores_of_batch = waiting_fn.submit([answer(str(tmp_path / name)) for name in "abc"])

        wait_until(lambda: all((tmp_path / name).exists() for name in "ab"))
        os.kill(int((tmp_path / "a").read_text()), signal.SIGKILL)
        (tmp_path / "go").touch()

        assert scores_of_batch() == [score(1.0, correct=False)] * 3


def test_a_response_that_waits_longer_than_the_limit_times_out():
    with closing(reward_fn_of(reward_of("waits"))) as waiting_fn:
        waiting_fn.scores([answer("0.0")])  # the process is ready

        scores = waiting_fn.submit([answer(seconds) for seconds in ("0.5", "0.01", "0.02")], limit=0.25)()
        assert scores == [
            score(0.5, correct=False),
            score(0.0, correct=False, error="timeout"),
            score(0.0, correct=False, error="timeout"),
        ]

        assert waiting_fn.submit([answer("0.01")] * 3)() == [score(0.01, correct=False)] * 3


def test_the_verdict_decides_what_is_right():
    length_verdict = VerdictConfig(name="helpers.reward_functions:length", threshold=5.0)
    verdicts = [
        (VerdictConfig(name="correct"), [True, False]),
        (VerdictConfig(name="format"), [True, True]),
        (VerdictConfig(name="reward", threshold=1.0), [True, False]),  # 0.3 + 0.6 + 0.1 is 0.9999999999999999
        (VerdictConfig(name="reward", threshold=0.9), [True, True]),
        (length_verdict, [True, True]),
        (length_verdict.model_copy(update={"threshold": 12.0}), [False, False]),
        (None, [None, None]),
    ]

    rewards = [
        RewardConfig(name="format", weight=0.3),
        reward_of("one", weight=0.6),
        RewardConfig(name="correct", weight=0.1),
    ]

    with closing(RewardFn(rewards, workers=1, timeout=TIMEOUT, verdict=length_verdict)) as reward_fn:
        for verdict, correct in verdicts:
            scores = reward_fn.scores([answer(r"\boxed{18}"), answer(r"\boxed{19}")], verdict)
            assert [score.correct for score in scores] == correct, verdict


def test_a_failed_reward_is_never_right_by_a_reward_threshold():
    verdict = VerdictConfig(name="reward", threshold=-1.0)
    with closing(reward_fn_of("format", reward_of("judged"))) as judged_fn:
        scores = judged_fn.scores([answer("raise"), answer("fine")], verdict)
    assert [score.correct for score in scores] == [False, True]


def test_answers_are_not_verified_where_nothing_asks_for_it():
    with closing(reward_fn_of(reward_of("one"))) as plain_fn:
        assert plain_fn.scores([answer(FINE), answer(BOMB)], verdict=None) == [Score(reward=1.0)] * 2

        assert plain_fn.scores([answer("#### 18"), answer("#### 19")]) == [
            score(1.0, correct=True),
            score(1.0, correct=False),
        ]
        assert not plain_fn._verifier.process_ids  # numbers need none


def test_the_order_of_rewards_is_that_of_answers():
    seconds = [0.5, 0.01, 0.02, 0.03, 0.04]
    with closing(reward_fn_of("helpers.reward_functions:waits", workers=2)) as waiting_fn:
        assert [score.reward for score in waiting_fn.scores([answer(str(duration)) for duration in seconds])] == seconds


def test_a_reward_worker_does_not_import_torch():
    with closing(reward_fn_of("helpers.reward_functions:has_torch")) as torch_fn:
        assert torch_fn.scores([answer("#### 18")]) == [score(0.0, correct=True)]


def test_a_closed_reward_fn_has_no_processes_and_says_so():
    reward_fn = reward_fn_of(reward_of("length"), reward_of("one"))
    processes = [process for pool in reward_fn._functions.values() for process in pool.process_ids]
    assert len(processes) == 2
    assert all(map(is_alive, processes))

    reward_fn.close()
    reward_fn.close()  # a second time does nothing

    assert not any(map(is_alive, processes))

    with pytest.raises(TrainingError, match="closed"):
        reward_fn.scores([answer(FINE)])


FORGED = [
    "no JSON",
    "[]",
    "7",
    "[" * 10_000,
    '{"item": 0}',
    '{"item": 9, "result": {"value": 1.0, "error": null}}',
    '{"item": -1, "result": {"value": 1.0, "error": null}}',
    '{"item": 0, "result": {"value": "1", "error": null}}',
    '{"item": 0, "result": {"value": NaN, "error": null}}',
    '{"item": 0, "result": {"value": 1.0, "error": "mine"}}',
    '{"item": 0, "result": {"value": 1.0, "error": null, "more": 1}}',
    '{"item": 0, "result": {"value": 1e300, "error": null}}',
    '{"item": 0, "result": {"value": 1.0, "error": null, "text": {}}}',
    '{"worn": false}',
]


@pytest.mark.parametrize("line", FORGED, ids=range(len(FORGED)))
def test_a_forged_result_counts_as_the_functions_failure(line):
    pool = RewardWorkerPool(SAYS, CallLimits(PATIENCE), workers=1)
    with closing(pool):
        forged_result, fine_result = pool.submit([says_item(f"forge {line}"), says_item("fine")])()

    assert (forged_result.value, forged_result.error) == (0.0, "crash")
    assert (fine_result.value, fine_result.error) == (1.0, None)


def test_what_a_function_starts_ends_with_it_in_any_session(tmp_path):
    with closing(RewardWorkerPool(SAYS, CallLimits(TIMEOUT), workers=1)) as pool:
        (result,) = pool.submit([says_item(f"escape {tmp_path / 'child'}")])()
        assert result.error == "timeout"
    wait_until(lambda: not is_alive(int((tmp_path / "child").read_text())))


def test_a_function_sees_no_keys_but_those_that_it_is_given(monkeypatch):
    for name in ("VLLM_API_KEY", "HF_TOKEN", "NVIDIA_API_KEY", "OPENAI_API_KEY", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "secret")

    with closing(RewardWorkerPool(SAYS, CallLimits(PATIENCE, environment=("OPENAI_API_KEY",)), workers=1)) as pool:
        visible_counts = {
            "VLLM_API_KEY": 0,
            "HF_TOKEN": 0,
            "NVIDIA_API_KEY": 0,
            "OPENAI_API_KEY": 1,
            "CUDA_DEVICE_ORDER": 1,
        }
        results = pool.submit([says_item(f"sees {name}") for name in visible_counts])()

    assert [result.value for result in results] == [*visible_counts.values()]


def test_a_pool_that_is_closed_while_it_scores_says_so():
    pool = RewardWorkerPool("helpers.reward_functions:waits", CallLimits(PATIENCE), workers=2)
    results_of_batch = pool.submit([{"response": "1000"}] * 9)
    wait_until(lambda: len(pool.process_ids) == 2)
    processes = pool.process_ids

    pool.close()

    assert not any(map(is_alive, processes))
    with pytest.raises(TrainingError, match="closed"):
        results_of_batch()


def test_jackpot_verify_says_whether_answers_are_right():
    assert jackpot.verify(r"So it is $\boxed{\frac{1}{2}}$.", "0.5") is True
    assert jackpot.verify(r"\boxed{5} and #### 18", "18", finished=False) is False

    pairs = [(r"\boxed{18.0}", "18"), ("#### 19", "18"), ("#### 18", "18"), ("18", "18")]
    assert jackpot.verify_all(pairs) == [True, False, True, False]


def test_there_are_as_many_processes_as_there_is_work_for():
    with closing(RewardWorkerPool("helpers.reward_functions:process", CallLimits(TIMEOUT), workers=3)) as pool:
        assert not pool.process_ids

        for _ in range(2):
            pool.submit([{}])()
            assert len(pool.process_ids) == 1

        pool.submit([{}] * 9)()
        assert 1 < len(pool.process_ids) <= 3


def test_a_forgotten_pool_ends_its_processes():
    pool = RewardWorkerPool("helpers.reward_functions:length", CallLimits(TIMEOUT), workers=1)
    pool.wait_until_ready()
    (process,) = pool.process_ids

    del pool

    assert not is_alive(process)


PARENT = """
import sys
from jackpot.rollout.rewards.pool import CallLimits, RewardWorkerPool
idle, busy = (RewardWorkerPool(f"helpers.reward_functions:{name}", CallLimits(timeout=0.5), workers=1)
              for name in ("process", "runs_until"))
for pool in (idle, busy):
    pool.wait_until_ready()
print(*idle.process_ids, *busy.process_ids, flush=True)
for word in sys.stdin:
    print(int(idle.submit([{}])()[0].value), flush=True)
    busy.submit([{"response": word.strip()}])()
"""


@pytest.mark.slow
def test_workers_outlive_ctrl_c_and_end_with_a_killed_parent(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}

    with subprocess.Popen([sys.executable, "-c", PARENT], env=environment, **pipes) as parent:
        processes = [int(word) for word in parent.stdout.readline().split()]
        assert all(os.getpgid(process) == process for process in processes)  # a terminal's signal does not reach them

        for process in processes:
            os.kill(process, signal.SIGINT)

        parent.stdin.write(f"{tmp_path / 'busy'}\n")
        assert int(parent.stdout.readline()) == processes[0]
        wait_until((tmp_path / "busy").exists)
        assert all(map(is_alive, processes))

        parent.kill()
        wait_until(lambda: not any(map(is_alive, processes)))


@pytest.mark.slow
def test_a_reward_worker_whose_import_never_ends_ends_by_itself(tmp_path):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(1000)\n")
    path = [str(tmp_path), *filter(None, sys.path)]
    command = (
        f"import sys; sys.path[:] = {path!r}; from jackpot.rollout.rewards import worker; "
        "worker.GRACE = 0.5; worker.main()"
    )
    setup = {"function": "endless:f", "timeout": 1.0, "start_timeout": 0.5, "memory": None}
    pool_end, worker_end = socket.socketpair()

    with pool_end, worker_end, subprocess.Popen([sys.executable, "-c", command], stdin=worker_end) as process:
        pool_end.sendall(json.dumps(setup).encode() + b"\n")  # and it stays open: no end of the jobs ends the process
        try:
            assert process.wait(PATIENCE) == -signal.SIGALRM
        finally:
            process.kill()


def test_a_process_without_environment_ends_with_its_judge(says, tmp_path):
    """It stands in the judge's process group, which is all that says whose it is."""
    note = tmp_path / "child"
    assert says.scores([answer(f"bare {note}")])[0].reward_error == "timeout"
    wait_until(lambda: not is_alive(int(note.read_text())))


def test_the_second_try_is_the_first_call_of_a_process(tmp_path):
    """What other calls left behind in a process cannot end it a second time."""
    calls = "helpers.reward_functions:calls"
    with closing(RewardWorkerPool(calls, CallLimits(PATIENCE), workers=2)) as pool:
        results_of_both = pool.submit([says_item(str(tmp_path / "go")), says_item(f"exit {tmp_path / 'died'}")])

        wait_until((tmp_path / "died").exists)
        (tmp_path / "go").touch()

        assert [result.value for result in results_of_both()] == [1.0, 1.0]
        assert [result.value for result in pool.submit([says_item("")])()] == [2.0]
