"""The head beside full logits and other people's kernels: CPU seconds and extra memory, forward and backward.

    make .venv-peers/ready && .venv-peers/bin/pip install --no-deps liger-kernel==0.8.5
    python benchmarks/head.py --repetitions 3
    python benchmarks/head.py --only what=single --set vocabulary=16384 --set hidden=256 --set tokens=256
    python benchmarks/head.py --only dtype=bf16 --set device=cuda --set tokens=16384 --peers "$(which python)"

Seconds, forward and backward, are CPU seconds of one thread, on a GPU wall-clock after a run that is not counted.
Extra memory is the highest above that before the forward pass, with the gradients: resident memory, on a GPU what was
allocated. bf16 means bfloat16 weights under autocast to bfloat16: products are rounded to it, sums are float32. "of
products" is the time that three products a head would take at the rate of a plain one, as a part of both. Not yet run
on a GPU.

    single      one head: gradient of the sum of log-probs and entropies
    joint       two heads: of both and of the forward KL between them
    log-probs   one head: of the sum of log-probs alone; nothing else is formed

    ours            log-probs, entropy, top k and log-probs at K given ids, of two heads also both KLs and the fill-ins
    ours, logits kept     the same, all logits kept for backward: what it does where they fit in `head_logits_memory`
    ours, fp32 products   the same bfloat16 weights without autocast: every product is float32
    naive           the same as ours, by log_softmax of all logits; for log-probs alone by cross_entropy
    trl             TRL's chunked kernels: log-probs and entropy; of two heads the KL; no top k, no given ids. Off
                    CUDA they
                    multiply the gradient of the logits in float32, in bf16 too
    liger           Liger's fused GRPO loss: log-probs only, and the gradient already in forward
    torch           torch.nn.functional.linear_cross_entropy; in bf16 it takes the softmax of bfloat16 logits
    torch, chunked  the same with LinearCrossEntropyOptions(): the gradient already in forward
    compiled        naive under torch.compile; on a GPU only
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from floor import DTYPES
from interleaved import Benchmark, Job, Result, Results, main, markdown
from torch import Tensor

KEPT, EXACT = "ours, logits kept", "ours, fp32 products"
HEADS = {"single": 1, "joint": 2, "log-probs": 1}
VARIANTS = {
    "single": ("ours", KEPT, EXACT, "naive", "trl"),
    "joint": ("ours", KEPT, EXACT, "naive", "trl"),
    "log-probs": ("ours", KEPT, EXACT, "naive", "torch", "torch, chunked", "trl", "liger"),
}
PEERS = ("trl", "liger")
SIZES = {"vocabulary": 151_936, "hidden": 1024, "tokens": 4096, "top": 20, "device": "cpu"}
QUICK = {"vocabulary": 4096, "hidden": 64, "tokens": 512}
TRL_VOCABULARY_CHUNK = 32768  # trl.trainer.utils
LIGER_LENGTH = 256  # tokens of a sequence: its loss wants [sequences, tokens]
ENTROPY_WEIGHT = 0.01

# What a process of its own runs


class Inputs:
    """Random states, weights and ids, made in place: a copy would stay in the highest memory."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(0)
        n, v, h, dtype = job["tokens"], job["vocabulary"], job["hidden"], DTYPES[job["dtype"]]
        places = {"dtype": dtype, "device": job["device"]}
        heads = range(HEADS[job["what"]])
        self.hidden = [torch.empty(n, h, **places).normal_().requires_grad_() for _ in heads]
        self.weight = [torch.empty(v, h, **places).normal_(0.0, 2.0 * h**-0.5).requires_grad_() for _ in heads]
        self.ids = torch.randint(v, (n,), device=job["device"])
        self.given = torch.randint(v, (n, job["top"]), device=job["device"])
        self.top, self.what = job["top"], job["what"]

    def forget_gradients(self) -> None:
        for tensor in (*self.hidden, *self.weight):
            tensor.grad = None


