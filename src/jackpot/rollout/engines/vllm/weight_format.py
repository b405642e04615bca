"""In which form vLLM gets weights that it is to compute with in fewer bits. Needs no vLLM.

They are codes and scales of the one quantiser, under the names of a kind of checkpoint that vLLM reads; `config` is
what the config.json of such a checkpoint says. So nothing is quantised anywhere else, at the start and at an update
alike. INT8 weights with activations as they come (`int8_w8a16`) are multiplied out and sent as plain weights: vLLM has
no kernel for them on a CPU, and this is their definition. They save no memory.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from jackpot.core.errors import EngineError
from jackpot.models.quantization.convert import quantise_named, quantised_names
from jackpot.models.quantization.quantizer import BLOCK, SCHEMES, dequantise, quantise

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "int8_w8a8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "linear": {
                "targets": ["Linear"],
                "weights": {**_INT8, "strategy": "channel", "dynamic": False},
                "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
            }
        },
    },
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "scale_fmt": "ue8m0",
    },
}
_KEPT_KEYS = {"int8_w8a8": "ignore", "fp8": "modules_to_not_convert"}
_HEAD = "lm_head"  # vLLM's name, which a tied output layer has there too


@dataclass(frozen=True, kw_only=True, slots=True)
class SentForm:
    """Of one model's weights."""

    quantization: str | None
    names: frozenset[str]  # of the weights that are quantised
    config: Mapping[str, Any] | None  # None: vLLM gets plain weights
    events: tuple[dict[str, Any], ...]  # what an engine says of it at its start

    @property
    def method(self) -> str | None:
        """What vLLM calls it."""
        return self.config and self.config["quant_method"]

    def tensors(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What vLLM is given for weights in the engine's dtype."""
        if self.quantization is None:
            yield from named_tensors
        elif self.config:
            yield from quantise_named(named_tensors, self.names, SCHEMES[self.quantization])
        else:
            grid = SCHEMES[self.quantization].weights
            for name, tensor in named_tensors:
                rounded = dequantise(quantise(tensor, grid), tensor.dtype) if name in self.names else tensor
                yield name, rounded


def sent_form(model: nn.Module, quantization: str | None) -> SentForm:
    """How to send the weights of a model, which may be one without numbers.

    Args:
        quantization: a key of `SCHEMES`.

    Raises:
        EngineError: no linear layers, or weights beside them that vLLM would take for quantised ones.
    """
    if quantization is None:
        return SentForm(quantization=None, names=frozenset(), config=None, events=())
    conversion = quantised_names(model)
    if not conversion.converted:
        raise EngineError(f"no linear layer to quantise in {type(model).__name__}; leave engine.quantization out")
    parameters, kept = dict(model.named_parameters()), conversion.kept
    config: dict[str, Any] | None = None
    if quantization in _CONFIGS:
        odd = [name for name, why in kept.items() if why == "not of a linear layer"]
        if odd:
            raise EngineError(
                f"vLLM would quantise more of {type(model).__name__} than its linear layers: {', '.join(odd[:3])}. Use "
                f"engine.quantization=int8_w8a16, or engine=transformers"
            )
        layers = [
            name.removesuffix(".weight") for name, why in kept.items() if why in ("router", "shared by several layers")
        ]
        config = {**_CONFIGS[quantization], _KEPT_KEYS[quantization]: [_HEAD, *layers]}
    share = sum(parameters[name].numel() for name in conversion.converted) / sum(
        parameter.numel() for parameter in parameters.values()
    )
    event = {"event": "quantised", "to": quantization, "share": share, "kept": dict(Counter(kept.values()))}
    return SentForm(quantization=quantization, names=frozenset(conversion.converted), config=config, events=(event,))
