"""Pairs of distributions over small vocabularies, and OBRS on them token by token in Python floats.

Logs up to 40 nats in size are exponentiated: float64 is good to 40 * 2**-52, about 1e-14.
"""

import math

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

RTOL = 1e-12
few = settings(max_examples=40, deadline=None, derandomize=True, database=None)
lams = st.one_of(st.sampled_from([0.2, 1.0, 3.0]), st.floats(1e-3, 1e3))


def normalised(weights):
    """Return log-probs that are proportional to the exponentials of some weights."""
    weights = np.array(weights, dtype=np.float64)
    return (weights - weights.max() - np.log(np.exp(weights - weights.max()).sum())).tolist()


def log_distributions(size, zeros=True, lowest=-40.0):
    """Draw log-probs over `size` tokens, with ties, ratios up to e**80 and, if `zeros`, tokens of probability 0."""
    special = [0.0, -1.0, -math.inf] if zeros else [0.0, -1.0]
    weight = st.one_of(st.sampled_from(special), st.floats(lowest, 0.0))
    return st.lists(weight, min_size=size, max_size=size).filter(lambda row: max(row) > -math.inf).map(normalised)


def pairs(smallest=1, largest=6, zeros=True, lowest=-40.0):
    """Draw (log p_inf, log p_target) over one vocabulary."""
    sizes = st.integers(smallest, largest)
    return sizes.flatmap(lambda v: st.tuples(*[log_distributions(v, zeros, lowest)] * 2))


def tensors(*rows):
    """Return each row as a float64 tensor."""
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def enumerated(log_inf, log_target, lam):
    """Return (a, Z, p~) by summing over the vocabulary: x from p_inf is kept with probability min(1, rho / lam)."""
    p_inf, p_target = [math.exp(x) for x in log_inf], [math.exp(x) for x in log_target]
    accept = [min(1.0, p / (lam * q)) if q > 0 else 0.0 for q, p in zip(p_inf, p_target, strict=True)]
    joint = [q * a for q, a in zip(p_inf, accept, strict=True)]
    z = math.fsum(joint)
    return accept, z, [mass / z if z > 0 else math.nan for mass in joint]


def kl(p, q):
    """Return KL(p || q) in nats."""
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
