"""Two sides made of real models: what they are, and how far apart."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from helpers.engines.architectures import make_model
from helpers.engines.reference import rollout_of, save_longer, tiny_model, tiny_prompt
from helpers.learners import batches, make_learner, smallest_model, write
from helpers.runs import FinishedRuns, small_config
from jackpot.analysis.mismatch import learner, mismatch
from jackpot.analysis.mismatch.learner import learner_model, learner_scores
from jackpot.analysis.mismatch.mismatch import MismatchPair, measure_mismatch
from jackpot.analysis.mismatch.sides import mismatch_config, side_name, verdict
from jackpot.config.build import nest
from jackpot.config.engines import TransformersEngineConfig, VLLMServerEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.config.tools import LearnerConfig
from jackpot.core.errors import ConfigError, DataError, EngineError, ModelError
from jackpot.core.types import Rollout, Version
from jackpot.launch.engines import make_engine
from jackpot.models import scoring
from jackpot.models.hub import starter_path
from jackpot.models.load import load_meta_model, load_tokenizer

POLICY = "starter:policy"
BFLOAT16 = {"dtype": "bf16"}
INT8 = {"quantization": "int8_w8a8"}


@pytest.fixture(autouse=True, scope="module")
def _outlines() -> Iterator[None]:
    """Read the shapes of each model once, where a comparison reads them four times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mismatch, "load_meta_model", cache(load_meta_model))
        yield


def apart(
    *learners: dict[str, Any], samplers: tuple[dict[str, Any], ...] = ({},), model: str = POLICY, **settings: Any
) -> list[MismatchPair]:
    """What is measured of 12 responses of at most 8 tokens."""
    options = {"responses": 12, "sampling.max_new_tokens": 8, "threads": 1} | settings
    changes = [nest(key, value) for key, value in options.items()]
    config = mismatch_config(model, [[side] for side in samplers], [[side] for side in learners], changes)
    return list(measure_mismatch(config, lambda text: None).pairs)


def gaps(pairs: list[MismatchPair]) -> list[float]:
    """Return the mean gap of each pair."""
    return [pair.numbers.gap.value for pair in pairs]


def with_top(rollout: Rollout, ids: list[list[int]]) -> Rollout:
    """Return a rollout whose sampler lists these tokens at every place."""
    return replace(rollout, top_ids=torch.tensor(ids), top_log_probs=torch.zeros(len(ids), len(ids[0])))


