"""The starters in the package are what their specs say, and a short making of them works as the long one.

The full making is `jackpot starter`.
"""

import json
import random
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from helpers.paths import ROOT
from jackpot.config.tasks import ArithmeticConfig
from jackpot.core.errors import ModelError
from jackpot.models.hub import starter_path
from jackpot.rollout.tasks.arithmetic import Arithmetic
from tools import toy_models
from tools.lessons import (
    CHARACTERS,
    PEOPLE,
    STORIES,
    THINGS,
    Mixture,
    WordProblem,
    kept_back_problems,
    make_byte_tokenizer,
    make_tokenizer,
    sample_solution,
    sample_word_solution,
    word_problem,
    write_word_problems,
)
from tools.toy_models import STUDY_MODELS, TEXT_MODELS, TOY_MODELS, make_toy_model, make_toy_models

PACKAGED = TOY_MODELS | TEXT_MODELS
NAMES = sorted(PACKAGED)
DIGESTS = {
    "policy": "dcb20f2e4d82715e",
    "rollout_model": "a70f425a7be36848",
    "text_policy": "582087be57244d48",
    "text_rollout_model": "40b8f266a9c633b5",
}  # first 16 digits of the SHA-256 of the weights

# Three steps of supervision: a second instead of a minute.
SHORT = {name: replace(spec, steps=3, batch_size=4) for name, spec in PACKAGED.items()}
SHORT_STUDY = {name: replace(spec, steps=3, batch_size=4) for name, spec in STUDY_MODELS.items()}


def greedy_answer(model: Qwen3ForCausalLM, prompt: str) -> str:
    """Return what a model answers to a prompt without sampling."""
    tokenizer = make_tokenizer()
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    ids = model.generate(**encoded, do_sample=False, max_new_tokens=32)
    return tokenizer.decode(ids[0, encoded.input_ids.shape[1] :], skip_special_tokens=True)


def parameter_count(folder: Path) -> int:
    return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(folder).parameters())


def model_settings(folder: Path) -> dict[str, object]:
    """Return a model's config.json, but for the version that wrote it."""
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("transformers_version")
    return settings


def test_there_is_a_policy_and_a_smaller_rollout_model():
    sizes = {name: sum(file.stat().st_size for file in starter_path(name).iterdir()) for name in NAMES}
    assert set(sizes) == {"policy", "rollout_model", "text_policy", "text_rollout_model"}
    for prefix in ("", "text_"):
        assert sizes[f"{prefix}rollout_model"] < sizes[f"{prefix}policy"] / 2
    assert max(sizes.values()) < 1.3e6  # bytes: they travel in the wheel