def ours(given: Inputs, kept: bool = False) -> Tensor:
    """`kept`: logits stay for backward, whatever they take, as where they fit in `head_logits_memory`."""
    from jackpot.objectives.kernels.autograd import HeadOptions
    from jackpot.objectives.kernels.linear_head import Head, joint_linear_head, linear_head

    heads = [Head(hidden=hidden, weight=weight) for hidden, weight in zip(given.hidden, given.weight, strict=True)]
    how = {"temperature": 1.0, "options": HeadOptions(logits_memory=2**40 if kept else 0)}
    if given.what == "log-probs":
        return linear_head(heads[0], given.ids, only_log_probs=True, **how).log_probs.sum()
    how |= {"num_top": given.top, "gather_ids": given.given}
    if len(heads) == 1:
        return loss_of([linear_head(heads[0], given.ids, **how)])
    output = joint_linear_head(*heads, given.ids, **how)
    return loss_of([output.policy, output.rollout_model]) + output.forward_kl.sum()


def loss_of(heads: Sequence[Any]) -> Tensor:
    return sum(head.log_probs.sum() + ENTROPY_WEIGHT * head.entropy.sum() for head in heads)


def naive(given: Inputs) -> Tensor:
    if given.what == "log-probs":
        logits = (given.hidden[0] @ given.weight[0].t()).float()
        return -torch.nn.functional.cross_entropy(logits, given.ids, reduction="sum")
    loss, top_ids, all_log_probs = given.hidden[0].new_zeros((), dtype=torch.float32), None, []
    for hidden, weight in zip(given.hidden, given.weight, strict=True):
        log_probs = torch.log_softmax((hidden @ weight.t()).float(), dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        loss = loss + log_probs.gather(1, given.ids[:, None]).sum() + ENTROPY_WEIGHT * entropy.sum()
        with torch.no_grad():
            top_ids = log_probs.topk(given.top).indices if top_ids is None else log_probs.gather(1, top_ids)
            log_probs.gather(1, given.given)
        all_log_probs.append(log_probs)
    if len(all_log_probs) == 1:
        return loss
    fixed, other = all_log_probs[0].detach(), all_log_probs[1]
    with torch.no_grad():
        (other.exp() * (other - fixed)).sum(-1)
        other.topk(given.top)
    return loss + (fixed.exp() * (fixed - other)).sum()


def trl(given: Inputs) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    loss = given.hidden[0].new_zeros((), dtype=torch.float32)
    if given.what == "log-probs":
        options = (None, given.ids, 1.0, TRL_VOCABULARY_CHUNK, None, 1.0, ("log_probs",))
        return ChunkedLogProbFunction.apply(given.hidden[0], given.weight[0], *options)[0].sum()
    for hidden, weight in zip(given.hidden, given.weight, strict=True):
        log_probs, entropy, *_ = ChunkedLogProbFunction.apply(
            hidden, weight, None, given.ids, 1.0, TRL_VOCABULARY_CHUNK, None, 1.0, ("entropy",)
        )
        loss = loss + log_probs.sum() + ENTROPY_WEIGHT * entropy.sum()
    if len(given.hidden) == 1:
        return loss
    (policy, other), (policy_weight, other_weight) = given.hidden, given.weight
    teacher = policy.detach(), policy_weight.detach()
    divergence, _ = ChunkedDivergenceFunction.apply(other, other_weight, None, *teacher, None, 0.0)
    return loss + divergence.sum()


def liger(given: Inputs) -> Tensor:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    (hidden,), (weight,) = given.hidden, given.weight
    length = min(LIGER_LENGTH, len(hidden))
    ids = given.ids.view(-1, length)
    kernel = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False)
    advantages = torch.ones(len(ids), device=ids.device)
    loss, _ = kernel(hidden.view(*ids.shape, -1), weight, ids, torch.ones_like(ids), advantages)
    return loss


def of_torch(given: Inputs, **options: Any) -> Tensor:
    loss = torch.nn.functional.linear_cross_entropy
    return -loss(given.hidden[0], given.weight[0], given.ids, reduction="sum", **options)


def of_torch_chunked(given: Inputs) -> Tensor:
    return of_torch(given, options=torch.nn.LinearCrossEntropyOptions())


def compiled(given: Inputs) -> Tensor:
    return torch.compile(naive)(given)


FUNCTIONS: dict[str, Callable[[Inputs], Tensor]] = {
    "ours": ours,
    KEPT: partial(ours, kept=True),
    EXACT: ours,
    "naive": naive,
    "torch": of_torch,
    "torch, chunked": of_torch_chunked,
    "trl": trl,
    "liger": liger,
    "compiled": compiled,
}


