"""Corrections that are defined by a formula: a function of tensors and plain numbers.

The names of a formula's arguments say what it reads: tensors of `CorrectionInputs`, `acceptance`, `kappa_z` = kappa Z,
`lam`, and settings. A user's own formula is such a function too (examples/own_correction.py). A correction that needs
further sums over an optimizer step is no formula: it implements `base.CorrectionFn`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor

from jackpot.core.metrics import Means, Sums
from jackpot.objectives.constants import LAM, Kappa
from jackpot.objectives.corrections.base import Correction, CorrectionInputs, Kappas, measure_overlap, step_kappas


class Weighed(NamedTuple):
    """The result of a formula: tensors that broadcast to [B, T]; values at masked tokens are ignored."""

    weights: Tensor  # weights of accepted tokens, after the caps
    accepted: Tensor | None = None  # acceptance mask, bool or float; None: every token is accepted
    capped: Tensor | None = None  # bool, where a cap lowered the weight or a band rejected the token
    capped_c2: Tensor | None = None  # bool, where the cap c2 lowered p_proximal / p_target


Formula = Callable[..., Weighed]
TENSORS = (  # names of the arguments by which a formula can read tensors
    *("rollout_log_probs", "target_log_probs", "proximal_log_probs", "response_mask", "uniforms", "advantages", "z"),
    *("log_ratio", "to_proximal", "acceptance", "kappa_z", "lam"),
)
_BY_INPUT = {"z": "z", "kappa_z": "z", "advantages": "advantages"}  # by a formula's argument: the input it comes from


@dataclass(frozen=True, slots=True)
class ByFormula:
    """The correction (`CorrectionFn`) that a formula and its settings define."""

    formula: Formula
    settings: Mapping[str, Any]  # arguments of the formula that are not among TENSORS
    lam: float = LAM  # lam of a = min(1, rho / lam) and of Z, unless the inputs have a lam for each token
    kappa: Kappa = "none"

    @property
    def reads(self) -> frozenset[str]:
        """Return which of the inputs "z" and "advantages" the formula's arguments need."""
        return frozenset(_BY_INPUT[name] for name in signature(self.formula).parameters if name in _BY_INPUT)

    def measure(self, inputs: CorrectionInputs) -> Means:
        """Sum acceptance, Z and other measures of how far p_inf and p_target overlap, over a micro-batch."""
        return measure_overlap(inputs, self.lam)

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        """Evaluate the formula on a micro-batch; kappa, the factor on Z, comes from `totals`, the sums over a step."""
        kappas = step_kappas(inputs, {} if self.kappa == "none" else totals)
        names = [name for name in signature(self.formula).parameters if name in TENSORS]
        weighed = self.formula(**{name: self._tensor(name, inputs, kappas) for name in names}, **self.settings)
        return Correction.of(inputs, **weighed._asdict(), kappas=kappas)

    def _tensor(self, name: str, inputs: CorrectionInputs, kappas: Kappas) -> Any:
        """Return the tensor, or the number lam, that a formula gets for its argument `name`, one of TENSORS."""
        if name == "lam":
            return inputs.lam_per_token(self.lam)
        if name == "acceptance":
            return inputs.acceptance(self.lam)
        if name == "kappa_z":
            kappa_z = kappas.by_response(inputs.by_policy) * inputs.z.value.double()  # in float64, then rounded once
            return kappa_z.to(inputs.rollout_log_probs.dtype)
        return getattr(inputs, name)  # a field or property of the inputs
