"""`jackpot train RECIPE --tiny`: any recipe, made so small that it runs on any machine in about a minute.

The function `tiny` makes the changes below. Everything else stays as in the recipe: correction, objective, template,
rewards, the number of optimizer steps on a rollout batch and the age of its rollouts, dynamic sampling, precision,
adapters and the critic.

| setting | becomes |
|---|---|
| models | the same architecture with few random parameters; if all are small already, all stay as they are |
| tokenizers | the policy's own for all models, where it is on the disk; else bytes, those of the text starters |
| `task.train`, `task.test` | `PROBLEMS` problems of each source, cut at `PROBLEM_BYTES`; made up if it is not local |
| `evaluation.benchmarks` | as `task.train`: `PROBLEMS` problems of each benchmark |
| `engine`, `evaluation.engine` | transformers, in the same dtype |
| `sampling.max_new_tokens` | at most `NEW_TOKENS`; `objective.overlong_buffer.len` is the same share of it |
| `sampling.stop_token_ids` | the end token of the text starters, where their tokenizer is used |
| `batch` | as few sequences as the number of optimizer steps allows; at most `GROUP` for each prompt |
| `batch.micro_batch_tokens` | room for the longest prompt and response: one or a few sequences |
| `iterations`, `evaluation.problems`, `evaluation.k` | at most `ITERATIONS`, `PROBLEMS`, `ANSWERS` |
| `device: cuda` | `auto` |

The other functions make the models and the data. Neither weights nor data are downloaded.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

from transformers import PreTrainedConfig

from jackpot.analysis.plan.sizes import parameter_count
from jackpot.analysis.plan.tiny_models import BYTES, LARGE, SMALL, own_tokenizer, save_tiny
from jackpot.config.batch import BatchConfig
from jackpot.config.build import merge, validated
from jackpot.config.config import Config
from jackpot.config.engines import EngineConfig, TransformersEngineConfig
from jackpot.config.tasks import DataConfig, MathConfig
from jackpot.config.tools import sets_of
from jackpot.core.errors import ModelError
from jackpot.core.files import checkpoint_error_in, write_whole
from jackpot.core.prng import fold_in
from jackpot.models.hub import STARTER_PREFIX
from jackpot.models.load import load_config, load_meta_model
from jackpot.rollout.tasks.base import Split
from jackpot.rollout.tasks.benchmarks import BENCHMARKS
from jackpot.rollout.tasks.data import HUB, find_source, is_address
from jackpot.rollout.tasks.registry import set_name
from jackpot.rollout.tasks.rows import Problem
from jackpot.rollout.tasks.synthetic import synthetic_rows

ITERATIONS = 2  # most iterations of a small run
PROBLEMS = 4  # most problems of a set
ANSWERS = 2  # most answers to a problem in an evaluation
GROUP = 4  # most responses of a group
NEW_TOKENS = 32  # most tokens of a response
TOP_LOG_PROBS = 128  # most captured log-probs of a token; a tokenizer of bytes has a few hundred tokens
PROBLEM_BYTES = 300  # longest text of a problem, bytes
SEQUENCES = 32  # fewest sequences of a rollout batch: in only 2 of 10,000 do rewards differ in none of the 8 groups
STEP_SEQUENCES = 2  # fewest sequences of an optimizer step
AROUND_TOKENS = 120  # most tokens that a chat template adds to the texts of a prompt
SMALL_ENOUGH = 10_000_000  # most parameters of a local model that stays as it is


class ReplacedModels(NamedTuple):
    """The large models of a run, which small ones replace all or not at all, and the tokenizer of the small ones."""

    configs: dict[str, PreTrainedConfig]  # configs of the large models by path; empty: all models stay
    tokenizer: str  # path of the model whose tokenizer the small ones take: the policy, or `BYTES`


class TinyRun(NamedTuple):
    """The settings of a small run, and how they differ from those of its recipe."""

    config: Config
    changes: list[tuple[str, Any, Any]]  # (setting, value in the recipe, value here)
    data: list[str]  # a sentence for each set of problems, about where its problems come from


def make_tiny(config: Config, folder: Path) -> TinyRun:
    """Make the models and the data of a small run in `folder`, and return the run's settings.

    The same recipe makes the same models and data each time; what is in `folder` already is kept.

    Raises:
        ModelError: the config of a model is neither on the disk, nor on the hub, nor in the table of published models.
        DataError: a benchmark is unknown, or local data cannot be read.
    """
    models, sources = replaced_models(config), _sources(config, folder)
    small = tiny(config, models, folder)
    with checkpoint_error_in(folder):
        sentences = [_write_data(path, data, index) for index, (path, data) in enumerate(sources.items())]
        _write_models(config, models, _answers(sources), folder)

    changes = list(changed(config.model_dump(), small.model_dump()))
    if models.tokenizer == BYTES:
        changes.insert(0, ("tokenizer", "the policy's own (not on this disk)", "bytes, plain chat format"))
    return TinyRun(config=small, changes=changes, data=sentences)


def tiny(config: Config, models: ReplacedModels, folder: Path) -> Config:
    """Return the settings of a recipe, made small as the table at the top of this file says.

    Args:
        config: settings of the recipe.
        models: models that small ones replace.
        folder: folder that will have the small run's models and data.
    """
    sampling, evaluation = config.sampling, config.evaluation
    new_tokens = min(sampling.max_new_tokens, NEW_TOKENS)
    changes: dict[str, Any] = {
        "iterations": min(config.iterations, ITERATIONS),
        "device": "auto" if config.device == "cuda" else config.device,
        "sampling": {
            "max_new_tokens": new_tokens,
            "num_top_log_probs": min(sampling.num_top_log_probs, TOP_LOG_PROBS),
        },
        "batch": _batch(config.batch),
        "engine": _engine(config.engine),
        "evaluation": {
            "problems": min(evaluation.problems, PROBLEMS),
            "k": min(evaluation.k, ANSWERS),
            "benchmarks": tuple(
                {"name": str(_benchmark_file(name, folder)) if _is_data(name) else name}
                for name in evaluation.benchmark_names
            ),
            "engine": evaluation.engine and _engine(evaluation.engine),
        },
        "objective": {},
        "tracking": {"wandb": None},
    }

    # The recipe's stop tokens mean other text to the tokenizer of bytes, which has one end token.
    if sampling.stop_token_ids and models.tokenizer == BYTES and (tokenizer := own_tokenizer(BYTES)):
        changes["sampling"]["stop_token_ids"] = (tokenizer.eos_token_id,)
    if overlong := config.objective.overlong_buffer:
        share = overlong.len / sampling.max_new_tokens
        changes["objective"]["overlong_buffer"] = {"len": max(1, math.floor(share * new_tokens))}

    # A task that reads problems: every split is a file, and a micro-batch has room for the longest prompt. If the
    # recipe limits the length of prompts, the limit becomes that of the longest prompt.
    if isinstance(config.task, MathConfig):
        prompt = _longest_prompt(config.task)
        changes["task"] = {split: _split_data(config.task, split, folder) for split in get_args(Split)}
        changes["task"] |= {"reward_workers": 1, "max_prompt_tokens": config.task.max_prompt_tokens and prompt}
        changes["batch"]["micro_batch_tokens"] = prompt + new_tokens

    # Every replaced model gets the path of its small model, in the block of settings that had the large one's path.
    for key, path in _model_paths(config).items():
        if path in models.configs:
            parent, _, block = key.rpartition(".")
            siblings = changes[parent] if parent else changes
            siblings[block] = {"path": str(_model_folder(path, folder))}
    return validated(Config, merge(config.model_dump(), changes))


def _model_paths(config: Config) -> dict[str, str]:
    """Return the paths of all models in the settings, by the key of the block that has the path."""
    blocks = {
        "policy": config.policy,
        "rollout_model": config.rollout_model,
        "critic": config.critic,
        "objective.reference": config.objective.reference,
    }
    return {key: block.path for key, block in blocks.items() if block and block.path}


def _batch(batch: BatchConfig) -> dict[str, Any]:
    """Return the settings of the smallest batch with the recipe's number of optimizer steps.

    The dict is empty if the recipe's batch is small enough.
    """
    # The batch must split into whole groups, and into equal optimizer steps, of which one epoch has `steps`.
    steps, group = batch.steps_per_iteration // batch.ppo_epochs, min(batch.group_size, GROUP)
    multiple = math.lcm(steps, group)
    sequences = math.ceil(max(SEQUENCES, STEP_SEQUENCES * steps) / multiple) * multiple
    if batch.rollouts <= sequences:
        return {}
    size = None if batch.mini_batch_size is None else sequences // steps  # None: the whole batch
    return {"prompts": sequences // group, "group_size": group, "mini_batch_size": size}


def _engine(engine: EngineConfig) -> dict[str, Any]:
    """Return the settings of a transformers engine, with the recipe's values of those that both engines have."""
    shared = TransformersEngineConfig.model_fields.keys() - {"name", "enable_sleep_mode", "enforce_eager"}
    return {"name": "transformers", **engine.model_dump(include=shared)}


