"""The head beside full logits and other people's kernels: CPU seconds and extra memory, forward and backward.

    make .venv-peers/ready && .venv-peers/bin/pip install --no-deps liger-kernel==0.8.5
    OMP_NUM_THREADS=1 python benchmarks/head.py --repetitions 3 --json head.json > head.md
    OMP_NUM_THREADS=1 python benchmarks/head.py --only single --vocabulary 16384 --hidden 256 --tokens 256

Every measurement is a process of its own, and the variants take turns. Seconds are CPU seconds of one thread, forward
and backward. Extra memory is the highest resident memory above that before the forward pass, with the gradients.
bfloat16 means bfloat16 weights under autocast to bfloat16: products are rounded to it, sums are float32. A cell is the
median and, in brackets, the smallest and the largest; (x) is the ratio of medians to ours. CPU only.

What the variants give, with the gradient of the sum of log-probs, entropies and, of two heads, the forward KL:

    ours      log-probs, entropy, top k and log-probs at K given ids, of two heads also both KLs and the fill-ins
    naive     the same, by log_softmax of all logits
    trl       TRL's chunked kernels (trl 1.16): log-probs and entropy; of two heads the KL; no top k, no given ids
    liger     Liger's fused GRPO loss: log-probs only, and the gradient already in forward
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
TRL_VOCABULARY_CHUNK = 32768  # trl.trainer.utils
LIGER_LENGTH = 256  # tokens of a sequence: its loss wants [sequences, tokens]
ENTROPY_WEIGHT = 0.01

# What a process of its own runs


class Inputs:
    """Random states, weights and ids, made in place: a copy would stay in the highest memory."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(0)
        n, v, h, dtype = job["tokens"], job["vocabulary"], job["hidden"], DTYPES[job["dtype"]]
        count = HEADS[job["what"]]
        self.hidden = [torch.empty(n, h, dtype=dtype).normal_().requires_grad_() for _ in range(count)]
        self.weight = [
            torch.empty(v, h, dtype=dtype).normal_(0.0, 2.0 * h**-0.5).requires_grad_() for _ in range(count)
        ]
        self.ids = torch.randint(v, (n,))
        self.given = torch.randint(v, (n, job["top"]))
        self.top = job["top"]


def ours(given: Inputs) -> Tensor:
    from jackpot.ops.linear_head import Head, joint_linear_head, linear_head

    heads = [Head(hidden=hidden, weight=weight) for hidden, weight in zip(given.hidden, given.weight, strict=True)]
    options = dict(temperature=1.0, num_top=given.top, gather_ids=given.given)
    if len(heads) == 1:
        return loss_of([linear_head(heads[0], given.ids, **options)])
    output = joint_linear_head(*heads, given.ids, **options)
    return loss_of([output.policy, output.rollout_model]) + output.forward_kl.sum()


def loss_of(heads: Sequence[Any]) -> Tensor:
    return sum(head.log_probs.sum() + ENTROPY_WEIGHT * head.entropy.sum() for head in heads)


def naive(given: Inputs) -> Tensor:
    loss, top_ids, all_log_probs = torch.zeros(()), None, []
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

    loss = torch.zeros(())
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
    loss, _ = kernel(hidden.view(*ids.shape, -1), weight, ids, torch.ones_like(ids), torch.ones(len(ids)))
    return loss


FUNCTIONS: dict[str, Callable[[Inputs], Tensor]] = {"ours": ours, "naive": naive, "trl": trl, "liger": liger}


def resident(key: str) -> float:
    """MB that this process holds: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def work(job: Job) -> None:
    """Run one job in this process and print its result."""
    function = FUNCTIONS[job["variant"]]

    def run(given: Inputs) -> float:
        with torch.autocast("cpu", torch.bfloat16) if job["dtype"] == "bf16" else nullcontext():
            loss = function(given)
        forward = time.process_time()
        loss.backward()
        return forward

    run(Inputs(job | {"tokens": 2, "vocabulary": 256, "hidden": 16}))  # imports and first calls
    given = Inputs(job)
    before = resident("VmRSS")
    if resident("VmHWM") > before + 1.0:  # more than now was held before
        Path("/proc/self/clear_refs").write_text("5")  # the highest from now on
    started = time.process_time()
    forward = run(given)
    seconds = time.process_time() - started
    result = {"forward": forward - started, "seconds": seconds, "extra_mb": resident("VmHWM") - before}
    print(MARK + json.dumps(result), flush=True)


# What starts them


def attempt(job: Job, peers: str) -> Result | str:
    """Run one job in a process of its own; why not, where it cannot be run."""
    python = sys.executable if job["variant"] in ("ours", "naive") else peers
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
    columns = [*names, "variant", "forward, s", "both, s", "extra, MB"]
    print(f"## {title}\n\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    key = lambda job: tuple(job[name] for name in names)  # noqa: E731
    base = {key(job): results for job, results in measured if job["variant"] == "ours" and not isinstance(results, str)}
    for job, results in measured:
        row = [str(job[name]) for name in names] + [job["variant"]]
        if isinstance(results, str):
            row += [f"skipped: {results}", "", ""]
        else:
            own = base.get(key(job)) if job["variant"] != "ours" else None
            row += [cell(results, "forward"), cell(results, "seconds", own), cell(results, "extra_mb", own)]
        print("| " + " | ".join(row) + " |")
    print(flush=True)
    return [job | {"results": results} for job, results in measured]


def versus(what: str) -> Callable[[argparse.Namespace], list[Job]]:
    """The section that compares all variants at one size."""

    def section(options: argparse.Namespace) -> list[Job]:
        shared = {name: getattr(options, name) for name in ("vocabulary", "hidden", "tokens", "top")} | {"what": what}
        jobs = [shared | {"dtype": dtype, "variant": variant} for dtype in options.dtypes for variant in VARIANTS[what]]
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
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers/bin/python"), help="the python of TRL and Liger")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.work:
        work(options.work)
        return
    print(f"# The head\n\ntorch {torch.__version__}, {platform.machine()}, one thread\n")
    records = [record for name in options.only for record in SECTIONS[name](options)]
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
