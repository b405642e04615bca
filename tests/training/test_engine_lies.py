"""Each lie of a server is named by the checks of a run in time, and no honest oddity is refused.

A real tiny model stands behind vLLM's protocol, with our client and a real learner.

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
GROUP, TOP, LONGEST = 4, 8, 20  # responses to a prompt, entries of a list, tokens of a response
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
        self.tokens = 0  # generated so far
        self.seed, self.prompts = seed, prompts

    def iterate(self, iteration: int, prompts: int = 0, group: int = GROUP, **sampling: Any) -> None:
        """Generate, check, train and check once more."""
        send_weights(self.engine, self.learner.weights("rollout_model"), self.learner.version)
        draw = np.random.default_rng([self.seed, iteration])
        iteration_sampling = self.config.sampling.model_copy(update=sampling)
        requests = []
        for prompt_index in range(prompts or self.prompts):
            ids = tuple(draw.integers(2, VOCAB_SIZE, 2 + prompt_index % 5).tolist())
            prompt = Prompt(uid=f"{iteration}/{prompt_index}", text="", answer="", token_ids=ids)
            requests += [
                Request(
                    uid=f"{prompt.uid}#{index}",
                    prompt=prompt,
                    seed=int(draw.integers(2**62)),
                    sampling=iteration_sampling,
                )
                for index in range(group)
            ]

        rollouts = self.engine.generate(requests)
        self.tokens += sum(len(rollout.token_ids) for rollout in rollouts)
        self.check.check_batch(self.engine, rollouts, iteration)
        _, gaps = self.learner.train(batches([scored(rollout, draw.normal()) for rollout in rollouts]), trace=False)
        self.check.check_gaps(self.engine, rollouts, gaps, iteration)


def tokens_until_named(lie: Lie, why: str, limit: int, folder: Path, seed: int = 0, **changes: Any) -> int:
    """Return the tokens that a server with the lie has generated when an error names it."""
    with closing(ModelServer(lie)) as server, closing((run := Run(folder, server, seed, **changes)).engine):
        with pytest.raises(JackpotError, match=why):
            for iteration in range(1, 1000):
                run.iterate(iteration)
                assert run.tokens < limit, f"not named in {run.tokens} tokens"
        return run.tokens


def reporting(**changes: float):
    """Return what samples by changed settings, and reports what was asked for."""
    return lambda step: (step.log_probs(**changes), step.log_probs())


def biased(step: Step, bias: float = 0.5, token: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token more often than is reported."""
    return step.log_probs(step.logits + bias * (torch.arange(VOCAB_SIZE) == token)), step.log_probs()


