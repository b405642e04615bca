"""The format in which vLLM gets weights where it computes with quantized weights. Needs no vLLM.

Weights are sent as codes and scales of this project's quantizer, under the names of a checkpoint format that vLLM
loads, so vLLM never quantizes weights itself, neither at the start nor at an update. INT8 weights with unquantized
activations (`int8_w8a16`) are rounded and sent as plain weights, since vLLM has no kernel for their codes on a CPU;
they save no memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from jackpot.core.errors import EngineError
from jackpot.models.quantization.convert import CodedWeights, quantize_named, quantized_names
from jackpot.models.quantization.quantizer import BLOCK, SCHEMES, dequantize, quantize
from jackpot.rollout.engines.base import quantized_event
from jackpot.rollout.engines.servers.weight_sync import Format

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
# By quantization, the entry `quantization_config` that a checkpoint's config.json has for such weights in vLLM.
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
_UNQUANTIZED_KEYS = {"int8_w8a8": "ignore", "fp8": "modules_to_not_convert"}  # config key of the unquantized layers
_HEAD = "lm_head"  # vLLM's name of the output layer, tied or not


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat(Format):
    """The format in which vLLM gets the weights of one model."""

    quantization: str | None = None  # key of `SCHEMES`; None: plain weights
    quantization_config: Mapping[str, Any] | None = None  # entry of the checkpoint's config.json; None: plain weights

    @classmethod
    def of_model(cls, model: nn.Module, quantization: str | None) -> "WeightFormat":
        """Return the format for the weights of a model, which may be on the meta device.

        Args:
            quantization: key of `SCHEMES`; None: plain weights.

        Raises:
            EngineError: the model has no linear layers, or has other weights that vLLM would take for quantized ones.
        """
        if quantization is None:
            return cls()

        conversion = quantized_names(model)
        if not conversion.converted:
            raise EngineError(f"no linear layer to quantize in {type(model).__name__}; leave engine.quantization out")

        unquantized = conversion.kept  # the reason why each weight stays as it is, by the weight's name
        config = None
        # With these (int8_w8a8, fp8) vLLM computes with codes, and its config must say in which layers; int8_w8a16,
        # which has no entry in `_CONFIGS`, is sent as plain weights.
        if quantization in _CONFIGS:
            not_linear = [name for name, reason in unquantized.items() if reason == "not of a linear layer"]
            if not_linear:
                raise EngineError(
                    f"vLLM would quantize more of {type(model).__name__} than its linear layers: "
                    f"{', '.join(not_linear[:3])}. Use engine.quantization=int8_w8a16, or engine=transformers"
                )
            # vLLM must be told which linear layers stay unquantized: the output layer, and the layers that
            # `quantized_names` has left unquantized for one of the three reasons below.
            layers = [
                name.removesuffix(".weight")
                for name, reason in unquantized.items()
                if reason in ("router", "shared by several layers", "read by its parent")
            ]
            config = {**_CONFIGS[quantization], _UNQUANTIZED_KEYS[quantization]: [_HEAD, *layers]}

        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        return cls(
            quantization=quantization,
            quantized_names=frozenset(conversion.converted),
            quantization_config=config,
            events=(quantized_event(quantization, conversion, sizes),),
        )

    @property
    def coded_weights(self) -> CodedWeights | None:
        """Return the weights that vLLM takes as codes and scales, or None where vLLM takes plain weights."""
        if self.quantization is None or self.quantization_config is None:
            return None
        return CodedWeights(tuple(sorted(self.quantized_names)), self.quantization)

    @property
    def quant_method(self) -> str | None:
        """Return vLLM's name of the quantization; None for plain weights."""
        return None if self.quantization_config is None else self.quantization_config["quant_method"]

    def convert(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that vLLM gets for weights in the engine's dtype: plain, rounded, or codes and scales."""
        if self.quantization is None:
            yield from named_tensors
        elif self.quantization_config:  # vLLM's quantized layers hold codes and scales: send these
            yield from quantize_named(named_tensors, self.quantized_names, SCHEMES[self.quantization])
        else:  # vLLM computes with plain weights (int8_w8a16): send these, rounded to numbers that codes can express
            grid = SCHEMES[self.quantization].weights
            for name, tensor in named_tensors:
                is_quantized = name in self.quantized_names
                yield name, dequantize(quantize(tensor, grid), tensor.dtype) if is_quantized else tensor
