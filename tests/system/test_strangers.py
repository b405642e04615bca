"""Files that strangers wrote are read or refused by name, and never hang a reader or take all memory.

Every reader of files in the package goes through one door, `jackpot.core.foreign`.
"""

import ast
import gzip
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.engines.reference import save_tiny_model
from helpers.folders import run_folder
from helpers.paths import ROOT
from helpers.synthetic_rollouts import noise, records
from helpers.taps import sealed
from helpers.texts import text_tokenizer
from jackpot.analysis.diagnose.saved import read_saved
from jackpot.analysis.replay.formats import find_format
from jackpot.analysis.replay.formats.base import read_files
from jackpot.config.tasks import AnswersConfig, ColumnsConfig, DataConfig
from jackpot.core import foreign
from jackpot.core.errors import JackpotError
from jackpot.core.messages import pack, unpack
from jackpot.models.load import eos_token_ids, load_meta_model, load_model, load_tokenizer
from jackpot.rollout.tasks.data import find_source
from jackpot.rollout.tasks.templates import Template
from jackpot.training.run_folder.checkpoint import Checkpoints
from jackpot.training.run_folder.environment import Environment
from jackpot.training.run_folder.folder import RunFolder, run_config
from jackpot.training.run_folder.saved_rollouts import list_rollout_files, read_columns

SECONDS = 60  # that a reader may take, on a machine that others use too
MEMORY = 2 * 2**30  # bytes that a reader may take beyond those of the tests


@contextmanager
def limits() -> Iterator[None]:
    """Raise an AssertionError in a reader that hangs, and a MemoryError in one that takes more than its share."""

    def stop(*_: object) -> None:
        raise AssertionError(f"the reader was not done after {SECONDS} s")

    previous_limits = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY, previous_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, previous_limits)
        signal.alarm(0)


def refusal_of(read: Callable[[], Any]) -> str:
    """Return what the error of a reader says; any other error than ours is a failure of the test."""
    with limits(), pytest.raises(JackpotError) as error:
        read()
    return str(error.value)


def put_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def put_link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


# Models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, seed=0)
    text_tokenizer().save_pretrained(folder)
    return folder


def json_change(file: str, **changes: Any) -> Callable[[Path], object]:
    """Return what sets keys of a JSON file in a folder."""

    def change(folder: Path) -> None:
        path = folder / file
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | changes))

    return change


MODELS: dict[str, Callable[[Path], object]] = {
    "a width that is text": json_change("config.json", hidden_size="x"),
    "layer types of nobody": json_change("config.json", layer_types=["x", "y"]),
    "no heads": json_change("config.json", num_attention_heads=0),
    "more layers than any": json_change("config.json", num_hidden_layers=20_000),
    "a list for a config": lambda folder: (folder / "config.json").write_text("[]"),
    "a config without end": lambda folder: (folder / "config.json").write_text("[" * 100_000),
    "a pipe for a config": lambda folder: put_pipe(folder / "config.json"),
    "a device for a tokenizer": lambda folder: put_link(folder / "tokenizer.json", "/dev/zero"),
    "a list for a tokenizer's config": lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
    "a list for generation": lambda folder: (folder / "generation_config.json").write_text("[]"),
    "a stop token of text": json_change("generation_config.json", eos_token_id="x"),
    "stop tokens of text": json_change("generation_config.json", eos_token_id=["x"]),
    "a stop token below 0": json_change("generation_config.json", eos_token_id=-1),
    "a stop token beyond all": json_change("generation_config.json", eos_token_id=10**9),
    "half a stop token": json_change("generation_config.json", eos_token_id=1.5),
    "a list for an index": lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
    "a list of weights": json_change("model.safetensors.index.json", weight_map=[]),
    "a file without a name": json_change("model.safetensors.index.json", weight_map={"x": None}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_strangers_model_is_refused_by_name(name: str, model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    MODELS[name](folder)

    def read() -> None:
        load_tokenizer(folder)
        eos_token_ids(load_meta_model(folder))
        eos_token_ids(load_model(folder, torch.float32))

    assert str(folder) in refusal_of(read)


TEMPLATES = {
    "a division by 0": "{{ 1 / 0 }}",
    "a sum of kinds": "{{ 1 + 'a' }}",
    "a range without end": "{% for i in range(10 ** 9) %}{{ i }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "loops in loops": "{% for i in range(9999) %}{% for j in range(9999) %}{{ i }}{% endfor %}{% endfor %}",
    "a huge text": "{{ 'x' * messages | length * 6_000_000_000 }}",
    "a text that doubles": "{% set n = namespace(t='x') %}{% for i in range(40) %}{% set n.t = n.t * 2 %}{% endfor %}",
}


SLOW_TEMPLATES = ("loops in loops", "a text that doubles")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_TEMPLATES)) for name in TEMPLATES]
)
def test_a_chat_template_cannot_hang_or_fill_the_memory(name: str) -> None:
    tokenizer = text_tokenizer(chat=TEMPLATES[name])
    assert "chat template" in refusal_of(lambda: Template("chat", tokenizer, instruction="", system_prompt=None))


