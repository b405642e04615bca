"""Data sets as rows: files, folders, benchmarks and the hub, what is refused, and how the error says it."""

import gzip
import json
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from helpers.published import data_folder
from jackpot.config.tasks import ColumnsConfig, DataConfig
from jackpot.core.errors import DataError
from jackpot.rollout.tasks.benchmarks import BENCHMARKS
from jackpot.rollout.tasks.data import DATA_FOLDER, find_source, find_sources
from jackpot.rollout.tasks.rows import DataRow

ROWS = [
    {"question": "What is 1+1?", "gold": 2, "key": "a"},
    {"question": "Wie groß ist ½·π?", "gold": "\\frac{\\pi}{2}", "key": "b"},
    {"question": "What is 3-5?", "gold": "-2", "key": "c"},
]
COLUMNS = ColumnsConfig(problem="question", answer="gold", uid="key")


@pytest.fixture(scope="module")
def folder() -> Path:
    """Return the folder with copies of the benchmarks, or skip the test."""
    return data_folder()


@pytest.fixture(autouse=True)
def no_local_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no folder of benchmarks set."""
    monkeypatch.delenv(DATA_FOLDER, raising=False)


def rows_of(source, split="train", **settings):
    """Return all rows of a source."""
    return list(find_source(DataConfig(source=str(source), **settings), split).rows())


def write_file(path: Path, records: list[dict]) -> Path:
    """Write records as the kind of file that the name of the path says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in records), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
    else:
        columns = {name: [str(row[name]) for row in records] for name in records[0]}
        parquet.write_table(pyarrow.table(columns), path)
    return path


def only_answer(row: DataRow) -> str | None:
    """Return the only answer of a row, or None."""
    assert len(row.answers) <= 1
    return row.answers[0] if row.answers else None


def record(n: int) -> dict:
    """Return a row with a problem and its answer."""
    return {"problem": f"problem {n}", "answer": str(n)}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(suffix, tmp_path):
    file_rows = rows_of(write_file(tmp_path / f"data{suffix}", ROWS), columns=COLUMNS)

    assert [row.problem for row in file_rows] == [row["question"] for row in ROWS]
    assert [only_answer(row) for row in file_rows] == ["2", "\\frac{\\pi}{2}", "-2"]
    assert [row.uid for row in file_rows] == ["a", "b", "c"]
    assert file_rows[2].where == f"{tmp_path}/data{suffix} {'line' if suffix == '.jsonl' else 'row'} 3"


def test_the_usual_columns_are_problem_answer_and_id(tmp_path):
    records = [{"problem": "p", "answer": "1", "id": "x"}, {"problem": "q", "answer": "2", "id": 7}]
    path = write_file(tmp_path / "a.jsonl", records)
    assert [(row.problem, *row.answers, row.uid) for row in rows_of(path)] == [("p", "1", "x"), ("q", "2", "7")]
    assert [row.uid for row in rows_of(path, columns=ColumnsConfig(uid="row"))] == ["0", "1"]
    assert [row.uid for row in rows_of(write_file(tmp_path / "b.jsonl", [record(5), record(6)]))] == ["0", "1"]


def test_wrong_columns_are_refused_with_those_that_are_there(tmp_path):
    path = write_file(tmp_path / "own.jsonl", ROWS)
    for columns, role in ((ColumnsConfig(), "problem"), (ColumnsConfig(problem="question"), "answer")):
        with pytest.raises(DataError) as error:
            rows_of(path, columns=columns)
        assert f"{path} line 1: no column '{role}' for the {role}; there are gold, key, question." in str(error.value)
        assert f"columns.{role}" in str(error.value)

    with pytest.raises(DataError, match="no column 'nr' for the uid"):
        rows_of(path, columns=COLUMNS.model_copy(update={"uid": "nr"}))


