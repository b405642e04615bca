"""A correction of one's own that implements `jackpot.CorrectionFn` and nothing else."""

from dataclasses import dataclass

from jackpot import Correction, CorrectionInputs
from jackpot.core.metrics import Sums


@dataclass(frozen=True)
class Plain:
    """Truncated importance sampling, as `tis`."""

    cap: float
    kappa = "none"
    lam = 1.0
    reads = ()

    def measure(self, inputs: CorrectionInputs) -> Sums:
        return {}

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        ratio = inputs.log_ratio.exp()
        return Correction.of(inputs, ratio.clamp(max=self.cap), capped=ratio > self.cap)
