"""Environments with reset and step: an episode is played again from its seed, with the model's turns as actions."""

from typing import ClassVar

import pytest
import torch

from jackpot.config.tasks import EnvironmentConfig
from jackpot.core.errors import ConfigError, DataError
from jackpot.core.types import DecodedResponse, Rollout
from jackpot.rollout.evaluate import score_rollouts
from jackpot.rollout.tasks.base import decoded_response
from jackpot.rollout.tasks.environment import EnvironmentTask
from jackpot.rollout.tasks.registry import make_task
from jackpot.rollout.tasks.templates import Template
from tools.lessons import make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()


class Countdown:
    """Ends when the actions, numbers, add up to the seed's, and is cut off after `limit` actions."""

    closed: ClassVar[list[int]] = []

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def reset(self, *, seed: int) -> tuple[str, dict]:
        self._left, self._actions = 2 + seed % 1000, 0
        return f"{self._left} left", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self._left, self._actions = self._left - int(action), self._actions + 1
        return f"{self._left} left", int(action) / 2000, self._left == 0, self._actions == self._limit, {}

    def close(self) -> None:
        self.closed.append(self._left)


@pytest.fixture
def task() -> EnvironmentTask:
    settings = EnvironmentConfig(import_path=f"{__name__}:Countdown", kwargs={"limit": 3}, solved=0.001)
    return make_task(settings, TOKENIZER)


def test_a_prompt_is_the_first_observation_of_its_seed(task) -> None:
    first_prompt = task.prompt("train", 0)
    assert task.prompt("train", 0) == first_prompt
    assert len({first_prompt.text, task.prompt("train", 1).text, task.prompt("test", 0).text}) == 3

    assert first_prompt.text.endswith(" left\n")
    assert first_prompt.token_ids == tuple(first_prompt.text.encode())
    assert task.size("train") is None
    assert task.turn_end_token_ids == (TOKENIZER.eos_token_id,)


def test_every_turn_of_the_model_is_an_action_and_rewards_add_up(task) -> None:
    prompt = task.prompt("train", 3)
    start = int(prompt.text.split()[0])

    def response(*turns: str, finished: bool = True) -> DecodedResponse:
        return DecodedResponse(prompt, "not read", finished, turns, last_turn_ended=finished)

    assert task.reply(response("1")) == f"\n{start - 1} left\n"
    assert task.reply(response("1", " 0")) == f"\n{start - 1} left\n"
    assert task.reply(response("1", str(start - 1))) is None  # it has ended
    assert task.reply(response("1", "0", "0")) is None  # it was cut off

    responses = [response("1", str(start - 1)), response("1", "0", "0"), response("1", "9", finished=False)]
    right_score, wrong_score, cut_score = task.scores(responses)
    assert right_score.reward == pytest.approx(start / 2000)  # the sum of the actions by 2,000
    assert right_score.correct
    assert wrong_score.reward == pytest.approx(1 / 2000)
    assert not wrong_score.correct
    assert cut_score.reward == pytest.approx(1 / 2000)  # the turn that was cut is no action
    assert not cut_score.correct
    assert Countdown.closed[-3:] == [0, start - 1, start - 1]


def test_the_turns_of_a_response_are_what_the_model_sampled() -> None:
    ids = torch.tensor([*b"12", 256, *b"\nno\n", *b"13", 256])
    sampled_mask = torch.tensor([True] * 3 + [False] * 4 + [True] * 3)  # not the reply between the turns

    response = decoded_response(TOKENIZER, None, ids, sampled_mask, finished=True)
    assert (response.text, response.turns) == ("12\nno\n13", ("12", "13"))

    assert decoded_response(TOKENIZER, None, ids[:3], sampled_mask[:3], finished=True).turns == ("12",)
    assert decoded_response(TOKENIZER, None, ids[:7], sampled_mask[:7], finished=True).turns == ("12",)