def _longest_prompt(task: MathConfig) -> int:
    """Return an upper bound of the tokens in a prompt: its number of bytes, since every token has at least one byte."""
    texts = (task.instruction, task.system_prompt or "")
    return PROBLEM_BYTES + AROUND_TOKENS + sum(len(text.encode()) for text in texts)


def _split_data(task: MathConfig, split: Split, folder: Path) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the settings of a split's data: one block, or a list of blocks if the recipe has a list."""
    blocks = [
        DataConfig(source=str(path), weight=data.weight).model_dump()
        for path, data in _split_files(task, split, folder).items()
    ]
    return blocks if isinstance(getattr(task, split), tuple) else blocks[0]


def _split_files(task: MathConfig, split: Split, folder: Path) -> dict[Path, DataConfig]:
    """Return file -> source for each source of a split, where the file holds the few problems that replace it."""
    return {
        folder / "data" / f"{split}{index or ''}" / f"{set_name(data.source)}.jsonl": data
        for index, data in enumerate(task.sources(split))
    }


def _is_data(benchmark: str) -> bool:
    """Return whether the problems of a benchmark are data, in a file or on the hub, and not generated."""
    return benchmark in BENCHMARKS or is_address(benchmark)


def _benchmark_file(benchmark: str, folder: Path) -> Path:
    """Return the file that holds the few problems which replace a benchmark."""
    return folder / "data" / "benchmarks" / f"{set_name(benchmark)}.jsonl"


