"""Rows in the forms in which published data sets hold them: each is read as a person reads it."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from helpers.texts import text_tokenizer
from jackpot.config.tasks import DataConfig, MathConfig
from jackpot.core.errors import DataError
from jackpot.rollout.tasks.data import find_source
from jackpot.rollout.tasks.math import Math

TOKENIZER = text_tokenizer()


def write_file(path: Path, records: list[dict]) -> Path:
    """Write records as the kind of file that the name of the path says."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif ".csv" in path.suffixes:
        with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            writer.writerows(records)
    else:
        with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8") as file:
            file.write(
                json.dumps(records)
                if ".json" in path.suffixes
                else "".join(json.dumps(record) + "\n" for record in records)
            )
    return path


def rows_of(path: Path, records: list[dict], **settings):
    """Write records and return them as rows of a source."""
    data = DataConfig.model_validate({"source": str(write_file(path, records)), **settings})
    return list(find_source(data, "train").rows())


def prompts_of(path: Path, records: list[dict], template: str, instruction: str = "", **settings) -> list[str]:
    """Return the prompts that a task makes of the rows."""
    data = DataConfig.model_validate({"source": str(write_file(path, records)), **settings})
    task_settings = {"template": template, "instruction": instruction}
    task = Math(TOKENIZER, MathConfig(train=data, test=data, **task_settings))
    return [task.prompt("train", index).text for index in range(len(records))]


VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"What is {n}+1?"}],
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n, "question": f"{n}+1?"},
    }
    for n in range(3)
]
NESTED = {"problem": "prompt", "answer": "reward_model.ground_truth", "uid": "extra_info.index"}


def test_chat_messages_and_a_nested_answer_as_in_files_of_verl(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "train.parquet", VERL, columns=NESTED)
    assert [(row.uid, row.answers) for row in rows] == [("0", ("1",)), ("1", ("2",)), ("2", ("3",))]

    assert prompts_of(tmp_path / "train.parquet", VERL, "chat", columns=NESTED)[1] == (
        "<|system|>Be brief.<|end|><|user|>What is 1+1?<|end|><|assistant|>"
    )

    assert prompts_of(tmp_path / "train.parquet", VERL, "chat", "Box it.", columns=NESTED)[1] == (
        "<|system|>Be brief.<|end|><|user|>What is 1+1?\nBox it.<|end|><|assistant|>"
    )

    assert prompts_of(tmp_path / "a.jsonl", VERL, "base", columns=NESTED)[0] == (
        "Be brief.\n\nQuestion:\nWhat is 0+1?\n\nAnswer:\n"
    )

    flat_columns = NESTED | {"problem": "prompt.1.content"}
    assert [row.problem for row in rows_of(tmp_path / "b.jsonl", VERL, columns=flat_columns)] == [
        f"What is {n}+1?" for n in range(3)
    ]