@pytest.mark.parametrize(("last_ids", "counted_sum"), [((), 12), ((256,), 21)])  # 256 ends a turn
def test_a_complete_turn_counts_and_a_cut_one_does_not(task, last_ids, counted_sum) -> None:
    ids = torch.tensor([*b"12", 256, *b"\n1 left\n", *b"9", *last_ids])
    sampled_mask = torch.tensor([True] * 3 + [False] * 8 + [True] * (1 + len(last_ids)))
    rollout = Rollout(
        uid="a",
        prompt=task.prompt("train", 3),
        finish="length",
        token_ids=ids,
        rollout_log_probs=torch.zeros(len(ids)),
        sampled_mask=sampled_mask,
        top_ids=torch.zeros(len(ids), 0, dtype=torch.int64),
        top_log_probs=torch.zeros(len(ids), 0),
        versions=torch.zeros(len(ids), 2, dtype=torch.int64),
    )

    _, [score] = score_rollouts([rollout], task, TOKENIZER)

    assert score.reward == pytest.approx(counted_sum / 2000)


CHATS = {  # chat template, its special tokens, the one that ends a turn, and the reply "no"
    "gemma": (
        "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{{ '<start_of_turn>model\n' }}",
        ["<start_of_turn>", "<end_of_turn>"],
        "<end_of_turn>",
        "\n<start_of_turn>user\nno<end_of_turn>\n<start_of_turn>model\n",
    ),
    "phi": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{{ '<|assistant|>\n' }}",
        ["<|user|>", "<|assistant|>", "<|end|>"],
        "<|end|>",
        "\n<|user|>\nno<|end|>\n<|assistant|>\n",
    ),
    "llama 2": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
        [],
        "<end>",
        "[INST] no [/INST]",
    ),
}


@pytest.mark.parametrize(("template", "special_tokens", "end_token", "reply"), CHATS.values(), ids=CHATS)
def test_a_turn_ends_with_the_token_of_template_or_sequence(template, special_tokens, end_token, reply) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": special_tokens})
    tokenizer.chat_template = template
    settings = EnvironmentConfig(import_path=f"{__name__}:Countdown", kwargs={"limit": 3})

    end_ids = make_task(settings, tokenizer).turn_end_token_ids
    assert end_ids == tuple(dict.fromkeys([tokenizer.convert_tokens_to_ids(end_token), tokenizer.eos_token_id]))

    assert Template("chat", tokenizer, instruction="", system_prompt=None).reply("no") == reply

    plain_task = make_task(settings.model_copy(update={"template": "plain"}), tokenizer)
    assert plain_task.turn_end_token_ids == (tokenizer.eos_token_id,)


@pytest.mark.parametrize(
    ("template", "has_end", "problem"),
    [
        ("{{ messages[-1].content }}", True, "leaves out what the model said in earlier turns.*task.template: base"),
        (
            "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
            True,
            "changes or leaves out what the model said",
        ),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", False, "nothing ends a turn.*eos_token"),
    ],
)
def test_a_chat_template_without_earlier_turns_is_refused(template, has_end, problem) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.eos_token = tokenizer.eos_token if has_end else None
    with pytest.raises(DataError, match=problem):
        make_task(EnvironmentConfig(import_path=f"{__name__}:Countdown"), tokenizer)


def test_an_exception_names_prompt_seed_and_actions(task) -> None:
    prompt = task.prompt("train", 3)
    message = rf"{__name__}:Countdown' failed in environment/train/3, seed \d+, after 1 actions: ValueError: .*'word'"
    with pytest.raises(DataError, match=message):
        task.reply(DecodedResponse(prompt, "", True, ("1", "word")))


def test_a_reply_stands_where_the_next_message_stands() -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}<end>|{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )

    replies = {
        name: Template(name, tokenizer, instruction="", system_prompt=None).reply("no")
        for name in ("chat", "base", "plain")
    }

    assert replies == {
        "chat": "|[user]no<end>|[assistant]",
        "base": "\n\nQuestion:\nno\n\nAnswer:\n",
        "plain": "\n\nno",
    }


def test_an_environment_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="environment 'nowhere:Game' cannot be imported"):
        make_task(EnvironmentConfig(import_path="nowhere:Game"), TOKENIZER)
