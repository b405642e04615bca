"""How long a run takes on GPUs, by arithmetic alone: docs/cost.md.

An iteration writes a rollout batch, trains on it and sends the new weights. Decoding takes the longer of its operations
and its memory traffic. Every number that is neither the run's nor the GPU's is a constant below, with its source.
Nothing here has been measured with Jackpot on a GPU.

Units: bytes, seconds, floating-point operations (FLOPs).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Gpu(NamedTuple):
    """One as its maker sells it. Drivers report 5 to 7 % more memory, which pays for CUDA's context and for gaps."""

    bf16: float  # FLOP/s of matrix products, dense
    fp32: float  # FLOP/s, without TF32, which torch leaves off
    bandwidth: float  # bytes/s of its memory
    memory: float  # bytes


GPUS = {  # NVIDIA's data sheets, SXM where there is a choice; half of what they give "with sparsity"
    "A6000": Gpu(154.8e12, 38.7e12, 768e9, 48e9),
    "A100": Gpu(312e12, 19.5e12, 2.039e12, 80e9),
    "H100": Gpu(989.4e12, 66.9e12, 3.35e12, 80e9),
    "H200": Gpu(989.4e12, 66.9e12, 4.8e12, 141e9),
}

TRAINING_SHARE = 0.33
"""Of the GPU's FLOP/s, in training. IBM's fms-fsdp publishes 7,500 tokens/s of a 7B and 3,800 of a 13B model for each
H100, which is 33 % and 32 % (their 34B model with full checkpointing: 33 %, or 43 % with what is computed twice)."""
WRITING_SHARE = 0.5
"""Of the GPU's FLOP/s, in prefill and decoding. Assumed; decoding small batches is not limited by it."""
BANDWIDTH_SHARE = 0.85
STEP_SECONDS = 1.5e-3
"""Of the memory's bandwidth in decoding, and what every step takes beside: scheduling, launching, the draw, the top
log-probs. Together they give 70 tokens/s for one stream of Llama 3.1 8B on an A100 of 1.555 TB/s, 1,024 tokens read and
128 written; 75 are published for vLLM 0.23 (johnmusgrave.com). With many streams a step has more to draw."""
WEIGHT_BYTES_PER_SECOND = 5e9
"""From the learner to an engine. verl's issue 7203 has 3.5 s for 9 billion parameters in bf16 on 8 H800."""
OPTIMIZER_BYTES = 28
"""That AdamW moves for each parameter, in float32: it reads weight, gradient and two moments and writes all but the
gradient."""
MEAN_RESPONSE_SHARE, LEAST_MEAN_RESPONSE = 0.25, 200
"""The mean response, of the longest allowed, and in tokens, as far as it fits. Assumed: models that are trained on
mathematics with 8,192 tokens write one to three thousand; on GSM8K some 200, whatever the limit."""
MEAN_PROMPT = 120
"""Tokens, where no prompt can be read. GSM8K has 103 in the log of verl's issue 1208."""
DYNAMIC_ROUNDS = 2.0
"""Rollout batches written for each that is trained on, where groups of equal reward are dropped. Assumed."""


def mean_response(limit: int) -> float:
    """Tokens that a response is assumed to have in the mean, if `limit` is the most."""
    return min(float(limit), max(MEAN_RESPONSE_SHARE * limit, LEAST_MEAN_RESPONSE))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Prompts of one length, and responses that end after each token with the same probability, or at the limit."""

    prompt: float
    mean: float  # of responses, at most `limit`
    limit: int

    @property
    def scale(self) -> float:
        """The mean if there were no limit: s (1 - exp(-limit / s)) = mean. Infinite where all reach the limit."""
        if self.mean >= self.limit * (1 - 1e-6):
            return math.inf
        low, high = self.mean, self.mean
        while _cut_mean(high, self.limit) < self.mean:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _cut_mean(middle, self.limit) < self.mean else (low, middle)
        return high

    @property
    def square(self) -> float:
        """The mean of the squared length of responses: integral of 2 t exp(-t / s) up to the limit."""
        scale, limit = self.scale, self.limit
        if math.isinf(scale):
            return float(limit**2)
        return 2 * scale * (scale - (scale + limit) * math.exp(-limit / scale))

    @property
    def pairs_written(self) -> float:
        """Query and key, of the tokens of a response with all before them."""
        return self.prompt * self.mean + self.square / 2

    @property
    def pairs(self) -> float:
        """The same with those among the prompt's own tokens: half the square of the whole sequence."""
        return self.pairs_written + self.prompt**2 / 2

    def longest(self, count: float) -> float:
        """Of `count` responses. Of exponential ones the expected maximum is scale x (1 + 1/2 + ... + 1/count)."""
        if math.isinf(self.scale) or count < 1:
            return self.mean if count < 1 else float(self.limit)
        harmonic = math.log(count) + 0.5772 + 1 / (2 * count) if count > 1 else 1.0
        return min(float(self.limit), max(self.mean, self.scale * harmonic))


