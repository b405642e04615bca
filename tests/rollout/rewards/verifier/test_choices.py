"""Multiple choice: which answers are right by the letter of an option, with and without its text."""

import pytest

from jackpot.rollout.rewards.verifier.choices import choice, letter_choice
from jackpot.rollout.rewards.verifier.compare import compare
from jackpot.rollout.rewards.verifier.expressions import equal_expressions

LETTERS = [
    "A",
    "(A)",
    "A.",
    "A)",
    r"\text{(A)}",
    r"\textbf{A}",
    "**A**",
    "Option A",
    "option (A)",
    "The answer is A",
    "x = (A)",
]
WITH_TEXT = ["A. 3x+1", "A: 3x+1", "(A) 1 + 3x", r"\text{(A) }3x+1", r"\textbf{(A)}~\frac{6x+2}{2}", "Option A: 3x+1"]
WRONG = [
    "B",
    "(B)",
    "a",
    "Option B",
    "B. 3x+1",
    r"\textbf{(B) }3x+1",
    "A or B",
    "A, B",
    "A and B",
    "A. or B",
    "x",
    "AB",
    "",
]


def is_right(answer, reference):
    return compare(answer, reference, equal_expressions)


@pytest.mark.parametrize("option", ["", "3x+1"])
@pytest.mark.parametrize("answer", LETTERS + WITH_TEXT)
def test_the_letter_in_any_form_is_right(answer, option):
    assert is_right(answer, choice("a", option)) is True
    assert is_right(answer, choice("B", option)) is False


@pytest.mark.parametrize("option", ["", "3x+1"])
@pytest.mark.parametrize("answer", WRONG)
def test_another_letter_two_letters_and_none_are_wrong(answer, option):
    assert is_right(answer, choice("A", option)) is False


@pytest.mark.parametrize(
    ("option", "right_text", "wrong_text"),
    [
        ("3x+1", "1+3x", "3x+2"),
        ("142", "142", "143"),
        ("-5", "-5", "5"),
        ("- 5", "-5", "5"),
        (r"\frac{1}{2}", "0.5", "0.6"),
        ("5 square meters", r"5\text{ m}^2", r"5\text{ m}"),
        ("The gas expands.", "the gas expands", "the gas contracts"),
        ("The gas expands.", r"\text{The gas expands.}", "expands the gas"),
        ("(1, 2]", "(1,2]", "[1,2]"),
        (r"A \cup B", r"A\cup B", r"A\cap B"),
        ("= 3", "= 3", "= 4"),
    ],
)
def test_another_text_is_wrong_even_with_the_letter(option, right_text, wrong_text):
    reference = choice("C", option)

    for answer in (right_text, f"C. {right_text}"):
        assert is_right(answer, reference) is True

    for answer in (wrong_text, f"C. {wrong_text}"):
        assert is_right(answer, reference) is False

    assert is_right(f"D. {right_text}", reference) is False


def test_the_letter_counts_not_an_option_called_like_a_letter():
    assert is_right("C", choice("B", "C")) is False  # vitamin C, which is option B
    assert is_right("B", choice("B", "C")) is True


def test_another_choice_after_the_letter_is_wrong():
    assert is_right("(A) 5", "(A)") is True
    assert is_right("(A) 5 (B) 6", "(A)") is False
    assert is_right("A. 5, B", "(A)") is False
    assert is_right("(A)+1", "(A)") is False
    assert is_right("A. B", "(A)") is False

    for answer in ("(A) or (c)", "A) or option c", "(A) is wrong", "(A) is not it", "A. 5, (b)"):
        assert is_right(answer, "(A)") is False
    for answer in ("(A) salt and a lemon", "A. f(x) or g(x)", "(A) is the answer", "A: not possible"):
        assert is_right(answer, "(A)") is True


@pytest.mark.parametrize("expression", ["(A)(B)", r"(A) \cup (B)", "(A) + 3"])
def test_an_expression_with_a_letter_in_front_is_no_choice(expression):
    assert is_right("A", expression) is False
    assert is_right(expression, expression) is True


def test_an_option_text_too_long_to_compare_is_left_out():
    assert choice("A", "x " * 2000) == "(A)"


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("B", "(B)"),
        ("b", "(B)"),
        ("(B)", "(B)"),
        ("B. 142", "(B) 142"),
        ("B) 142", "(B) 142"),
        (r"\text{(B)}", r"\text{(B)}"),
        ("Answer: B", "(B)"),
        ("yes", None),
        ("142", None),
        ("A or B", None),
    ],
)
def test_a_letter_as_data_writes_it_becomes_a_choice(text, reference):
    assert letter_choice(text) == reference
