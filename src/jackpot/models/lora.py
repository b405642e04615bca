"""LoRA: a small adapter that is trained on linear layers whose own weights are frozen (arXiv 2106.09685).

Engines and checkpoint folders get the merged weights, under the names that the model has without an adapter.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import ModuleType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from jackpot.config.config import ALL_LINEAR, LoraConfig
from jackpot.core.digest import weights_digest
from jackpot.core.errors import CheckpointError, ConfigError, ModelError, unknown_name
from jackpot.core.package import install
from jackpot.core.shards import is_sharded
from jackpot.models.gathered import gather
from jackpot.models.load import in_float32
from jackpot.models.parts import Dealer, Part, write_part
from jackpot.models.quantization.training import CodedLinear

_FILE = "adapter_model.safetensors"  # peft's name of the adapter's weights, next to adapter_config.json
_BASE = "base_sha256"  # key in that file's metadata: the digest of the weights that the adapter was trained on
_END = ".default.weight"  # suffix of an adapter's parameters; "default" is peft's name of a model's only adapter


def target_layers(model: PreTrainedModel, target_modules: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linear layers that get an adapter, by their names; never the head, whose weight is read directly.

    Raises:
        ModelError: a target module that the model does not have.
    """
    class_name, head = type(model).__name__, model.get_output_embeddings()
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    layers = {name: layer for name, layer in linear.items() if layer is not head}
    if not layers:
        raise ModelError(f"{class_name} has no linear layer below its head; set lora: null to train all of its weights")

    valid = {ALL_LINEAR, *map(_leaf, layers)}
    for name in target_modules:
        if name not in valid:
            raise ModelError(unknown_name(f"target module of {class_name}", name, valid))
    # Layers that `target_modules` names by the last part of their name; all layers if it has ALL_LINEAR.
    return {name: layer for name, layer in layers.items() if {ALL_LINEAR, _leaf(name)} & set(target_modules)}


def adapter_size(model: PreTrainedModel, config: LoraConfig) -> int:
    """Count the parameters of the adapter that `add_adapter` would add, without peft; errors as of `target_layers`."""
    layers = target_layers(model, config.target_modules).values()
    return sum(config.rank * (layer.in_features + layer.out_features) for layer in layers)


