"""The floor of a measurement: matrix products that the work cannot do without, at the rate of a large one on this core.

`Products` counts what a process multiplies, dtype by dtype. Any Python with torch.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from interleaved import Job, Result, answer
from torch.utils import flop_counter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SIZE = 1024  # of the product
aten = torch.ops.aten


class Products(flop_counter.FlopCounterMode):
    """Counts the FLOPs of matrix products and of attention by the dtype of what is multiplied."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.by_dtype: Counter[str] = Counter()
        self.flop_registry |= {
            aten.addmm_: flop_counter.addmm_flop,
            aten.baddbmm_: flop_counter.baddbmm_flop,
            aten._scaled_dot_product_flash_attention_for_cpu: flop_counter.sdpa_flop,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_counter.sdpa_backward_flop,
        }

    def _count_flops(self, func_packet: Any, out: Any, args: tuple, kwargs: dict) -> Any:
        before = self.get_total_flops()
        out = super()._count_flops(func_packet, out, args, kwargs)
        if func_packet in self.flop_registry:
            dtype = args[1].dtype  # the first one may be what is added to
            self.by_dtype[NAMES.get(dtype, str(dtype))] += self.get_total_flops() - before
        return out


def forward_flops(per_token: int, head: int, per_pair: int, work: Result) -> float:
    """Count a forward pass of `step_task.tokens_and_pairs`: the head reads response tokens only. The first three are of
    `jackpot.models.cost`; `per_token` has the head in it."""
    body = per_token - head
    return body * (work["prompt_tokens"] + work["tokens"]) + head * work["tokens"] + per_pair * work["pairs"]


def cpu_seconds(run: Callable[[], object], repetitions: int) -> float:
    run()
    start = time.process_time()
    for _ in range(repetitions):
        run()
    return (time.process_time() - start) / repetitions


def product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a large product."""
    square = torch.randn(SIZE, SIZE).to(dtype)
    return 2 * SIZE**3 / cpu_seconds(lambda: square @ square, 10)


def work(job: Job) -> Result:
    torch.set_num_threads(1)
    return {"flops_per_second": product_rate(DTYPES[job["dtype"]])}


if __name__ == "__main__":
    answer(work)