def test_a_reading_is_the_models_own_softmax_at_every_token(monkeypatch):
    """In batches and chunks so small that responses and batches are cut."""
    monkeypatch.setattr(learner, "FORWARD_TOKENS", 24)
    monkeypatch.setattr(scoring, "MAX_LOGITS", 3 * 24)
    model, draw = tiny_model(0).eval(), np.random.default_rng(0)
    rollouts = []
    for row, length in enumerate((5, 1, 9, 3)):
        plain = rollout_of(tiny_prompt(3 + row, row), draw.integers(2, 24, length).tolist())
        rollouts.append(with_top(plain, [draw.permutation(24)[:6].tolist() for _ in range(length)]))

    readings = list(learner_scores(model, rollouts, temperature=0.7))

    for reading, rollout in zip(readings, rollouts, strict=True):
        ids = [*rollout.prompt.token_ids, *rollout.token_ids.tolist()]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(rollout.prompt.token_ids) - 1 : -1].double().numpy() / 0.7
        log_q = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        top = rollout.top_ids.numpy()
        rows = np.arange(len(top))
        outside = log_q.copy()
        np.put_along_axis(outside, top, np.inf, axis=1)
        near = {"atol": 1e-5}
        np.testing.assert_allclose(reading.log_probs, log_q[rows, rollout.token_ids], **near)
        np.testing.assert_allclose(reading.top_log_probs, np.take_along_axis(log_q, top, 1), **near)
        np.testing.assert_allclose(reading.lowest, outside.min(1), **near)
        np.testing.assert_allclose(reading.entropy, -(np.exp(log_q) * log_q).sum(1), **near)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_learner_reads_what_training_scores(autocast):
    model = smallest_model(1)
    items = write(model)
    learner = make_learner(model, rollout_model=None, autocast=autocast)
    [batch] = batches(items)[0]
    scores = {uid: rows[:, 0] for uid, rows in learner.score("policy", [batch], Sampling()).items()}
    rollouts = [item.rollout for item in items]

    readings = list(learner_scores(model, rollouts, 1.0, autocast))

    for rollout, reading in zip(rollouts, readings, strict=True):
        near = 1e-5 if autocast is None else 2e-2  # other batches: bfloat16 rounds elsewhere
        torch.testing.assert_close(reading.log_probs.float(), scores[rollout.uid], atol=near, rtol=0.0)

    if autocast is not None:
        plain = list(learner_scores(model, rollouts, 1.0))
        assert any(not a.log_probs.equal(b.log_probs) for a, b in zip(plain, readings, strict=True))


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "bf16"}, {"attn_implementation": "eager"}, {"kv_cache_dtype": "fp8"}, {"quantization": "int8_w8a16"}],
    ids=str,
)
def test_a_learner_computes_what_an_engine_like_it_scores(settings):
    """One response at a time: so both read the same batches."""
    prompts = [tiny_prompt(9, seed=row) for row in range(3)]
    rollouts = [with_top(rollout_of(prompt, [5, 9, 2, 7]), [[0]] * 4) for prompt in prompts]
    kinds, device = [TransformersEngineConfig(), TransformersEngineConfig(**settings)], torch.device("cpu")
    with closing(make_engine(kinds[1], POLICY, device, Version(0, 0))) as engine:
        scores = [engine.score([rollout], 1.0)[0] for rollout in rollouts]

    plain, changed = (
        [next(learner_scores(model, [rollout], 1.0)).log_probs for rollout in rollouts]
        for model in (learner_model(kind, POLICY, device) for kind in kinds)
    )

    torch.testing.assert_close(torch.cat(changed).float(), torch.cat(scores), atol=1e-6, rtol=1e-6)
    assert not torch.cat(changed).equal(torch.cat(plain))


def test_two_wide_heads_are_nearer_than_narrow_ones():
    narrow, wide = {"dtype": "bf16"}, {"dtype": "bf16", "head_dtype": "fp32"}
    cast = {"autocast": "bf16"}

    pairs = apart(cast, cast | {"head_dtype": "fp32"}, samplers=(narrow, wide), reread=True, responses=8)
    of = {pair.name: pair.numbers.gap.value for pair in pairs}
    both = of.pop("transformers bf16 head fp32 | transformers fp32 head fp32 autocast bf16")

    assert len(of) == 3 and 0.0 < both < min(of.values())


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random mixture of experts, with the starters' vocabulary."""
    folder = tmp_path_factory.mktemp("mixture")
    make_model("qwen3_moe", num_hidden_layers=2, vocab_size=32).save_pretrained(folder)
    load_tokenizer(POLICY).save_pretrained(folder)
    return folder


def test_the_experts_of_a_token_are_those_that_its_router_chose(mixture: Path):
    model = learner_model(TransformersEngineConfig(), str(mixture), torch.device("cpu"))
    rollouts = [with_top(rollout_of(tiny_prompt(4, row), list(range(2, 4 + row))), [[0]] * (2 + row)) for row in (0, 3)]

    for reading, rollout in zip(learner_scores(model, rollouts, 1.0), rollouts, strict=True):
        ids = [*rollout.prompt.token_ids, *rollout.token_ids.tolist()]
        with torch.no_grad():
            logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
        chosen = torch.stack([layer.topk(2).indices.sort().values for layer in logits], dim=1)
        assert reading.experts.equal(chosen[len(rollout.prompt.token_ids) - 1 : -1])


