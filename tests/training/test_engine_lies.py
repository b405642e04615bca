"""Lies and honest oddities of a server: a real tiny model behind vLLM's protocol, our client, and a real learner.

Each lie is named within the tokens beside it, about twice the most that it took with seeds 1 to 3 (here it is seed 0).
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from helpers.engines.model_server import Choice, Lie, ModelServer, Step, honest
from helpers.engines.reference import EOS, VOCAB_SIZE, tiny_model
from helpers.learners import batches, make_learner, scored
from helpers.runs import small_config
from jackpot.config.config import OptimizerConfig
from jackpot.config.engines import VLLMServerEngineConfig
from jackpot.core.errors import JackpotError
from jackpot.core.types import Prompt, Version
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.vllm.server_engine import VLLMServerEngine
from jackpot.training.components import send_weights
from jackpot.training.guards import EngineCheck

AT_ONCE = 2_000  # tokens, less than two batches: such lies are named in the first one
GROUP, TOP, LONGEST = 4, 8, 20
# Of the run, where a lie needs it to be one, or not to be seen by the quick checks of 16 tokens of 16 responses.
SETTINGS: dict[str, dict[str, Any]] = {
    "raw log-probs": {"sampling": {"temperature": 0.7}},
    "wrong after the 16th token": {"prompts": 64},
    "sharper after the 16th token": {"prompts": 64},
}


class Run:
    """A run as the trainer's, of a learner and a server: generate, check, train, check, send weights."""

    def __init__(
        self,
        folder: Path,
        server: ModelServer,
        seed: int = 0,
        prompts: int = 16,
        learning_rate: float = 3e-4,
        **changes: Any,
    ) -> None:
        settings = {"temperature": 1.0, "max_new_tokens": LONGEST, "num_top_log_probs": TOP} | changes.pop(
            "sampling", {}
        )
        self.config = small_config(*(f"sampling.{name}={value}" for name, value in settings.items()))
        self.learner = make_learner(
            tiny_model(seed=1),
            tiny_model(seed=0),
            optimizer=OptimizerConfig(learning_rate=learning_rate),
            temperature=settings["temperature"],
            num_top_log_probs=TOP,
            max_length=LONGEST,
            on_support=self.config.sampling.lists_support,
            total_steps=1000,
        )
        server_settings: dict[str, Any] = {"urls": [server.url], "weights_folder": str(folder), "dtype": "fp32"}
        server_settings |= {"max_num_seqs": 64, "max_retries": 1, "connect_timeout": 5.0} | changes
        self.engine = VLLMServerEngine(
            tiny_model(seed=0),
            VLLMServerEngineConfig(**server_settings),
            eos_token_ids=(EOS,),
            version=Version(0, 0),
        )
        self.check = EngineCheck(self.config, self.learner, "rollout_model", lambda iteration, event: None)
        self.tokens, self.seed, self.prompts = 0, seed, prompts

    def iterate(self, number: int, prompts: int = 0, group: int = GROUP, **sampling: Any) -> None:
        """Do iteration `number`."""
        send_weights(self.engine, self.learner.weights("rollout_model"), self.learner.version)
        draw = np.random.default_rng([self.seed, number])
        asked, requests = self.config.sampling.model_copy(update=sampling), []
        for place in range(prompts or self.prompts):
            ids = tuple(draw.integers(2, VOCAB_SIZE, 2 + place % 5).tolist())
            prompt = Prompt(uid=f"{number}/{place}", text="", answer="", token_ids=ids)
            requests += [
                Request(uid=f"{prompt.uid}#{one}", prompt=prompt, seed=int(draw.integers(2**62)), sampling=asked)
                for one in range(group)
            ]

        rollouts = self.engine.generate(requests)
        self.tokens += sum(len(one.token_ids) for one in rollouts)
        self.check.check_batch(self.engine, rollouts, number)
        _, gaps = self.learner.train(batches([scored(one, draw.normal()) for one in rollouts]), trace=False)
        self.check.check_gaps(self.engine, rollouts, gaps, number)


def tokens_until_named(lie: Lie, why: str, limit: int, folder: Path, seed: int = 0, **changes: Any) -> int:
    """The tokens that a server with the lie has generated when an error names it."""
    with closing(ModelServer(lie)) as server, closing((run := Run(folder, server, seed, **changes)).engine):
        with pytest.raises(JackpotError, match=why):
            for number in range(1, 1000):
                run.iterate(number)
                assert run.tokens < limit, f"not named in {run.tokens} tokens"
        assert run.tokens <= limit
        return run.tokens


def reporting(**changes: float):
    """Samples by changed settings, and reports what it was asked for."""
    return lambda step: (step.log_probs(**changes), step.log_probs())