# Data


def rows_of(path: Path, **answers: Any) -> list[Any]:
    """Return the rows that the data task reads from a file; settings of its answers by keyword."""
    settings = DataConfig(source=str(path), **({"answers": AnswersConfig(**answers)} if answers else {}))
    return list(find_source(settings, "train").rows())


def gzip_of(path: Path, line: bytes, count: int) -> Path:
    """Write a line `count` times into a gzip file; return its path."""
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(count):
            file.write(line)
    return path


def test_an_answer_of_310_digits_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "a.jsonl").write_text(f'{{"problem": "p", "answer": {"9" * 310}}}\n')
    assert "column 'answer' holds 999" in refusal_of(lambda: rows_of(path))


def test_thousands_of_open_boxes_are_read_in_a_pass(tmp_path: Path) -> None:
    text = "\\boxed{7} " + "\\boxed{" * 200_000
    (path := tmp_path / "a.jsonl").write_text(json.dumps({"problem": "p", "answer": text}) + "\n")
    with limits():
        assert [row.answers for row in rows_of(path, name="boxed")] == [("7",)]


def test_a_column_that_repeats_in_every_row_is_read(tmp_path: Path) -> None:
    rows = 20_000
    table = pa.table(
        {"problem": [f"{index}?" for index in range(rows)], "answer": ["1"] * rows, "tools": ["x" * 5000] * rows}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with limits():
        assert len(rows_of(tmp_path / "a.parquet")) == rows


@pytest.mark.slow
def test_a_file_that_expands_beyond_all_text_is_refused(tmp_path: Path) -> None:
    blank_file = gzip_of(tmp_path / "a.jsonl.gz", b" " * 2**20, count=200)
    file_of_lines = gzip_of(tmp_path / "b.jsonl.gz", b" " * (2**16 - 1) + b"\n", count=2000)
    table = pa.table({"problem": ["x" * 2000] * 300_000, "answer": ["1"] * 300_000})
    pq.write_table(table, tmp_path / "c.parquet", compression="zstd")

    for path in (blank_file, file_of_lines, tmp_path / "c.parquet"):
        assert path.stat().st_size < 2**20
        refusal = refusal_of(lambda path=path: rows_of(path))
        assert "times its size" in refusal or "more than 67,108,864 bytes" in refusal


def write_repeated(path: Path, text: str, rows: int, schema_version: str = "1") -> Path:
    """Write a table whose rows repeat one text, which the file has once, after a row that is short."""
    table = pa.table({"problem": ["1+1?", *[text] * rows], "answer": ["1"] * (rows + 1)})
    table = table.replace_schema_metadata({"schema_version": schema_version})
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=2**30)
    return path