def add_adapter(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Freeze the model and add an adapter to it, in place.

    A layer with an adapter computes W x + alpha / rank * B A x. With `precision: fp8` it computes with the codes of the
    merged weight, W + alpha / rank * B A. A is drawn from `seed`, without a change of torch's random state, and B is 0,
    so that the merged weights are still those of the model.

    Raises:
        ConfigError: peft is not installed.
        ModelError: a target module that the model does not have.
    """
    peft = _peft()
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=sorted({_leaf(name) for name in target_layers(model, config.target_modules)}),
    )

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # peft draws on the CPU, wherever the model is
        with in_float32(model, lambda data: torch.zeros((), device=data.device).expand(data.shape)):
            # peft gives an adapter its layer's dtype, so it is shown float32 weights, which take no memory.
            peft.inject_adapter_in_model(settings, model)

    # A layer that computes with codes needs those of its merged weight: the codes of W and of B A do not add up.
    for layer in model.modules():
        if _has_adapter(layer) and isinstance(base := layer.get_submodule("base_layer"), CodedLinear):
            layer.forward = partial(_forward_merged, layer, base)


@torch.no_grad()
def merged_weights(
    model: PreTrainedModel, dtype: torch.dtype | None = None, rank_of: Callable[[str, int], int] = lambda name, size: 0
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that the model computes with, by their names without an adapter; a tied weight comes once.

    Each merged weight is computed when it is yielded; the model is not changed. Without an adapter these are the
    `named_parameters()`. If the model is sharded, all ranks have to go through the weights together, and each weight
    comes on one rank (`gathered.gather`). In float32 the merged model equals the model up to rounding; a cast to
    bfloat16 loses changes of a weight below its rounding, as for any bfloat16 copy of a trained model.

    Args:
        dtype: dtype of merged weights, and of sharded weights, which are cast before they are gathered; None: each
            weight keeps its dtype.
        rank_of: as in `gather`; the same rank for all tensors of one name.
    """
    # The layers with an adapter, by the names of their weights.
    adapted = {f"{name}.base_layer.weight": layer for name, layer in model.named_modules() if _has_adapter(layer)}

    def stored() -> Iterator[tuple[str, Tensor]]:
        """Yield each weight by name; after a weight with an adapter, A and B too, all three under that one name."""
        for name, parameter in _base_parameters(model):
            if layer := adapted.get(name):
                matrix_a, matrix_b = _adapter_matrices(layer)
                yield from ((name, parameter), (name, matrix_a.detach()), (name, matrix_b.detach()))
            else:
                yield name, parameter.to(dtype) if dtype and is_sharded(parameter) else parameter

    # A weight and its A and B come one after the other, under one name.
    for name, group in groupby(gather(stored(), rank_of), key=itemgetter(0)):
        weight, *factors = (tensor for _, tensor in group)
        if factors:
            weight = (weight + _delta(adapted[name], *factors)).to(dtype or weight.dtype)
        yield _plain_name(name), weight


def model_writer(model: PreTrainedModel, folder: Path, part: Part) -> Callable[[], list[Path]]:
    """Gather one part of a model, and return a function that writes the part and returns the files of its weights.

    The part has merged weights, in the format of `save_pretrained`. All ranks have to gather together; each writes by
    itself. The first rank also writes the config and, in peft's format to `folder/adapter`, the adapter: both are
    small. `write_index` completes a folder of several parts.
    """
    adapter = _adapter_parameters(model)
    if not adapter and not any(map(is_sharded, model.parameters())):
        return partial(_write_whole, model, folder, state=None)  # nothing to merge or to gather

    base_digest = weights_digest(gather(_plain_base(model)), torch.float32) if adapter else ""
    # On the CPU: the adapter's tensors, and the merged weights that are dealt out to this part.
    adapter = {name: tensor.cpu() for name, tensor in gather(adapter.items())}
    merged = {name: tensor.cpu() for name, tensor in merged_weights(model, rank_of=Dealer(part.size))}
    # The first name of each parameter; in the state of the model, a tied weight has further names.
    first_names = {id(parameter): _plain_name(name) for name, parameter in model.named_parameters()}

    # What this part writes: merged weights and, in the first part, all buffers. The adapter's own tensors, whose names
    # end in _END, are left out.
    state = {
        _plain_name(name): merged.get(first_names[id(tensor)]) if id(tensor) in first_names else tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not name.endswith(_END) and (id(tensor) in first_names or part.number == 0)
    }
    state = {name: tensor for name, tensor in state.items() if tensor is not None}  # None: another part writes it

    def write() -> list[Path]:
        """Write the gathered part of the model, and return the files of its weights."""
        is_whole = part.size == 1
        files = _write_whole(model, folder, state) if is_whole else _write_one(model, folder, state, part)
        if adapter and part.number == 0:
            model.peft_config["default"].save_pretrained(folder / "adapter")
            save_file(adapter, folder / "adapter" / _FILE, metadata={"format": "pt", _BASE: base_digest})
        return files

    return write


@torch.no_grad()
def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Load into the model's adapter the weights that `model_writer` wrote to `folder/adapter`.

    Raises:
        CheckpointError: the file is missing or damaged, or the adapter was trained on other weights than the model's.
    """
    path, adapter = folder / "adapter" / _FILE, _adapter_parameters(model)

    try:
        with safe_open(path, framework="pt") as file:
            metadata, names = file.metadata() or {}, file.keys()
            saved = {name: file.get_tensor(name) for name in names}
        if _shapes(saved) != _shapes(adapter):
            raise ValueError(f"its {len(saved)} tensors are not the {len(adapter)} of this adapter")
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read the adapter {path}: {type(error).__name__}: {error}. Remove the folder {folder.parent} to "
            f"continue from the checkpoint before it"
        ) from error

    if metadata.get(_BASE) != weights_digest(_plain_base(model), torch.float32):
        raise CheckpointError(
            f"the adapter {path} was trained on other weights than those now in {model.name_or_path}; put back the "
            f"model that the run began with, or begin a new run from {folder}, which holds the merged weights"
        )

    for name, parameter in adapter.items():
        parameter.copy_(saved[name])


def _peft() -> ModuleType:
    """Import peft, and return the module; raise ConfigError where it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"a lora block needs the package peft, which is not installed; {install('lora')}, or set lora: null"
        ) from error
    return peft


