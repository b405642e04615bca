"""The loading of models and tokenizers from folders, the hub or the starters that the package carries.

Weights are read from safetensors only, and code from a model folder is never run.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from math import inf
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file
from transformers.utils import logging as transformers_logging

from jackpot.core.errors import DataError, ModelError, first_line
from jackpot.core.foreign import check_foreign, parse_json, read_foreign
from jackpot.core.roles import Role
from jackpot.core.stages import stage
from jackpot.models.forward import check_head
from jackpot.models.hub import ADVICE, REMEDIES, resolve_path, stays_local
from jackpot.models.published import is_from_table, published_config

ALIGNMENT = 64  # bytes; the address of a tensor that torch makes is a multiple of them
MOST_LAYERS = 1_000  # most layers of a model; published models have up to 130
LARGEST_WEIGHT = 1e6  # in absolute value; published models stay below 1e4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # torch's dtypes by their names in settings
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of files whose weights only need a cast
_READ_SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".jinja")  # suffixes of files that transformers reads
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_LOADING_ERRORS = (  # what libraries raise at files that are missing, damaged or of strange content
    *(OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError),
    *(TypeError, AttributeError, ArithmeticError, LookupError, RecursionError, MemoryError, StrictDataclassError),
)
_SAVE_TOKENIZER = "Save the model's tokenizer there with save_pretrained"


def load_model(path: str | Path, dtype: torch.dtype, device: str | torch.device | None = "cpu") -> PreTrainedModel:
    """Load the causal language model in `path`, in eval mode.

    Args:
        path: a local folder, a hub name such as `Qwen/Qwen3-0.6B-Base`, or `starter:` and the name of a starter. Where
            the hub cannot be reached, earlier downloads are read.
        device: where the weights go. None, for `gathered.shard`: weights stay in their files, in the files' dtypes, and
            take no memory until they are read. If the files have other names or dtypes than such a model needs, the
            weights are on the CPU in `dtype`.

    Raises:
        ModelError: no such folder, no config.json, damaged, missing or unknown weights, weights that are not finite or
            huge, not a causal language model, or logits that are more than the output layer's product (`check_head`).
    """
    stage(f"loading the model {path}")
    model, info = _from_pretrained(AutoModelForCausalLM, path, dtype, device)
    _check_fit(path, model, info)
    _check_finite(path, model)
    check_head(model)
    return model


def load_value_model(
    path: str | Path, dtype: torch.dtype, device: str | torch.device | None = "cpu"
) -> PreTrainedModel:
    """Load a critic: a model of token classification with one label, whose logits are [B, S, 1].

    The folder of a language model will do: its critic gets a new head of zeros.

    Args:
        device: device of the weights, as in `load_model`.

    Raises:
        ModelError: as `load_model`, or an architecture without token classification.
    """
    stage(f"loading the critic {path}")
    verbosity = transformers_logging.get_verbosity()

    transformers_logging.set_verbosity_error()  # hides the advice to train the new head, which a critic's run does
    try:
        model, info = _from_pretrained(AutoModelForTokenClassification, path, dtype, device, num_labels=1)
    finally:
        transformers_logging.set_verbosity(verbosity)

    # Where the folder has no weights for the critic's head, it is a language model's: begin with a head of zeros.
    head = [name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")]
    if set(info["missing_keys"]) == set(head):
        info["missing_keys"] = set()
        # A language model's own head, which the critic does not have, is no error.
        info["unexpected_keys"] = {name for name in info["unexpected_keys"] if not name.startswith("lm_head.")}
        with torch.no_grad():
            for name in head:
                model.get_parameter(name).zero_()

    _check_fit(path, model, info)
    _check_finite(path, model)
    return model


@contextlib.contextmanager
def in_float32(module: nn.Module, cast: Callable[[Tensor], Tensor] = Tensor.float) -> Iterator[None]:
    """Replace a module's weights of other dtypes by float32 weights for the `with` block, and put them back after it.

    `gathered.shard` replaces weights that are still in their files in the same way, for the whole of training.

    Args:
        cast: returns the float32 tensor of a weight.
    """
    originals = [(weight, weight.data) for weight in module.parameters() if weight.dtype != torch.float32]
    for weight, data in originals:
        weight.data = cast(data)
    try:
        yield
    finally:
        for weight, data in originals:
            weight.data = data


def _from_pretrained(
    cls: type, path: str | Path, dtype: torch.dtype, device: str | torch.device | None, **options: Any
) -> tuple[PreTrainedModel, dict]:
    """Load a model in eval mode by `cls`, an auto class of transformers, and return its loading info too (`_read`).

    From then on this process attends without cuDNN, which torch would prefer: its gradients were NaN on an H100
    (pytorch/pytorch#196678) and its decoding wrong on a B200 (#193893).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    _check_named_files(path)
    if device is None and (in_files := _in_files(cls, path, dtype, **options)):  # None: leave weights in files
        return in_files

    model, info = _read(cls, path, dtype, **options)
    model.to(device or "cpu")  # pyright: ignore[reportArgumentType] (transformers wraps `to` as if it were no method)
    return _aligned(model).eval(), info  # `_aligned` makes results independent of where weights lie in memory


def _check_named_files(path: str | Path) -> None:
    """Refuse a model whose index or config names files of weights that are no safetensors or lie outside of its folder.

    transformers would load these files: a pickle, or a file elsewhere on this machine. The name as it is written
    decides, and not where links lead, since files from the hub are links inside its cache. Refused too: a pipe or a
    device among the files, and a config with too many layers.
    """
    source = resolve_path(path)

    def content(name: str) -> dict[str, Any]:
        """Return the content of a JSON file of the model; {} where there is no such file."""
        local = stays_local(source)
        file = cached_file(source, name, local_files_only=local, _raise_exceptions_for_missing_entries=False)
        return parse_json(read_foreign(Path(file)), dict) if file else {}

    try:
        _check_regular_files(source)
        shards = content(SAFE_WEIGHTS_INDEX_NAME).get("weight_map", {}).values()
        named_files = [(SAFE_WEIGHTS_INDEX_NAME, shard) for shard in shards]

        config = content("config.json")
        if (explicit := config.get("transformers_weights")) is not None:
            named_files.append(("config.json", explicit))
        _check_layer_counts(config)
    except _LOADING_ERRORS as error:
        raise ModelError(f"cannot load a model from {_place(path, source, error)}. {ADVICE}") from error

    # Each pair is the index or config (`file`) and the name of a file of weights that it has (`name`).
    for file, name in named_files:
        if not _is_inside(name):
            raise ModelError(
                f"{file} of {path} names {name!r} as a file of weights; weights are read only from .safetensors files "
                f"inside of the model's folder. {ADVICE}"
            )


def _check_regular_files(source: str) -> None:
    """Refuse a local folder with a pipe or a device among its files, which a library would read without end."""
    for path in Path(source).iterdir() if Path(source).is_dir() else ():
        if path.suffix in _READ_SUFFIXES and path.exists():
            check_foreign(path)  # raises for anything but a regular file


def _check_layer_counts(config: Mapping[str, Any]) -> None:
    """Refuse a config with absurdly many layers; transformers would build them all before it reads any weight."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_layer_counts(value)
        elif name.endswith(("layers", "layer")) and isinstance(value, int) and value > MOST_LAYERS:
            raise ValueError(f"{name} is {value:,}, and at most {MOST_LAYERS:,} are read")


def _is_inside(name: Any) -> bool:
    """Tell whether a name in an index or config is that of a safetensors file in the model's folder, at any depth."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not PurePath(name).is_absolute()
        and ".." not in PurePath(name).parts
    )


