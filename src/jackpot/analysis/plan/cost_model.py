"""How long a run takes on GPUs, computed by arithmetic alone (docs/cost.md).

An iteration generates a rollout batch, trains on it and sends the new weights. Decoding takes as long as its operations
or its memory traffic, whichever is longer. Every number that is neither the run's nor the GPU's is a constant below,
with its source.

Status: experimental. Nothing here has been measured with Jackpot on a GPU.

Units: bytes, seconds, floating-point operations (FLOPs).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jackpot.models.drafts import tokens_per_verification


class Gpu(NamedTuple):
    """The data sheet of a kind of GPU.

    Drivers report 5 to 7 % more memory than the data sheet; CUDA's context and fragmentation use that.
    """

    bf16: float  # FLOP/s of dense matrix products in bf16
    fp32: float  # FLOP/s in float32 without TF32, which torch leaves off
    bandwidth: float  # bytes/s of the memory
    memory: float  # capacity, bytes
    fp8: float | None = None  # FLOP/s of dense matrix products in FP8; None: the GPU has none
    int8: float | None = None  # operations/s of dense matrix products in INT8; None: the GPU has none


GPUS = {  # from NVIDIA's data sheets: of the SXM card where there is one, and half of the FLOP/s "with sparsity"
    "4090": Gpu(165.2e12, 82.6e12, 1.008e12, 24e9, fp8=330.3e12, int8=660.6e12),
    "A6000": Gpu(154.8e12, 38.7e12, 768e9, 48e9, int8=309.7e12),
    "A100": Gpu(312e12, 19.5e12, 2.039e12, 80e9, int8=624e12),
    "H100": Gpu(989.4e12, 66.9e12, 3.35e12, 80e9, fp8=1978.9e12, int8=1978.9e12),
    "H200": Gpu(989.4e12, 66.9e12, 4.8e12, 141e9, fp8=1978.9e12, int8=1978.9e12),
}

TRAINING_SHARE = 0.33
"""Share of the GPU's FLOP/s that training reaches. IBM's fms-fsdp publishes 7,500 tokens/s of a 7B and 3,800 of a 13B
model on each H100, which is 33 % and 32 % (their 34B model with checkpointing: 33 %, or 43 % with recomputation)."""
GENERATION_SHARE = 0.5
"""Share of the GPU's FLOP/s that prefill and decoding reach. Assumed; it does not limit decoding of small batches."""
BANDWIDTH_SHARE = 0.85
"""Share of the memory's bandwidth that decoding reaches."""
STEP_SECONDS = 1.5e-3
"""Time that each decoding step adds for scheduling, launching, sampling and the top log-probs. With `BANDWIDTH_SHARE`
it gives 70 tokens/s for one stream of Llama 3.1 8B on an A100 of 1.555 TB/s, 1,024 tokens of prompt and 128 of
response; 75 are published for vLLM 0.23 (johnmusgrave.com). With many streams a step samples more."""
ALL_REDUCE_SECONDS = 10e-6
"""Time in which the GPUs of one engine add up a small tensor, twice in each layer: 8.5 to 12 microseconds for at most
32 kB on 2 to 8 H100 with vLLM's own kernel (SGLang's pull request 2904)."""
WEIGHT_BYTES_PER_SECOND = 5e9
"""Rate at which the learner sends weights to an engine. verl's issue 7203 has 3.5 s for 9 billion parameters in bf16 on
8 H800."""
OPTIMIZER_BYTES = 28
"""Bytes that AdamW moves for each parameter, in float32: it reads weight, gradient and two moments and writes all but
the gradient."""
MEAN_RESPONSE_SHARE, LEAST_MEAN_RESPONSE = 0.25, 200
"""The mean response as a share of the limit, and its least length in tokens. Assumed: models that are trained on
mathematics with a limit of 8,192 tokens generate one to three thousand; on GSM8K some 200 at any limit."""
ENDLESS_SHARE = 0.004
"""Share of responses that go on to the limit, whatever the mean. Two logs of GSM8K have it, with means of 325 and 330
tokens and a limit of 1,024 (verl's issue 1208, Awesome-ML-SYS-Tutorial's issue 106)."""
MEAN_PROMPT = 120
"""Tokens of a prompt where no prompt can be read. GSM8K has 103 in the log of verl's issue 1208."""
ACCEPTANCE = 0.8
"""Probability that a draft of the rollout model is accepted where those before it were. Assumed: a run with
`engine.draft` reports it as draft/acceptance."""
HEAD_DRAFTS, HEAD_ACCEPTANCE = 3, 0.62
"""Drafts before each pass, and `ACCEPTANCE`, of a head of one layer that drafts for the policy: with 3 drafts a pass
gives 2.05 and 2.47 tokens on two workloads of Qwen3-8B (NeMo-RL's speculative decoding, arXiv 2604.26779)."""
DENSE_FP8_GAIN, MIXTURE_FP8_GAIN = 1.15, 1.4
"""The most that FP8 speeds up whole rollouts of a dense model and of a mixture of experts. verl's page on FP8 rollouts
has 1.12 to 1.18 for Qwen3-8B and more than 1.35 for Qwen3-30B-A3B."""
FP8_TRAINING_GAIN = 1.4
"""Speed-up of linear layers in training that multiply FP8, with quantizing. torchtitan's 8,532 against 6,667 tokens/s
of Llama 3.1 8B on each H100 is 1.28, where linear layers without the output layer are 77 % of the FLOPs."""
DYNAMIC_ROUNDS = 2.0
"""Rollout batches generated for each one trained on, where groups of equal reward are dropped. Assumed."""


