"""A reward model of your own: it rates a batch of responses in one call.

    jackpot train examples/own_reward_model.yaml

A function with a parameter `responses` is given batches, in one worker process, which loads the model once. The import
of this file loads it, so that its memory does not count as taken by a call. docs/rewards.md has the limits.
"""

import torch

from jackpot.models.load import load_model, load_tokenizer

_TOKENIZER = load_tokenizer("starter:policy")
_MODEL = load_model("starter:policy", torch.float32, torch.device("cpu")).eval()


@torch.inference_mode()
def likelihood(*, problems: list[str], responses: list[str], answers: list[str], finished: list[bool]) -> list[float]:
    """Return for each response how probable the model finds it, as the mean probability of its tokens."""
    prompts = [_TOKENIZER.encode(problem, add_special_tokens=False) for problem in problems]
    texts = [_TOKENIZER.encode(response, add_special_tokens=False) for response in responses]
    rows = [torch.tensor(prompt + text) for prompt, text in zip(prompts, texts, strict=True)]
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # on the right, where it changes nothing before it
    probabilities = _MODEL(batch).logits[:, :-1].softmax(dim=-1).gather(2, batch[:, 1:, None])[..., 0]
    return [
        row[len(prompt) - 1 : len(prompt) + len(text) - 1].mean().item() if text else 0.0
        for row, prompt, text in zip(probabilities, prompts, texts, strict=True)
    ]