@pytest.mark.parametrize("columns", [None, ["answer", "problem"]], ids=["all", "some"])
def test_batches_of_a_table_are_as_large_as_its_rows_allow(
    columns: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "LARGEST_BATCH", 2**20)
    path = write_repeated(tmp_path / "a.parquet", "x" * 300_000, rows=20)

    batches = list(foreign.table_batches(path, columns))
    assert [len(batch) for batch in batches] == [3] * 7  # of 300,000 bytes a row, within 2**20; 21 rows
    assert max(batch.nbytes for batch in batches) < 2**20

    pq.write_table(pa.table({"problem": ["1+1?"] * 600}), tmp_path / "b.parquet")
    assert [len(batch) for batch in foreign.table_batches(tmp_path / "b.parquet")] == [256, 256, 88]


def test_a_table_of_many_numbers_is_refused_by_its_footer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = pa.ListArray.from_arrays(pa.array([0, 9_000_000], pa.int32()), pa.nulls(9_000_000, pa.int64()).fill_null(0))
    pq.write_table(pa.table({"problem": ["p"], "answer": ["1"], "z": zeros}), tmp_path / "a.parquet")
    monkeypatch.delattr(pq.ParquetFile, "iter_batches")
    assert "times its size" in refusal_of(lambda: rows_of(tmp_path / "a.parquet"))


@pytest.mark.slow
def test_large_rows_of_a_table_are_read_one_by_one(tmp_path: Path) -> None:
    text = random.Random(0).randbytes(10_000_000).hex()
    path = write_repeated(tmp_path / "a.parquet", text, rows=64)
    with limits():
        assert (
            sum(1 for _ in find_source(DataConfig(source=str(path)), "train").records()) == 1 + 64
        )  # the short row too


def test_a_letter_before_megabytes_is_read_at_once(tmp_path: Path) -> None:
    (path := tmp_path / "a.jsonl").write_text(json.dumps({"problem": "p", "answer": "(A) " * 2_500_000}) + "\n")
    begin = time.process_time()
    assert [len(row.answers[0]) for row in rows_of(path, name="letter")] == [9_999_999]
    assert time.process_time() - begin < 1.5


def test_an_answer_of_5000_digits_is_no_option(tmp_path: Path) -> None:
    row = {"problem": "p", "answer": "9" * 5000, "options": ["a", "b"]}
    (path := tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    source = DataConfig(source=str(path), columns=ColumnsConfig(options=["options"]))
    assert "is none of the 2 options" in refusal_of(lambda: list(find_source(source, "train").rows()))


def test_a_pipe_is_no_data(tmp_path: Path) -> None:
    put_pipe(tmp_path / "a.jsonl")
    assert "a.jsonl" in refusal_of(lambda: rows_of(tmp_path / "a.jsonl"))


# Dumps


def read_dump(path: Path) -> tuple[int, list[str]]:
    """Return how many responses of a dump are read, and what is noted of the others."""
    notes: list[str] = []
    with limits():
        dump, files = find_format(path, "auto")
        return len(list(read_files(dump, files, notes.append))), notes


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_ids": 5},
        {"log_probs": [[-1.0, -1.0]] * 20},
        {"rollout_log_probs": [[-1.0, -1.0]] * 20},
        {"token_ids": [1.7] * 20},
        {"token_ids": [True] * 20},
        {"token_ids": [-1] * 20},
        {"sampled_mask": [0.5] * 20},
        {"sampled_mask": [[1, 1]] * 20},
    ],
    ids=str,
)
def test_a_strange_response_is_left_out_by_name(change: dict[str, Any], tmp_path: Path) -> None:
    strange_record, fine_record = records(noise(0.1), responses=2)
    path = tmp_path / "x_².jsonl"
    path.write_text(json.dumps(strange_record | change) + "\n" + json.dumps(fine_record) + "\n")

    response_count, notes = read_dump(path)

    assert response_count == 1
    assert len(notes) == 1
    assert "response 1" in notes[0]
    assert "left out" in notes[0]


def test_a_pipe_among_rollouts_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records(noise(0.1), responses=2)))
    put_pipe(tmp_path / "b.jsonl")
    assert read_dump(tmp_path)[0] == 2


# Run folders


