"""Checks of requests, of rollouts to score and of new weights, which all engines share, with one text for each error.

An engine makes these checks before it does anything, so that a refused call changes nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Size, Tensor

from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout
from jackpot.models.quantization.convert import CodedWeights
from jackpot.models.quantization.quantizer import LARGEST
from jackpot.rollout.engines.base import Capabilities, Request


def check_request(request: Request, capabilities: Capabilities) -> None:
    """Raise EngineError for a request whose prompt, number of top log-probs or seed the engine cannot take."""
    prompt, num_top = request.prompt.token_ids, request.sampling.num_top_log_probs
    max_model_len, vocab_size = capabilities.max_model_len, capabilities.vocab_size

    if not prompt:
        raise EngineError(f"the prompt of {request.uid} is empty; it needs at least one token to predict from")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise EngineError(
            f"the prompt of {request.uid} has token ids from {min(prompt)} to {max(prompt)}; the model knows 0 to "
            f"{vocab_size - 1}. Use the model's own tokenizer"
        )

    if len(prompt) >= max_model_len:
        raise EngineError(
            f"the prompt of {request.uid} has {len(prompt)} tokens and leaves no room in the context of "
            f"{max_model_len}; drop it or shorten it"
        )

    if num_top > capabilities.num_top_log_probs:
        raise EngineError(
            f"{request.uid} asks for {num_top} top log-probs; the engine returns at most "
            f"{capabilities.num_top_log_probs}, and the vocabulary has {vocab_size} tokens"
        )
    if not 0 <= request.seed < 2**64:
        raise EngineError(f"the seed of {request.uid} must be in [0, 2**64), got {request.seed}")


def check_scores(rollouts: Sequence[Rollout], temperature: float, capabilities: Capabilities) -> None:
    """Raise EngineError for rollouts longer than the context, or for a temperature that is not positive."""
    if temperature <= 0.0:
        raise EngineError(f"score needs a temperature above 0, got {temperature}")
    for rollout in rollouts:
        length = len(rollout.prompt.token_ids) + len(rollout.token_ids)
        if length > capabilities.max_model_len:
            raise EngineError(
                f"{rollout.uid} has {length} tokens with its prompt, more than the context of "
                f"{capabilities.max_model_len}; shorten it, or score with the model that generated it"
            )


def check_weights(
    weights: Sequence[tuple[str, Tensor]], shapes: Mapping[str, Size], codes: CodedWeights | None = None
) -> None:
    """Raise EngineError unless every parameter is sent exactly once and in its shape.

    Args:
        codes: parameters that may be sent quantized, as codes and scales, either all of them or none.
    """
    # The dtype of each quantized parameter's codes (`LARGEST` has all such dtypes): those sent, and those expected.
    as_codes = {name: tensor.dtype for name, tensor in weights if tensor.dtype in LARGEST}
    expected = dict.fromkeys(codes.names, codes.scheme.weights.codes) if codes else {}
    if as_codes and as_codes != expected:
        wrong = sorted(name for name in as_codes | expected if as_codes.get(name) != expected.get(name))
        raise EngineError(
            f"{len(wrong)} weights were sent as codes that this engine does not take, or not as the codes that it "
            f"takes, such as {wrong[0]}; send those of capabilities.coded_weights, or all weights as numbers"
        )

    # Codes come with their scales, which are sent as tensors of their own.
    if as_codes and codes:
        shapes = {**shapes, **codes.shapes(shapes)}

    names = Counter(name for name, _ in weights)
    problems = {
        "missing": sorted(shapes.keys() - names.keys()),
        "unknown": sorted(names.keys() - shapes.keys()),
        "sent twice": sorted(name for name, count in names.items() if count > 1),
        "of another shape": [
            f"{name} {tuple(tensor.shape)}, needed {tuple(shapes[name])}"
            for name, tensor in weights
            if name in shapes and tensor.shape != shapes[name]
        ],
    }

    if wrong := [f"{len(items)} {kind} ({'; '.join(items[:3])})" for kind, items in problems.items() if items]:
        raise EngineError(
            f"weights that do not fit the engine's model: {', '.join(wrong)}; nothing was replaced. "
            "Send the named_parameters() of a model of the same architecture"
        )