def test_the_system_prompt_of_the_settings_replaces_others(tmp_path: Path) -> None:
    data = DataConfig(source=str(write_file(tmp_path / "a.jsonl", VERL)), columns=NESTED)
    task = Math(TOKENIZER, MathConfig(train=data, test=data, system_prompt="Think.", instruction=""))
    assert task.prompt("train", 0).text == "<|system|>Think.<|end|><|user|>What is 0+1?<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "end with one of the assistant"),
        ([{"role": "user"}], "chat messages are"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "with text alone"),
        (["q"], "chat messages are"),
        ([], "is empty"),
        ({"q": 1}, "must be text in UTF-8 or a finite number"),
    ],
)
def test_a_value_that_is_no_prompt_is_refused_with_its_line(messages, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as error:
        rows_of(tmp_path / "a.jsonl", [{"problem": messages, "answer": "1"}])
    assert "a.jsonl line 1" in str(error.value)


def test_parts_of_text_are_one_text(tmp_path: Path) -> None:
    content = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1+1?"}]
    rows = rows_of(tmp_path / "a.jsonl", [{"problem": [{"role": "user", "content": content}], "answer": "2"}])
    assert rows[0].problem == (("user", "What is 1+1?"),)


@pytest.mark.parametrize(
    ("value", "answers"),
    [
        (["42"], ("42",)),
        ([142.0], ("142",)),
        (["1/2", "0.5", None, "1/2"], ("1/2", "0.5")),
        ([], ()),
        ([None], ()),
        ("42", ("42",)),
    ],
)
def test_a_list_of_answers_gives_each_of_them_once(value, answers: tuple[str, ...], tmp_path: Path) -> None:
    assert rows_of(tmp_path / "a.jsonl", [{"problem": "p", "answer": value}])[0].answers == answers


def test_a_problem_is_put_together_from_columns_as_in_svamp(tmp_path: Path) -> None:
    records = [
        {"ID": "chal-1", "Body": "Ben has 8 caps.", "Question": "How many are left after 3 are sold?", "Answer": 5.0},
        {"ID": "chal-2", "Body": None, "Question": "What is 2*3?", "Answer": 6.0},
    ]
    columns = {"problem": "{Body} {Question}", "answer": "Answer", "uid": "ID"}

    svamp_rows = rows_of(tmp_path / "svamp.json", records, columns=columns)

    assert [row.problem for row in svamp_rows] == [
        "Ben has 8 caps. How many are left after 3 are sold?",
        "What is 2*3?",
    ]
    assert [(row.uid, row.answers) for row in svamp_rows] == [("chal-1", ("5",)), ("chal-2", ("6",))]

    with pytest.raises(DataError, match="no column 'Text' for the problem; there are Answer, Body, ID, Question"):
        rows_of(tmp_path / "svamp.json", records, columns=columns | {"problem": "{Body} {Text}"})

    empty_records = [records[0] | {"Body": "", "Question": " "}]
    with pytest.raises(DataError, match=r"svamp.json row 1: column '\{Body\} \{Question\}' is empty"):
        rows_of(tmp_path / "svamp.json", empty_records, columns=columns)


@pytest.mark.parametrize(
    ("regex", "text", "answers"),
    [
        (r"answer is (\S+)\.", "The answer is 5. No, the answer is 6.", ("6",)),
        (r"-?\d+", "first 5, then -7", ("-7",)),
        (r"answer: (.*)", "none", ()),
        (r"answer:(.*)", "answer: ", ()),
        (r"(?:A|(B))", "A", ()),
    ],
)
def test_a_regular_expression_finds_the_answer(regex: str, text: str, answers, tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "a.jsonl", [{"problem": "p", "answer": text}], answers={"regex": regex})
    assert rows[0].answers == answers


@pytest.mark.parametrize(("text", "answers"), [("b", ("(B)",)), ("B. red", ("(B) red",)), ("red", ())])
def test_the_letter_of_a_choice_is_read_from_the_answers_column(text: str, answers, tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "a.jsonl", [{"problem": "p", "answer": text}], answers="letter")
    assert rows[0].answers == answers


MMLU = {"question": "Which is even?", "choices": ["1", "2", "3", "5"], "answer": 1}
ARC = {"question": "Which?", "choices": {"text": ["red", "blue"], "label": ["1", "2"]}, "answerKey": "2"}
MEDQA = {"question": "Which?", "options": {"A": "red", "B": "blue"}, "answer_idx": "B"}
MEDMCQA = {"question": "Which?", "opa": "red", "opb": "blue", "opc": "green", "opd": "grey", "cop": 1}
AQUA = {"question": "Which?", "options": ["A)21", "B)22"], "correct": "B"}


@pytest.mark.parametrize(
    ("row", "options", "answer", "option_texts", "right_letter"),
    [
        (MMLU, "choices", "answer", ["1", "2", "3", "5"], "B"),
        (MMLU | {"answer": "C"}, "choices", "answer", ["1", "2", "3", "5"], "C"),
        (MMLU | {"answer": "5"}, "choices", "answer", ["1", "2", "3", "5"], "D"),
        (ARC, "choices", "answerKey", ["red", "blue"], "B"),
        (ARC | {"answerKey": "red"}, "choices", "answerKey", ["red", "blue"], "A"),
        (MEDQA, "options", "answer_idx", ["red", "blue"], "B"),
        (MEDQA | {"answer_idx": "blue"}, "options", "answer_idx", ["red", "blue"], "B"),
        (MEDMCQA, ["opa", "opb", "opc", "opd"], "cop", ["red", "blue", "green", "grey"], "B"),
        (AQUA, "options", "correct", ["21", "22"], "B"),
        (AQUA | {"correct": "B)22"}, "options", "correct", ["21", "22"], "B"),
        (AQUA | {"correct": "22"}, "options", "correct", ["21", "22"], "B"),
        (AQUA | {"correct": "(a)"}, "options", "correct", ["21", "22"], "A"),
        (AQUA | {"correct": "0"}, "options", "correct", ["21", "22"], "A"),
    ],
)
def test_options_stand_below_the_problem_and_one_is_the_answer(
    row: dict, options, answer: str, option_texts: list[str], right_letter: str, tmp_path: Path
) -> None:
    columns = {"problem": "question", "options": options, "answer": answer}

    (choice_row,) = rows_of(tmp_path / "a.jsonl", [row], columns=columns)

    option_lines = "\n".join(f"{name}. {text}" for name, text in zip("ABCD", option_texts, strict=False))
    assert choice_row.problem == f"{row['question']}\n\n{option_lines}"
    assert choice_row.answers == (f"({right_letter}) {option_texts[ord(right_letter) - ord('A')]}",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": 4}, "the answer '4' is none of the 4 options"),
        ({"answer": "E"}, "the answer 'E' is none of the 4 options"),
        ({"choices": ["1"]}, "multiple choice needs 2 to 26 options"),
        ({"choices": ["1", None]}, "multiple choice needs 2 to 26 options"),
        ({"choices": "1, 2"}, "multiple choice needs 2 to 26 options"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_their_place(change: dict, message: str, tmp_path: Path) -> None:
    columns = {"problem": "question", "options": "choices"}
    with pytest.raises(DataError, match=rf"a\.jsonl line 1: .*{message}"):
        rows_of(tmp_path / "a.jsonl", [MMLU | change], columns=columns)


def test_a_choice_without_an_answer_is_a_row_without_one(tmp_path: Path) -> None:
    columns = {"problem": "question", "options": "choices"}
    assert rows_of(tmp_path / "a.jsonl", [MMLU | {"answer": None}], columns=columns)[0].answers == ()


@pytest.mark.parametrize("ending", [".jsonl.gz", ".json.gz", ".csv", ".csv.gz"])
def test_csv_and_gzip_are_read_like_the_rest(ending: str, tmp_path: Path) -> None:
    records = [{"problem": 'Two,\n"lines" é?', "answer": "-3"}, {"problem": "q", "answer": ""}]

    read_rows = rows_of(tmp_path / f"data{ending}", records)

    assert [(row.uid, row.problem, row.answers) for row in read_rows] == [
        ("0", 'Two,\n"lines" é?', ("-3",)),
        ("1", "q", ()),
    ]

    data = DataConfig(source=str(tmp_path / f"data{ending}"))
    assert find_source(data, "train").name == "data"

    (tmp_path / "other.parquet.gz").write_bytes(b"")
    assert [row.problem for row in find_source(DataConfig(source=str(tmp_path)), "train").rows()][1] == "q"


def test_rows_without_an_id_are_named_by_their_number(tmp_path: Path) -> None:
    records = [{"id": None, "problem": "p", "answer": "1"}, {"id": "x", "problem": "q", "answer": "2"}]
    assert [row.uid for row in rows_of(tmp_path / "a.jsonl", records)] == ["row-0", "x"]
    with pytest.raises(DataError, match="every row needs an id"):
        rows_of(tmp_path / "a.jsonl", records, columns={"uid": "id"})