@pytest.mark.parametrize("name", NAMES)
def test_a_starter_has_the_weights_that_were_measured(name):
    assert sha256((starter_path(name) / "model.safetensors").read_bytes()).hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_starter_is_what_its_spec_says(name):
    spec = PACKAGED[name]

    model = AutoModelForCausalLM.from_pretrained(starter_path(name))

    config = model.config
    assert isinstance(model, Qwen3ForCausalLM)
    assert config.hidden_size == spec.hidden_size
    assert config.intermediate_size == spec.intermediate_size
    assert config.num_attention_heads == spec.num_heads
    assert config.num_key_value_heads == spec.num_kv_heads
    assert config.num_hidden_layers == spec.num_layers
    assert config.head_dim in {32, 64, 80, 96, 112, 128, 160, 192, 224, 256}  # what vLLM's CPU attention takes
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_starter_stops_where_its_tokenizer_says(name):
    tokenizer = AutoTokenizer.from_pretrained(starter_path(name))
    generation = json.loads((starter_path(name) / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id
    assert generation["pad_token_id"] == tokenizer.pad_token_id
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_tokenizer_is_the_one_that_is_made(name):
    packaged_tokenizer = AutoTokenizer.from_pretrained(starter_path(name))
    assert packaged_tokenizer.backend_tokenizer.to_str() == PACKAGED[name].lesson.tokenizer().backend_tokenizer.to_str()


def test_the_packaged_policy_solves_most_sums_when_greedy():
    """What reinforcement learning has to bring out is there."""
    model = AutoModelForCausalLM.from_pretrained(starter_path("policy"))
    task = Arithmetic(make_tokenizer(), ArithmeticConfig())
    prompts = [task.prompt("test", index) for index in range(16)]

    correct_count = sum(
        task.score(prompt, greedy_answer(model, prompt.text), finished=True).correct for prompt in prompts
    )

    assert correct_count >= 12  # of 16


def test_the_tokenizer_gives_every_character_back():
    tokenizer = make_tokenizer()

    ids = tokenizer.encode(CHARACTERS, add_special_tokens=False)

    assert len(ids) == len(CHARACTERS)
    assert len(set(ids)) == len(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS
    assert len(tokenizer) == len(CHARACTERS) + 3  # unknown, padding, end
    assert len(tokenizer) == 32
    assert tokenizer.encode("12+3=") == [ids[CHARACTERS.index(character)] for character in "12+3="]


def test_the_byte_tokenizer_gives_every_text_back(tmp_path):
    make_byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)  # as any tool loads it
    text = "".join(map(chr, range(0x800))) + " Ann's 3  漢字\r\n\t🎉 \ud7ff\uffff </s>"

    ids = tokenizer.encode(text)

    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([byte]) for byte in range(128)] == list(map(chr, range(128)))
    assert len({tokenizer.convert_ids_to_tokens(byte) for byte in range(256)}) == 256
    assert {tokenizer.eos_token_id, tokenizer.pad_token_id} == {256, 257}
    assert len(tokenizer) == 258
    assert tokenizer.decode([*b"17", tokenizer.eos_token_id], skip_special_tokens=True) == "17"

    chat_text = tokenizer.apply_chat_template([{"role": "user", "content": "How many?"}], tokenize=False)
    assert chat_text == "How many?\n"


def test_the_tokenizer_adds_nothing_and_marks_the_unknown():
    tokenizer = make_tokenizer()

    assert tokenizer.encode("é1") == [tokenizer.unk_token_id, *tokenizer.encode("1")]

    ids = [*tokenizer.encode("#51"), tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "#51"


def test_a_correct_writer_adds_one_number_after_the_other():
    correct_mixture = Mixture(correct=1.0, faulty=0.0, guess=0.0, offsets=(1,))
    assert sample_solution((12, 34), correct_mixture, random.Random(0)) == "46#46"
    assert sample_solution((12, 34, 5), correct_mixture, random.Random(0)) == "46+5=51#51"
    assert sample_solution((12, 34, 5, 9), correct_mixture, random.Random(0)) == "46+5+9=51+9=60#60"


@pytest.mark.parametrize(
    ("kind", "numbers", "solution"),
    [("buys", (3, 4), "3+4=7"), ("gives", (9, 4), "9-4=5"), ("loses", (3, 40, 13), "3+40=43; 43-13=30")],
)
def test_word_problems_are_solved_step_by_step(kind, numbers, solution):
    problem = WordProblem("", kind, numbers)
    correct_mixture = Mixture(correct=1.0, faulty=0.0, guess=0.0, offsets=(1,))
    assert sample_word_solution(problem, correct_mixture, random.Random(0)) == solution
    assert solution.endswith(f"={problem.answer}")


def test_a_faulty_writer_of_word_problems_keeps_its_mistakes():
    faulty_mixture = Mixture(correct=0.0, faulty=1.0, guess=0.0, offsets=(10,), fault_rate=1.0)  # ten too many
    problem = WordProblem("", "finds", (1, 2, 3))
    assert sample_word_solution(problem, faulty_mixture, random.Random(0)) == "1+2=13; 13+3=26"


def test_the_pages_problems_are_kept_back_from_supervision(tmp_path):
    for path in write_word_problems(tmp_path):
        assert path.read_text() == (ROOT / "examples" / path.name).read_text()

    kept_back = {(problem.kind, problem.numbers) for problem in kept_back_problems(500)}
    assert len(kept_back) == 500
    assert {kind for kind, _ in kept_back} == STORIES.keys()

    training_problems = [word_problem(index, is_kept_back=False) for index in range(2000)]
    assert not kept_back & {(problem.kind, problem.numbers) for problem in training_problems}
    assert all(problem.answer > 0 for problem in training_problems)
    assert {problem.text.split()[0] for problem in training_problems} == set(PEOPLE)
    assert all(any(noun in problem.text for noun in THINGS) for problem in training_problems)


def test_a_faulty_writer_goes_on_from_its_mistakes():
    faulty_mixture = Mixture(correct=0.0, faulty=1.0, guess=0.0, offsets=(10,), fault_rate=1.0)
    assert sample_solution((12, 34, 5), faulty_mixture, random.Random(0)) == "56+5=71#71"


def test_a_guessing_writer_gives_no_reasons():
    guessing_mixture = Mixture(correct=0.0, faulty=0.0, guess=1.0, offsets=(1,))
    draw = random.Random(0)
    answers = Counter(sample_solution((12, 34, 5), guessing_mixture, draw) for _ in range(2000))
    assert set(answers) == {f"#{answer}" for answer in range(41, 62)}  # the sum is 51


def test_a_mixture_writes_each_kind_as_often_as_it_says():
    mixture = Mixture(correct=0.2, faulty=0.3, guess=0.5, offsets=(1,), fault_rate=1.0)
    draw = random.Random(0)
    kinds = Counter(sample_solution((12, 34), mixture, draw) for _ in range(4000))
    assert kinds["46#46"] / 4000 == pytest.approx(0.2, abs=0.03)
    assert kinds["47#47"] / 4000 == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("name", ["rollout_model", "text_rollout_model"])  # one of each lesson
def test_making_a_starter_twice_gives_the_same_weights(name):
    weights = make_toy_model(name, SHORT[name], seed=7).state_dict()
    torch.manual_seed(2)
    weights_made_again = make_toy_model(name, SHORT[name], seed=7).state_dict()
    weights_of_another_seed = make_toy_model(name, SHORT[name], seed=8).state_dict()

    assert all(torch.equal(weights[key], weights_made_again[key]) for key in weights)
    assert any(not torch.equal(weights[key], weights_of_another_seed[key]) for key in weights)


def test_making_a_starter_leaves_randomness_and_threads_alone():
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        torch.manual_seed(3)
        expected_numbers = torch.rand(4)
        torch.manual_seed(3)

        make_toy_model("rollout_model", SHORT["rollout_model"])

        assert torch.equal(torch.rand(4), expected_numbers)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(previous_threads)


def test_making_all_starters_saves_folders_that_load(tmp_path):
    reports = []

    make_toy_models(tmp_path, SHORT, seed=0, progress=lambda *report: reports.append(report))

    assert [report[:3] for report in reports] == [(name, step, 3) for name in PACKAGED for step in (1, 2, 3)]
    assert all(0.0 < loss < 20.0 for *_, loss in reports)
    for name in PACKAGED:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / name))
        made_names, packaged_names = (
            {path.name for path in folder.iterdir()} for folder in (tmp_path / name, starter_path(name))
        )
        assert made_names == packaged_names
        assert model_settings(tmp_path / name) == model_settings(starter_path(name))


