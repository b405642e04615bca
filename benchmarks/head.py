"""The head beside full logits and other people's kernels: CPU seconds and extra memory, forward and backward.

    make .venv-peers/ready && .venv-peers/bin/pip install --no-deps liger-kernel==0.8.5
    OMP_NUM_THREADS=1 python benchmarks/head.py --repetitions 3 --json head.json > head.md
    OMP_NUM_THREADS=1 python benchmarks/head.py --only single --vocabulary 16384 --hidden 256 --tokens 256
    python benchmarks/head.py --device cuda --dtypes bf16 --tokens 16384 --repetitions 3 --peers "$(which python)"

Every measurement is a process of its own, and the variants take turns. Seconds, forward and backward, are CPU seconds
of one thread, on a GPU wall-clock after a run that is not counted. Extra memory is the highest above that before the
forward pass, with the gradients: resident memory, on a GPU what was allocated. bfloat16 means bfloat16 weights under
autocast to bfloat16: products are rounded to it, sums are float32. "of matmul" is the time that three products a head
would take at the rate of a plain one, as a part of both. A cell is the median and, in brackets, the smallest and the
largest; (x) is the ratio of medians to ours. Not yet run on a GPU.

What the variants give, with the gradient of the sum of log-probs, entropies and, of two heads, the forward KL:

    ours      log-probs, entropy, top k and log-probs at K given ids, of two heads also both KLs and the fill-ins
    naive     the same, by log_softmax of all logits
    trl       TRL's chunked kernels (trl 1.16): log-probs and entropy; of two heads the KL; no top k, no given ids
    liger     Liger's fused GRPO loss: log-probs only, and the gradient already in forward
    compiled  naive under torch.compile; on a GPU only
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from interleaved import MARK, Job, Result, measure
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEADS = {"single": 1, "joint": 2}
VARIANTS = {"single": ("ours", "naive", "trl", "liger"), "joint": ("ours", "naive", "trl")}
ON_GPU = ("compiled",)  # further ones
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
        self.top = job["top"]

    def forget_gradients(self) -> None:
        for tensor in (*self.hidden, *self.weight):
            tensor.grad = None


def ours(given: Inputs) -> Tensor:
    from jackpot.objectives.kernels.linear_head import Head, joint_linear_head, linear_head

    heads = [Head(hidden=hidden, weight=weight) for hidden, weight in zip(given.hidden, given.weight, strict=True)]
    options = dict(temperature=1.0, num_top=given.top, gather_ids=given.given)
    if len(heads) == 1:
        return loss_of([linear_head(heads[0], given.ids, **options)])
    output = joint_linear_head(*heads, given.ids, **options)
    return loss_of([output.policy, output.rollout_model]) + output.forward_kl.sum()


def loss_of(heads: Sequence[Any]) -> Tensor:
    return sum(head.log_probs.sum() + ENTROPY_WEIGHT * head.entropy.sum() for head in heads)


def naive(given: Inputs) -> Tensor:
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


def compiled(given: Inputs) -> Tensor:
    return torch.compile(naive)(given)


FUNCTIONS: dict[str, Callable[[Inputs], Tensor]] = {
    "ours": ours,
    "naive": naive,
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
    rounds = 50 if job["device"] == "cuda" else 1
    started = meter.clock()
    for _ in range(rounds):
        left @ right
    return 2.0 * rounds * tokens * vocabulary * hidden / (meter.clock() - started)


def work(job: Job) -> None:
    """Run one job in this process and print its result."""
    function, meter = FUNCTIONS[job["variant"]], METERS[job["device"]]()

    def run(given: Inputs) -> float:
        with torch.autocast(job["device"], torch.bfloat16) if job["dtype"] == "bf16" else nullcontext():
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
    result = {"forward": forward - started, "seconds": seconds, "of_matmul": products / rate / seconds}
    print(MARK + json.dumps(result | {"extra_mb": meter.highest()}), flush=True)


# What starts them


def attempt(job: Job, peers: str) -> Result | str:
    """Run one job in a process of its own; why not, where it cannot be run."""
    python = peers if job["variant"] in ("trl", "liger") else sys.executable
    if not Path(python).exists():
        return f"no {python}"
    try:
        return measure(Path(__file__), job, python, ["--work"])
    except RuntimeError as error:
        return str(error).strip().splitlines()[-1]


def repeated(jobs: Sequence[Job], options: argparse.Namespace) -> list[tuple[Job, list[Result] | str]]:
    """Every job as often, taking turns; one that failed is not tried again."""
    results: list[list[Result] | str] = [[] for _ in jobs]
    for _ in range(options.repetitions):
        for number, job in enumerate(jobs):
            if isinstance(results[number], str):
                continue
            result = attempt(job, options.peers)
            if isinstance(result, str):
                results[number] = result
            else:
                results[number].append(result)
    return list(zip(jobs, results, strict=True))


def cell(results: Sequence[Result], key: str, base: Sequence[Result] | None = None) -> str:
    values = [result[key] for result in results]
    digits = 0 if key == "extra_mb" else 2
    text = f"{statistics.median(values):.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
    if base:
        text += f" (x{statistics.median(values) / statistics.median(result[key] for result in base):.2f})"
    return text


def report(title: str, measured: Sequence[tuple[Job, list[Result] | str]], names: Sequence[str]) -> list[Job]:
    """A table of jobs; ratios are to ours with the same numbers. What was measured, for the file."""
    columns = [*names, "variant", "forward, s", "both, s", "of matmul", "extra, MB"]
    print(f"## {title}\n\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    key = lambda job: tuple(job[name] for name in names)  # noqa: E731
    base = {key(job): results for job, results in measured if job["variant"] == "ours" and not isinstance(results, str)}
    for job, results in measured:
        row = [str(job[name]) for name in names] + [job["variant"]]
        if isinstance(results, str):
            row += [f"skipped: {results}", "", "", ""]
        else:
            own = base.get(key(job)) if job["variant"] != "ours" else None
            row += [cell(results, "forward"), cell(results, "seconds", own), cell(results, "of_matmul")]
            row.append(cell(results, "extra_mb", own))
        print("| " + " | ".join(row) + " |")
    print(flush=True)
    return [job | {"results": results} for job, results in measured]


def versus(what: str) -> Callable[[argparse.Namespace], list[Job]]:
    """The section that compares all variants at one size."""

    def section(options: argparse.Namespace) -> list[Job]:
        sizes = {name: getattr(options, name) for name in ("vocabulary", "hidden", "tokens", "top", "device")}
        variants = VARIANTS[what] + (ON_GPU if options.device == "cuda" else ())
        jobs = [
            sizes | {"what": what, "dtype": dtype, "variant": variant}
            for dtype in options.dtypes
            for variant in variants
        ]
        title = f"{what}: V = {options.vocabulary}, H = {options.hidden}, N = {options.tokens}, K = {options.top}"
        return report(title, repeated(jobs, options), ["dtype"])

    return section


SECTIONS = {"single": versus("single"), "joint": versus("joint")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--top", type=int, default=20)
    parser.add_argument("--device", choices=METERS, default="cpu")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers/bin/python"), help="the python of TRL and Liger")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no GPU")
    torch.set_num_threads(1)
    if options.work:
        work(options.work)
        return
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()}, one thread"
    print(f"# The head\n\ntorch {torch.__version__}, {where}\n")
    records = [record for name in options.only for record in SECTIONS[name](options)]
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
