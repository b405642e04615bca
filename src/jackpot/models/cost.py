"""The number of floating-point operations (FLOPs) of a forward pass, from a model's shapes."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from jackpot.models.forward import output_layer


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """The FLOPs of one model's forward pass."""

    per_token: int  # FLOPs of one token in all matrices that it passes, the output layer included
    per_pair: int  # FLOPs of one query with one key, over all layers and heads

    def sequence(self, tokens: int) -> int:
        """Return the FLOPs of reading a causal sequence: the same in one pass as token by token with a cache."""
        return self.per_token * tokens + self.per_pair * (tokens * (tokens + 1) // 2)


def forward_cost(model: PreTrainedModel) -> ForwardCost:
    """Count the cost of a forward pass of `model`, which may be on the meta device.

    The usual count (Kaplan et al. 2020, arXiv 2001.08361, section 2.1): for every token two operations for every weight
    of a matrix; and for every key that a query sees two operations for every channel of the query and of the value. A
    backward pass costs twice as much. Not counted: norms, activations, softmax, sampling, and the extra work of some
    implementations, such as recomputing activations.

    Only the experts that a token is routed to count. A layer with a sliding window counts as full attention.
    """
    config = model.config.get_text_config()
    return ForwardCost(
        per_token=2 * sum(_weights_met(module, config) for module in model.modules()),
        # Two operations for each channel of the query, and two for each of the value, which has as many.
        per_pair=4 * config.num_hidden_layers * config.num_attention_heads * _head_dim(config),
    )


def _weights_met(module: nn.Module, config: PreTrainedConfig) -> int:
    """Count the weights in a module's own matrices that multiply a token; experts are one tensor [E, rows, columns].

    An embedding is looked up and costs nothing; a weight that it shares with the output layer counts in that layer.
    """
    if isinstance(module, nn.Embedding):
        return 0
    matrices = [weight for weight in module.parameters(recurse=False) if weight.ndim == 2]
    experts = [weight for weight in module.parameters(recurse=False) if weight.ndim == 3]
    experts_per_token = getattr(config, "num_experts_per_tok", None) or 0  # 0 without experts
    return sum(weight.numel() for weight in matrices) + sum(weight[0].numel() * experts_per_token for weight in experts)


def head_cost(model: PreTrainedModel) -> int:
    """Return the FLOPs of one token in the output layer; `ForwardCost.per_token` includes them."""
    return 2 * output_layer(model).weight.numel()  # a product and a sum for each weight


def cached_numbers(model: PreTrainedModel) -> int:
    """Return how many numbers the KV cache holds for one token: the keys and values of all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * _head_dim(config)  # 2: keys and values


def _head_dim(config: PreTrainedConfig) -> int:
    """Return the number of channels of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