def mean_response(limit: int) -> float:
    """Return the assumed mean length of responses of at most `limit` tokens."""
    return min(float(limit), max(MEAN_RESPONSE_SHARE * limit, LEAST_MEAN_RESPONSE))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Lengths of prompts and responses as the plan assumes them.

    All prompts are equally long. A response ends after each token with one and the same probability, or at the limit.
    """

    prompt: float  # length of each prompt, tokens
    mean: float  # mean length of responses, tokens; at most `limit`
    limit: int  # greatest length of a response, tokens
    endless: float = ENDLESS_SHARE  # share of responses that only the limit ends; `longest` alone counts them

    @property
    def scale(self) -> float:
        """Return the mean length s that responses would have without a limit: s (1 - exp(-limit / s)) = mean.

        The length is infinite where all responses reach the limit.
        """
        if self.mean >= self.limit * (1 - 1e-6):  # equal to the limit but for rounding
            return math.inf

        # Bisection for s between `low` and `high`: the mean length with the limit, `_cut_mean`, rises with s.
        low, high = self.mean, self.mean
        while _cut_mean(high, self.limit) < self.mean:
            high *= 2
        for _ in range(60):  # halvings of the interval, beyond the precision of a float
            middle = (low + high) / 2
            low, high = (middle, high) if _cut_mean(middle, self.limit) < self.mean else (low, middle)
        return high

    @property
    def square(self) -> float:
        """Return the mean squared response length, tokens^2: the integral of 2t exp(-t / scale) dt from 0 to limit."""
        scale, limit = self.scale, self.limit
        if math.isinf(scale):
            return float(limit**2)
        return 2 * scale * (scale - (scale + limit) * math.exp(-limit / scale))

    @property
    def response_pairs(self) -> float:
        """Return the mean number of (query, key) pairs of attention in a sequence, of response tokens as queries."""
        return self.prompt * self.mean + self.square / 2

    @property
    def pairs(self) -> float:
        """Return the mean number of (query, key) pairs of attention in a sequence; n tokens have n^2 / 2 pairs."""
        return self.response_pairs + self.prompt**2 / 2

    def longest(self, count: float) -> float:
        """Return the expected length of the longest of `count` responses, tokens.

        A response is endless, and as long as the limit, with the probability `endless`. If none is, the longest is
        expected to have `scale` x (1 + 1/2 + ... + 1/count) tokens, at most the limit. For less than one response the
        result is the mean length.
        """
        if math.isinf(self.scale) or count < 1:
            return self.mean if count < 1 else float(self.limit)

        # The longest response that ends by itself, with Euler's formula for 1 + 1/2 + ... + 1/count; and the limit if
        # any response is endless.
        harmonic = math.log(count) + 0.5772 + 1 / (2 * count) if count > 1 else 1.0
        ended = min(float(self.limit), max(self.mean, self.scale * harmonic))
        return self.limit - (self.limit - ended) * (1 - self.endless) ** count


def _cut_mean(scale: float, limit: int) -> float:
    """Return the mean length, tokens, of responses cut at `limit`; without the limit their mean would be `scale`."""
    return scale * (1 - math.exp(-limit / scale))


class Linear(NamedTuple):
    """The time of a FLOP in quantized linear layers in training, relative to that of a FLOP in any other layer."""

    forward: float
    backward: float


PLAIN = Linear(1.0, 1.0)  # relative times where nothing is quantized


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """The size of a model and the FLOPs of its forward pass, as models/cost.py counts them."""

    parameters: int  # number of all parameters
    trained: int  # number of trained parameters: all, those of an adapter, or none
    body: int  # cost of a token without the output layer, FLOPs
    head: int  # cost of the output layer for a token, FLOPs
    pair: int  # cost of one (query, key) pair of attention, FLOPs
    cache: int  # number of values in the cached keys and values of a token
    layers: int

    def drafting_head(self) -> "ModelCost":
        """Return the cost of an untrained head that drafts for this model: one of its layers and an output layer."""
        return ModelCost(
            parameters=(self.body // self.layers + self.head) // 2,  # a weight of a matrix costs 2 FLOPs for a token
            trained=0,
            body=self.body // self.layers,
            head=self.head,
            pair=self.pair // self.layers,
            cache=self.cache // self.layers,
            layers=1,
        )

    def training(self, lengths: Lengths, checkpoints: bool, extra: float, linear: Linear = PLAIN) -> float:
        """Return the FLOPs of training on one sequence: forward, backward, recomputation and `extra` forward passes.

        A backward pass costs two forward passes, or one where only an adapter is trained. The output layer always
        computes its logits again in backward. FLOPs of quantized linear layers count by the time that they take.
        A frozen model takes one forward pass and the extra ones.

        Args:
            lengths: lengths of prompt and response.
            checkpoints: whether activations are computed again in backward.
            extra: forward passes without gradient over the sequence.
            linear: relative time of quantized linear layers.
        """
        if not self.trained:
            return (1 + extra) * self.forward(lengths, linear)

        # Forward passes, and what backward costs in forward passes; then the FLOPs of each part of the model.
        backward = 2 if self.trained == self.parameters else 1
        forward = 1 + (1 if checkpoints else 0) + extra
        body = (forward * linear.forward + backward * linear.backward) * self.body * (lengths.prompt + lengths.mean)
        attention = (forward + backward) * self.pair * lengths.pairs
        head = (2 + backward + extra) * self.head * lengths.mean  # 2: forward, and the same again in backward
        return body + attention + head

    def forward(self, lengths: Lengths, linear: Linear = PLAIN) -> float:
        """Return the FLOPs of one forward pass over a sequence, with the output layer on the response alone."""
        body = linear.forward * self.body * (lengths.prompt + lengths.mean) + self.pair * lengths.pairs
        return body + self.head * lengths.mean


class Drafts(NamedTuple):
    """The drafts of speculative decoding that an engine's model verifies, and the model that makes the drafts."""

    model: ModelCost  # the model that drafts
    tokens: int  # drafts before each pass of the engine's model
    acceptance: float  # probability that a draft is accepted if those before it were


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpeed:
    """The speed at which an engine generates, from its model, limits and GPUs."""

    model: ModelCost
    weight_bytes: float  # mean size of a number in the weights, bytes
    number_bytes: int  # size of a number in the cache, bytes
    max_num_seqs: int  # most sequences that one engine decodes at once
    cache_bytes: float  # room of one engine for keys and values, bytes
    gpus: int  # tensor-parallel GPUs of one engine
    peak: float  # FLOP/s of one GPU at the engine's precision
    linear: float = 1.0  # time of a FLOP in linear layers, relative to that of a FLOP in any other layer
    most_gain: float | None = None  # greatest speed-up by quantization; None: no limit but memory traffic and FLOPs
    drafts: Drafts | None = None  # None: the model generates alone

    def concurrent(self, sequences: float, lengths: Lengths) -> float:
        """Return how many of `sequences` one engine decodes at once, as far as `max_num_seqs` and the cache allow.

        The mean length of a response that is being generated is E[length^2] / (2 E[length]), averaged over time.
        """
        length = lengths.prompt + lengths.square / (2 * lengths.mean)  # mean length of prompt and unfinished response
        cache = self.model.cache + (self.drafts.model.cache if self.drafts else 0)  # numbers cached for each token
        room = self.cache_bytes / (cache * self.number_bytes * length)  # sequences that the cache has room for
        return max(1.0, min(sequences, self.max_num_seqs, room))

    def seconds(self, sequences: float, lengths: Lengths, gpu: Gpu, engines: float = 1.0) -> float:
        """Return the seconds in which `engines` engines generate `sequences` responses each, until the longest ends.

        A decoding step gives every sequence one token. With k drafts, k passes of the drafting model precede a pass of
        the engine's model, which reads k + 1 tokens; these passes together give several tokens and are scheduled once.
        """
        # A quantized engine is faster than the same engine in bf16 by the factor `most_gain` at most.
        if self.most_gain:
            quantized = replace(self, most_gain=None)
            bf16 = replace(quantized, weight_bytes=2.0, linear=1.0).seconds(sequences, lengths, gpu, engines)
            return max(quantized.seconds(sequences, lengths, gpu, engines), bf16 / self.most_gain)

        # Without drafts: the decoding steps of one engine, its generated tokens, and their pairs of attention. In the
        # end every engine decodes `concurrent` sequences until the longest of all is done.
        concurrent = self.concurrent(sequences, lengths)
        steps = lengths.mean * (sequences / concurrent - 1) + lengths.longest(concurrent * max(1.0, engines))
        tokens, pairs = sequences * lengths.mean, sequences * lengths.response_pairs

        # One scheduled step: each model with its number of passes, the tokens of a sequence that the engine's model
        # reads, and those that the step adds to the response.
        models = [(self.model, 1)]
        tokens_read, tokens_given = 1, 1.0
        if self.drafts:
            models.append((self.drafts.model, self.drafts.tokens))
            tokens_read = self.drafts.tokens + 1
            tokens_given = tokens_per_verification(self.drafts.acceptance, self.drafts.tokens)

        # Decoding takes the longer of two times: of memory traffic (weights, then caches), and of operations.
        traffic = steps * self.weight_bytes * sum(passes * model.parameters for model, passes in models)
        traffic += pairs * self.number_bytes * sum(passes * model.cache for model, passes in models)
        flops = tokens * sum(self.linear * model.body + model.head for model, _ in models)
        flops += pairs * sum(model.pair for model, _ in models)
        rate = self.gpus * self.peak * GENERATION_SHARE
        decoding = max(traffic / (self.gpus * gpu.bandwidth * BANDWIDTH_SHARE), tokens_read * flops / rate)

        # Prefill: one pass over every prompt.
        prefill = sum(
            self.linear * model.body * lengths.prompt + model.pair * lengths.prompt**2 / 2 + model.head
            for model, _ in models
        )

        # With tensor parallelism the GPUs of an engine add up two small tensors in every layer.
        sums = 2 * sum(passes * model.layers for model, passes in models) if self.gpus > 1 else 0
        overhead = (STEP_SECONDS + sums * ALL_REDUCE_SECONDS) * steps
        return (decoding + overhead) / tokens_given + sequences * prefill / rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The sequences, passes and optimizer steps of one iteration. A sequence is a response with its prompt."""

    sequences: int  # number of sequences trained on
    steps: int  # number of optimizer steps
    epochs: int  # passes over the rollout batch
    micro_batches: int  # micro-batches of an optimizer step: GPUs beyond this number do not make training faster
    generated: float  # responses generated for each one trained on
    lengths: Lengths
    checkpoints: bool  # whether activations are computed again in backward
    extra: float  # number of forward passes without gradient over all sequences, by `extra_passes` in estimate.py


class Hours(NamedTuple):
    """The hours of a whole run by activity."""

    generation: float  # generating rollouts
    training: float  # forward and backward passes, and optimizer steps
    sending: float  # sending weights to engines
    evaluating: float = 0.0

    @property
    def all(self) -> float:
        """Return the hours of all activities."""
        return sum(self)

    @property
    def rollout_share(self) -> float:
        """Return the share of generation in the hours of all iterations; evaluations do not count."""
        return self.generation / self.iterations

    @property
    def iterations(self) -> float:
        """Return the hours of all iterations, without evaluations."""
        return self.generation + self.training + self.sending


def run_hours(
    work: Work,
    engine: EngineSpeed,
    models: Sequence[ModelCost],
    other_flops: float,
    iterations: int,
    gpu: Gpu,
    gpus: int,
    peak: float,
    linear: Linear = PLAIN,
) -> Hours:
    """Return the hours of all iterations on `gpus` GPUs, all of which generate, and then all train.

    Args:
        work: work of one iteration.
        engine: the engine that generates the rollouts.
        models: the models that are trained or scored: policy and rollout model.
        other_flops: FLOPs of the reference and the critic for one sequence in one epoch.
        iterations: number of iterations.
        gpu: data sheet of the GPUs.
        gpus: number of GPUs.
        peak: FLOP/s of one GPU at the precision of training.
        linear: relative time of quantized linear layers in training.
    """
    # Training: passes over the batch on the GPUs that have a micro-batch, and the optimizer's memory traffic.
    extra, busy_gpus = work.extra / work.epochs, min(gpus, work.micro_batches)
    flops = other_flops + sum(
        model.training(work.lengths, checkpoints=work.checkpoints, extra=extra, linear=linear) for model in models
    )
    traffic = OPTIMIZER_BYTES * sum(model.trained for model in models) * work.steps
    passes = flops * work.sequences * work.epochs / (busy_gpus * peak * TRAINING_SHARE)

    engines = gpus / engine.gpus  # number of engines, each on `engine.gpus` GPUs
    responses = work.sequences * work.generated / engines  # responses that each engine generates
    # The seconds of one iteration by activity; the result has the hours of all iterations.
    seconds = Hours(
        generation=engine.seconds(sequences=responses, lengths=work.lengths, gpu=gpu, engines=engines),
        training=passes + traffic / (gpus * gpu.bandwidth * BANDWIDTH_SHARE),
        sending=engine.model.parameters * engine.weight_bytes / WEIGHT_BYTES_PER_SECOND,
    )
    return Hours(*(activity * iterations / 3600 for activity in seconds))


def evaluation_hours(
    sets: Sequence[tuple[EngineSpeed, int]], times: int, lengths: Lengths, gpu: Gpu, gpus: int
) -> float:
    """Return the hours of a run's evaluations, in which the sets of problems are answered one after the other.

    Args:
        sets: for each set of problems, the engine that answers it and the number of answers.
        times: number of evaluations.
        lengths: lengths of prompts and answers.
        gpu: data sheet of the GPUs.
        gpus: number of GPUs.
    """
    # `gpus / engine.gpus` engines answer a set together, each an equal part of it.
    seconds = sum(
        engine.seconds(sequences=answers * engine.gpus / gpus, lengths=lengths, gpu=gpu, engines=gpus / engine.gpus)
        for engine, answers in sets
    )
    return seconds * times / 3600


def on_policy(work: Work) -> tuple[Work, int]:
    """Return the work of an on-policy iteration, and how many such iterations generate as many responses as `work`.

    In an on-policy iteration the current policy generates a batch and takes one optimizer step on it.
    """
    times = work.steps // work.epochs
    return replace(work, sequences=work.sequences // times, steps=1, epochs=1, extra=0.0), times
