"""Two random models with a vocabulary of 10 tokens, and a task for them whose reward can be the same for all."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from helpers.engines.reference import tiny_model
from jackpot.config.tasks import CustomTaskConfig
from jackpot.core.types import Prompt, Score
from jackpot.rollout.tasks.base import Split, Task

TOKENS = ("[PAD]", "[EOS]", *"01234567")


class Digits(Task):
    """Rewards a response for the share of its tokens that are the prompt's first digit, or by `kwargs.reward`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: CustomTaskConfig) -> None:
        self._tokenizer, self._reward = tokenizer, settings.kwargs.get("reward")

    def size(self, split: Split) -> int | None:
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        text = f"{index % 8} {index // 8 % 8}"
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return Prompt(uid=f"digits/{split}/{index}", text=text, answer=text[0], token_ids=tuple(ids))

    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        words = response.split()
        share = words.count(prompt.answer) / max(1, len(words))
        return Score(reward=share if self._reward is None else self._reward, correct=share > 0.5)


def settings(folder: Path, reward: float | None = None) -> tuple[str, ...]:
    """Write the models below `folder` and return the overrides that train them."""
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[PAD]"))
    for seed, role in enumerate(("policy", "rollout_model")):
        model = tiny_model(seed, len(TOKENS), hidden_size=32, intermediate_size=48, num_hidden_layers=1, head_dim=16)
        model.save_pretrained(folder / role)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]").save_pretrained(
            folder / role
        )
    kwargs = "" if reward is None else f", kwargs: {{reward: {reward}}}"
    return (
        f"policy.path={folder / 'policy'}",
        f"rollout_model.path={folder / 'rollout_model'}",
        f"task={{name: custom, import_path: 'helpers.ten_tokens:Digits'{kwargs}}}",
        "sampling.max_new_tokens=6",
    )