def _cut_mean(scale: float, limit: int) -> float:
    return scale * (1 - math.exp(-limit / scale))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """One model. FLOPs of a forward pass, as models/cost.py counts them."""

    parameters: int
    trained: int  # all of them, an adapter's, or none
    body: int  # FLOPs a token, without the output layer
    head: int  # FLOPs a token, of the output layer
    pair: int  # FLOPs of one query and one key
    cache: int  # numbers that an engine keeps of a token: keys and values

    def training(self, lengths: Lengths, checkpoints: bool, extra: float) -> float:
        """FLOPs of one sequence: forward, backward, what is computed again, and `extra` forward passes.

        A backward pass costs two forward passes, or one where the weights themselves are frozen. The joint head
        computes its logits again in backward, always.
        """
        if not self.trained:
            return (1 + extra) * self.forward(lengths)
        backward = 2 if self.trained == self.parameters else 1
        again = 1 if checkpoints else 0
        body = self.body * (lengths.prompt + lengths.mean) + self.pair * lengths.pairs
        return (1 + backward + again + extra) * body + (2 + backward + extra) * self.head * lengths.mean

    def forward(self, lengths: Lengths) -> float:
        """FLOPs to read a prompt and score its response."""
        body = self.body * (lengths.prompt + lengths.mean) + self.pair * lengths.pairs
        return body + self.head * lengths.mean


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpeed:
    """How a model's engine writes on `gpus` GPUs."""

    model: ModelCost
    number_bytes: int  # of weights and cache
    max_num_seqs: int  # sequences that one engine holds at most
    cache_bytes: float  # for keys and values, of one engine
    gpus: int  # of one engine, tensor-parallel
    peak: float  # FLOP/s of one GPU at this precision

    def held(self, sequences: float, lengths: Lengths) -> float:
        """Sequences that one engine decodes at once. One that is under way has, on average over time, half of the mean
        square over the mean behind it."""
        length = lengths.prompt + lengths.square / (2 * lengths.mean)
        room = self.cache_bytes / (self.model.cache * self.number_bytes * length)
        return max(1.0, min(sequences, self.max_num_seqs, room))

    def seconds(self, sequences: float, lengths: Lengths, gpu: Gpu) -> float:
        """Until one engine has written `sequences` responses, the longest of them last."""
        model, held = self.model, self.held(sequences, lengths)
        steps = lengths.mean * (sequences / held - 1) + lengths.longest(held)
        moved = steps * model.parameters + sequences * lengths.pairs_written * model.cache
        flops = sequences * ((model.body + model.head) * lengths.mean + model.pair * lengths.pairs_written)
        prefill = sequences * (model.body * lengths.prompt + model.pair * lengths.prompt**2 / 2 + model.head)
        speed, bandwidth = self.gpus * self.peak * WRITING_SHARE, self.gpus * gpu.bandwidth * BANDWIDTH_SHARE
        decoding = max(flops / speed, moved * self.number_bytes / bandwidth)
        return decoding + steps * STEP_SECONDS + prefill / speed


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one iteration does. Sequences are responses with their prompts."""

    sequences: int  # trained on
    steps: int  # optimizer steps
    epochs: int
    written: float  # responses written for each that is trained on
    lengths: Lengths
    checkpoints: bool  # activations
    extra: float  # forward passes without gradient over all sequences: anchors, a pass for kappa


class Hours(NamedTuple):
    """Of a whole run."""

    generation: float
    training: float
    sending: float  # weights
    evaluating: float = 0.0

    @property
    def all(self) -> float:
        return sum(self)

    @property
    def rollout_share(self) -> float:
        """Of what iterations take; evaluations are beside them."""
        return self.generation / self.iterations

    @property
    def iterations(self) -> float:
        return self.generation + self.training + self.sending


def run_hours(
    work: Work,
    writer: EngineSpeed,
    models: Sequence[ModelCost],
    others: float,
    iterations: int,
    gpu: Gpu,
    gpus: int,
    peak: float,
) -> Hours:
    """All iterations on `gpus` GPUs that write, then train, none of it at the same time.

    Args:
        models: that read every sequence in training.
        others: FLOPs of one sequence beside those: a reference, a critic.
        peak: FLOP/s of one GPU at training's precision.
    """
    engines = gpus / writer.gpus
    flops = sum(model.training(work.lengths, work.checkpoints, work.extra / work.epochs) for model in models) + others
    moved = OPTIMIZER_BYTES * sum(model.trained for model in models) * work.steps
    seconds = Hours(
        generation=writer.seconds(work.sequences * work.written / engines, work.lengths, gpu),
        training=flops * work.sequences * work.epochs / (gpus * peak * TRAINING_SHARE)
        + moved / (gpus * gpu.bandwidth * BANDWIDTH_SHARE),
        sending=writer.model.parameters * writer.number_bytes / WEIGHT_BYTES_PER_SECOND,
    )
    return Hours(*(part * iterations / 3600 for part in seconds))


def evaluation_hours(
    sets: Sequence[tuple[EngineSpeed, int]], times: int, lengths: Lengths, gpu: Gpu, gpus: int
) -> float:
    """Of `times` evaluations: each engine answers its set, one set after the other."""
    seconds = sum(engine.seconds(answers * engine.gpus / gpus, lengths, gpu) for engine, answers in sets)
    return seconds * times / 3600


def on_policy(work: Work) -> tuple[Work, int]:
    """The same responses, each batch written by the policy as it is then and taken for one step. The work of one such
    iteration, and how many stand for one of `work`."""
    times = work.steps // work.epochs
    return replace(work, sequences=work.sequences // times, steps=1, epochs=1, extra=0.0), times