def read_run(folder: Path) -> None:
    """Read all of a run that reads without its models."""
    config = run_config(folder)
    RunFolder(folder).read("metrics.jsonl")
    RunFolder(folder).read("events.jsonl")
    Environment(folder)
    list_rollout_files(folder)
    read_saved(folder, config)
    checkpoints = Checkpoints(folder / "checkpoints", 2)
    checkpoints.find()
    checkpoints.best()


# nine levels of lists, each of nine aliases of the one below: 9**9 values in a few hundred bytes
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n"
ALIASES += "".join(f"{upper}: &{upper} [{', '.join([f'*{lower}'] * 9)}]\n" for lower, upper in pairwise("abcdefghi"))
RUNS: dict[str, Callable[[Path], object]] = {
    "metrics without end": lambda run: put_link(run / "metrics.jsonl", "/dev/zero"),
    "metrics of elsewhere": lambda run: put_link(run / "metrics.jsonl", "/etc/passwd"),
    "a pipe of events": lambda run: put_pipe(run / "events.jsonl"),
    "settings of elsewhere": lambda run: put_link(run / "config.yaml", "/etc/passwd"),
    "settings without end": lambda run: (run / "config.yaml").write_text("[" * 5_000),
    "settings by aliases": lambda run: (run / "config.yaml").write_text(ALIASES),
    "an environment of elsewhere": lambda run: put_link(run / "environment.json", "/dev/zero"),
    "checksums without end": lambda run: put_link(run / "checkpoints" / "step-1" / "checksums.json", "/dev/zero"),
    "checksums of elsewhere": lambda run: (run / "checkpoints" / "step-1" / "checksums.json").write_text(
        json.dumps({"../../../../../../../../etc/passwd": {"size": 1, "sha256": "x"}})
    ),
}


@pytest.fixture
def strangers_run(tmp_path: Path) -> Path:
    """A run folder with metrics and an empty checkpoint."""
    run = run_folder(tmp_path / "run", [{"eval/policy_accuracy": 0.5}, {}])
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    return run


@pytest.mark.parametrize("name", RUNS)
def test_a_strangers_run_is_refused_by_name(name: str, strangers_run: Path) -> None:
    RUNS[name](strangers_run)
    assert str(strangers_run) in refusal_of(lambda: read_run(strangers_run))


