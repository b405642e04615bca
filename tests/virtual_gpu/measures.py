"""How often the host waits for the virtual GPU in what a run does over and over, by the names of waits.yaml."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu_parts import check
from gpu_parts.models import (
    TINY_VOCABULARY,
    learner_of,
    make_config,
    make_engine,
    make_model,
    make_requests,
    random_samples,
)

from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.types import Version
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.training.batching import micro_batches, plain_batches
from jackpot.training.joint_learner import JointLearner
from virtual_gpu.cuda import waits

CUDA, TOKENS = torch.device("cuda"), 64
BATCHES = {1: 10_000, 3: 150}  # tokens of a micro-batch, by the number of micro-batches that they give
SAMPLES = random_samples(TINY_VOCABULARY, prompts=2, group=4, prompt_length=9, longest=24, shortest=5)


def counts() -> dict[str, float]:
    """Return the waits of everything that is measured."""
    return {name: round(count, 2) for counting in (_updates, _decoding, _weights) for name, count in counting()}


def _count(work: Callable[[], object]) -> int:
    waits.take()
    work()
    return waits.take().total()


def _learner(models: int = 2, precision: str = "fp32", **correction: Any) -> JointLearner:
    options: dict[str, Any] = {"head_kernel": "eager"}  # Triton's interpreter would take minutes
    if correction:
        options["objective"] = {"correction": {"name": "obrs", **correction}}
    return learner_of(make_config(precision, models, options), check.on_device(CUDA, models))


def _updates() -> Iterator[tuple[str, float]]:
    budget = {"budget": 0.9, "normalizer": "exact"}
    for name, tokens, trace, options in (
        ("update, one micro-batch", BATCHES[1], False, {}),
        ("update", BATCHES[3], False, {}),
        ("update, with a trace", BATCHES[3], True, {}),
        ("update, one model", BATCHES[3], False, {"models": 1}),
        ("update, bf16", BATCHES[3], False, {"precision": "bf16"}),
        ("update, kappa prepass", BATCHES[3], False, {"kappa": "prepass"}),
        ("update, c1 1.05", BATCHES[3], False, {"c1": 1.05}),
        ("update, budget", BATCHES[3], False, budget),
        ("update, tis", BATCHES[3], False, {"name": "tis"}),
        ("update, dppo topk", BATCHES[3], False, {"name": "dppo", "divergence": "topk"}),
    ):
        learner = _learner(**options)
        for is_counted in [True] if options is budget else [False, True]:  # exact Z is of the weights that generated
            [step] = learner.compute_old_log_probs([micro_batches(SAMPLES, tokens, seed=0, epoch=0)])
            count = _count(partial(learner.update, step, trace=trace))
            if is_counted:
                yield name, count

    learner = _learner()
    steps = [micro_batches(SAMPLES, BATCHES[3], seed=0, epoch=0)]
    yield "prepass of old log-probs", _count(partial(learner.compute_old_log_probs, steps))
    score_batches = plain_batches([sample.rollout for sample in SAMPLES], BATCHES[1], seed=0)
    sampling = make_requests(1, 12, 9, TINY_VOCABULARY)[0].sampling
    yield "score of a micro-batch", _count(partial(learner.score, "policy", score_batches, sampling))


def _decoding() -> Iterator[tuple[str, float]]:
    requests = make_requests(8, TOKENS, 9, TINY_VOCABULARY)
    for name, is_eager in (("decoded token", False), ("decoded token, enforce_eager", True)):
        engine = make_engine(make_model("Qwen3 0.6B", CUDA, tiny=True), rows=8, enforce_eager=is_eager)
        yield name, _count(partial(engine.generate, requests)) / TOKENS

    settings = TransformersEngineConfig(max_num_seqs=8, draft={"tokens": 4})

    def engine_of(name: str, **options: Any) -> TransformersEngine:
        model = make_model(name, CUDA, tiny=True)
        return TransformersEngine(model, settings, eos_token_ids=[], version=Version(0, 0), **options)

    drafting = engine_of("Qwen3 1.7B", drafter=engine_of("Qwen3 0.6B"))
    count = _count(partial(drafting.generate, requests))
    yield "pass of drafts", count / drafting.take_draft_counts().passes


def _weights() -> Iterator[tuple[str, float]]:
    learner = _learner(1)
    engine = make_engine(make_model("Qwen3 1.7B", CUDA, tiny=True, dtype=torch.bfloat16), rows=8, dtype="bf16")
    tensors = len(list(learner.weights("policy")))
    count = _count(lambda: engine.update_weights(learner.weights("policy"), Version(1, 1)))
    yield "tensor of new weights", count / tensors
