"""Extraction of the final answer from a response. Standard library only."""

import re
from collections import deque

MAX_ANSWER_LENGTH = 2_000  # most characters of an answer; the longest answer in MATH has 160
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"(?<!#)####(?!#)([^\n]*)(\n?)")


def final_answer(response: str, finished: bool) -> str | None:
    r"""Return the final answer of a response without the spaces around it, or None where there is no answer.

    If a response thinks first (`<think> ... </think>`), only the text after the last `</think>` is read; a response
    whose thinking never ends has no answer. In the text that is read, the answer is

    1. the content of the last `\boxed{...}` or `\fbox{...}`, braces balanced (`\{` and `\}` do not count);
    2. without any box, the rest of the line after the last `####`, as in GSM8K. Where the response was cut at its
       length limit this line must have ended, for `#### 12` may have become `#### 125`.

    A last box that is not closed, or is empty, or holds more than `MAX_ANSWER_LENGTH` characters is no answer, and no
    earlier box replaces it. "The answer is 5", a last number, a last formula, `\boxed 5` without braces and `<answer>`
    tags are not accepted, because that would reward guesses. A reward function of the user may extract answers in other
    ways.

    Args:
        finished: whether the response ended by itself and was not cut at its length limit.
    """
    text = _after_thinking(response)
    last_box = deque(_BOX.finditer(text), maxlen=1)  # holds the last match alone, or nothing
    return _boxed_content(text, last_box[0].end()) if last_box else hashed_answer(text, finished)


def is_well_formed(response: str, finished: bool) -> bool:
    """Return whether the response ended by itself and states exactly one final answer.

    It must have one box and no `####`, or no box and one `####` with nothing but spaces after that line.
    """
    text = _after_thinking(response)
    boxes, hashes = len(_BOX.findall(text)), [*_HASHES.finditer(text)]
    if not finished or final_answer(response, finished) is None or boxes + len(hashes) != 1:
        return False
    return not hashes or not text[hashes[0].end() :].strip()


def hashed_answer(solution: str, finished: bool = True) -> str | None:
    """Return the rest of the line after the last `####`, as in GSM8K's worked solutions; None where it is no answer.

    Args:
        finished: whether the text is whole. In a text that was cut, a line counts only if it ends with a line break.
    """
    for last in deque(_HASHES.finditer(solution), maxlen=1):  # the last match alone, if there is any
        line, line_end = last[1].strip(), last[2]
        if (finished or line_end) and 0 < len(line) <= MAX_ANSWER_LENGTH:
            return line
    return None


def _after_thinking(response: str) -> str:
    """Return the text after the thinking, or an empty text if the thinking never ends."""
    text = response.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def _boxed_content(text: str, start: int) -> str | None:
    """Return the content of the box whose opening brace stands just before `start`.

    Return None where the box is not closed, is empty, or holds more than `MAX_ANSWER_LENGTH` characters.
    """
    depth = 1
    for match in _BRACE.finditer(text, start, start + MAX_ANSWER_LENGTH + 1):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)  # 0 for a backslash with its character, such as `\{`
        if depth == 0:
            return text[start : match.start()].strip() or None
    return None
