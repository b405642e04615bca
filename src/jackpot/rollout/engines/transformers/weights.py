"""The weights of an engine's model: loading, releasing and, where the settings say so, quantizing them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.digest import WeightsDigest
from jackpot.core.errors import EngineError
from jackpot.models.forward import widen_head
from jackpot.models.quantization.convert import CodedWeights, quantize_linears, scales_suffix
from jackpot.models.quantization.linear import QuantizedLinear
from jackpot.models.quantization.quantizer import SCHEMES
from jackpot.rollout.engines.base import quantized_event
from jackpot.rollout.engines.checks import check_weights


class ModelWeights:
    """A model's weights, which can be replaced under the original parameter names, also where layers are quantized.

    A tied weight is sent and loaded under one of its names only.
    """

    def __init__(self, model: PreTrainedModel, settings: TransformersEngineConfig) -> None:
        """Quantize the model's linear layers and widen its output layer, where the settings say so.

        Args:
            model: model with all weights in one dtype, whose layers are replaced in place.

        Raises:
            EngineError: weights of several dtypes, or a quantization for a model without linear layers.
            ModelError: as `widen_head`.
        """
        quantization = settings.quantization
        if settings.head_dtype == "fp32":
            widen_head(model)  # the output layer computes in float32; its weight keeps its dtype

        if len(dtypes := {parameter.dtype for parameter in model.parameters()}) != 1:
            raise EngineError(f"the engine needs weights of one dtype, got {sorted(map(str, dtypes))}; cast the model")
        self.model, self.dtype = model, dtypes.pop()

        self.events: list[dict[str, Any]] = []  # the event that reports the quantization; empty without one
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._quantized: dict[str, QuantizedLinear] = {}  # quantized layer by the name of its weight
        self._buffers: dict[str, Tensor] = {}  # codes and scales by the names under which they are sent
        self.coded_weights: CodedWeights | None = None  # weights that may also come as codes and scales

        if quantization is not None:
            try:
                conversion = quantize_linears(model, SCHEMES[quantization])
            except ValueError as error:
                raise EngineError(f"{error}; leave engine.quantization out") from error
            sizes = {name: shape.numel() for name, shape in self._shapes.items()}
            self.events.append(quantized_event(quantization, conversion, sizes))

            for name in conversion.converted:
                layer = model.get_submodule(name.removesuffix(".weight"))
                assert isinstance(layer, QuantizedLinear)  # `quantize_linears` has put it there
                self._quantized[name] = layer
            self.coded_weights = CodedWeights(conversion.converted, quantization)

            # Codes are sent under the name of their weight, and scales under that name with a suffix.
            suffix = scales_suffix(self.coded_weights.scheme)
            self._buffers = {name: layer.codes for name, layer in self._quantized.items()}
            self._buffers |= {name + suffix: layer.scales for name, layer in self._quantized.items()}
        self._parameters = dict(model.named_parameters())
        self._released: dict[str, torch.Size] = {}  # shapes of the tensors that `release` has emptied

    def release(self) -> None:
        """Free the memory of all weights until the next `load`; parameters and buffers stay, as empty tensors."""
        tensors = self._parameters | self._buffers
        self._released = {name: tensor.shape for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.data = tensor.new_empty(0)

    @torch.no_grad()
    def load(self, weights: Sequence[tuple[str, Tensor]]) -> str:
        """Replace all weights, and return the digest of the weights as loaded; released tensors get memory again.

        Nothing is written before all tensors are checked, so an error leaves the model as it was. Weights are cast to
        `dtype`, and the digest is that of the cast weights, before quantization. If codes and scales are sent instead,
        they are loaded unchanged, and the digest is that of codes and scales.

        Raises:
            EngineError: a name is missing, unknown or sent twice, or a shape differs.
        """
        check_weights(weights, self._shapes, self.coded_weights)
        as_codes = self.coded_weights is not None and self.coded_weights.are_in(weights)

        # Give the tensors that `release` has emptied their memory again.
        tensors = self._parameters | self._buffers
        for name, shape in self._released.items():
            tensors[name].data = tensors[name].new_empty(shape)
        self._released = {}

        # A sent tensor is copied into the target of the same name; where there is none, its layer quantizes it.
        targets = tensors if as_codes else self._parameters
        digest = WeightsDigest(None if as_codes else self.dtype)

        for name, tensor in weights:
            if name in targets:
                targets[name].copy_(tensor)
                digest.add(name, targets[name])
            else:
                layer = self._quantized[name]
                source = tensor.to(layer.codes.device, self.dtype)
                layer.take(source)
                digest.add(name, source)
        return digest.hexdigest()