def _has_adapter(layer: nn.Module) -> bool:
    """Tell whether a layer has an adapter."""
    return hasattr(layer, "get_delta_weight")  # a method of peft's layers


def _adapter_matrices(layer: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the matrices A and B of a layer's adapter."""
    return layer.get_parameter("lora_A.default.weight"), layer.get_parameter("lora_B.default.weight")


def _delta(layer: nn.Module, matrix_a: Tensor, matrix_b: Tensor) -> Tensor:
    """Compute alpha / rank * B A from whole matrices; a product of shards would round differently."""
    return matrix_b @ matrix_a * vars(layer)["scaling"]["default"]  # the scaling is alpha / rank


def _forward_merged(layer: nn.Module, base: CodedLinear, inputs: Tensor) -> Tensor:
    """Compute with the codes of the merged weight, as an engine does, and not with a frozen weight plus an adapter."""
    with torch.autocast(inputs.device.type, enabled=False):
        weight = base.weight + _delta(layer, *_adapter_matrices(layer))
    return base.multiply(inputs, weight)


def _write_whole(model: PreTrainedModel, folder: Path, state: dict[str, Tensor] | None) -> list[Path]:
    """Write config and weights of a model, from `state` or, if it is None, the model; return the files of weights."""
    model.save_pretrained(folder, state_dict=state)
    return list(folder.glob("*.safetensors"))


def _write_one(model: PreTrainedModel, folder: Path, state: dict[str, Tensor], part: Part) -> list[Path]:
    """Write one of several parts of a model's weights, by the names that files of such a model have; with the first
    part, the config too. Return the part's file, or [] for a part without weights."""
    if part.number == 0:
        config_folder = folder / "config"  # `save_pretrained` would remove the parts that stand in its folder
        model.save_pretrained(config_folder, state_dict={})
        for path in config_folder.iterdir():
            path.rename(folder / path.name)
        config_folder.rmdir()
    # As `save_pretrained` does: write a tied weight once, and take the names of files, not of transformers' modules.
    renamed_state = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
    return write_part(part.path(folder, "model"), renamed_state)


def _leaf(name: str) -> str:
    """Return the last part of a module's dotted name."""
    return name.rpartition(".")[2]


def _plain_name(name: str) -> str:
    """Return the name that a parameter has without an adapter; where there is one, peft puts `base_layer` into it."""
    return name.replace(".base_layer.", ".")


def _base_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters but the adapter's, detached, by the names that they have with an adapter."""
    return ((name, tensor.detach()) for name, tensor in model.named_parameters() if not name.endswith(_END))


def _plain_base(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters but the adapter's, detached, by the names that they have without an adapter."""
    return ((_plain_name(name), tensor) for name, tensor in _base_parameters(model))


def _adapter_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the adapter's own parameters by their names in peft's files."""
    return {
        f"base_model.model.{name.removesuffix(_END)}.weight": parameter.detach()
        for name, parameter in model.named_parameters()
        if name.endswith(_END)
    }


def _shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shape of each tensor, by its name."""
    return {name: tensor.shape for name, tensor in tensors.items()}
