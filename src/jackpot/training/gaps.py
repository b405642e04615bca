"""Defines how far an engine's log-probs may be from those of training, by the number formats of both."""

from jackpot.config.config import Sampling

# Mean |p_engine - p_training| of sampled tokens beyond which a run stops. The gap of a quantized engine is what its
# user wants to see and no reason to stop: 1e-3 to 2e-2 are usual, more in a run that drifts. 0.25 is past all of that.
CPU_FP32 = "fp32 on a CPU"
LARGEST_GAPS = {CPU_FP32: 1e-5, "fp32": 1e-3, "bf16": 2e-2, "quantized": 0.25}


def precisions(engine: str, training: str, device: str, sampling: Sampling) -> list[str]:
    """Return the keys of `LARGEST_GAPS` for an engine and for training, given as "fp32", "bf16" or "quantized".

    On a CPU both sides in fp32 agree to 1e-6. With top-p or top-k they need not: a token at the limit may be kept by
    one side and dropped by the other, and then its whole probability is the gap.

    Args:
        device: kind of device of the engine, as in `Capabilities.device`.
    """
    if engine == training == "fp32" and device == "cpu" and not sampling.truncated:
        return [CPU_FP32]
    return [engine, training]