def test_bfloat16_sends_some_tokens_to_other_experts(mixture: Path):
    pairs = apart({}, {"dtype": "bf16"}, model=str(mixture))
    same, rounded = (pair.numbers.other_experts.value for pair in pairs)
    assert same == 0.0 < rounded < 0.5
    [dense] = apart({}, responses=2)
    assert dense.numbers.other_experts is None and dense.numbers.other_token.value == 0.0


SIDES = [
    INT8,
    {"dtype": "bf16", "attn_implementation": "eager", "quantization": "fp8", "kv_cache_dtype": "fp8"},
]


@pytest.mark.parametrize("side", SIDES)
def test_equal_sides_that_both_read_are_0_everywhere(side):
    [pair] = apart(side, samplers=(side,), reread=True, responses=6)
    numbers = pair.numbers

    assert numbers.max_gap == numbers.gap.value == numbers.gap.error == numbers.k1.value == numbers.k3.value == 0.0
    assert numbers.kl[0].value == numbers.kl[1].value == numbers.variation[1].value == 0.0
    assert set(numbers.quantiles.values()) == {1.0} and numbers.ratio.value == 1.0
    assert numbers.tokens > 20 and numbers.responses == 6 and "equal bit for bit" in pair.verdict


def test_writing_and_reading_with_the_same_weights_is_rounding():
    [pair] = apart({})
    assert 0.0 < pair.numbers.max_gap < 1e-4 and pair.numbers.kl_is_exact
    assert pair.top_log_probs == pair.vocabulary == 32
    assert pair.verdict.endswith("within the 1e-05 that training's own check allows (fp32 on a CPU)")


FP8 = {"quantization": "fp8"}


@pytest.mark.parametrize(
    ("sampler", "learner", "device", "allowed"),
    [
        (FP8, FP8, "cpu", "1e-05"),
        (FP8 | BFLOAT16, FP8 | BFLOAT16, "cpu", "0.02"),
        (FP8, FP8, "cuda", "0.25"),  # attention is not exact there
        (FP8, FP8 | BFLOAT16, "cpu", "0.25"),
        (FP8, FP8 | {"autocast": "bf16"}, "cpu", "0.25"),
        (FP8, FP8 | {"kv_cache_dtype": "fp8"}, "cpu", "0.25"),
        (FP8 | {"attn_implementation": "eager"}, FP8 | {"attn_implementation": "eager"}, "cpu", "0.25"),
        (FP8, {}, "cpu", "0.25"),
    ],
    ids=str,
)
def test_unified_sides_are_held_to_what_training_allows(sampler, learner, device, allowed):
    config = mismatch_config(POLICY, [[sampler]], [[learner]], [])
    sentence = verdict(config.samplers[0], config.learners[0], device, Sampling(), 1e-7)
    assert f"within the {allowed} that training's own check allows" in sentence


def test_the_coarser_the_sampler_the_larger_every_number():
    pairs = apart({}, samplers=({}, BFLOAT16, INT8), responses=16)

    assert [pair.name for pair in pairs] == ["transformers fp32", "transformers bf16", "transformers fp32 int8_w8a8"]

    for read_off in (
        lambda numbers: numbers.gap.value,
        lambda numbers: numbers.response_max_gap.value,
        lambda numbers: numbers.k3.value,
        lambda numbers: numbers.kl[0].value,
        lambda numbers: numbers.variation[0].value,
        lambda numbers: numbers.quantiles["0.99"],
    ):
        fp32, bf16, int8 = (read_off(pair.numbers) for pair in pairs)
        assert fp32 < bf16 < int8


def test_the_estimates_agree_with_the_exact_divergence():
    [pair] = apart({"path": "starter:rollout_model"}, responses=64)
    numbers = pair.numbers
    exact = numbers.kl[0].value

    assert exact > 0.05 and "between two models" in pair.verdict

    for estimate in (numbers.k1, numbers.k3):
        assert abs(estimate.value - exact) < 4.0 * estimate.error

    assert abs(numbers.ratio.value - 1.0) < 4.0 * numbers.ratio.error


