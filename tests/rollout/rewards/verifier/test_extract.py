"""Which part of a response is its final answer, and which responses have the asked format."""

import time

import pytest

from jackpot.rollout.rewards.verifier.extract import MAX_ANSWER_LENGTH, final_answer, hashed_answer, is_well_formed


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So it is \boxed{42}.", "42"),
        (r"First \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{ x \in [0, 1) }", r"x \in [0, 1)"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{1 + \boxed{2}}", "2"),
        ("Adding up.\n#### 18", "18"),
        ("#### 5\nNo, wait.\n#### 1,234", "1,234"),
        ("Sum: 4 #### 4 \n\n", "4"),
        ("\\boxed{3}\n#### 4", "3"),
        (r"<think>\boxed{1}</think> It is \boxed{2}", "2"),
        (r"<think>one</think><think>two \boxed{1}</think>\boxed{3}", "3"),
    ],
)
def test_the_answer_is_the_last_box_or_after_the_last_hashes(response, answer):
    assert final_answer(response, finished=True) == answer


@pytest.mark.parametrize(
    "response",
    [
        "",
        "The answer is 5.",
        r"\boxed 5",
        "<answer>5</answer>",
        r"\boxed{}",
        r"\boxed{  }",
        r"\boxed{5} and then \boxed{6",
        "####",
        "#### \n5",
        "##### 5",
        r"<think>\boxed{5}",
        r"<think>so</think>",
        r"</think>\boxed{5}<think>",
        r"\boxed{5}</think>",
    ],
)
def test_nothing_else_is_an_answer(response):
    assert final_answer(response, finished=True) is None


def test_a_cut_response_answers_in_a_box_or_a_finished_line():
    assert final_answer(r"\boxed{5} and", finished=False) == "5"
    assert final_answer("#### 12", finished=False) is None
    assert final_answer("#### 12\n", finished=False) == "12"


@pytest.mark.parametrize(("prefix", "suffix"), [(r"\boxed{", "}"), ("#### ", "")])
def test_an_answer_has_a_greatest_length(prefix, suffix):
    longest_answer = "x" * MAX_ANSWER_LENGTH
    assert final_answer(prefix + longest_answer + suffix, finished=True) == longest_answer
    assert final_answer(prefix + longest_answer + "x" + suffix, finished=True) is None


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" * 1_400_000,
        r"\boxed{" + "9" * 10_000_000 + "}",
        "#### " + "9" * 10_000_000,
        "{" * 10_000_000 + r"\boxed{5}",
    ],
    ids=["nested boxes", "a box", "hashes", "braces"],
)
def test_ten_megabytes_take_no_time(response):
    start_time = time.process_time()

    final_answer(response, finished=True)

    assert time.process_time() - start_time < 2.0  # seconds


@pytest.mark.parametrize(
    ("response", "finished", "expected"),
    [
        (r"It is \boxed{5}.", True, True),
        ("It is\n#### 5", True, True),
        ("It is\n#### 5\n \n", True, True),
        (r"<think>\boxed{1} \boxed{2}</think>\boxed{5}", True, True),
        (r"It is \boxed{5}.", False, False),
        (r"\boxed{5} \boxed{5}", True, False),
        ("\\boxed{5}\n#### 5", True, False),
        ("#### 4\n#### 5", True, False),
        ("#### 5\nThat was easy.", True, False),
        (r"\boxed{}", True, False),
        ("5", True, False),
        (r"<think>\boxed{5}", True, False),
    ],
)
def test_the_format_is_an_answer_that_is_stated_once(response, finished, expected):
    assert is_well_formed(response, finished) is expected


def test_a_worked_solution_has_its_answer_after_the_hashes():
    assert hashed_answer("2 + 3 = <<2+3=5>>5\n#### 5") == "5"
    assert hashed_answer("no answer") is None
    assert hashed_answer("#### ") is None
