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

LONG = VOCAB + 3  # rows of a longer output layer
CPU, FIRST = torch.device("cpu"), Version(0, 0)
ROLES = ("policy", "rollout_model")
UNLIKE = ("seconds", "cpu_seconds", "speed", "memory", "flops")  # metrics of time, and of all rows


def save_pairs(folder: Path, longer: str, tied: bool) -> list[Path]:
    """Save a pair of models, one with a longer output layer, and the pair with it cut; return their folders."""
    for seed, role in enumerate(ROLES):
        size = LONG if role == longer else VOCAB
        model = tiny_model(seed, size, hidden_size=32, intermediate_size=48, tie_word_embeddings=tied)
        model.save_pretrained(folder / "long" / role)
        model.resize_token_embeddings(VOCAB)
        model.save_pretrained(folder / "cut" / role)
    return [folder / "long", folder / "cut"]


def request(first_id: int, seed: int) -> Request:
    prompt = Prompt(uid=f"{first_id}", text="", answer="", token_ids=(first_id, 3, 4))
    sampling = Sampling(max_new_tokens=16, num_top_log_probs=VOCAB)
    return Request(uid=f"{first_id}#{seed}", prompt=prompt, seed=seed, sampling=sampling)


REQUESTS = [request(first_id, seed) for first_id in (2, 7, VOCAB - 1) for seed in range(4)]


def engines(folder: Path, tied: bool = True, **settings: object) -> list[Engine]:
    """Return an engine of a model that is cut to fewer rows, and one of the model that was saved with fewer."""
    folders = save_pairs(folder, "policy", tied)
    config = TransformersEngineConfig(**settings)
    return [make_engine(config, str(pair / "policy"), CPU, FIRST, drafter=None, rows=VOCAB) for pair in folders]


@pytest.mark.parametrize(("longer", "tied"), [("policy", False), ("rollout_model", True)])
def test_joint_steps_are_those_of_cut_output_layers(longer: str, tied: bool, tmp_path: Path) -> None:
    """With exact Z and KLs, a reference, and top-k lists; the rows beyond stay as they are."""
    long_pair, cut_pair = save_pairs(tmp_path, longer, tied)
    configs = [
        config_of(pair, "objective.correction.normalizer=exact", "objective.reference={kl_loss_coef: 0.1}")
        for pair in (long_pair, cut_pair)
    ]
    samples = samples_of(cut_pair)

    result, expected_result = (
        train(learner_of(config, is_sharded=False), config, samples, budget=80, rank=0, ranks=1, rollout_batches=1)
        for config in configs
    )

    for step_metrics, expected_metrics in zip(result["metrics"], expected_result["metrics"], strict=True):
        torch.testing.assert_close(step_metrics, expected_metrics, rtol=1e-5, atol=1e-7, equal_nan=True)
    for uid, scores in expected_result["scores"].items():
        torch.testing.assert_close(result["scores"][uid], scores, rtol=1e-5, atol=1e-6)

    start = dict(load_model(long_pair / longer, torch.float32).named_parameters())
    for name, expected_weight in expected_result["weights"].items():
        role, _, parameter_name = name.partition("/")
        weight, rows = result["weights"][name], len(expected_weight)
        torch.testing.assert_close(weight[:rows], expected_weight, rtol=1e-5, atol=1e-7)
        if role == longer:
            assert torch.equal(weight[rows:], start[parameter_name][rows:])
            assert len(weight) == rows + 3 * (rows == VOCAB)


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8_w8a8"}, {"head_dtype": "fp32", "dtype": "bf16"}])
def test_an_engine_samples_from_the_rows_that_both_have(settings: dict[str, str], tmp_path: Path) -> None:
    long_engine, cut_engine = engines(tmp_path, tied=not settings, **settings)

    with closing(long_engine), closing(cut_engine):
        assert long_engine.capabilities.vocab_size == VOCAB
        assert long_engine.capabilities.num_top_log_probs == VOCAB

        rollouts = long_engine.generate(REQUESTS)
        for rollout, expected_rollout in zip(rollouts, cut_engine.generate(REQUESTS), strict=True):
            assert rollout.token_ids.equal(expected_rollout.token_ids)
            assert rollout.top_ids.equal(expected_rollout.top_ids)
            torch.testing.assert_close(rollout.rollout_log_probs, expected_rollout.rollout_log_probs)
            torch.testing.assert_close(rollout.top_log_probs.exp().sum(-1), torch.ones(len(rollout.token_ids)))
        torch.testing.assert_close(long_engine.score(rollouts, 0.7), cut_engine.score(rollouts, 0.7))

        with pytest.raises(EngineError, match=f" {VOCAB}.* {VOCAB - 1}"):
            long_engine.submit([request(VOCAB, 0)])


def test_a_draft_model_has_the_rows_of_the_policy(tmp_path: Path) -> None:
    long_pair, cut_pair = save_pairs(tmp_path, "rollout_model", tied=True)
    token_ids = []

    for folder in (long_pair, cut_pair):
        drafter = make_engine(
            TransformersEngineConfig(), str(folder / "rollout_model"), CPU, FIRST, drafter=None, rows=VOCAB
        )
        settings = TransformersEngineConfig(draft={"tokens": 3})
        engine = make_engine(settings, str(folder / "policy"), CPU, FIRST, drafter, VOCAB)
        with closing(drafter), closing(engine):
            token_ids.append([rollout.token_ids.tolist() for rollout in engine.generate(REQUESTS)])

    assert token_ids[0] == token_ids[1]


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

    plain_run = finished_run(*settings)
    for line, expected_line in zip(read_lines(tmp_path / "run"), read_lines(plain_run), strict=True):
        expected_metrics = {name: value for name, value in expected_line.items() if name.split("/")[0] not in UNLIKE}
        torch.testing.assert_close(
            {name: line[name] for name in expected_metrics}, expected_metrics, rtol=1e-4, atol=1e-5
        )

    for role in ROLES:
        for name, expected_weight in weights(plain_run, role).items():
            weight = weights(tmp_path / "run", role)[name]
            torch.testing.assert_close(weight[: len(expected_weight)], expected_weight, rtol=1e-4, atol=1e-6)
            assert len(weight) == len(expected_weight) + 7 * (role == longer and "embed_tokens" in name)