def _model_folder(path: str, folder: Path) -> Path:
    """Return the folder of the small model that replaces the model at `path`; roles with one path share one model."""
    return folder / "models" / path.strip("/.~").replace("/", "--").replace(":", "--")


def changed(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, old value, new value) for every setting that differs.

    For a block of settings whose `name` differs, only the name is yielded.

    Args:
        old, new: nested mappings with equal keys.
        key: dotted key of both mappings; empty: at the top.
    """
    are_blocks = isinstance(old, Mapping) and isinstance(new, Mapping)
    if are_blocks and old.get("name") != new.get("name"):
        yield key, old.get("name"), new.get("name")
    elif are_blocks:
        for name in old:
            yield from changed(old[name], new[name], f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new


def replaced_models(config: Config) -> ReplacedModels:
    """Find the config of each model that a small one replaces, and choose the tokenizer of the small ones.

    All models of a run must have one tokenizer. So if one model is replaced, all are, even those small already.

    Raises:
        ModelError: the config of a model is neither on the disk, nor on the hub, nor in the table of published models.
    """
    paths = dict.fromkeys(_model_paths(config).values())
    if all(map(_is_small, paths)):
        return ReplacedModels(configs={}, tokenizer=config.policy.path)
    # Without the policy's own tokenizer on this disk, the small models get one whose tokens are bytes.
    tokenizer = config.policy.path if own_tokenizer(config.policy.path) else BYTES
    return ReplacedModels(configs={path: load_config(path) for path in paths}, tokenizer=tokenizer)


def _is_small(path: str) -> bool:
    """Return whether a model is small enough to stay: one of Jackpot's starters, or a small model in a local folder.

    Raises:
        ModelError: the model is no starter, and its config is not found.
    """
    if path.startswith(STARTER_PREFIX):
        return True
    try:
        load_config(path)
    except ModelError as error:
        raise ModelError(
            f"--tiny needs the architecture of {path!r}, whose config.json was not found: {error}. --tiny needs no "
            f"weights: give a folder that has the model's config.json, or a published model of the same architecture, "
            f"for example policy.path=Qwen/Qwen3-4B-Base, or add the model's shape to models/published.py"
        ) from error

    is_local = Path(path).expanduser().is_dir()
    return is_local and parameter_count(load_meta_model(path)) <= SMALL_ENOUGH


def _write_models(config: Config, models: ReplacedModels, answers: list[str], folder: Path) -> None:
    """Write the small models that do not exist yet, so that a continued run keeps the models that it began with."""
    for path, like in models.configs.items():
        target = _model_folder(path, folder)
        if target.exists():
            continue
        # The rollout model is the smaller of the two, unless it is the policy's model itself.
        size = SMALL if config.rollout_model and path == config.rollout_model.path != config.policy.path else LARGE
        unfinished = target.with_name(f"{target.name}.unfinished")
        save_tiny(unfinished, like, size, models.tokenizer, answers, seed=fold_in(0, "tiny", path))
        unfinished.rename(target)


def _sources(config: Config, folder: Path) -> dict[Path, DataConfig]:
    """Return the sources of all data that the run reads, each by the path of the small file that is to replace it.

    The files, with a few problems each, are in `folder`; they are not written here.
    """
    # In a benchmark that is a file, columns have the names that they have in the task's test problems.
    file_settings = sets_of(config.task)
    sources = {
        _benchmark_file(name, folder): DataConfig(source=name)
        if name in BENCHMARKS
        else DataConfig(source=name, columns=file_settings.columns, answers=file_settings.answers)
        for name in filter(_is_data, config.evaluation.benchmark_names)
    }

    if isinstance(config.task, MathConfig):
        for split in get_args(Split):
            sources |= _split_files(config.task, split, folder)
    return sources


def _write_data(path: Path, data: DataConfig, index: int) -> str:
    """Write a few problems of a data source to a file, unless the file exists; made-up ones for data not on this disk.

    Args:
        path: file to write, in the folder `train` (or train1, ...), `test` or `benchmarks`.
        data: settings of the data source.
        index: index of the source, so that made-up problems differ between sources.

    Returns:
        A sentence about the file.
    """
    name = f"{path.parent.name}/{path.name}"
    if path.exists():
        return f"{name}: as it was"

    local = Path(data.source).expanduser()
    if is_address(data.source) and not local.exists() and not data.source.startswith(HUB):
        data = data.model_copy(update={"source": HUB + data.source})  # not a file here, so on the hub

    source = find_source(data, "train" if path.parent.name.startswith("train") else "test")
    rows: Iterable[Mapping[str, Any]] = synthetic_rows(first=index * PROBLEMS, count=PROBLEMS)
    if source.is_local:
        answered = (row for row in source.rows() if row.answers)
        rows = [
            {"id": row.uid, "problem": _short(row.problem), "answer": row.answers} for row in islice(answered, PROBLEMS)
        ]

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return f"{name}: {'the first' if source.is_local else 'made up in place of the'} problems of {source.name}"


def _short(problem: Problem) -> str | list[dict[str, str]]:
    """Cut a problem, a text or chat messages, to at most `PROBLEM_BYTES` in all."""
    if isinstance(problem, str):
        return _first_bytes(problem, PROBLEM_BYTES)
    size = PROBLEM_BYTES // len(problem)
    return [{"role": message.role, "content": _first_bytes(message.content, size)} for message in problem]


def _first_bytes(text: str, size: int) -> str:
    """Cut a text to at most `size` bytes of UTF-8, without a part of a character at the end."""
    return text.encode(errors="ignore")[:size].decode(errors="ignore")


def _answers(sources: Mapping[Path, DataConfig]) -> list[str]:
    """Return the reference answers of all problems in the training files; `sources` has the paths of all files."""
    files = [path for path in sources if path.parent.name.startswith("train")]
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return [answer for row in rows for answer in row["answer"]]
