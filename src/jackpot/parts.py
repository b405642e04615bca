"""What a run is made of. Layer 5; only `launch` makes one."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from jackpot.config import Config
from jackpot.engines.base import Engine
from jackpot.learner import Learner
from jackpot.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Engines and learner hold the same weights."""

    config: Config
    task: Task
    tokenizer: PreTrainedTokenizerBase
    engine: Engine  # writes the rollouts
    policy_engine: Engine  # answers for the policy in evaluations; `engine` itself where the policy writes
    learner: Learner
