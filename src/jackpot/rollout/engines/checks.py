"""What every engine asks of a request and of new weights, with one wording."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Size, Tensor

from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout
from jackpot.rollout.engines.base import Capabilities, Request


def check_request(request: Request, capabilities: Capabilities) -> None:
    """Raises EngineError for a request that cannot be answered as asked."""
    prompt, wanted = request.prompt.token_ids, request.sampling.num_top_log_probs
    context, vocab_size = capabilities.context_length, capabilities.vocab_size
    if not prompt:
        raise EngineError(f"the prompt of {request.uid} is empty; it needs at least one token to predict from")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise EngineError(
            f"the prompt of {request.uid} has token ids from {min(prompt)} to {max(prompt)}; the model knows 0 to "
            f"{vocab_size - 1}. Use the model's own tokenizer"
        )
    if len(prompt) >= context:
        raise EngineError(
            f"the prompt of {request.uid} has {len(prompt)} tokens and leaves no room in the context of {context}; "
            f"drop it or shorten it"
        )
    if wanted > capabilities.num_top_log_probs:
        raise EngineError(
            f"{request.uid} asks for {wanted} top log-probs; the engine returns at most "
            f"{capabilities.num_top_log_probs}, and the vocabulary has {vocab_size} tokens"
        )
    if not 0 <= request.seed < 2**64:
        raise EngineError(f"the seed of {request.uid} must be in [0, 2**64), got {request.seed}")


def check_scores(rollouts: Sequence[Rollout], temperature: float, capabilities: Capabilities) -> None:
    """Raises EngineError for rollouts that do not fit the context, or for a temperature without a distribution."""
    if temperature <= 0.0:
        raise EngineError(f"score needs a temperature above 0, got {temperature}")
    for rollout in rollouts:
        length = len(rollout.prompt.token_ids) + len(rollout.token_ids)
        if length > capabilities.context_length:
            raise EngineError(
                f"{rollout.uid} has {length} tokens with its prompt, more than the context of "
                f"{capabilities.context_length}; shorten it, or score with the model that wrote it"
            )


def check_weights(sent: Sequence[tuple[str, Tensor]], shapes: Mapping[str, Size]) -> None:
    """Raises EngineError unless every parameter is sent once and in its shape."""
    names = Counter(name for name, _ in sent)
    problems = {
        "missing": sorted(shapes.keys() - names.keys()),
        "unknown": sorted(names.keys() - shapes.keys()),
        "sent twice": sorted(name for name, count in names.items() if count > 1),
        "of another shape": [
            f"{name} {tuple(tensor.shape)}, needed {tuple(shapes[name])}"
            for name, tensor in sent
            if name in shapes and tensor.shape != shapes[name]
        ],
    }
    if found := [f"{len(items)} {kind} ({'; '.join(items[:3])})" for kind, items in problems.items() if items]:
        raise EngineError(
            f"weights that do not fit the engine's model: {', '.join(found)}; nothing was replaced. "
            "Send the named_parameters() of a model of the same architecture"
        )