def test_the_studys_policy_is_five_times_its_writers(tmp_path):
    make_toy_models(tmp_path, SHORT_STUDY)

    sizes = {folder.name: parameter_count(folder) for folder in tmp_path.iterdir()}
    assert set(sizes) == {"policy", "close", "far", "gap"}
    assert sizes["close"] == sizes["far"]
    assert sizes["gap"] < sizes["close"]
    assert sizes["close"] <= sizes["policy"] / 5

    tokenizers = {AutoTokenizer.from_pretrained(tmp_path / name).backend_tokenizer.to_str() for name in sizes}
    assert tokenizers == {make_tokenizer().backend_tokenizer.to_str()}


def test_supervision_lowers_the_loss():
    losses = []
    spec = replace(TOY_MODELS["rollout_model"], steps=40, batch_size=16)

    make_toy_model("rollout_model", spec, progress=lambda _name, _step, _steps, loss: losses.append(loss))

    assert losses[-1] < 0.7 * losses[0]


def test_supervision_sees_the_response_and_not_the_prompt():
    tokenizer = make_tokenizer()
    spec = replace(TOY_MODELS["policy"], batch_size=8)

    ids, labels = toy_models._examples(tokenizer, spec, 0, random.Random(0))

    for row_ids, row_labels in zip(ids, labels, strict=True):
        prompt = tokenizer.decode(row_ids[row_labels == -100], skip_special_tokens=True)
        response = row_ids[row_labels != -100]
        assert prompt.endswith("=")
        assert "#" not in prompt
        assert "#" in tokenizer.decode(response)
        assert response[-1] == tokenizer.eos_token_id
        assert torch.equal(response, row_labels[row_labels != -100])


def test_an_unknown_starter_is_refused_with_a_guess():
    with pytest.raises(ModelError, match="did you mean 'policy'"):
        starter_path("polciy")
    with pytest.raises(ModelError, match="Valid: policy, rollout_model, text_policy, text_rollout_model"):
        starter_path("base")
