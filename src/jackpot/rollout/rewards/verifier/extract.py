r"""Extracts the final answer from a response. Standard library only.

Where a response thinks first (`<think> ... </think>`), only the text after the last `</think>` is read; thinking that
never ends has no answer. In the text that is read, the answer is

1. the content of the last `\boxed{...}` or `\fbox{...}`, braces balanced (`\{` and `\}` do not count);
2. without any box, the rest of the line after the last `####`, as in GSM8K. Where the response was cut at its length
   limit this line must have ended, for `#### 12` may have become `#### 125`.

A last box that is not closed, or is empty, or holds more than `MAX_ANSWER_LENGTH` characters is no answer, and no
earlier box replaces it. "The answer is 5", a last number, a last formula, `\boxed 5` without braces and `<answer>` tags
are not accepted, because they would reward guesses made before it. A reward function of the user may extract otherwise.
"""

import re

MAX_ANSWER_LENGTH = 2_000  # characters; the longest answer in MATH has 160
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"(?<!#)####(?!#)")
_THINKING, _DONE = "<think>", "</think>"


def final_answer(response: str, finished: bool) -> str | None:
    """Return the text of the answer without the spaces around it, or None where there is no answer.

    Args:
        finished: whether the response ended by itself and was not cut at its length limit.
    """
    text = _without_thinking(response)
    if text is None:
        return None
    starts = [match.end() for match in _BOX.finditer(text)]
    answer = _boxed_content(text, starts[-1]) if starts else _after_hashes(text, finished)
    return answer.strip() or None if answer is not None else None


def is_well_formed(response: str, finished: bool) -> bool:
    """Return whether the response ended by itself and states one answer once: one box and no `####`, or no box and one
    `####` with nothing but spaces after its line."""
    text = _without_thinking(response)
    if not finished or text is None or final_answer(response, finished) is None:
        return False
    boxes, hashes = len(_BOX.findall(text)), [match.end() for match in _HASHES.finditer(text)]
    if boxes or len(hashes) != 1:
        return boxes == 1 and not hashes
    return "\n" not in text[hashes[0] :].strip()


def hashed_answer(solution: str) -> str | None:
    """Return the text after `####` in a worked solution, such as GSM8K's, or None where there is none."""
    answer = _after_hashes(solution, finished=True)
    return answer.strip() or None if answer is not None else None


def _without_thinking(response: str) -> str | None:
    """Return the text after the thinking, or None where the thinking never ended."""
    done = response.rfind(_DONE)
    if done >= 0:
        response = response[done + len(_DONE) :]
    return None if _THINKING in response else response


def _boxed_content(text: str, start: int) -> str | None:
    """Return the text from `start` to the brace that closes the one just before `start`; None where none closes it."""
    depth = 1
    for match in _BRACE.finditer(text, start, start + MAX_ANSWER_LENGTH + 1):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[start : match.start()]
    return None


def _after_hashes(text: str, finished: bool) -> str | None:
    """Return the rest of the line after the last `####`; None where it is missing, cut or too long."""
    *_, last = [None, *_HASHES.finditer(text)]
    if last is None:
        return None
    end = text.find("\n", last.end())
    if end < 0 and not finished:
        return None
    line = text[last.end() : end if end >= 0 else len(text)].strip()
    return line if len(line) <= MAX_ANSWER_LENGTH else None