def test_a_json_row_may_lack_the_answer_but_not_the_problem(tmp_path):
    path = write_file(tmp_path / "a.jsonl", [{"problem": "p"}, record(2)])
    assert [only_answer(row) for row in rows_of(path)] == [None, "2"]

    write_file(path, [record(1), {"answer": "3"}])
    with pytest.raises(DataError, match=r"a.jsonl line 2: column 'problem' is empty"):
        rows_of(path)


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("142.0", "142"),
        ("-4.0", "-4"),
        ("-0.0", "0"),
        ("0.5", "0.5"),
        ("1e-7", "0.0000001"),
        ("1e22", "10000000000000000000000"),
        ("100", "100"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ('"142.0"', "142.0"),  # text is left as it is
        ('"  x  "', "x"),
        ('""', None),
        ('" "', None),
        ("null", None),
        ("NaN", None),
    ],
)
def test_numbers_become_what_people_write(value, answer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"problem": "p", "answer": {value}}}\n')
    assert [only_answer(row) for row in rows_of(path)] == [answer]


@pytest.mark.parametrize(
    ("value", "shown_value"), [("true", "True"), ("Infinity", "inf"), ("[[1]]", "[1]"), ("{}", "{}")]
)
def test_an_answer_that_is_neither_text_nor_number_is_refused(value, shown_value, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{json.dumps(record(1))}\n{{"problem": "p", "answer": {value}}}\n')

    with pytest.raises(DataError) as error:
        rows_of(path)

    message = f"{path} line 2: column 'answer' holds {shown_value}; it must be text in UTF-8 or a finite number"
    assert message in str(error.value)


def test_floats_and_decimals_of_parquet_are_read_alike(tmp_path):
    table = pyarrow.table({"problem": ["p", "q"], "answer": [1.0, 2.5]})
    for column_type, answers in ((pyarrow.float64(), ["1", "2.5"]), (pyarrow.decimal128(5, 2), ["1", "2.5"])):
        parquet.write_table(table.set_column(1, "answer", table["answer"].cast(column_type)), tmp_path / "a.parquet")
        assert [only_answer(row) for row in rows_of(tmp_path / "a.parquet")] == answers


@pytest.mark.parametrize(
    ("form", "text", "answer"),
    [
        ("hashes", "She pays 2*3=<<2*3=6>>6.\n#### 6", "6"),
        ("hashes", "#### 5\nno, ####  1,080 ", "1,080"),
        ("hashes", "six", None),
        ("hashes", "####", None),
        ("boxed", "so \\boxed{42}.", "42"),
        ("boxed", "\\boxed{1} or \\boxed{\\frac{a}{b^{2}}}", "\\frac{a}{b^{2}}"),
        ("boxed", "\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("boxed", "\\boxed{1} and \\boxed{2", "1"),
        ("boxed", "$\\boxed 7$", "7"),
        ("boxed", "\\fbox{x}", "x"),
        ("boxed", "\\boxed{\\boxed1 }", "1"),
        ("boxed", "\\boxed{}", None),
        ("boxed", "7", None),
        ("plain", "#### \\boxed{7}", "#### \\boxed{7}"),
    ],
)
def test_the_answer_is_found_in_a_solution(form, text, answer, tmp_path):
    path = write_file(tmp_path / "a.jsonl", [{"problem": "p", "answer": text}])
    assert [only_answer(row) for row in rows_of(path, answers=form)] == [answer]


def test_a_limit_takes_the_first_rows_and_reads_no_further(tmp_path):
    path = write_file(tmp_path / "a.jsonl", [record(n) for n in range(5)])
    with path.open("a") as file:
        file.write("not JSON\n")

    assert [only_answer(row) for row in rows_of(path, limit=5)] == ["0", "1", "2", "3", "4"]

    with pytest.raises(DataError, match=r"a\.jsonl line 6 cannot be read"):
        rows_of(path)


LINE = b'{"problem": "p", "answer": 1}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", LINE + b'{"problem": "gr\xfc\xdf"}\n', "a.jsonl line 2 cannot be read as .jsonl: 'utf-8' codec"),
        ("a.jsonl", LINE.decode().encode("utf-16"), "a.jsonl line 1 cannot be read as .jsonl: 'utf-8' codec"),
        pytest.param("a.jsonl", b'{"problem": "half \\ud83d", "answer": "1"}\n', "must be text in UTF-8", id="half"),
        ("a.jsonl", LINE + b'\n{"problem": "p"\n', "a.jsonl line 3 cannot be read as .jsonl: Expecting ','"),
        ("a.jsonl", b'["p", "1"]\n', "a.jsonl line 1 cannot be read as .jsonl: ['p', '1'] is no row"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "a.jsonl line 1 cannot be read as .jsonl: maximum recursion"),
        ("a.jsonl", b"\n\n", "a has no rows"),
        (
            "a.json",
            b'[{"problem": "gr\xfc\xdf"}]',
            "a.json cannot be read as .json: 'utf-8' codec can't decode byte 0xfc",
        ),
        (
            "a.json",
            b'{"problem": "p"}',
            "a.json cannot be read as .json: 'problem' is no row. Such a file holds a list",
        ),
        ("a.json", LINE + LINE, "Extra data: line 2 column 1 (char 30). Such a file holds a list of rows"),
        ("a.json", b'[{"problem": "p", "answer": "1"}, 3]', "a.json row 2 cannot be read as .json: 3 is no row"),
        ("a.json", b"[]", "a has no rows"),
        ("a.parquet", b"hello", "a.parquet cannot be read as .parquet: Parquet file size"),
        (
            "a.csv",
            b"problem,answer\np,1\nq\n",
            "line 3 cannot be read as .csv: 1 values for the columns problem, answer",
        ),
        (
            "a.csv",
            b"problem,answer\np,1,2\n",
            "line 2 cannot be read as .csv: 3 values for the columns problem, answer",
        ),
        (
            "a.csv",
            b"problem,problem\np,1\n",
            "line 2 cannot be read as .csv: 2 values for the columns problem, problem",
        ),
        ("a.csv", b'problem,answer\n"p,1\n', "a.csv line 3 cannot be read as .csv: unexpected end of data"),
        ("a.csv", b"problem,answer\ngr\xfc\xdf,1\n", "a.csv line 2 cannot be read as .csv: 'utf-8' codec"),
        ("a.csv", b"problem,answer\n", "a has no rows"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz line 1 cannot be read as .jsonl.gz: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(LINE * 99, mtime=0)[:-20],
            "Compressed file ended before the end-of-stream marker",
        ),
        ("a.xlsx", b"", "is not one of .jsonl, .json, .csv, .parquet"),
        ("a.txt", b"problem,answer\n", "is not one of .jsonl, .json, .csv, .parquet"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        rows_of(tmp_path / name)
    assert message in str(error.value)
    assert len(str(error.value)) < 500


def test_parquet_text_that_is_not_utf8_is_refused_with_its_row(tmp_path):
    texts = [b"ok"] * 1500 + [b"gr\xfc\xdf"]
    column = pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"problem": column, "answer": ["1"] * 1501}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet row 1281 .*'utf-8' codec.* of which up to 256 rows are read"):
        rows_of(tmp_path / "a.parquet")


def test_a_byte_order_mark_and_empty_lines_are_no_problem(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"problem": "p", "answer": "1"}\r\n\r\n{"problem": "q", "answer": 2}'
    )
    assert [row.problem for row in rows_of(tmp_path / "a.jsonl")] == ["p", "q"]


def test_a_folder_is_its_files_in_order(tmp_path):
    write_file(tmp_path / "b.jsonl", [record(3)])
    write_file(tmp_path / "a" / "x.parquet", [record(1), record(2)])
    (tmp_path / "README.md").write_text("no data")
    write_file(tmp_path / ".hidden" / "y.jsonl", [record(9)])

    assert [only_answer(row) for row in rows_of(tmp_path)] == ["1", "2", "3"]


def test_a_folder_without_files_of_data_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"and holds none; give the path of a \.jsonl, \.json, \.csv, \.parquet"):
        rows_of(tmp_path / "empty")


def test_each_split_takes_its_files_of_a_folder(tmp_path):
    write_file(tmp_path / "data" / "train-00000-of-00002.parquet", [record(1)])
    write_file(tmp_path / "data" / "train-00001-of-00002.parquet", [record(2)])
    write_file(tmp_path / "data" / "own_test.jsonl", [record(3)])
    write_file(tmp_path / "extra" / "more.jsonl", [record(4)])

    assert [only_answer(row) for row in rows_of(tmp_path, "train")] == ["1", "2"]
    assert [only_answer(row) for row in rows_of(tmp_path, "test")] == ["3"]

    extra_source = find_source(DataConfig(source=str(tmp_path), split="extra"), "train")
    assert [only_answer(row) for row in extra_source.rows()] == ["4"]

    with pytest.raises(DataError, match=r"no files of split 'dev', only data/own_test\.jsonl"):
        find_source(DataConfig(source=str(tmp_path), split="dev"), "train")


def test_a_split_may_have_numbered_files_and_a_number(tmp_path, caplog):
    for index, name in enumerate(("train1", "train2", "train21", "test3"), start=1):
        write_file(tmp_path / f"{name}.jsonl", [record(index)])

    assert [only_answer(row) for row in rows_of(tmp_path, "train")] == ["1", "2", "3"]
    assert not caplog.records
    assert [only_answer(row) for row in rows_of(tmp_path, "test")] == ["4"]

    second_source = find_source(DataConfig(source=str(tmp_path), split="train2"), "train")
    assert [only_answer(row) for row in second_source.rows()] == ["2"]


def test_sources_of_the_same_name_get_numbers_of_their_own(tmp_path):
    files = [tmp_path / "d.jsonl", tmp_path / "x" / "d.jsonl", tmp_path / "d-1.jsonl"]
    for index, path in enumerate(files):
        write_file(path, [record(index)])

    sources = find_sources([DataConfig(source=str(path)) for path in files], "train")

    assert [source.name for source in sources] == ["d-2", "d-3", "d-1"]

    two_sources = find_sources([DataConfig(source=str(path)) for path in files[:2]], "train")
    assert [source.name for source in two_sources] == ["d-1", "d-2"]


def test_files_without_a_split_beside_others_are_left_out(tmp_path, caplog):
    write_file(tmp_path / "train.jsonl", [record(1)])
    write_file(tmp_path / "test.jsonl", [record(2)])

    assert [only_answer(row) for row in rows_of(tmp_path, "train")] == ["1"]
    assert not caplog.records

    for index in range(7):
        write_file(tmp_path / "extra" / f"more{index}.jsonl", [record(3)])

    assert [only_answer(row) for row in rows_of(tmp_path, "train")] == ["1"]
    (message,) = [record.message for record in caplog.records]
    assert "(train): 7 files name no split and are left out, for others do: extra/more0.jsonl, extra/more1" in message
    assert "extra/more4.jsonl and 2 more" in message


def test_a_folder_of_test_files_alone_is_not_trained_on(tmp_path):
    write_file(tmp_path / "test.jsonl", [record(3)])
    with pytest.raises(DataError, match="no files of split 'train'"):
        rows_of(tmp_path, "train")


def test_an_unknown_benchmark_is_refused_with_a_guess():
    with pytest.raises(DataError) as error:
        rows_of("gsm8")

    assert "unknown benchmark 'gsm8'; did you mean 'gsm8k'?" in str(error.value)
    assert all(name in str(error.value) for name in BENCHMARKS)

    with pytest.raises(DataError, match=r"for the data set of the hub write hub:openai/gsm8k"):
        rows_of("openai/gsm8k")

    with pytest.raises(DataError, match=r"/nowhere/x\.jsonl does not exist"):
        rows_of("/nowhere/x.jsonl")


def test_settings_that_do_not_fit_the_source_are_refused(tmp_path, monkeypatch):
    path = write_file(tmp_path / "a.jsonl", [record(1)])

    with pytest.raises(DataError, match="subset is 'main', but"):
        rows_of(path, subset="main")

    with pytest.raises(DataError, match=r"unknown split 'dev'. Valid: test, train"):
        find_source(DataConfig(source="gsm8k", split="dev"), "train")

    monkeypatch.setenv(DATA_FOLDER, str(path))
    with pytest.raises(DataError, match=r"JACKPOT_DATA is .* not a folder"):
        rows_of("gsm8k")


def test_a_benchmark_is_read_from_the_folder_jackpot_data(tmp_path, monkeypatch):
    write_file(tmp_path / "gsm8k_train.jsonl", [{"question": "q", "answer": "1 + 1 = 2\n#### 2"}])
    write_file(tmp_path / "gsm8k_test.jsonl", [{"question": "t", "answer": "#### 3"}])
    write_file(tmp_path / "math_train.jsonl", [{"problem": "p", "solution": "It is $\\boxed{5}$."}])
    monkeypatch.setenv(DATA_FOLDER, str(tmp_path))

    assert [(row.problem, *row.answers) for row in rows_of("gsm8k", "train")] == [("q", "2")]
    assert [(row.problem, *row.answers) for row in rows_of("gsm8k", "test")] == [("t", "3")]
    assert [row.problem for row in find_source(DataConfig(source="gsm8k", split="test"), "train").rows()] == ["t"]
    assert [only_answer(row) for row in rows_of("math")] == ["5"]


@pytest.mark.parametrize(
    ("name", "split", "count", "missing_count", "first_answer"),
    [  # counts as their README states them; the answers were read by eye
        ("gsm8k", "train", 7473, 0, "72"),
        ("gsm8k", "test", 1319, 0, "18"),
        ("math", "train", 7474, 4, "0"),
        ("math500", "test", 500, 0, "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("amc22_23", "test", 83, 0, "142"),
        ("aime24", "test", 30, 0, "204"),
    ],
)
def test_the_copies_of_the_benchmarks_are_read_whole(
    name, split, count, missing_count, first_answer, folder, monkeypatch
):
    monkeypatch.setenv(DATA_FOLDER, str(folder))

    benchmark_rows = rows_of(name, split)

    assert len(benchmark_rows) == count
    assert sum(not row.answers for row in benchmark_rows) == missing_count
    assert benchmark_rows[0].answers[0] == first_answer
    assert len({row.uid for row in benchmark_rows}) == count

    if name == "amc22_23":  # floats in the file, integers for the verifier
        assert all(row.answers[0].lstrip("-").isdigit() for row in benchmark_rows)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> str:
    """A data set as `datasets` loads it, from a folder in place of the network."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_file(tmp_path / "set" / "train.jsonl", ROWS)
    write_file(tmp_path / "set" / "test.jsonl", ROWS[:1])
    return f"hub:{tmp_path / 'set'}"


def test_a_data_set_of_the_hub_is_read_again_and_again(hub):
    columns = ColumnsConfig(problem="question", answer="key")
    source = find_source(DataConfig(source=hub, columns=columns), "train")

    for _ in range(2):
        assert [row.problem for row in source.rows()] == [row["question"] for row in ROWS]

    assert len(rows_of(hub, "test", columns=columns)) == 1
    assert len(list(find_source(DataConfig(source=hub, columns=columns, split="test"), "train").rows())) == 1


def test_a_subset_or_split_that_the_hub_does_not_have_is_refused(hub):
    columns = ColumnsConfig(problem="question", answer="key")

    for settings, missing_name in (({"subset": "socratic"}, "socratic"), ({"split": "dev"}, "dev")):
        with pytest.raises(
            DataError,
            match=f"cannot be fetched from the hub, after row 0: .*{missing_name}.*Check its name, subset and split",
        ):
            list(find_source(DataConfig(source=hub, columns=columns, **settings), "train").rows())


def test_without_a_hub_the_error_says_what_else_to_do(monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(DataError) as error:
        rows_of("aime25", "test")

    assert str(error.value).startswith("math-ai/aime25 (test) cannot be fetched from the hub, after row 0: ")
    assert "or give a local file as source, or put aime25.jsonl into a folder and set JACKPOT_DATA to it" in str(
        error.value
    )


def test_without_datasets_only_the_hub_is_out_of_reach(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert len(rows_of(write_file(tmp_path / "a.jsonl", [record(1)]))) == 1
    with pytest.raises(DataError, match="It needs the package datasets"):
        rows_of("hub:owner/name")


def test_a_benchmark_can_be_asked_for_in_either_role():
    """One with a single part, such as AIME, is that part for training too."""
    for name in BENCHMARKS:
        for split in ("train", "test"):
            assert find_source(DataConfig(source=name), split).name == name