def biased(step: Step, bias: float = 0.5, token: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return step.log_probs(step.logits + bias * (torch.arange(VOCAB_SIZE) == token)), step.log_probs()


def repeating(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """A repetition penalty of 1.3, as servers apply it to what the response has already."""
    logits = step.logits
    there = torch.zeros_like(logits).scatter(1, step.drawn, 1.0) > 0.0
    return step.log_probs(
        torch.where(there, torch.where(logits > 0, logits / 1.3, logits * 1.3), logits)
    ), step.log_probs()


def late(step: Step, sampled: torch.Tensor, reported: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lies from the fourth batch on, after the 16th token."""
    is_late = step.batch >= 4 and step.drawn.shape[1] >= 16
    return (sampled, reported) if is_late else honest(step)


def sharper(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    sharp = step.log_probs(temperature=0.8)
    return late(step, sharp, sharp)


def wrong(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a token are 2 % off."""
    return late(step, step.log_probs(), step.log_probs() * 1.02)


def shifted():
    """Reports every token's log-prob, and the list, of the token before: those of the model one token earlier."""
    before: list[torch.Tensor] = []

    def draw(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        before[step.drawn.shape[1] :] = [step.log_probs()]
        return before[-1], before[max(0, len(before) - 2)]

    return draw


def cached():
    """A cache of answers: the first one to each prompt."""
    answers: dict[tuple[int, ...], Choice] = {}
    return lambda choices: [answers.setdefault(tuple(one["prompt_token_ids"]), one) for one in choices]


def each(change):
    """Changes (token ids, log-probs, lists) of every answer, by (name, value) pairs for the rest of it."""

    def answers(choices: list[Choice]) -> list[Choice]:
        return [one | change(one) for one in choices]

    return answers


def log_probs(one: Choice, change) -> Choice:
    """Change every log-prob of an answer."""
    own, tops = one["logprobs"]["token_logprobs"], one["logprobs"]["top_logprobs"]
    return {
        "logprobs": {
            "token_logprobs": [change(value) for value in own],
            "top_logprobs": [{name: change(value) for name, value in top.items()} for top in tops],
        }
    }


def of_another_request(choices: list[Choice]) -> list[Choice]:
    """Each has the log-probs of the next one of its length."""
    lengths: dict[int, list[Choice]] = {}
    for one in choices:
        lengths.setdefault(len(one["token_ids"]), []).append(one)
    others = {id(one): same[place - 1] for same in lengths.values() for place, one in enumerate(same)}
    return [one | {"logprobs": others[id(one)]["logprobs"]} for one in choices]


def without_the_sampled(one: Choice) -> Choice:
    """Lists are of the tokens that were not drawn; the server was asked for one more."""
    own, tops = one["logprobs"]["token_logprobs"], one["logprobs"]["top_logprobs"]
    lists = []
    for token, top in zip(one["token_ids"], tops, strict=True):
        others = [(name, value) for name, value in top.items() if name != f"token_id:{token}"]
        lists.append(dict(sorted(others, key=lambda entry: -entry[1])[:TOP]))
    return {"logprobs": {"token_logprobs": own, "top_logprobs": lists}}


def without_the_end(one: Choice) -> Choice:
    """Responses that stopped lack their stop token."""
    end = len(one["token_ids"]) - (one["finish_reason"] == "stop")
    columns = {name: column[:end] for name, column in one["logprobs"].items()}
    return {"token_ids": one["token_ids"][:end], "logprobs": columns}


def stale(weights: dict[str, torch.Tensor], batch: int) -> dict[str, torch.Tensor]:
    return weights if batch < 3 else {}


def of_another_model(weights: dict[str, torch.Tensor], batch: int) -> dict[str, torch.Tensor]:
    return tiny_model(seed=2).state_dict()


def in_int8(weights: dict[str, torch.Tensor], batch: int) -> dict[str, torch.Tensor]:
    scales = {
        name: one.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127 for name, one in weights.items() if one.dim() > 1
    }
    return weights | {name: (weights[name] / scale).round() * scale for name, scale in scales.items()}


OTHERWISE = r"reports one distribution and samples from another"
EQUAL = r"equal far more often .*one seed"
NOT_THOSE = r"log-probs are not those of the distribution"
MOVED = r"moved away from training's: at the tokens 16 to 31 "

# lie, what its error says, and within how many tokens it comes
LIES: dict[str, tuple[Lie, str, int]] = {
    "one seed for all": (Lie(request=lambda body: body | {"seed": 1}), EQUAL, AT_ONCE),
    "cached answers": (Lie(answers=cached()), EQUAL, AT_ONCE),
    "temperature 1.1": (Lie(draw=reporting(temperature=1.1)), OTHERWISE, 17_000),
    "temperature 0.9": (Lie(draw=reporting(temperature=0.9)), OTHERWISE, 14_000),
    "top-p unreported": (Lie(draw=reporting(top_p=0.9)), OTHERWISE, 12_000),
    "top-k unreported": (Lie(draw=reporting(top_k=4)), OTHERWISE, AT_ONCE),
    "a bias on one token": (Lie(draw=biased), r"the token 5 is drawn more often", 22_000),
    "a penalty for repetition": (Lie(draw=repeating), OTHERWISE, 12_000),
    "greedy": (Lie(draw=reporting(top_k=1)), OTHERWISE, AT_ONCE),
    "raw log-probs": (Lie(draw=lambda step: (step.log_probs(), step.log_probs(temperature=1.0))), NOT_THOSE, AT_ONCE),
    "stale weights": (Lie(load=stale), NOT_THOSE, 6_000),
    "another model's weights": (Lie(load=of_another_model), NOT_THOSE, AT_ONCE),
    "INT8 weights unsaid": (Lie(load=in_int8), NOT_THOSE, AT_ONCE),
    "another version": (
        Lie(tag=lambda tag, batch: tag if batch < 3 else "jackpot-another-3"),
        "another run updates",
        6_000,
    ),
    "log-probs shifted": (Lie(draw=shifted()), NOT_THOSE, AT_ONCE),
    "log-probs of another": (Lie(answers=of_another_request), NOT_THOSE + r"|two log-probs|9 top log-probs", AT_ONCE),
    "probabilities": (Lie(answers=each(lambda one: log_probs(one, np.exp))), r"not log-probs", AT_ONCE),
    "base 2": (Lie(answers=each(lambda one: log_probs(one, lambda value: value / np.log(2.0)))), NOT_THOSE, AT_ONCE),
    "mass above 1": (
        Lie(answers=each(lambda one: log_probs(one, lambda value: min(value + 0.5, 0.0)))),
        "sum to",
        AT_ONCE,
    ),
    "lists without the token": (
        Lie(request=lambda body: body | {"logprobs": TOP + 1}, answers=each(without_the_sampled)),
        OTHERWISE,
        AT_ONCE,
    ),
    "unknown ids": (
        Lie(answers=each(lambda one: {"token_ids": [99, *one["token_ids"][1:]]})),
        "another vocabulary",
        AT_ONCE,
    ),
    "prompt cut on the left": (Lie(request=lambda body: body | {"prompt": body["prompt"][1:]}), NOT_THOSE, AT_ONCE),
    "stop token dropped": (
        Lie(answers=each(without_the_end)),
        "which is not a stop token|after 0 tokens",
        AT_ONCE,
    ),
    "wrong after the 16th token": (Lie(draw=wrong), MOVED, 24_000),
    "sharper after the 16th token": (Lie(draw=sharper), MOVED, 24_000),
}

QUICK = (
    "one seed for all",
    "raw log-probs",
    "log-probs of another",
    "probabilities",
    "unknown ids",
    "stop token dropped",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in LIES])
def test_each_lie_is_named_in_time(name: str, tmp_path: Path) -> None:
    lie, why, limit = LIES[name]
    tokens_until_named(lie, why, limit, tmp_path, **SETTINGS.get(name, {}))


class Oddity(NamedTuple):
    """Says what is unusual about an honest server, a run, or its iterations; `restarts` before every second one."""

    server: Mapping[str, Any] = MappingProxyType({})
    run: Mapping[str, Any] = MappingProxyType({})
    iteration: Callable[[int], dict[str, Any]] = lambda number: {}
    restarts: bool = False


ODDITIES = {
    "another kernel": Oddity(),
    "bf16": Oddity({"dtype": torch.bfloat16}, {"dtype": "bf16"}),
    "bf16, weights that move fast": Oddity({"dtype": torch.bfloat16}, {"dtype": "bf16", "learning_rate": 1e-2}),
    "INT8 weights": Oddity({}, {"quantization": "int8_w8a16"}),
    "INT8 weights that move fast": Oddity({}, {"quantization": "int8_w8a16", "learning_rate": 1e-2}),
    "restarts": Oddity(restarts=True),
    "decoded three at a time": Oddity({"most": 3}, {"prompts": 6}),
    "one-token responses": Oddity(iteration=lambda number: {"max_new_tokens": 1 + 19 * (number % 2)}),
    "responses that grow": Oddity(iteration=lambda number: {"max_new_tokens": 7 * number}),
    "all batch sizes": Oddity(iteration=lambda number: {"prompts": 1 + 5 * number % 16, "group": 1 + number}),
    "top-k": Oddity({}, {"sampling": {"top_k": 6}}),
    "top-p": Oddity({}, {"sampling": {"top_p": 0.8}}),
    "nearly greedy": Oddity({}, {"sampling": {"temperature": 0.15}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODDITIES)
def test_honest_oddities_are_never_refused(name: str, tmp_path: Path) -> None:
    oddity = ODDITIES[name]

    with (
        closing(ModelServer(Lie(), **oddity.server)) as server,
        closing((run := Run(tmp_path, server, **oddity.run)).engine),
    ):
        for number in range(1, 8):
            if oddity.restarts and number % 2:
                server.restart()
            run.iterate(number, **oddity.iteration(number))

    assert run.check._gap_evidence._batches == (0 if name == "top-p" else 7)
    assert run.check._gap_evidence._bets.share < 0.1
