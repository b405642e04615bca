"""Models of a learner that are sharded over ranks (FSDP2): every rank keeps a part of each weight, gradient and moment.

Status: experimental.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from jackpot.core.errors import ModelError
from jackpot.core.shards import is_sharded, local
from jackpot.models.parts import Part

_Result = TypeVar("_Result")

BUCKET = 2**30
"""Most bytes of whole weights that are gathered at once, unless a single weight is larger."""


class Gathered(nn.Module):
    """The root module of a learner's sharded models; a call gathers the weights and runs a part of a forward pass.

    All ranks have to make the same calls in the same order, and each call has to run the same layers.

    Args:
        models: the learner's models, by any name.
        device: device on which this rank computes.
    """

    def __init__(self, models: Mapping[str, PreTrainedModel], device: torch.device) -> None:
        """Hold the models as parts of one module; `device` is the one on which this rank computes."""
        super().__init__()
        self.models = nn.ModuleDict(models)
        self.device = device

    def __call__(self, work: Callable[[], _Result]) -> _Result:
        """Run `work`, a part of a forward pass, and return its result: tensors in lists, tuples or dicts.

        After a pass without gradient no backward pass frees the gathered weights, and the next pass would take them for
        the current ones. So they are freed here.
        """
        result = super().__call__(work)
        if not torch.is_grad_enabled() and isinstance(self, FSDPModule):  # `shard` has made it one
            self.reshard()
        return result

    @property
    def part(self) -> Part:
        """Return the part of a checkpoint that this rank writes."""
        return Part(dist.get_rank(), dist.get_world_size())

    def keep(self, weights: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Copy the weights that `gather` yields to the CPU: all of them on the first rank, none on the others.

        All ranks call this together; nothing waits for another rank afterwards.
        """
        return [(name, tensor.cpu()) for name, tensor in weights]

    def forward(self, work: Callable[[], Any]) -> Any:
        """Run `work`, inside of the hooks by which FSDP gathers the weights."""
        return work()


def check_layers(name: str, model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the layers of a model, which `shard` shards one by one.

    Raises:
        ModelError: the model has none.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"the {name}, {type(model).__name__}, has no layers that can be sharded one by one; train it in one "
            f"process, or take a model such as Qwen, Llama, Mistral or Gemma"
        )
    return layers


def shard(models: Mapping[str, PreTrainedModel], mesh: DeviceMesh, offload: bool) -> Gathered:
    """Shard models in place over all ranks of a mesh, which must be all ranks of torch.distributed.

    Their parameters become DTensors in float32 on the mesh's device, so optimizers have to be made afterwards. If the
    weights are still in their files (`load_model`), only one layer at a time is read whole into memory, or all that
    stands outside of layers.

    Gradients are summed over ranks, and never divided by the number of ranks.

    All models have one root module. The root's own weights, final norms and heads, are gathered while the root runs;
    the weights of a layer, or of an embedding that shares none with a head, while that layer or embedding runs. A
    weight that embedding and head share belongs to the root and stays one weight: sharded apart, it would become two
    without an error.

    Args:
        models: all that a learner reads, by any name; equal on all ranks.
        offload: keep this rank's parts of weights, gradients and moments in the memory of the CPU between their uses.

    Raises:
        ModelError: a model has no layers, or two weights that were one became two.
    """
    device = torch.device(mesh.device_type)
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    root = Gathered(models, device)
    ties_before = {name: _ties(model) for name, model in models.items()}

    units = []  # the modules whose weights are gathered by themselves: layers, and embeddings with their own weight
    for name, model in models.items():
        layers = check_layers(name, model)
        embedding = model.get_input_embeddings()
        shared = {path for paths in ties_before[name] for path in paths}
        units += [
            module for path, module in model.named_modules() if module is embedding and f"{path}.weight" not in shared
        ]
        units += layers

    for module in (*units, root):
        _read_into_memory(module)
        fully_shard(module, mesh=mesh, offload_policy=policy)

    for module in root.modules():
        if isinstance(module, FSDPModule):  # the settings of a module do not hold for those inside of it
            module.set_gradient_divide_factor(1.0)  # gradients are numerators, which add up over ranks
            module.set_force_sum_reduction_for_comms(True)  # gloo knows sums, not sums that are divided

    for name, model in models.items():
        if lost := ties_before[name] - _ties(model):
            raise ModelError(
                f"sharding would make different weights of {', '.join(sorted(lost.pop()))} of the {name}, which are "
                f"one; train it in one process"
            )
    return root


def gather(
    tensors: Iterable[tuple[str, Tensor]], rank_of: Callable[[str, int], int] = lambda name, size: 0
) -> Iterator[tuple[str, Tensor]]:
    """Gather sharded tensors, each on one rank, and yield them whole there. Plain tensors are yielded on every rank.

    All ranks have to go through the same tensors to the end. A message gathers up to `BUCKET` bytes of tensors, or one
    larger tensor. Sharded tensors for one rank keep their order.

    Args:
        rank_of: chooses the rank that gets a tensor, by the tensor's name and bytes; the first rank by default.
    """
    buckets: dict[int, list[tuple[str, Tensor]]] = {}  # by rank, the tensors that wait for their message
    for name, tensor in tensors:
        if not is_sharded(tensor):
            yield name, tensor
            continue

        rank = rank_of(name, tensor.nbytes)
        bucket = buckets.setdefault(rank, [])
        if bucket and sum(waiting.nbytes for _, waiting in bucket) + tensor.nbytes > BUCKET:
            yield from _gathered(bucket, rank)
            bucket.clear()
        bucket.append((name, tensor))

    for rank, bucket in buckets.items():
        if bucket:
            yield from _gathered(bucket, rank)


def _gathered(bucket: Sequence[tuple[str, Tensor]], rank: int) -> Iterator[tuple[str, Tensor]]:
    """Gather tensors on a rank in one message of bytes, and yield them there with their names; elsewhere yield nothing.
    Each shard is padded to the length of the first rank's shard."""
    ranks = dist.get_world_size()
    # Bytes of the first rank's shard of each tensor, rows times bytes per row: FSDP cuts a tensor's rows evenly, and
    # rounds up, as -(-a // b) does.
    lengths = [-(-len(tensor) // ranks) * tensor.nbytes // len(tensor) for _, tensor in bucket]
    shards = [local(tensor).contiguous().flatten().view(torch.uint8) for _, tensor in bucket]
    message = torch.zeros(sum(lengths), dtype=torch.uint8, device=shards[0].device)
    for room, shard in zip(message.split(lengths), shards, strict=True):
        room[: len(shard)] = shard

    received = [torch.empty_like(message) for _ in range(ranks)] if dist.get_rank() == rank else None
    dist.gather(message, received, dst=rank)
    if received is None:
        return

    # For each tensor, its shares in the messages of all ranks, in the order of the ranks.
    for (name, tensor), *shares in zip(
        bucket, *(rank_message.split(lengths) for rank_message in received), strict=True
    ):
        yield name, torch.cat(shares)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _read_into_memory(module: nn.Module) -> None:
    """Cast the weights of a module to float32, in place, except those that are sharded already.

    The cast reads weights of another dtype from their files. FSDP then copies this rank's part of each weight.
    """
    for weight in module.parameters():
        if not is_sharded(weight):
            weight.data = weight.data.float()


def _ties(model: nn.Module) -> set[frozenset[str]]:
    """Return the names of each weight that has several names."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}
