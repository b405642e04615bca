"""Times the loss layer, forward and backward: ours at several tiles beside full logits and other people's kernels.

In bf16 where nothing else is said. "of peak": three products of each head at the rate of the data sheet, as a part of
the time.
"""

from collections.abc import Callable
from functools import cache, partial

import head as cpu_head
import torch
from gpu_parts.machine import Machine, tf32
from gpu_parts.models import head_kernels, make_config
from gpu_parts.results import NotInstalled, Result, Row
from torch import Tensor

from jackpot.launch.head_kernel import head_options
from jackpot.objectives.kernels.autograd import DEFAULT_OPTIONS, HeadOptions
from jackpot.objectives.kernels.linear_head import Head, joint_linear_head, linear_head

TILES = ((2048, 8192), (4096, 16_384), (8192, 8192), (8192, 32_768))  # positions, tokens; besides the default
KEEPING = HeadOptions(logits_memory=2**40)  # of all logits, bytes: backward forms none again
HIDDEN = (1024, 4096)
SHAPE = {"tokens": 8192, "vocabulary": 151_936}
TINY = {"tokens": 64, "vocabulary": 512, "hidden": 32}
Loss = Callable[[cpu_head.Inputs], Tensor]


def rows(machine: Machine) -> list[Row]:
    found = []
    sizes = [(what, hidden) for hidden in HIDDEN for what in ("single", "joint")]
    for what, hidden in sizes[:2] if machine.tiny else sizes:
        job = {"what": what, "device": machine.device.type, "top": 20, "hidden": hidden}
        job |= TINY if machine.tiny else SHAPE
        for name, loss in variants(machine, what).items():
            found.append(Row(f"{what}, H = {hidden:,}: {name}", partial(measure, machine, job, loss, name == "ours")))
        for precision in ("TF32", "fp32"):
            run = partial(measure, machine, job, ours, False, precision)
            found.append(Row(f"{what}, H = {hidden:,}: ours, {precision}", run))
    return found


def variants(machine: Machine, what: str) -> dict[str, Loss]:
    found: dict[str, Loss] = {"ours": ours, "ours, logits kept": partial(ours, options=KEEPING)}
    for kernel in head_kernels(machine):
        found[f"ours, head_kernel: {kernel['head_kernel']}"] = partial(ours_by, kernel["head_kernel"])
    if not machine.tiny:  # one tile is like another there, and compiling takes many seconds
        found |= {f"ours, tile {rows} x {columns}": partial(ours, tile=(rows, columns)) for rows, columns in TILES}
        found["full logits, compiled"] = compiled
    found |= {"full logits": cpu_head.naive, "TRL": cpu_head.trl, "F.linear_cross_entropy": torch_loss}
    return found | ({"Liger": cpu_head.liger} if what == "single" else {})


def measure(machine: Machine, job: dict, loss_of: Loss, profiled: bool, precision: str = "bf16") -> Result:
    is_bf16 = precision == "bf16"
    given = cpu_head.Inputs(job | {"dtype": "bf16" if is_bf16 else "fp32"})

    def run() -> None:
        with torch.autocast(job["device"], torch.bfloat16, enabled=is_bf16 and machine.has_gpu):
            loss = loss_of(given)
        loss.backward()
        given.forget_gradients()

    with tf32(precision == "TF32"):
        try:
            seconds = machine.seconds(run)
        except ImportError as error:
            raise NotInstalled(f"{error.name} is not installed") from error
        extra = machine.extra_gb(run)
    flops = 3 * len(given.hidden) * 2.0 * job["tokens"] * job["vocabulary"] * job["hidden"]
    result = {"ms": 1e3 * seconds} | machine.shares(flops, seconds, precision) | {"extra GB": extra}
    return result | (machine.profile(run) if profiled else {})


def ours(given: cpu_head.Inputs, tile: tuple[int, int] | None = None, options: HeadOptions = DEFAULT_OPTIONS) -> Tensor:
    heads = [Head(hidden=hidden, weight=weight) for hidden, weight in zip(given.hidden, given.weight, strict=True)]
    how = {"temperature": 1.0, "num_top": given.top, "gather_ids": given.given, "tile": tile, "options": options}
    if len(heads) == 1:
        return cpu_head.loss_of([linear_head(heads[0], given.ids, **how)])
    output = joint_linear_head(*heads, given.ids, **how)
    return cpu_head.loss_of([output.policy, output.rollout_model]) + output.forward_kl.sum()


def ours_by(kernel: str, given: cpu_head.Inputs) -> Tensor:
    return ours(given, options=_options(kernel))


@cache
def _options(kernel: str) -> HeadOptions:
    """Return the options with a kernel of the head, which is compiled and tried in the first row that names it."""
    options = head_options(make_config("bf16", overrides={"head_kernel": kernel}))
    if options.reader.name != kernel:
        raise RuntimeError(f"the head is read by {options.reader.name}")
    return options


@cache
def _compiled() -> Loss:
    return torch.compile(cpu_head.naive)


def compiled(given: cpu_head.Inputs) -> Tensor:
    return _compiled()(given)


def torch_loss(given: cpu_head.Inputs) -> Tensor:
    """Log-probs alone: neither entropy nor divergence."""
    loss = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if loss is None:
        raise NotInstalled(f"torch {torch.__version__} has no linear_cross_entropy")
    pairs = zip(given.hidden, given.weight, strict=True)
    return sum(loss(hidden, weight, given.ids, reduction="sum") for hidden, weight in pairs)