def _in_files(cls: type, path: str | Path, dtype: torch.dtype, **options: Any) -> tuple[PreTrainedModel, dict] | None:
    """Load a model as `_read` does, with weights left in their files; None if that fails.

    It fails if names or dtypes of the weights forbid it, or where a library cannot load the model so.

    transformers gets a single number, expanded to the shape of each weight, in place of the weights, and makes the rest
    of the model as from a folder. Then each weight becomes a view of its file.
    """
    source = resolve_path(path)
    try:
        weights = _views(source)
        config = AutoConfig.from_pretrained(
            source, trust_remote_code=False, local_files_only=stays_local(source), **options
        )
        with torch.device("meta"):
            model_class = type(cls.from_config(config))  # the class that the auto class `cls` chooses

        zero = torch.zeros((), dtype=dtype)
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict={name: zero.expand(weight.shape) for name, weight in weights.items()},
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except _LOADING_ERRORS:
        return None  # `_read` raises the error, or loads the model in its own way

    # Weights can stay in the files only if these have every parameter by the model's name, in a dtype that needs only a
    # cast. The files must have no buffer, as the model's buffer would now hold `zero`.
    parameters = {name: weight for name, weight in model.named_parameters() if name not in info["missing_keys"]}
    is_plain = parameters.keys() <= weights.keys() and all(weights[name].dtype in _PLAIN for name in parameters)
    if not is_plain or any(name in weights for name, _ in model.named_buffers()):
        return None

    for name, weight in parameters.items():
        if weight.shape == weights[name].shape:  # else `_check_fit` refuses the weight
            weight.data = weights[name]

    model.name_or_path = model.config.name_or_path = source
    if model.can_generate():
        _add_generation_config(model, source)
    return model.eval(), info


