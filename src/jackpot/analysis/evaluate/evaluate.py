"""`jackpot eval`: a model answers named sets of problems, and all responses are stored.

    config.yaml      settings, and the digests of model and problems; .lock is held by the process that evaluates
    NAME.parquet     every response to one set; NAME.jsonl until the set is complete (answers.py)
    summary.json     the results of every complete set

The same command continues an evaluation. Settings that decide the responses may not change meanwhile; settings with the
mark `MAY_CHANGE` may, and sets may be added.

Status: supported.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedTokenizerBase

from jackpot.analysis.evaluate.answers import AnswerFile, model_digest, read_outcomes
from jackpot.config.build import flat, lay, validated
from jackpot.config.changes import changeable, changes, settings_of
from jackpot.config.engines import ServerEngineConfig
from jackpot.config.tools import ENDLESS, BenchmarksConfig, sets_of
from jackpot.core.cores import pick_threads
from jackpot.core.errors import CheckpointError, ConfigError, DataError
from jackpot.core.files import checkpoint_error_in, hold_lock, write_whole
from jackpot.core.foreign import read_foreign
from jackpot.core.statistics import CONFIDENCE
from jackpot.core.types import Prompt, Version
from jackpot.launch.engines import make_engine
from jackpot.models.device import pick_device
from jackpot.models.load import load_tokenizer
from jackpot.rollout.engines.base import Engine, Request
from jackpot.rollout.evaluate import eval_request, generate_and_score
from jackpot.rollout.pass_at_k import EvaluationSummary, summarize
from jackpot.rollout.tasks.base import Task
from jackpot.rollout.tasks.benchmarks import NO_SET, SETS
from jackpot.rollout.tasks.registry import check_sets, make_sets, make_task
from jackpot.training.run_folder.checkpoint import config_of_run, resolve_model_path
from jackpot.training.run_folder.plain_yaml import parse_yaml

SCHEMA_VERSION = 1
OWN = "own"  # name of the benchmark that consists of the held-out problems of the model's own run
_KEYS = ("schema_version", "model_digest", "data")  # keys of config.yaml other than `asked`
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationProgress:
    """The progress of an evaluation with one set of problems; responses are counted when they are scored."""

    benchmark: str
    done: int  # number of responses scored so far, including those of earlier processes
    total: int  # number of responses that the whole set will have
    fresh: int  # number of responses scored by this process
    tokens: int  # tokens of the fresh responses
    seconds: float  # wall-clock time of the fresh responses


ProgressListener = Callable[[EvaluationProgress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkResult:
    """The results of an evaluation with one set of problems, all of which are answered."""

    benchmark: str
    summary: EvaluationSummary
    table: Path  # file with all responses
    was_done: bool  # whether an earlier process completed the set


@dataclass(frozen=True, kw_only=True, slots=True)
class _Benchmark:
    """A set of problems, with the digest and the longest prompt that were found by reading all its prompts."""

    name: str
    task: Task
    size: int  # number of problems
    digest: str  # digest of uid, prompt and answer of every problem
    longest: tuple[int, str]  # tokens and uid of the longest prompt


def evaluation_config(model: str, changes: Sequence[Mapping[str, Any]]) -> BenchmarksConfig:
    """Build the settings of an evaluation of one model on sets of problems.

    For a run's model, the run's settings are the defaults of sampling, template, rewards, task and the engine's dtype.

    Args:
        model: path of a model, or the folder of a run.
        changes: settings that differ from the defaults, as nested mappings; a later one wins.

    Raises:
        ConfigError: settings do not exist or do not fit.
        CheckpointError: the folder is neither a model nor a run.
    """
    settings: dict[str, Any] = {}
    if run := config_of_run(model):
        settings = {
            "sampling": run.evaluation_sampling.model_dump(exclude={"num_top_log_probs"}),
            "engine": {"name": "transformers"},
            **sets_of(run.task).model_dump(),
            "task": run.task.model_dump(),
        }

    settings = lay(settings, (*changes, {"model": model}))
    # The dtype is set last, since a change of the engine's name replaces all other settings of the engine.
    if run and isinstance(settings["engine"], Mapping):
        settings["engine"] = {"dtype": run.engine.dtype, **settings["engine"]}

    if "benchmarks" not in settings:
        raise ConfigError(NO_SET)

    config = validated(BenchmarksConfig, settings)
    check_sets([name for name in config.benchmarks if name != OWN])

    # Only the benchmark OWN reads the task; without this benchmark the settings hold no task.
    if OWN not in config.benchmarks:
        return config.model_copy(update={"task": None})
    if config.task is None:
        raise ConfigError(
            f"{OWN} is the held-out problems of a run, and {model} is not the folder of one; give the folder of the "
            f"run, set task, or name other benchmarks"
        )
    return config


def evaluation_tasks(config: BenchmarksConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Task]:
    """Make one task for each set of problems in an evaluation, by the name of the set in files and results."""
    tasks = make_sets([name for name in config.benchmarks if name != OWN], tokenizer, config)
    if config.task and OWN in config.benchmarks:
        tasks[OWN] = make_task(config.task, tokenizer)
    return tasks


def evaluate_model(config: BenchmarksConfig, folder: Path, listen: ProgressListener) -> list[BenchmarkResult]:
    """Generate and score the responses that are missing in `folder`, and summarize every set.

    Args:
        config: settings of the evaluation.
        folder: folder of the evaluation, new or of an earlier process.
        listen: function that is called with the progress whenever responses are scored.

    Raises:
        CheckpointError: the folder is in use or holds an evaluation with other settings, or the disk is full.
        DataError, ModelError, EngineError: the problems, the model or the engine cannot be used.
    """
    path = resolve_model_path(config.model)
    tokenizer, digest = load_tokenizer(path), model_digest(path)

    with ExitStack() as cleanup:
        with checkpoint_error_in(folder):
            folder.mkdir(parents=True, exist_ok=True)
            cleanup.callback(hold_lock(folder / ".lock").close)

        tasks = evaluation_tasks(config, tokenizer)
        for task in tasks.values():
            cleanup.callback(task.close)
        benchmarks = [_open_benchmark(name, task, config.problems) for name, task in tasks.items()]
        record = _write_record(folder, config, digest, benchmarks)
        files = [AnswerFile(folder, benchmark.name, benchmark.size, config.k) for benchmark in benchmarks]
        unfinished = {
            benchmark.name: (benchmark, file)
            for benchmark, file in zip(benchmarks, files, strict=True)
            if not file.is_finished
        }

        engine: Engine | None = None
        for name, (benchmark, file) in unfinished.items():
            if file.done < benchmark.size * config.k:  # the engine is made for the first set that lacks a response
                engine = engine or _make_engine(config, path, [waiting for waiting, _ in unfinished.values()], cleanup)
                _answer(engine, tokenizer, benchmark, file, config, listen)

            # The file's metadata say by which settings this set was answered.
            decisive = _decisive(record | {"data": {name: record["data"][name]}})
            file.finish(partial(benchmark.task.prompt, "test"), {"asked": json.dumps(decisive)})
            _write_summary(folder, record)  # after every set, so that a kill loses no result

        summaries = _write_summary(folder, record)

    return [
        BenchmarkResult(benchmark=name, summary=summaries[name], table=file.path, was_done=name not in unfinished)
        for name, file in zip(tasks, files, strict=True)
    ]


def _open_benchmark(name: str, task: Task, limit: int | None) -> _Benchmark:
    """Read every prompt of a set once, for the digest and the longest prompt.

    Args:
        name: name of the set.
        task: task with the problems of the set.
        limit: most problems that are taken; None: all, or the first ENDLESS of a set that is generated without end.
    """
    available = task.size("test")
    size = limit or available or ENDLESS
    size = size if available is None else min(size, available)

    digest, longest = sha256(), (0, "")
    for index in range(size):
        prompt = task.prompt("test", index)
        digest.update(json.dumps([prompt.uid, prompt.answers, prompt.text, prompt.token_ids]).encode())
        longest = max(longest, (len(prompt.token_ids), prompt.uid))

    return _Benchmark(name=name, task=task, size=size, digest=f"sha256 {digest.hexdigest()}", longest=longest)


def _make_engine(config: BenchmarksConfig, path: str, benchmarks: Sequence[_Benchmark], cleanup: ExitStack) -> Engine:
    """Make the engine, and refuse a set whose longest prompt leaves no room in the engine's context.

    Args:
        config: settings of the evaluation.
        path: path of the model.
        benchmarks: sets that the engine will answer.
        cleanup: stack that will close the engine.
    """
    torch.set_num_threads(pick_threads(config.threads))
    engine = make_engine(config.engine, path, pick_device(config.device), Version(policy=0, rollout_model=0))
    cleanup.callback(engine.close)

    context = engine.capabilities.max_model_len
    for benchmark in benchmarks:
        tokens, uid = benchmark.longest
        if tokens >= context:
            raise DataError(
                f"{benchmark.name}: the prompt of {uid} has {tokens} tokens, and the context of {context} leaves no "
                f"room for a response; take a model or an engine with a longer context, or leave {benchmark.name} out"
            )
    return engine


def _answer(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    benchmark: _Benchmark,
    file: AnswerFile,
    config: BenchmarksConfig,
    listen: ProgressListener,
) -> None:
    """Generate, score and store every response of a set that is not in the file yet."""
    under_way: dict[str, tuple[int, int]] = {}  # uid of a request -> (index of the problem, sample)

    def requests() -> Iterator[Request]:
        """Yield a request for each missing response, and note in `under_way` which response each request is for."""
        prompts: dict[int, Prompt] = {}  # the newest prompt by its index; all samples of a problem share it
        for index, sample in file.missing():
            if index not in prompts:
                prompts = {index: benchmark.task.prompt("test", index)}
            request = eval_request(prompts[index], sample, config.sampling, config.seed, benchmark.name)
            under_way[request.uid] = (index, sample)
            yield request

    began = time.monotonic()
    fresh = tokens = 0
    servers = len(config.engine.urls) if isinstance(config.engine, ServerEngineConfig) else 1
    most_at_once = config.engine.max_num_seqs * servers
    for responses in generate_and_score(engine, benchmark.task, tokenizer, requests(), most_at_once):
        file.add((*under_way.pop(response.rollout.uid), response) for response in responses)
        fresh += len(responses)
        tokens += sum(len(response.rollout.token_ids) for response in responses)
        listen(
            EvaluationProgress(
                benchmark=benchmark.name,
                done=file.done + fresh,
                total=benchmark.size * config.k,
                fresh=fresh,
                tokens=tokens,
                seconds=time.monotonic() - began,
            )
        )
        for event in engine.take_events():
            _log.warning(": ".join(map(str, event.values())))


def _write_record(
    folder: Path, config: BenchmarksConfig, digest: str, benchmarks: Sequence[_Benchmark]
) -> dict[str, Any]:
    """Write config.yaml, after comparing its content with the one of an earlier process, and return the content.

    Args:
        folder: folder of the evaluation.
        config: settings of the evaluation.
        digest: digest of the model.
        benchmarks: sets of this evaluation; the record keeps the sets of earlier evaluations.

    Raises:
        CheckpointError: settings differ; the message lists the differences.
    """
    path = folder / "config.yaml"
    settings = settings_of(config)
    data = {benchmark.name: {"problems": benchmark.size, "digest": benchmark.digest} for benchmark in benchmarks}
    record = {"schema_version": SCHEMA_VERSION, "asked": settings, "model_digest": digest, "data": data}

    if before := _read_record(path):
        # Not compared are sets that the earlier process did not have, and the task if it did not have the set OWN, the
        # only one whose problems come from the task.
        old_data = {name: before["data"].get(name, new_data) for name, new_data in data.items()}
        old_asked = before["asked"] if OWN in before["data"] else before["asked"] | {"task": settings["task"]}
        old, new = _decisive(before | {"asked": old_asked, "data": old_data}), _decisive(record)
        if differences := list(map(str, changes(old, new))):
            listed = "\n  ".join(differences)
            raise CheckpointError(
                f"{folder} holds an evaluation with other settings:\n  {listed}\n"
                f"Use the same settings to continue it, or --out with another folder"
            )
        # The new record keeps earlier sets, and their task if this process reads none; `settings` is record["asked"].
        record["data"] = before["data"] | data
        settings |= {"benchmarks": list(record["data"])} | ({} if OWN in data else {"task": old_asked["task"]})

    with checkpoint_error_in(folder):
        write_whole(path, yaml.safe_dump(record, sort_keys=False).encode())
    return record


def _read_record(path: Path) -> dict[str, Any] | None:
    """Read the config.yaml of an earlier process; None in a folder without an evaluation.

    Raises:
        CheckpointError: the file cannot be read or is not of an evaluation, or there are responses and no such file.
    """
    if not path.is_file():
        names = (f"{name}{ending}" for name in SETS for ending in (".parquet", ".jsonl"))
        if present := [name for name in names if (path.parent / name).exists()]:
            raise CheckpointError(
                f"{path.parent} holds answers ({', '.join(present)}) but no config.yaml that says what was asked; "
                f"bring it back, move the answers away, or give --out another folder"
            )
        return None

    try:
        record = parse_yaml(read_foreign(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"cannot read what was asked in {path}: {error}. Bring the file back, or give --out another folder"
        ) from error

    is_ours = isinstance(record, dict) and record.keys() >= {"asked", *_KEYS}
    if not is_ours or not all(isinstance(record[key], dict) for key in ("asked", "data")):
        raise CheckpointError(f"{path} is not of an evaluation; give --out another folder")
    return record


def _decisive(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings and digests of a record that responses and scores depend on, by dotted key."""
    free = tuple(f"{key}." for key in changeable(BenchmarksConfig))  # prefixes of keys that may change
    free += () if OWN in record["data"] else ("task.",)  # only the problems of OWN come from the task
    decisive = {key: value for key, value in flat(record["asked"]).items() if not f"{key}.".startswith(free)}
    return decisive | {key: record[key] for key in _KEYS}


def _write_summary(folder: Path, record: Mapping[str, Any]) -> dict[str, EvaluationSummary]:
    """Write summary.json, and return the summaries of all complete sets in the folder, by name."""
    tables = {name: folder / f"{name}.parquet" for name in record["data"]}
    summaries = {name: summarize(read_outcomes(table)) for name, table in tables.items() if table.is_file()}

    content = {
        "schema_version": SCHEMA_VERSION,
        "model": record["asked"]["model"],
        "model_digest": record["model_digest"],
        "interval": {"level": CONFIDENCE, "method": "Wilson, over problems, with Student's t"},
        "benchmarks": {name: asdict(summary) for name, summary in summaries.items()},
    }
    with checkpoint_error_in(folder):
        write_whole(folder / "summary.json", json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")
    return summaries
