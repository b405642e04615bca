r"""A list of public data sets for training and evaluation, by name.

Names, columns and sizes are those that public code and model cards of 2026 give for the Hugging Face hub; no test
fetches anything, so the comment above a benchmark says where it is from, its licence, and which facts are uncertain. A
local copy of a benchmark has the columns that the hub has, or the columns `problem` and `answer`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AnswerFormat = Literal["plain", "hashes", "boxed"]  # see `DataConfig.answers`


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkSplit:
    """The place of one split of a benchmark, on the hub and as a local file, and its number of problems."""

    split: str  # name of the split on the hub
    file: str  # name of a local copy in the folder JACKPOT_DATA
    size: int  # number of problems, as published


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A description of a data set: where it is, and which columns hold problem, answer and id."""

    hub: str  # OWNER/NAME
    subset: str | None = None  # name of the subset on the hub
    train: BenchmarkSplit | None = None
    test: BenchmarkSplit | None = None
    # Names that the column of the problem may have; the first of them that the data has is read.
    problem: tuple[str, ...] = ("problem",)
    # For each name that the column of the answer may have, the format of answers; the first that the data has is read.
    answer: Mapping[str, AnswerFormat]
    uid: tuple[str, ...] = ()  # names that the column of the id may have; without one the row's number is the id


_PLAIN: dict[str, AnswerFormat] = {"answer": "plain"}
_PLAIN_OR_SOLUTION: dict[str, AnswerFormat] = {"answer": "plain", "solution": "boxed"}

BENCHMARKS: dict[str, Benchmark] = {
    # Grade-school word problems (arXiv 2110.14168), MIT.
    "gsm8k": Benchmark(
        hub="openai/gsm8k",
        subset="main",
        train=BenchmarkSplit(split="train", file="gsm8k_train.jsonl", size=7473),
        test=BenchmarkSplit(split="test", file="gsm8k_test.jsonl", size=1319),
        problem=("question",),
        answer={"answer": "hashes"},
    ),
    # Competition problems (arXiv 2103.03874), MIT; a copy of hendrycks/competition_math, which was withdrawn.
    "math": Benchmark(
        hub="DigitalLearningGmbH/MATH-lighteval",
        train=BenchmarkSplit(split="train", file="math_train.jsonl", size=7500),
        test=BenchmarkSplit(split="test", file="math_test.jsonl", size=5000),
        answer=_PLAIN_OR_SOLUTION,
    ),
    # 500 problems of MATH's test split (arXiv 2305.20050), MIT.
    "math500": Benchmark(
        hub="HuggingFaceH4/MATH-500",
        test=BenchmarkSplit(split="test", file="math500.jsonl", size=500),
        answer=_PLAIN_OR_SOLUTION,
        uid=("unique_id",),
    ),
    # AMC 12 of 2022 and 2023, changed so that every answer is an integer, which is written as 142.0; Apache 2.0.
    "amc22_23": Benchmark(
        hub="AI-MO/aimo-validation-amc",
        test=BenchmarkSplit(split="train", file="amc22_23.jsonl", size=83),
        answer=_PLAIN,
        uid=("url",),
    ),
    # AMC 12A and 12B of 2024 without the 5 problems that need a figure; no licence is stated, the problems are the
    # MAA's. Papers that report results on them do not say which copy they used.
    "amc12_2024": Benchmark(
        hub="rawsh/2024_AMC12",
        test=BenchmarkSplit(split="train", file="amc12_2024.jsonl", size=45),
        answer=_PLAIN,
    ),
    # AIME I and II of 2024; no licence is stated, the problems are the MAA's.
    "aime24": Benchmark(
        hub="HuggingFaceH4/aime_2024",
        test=BenchmarkSplit(split="train", file="aime24.jsonl", size=30),
        answer=_PLAIN_OR_SOLUTION,
    ),
    # AIME I and II of 2025; Apache 2.0 as its card says (not checked), the problems are the MAA's.
    "aime25": Benchmark(
        hub="math-ai/aime25",
        test=BenchmarkSplit(split="test", file="aime25.jsonl", size=30),
        answer=_PLAIN,
    ),
    # Undergraduate problems of science (OCW courses, arXiv 2206.14858); no licence is stated on the hub.
    "minerva_math": Benchmark(
        hub="math-ai/minervamath",
        test=BenchmarkSplit(split="test", file="minerva_math.jsonl", size=272),
        problem=("question", "problem"),
        answer=_PLAIN_OR_SOLUTION,
    ),
    # English mathematics of OlympiadBench (arXiv 2402.14008) without figures and proofs; Apache 2.0 as its card says
    # (not checked). Answers are lists, mostly of one text; commas separate several answers in a text.
    "olympiadbench": Benchmark(
        hub="math-ai/olympiadbench",
        test=BenchmarkSplit(split="test", file="olympiadbench.jsonl", size=674),
        problem=("question", "problem"),
        answer={"final_answer": "plain", "answer": "plain"},
    ),
    # AIME and AMC before 2023, Omni-MATH and STILL; MIT as its card says (not checked).
    "deepscaler": Benchmark(
        hub="agentica-org/DeepScaleR-Preview-Dataset",
        train=BenchmarkSplit(split="train", file="deepscaler.jsonl", size=40315),
        answer=_PLAIN,
    ),
}

SETS = (*sorted(BENCHMARKS), "arithmetic", "tool_arithmetic", "sums")  # evaluation sets; the last three need no data
NO_SET = (  # error of an evaluation for which no benchmark was named
    f"no benchmark was named; give --benchmarks with one or more of {', '.join(SETS)}, or the path of a file with "
    "problems"
)
