"""Tests that every engine passes. A test module subclasses `EngineConformance`, or a part of it, and makes its engine;
the fixtures are in conftest.py.

Expectations come from `reference.py`: another copy of the model, one unpadded sequence at a time, then float64.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from helpers.engines.joint_run import check_joint_run
from helpers.engines.reference import (
    CONTEXT,
    EOS,
    VOCAB_SIZE,
    Reference,
    rollout_of,
    tiny_prompt,
    tiny_request,
)
from jackpot.config.sampling import Sampling
from jackpot.core.digest import weights_digest
from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout, Version
from jackpot.rollout.engines.base import Engine, Request

OLD, NEW = Version(3, 7), Version(4, 9)  # of the weights that an engine starts with, and of others
SAMPLINGS = [
    Sampling(max_new_tokens=10, **settings)
    for settings in (
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.8},
        {"top_k": 5},
        {"temperature": 0.9, "top_k": 8, "top_p": 0.9},
        {"top_k": 1},
        {"top_p": 0.01},
    )
]
PROMPT_LENGTHS = (1, 5, 34)
ONE_PROMPT = tiny_prompt(4, seed=1)


def _name_of(sampling: Sampling) -> str:
    return f"t={sampling.temperature},p={sampling.top_p},k={sampling.top_k}"


class Conformance(ABC):
    """The part about weights. Tests share one engine, and each leaves it with the old weights and nothing in flight."""

    reference_dtype: torch.dtype = torch.float32
    tolerance: float = 2e-5  # nats, between the engine's log-probs and the reference's
    moved_supports: float = 0.0  # share of tokens where rounding may move the edge of a truncated distribution
    moved_responses: float = 0.0  # share of responses that rounding may change with their batch
    reserved: int = 0  # tokens at the end of the context that the engine does not use
    has_filters: bool = True  # False where requests with top-p or top-k are refused

    training_gap: float | None = None  # in probability, of a token in the engine and in training; None: the tolerance

    @classmethod
    def make_reference(cls, folder: Path) -> Reference:
        return Reference(folder, cls.reference_dtype)

    @staticmethod
    @abstractmethod
    def make_engine(folder: Path, version: Version) -> Engine:
        """Make an engine on the model in `folder`, whose first tokens carry `version`."""

    # Weights

    def test_new_weights_change_the_distribution_and_the_version(self, engine, reference, new_reference):
        requests = [tiny_request(f"{i}", 2 + i, seed=i) for i in range(8)]
        old_rollouts = engine.generate(requests)

        with sent(engine, new_reference, reference) as digest:
            assert digest == weights_digest(new_reference.model.named_parameters(), engine.capabilities.dtype)
            assert engine.version == NEW
            new_rollouts = engine.generate(requests)
            self.check_log_probs(new_rollouts, new_reference, requests[0].sampling)
            score = engine.score(old_rollouts, 1.0)[0]
            expected_score = _token_log_probs(new_reference, old_rollouts[0], Sampling())
            assert score.numpy() == pytest.approx(expected_score, abs=self.tolerance)

        _check_fields(old_rollouts[0], OLD, num_top_log_probs=20)
        _check_fields(new_rollouts[0], NEW, num_top_log_probs=20)
        assert _share_that_differs(old_rollouts, engine.generate(requests)) <= self.moved_responses  # old weights again

    def test_weights_are_cast_to_the_dtype_of_the_engine(self, engine, reference, new_reference):
        float64_weights = [
            (name, tensor.double() * (1 + 1e-12)) for name, tensor in new_reference.model.named_parameters()
        ]

        try:
            digest = engine.update_weights(iter(float64_weights), NEW)
            assert digest == weights_digest(float64_weights, engine.capabilities.dtype)
        finally:
            engine.update_weights(reference.model.named_parameters(), OLD)

    @pytest.mark.parametrize("damage", ["missing", "unknown", "shape"])
    def test_weights_that_do_not_fit_leave_the_old_ones(self, engine, reference, new_reference, damage):
        weights = dict(new_reference.model.named_parameters())
        name, tensor = list(weights.items())[-1]
        del weights[name]
        if damage != "missing":
            weights |= {"unknown.weight": tensor, name: tensor} if damage == "unknown" else {name: tensor[:-1]}

        with pytest.raises(EngineError, match="unknown.weight" if damage == "unknown" else name):
            engine.update_weights(weights.items(), NEW)

        requests = [tiny_request(f"{i}", seed=i) for i in range(4)]
        rollouts = engine.generate(requests)
        _check_fields(rollouts[0], OLD, num_top_log_probs=20)
        self.check_log_probs(rollouts, reference, requests[0].sampling)

    def test_weights_are_refused_while_rollouts_are_in_flight(self, engine, reference, new_reference):
        engine.submit([tiny_request(f"{i}", seed=i) for i in range(4)])
        engine.collect(1)

        with pytest.raises(EngineError, match="in flight"):
            engine.update_weights(new_reference.model.named_parameters(), NEW)

        remaining_rollouts = engine.collect(3)
        _check_fields(remaining_rollouts[0], OLD, num_top_log_probs=20)
        self.check_log_probs(remaining_rollouts, reference, tiny_request("").sampling)

    # Shared checks

    def check_log_probs(self, rollouts: list[Rollout], reference: Reference, sampling: Sampling) -> None:
        """Compare sampled and top log-probs of every token with the reference on the same prefix."""
        is_moved = np.concatenate([self._moved_tokens(rollout, reference, sampling) for rollout in rollouts])
        assert len(is_moved)
        assert is_moved.mean() <= self.moved_supports

    def _moved_tokens(self, rollout: Rollout, reference: Reference, sampling: Sampling) -> np.ndarray:
        """Compare all tokens with their distributions; True [T] where the support is another one: not compared."""
        tokens = rollout.token_ids
        ids, values = rollout.top_ids.numpy(), rollout.top_log_probs.double().numpy()
        assert ids.shape == values.shape == (len(tokens), min(sampling.num_top_log_probs, VOCAB_SIZE))
        assert (np.diff(np.sort(ids)) > 0).all()  # no id twice
        assert (values[:, :-1] >= values[:, 1:]).all()  # the most probable first

        exact = reference.log_probs(rollout.prompt, tokens.tolist(), sampling)[:-1]
        highest = -np.sort(-exact)[:, : ids.shape[1]]
        listed = np.take_along_axis(exact, ids, axis=1)
        sampled = exact[np.arange(len(tokens)), tokens]

        finite = np.isfinite(values)
        is_same = (finite == np.isfinite(highest)).all(1) & (finite == np.isfinite(listed)).all(1)
        compared = finite & is_same[:, None]
        assert np.allclose(values[compared], highest[compared], rtol=0.0, atol=self.tolerance)
        assert np.allclose(values[compared], listed[compared], rtol=0.0, atol=self.tolerance)
        is_same &= np.isfinite(sampled)
        log_probs = rollout.rollout_log_probs.double().numpy()
        assert np.allclose(log_probs[is_same], sampled[is_same], rtol=0.0, atol=self.tolerance)
        return ~is_same


class QueueConformance(Conformance):
    """The part about queues."""

    # Queueing

    def test_each_rollout_comes_once_and_completely(self, engine):
        requests = [tiny_request(f"{i}", 1 + i % 7, seed=i, num_top_log_probs=4) for i in range(30)]

        engine.submit(requests[:20])
        collected = engine.collect(7)
        assert len(collected) == 7
        engine.submit(requests[20:])
        while batch := engine.collect(4):
            assert len(batch) <= 4
            collected += batch

        assert sorted(rollout.uid for rollout in collected) == sorted(request.uid for request in requests)
        prompts = {request.uid: request.prompt for request in requests}
        for rollout in collected:
            assert rollout.prompt == prompts[rollout.uid]
            _check_fields(rollout, OLD, num_top_log_probs=4)

    def test_generate_returns_the_order_of_the_requests(self, engine):
        requests = [tiny_request(f"{i}", seed=i, max_new_tokens=1 + (5 * i) % 13) for i in range(20)]

        assert [rollout.uid for rollout in engine.generate(requests)] == [request.uid for request in requests]

    def test_generate_leaves_other_requests_in_flight(self, engine):
        engine.submit([tiny_request(f"other {i}", seed=i) for i in range(3)])

        assert [rollout.uid for rollout in engine.generate([tiny_request("mine", seed=9)])] == ["mine"]
        assert sorted(rollout.uid for rollout in engine.collect(5)) == ["other 0", "other 1", "other 2"]

    def test_collect_returns_when_nothing_is_in_flight(self, engine):
        assert engine.collect(5) == []
        assert engine.collect(0) == []

        engine.submit([tiny_request("only")])
        assert [rollout.uid for rollout in engine.collect(5)] == ["only"]

    def test_collect_returns_when_the_time_is_up_and_loses_nothing(self, engine):
        requests = [tiny_request(f"{i}", seed=i, max_new_tokens=16) for i in range(100)]
        engine.submit(requests)

        early_rollouts = engine.collect(100, timeout=0.0)
        assert len(early_rollouts) < 100

        rollouts = early_rollouts + engine.collect(100)
        assert sorted(rollout.uid for rollout in rollouts) == sorted(request.uid for request in requests)

    def test_a_uid_in_flight_is_refused(self, engine):
        with pytest.raises(EngineError, match="twin"):
            engine.submit([tiny_request("twin"), tiny_request("twin")])

        engine.submit([tiny_request("twin")])
        with pytest.raises(EngineError, match="twin"):
            engine.submit([tiny_request("other"), tiny_request("twin")])

        assert [rollout.uid for rollout in engine.collect(5)] == ["twin"]
        assert [rollout.uid for rollout in engine.generate([tiny_request("twin")])] == ["twin"]

    @pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 9, 0])
    def test_a_prompt_without_room_is_refused_with_its_whole_call(self, engine, length):
        with pytest.raises(EngineError, match="unfit"):
            engine.submit([tiny_request("fine"), tiny_request("unfit", length)])

        assert engine.collect(2) == []

    def test_more_top_log_probs_than_the_engine_returns_are_refused(self, engine):
        request = tiny_request("greedy", num_top_log_probs=engine.capabilities.num_top_log_probs + 1)

        with pytest.raises(EngineError, match="greedy"):
            engine.submit([request])

        assert engine.collect(1) == []

    # The end

    def test_a_closed_engine_refuses_everything(self, folder, reference):
        engine = self.make_engine(folder, OLD)
        engine.submit([tiny_request("unfinished")])

        engine.close()
        engine.close()  # once more does nothing

        calls = [
            lambda: engine.submit([tiny_request("late")]),
            lambda: engine.collect(1),
            lambda: engine.generate([tiny_request("late")]),
            lambda: engine.score([rollout_of(ONE_PROMPT, [2, 3])], 1.0),
            lambda: engine.update_weights(reference.model.named_parameters(), NEW),
        ]
        for call in calls:
            with pytest.raises(EngineError, match="closed"):
                call()


class LogProbConformance(Conformance):
    """The part about log-probs."""

    def test_log_probs_equal_a_full_forward_whatever_is_beside(self, engine, reference):
        """Requests of all settings and of several lengths are in flight at once."""
        samplings = [sampling for sampling in SAMPLINGS if self.has_filters or not sampling.truncated]
        requests = [
            Request(uid=f"{length} {i}", prompt=tiny_prompt(length), seed=length, sampling=sampling)
            for length in PROMPT_LENGTHS
            for i, sampling in enumerate(samplings)
        ]

        rollouts = engine.generate(requests)

        is_moved = [
            self._moved_tokens(rollout, reference, request.sampling)
            for request, rollout in zip(requests, rollouts, strict=True)
        ]
        assert np.concatenate(is_moved).mean() <= self.moved_supports

    @pytest.mark.parametrize("num_top_log_probs", [0, 1, 3])
    def test_top_log_probs_do_not_depend_on_the_sampled_token(self, engine, reference, num_top_log_probs):
        requests = [tiny_request(f"{i}", seed=i, num_top_log_probs=num_top_log_probs) for i in range(12)]

        rollouts = engine.generate(requests)

        self.check_log_probs(rollouts, reference, requests[0].sampling)
        has_sampled_token = torch.cat([(rollout.top_ids == rollout.token_ids[:, None]).any(1) for rollout in rollouts])
        assert not has_sampled_token.all()

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_scores_equal_a_full_forward(self, engine, reference, temperature):
        responses = [tiny_prompt(length, seed=2) for length in (1, 2, 9, 30)]  # tokens that the engine did not generate
        rollouts = [rollout_of(tiny_prompt(3 + i), reply.token_ids) for i, reply in enumerate(responses)]

        scores = engine.score(rollouts, temperature)

        for rollout, score in zip(rollouts, scores, strict=True):
            expected_score = _token_log_probs(reference, rollout, Sampling(temperature=temperature))
            assert score.dtype == torch.float32
            assert score.numpy() == pytest.approx(expected_score, abs=self.tolerance)

    def test_scores_are_not_truncated_and_agree_with_sampling(self, engine, reference):
        filters = [{}, {"top_k": 5}, {"top_p": 0.8}] if self.has_filters else [{}]
        requests = [
            tiny_request(f"{i}", 3 + i, seed=i, temperature=0.8, **filters[i % len(filters)]) for i in range(12)
        ]
        rollouts = engine.generate(requests)

        scores = engine.score(rollouts, 0.8)

        for request, rollout, score in zip(requests, rollouts, scores, strict=True):
            log_probs = rollout.rollout_log_probs.numpy()
            if request.sampling.truncated:
                assert (score.numpy() < log_probs).all()  # which are relative to the tokens that the filter leaves
                log_probs = _token_log_probs(reference, rollout, Sampling(temperature=0.8))
            assert score.numpy() == pytest.approx(log_probs, abs=self.tolerance)


class NumberConformance(LogProbConformance):
    """The part about log-probs, draws, seeds and ends of responses."""

    # Seeds and batches

    @pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_k=10, top_p=0.9)], ids=_name_of)
    def test_sampled_frequencies_match_the_exact_distribution(self, engine, reference, sampling):
        """The test counts both tokens of 2000 responses, so that a uniform used twice shows."""
        if sampling.truncated and not self.has_filters:
            pytest.skip("the engine refuses top-p and top-k")
        sampling = sampling.model_copy(update={"max_new_tokens": 2, "num_top_log_probs": 0})
        requests = [Request(uid=f"{i}", prompt=ONE_PROMPT, seed=i, sampling=sampling) for i in range(2000)]

        counts = Counter(tuple(rollout.token_ids.tolist()) for rollout in engine.generate(requests))

        exact = reference.joint_probs(ONE_PROMPT, sampling)
        if self.moved_supports == 0.0:
            assert all(exact[response] > 0.0 for response in counts)

        # a cell for each response that is expected five times, and one for all others
        common = [response for response, prob in exact.items() if prob * len(requests) >= 5.0]
        observed = [counts[response] for response in common]
        expected = [exact[response] * len(requests) for response in common]
        observed.append(len(requests) - sum(observed))
        expected.append(len(requests) - sum(expected))
        if expected[-1] < 5.0:  # too few others for a cell of their own
            observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
        assert len(common) > 20
        assert chisquare(observed, expected).pvalue > 1e-3

    def test_a_seed_gives_one_response_and_another_seed_another(self, engine):
        first_rollouts, same_seed_rollouts, other_seed_rollouts = (
            engine.generate([tiny_request(f"{i}", seed=i + shift) for i in range(16)]) for shift in (0, 0, 100)
        )

        assert _share_that_differs(first_rollouts, same_seed_rollouts) <= self.moved_responses
        assert _share_that_differs(first_rollouts, other_seed_rollouts) > 0.9

    def test_a_response_does_not_depend_on_its_batch(self, engine):
        requests = [tiny_request(f"{i}", 1 + 3 * i, seed=i, max_new_tokens=16) for i in range(12)]

        single_rollouts = [engine.generate([request])[0] for request in requests]
        batch_rollouts = engine.generate(requests)
        reversed_batch_rollouts = engine.generate(list(reversed(requests)))

        assert _share_that_differs(single_rollouts, batch_rollouts) <= self.moved_responses
        assert _share_that_differs(single_rollouts, list(reversed(reversed_batch_rollouts))) <= self.moved_responses

    def test_seeds_use_all_64_bits(self, engine):
        requests = [tiny_request(f"{seed}", seed=seed) for seed in (0, 2**31, 2**32, 2**63, 2**64 - 1)]

        rollouts = engine.generate(requests)

        assert len({tuple(rollout.token_ids.tolist()) for rollout in rollouts}) == len(requests)

    # Where responses end

    def test_a_response_ends_at_its_first_stop_token_or_at_its_limit(self, engine):
        stops = (5, 6)
        requests = [
            tiny_request(f"{i}", seed=i, max_new_tokens=3 + i % 9, stop_token_ids=stops if i % 2 else ())
            for i in range(60)
        ]

        rollouts = engine.generate(requests)

        counts = Counter()  # of (finish, whether the last token is EOS, whether it is a stop token)
        for request, rollout in zip(requests, rollouts, strict=True):
            tokens, limit = rollout.token_ids.tolist(), request.sampling.max_new_tokens
            end_tokens = {EOS, *request.sampling.stop_token_ids}
            assert not end_tokens & set(tokens[:-1])
            assert rollout.finish == ("stop" if tokens[-1] in end_tokens else "length")
            assert len(tokens) == limit if rollout.finish == "length" else len(tokens) <= limit
            counts[rollout.finish, tokens[-1] == EOS, tokens[-1] in stops] += 1
        assert counts["stop", True, False] > 0
        assert counts["stop", False, True] > 0
        assert counts["length", False, False] > 0

    def test_end_of_sequence_as_the_first_token_is_a_response(self, engine, reference):
        requests = [tiny_request(f"{i}", prompt=ONE_PROMPT, seed=i) for i in range(200)]

        empty_responses = [rollout for rollout in engine.generate(requests) if rollout.token_ids[0] == EOS]

        assert empty_responses
        assert all(rollout.finish == "stop" for rollout in empty_responses)
        assert all(len(rollout.token_ids) == 1 for rollout in empty_responses)
        self.check_log_probs(empty_responses, reference, requests[0].sampling)

    @pytest.mark.parametrize("room", [1, 3])
    def test_a_response_ends_where_the_context_does(self, engine, reference, room):
        requests = [tiny_request(f"{i}", CONTEXT - self.reserved - room, seed=i, max_new_tokens=50) for i in range(20)]

        rollouts = engine.generate(requests)

        assert engine.capabilities.max_model_len == CONTEXT - self.reserved
        assert {len(rollout.token_ids) for rollout in rollouts if rollout.finish == "length"} == {room}
        assert all(len(rollout.token_ids) <= room for rollout in rollouts)
        self.check_log_probs(rollouts, reference, requests[0].sampling)


class RunConformance(Conformance):
    """The part about training, which is the purpose.

    First among the bases of a class, so that its tests are the last: they make engines of their own.
    """

    def test_a_joint_training_run_goes_through_the_engine(self, folder, new_folder):
        check_joint_run(
            self.make_engine, policy=new_folder, rollout_model=folder, gap=self.training_gap or self.tolerance
        )


class EngineConformance(RunConformance, QueueConformance, NumberConformance):
    """All tests of the suite."""


@contextmanager
def sent(engine: Engine, new: Reference, old: Reference) -> Iterator[str]:
    """Send the new weights to the engine, and the old ones again afterwards."""
    try:
        yield engine.update_weights(new.model.named_parameters(), NEW)
    finally:
        engine.update_weights(old.model.named_parameters(), OLD)


def _token_log_probs(reference: Reference, rollout: Rollout, sampling: Sampling) -> np.ndarray:
    """Return the reference's log-probs of the response tokens, [T]."""
    tokens = rollout.token_ids.tolist()
    return reference.log_probs(rollout.prompt, tokens, sampling)[np.arange(len(tokens)), tokens]


def _share_that_differs(rollouts: list[Rollout], others: list[Rollout]) -> float:
    """Return the share of responses that differ."""
    return float(np.mean([not torch.equal(a.token_ids, b.token_ids) for a, b in zip(rollouts, others, strict=True)]))


def _check_fields(rollout: Rollout, version: Version, num_top_log_probs: int) -> None:
    """Check shape, dtype and device of every tensor, and the version of every token."""
    length = len(rollout.token_ids)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "token_ids": ((length,), torch.int64),
        "rollout_log_probs": ((length,), torch.float32),
        "sampled_mask": ((length,), torch.bool),
        "top_ids": ((length, num_top_log_probs), torch.int64),
        "top_log_probs": ((length, num_top_log_probs), torch.float32),
        "versions": ((length, 2), torch.int64),
    }
    for name, (shape, dtype) in shapes.items():
        tensor: Tensor = getattr(rollout, name)
        assert (tuple(tensor.shape), tensor.dtype, tensor.device.type) == (shape, dtype, "cpu"), name
        assert not tensor.is_inference(), name
        assert not tensor.requires_grad, name
    assert rollout.sampled_mask.all()
    assert rollout.versions.tolist() == [list(version)] * length
