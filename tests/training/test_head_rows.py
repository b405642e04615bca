"""Models with output layers of different length train as the same models with the longer one cut."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from helpers.engines.reference import save_longer, tiny_model
from helpers.learners import VOCAB
from helpers.runs import BRIEF, FinishedRuns, read_lines, run, small_config, weights
from helpers.sharded import config_of, learner_of, samples_of, train
from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.core.errors import EngineError
from jackpot.core.types import Prompt, Version
from jackpot.launch.engines import make_engine
from jackpot.models.load import load_model
from jackpot.rollout.engines.base import Engine, Request

LONG = VOCAB + 3
CPU, FIRST = torch.device("cpu"), Version(0, 0)
ROLES = ("policy", "rollout_model")
UNLIKE = ("seconds", "cpu_seconds", "speed", "memory", "flops")  # metrics of time, and of all rows


def save_pairs(folder: Path, longer: str, tied: bool) -> list[Path]:
    """The folder of a pair in which one model has a longer output layer, and that of the pair with it cut."""
    for seed, role in enumerate(ROLES):
        size = LONG if role == longer else VOCAB
        model = tiny_model(seed, size, hidden_size=32, intermediate_size=48, tie_word_embeddings=tied)
        model.save_pretrained(folder / "long" / role)
        model.resize_token_embeddings(VOCAB)
        model.save_pretrained(folder / "cut" / role)
    return [folder / "long", folder / "cut"]


@pytest.mark.parametrize(("longer", "tied"), [("policy", False), ("rollout_model", True)])
def test_joint_steps_are_those_of_cut_output_layers(longer: str, tied: bool, tmp_path: Path) -> None:
    """With exact Z and KLs, a reference, and top-k lists; the rows beyond stay as they are."""
    folders = save_pairs(tmp_path, longer, tied)
    configs = [
        config_of(one, "objective.correction.normalizer=exact", "objective.reference={kl_loss_coef: 0.1}")
        for one in folders
    ]
    samples = samples_of(folders[1])
    found, wanted = (train(learner_of(one, False), one, samples, 80, 0, 1, rollout_batches=1) for one in configs)

    for ours, theirs in zip(found["metrics"], wanted["metrics"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7, equal_nan=True)
    for uid, scores in wanted["scores"].items():
        torch.testing.assert_close(found["scores"][uid], scores, rtol=1e-5, atol=1e-6)

    start = dict(load_model(folders[0] / longer, torch.float32).named_parameters())
    for name, weight in wanted["weights"].items():
        role, _, short = name.partition("/")
        ours, rows = found["weights"][name], len(weight)
        torch.testing.assert_close(ours[:rows], weight, rtol=1e-5, atol=1e-7)
        if role == longer:
            assert torch.equal(ours[rows:], start[short][rows:])
            assert len(ours) == rows + 3 * (rows == VOCAB)


def request(first: int, seed: int) -> Request:
    prompt = Prompt(uid=f"{first}", text="", answer="", token_ids=(first, 3, 4))
    sampling = Sampling(max_new_tokens=16, num_top_log_probs=VOCAB)
    return Request(uid=f"{first}#{seed}", prompt=prompt, seed=seed, sampling=sampling)


REQUESTS = [request(first, seed) for first in (2, 7, VOCAB - 1) for seed in range(4)]


def engines(folder: Path, tied: bool = True, **settings: object) -> list[Engine]:
    """An engine of a model that is cut to fewer rows, and one of the model that was saved with fewer."""
    folders = save_pairs(folder, "policy", tied)
    config = TransformersEngineConfig(**settings)
    return [make_engine(config, str(one / "policy"), CPU, FIRST, None, VOCAB) for one in folders]


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8_w8a8"}, {"head_dtype": "fp32", "dtype": "bf16"}])
def test_an_engine_samples_from_the_rows_that_both_have(settings: dict[str, str], tmp_path: Path) -> None:
    ours, cut = engines(tmp_path, tied=not settings, **settings)
    with closing(ours), closing(cut):
        assert ours.capabilities.vocab_size == ours.capabilities.num_top_log_probs == VOCAB
        found, wanted = ours.generate(REQUESTS), cut.generate(REQUESTS)
        for one, other in zip(found, wanted, strict=True):
            assert one.token_ids.equal(other.token_ids)
            assert one.top_ids.equal(other.top_ids)
            torch.testing.assert_close(one.rollout_log_probs, other.rollout_log_probs)
            torch.testing.assert_close(one.top_log_probs.exp().sum(-1), torch.ones(len(one.token_ids)))
        torch.testing.assert_close(ours.score(found, 0.7), cut.score(found, 0.7))

        with pytest.raises(EngineError, match=f" {VOCAB}.* {VOCAB - 1}"):
            ours.submit([request(VOCAB, 0)])


def test_a_draft_model_has_the_rows_of_the_policy(tmp_path: Path) -> None:
    long, cut = save_pairs(tmp_path, "rollout_model", tied=True)
    written = []

    for folder in (long, cut):
        drafter = make_engine(TransformersEngineConfig(), str(folder / "rollout_model"), CPU, FIRST, None, VOCAB)
        settings = TransformersEngineConfig(draft={"tokens": 3})
        engine = make_engine(settings, str(folder / "policy"), CPU, FIRST, drafter, VOCAB)
        with closing(drafter), closing(engine):
            written.append([rollout.token_ids.tolist() for rollout in engine.generate(REQUESTS)])

    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("longer", "overrides"),
    [
        ("rollout_model", ("engine.quantization=int8_w8a8",)),
        pytest.param("policy", ("objective.reference.kl_loss_coef=0.1",), marks=pytest.mark.slow),
    ],
)
def test_a_run_is_that_of_models_of_one_length(
    longer: str, overrides: tuple[str, ...], tmp_path: Path, finished_run: FinishedRuns
) -> None:
    save_longer(f"starter:{longer}", tmp_path / "long")
    settings = ("iterations=2", *BRIEF, *overrides)
    run(small_config(*settings, f"{longer}.path={tmp_path / 'long'}"), tmp_path / "run")

    plain = finished_run(*settings)

    for found, wanted in zip(read_lines(tmp_path / "run"), read_lines(plain), strict=True):
        numbers = {name: value for name, value in wanted.items() if name.split("/")[0] not in UNLIKE}
        torch.testing.assert_close({name: found[name] for name in numbers}, numbers, rtol=1e-4, atol=1e-5)
    for role in ROLES:
        for name, weight in weights(plain, role).items():
            found = weights(tmp_path / "run", role)[name]
            torch.testing.assert_close(found[: len(weight)], weight, rtol=1e-4, atol=1e-6)
            assert len(found) == len(weight) + 7 * (role == longer and "embed_tokens" in name)