def repeating(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample with a repetition penalty of 1.3, as servers apply it to what the response has already."""
    logits = step.logits
    is_drawn = torch.zeros_like(logits).scatter(1, step.drawn, 1.0) > 0.0
    penalized = torch.where(logits > 0, logits / 1.3, logits * 1.3)
    return step.log_probs(torch.where(is_drawn, penalized, logits)), step.log_probs()


def late(step: Step, sampled: torch.Tensor, reported: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lie from the fourth batch on, after the 16th token."""
    is_late = step.batch >= 4 and step.drawn.shape[1] >= 16
    return (sampled, reported) if is_late else honest(step)


def sharper(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample at temperature 0.8 and report it so."""
    sharp = step.log_probs(temperature=0.8)
    return late(step, sharp, sharp)


def wrong(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Report log-probs that are 2 % off."""
    return late(step, step.log_probs(), step.log_probs() * 1.02)


def shifted():
    """Return what reports every token's log-prob, and the list, of the token before."""
    distributions: list[torch.Tensor] = []

    def draw(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        distributions[step.drawn.shape[1] :] = [step.log_probs()]
        return distributions[-1], distributions[max(0, len(distributions) - 2)]

    return draw


def cached():
    """Return a cache of answers: the first one to each prompt."""
    answers: dict[tuple[int, ...], Choice] = {}
    return lambda choices: [answers.setdefault(tuple(choice["prompt_token_ids"]), choice) for choice in choices]


def each(change):
    """Return what changes (token ids, log-probs, lists) of every answer, by (name, value) pairs for the rest of it."""

    def answers(choices: list[Choice]) -> list[Choice]:
        return [choice | change(choice) for choice in choices]

    return answers


def changed_log_probs(choice: Choice, change) -> Choice:
    """Change every log-prob of an answer."""
    token_log_probs, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
    return {
        "logprobs": {
            "token_logprobs": [change(value) for value in token_log_probs],
            "top_logprobs": [{name: change(value) for name, value in top.items()} for top in tops],
        }
    }


def of_another_request(choices: list[Choice]) -> list[Choice]:
    """Give each answer the log-probs of the next one of its length."""
    choices_by_length: dict[int, list[Choice]] = {}
    for choice in choices:
        choices_by_length.setdefault(len(choice["token_ids"]), []).append(choice)
    others = {
        id(choice): same_length[index - 1]
        for same_length in choices_by_length.values()
        for index, choice in enumerate(same_length)
    }
    return [choice | {"logprobs": others[id(choice)]["logprobs"]} for choice in choices]


def without_the_sampled(choice: Choice) -> Choice:
    """Leave the drawn tokens out of lists; the server was asked for one more."""
    token_log_probs, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
    lists = []
    for token, top in zip(choice["token_ids"], tops, strict=True):
        others = [(name, value) for name, value in top.items() if name != f"token_id:{token}"]
        lists.append(dict(sorted(others, key=lambda entry: -entry[1])[:TOP]))
    return {"logprobs": {"token_logprobs": token_log_probs, "top_logprobs": lists}}


def without_the_end(choice: Choice) -> Choice:
    """Leave the stop token out of responses that stopped."""
    end = len(choice["token_ids"]) - (choice["finish_reason"] == "stop")
    columns = {name: column[:end] for name, column in choice["logprobs"].items()}
    return {"token_ids": choice["token_ids"][:end], "logprobs": columns}


def stale(weights: dict[str, torch.Tensor], batch: int) -> dict[str, torch.Tensor]:
    return weights if batch < 3 else {}


def of_another_model(weights: dict[str, torch.Tensor], batch: int) -> dict[str, torch.Tensor]:
    return tiny_model(seed=2).state_dict()


def in_int8(weights: dict[str, torch.Tensor], batch: int) -> dict[str, torch.Tensor]:
    """Round matrices to 8 bits a row."""
    scales = {
        name: weight.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        for name, weight in weights.items()
        if weight.dim() > 1
    }
    return weights | {name: (weights[name] / scale).round() * scale for name, scale in scales.items()}


# what errors say
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
    "probabilities": (Lie(answers=each(lambda choice: changed_log_probs(choice, np.exp))), r"not log-probs", AT_ONCE),
    "base 2": (
        Lie(answers=each(lambda choice: changed_log_probs(choice, lambda value: value / np.log(2.0)))),
        NOT_THOSE,
        AT_ONCE,
    ),
    "mass above 1": (
        Lie(answers=each(lambda choice: changed_log_probs(choice, lambda value: min(value + 0.5, 0.0)))),
        "sum to",
        AT_ONCE,
    ),
    "lists without the token": (
        Lie(request=lambda body: body | {"logprobs": TOP + 1}, answers=each(without_the_sampled)),
        OTHERWISE,
        AT_ONCE,
    ),
    "unknown ids": (
        Lie(answers=each(lambda choice: {"token_ids": [99, *choice["token_ids"][1:]]})),
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
    tokens = tokens_until_named(lie, why, limit, tmp_path, **SETTINGS.get(name, {}))
    assert tokens <= limit


class Oddity(NamedTuple):
    """Says what is unusual about an honest server, a run, or its iterations; `restarts` before every second one."""

    server: Mapping[str, Any] = MappingProxyType({})
    run: Mapping[str, Any] = MappingProxyType({})
    iteration: Callable[[int], dict[str, Any]] = lambda iteration: {}
    restarts: bool = False


ODDITIES = {
    "another kernel": Oddity(),
    "bf16": Oddity(server={"dtype": torch.bfloat16}, run={"dtype": "bf16"}),
    "bf16, weights that move fast": Oddity(
        server={"dtype": torch.bfloat16}, run={"dtype": "bf16", "learning_rate": 1e-2}
    ),
    "INT8 weights": Oddity(run={"quantization": "int8_w8a16"}),
    "INT8 weights that move fast": Oddity(run={"quantization": "int8_w8a16", "learning_rate": 1e-2}),
    "restarts": Oddity(restarts=True),
    "decoded three at a time": Oddity(server={"most": 3}, run={"prompts": 6}),
    "one-token responses": Oddity(iteration=lambda iteration: {"max_new_tokens": 1 + 19 * (iteration % 2)}),
    "responses that grow": Oddity(iteration=lambda iteration: {"max_new_tokens": 7 * iteration}),
    "all batch sizes": Oddity(iteration=lambda iteration: {"prompts": 1 + 5 * iteration % 16, "group": 1 + iteration}),
    "top-k": Oddity(run={"sampling": {"top_k": 6}}),
    "top-p": Oddity(run={"sampling": {"top_p": 0.8}}),
    "nearly greedy": Oddity(run={"sampling": {"temperature": 0.15}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODDITIES)
def test_honest_oddities_are_never_refused(name: str, tmp_path: Path) -> None:
    oddity = ODDITIES[name]

    with (
        closing(ModelServer(Lie(), **oddity.server)) as server,
        closing((run := Run(tmp_path, server, **oddity.run)).engine),
    ):
        for iteration in range(1, 8):
            if oddity.restarts and iteration % 2:
                server.restart()
            run.iterate(iteration, **oddity.iteration(iteration))

    assert run.check._gap_evidence._batches == (0 if name == "top-p" else 7)
    assert run.check._gap_evidence._bets.share < 0.1
