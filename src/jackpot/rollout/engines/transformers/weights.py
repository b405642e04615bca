"""The weights of a model that an engine holds, some of them quantised."""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.core.digest import WeightsDigest
from jackpot.core.errors import EngineError
from jackpot.models.quantization.convert import Conversion, quantise_linears
from jackpot.models.quantization.linear import QuantisedLinear
from jackpot.models.quantization.quantizer import SCHEMES
from jackpot.rollout.engines.checks import check_weights


class HeldWeights:
    """Takes new weights under the names that the model had before it was quantised, a tied weight once."""

    def __init__(self, model: PreTrainedModel, quantization: str | None) -> None:
        """
        Args:
            model: with all its weights in one dtype. With a quantisation its linear layers are replaced.
            quantization: a key of `SCHEMES`.

        Raises:
            EngineError: weights of several dtypes, an unknown quantisation, or one for a model without linear layers.
        """
        if len(dtypes := {parameter.dtype for parameter in model.parameters()}) != 1:
            raise EngineError(f"the engine needs weights of one dtype, got {sorted(map(str, dtypes))}; cast the model")
        self.dtype = dtypes.pop()
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.conversion = _converted(model, quantization)
        self._parameters = dict(model.named_parameters())
        self._layers: dict[str, QuantisedLinear] = {
            name: model.get_submodule(name.removesuffix(".weight")) for name in self.conversion.converted
        }

    @property
    def quantised_share(self) -> float:
        """Of all numbers, how many are held as codes."""
        return sum(self._shapes[name].numel() for name in self._layers) / sum(
            map(torch.Size.numel, self._shapes.values())
        )

    @torch.no_grad()
    def replace(self, named_tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Take all weights; the digest, in `dtype`, of what is held now or what its codes were made from.

        All tensors are held until all are checked: nothing is replaced before. A weight is cast to `dtype` first.

        Raises:
            EngineError: a name is missing, unknown or there twice, or a shape differs.
        """
        sent = list(named_tensors)
        check_weights(sent, self._shapes)
        digest = WeightsDigest(self.dtype)
        for name, tensor in sent:
            if layer := self._layers.get(name):
                source = tensor.to(layer.codes.device, self.dtype)
                layer.take(source)
                digest.add(name, source)
            else:
                self._parameters[name].copy_(tensor)
                digest.add(name, self._parameters[name])
        return digest.hexdigest()


def _converted(model: PreTrainedModel, quantization: str | None) -> Conversion:
    if quantization is None:
        return Conversion(converted=(), kept={})
    if quantization not in SCHEMES:
        raise EngineError(f"there is no quantisation {quantization!r}; take one of {', '.join(SCHEMES)}")
    try:
        return quantise_linears(model, SCHEMES[quantization])
    except ValueError as error:
        raise EngineError(f"{error}; leave engine.quantization out") from error