def test_other_temperatures_and_weights_are_large_gaps(tmp_path: Path):
    stale = AutoModelForCausalLM.from_pretrained(starter_path("policy"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in stale.parameters():
            parameter.mul_(1.0 + 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    stale.save_pretrained(tmp_path)
    load_tokenizer(POLICY).save_pretrained(tmp_path)

    right, cold = apart({}, {"temperature": 1.0}, **{"sampling.temperature": 0.5})

    assert right.numbers.gap.value < 1e-6
    assert cold.numbers.gap.value > 0.02 and "training would stop" in cold.verdict
    assert cold.learner == "transformers fp32 temperature 1"

    [old] = apart({"path": str(tmp_path)})
    assert old.numbers.gap.value > 0.02


@pytest.mark.parametrize("filters", [{"sampling.top_k": 3}, {"sampling.top_p": 0.7}])
def test_a_truncated_sampler_is_compared_on_what_it_can_draw(filters):
    near, far = apart({}, {"path": "starter:rollout_model"}, **filters)
    assert near.numbers.max_gap < 1e-5 and near.numbers.kl_is_exact
    assert 0.5 < near.numbers.support.value < 0.999
    assert far.numbers.gap.value > 0.02


def test_a_sampler_that_draws_beyond_the_top_k_is_refused():
    with pytest.raises(EngineError, match="raise top_log_probs"):
        apart({}, **{"sampling.top_k": 6, "top_log_probs": 4})


def test_of_the_top_k_the_divergence_has_bounds():
    learner = {"path": "starter:rollout_model"}
    [exact], [bounded] = apart(learner), apart(learner, top_log_probs=8)

    assert (bounded.top_log_probs, bounded.numbers.kl_is_exact) == (8, False)

    for name in ("kl", "variation"):
        low, high = getattr(bounded.numbers, name)
        assert low.value <= getattr(exact.numbers, name)[0].value <= high.value and low.value < high.value

    assert bounded.numbers.gap == exact.numbers.gap


def test_every_learner_reads_the_same_text_of_every_sampler():
    pairs = apart({}, {"autocast": "bf16"}, samplers=({}, BFLOAT16), responses=4)

    assert [pair.name for pair in pairs] == [
        "transformers fp32 | transformers fp32",
        "transformers fp32 | transformers fp32 autocast bf16",
        "transformers bf16 | transformers fp32",
        "transformers bf16 | transformers fp32 autocast bf16",
    ]

    uids = [[response.uid for response in pair.numbers.each] for pair in pairs]
    assert uids[0] == uids[1] == uids[2] and len(set(uids[0])) == 4
    assert pairs[0].numbers.tokens == pairs[1].numbers.tokens and pairs[2].numbers.tokens == pairs[3].numbers.tokens
    assert gaps(pairs)[0] < 1e-6 < gaps(pairs)[1]
    assert gaps(apart({}, samplers=(BFLOAT16,), responses=4)) == gaps(pairs)[2:3]
    assert gaps(apart({}, samplers=(BFLOAT16,), responses=4, seed=1)) != gaps(pairs)[2:3]


def test_sets_of_problems_take_the_place_of_the_task():
    [pair] = apart({}, benchmarks=["arithmetic", "tool_arithmetic"], responses=11)
    assert [response.uid.split("/")[1] for response in pair.numbers.each] == ["0"] * 6 + ["1"] * 5


def test_a_runs_engine_writes_and_its_policy_reads(finished_run: FinishedRuns, tmp_path: Path):
    finished_run.copy(tmp_path, "iterations=2")
    heads = ("head_dtype=fp32", "engine.head_dtype=fp32")
    written = small_config("sampling.temperature=0.9", *heads, "engine.dtype=bf16", "precision=bf16")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(json.loads(written.model_dump_json())))

    config = mismatch_config(str(tmp_path), [], [[{"dtype": "fp32"}]], [])
    [sampler], [learner] = config.samplers, config.learners

    assert (Path(sampler.path).name, Path(learner.path).name) == ("rollout_model", "policy")
    assert sampler.engine.dtype == "bf16" and learner.autocast == "bf16" and learner.engine.dtype == "fp32"
    assert (config.sampling.temperature, config.sampling.max_new_tokens) == (0.9, 24)

    [same_model] = apart({"path": sampler.path}, model=str(tmp_path))
    both = mismatch_config(str(tmp_path), [], [], [])
    assert [Path(side.path).name for side in both.learners] == ["policy", "rollout_model"]
    assert {side.autocast for side in both.learners} == {"bf16"}

    [other] = apart({}, model=str(tmp_path))
    assert same_model.numbers.gap.value < 0.01 < other.numbers.gap.value
    assert (other.sampler, other.learner) == (
        "rollout_model transformers bf16 head fp32",
        "policy transformers fp32 head fp32 autocast bf16",
    )

    config = mismatch_config(str(finished_run("iterations=2", arm="on_policy")), [], [], [])
    [learner] = config.learners
    assert config.samplers[0].path == learner.path and learner.autocast is None


def test_what_cannot_be_compared_is_refused(tmp_path: Path):
    cases = [
        (dict(samplers=({"dtpye": "bf16"},)), "--sampler: unknown setting .engine.dtpye.; did you mean .engine.dtype"),
        (dict(samplers=({"autocast": "bf16"},)), "autocast"),
        (dict(samplers=({}, {"dtype": "fp32"})), "--sampler is given twice as starter:policy transformers fp32"),
        (dict(reread=True, **{"sampling.top_k": 3}), r"reread.*sampling\.top_k=0"),
        (dict(responses=0), "responses"),
    ]

    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            apart({}, **settings)

    with pytest.raises(ConfigError, match="vllm has a dtype only"):
        apart({"name": "vllm", "autocast": "bf16"})

    with pytest.raises(DataError, match="did you mean 'arithmetic'"):
        apart({}, benchmarks=["aritmetic"])

    with pytest.raises(ModelError, match="nowhere"):
        apart({}, model="nowhere")


@pytest.mark.parametrize("is_sampler", [True, False])
def test_rows_that_only_one_side_has_are_not_read(tmp_path: Path, is_sampler: bool):
    rows = save_longer(str(starter_path("policy")), tmp_path)
    longer, shorter = {"path": str(tmp_path)}, {"path": POLICY}
    sampler, other = (longer, shorter) if is_sampler else (shorter, longer)
    [pair] = apart(other, samplers=(sampler,))
    assert pair.vocabulary == rows and pair.numbers.max_gap < 1e-5

    server = {"path": str(tmp_path), "name": "vllm_server", "urls": ["http://127.0.0.1:9"], "weights_folder": "w"}
    with pytest.raises(ModelError, match=rf"vllm_server reads all {rows + 7} rows .* another side has {rows}"):
        apart(server, samplers=(shorter,))


def test_sides_are_told_apart_by_their_names():
    servers = VLLMServerEngineConfig(urls=("http://127.0.0.1:8000",), weights_folder="w", dtype="bf16")
    named = [
        LearnerConfig(path="m"),
        LearnerConfig(path="m", engine=TransformersEngineConfig(attn_implementation="eager", kv_cache_dtype="fp8")),
        LearnerConfig(path="m", engine=TransformersEngineConfig(dtype="bf16", quantization="fp8"), autocast="bf16"),
        LearnerConfig(path="m", engine=servers, temperature=0.5),
    ]

    assert [side_name(side) for side in named] == [
        "m transformers fp32",
        "m transformers fp32 eager kv fp8",
        "m transformers bf16 fp8 autocast bf16",
        "m vllm_server bf16 http://127.0.0.1:8000 temperature 0.5",
    ]