class Processor:
    """Time and memory of this process on the CPU."""

    def clock(self) -> float:
        return time.process_time()

    def open(self) -> None:
        """From now on count the highest memory."""
        self._before = resident("VmRSS")
        if resident("VmHWM") > self._before + 1.0:  # more than now was held before
            Path("/proc/self/clear_refs").write_text("5")  # the highest from now on

    def highest(self) -> float:
        """MB above what there was at `open`."""
        return resident("VmHWM") - self._before


class Gpu:
    """The same of the current GPU."""

    def clock(self) -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    def open(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def highest(self) -> float:
        return (torch.cuda.max_memory_allocated() - self._before) / 2**20


METERS = {"cpu": Processor, "cuda": Gpu}


def resident(key: str) -> float:
    """MB that this process holds: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def matmul_rate(job: Job, meter: Processor | Gpu) -> float:
    """FLOP/s of a plain product of the loss layer's shape."""
    tokens, vocabulary, hidden = min(1024, job["tokens"]), min(16_384, job["vocabulary"]), job["hidden"]
    places = {"dtype": DTYPES[job["dtype"]], "device": job["device"]}
    left, right = torch.ones(tokens, hidden, **places), torch.ones(hidden, vocabulary, **places)
    left @ right
    rounds = 50 if job["device"] == "cuda" else 3
    started = meter.clock()
    for _ in range(rounds):
        left @ right
    return 2.0 * rounds * tokens * vocabulary * hidden / (meter.clock() - started)


def work(job: Job) -> Result:
    """Run one job in this process."""
    torch.set_num_threads(1)
    function, meter = FUNCTIONS[job["variant"]], METERS[job["device"]]()
    rounded = job["dtype"] == "bf16" and job["variant"] != EXACT

    def run(given: Inputs) -> float:
        with torch.autocast(job["device"], torch.bfloat16) if rounded else nullcontext():
            loss = function(given)
        forward = meter.clock()
        loss.backward()
        return forward

    run(Inputs(job | {"tokens": 2, "vocabulary": 256, "hidden": 16}))  # imports and first calls
    rate = matmul_rate(job, meter)
    given = Inputs(job)
    if job["device"] == "cuda":
        run(given)  # kernels are chosen, or compiled, for the shape
        given.forget_gradients()
    meter.open()
    started = meter.clock()
    forward = run(given)
    seconds = meter.clock() - started
    products = 3 * HEADS[job["what"]] * 2.0 * job["tokens"] * job["vocabulary"] * job["hidden"]
    result = {"forward": forward - started, "seconds": seconds, "of_products": products / rate / seconds}
    return result | {"extra_mb": meter.highest()}


# What starts them


def jobs(quick: bool) -> list[Job]:
    sizes = SIZES | (QUICK if quick else {})
    return [
        sizes | {"what": what, "dtype": dtype, "variant": variant} | ({"peer": True} if variant in PEERS else {})
        for what, variants in VARIANTS.items()
        for dtype in DTYPES
        for variant in variants
        if not (variant == EXACT and dtype == "fp32")
    ]


def medians(results: Results, what: str, dtype: str, variant: str) -> str:
    """CPU seconds and extra memory of one variant: medians of the turns."""
    fields = {"what": what, "dtype": dtype, "variant": variant}
    if not results.jobs(**fields):
        return ""
    if why := results.failure(**fields):
        return f"not run: {why}"
    seconds, extra = results.values("seconds", **fields), results.values("extra_mb", **fields)
    return f"{median(seconds):.2f}, {median(extra):,.0f}" if seconds else "to be measured"


def report(results: Results) -> str:
    found = [(what, dtype) for what in VARIANTS for dtype in DTYPES if results.jobs(what=what, dtype=dtype)]
    variants = dict.fromkeys(variant for listed in VARIANTS.values() for variant in listed)
    rows = [(variant, *(medians(results, *size, variant) for size in found)) for variant in variants]
    columns = (f"{what}, {dtype}" for what, dtype in found)
    return markdown(("CPU s, extra MB", *columns), rows) if found else "to be measured"


BENCHMARK = Benchmark("head", jobs, report, repetitions=2)

if __name__ == "__main__":
    main(BENCHMARK, __doc__, work)
