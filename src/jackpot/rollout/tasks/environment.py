"""The task made of an environment with `reset` and `step`, such as an environment of Gymnasium.

The user's environment is a class that the settings name. See docs/own-problem.md.
"""

from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from jackpot.config.tasks import EnvironmentConfig
from jackpot.core.errors import DataError
from jackpot.core.imports import import_object
from jackpot.core.prng import fold_in
from jackpot.core.types import DecodedResponse, Prompt, Score
from jackpot.rollout.tasks.base import BatchScoredTask, Split
from jackpot.rollout.tasks.templates import Template

MAX_SEED = 2**31


class EpisodeEnvironment(Protocol):
    """The methods that an environment must have, as text environments of Gymnasium do. `close` is optional."""

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin the episode of a seed; return the first observation, and a dict of details, which is ignored."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action; return (observation, reward, terminated, truncated, details); details are ignored."""
        ...


class _Played(NamedTuple):
    """The state of an episode after some actions."""

    observation: str  # the last observation
    reward: float  # sum of the rewards so far
    has_ended: bool


class EnvironmentTask(BatchScoredTask):
    """A task with an episode for each response: the prompt is the first observation, a turn of the model is an action.

    Nothing is kept between two turns: each time the episode is played again from its seed with the actions so far, so
    that an episode survives a stop of the run. Equal seeds and actions must therefore give equal observations, and an
    episode of n turns costs n (n + 1) / 2 steps of the environment, and n more for its score.

    Raises:
        ConfigError: the environment cannot be imported.
        DataError: the tokenizer does not fit the template or has no token that ends a turn; later, the environment
            fails.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: EnvironmentConfig) -> None:
        """Import the function or class that makes an environment, and find the tokens that end an action."""
        self._settings = settings
        self._make = import_object(settings.import_path, "environment")
        self._template = Template(settings.template, tokenizer, instruction="", system_prompt=None)
        self.turn_end_token_ids = self._template.turn_end_token_ids()

    def size(self, split: Split) -> None:
        """Return None, since both splits are endless: every index is an episode of its own."""

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return the first observation of an episode as a prompt; the episode's seed is hashed from split and index."""
        uid = f"environment/{split}/{index}"
        return self._template.prompt(uid, self._play(uid, ()).observation, [""])  # no reference answer

    def reply(self, response: DecodedResponse) -> str | None:
        """Return the observation after the last turn, or None at the end of the episode."""
        played = self._play(response.prompt.uid, response.turns)
        return None if played.has_ended else self._template.reply(played.observation)

    def scores(self, responses: list[DecodedResponse]) -> list[Score]:
        """Score each response by the sum of its episode's rewards; a turn that was cut at the limit is not played."""
        scores = []
        for response in responses:
            actions = response.turns if response.last_turn_ended else response.turns[:-1]
            reward = self._play(response.prompt.uid, actions).reward
            scores.append(Score(reward=reward, correct=reward >= self._settings.solved))
        return scores

    def _play(self, uid: str, actions: tuple[str, ...]) -> _Played:
        """Play the episode of the prompt `uid` from its beginning, and close the environment."""
        seed = fold_in(uid) % MAX_SEED
        count = 0  # number of actions before the one that is being taken, for the error below

        try:
            environment: EpisodeEnvironment = self._make(**self._settings.kwargs)
            try:
                observation, _ = environment.reset(seed=seed)
                played = _Played(observation, reward=0.0, has_ended=False)
                for count, action in enumerate(actions):  # noqa: B007
                    observation, reward, terminated, truncated, _ = environment.step(action)
                    total = played.reward + float(reward)
                    played = _Played(observation, reward=total, has_ended=bool(terminated or truncated))
            finally:
                getattr(environment, "close", lambda: None)()
        except Exception as error:  # the user's own code may raise anything
            raise DataError(
                f"the environment {self._settings.import_path!r} failed in {uid}, seed {seed}, after {count} actions: "
                f"{type(error).__name__}: {error}"
            ) from error
        return played
