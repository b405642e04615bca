"""The names of the models that a run trains. Standard library only."""

from typing import Literal

Role = Literal["policy", "rollout_model", "critic"]
Writer = Literal["policy", "rollout_model"]  # the models that can generate rollouts
