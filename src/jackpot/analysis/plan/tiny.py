"""Shrinks any recipe until it runs on any machine in about a minute: `jackpot train RECIPE --tiny`.

`tiny` makes the changes below. Everything else stays as in the recipe: correction, objective, template, rewards, the
number of optimizer steps on one rollout batch and the age of its rollouts, dynamic sampling, precision, adapters and
the critic.

| setting | becomes |
|---|---|
| models | the same architecture with few random parameters; starters and small folders stay, if tokenizers fit |
| tokenizers | the built-in one for all models, unless every model has its own on the disk and these agree |
| `task.train`, `task.test` | `PROBLEMS` problems of each source, cut at `PROBLEM_BYTES`; made up if it is not local |
| `evaluation.benchmarks` | those with a name; files are left out |
| `engine`, `evaluation.engine` | transformers, in the same dtype |
| `sampling.max_new_tokens` | at most `NEW_TOKENS`; `objective.overlong_buffer.len` is the same share of it |
| `sampling.stop_token_ids` | the end token of the built-in tokenizer, where that is used |
| `batch` | as few sequences as the number of optimizer steps allows; at most `GROUP` for each prompt |
| `batch.micro_batch_tokens` | room for the longest prompt and response: one or a few sequences |
| `iterations`, `evaluation.problems`, `evaluation.k` | at most `ITERATIONS`, `PROBLEMS`, `ANSWERS` |
| `device: cuda` | `auto` |

The other functions make the models and the data. Neither weights nor data are downloaded.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, NamedTuple, get_args

from transformers import PreTrainedConfig

from jackpot.analysis.plan.tiny_models import END, LARGE, SMALL, built_in_tokenizer, own_tokenizer, save_tiny
from jackpot.config.batch import BatchConfig
from jackpot.config.build import merge, validated
from jackpot.config.config import Config
from jackpot.config.engines import EngineConfig, TransformersEngineConfig
from jackpot.config.tasks import DataConfig, MathConfig
from jackpot.core.errors import ModelError
from jackpot.core.files import checkpoint_error_in, write_whole
from jackpot.core.prng import fold_in
from jackpot.models.load import STARTER_PREFIX, load_config, load_meta_model
from jackpot.rollout.tasks.base import Split
from jackpot.rollout.tasks.benchmarks import BENCHMARKS, SETS
from jackpot.rollout.tasks.data import DATA_FOLDER, HUB, DataSource, find_source, find_sources, is_address, source_name
from jackpot.rollout.tasks.rows import problem_columns
from jackpot.rollout.tasks.synthetic import synthetic_rows

ITERATIONS, PROBLEMS, ANSWERS, GROUP = 2, 4, 2, 4
NEW_TOKENS = 32  # most tokens of a response
TOP_LOG_PROBS = 128  # most captured log-probs of a token; the built-in vocabulary has a few hundred tokens
PROBLEM_BYTES = 300  # longest text of a problem, bytes
SEQUENCES = 32  # fewest sequences of a rollout batch: in 2 of 10,000 batches none of the 8 groups has two rewards
STEP_SEQUENCES = 2  # fewest sequences of an optimizer step
AROUND_TOKENS = 120  # most tokens that a chat template adds to the texts of a prompt
SMALL_ENOUGH = 10_000_000  # most parameters of a local model that stays as it is


class ReplacedModels(NamedTuple):
    """Names the models that small ones replace, and why these take the built-in tokenizer."""

    configs: dict[str, PreTrainedConfig | None]  # by the model's path; None: the model stays
    why_built_in: str | None  # why all models take the built-in tokenizer; None: each model keeps its own


class TinyRun(NamedTuple):
    """Holds the settings of a small run, and how they differ from those of its recipe."""

    config: Config
    changes: list[tuple[str, Any, Any]]  # (setting, value in the recipe, value here)
    data: list[str]  # a sentence for each set of problems: where they come from


def tiny(config: Config, models: ReplacedModels, folder: Path) -> Config:
    """Return the settings of a small run, whose models and data will be in `folder`."""
    rollout_model, reference = config.rollout_model, config.objective.reference
    changes: dict[str, Any] = {
        "iterations": min(config.iterations, ITERATIONS),
        "device": "auto" if config.device == "cuda" else config.device,
        "policy": {"path": _model_path(config.policy.path, models, folder)},
        "sampling": _sampling(config, models),
        "batch": _batch(config.batch),
        "engine": _engine(config.engine),
        "evaluation": {
            "problems": min(config.evaluation.problems, PROBLEMS),
            "k": min(config.evaluation.k, ANSWERS),
            "benchmarks": tuple({"name": name} for name in config.evaluation.benchmark_names if name in SETS),
            "engine": config.evaluation.engine and _engine(config.evaluation.engine),
        },
        "objective": {},
        "tracking": {"wandb": None},
    }
    if rollout_model:
        changes["rollout_model"] = {"path": _model_path(rollout_model.path, models, folder)}
    if config.critic and config.critic.path:
        changes["critic"] = {"path": _model_path(config.critic.path, models, folder)}
    if reference and reference.path:
        changes["objective"]["reference"] = {"path": _model_path(reference.path, models, folder)}
    if overlong := config.objective.overlong_buffer:
        share = overlong.len / config.sampling.max_new_tokens
        changes["objective"]["overlong_buffer"] = {
            "len": max(1, math.floor(share * changes["sampling"]["max_new_tokens"]))
        }
    if isinstance(config.task, MathConfig):
        prompt = _longest_prompt(config.task)
        changes["task"] = {split: _split_data(config.task, split, folder) for split in get_args(Split)}
        changes["task"] |= {"reward_workers": 1, "max_prompt_tokens": config.task.max_prompt_tokens and prompt}
        changes["batch"]["micro_batch_tokens"] = prompt + changes["sampling"]["max_new_tokens"]
    return validated(Config, merge(config.model_dump(), changes))


def _sampling(config: Config, models: ReplacedModels) -> dict[str, Any]:
    sampling = config.sampling
    changes: dict[str, Any] = {
        "max_new_tokens": min(sampling.max_new_tokens, NEW_TOKENS),
        "num_top_log_probs": min(sampling.num_top_log_probs, TOP_LOG_PROBS),
    }
    if sampling.stop_token_ids and models.why_built_in:
        changes["stop_token_ids"] = (built_in_tokenizer().convert_tokens_to_ids(END),)
    return changes


def _batch(batch: BatchConfig) -> dict[str, Any]:
    """Shrink the rollout batch to the fewest sequences that keep the recipe's number of optimizer steps."""
    steps, group = batch.steps_per_iteration // batch.ppo_epochs, min(batch.group_size, GROUP)
    multiple = math.lcm(steps, group)
    sequences = math.ceil(max(SEQUENCES, STEP_SEQUENCES * steps) / multiple) * multiple
    if batch.rollouts <= sequences:
        return {}
    size = None if batch.mini_batch_size is None else sequences // steps
    return {"prompts": sequences // group, "group_size": group, "mini_batch_size": size}


def _engine(engine: EngineConfig) -> dict[str, Any]:
    kept = TransformersEngineConfig.model_fields.keys() - {"name", "enable_sleep_mode", "enforce_eager"}
    return {"name": "transformers", **engine.model_dump(include=kept)}  # where the engine has it


def _longest_prompt(task: MathConfig) -> int:
    """Return an upper bound of the tokens of a prompt: its bytes, as each token has a byte or more."""
    texts = (task.instruction, task.system_prompt or "")
    return PROBLEM_BYTES + AROUND_TOKENS + sum(len(text.encode()) for text in texts)


def _split_data(task: MathConfig, split: Split, folder: Path) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the settings of a split's data: one block, or a list of them where the recipe has a list."""
    data = [_data(one, split, number, folder) for number, one in enumerate(task.sources(split))]
    return data if isinstance(getattr(task, split), tuple) else data[0]


def _data(data: DataConfig, split: Split, number: int, folder: Path) -> dict[str, Any]:
    """Point the data to `folder`: a benchmark keeps its name, any other source becomes a file."""
    limit = min(data.limit or PROBLEMS, PROBLEMS)
    if data.source in BENCHMARKS:
        return data.model_dump() | {"subset": None, "limit": limit}
    source = str(_data_folder(folder) / _data_file(data, split, number))
    made_up = {} if _source(data, split).is_local else {"columns": {}, "answers": None}
    return data.model_dump() | {"source": source, "subset": None, "split": None, "limit": limit} | made_up


def _data_file(data: DataConfig, split: Split, number: int) -> str:
    """Name the file of source `number` of a split."""
    return f"{split}{number or ''}-{PurePath(source_name(data.source)).name}.jsonl"


def _data_folder(folder: Path) -> Path:
    return folder / "data"


def _model_path(path: str, models: ReplacedModels, folder: Path) -> str:
    """Return the path of the model that replaces the one at `path`; two roles that share a path share the model."""
    if models.configs[path] is None:
        return path
    return str(folder / "models" / path.strip("/.~").replace("/", "--").replace(":", "--"))


def changed(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield every setting that differs, with both values; of a block whose `name` differs yield only the name."""
    both = isinstance(old, Mapping) and isinstance(new, Mapping)
    if both and old.get("name") != new.get("name"):
        yield key, old.get("name"), new.get("name")
    elif both:
        for name in old:
            yield from changed(old[name], new[name], f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new


@contextmanager
def tiny_run(config: Config, folder: Path) -> Iterator[TinyRun]:
    """Make the models and the data of a small run in `folder`, the same each time; the caller launches it in the body.

    In the body, and only there, benchmarks are read from `folder`.

    Raises:
        ModelError: the config of a model is neither on the disk, nor on the hub, nor in the table of published models.
        DataError: a benchmark is unknown, or local data cannot be read.
    """
    models = replaced_models(config)
    small = tiny(config, models, folder)
    with checkpoint_error_in(folder):
        data = _write_data(config, folder)
    with _benchmarks_from(_data_folder(folder)):
        with checkpoint_error_in(folder):
            _write_models(config, small, models, folder)
        yield TinyRun(small, [*_tokenizer_change(models), *changed(config.model_dump(), small.model_dump())], data)


def _tokenizer_change(models: ReplacedModels) -> list[tuple[str, Any, Any]]:
    if models.why_built_in is None:
        return []
    return [("tokenizer", f"each model's own ({models.why_built_in})", "built-in byte-level, plain chat format")]


@contextmanager
def _benchmarks_from(folder: Path) -> Iterator[None]:
    before = os.environ.get(DATA_FOLDER)
    os.environ[DATA_FOLDER] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(DATA_FOLDER)
        if before is not None:
            os.environ[DATA_FOLDER] = before


def replaced_models(config: Config) -> ReplacedModels:
    """Find the config of each model that a small one replaces, and choose the tokenizer.

    The recipe's tokenizer is used only where every model of the run has it on the disk. Otherwise all models take the
    built-in one, and those that would stay are replaced too, as their vocabulary is another.

    Raises:
        ModelError: the config of a model is neither on the disk, nor on the hub, nor in the table of published models.
    """
    others = [config.rollout_model, config.critic, config.objective.reference]
    paths = [config.policy.path, *(one.path for one in others if one and one.path)]
    configs = {path: _replaced(path) for path in paths}
    if not any(configs.values()):
        return ReplacedModels(configs, None)

    why_built_in = _why_built_in(configs)
    if why_built_in:
        return ReplacedModels({path: config or load_config(path) for path, config in configs.items()}, why_built_in)
    return ReplacedModels(configs, None)


def _replaced(path: str) -> PreTrainedConfig | None:
    """Return the config of the model at `path`; None for a starter and for a small folder, which stay."""
    if path.startswith(STARTER_PREFIX):
        return None
    try:
        config = load_config(path)
    except ModelError as error:
        raise ModelError(
            f"--tiny needs the architecture of {path!r}, whose config.json was not found: {error}. --tiny needs no "
            f"weights: give a folder that has the model's config.json, or a published model of the same architecture, "
            f"for example policy.path=Qwen/Qwen3-4B-Base, or add the model's shape to models/published.py"
        ) from error
    is_here = Path(path).expanduser().is_dir()
    if is_here and sum(parameter.numel() for parameter in load_meta_model(path).parameters()) <= SMALL_ENOUGH:
        return None
    return config


def _why_built_in(paths: Iterable[str]) -> str | None:
    """Say why the models in `paths` cannot keep their own tokenizers; None where all are on the disk and agree."""
    tokenizers = {path: own_tokenizer(path) for path in paths}
    vocabularies = {path: tokenizer.get_vocab() for path, tokenizer in tokenizers.items() if tokenizer}
    if missing := [path for path in tokenizers if path not in vocabularies]:
        return f"not on this disk: {', '.join(missing)}"
    first, *others = vocabularies.values()
    return "they differ" if any(vocabulary != first for vocabulary in others) else None


def _write_models(config: Config, small: Config, models: ReplacedModels, folder: Path) -> None:
    """Write the small models that do not exist yet; a continued run keeps those that it began with."""
    answers = _answers(small)
    for path, like in models.configs.items():
        target = Path(_model_path(path, models, folder))
        if like is None or target.exists():
            continue
        size = SMALL if config.rollout_model and path == config.rollout_model.path != config.policy.path else LARGE
        tokenizer = None if models.why_built_in else own_tokenizer(path)
        unfinished = target.with_name(f"{target.name}.unfinished")
        save_tiny(unfinished, like, size, tokenizer or built_in_tokenizer(), answers, fold_in(0, "tiny", path))
        unfinished.rename(target)


def _answers(small: Config) -> list[str]:
    if not isinstance(small.task, MathConfig):
        return []
    sources = find_sources(small.task.sources("train"), "train")
    return [answer for source in sources for row in source.rows() for answer in row.answers]


def _write_data(config: Config, folder: Path) -> list[str]:
    """Write a file for each set of problems, unless it exists; return a sentence about each file."""
    _data_folder(folder).mkdir(parents=True, exist_ok=True)
    said = []
    for number, (file, source) in enumerate(_sources(config).items()):
        path = _data_folder(folder) / file
        origin = f"{'the first' if source.is_local else 'made up in place of the'} problems of {source.name}"
        if path.exists():
            origin = "as it was"
        else:
            rows = _rows(source, number)
            write_whole(path, "".join(json.dumps(row, default=str) + "\n" for row in rows).encode())
        said.append(f"{file}: {origin}")
    return said


def _sources(config: Config) -> dict[str, DataSource]:
    """Return the sources that the run reads by the name of the file that replaces each; both splits of a benchmark."""
    sources: dict[str, DataSource] = {}
    names = [name for name in config.evaluation.benchmark_names if name in BENCHMARKS]
    if isinstance(config.task, MathConfig):
        for split in get_args(Split):
            for number, data in enumerate(config.task.sources(split)):
                if data.source in BENCHMARKS:
                    names.append(data.source)
                else:
                    sources[_data_file(data, split, number)] = _source(data, split)
    for name in dict.fromkeys(names):
        for part in filter(None, (BENCHMARKS[name].train, BENCHMARKS[name].test)):
            sources[part.file] = find_source(DataConfig(source=name, split=part.split), "train")
    return sources


def _source(data: DataConfig, split: Split) -> DataSource:
    """Locate the rows of a set; a path without a local file counts as a set of the hub."""
    path = Path(data.source).expanduser()
    if not path.exists() and is_address(data.source) and not data.source.startswith(HUB):
        data = data.model_copy(update={"source": HUB + data.source})
    return find_source(data, split)


def _rows(source: DataSource, number: int) -> list[dict[str, Any]]:
    """Return a few rows in the columns of the set, with problems cut short; made-up rows for a set of the hub."""
    if not source.is_local:
        return synthetic_rows(source.benchmark, number * PROBLEMS, PROBLEMS)
    chosen = source.settings.columns.problem
    columns = [chosen] if chosen else source.benchmark.problem
    return [_cut_problem(record.values, columns) for record in islice(source.records(), PROBLEMS)]


def _cut_problem(values: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """Cut the texts of a problem so that they have at most `PROBLEM_BYTES` together."""
    parts = problem_columns(values, columns)
    size = PROBLEM_BYTES // max(1, sum(_texts(values[name]) for name in parts))
    return {name: _cut(value, size) if name in parts else value for name, value in values.items()}


def _texts(value: Any) -> int:
    """Count the texts in a value, however deep they lie in it."""
    if isinstance(value, Mapping | list):
        return sum(map(_texts, value.values() if isinstance(value, Mapping) else value))
    return int(isinstance(value, str))


def _cut(value: Any, size: int) -> Any:
    """Cut every text in a value to `size` bytes."""
    if isinstance(value, Mapping):
        return {name: _cut(item, size) for name, item in value.items()}
    if isinstance(value, list):
        return [_cut(item, size) for item in value]
    if not isinstance(value, str):
        return value
    return value.encode(errors="surrogatepass")[:size].decode(errors="ignore")