def test_a_best_checkpoint_outside_its_run_is_none(strangers_run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    put_link(strangers_run / "checkpoints" / "best", str(tmp_path / "elsewhere"))
    assert Checkpoints(strangers_run / "checkpoints", 2).best() is None


def test_saved_rollouts_that_expand_beyond_all_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    write_repeated(tmp_path / "rollouts" / "iteration-000001.parquet", "x" * 2_000_000, rows=40)
    (file,), _ = list_rollout_files(tmp_path)

    assert "expands to more than 2,000 times its size" in refusal_of(lambda: read_columns(file, ["problem"]))
    assert refusal_of(lambda: read_columns(file, ["problem"])) == refusal_of(lambda: read_columns(file))
    assert read_columns(file, ["answer"]).column_names == ["answer"]


# Messages


@pytest.mark.parametrize("shape", [[-1], [True], ["x"], [[1]], [2**70]])
def test_a_message_with_a_strange_shape_is_refused(shape: list[Any]) -> None:
    header = json.dumps([{"tensor": 0}, [["float32", shape]]]).encode()
    message_body = len(header).to_bytes(8, "little") + header + bytes(-len(header) % 8) + bytes(16)
    with pytest.raises(ValueError, match=r"shape|size|int"):
        unpack(sealed(message_body))


# Anything

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
FUZZED = settings(
    max_examples=int(os.environ.get("JACKPOT_EXAMPLES", "200")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.slow
@FUZZED
@given(column=st.sampled_from(["problem", "answer", "id"]), value=ANY_JSON, kind=st.sampled_from(["jsonl", "json"]))
def test_any_value_in_a_data_set_is_read_or_refused(column: str, value: Any, kind: str, tmp_path: Path) -> None:
    row = {"problem": "p", "answer": "1", "id": "x", column: value}
    (path := tmp_path / f"a.{kind}").write_text(json.dumps([row] if kind == "json" else row) + "\n")
    with limits(), suppress(JackpotError):
        rows_of(path)


@pytest.mark.slow
@FUZZED
@given(column=st.sampled_from(sorted(next(records(noise(0.1), responses=1)))), value=ANY_JSON)
def test_any_value_in_a_dump_is_read_or_left_out(column: str, value: Any, tmp_path: Path) -> None:
    strange_record, fine_record = records(noise(0.1), responses=2, length=3)
    (path := tmp_path / "a.jsonl").write_text(
        json.dumps(strange_record | {column: value}) + "\n" + json.dumps(fine_record) + "\n"
    )
    with suppress(JackpotError):
        assert read_dump(path)[0] in (1, 2)


@pytest.mark.slow
@FUZZED
@given(
    key=st.sampled_from(["hidden_size", "num_attention_heads", "vocab_size", "eos_token_id", "rope_theta", "x"]),
    value=ANY_JSON,
)
def test_any_value_in_a_models_config_is_read_or_refused(key: str, value: Any, model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model", dirs_exist_ok=True))
    json_change("config.json", **{key: value})(folder)
    with limits(), suppress(JackpotError):
        eos_token_ids(load_meta_model(folder))


@pytest.mark.slow
@FUZZED
@given(file=st.sampled_from(["metrics.jsonl", "events.jsonl", "environment.json", "config.yaml"]), value=ANY_JSON)
def test_any_value_in_a_run_is_read_or_refused(file: str, value: Any, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [{"eval/policy_accuracy": 0.5}, {}])
    (run / "environment.json").unlink(missing_ok=True)
    (run / file).write_text(json.dumps(value) + "\n")
    with limits(), suppress(JackpotError):
        read_run(run)


@pytest.mark.slow
@FUZZED
@given(changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_message_of_other_bytes_is_read_or_refused(changes: list[tuple[int, int]]) -> None:
    """Also where its checksum is made right again."""
    message = pack({"do": "generate", "ids": torch.arange(6), "more": [1, "x", (None, 2.5)]})
    for position, byte in changes:
        message[position % len(message)] = byte

    for received_message in (message, sealed(message[8:].numpy().tobytes())):
        with limits(), suppress(ValueError):
            unpack(received_message)


# The door

READS = {"read_text", "read_bytes", "read_table", "ParquetFile", "read_schema", "read_metadata", "safe_load"}
EXEMPT_FILES = {  # files that this process or its own machine wrote, or that come with the package; and the door itself
    "core/foreign.py": "the door",
    "core/cores.py": "of the kernel",
    "core/limited.py": "of the kernel",
    "rollout/rewards/worker.py": "of the kernel",
    "rollout/rewards/pool.py": "of the kernel",
    "core/files.py": "a lock of ours, of which a line is shown",
    "ui/html.py": "of the package",
    "training/run_folder/plain_yaml.py": "parses what was read through the door",
    "config/recipes/__init__.py": "a recipe is code (SECURITY.md)",
    "ui/commands/recipes.py": "of the package",
    "ui/commands/mismatch.py": "written a moment ago",
    "analysis/plan/tiny.py": "written a moment ago",
    "analysis/compare/scheduler.py": "the log of a child",
    "training/run_folder/trackers.py": "the name of a run at W&B, a line",
    "training/ranks.py": "written by another rank of this run",
    "analysis/evaluate/answers.py": "reads line by line, and refuses other columns",
}


def test_every_reader_of_files_goes_through_the_door() -> None:
    package = ROOT / "src" / "jackpot"
    strays = []

    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        name = path.relative_to(package).as_posix()
        if name in EXEMPT_FILES or "jackpot.core.foreign import" in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and (node.attr in READS or ast.unparse(node) == "torch.load"):
                strays.append(f"{name}:{node.lineno} {node.attr}")

    assert not strays
