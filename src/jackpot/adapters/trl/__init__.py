"""Our corrections, and joint training of two models, in TRL's trainers (docs/trl.md).

Status: supported.
"""

from jackpot.adapters.trl.corrected import CorrectedGRPOTrainer
from jackpot.adapters.trl.joint import JackpotGRPOTrainer
from jackpot.adapters.trl.rollouts import EngineRollouts

__all__ = ["CorrectedGRPOTrainer", "EngineRollouts", "JackpotGRPOTrainer"]
