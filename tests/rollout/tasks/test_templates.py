"""Prompts as the model reads them: the chat template of its tokenizer, or plain text."""

import pytest

from helpers.texts import CHAT, text_tokenizer
from jackpot.core.errors import DataError
from jackpot.rollout.tasks.templates import Template

NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT


def make_template(name="chat", tokenizer=None, instruction="Think.", system_prompt=None) -> Template:
    """Return a template with the instruction "Think." and no system prompt."""
    return Template(name, tokenizer or text_tokenizer(), instruction=instruction, system_prompt=system_prompt)


def test_chat_is_the_template_with_the_instruction_at_the_end():
    assert make_template().text("1+1?") == "<|user|>1+1?\nThink.<|end|><|assistant|>"
    assert make_template(system_prompt="Be brief.").text("1+1?") == (
        "<|system|>Be brief.<|end|><|user|>1+1?\nThink.<|end|><|assistant|>"
    )
    assert make_template(instruction="").text("1+1?") == "<|user|>1+1?<|end|><|assistant|>"


def test_base_is_plain_text():
    assert make_template("base").text("1+1?") == "Question:\n1+1?\nThink.\n\nAnswer:\n"
    assert make_template("base", instruction="").text("1+1?") == "Question:\n1+1?\n\nAnswer:\n"
    assert make_template("base", system_prompt="Be brief.").text("1+1?").startswith("Be brief.\n\nQuestion:\n")
    assert make_template("base", text_tokenizer(chat=None)).text("1+1?") == make_template("base").text("1+1?")


def test_the_roles_of_a_chat_are_single_tokens():
    tokenizer, chat_template = text_tokenizer(), make_template()
    ids = chat_template.token_ids(chat_template.text("1+1?"))
    assert tokenizer.convert_ids_to_tokens([ids[0], ids[-2], ids[-1]]) == ["<|user|>", "<|end|>", "<|assistant|>"]


def test_texts_and_chats_begin_as_the_tokenizer_wants():
    tokenizer = text_tokenizer(begins=True)
    base_template, chat_template = make_template("base", tokenizer), make_template("chat", tokenizer)

    ids = base_template.token_ids(base_template.text("1+1?"))
    assert ids == tokenizer("Question:\n1+1?\nThink.\n\nAnswer:\n")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id

    assert tokenizer.bos_token_id not in chat_template.token_ids(chat_template.text("1+1?"))

    plain_template = make_template("base", text_tokenizer())
    assert plain_template.token_ids("1+1?") == text_tokenizer()("1+1?")["input_ids"]


@pytest.mark.parametrize("name", ["chat", "base"])
@pytest.mark.parametrize("begins", [False, True])
def test_lengths_are_those_of_the_prompts(name, begins):
    prompt_template = make_template(name, text_tokenizer(begins=begins))
    texts = [prompt_template.text(problem) for problem in ("1+1?", "What is the half of a quarter?", "½·π?")]

    # no text has parts that the tokenizer does not know
    assert prompt_template.measure(texts) == [(len(prompt_template.token_ids(text)), False) for text in texts]


def test_what_a_tokenizer_cannot_do_is_refused_with_the_way_out():
    with pytest.raises(DataError, match=r"^the tokenizer has no chat template; use `template: base`"):
        make_template("chat", text_tokenizer(chat=None))

    assert make_template("chat", text_tokenizer(chat=NO_SYSTEM)).text("1+1?").startswith("<|user|>")
    with pytest.raises(
        DataError, match=r"of system, user: no system role; leave `system_prompt` out .* `template: base`$"
    ):
        make_template("chat", text_tokenizer(chat=NO_SYSTEM), system_prompt="Be brief.")
