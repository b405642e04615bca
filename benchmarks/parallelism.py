"""How far apart a sampler and a learner are whose processes split one model in different ways (gloo ranks on a CPU).

Two byte-level models after a moment of training, one dense and one a mixture of experts. Their responses were drawn by
one process in bfloat16; then every sampler computes them token by token with a cache and every learner in one pass,
each split over ranks as `split_models.py` says. What a row says:

    log p      mean |log p_sampler - log p_learner| of the drawn tokens, nats
    largest    the largest |p_sampler - p_learner|
    KL         by k3, nats per token
    top 1      share of tokens where the most probable tokens of the two differ
    experts    of a mixture: share of tokens that some layer sends to other experts

    python benchmarks/parallelism.py
"""

import argparse
import copy
import platform
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import parity
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from split_models import Distributions, Split, compare, decode, read, split_tensors
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.analysis.mismatch.measure import MismatchNumbers
from jackpot.models.forward import widen_head
from jackpot.rollout.engines.transformers.attention import set_attention

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
MODELS = {"dense": ("qwen3", {}), "mixture": ("qwen3_moe", EXPERTS)}
PROMPTS, PROMPT, BATCH = 32, 16, 5  # BATCH: of the control, whose batches are smaller


class Layout(NamedTuple):
    """One way to share a model out."""

    name: str
    split: Split | None
    ranks: int


ONE = Layout("one process", None, 1)
TENSOR_2, TENSOR_4 = Layout("tensors, 2 ranks", "tensor", 2), Layout("tensors, 4 ranks", "tensor", 4)
HEADS_2 = Layout("sequence, 2 ranks, all-to-all", "heads", 2)
KEYS_2 = Layout("sequence, 2 ranks, merged keys", "keys", 2)
SAMPLERS, LEARNERS = (ONE, TENSOR_2, TENSOR_4, KEYS_2), (ONE, TENSOR_2, TENSOR_4, HEADS_2, KEYS_2)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def on_ranks(layout: Layout, work: Callable[[], Distributions]) -> Distributions:
    """Run the same work on every rank, each a fork of this process; the result of rank 0."""
    if layout.split is None:
        return work()
    with TemporaryDirectory() as folder:
        mp.start_processes(_rank, args=(layout.ranks, folder, work), nprocs=layout.ranks, start_method="fork")
        return torch.load(Path(folder) / "result.pt", weights_only=True)


def _rank(rank: int, ranks: int, folder: str, work: Callable[[], Distributions]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = work()
    if rank == 0:
        torch.save(result, Path(folder) / "result.pt")
    dist.destroy_process_group()


def side(
    model: PreTrainedModel, dtype: torch.dtype, layout: Layout, text: parity.Text, samples: bool, wide: bool = False
) -> Distributions:
    """The distributions of one side, which has a model of its own."""

    def work() -> Distributions:
        own = copy.deepcopy(model).to(dtype).eval()
        if wide:
            widen_head(own)
        if layout.split == "tensor":
            split_tensors(own)
        if samples:
            set_attention(own, "sdpa")  # as the engine decodes
            return decode(own, text.ids, text.prompt, layout.split)
        return read(own, text.ids, layout.split)

    return on_ranks(layout, work)


def cast(model: PreTrainedModel, text: parity.Text, wide: bool) -> Distributions:
    """A learner whose weights are fp32 and whose forward pass is bf16, as `precision: bf16` trains."""
    own = copy.deepcopy(model)
    if wide:
        widen_head(own)
    with torch.autocast("cpu", torch.bfloat16):
        return read(own, text.ids, None)


def in_batches(model: PreTrainedModel, dtype: torch.dtype, text: parity.Text) -> Distributions:
    """The learner of one process in smaller batches."""
    own = copy.deepcopy(model).to(dtype).eval()
    parts = [read(own, ids, None) for ids in text.ids.split(BATCH)]
    log_probs, experts = zip(*parts, strict=True)
    return torch.cat(log_probs), None if experts[0] is None else torch.cat(experts)


def drawn(model: PreTrainedModel, library: Tensor) -> parity.Text:
    starts = torch.randint(len(library) - PROMPT, (PROMPTS,), generator=torch.Generator().manual_seed(1))
    prompts = torch.stack([library[start : start + PROMPT] for start in starts.tolist()])
    return parity.drawn(model, prompts, 0, None)


def pairs(model: PreTrainedModel, dtype: torch.dtype, text: parity.Text) -> Iterator[tuple[str, MismatchNumbers]]:
    """Every sampler against every learner, and the controls."""

    def against(p: Distributions, q: Distributions) -> MismatchNumbers:
        return compare(p, q, text.ids, text.prompt, text.exists)

    learners = {layout: side(model, dtype, layout, text, samples=False) for layout in LEARNERS}
    samplers = {layout: side(model, dtype, layout, text, samples=True) for layout in SAMPLERS}
    again = side(model, dtype, TENSOR_2, text, samples=False)
    yield "control: a learner, tensors, 2 ranks | the same again", against(learners[TENSOR_2], again)
    yield f"control: a learner | the same in batches of {BATCH}", against(learners[ONE], in_batches(model, dtype, text))
    for layout in LEARNERS[1:]:
        yield f"a learner | a learner, {layout.name}", against(learners[ONE], learners[layout])
    for sampler, learner in product(SAMPLERS, LEARNERS):
        yield f"{sampler.name} | {learner.name}", against(samplers[sampler], learners[learner])


def heads(model: PreTrainedModel, text: parity.Text) -> Iterator[tuple[str, MismatchNumbers]]:
    """The output layer in bf16 or fp32 on either side, of a sampler in bf16 and two learners."""
    names = {False: "bf16", True: "fp32"}
    samplers = {wide: side(model, torch.bfloat16, ONE, text, samples=True, wide=wide) for wide in names}
    learners = {("bf16 weights", wide): side(model, torch.bfloat16, ONE, text, False, wide) for wide in names}
    learners |= {("autocast", wide): cast(model, text, wide) for wide in names}
    for (kind, wide), learner in learners.items():
        for by, sampler in samplers.items():
            name = f"head {names[by]} | {kind}, head {names[wide]}"
            yield name, compare(sampler, learner, text.ids, text.prompt, text.exists)


def row(name: str, found: MismatchNumbers) -> str:
    both = f"{found.log_gap.value:.2e} | {found.max_gap:.2e} | {found.k3.value:.1e} | {found.other_token.value:.2%}"
    return f"| {name} | {both} | {'-' if found.other_experts is None else f'{found.other_experts.value:.2%}'} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=150, help="of the models' training")
    steps = arguments.parse_args().steps
    torch.set_num_threads(1)
    began, library = time.process_time(), parity.library_bytes()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}, 1 thread a rank")
    for kind, (family, sizes) in MODELS.items():
        model = parity.trained(family, 0, library, steps, num_key_value_heads=4, **sizes)
        text = drawn(model, library)
        print(f"\n{kind}: {text.exists.sum()} tokens, {time.process_time() - began:.0f} CPU s of this process")
        for name, dtype in DTYPES.items():
            print(f"\n{kind}, {name}\n")
            print("| sampler | learner | log p | largest | KL | top 1 | experts |\n|---|---|---|---|---|---|---|")
            for pair, found in pairs(model, dtype, text):
                print(row(pair, found), flush=True)
        print(f"\n{kind}, output layer\n")
        print("| sampler | learner | log p | largest | KL | top 1 | experts |\n|---|---|---|---|---|---|---|")
        for pair, found in heads(model, text):
            print(row(pair, found), flush=True)


if __name__ == "__main__":
    main()