def _views(source: str) -> dict[str, Tensor]:
    """Return the weights in the files of a model by name, as views of the files; download files on the hub first."""
    folder = Path(source)
    if not folder.is_dir():
        patterns = ["model*.safetensors", "model.safetensors.index.json"]
        folder = Path(snapshot_download(source, allow_patterns=patterns, local_files_only=stays_local(source)))

    names = {"model.safetensors"}
    if not (folder / "model.safetensors").is_file():
        index = parse_json(read_foreign(folder / SAFE_WEIGHTS_INDEX_NAME), dict)
        names = set(index["weight_map"].values())

    weights: dict[str, Tensor] = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            weights |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return weights


def _read(cls: type, path: str | Path, dtype: torch.dtype, **options: Any) -> tuple[PreTrainedModel, dict]:
    """Read a model on the CPU by `cls`, an auto class of transformers; raise ModelError where it cannot be read.
    Also return transformers' loading info: the names of missing, unexpected and misshapen weights."""
    source = resolve_path(path)
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ModelError(f"the folder {path} has no config.json, so it is not a model. {ADVICE}")
    transformers_logging.disable_progress_bar()  # a bar for each loaded model would hide the run's own

    try:
        return cls.from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_check_fit` refuses such weights and names them
            **options,
        )
    except _LOADING_ERRORS as error:
        raise ModelError(f"cannot load a causal language model from {_place(path, source, error)}. {ADVICE}") from error


def _aligned(model: PreTrainedModel) -> PreTrainedModel:
    """Copy weights that lie in the memory of their file, at any address, to a multiple of ALIGNMENT; return the model.

    The product of a matrix and a vector adds up in an order that depends on the address. So without this a run that
    continues from a checkpoint would not be bit-equal to one that was never stopped.
    """
    for weight in model.parameters():
        if weight.data_ptr() % ALIGNMENT:
            weight.data = weight.data.clone()
    return model


def _check_fit(path: str | Path, model: PreTrainedModel, info: dict) -> None:
    """Raise ModelError unless the weights in the folder are exactly those of the model; `info` is as from `_read`."""
    kinds = {"missing_keys": "missing", "unexpected_keys": "unknown", "mismatched_keys": "misshapen"}
    for key, kind in kinds.items():
        if names := sorted(map(str, info[key])):
            raise ModelError(
                f"the weights in {path} do not fit {type(model).__name__}: {len(names)} {kind}, such as "
                f"{', '.join(names[:3])}. The folder's config.json and weights must belong together. {ADVICE}"
            )


def _check_finite(path: str | Path, model: PreTrainedModel) -> None:
    """Raise ModelError for weights that are NaN, infinite or beyond LARGEST_WEIGHT; reads every weight once."""
    weights = {name: weight.detach() for name, weight in model.named_parameters() if weight.numel()}
    largest = torch.stack([torch.stack(weight.aminmax()).double().abs().amax() for weight in weights.values()]).tolist()
    # `not <=` and not `>`, so that NaN is bad too.
    if bad := [(name, value) for name, value in zip(weights, largest, strict=True) if not value <= LARGEST_WEIGHT]:
        name, value = bad[0]
        raise ModelError(
            f"the weights in {path} are damaged: {name} has the value {value:g}, and {len(bad)} of {len(weights)} "
            f"tensors have NaN, infinity or more than {LARGEST_WEIGHT:g}. Fetch or save the model again, or take an "
            f"earlier checkpoint"
        )


def load_config(path: str | Path) -> PreTrainedConfig:
    """Load the config of the model in `path`.

    Where the hub cannot be reached, the config of a published model comes from a table (`published.py`), which suffices
    for a plan but not for a run.

    Raises:
        ModelError: there is no config that can be read.
    """
    source = resolve_path(path)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=stays_local(source))
    except _LOADING_ERRORS as error:
        if stays_local(source) and (config := published_config(source)):
            return config
        raise ModelError(f"cannot load a model's config from {_place(path, source, error)}. {ADVICE}") from error


def load_meta_model(path: str | Path) -> PreTrainedModel:
    """Build the model in `path` on the meta device: its modules, names, shapes and settings without weights.

    Raises:
        ModelError: no config that can be read, or not one of a causal language model.
    """
    config, source = load_config(path), resolve_path(path)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except _LOADING_ERRORS as error:
        raise ModelError(f"cannot make a causal language model of {_place(path, source, error)}. {ADVICE}") from error
    if not is_from_table(config):
        _add_generation_config(model, source)
    return model


def _add_generation_config(model: PreTrainedModel, source: str) -> None:
    """Set `model.generation_config` from generation_config.json, if there is one, as transformers does on loading."""
    try:
        model.generation_config = GenerationConfig.from_pretrained(source, local_files_only=stays_local(source))
    except OSError:
        pass  # a folder may have none; then the model keeps the defaults of its config
    except _LOADING_ERRORS as error:
        raise ModelError(f"cannot read generation_config.json in {_place(source, source, error)}. {ADVICE}") from error


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `path`.

    Raises:
        ModelError: no such folder.
        DataError: the folder has no tokenizer, or a damaged one.
    """
    source = resolve_path(path)
    if Path(source).is_dir() and not any((Path(source) / name).is_file() for name in _TOKENIZER_FILES):
        raise DataError(f"the folder {path} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}. {_SAVE_TOKENIZER}")
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=stays_local(source))
    except _LOADING_ERRORS as error:
        raise DataError(f"cannot load a tokenizer from {_place(path, source, error)}. {_SAVE_TOKENIZER}") from error


def check_same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> None:
    """Check that two tokenizers give every token the same id, as log-probs are compared id by id.

    Raises:
        DataError: they differ; the message names the token of the lowest id that differs, and both vocabulary sizes.
    """
    first, second = a.get_vocab(), b.get_vocab()
    if first == second:
        return

    differing = [token for token in first | second if first.get(token) != second.get(token)]
    ids = {token: (first.get(token, inf), second.get(token, inf)) for token in differing}  # inf: no such token
    # The token with the lowest id in either tokenizer; of two with that id, the one that has it in the first.
    token = min(differing, key=lambda token: (min(ids[token]), ids[token]))
    raise DataError(
        f"the tokenizers differ at token {token!r}: id {first.get(token, 'none')} in {a.name_or_path or 'the first'}, "
        f"id {second.get(token, 'none')} in {b.name_or_path or 'the second'} (vocabulary sizes {len(first)} and "
        f"{len(second)}). Policy and rollout model need the same vocabulary; take two models of one family"
    )


def head_rows(paths: Mapping[Role, str] | Mapping[str, str], tokenizer: PreTrainedTokenizerBase | None = None) -> int:
    """Return how many token ids all models of a run give logits to: as many as the shortest output layer has rows.

    Models of one family may be padded differently: Qwen2.5 has 151,936 rows up to 3B and 152,064 from 7B on, for
    151,665 tokens. Log-probs are compared token id by token id, so every distribution of a run, in training and in
    engines, is over the ids for which all its models have a row (`cut_head`). Larger ids are never sampled, and refused
    in inputs. The weights stay whole: longer output layers are saved and sent with all their rows.

    Args:
        paths: paths of the models, by the names that errors give them.
        tokenizer: tokenizer of all models; None: its size is not checked.

    Raises:
        ModelError: the tokenizer has more tokens than the shortest output layer has rows.
    """
    sizes = {name: load_config(path).get_text_config().vocab_size for name, path in paths.items()}
    shortest, rows = min(sizes.items(), key=itemgetter(1))
    if tokenizer is not None and len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, and the output layer of the {shortest.replace('_', ' ')} only "
            f"{rows} rows; take a model with a row for every token (vocab_size in its config.json)"
        )
    return rows


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the end-of-sequence tokens that a model's generation_config.json or else config.json names; () for none.

    Raises:
        ModelError: they are no token ids of the model.
    """
    setting = model.generation_config.eos_token_id if model.generation_config is not None else None
    setting = model.config.get_text_config().eos_token_id if setting is None else setting
    if setting is None:
        return ()

    ids = tuple(setting) if isinstance(setting, list | tuple) else (setting,)
    vocabulary = model.config.get_text_config().vocab_size
    if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
        raise ModelError(
            f"eos_token_id of {model.name_or_path or 'the model'} is {setting!r:.80}; it is a token id from 0 to "
            f"{vocabulary - 1}, or a list of them: correct generation_config.json, or config.json where there is none"
        )
    return ids


def _place(path: str | Path, source: str, error: Exception) -> str:
    """Return a text for errors: where a library looked for a model, and class and first line of the library's error."""
    where = f"{path}" if Path(source).is_dir() else f"the hub (there is no folder {path} here)"
    return f"{where}: {type(error).__name__}: {first_line(error).rstrip('.')}{REMEDIES.get(source, '')}"


def load_tokenizers(paths: Mapping[Role, str] | Mapping[str, str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer that all models share: that of the first, after a comparison with all others.

    Raises:
        ModelError: as `load_tokenizer`.
        DataError: as `load_tokenizer`, or the tokenizers differ; the message names a token.
    """
    first, *others = map(load_tokenizer, paths.values())
    for tokenizer in others:
        check_same_tokenizer(first, tokenizer)
    return first
