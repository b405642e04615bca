"""The import of vLLM, when an engine is made, and repairs of vLLM's faults.

Faults of vLLM 0.32 on a CPU that are repaired here (`drafts.py` has those that concern drafts):

- the INT8 kernel for AMX takes no float32 (`import_vllm` has oneDNN multiply on every CPU);
- `reload_weights` frees the scales of INT8 weights, which oneDNN still reads (`keep_scales`), and leaves the packed
  copy of a tied output layer as it was (`pack_tied_head`).

On every device, vLLM's process groups are destroyed with an engine that ends, although other engines of the process
use them (`keep_process_groups`).
"""

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jackpot.core.errors import EngineError
from jackpot.core.package import install
from jackpot.rollout.engines.vllm.drafts import expand

_LOAD_FORMAT = "jackpot"  # vLLM's name of the loader that takes weights from this process
SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # selects vLLM's second model runner, unless "0"
_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"  # "0": vLLM's engine runs in the process that makes it
_ENVIRONMENT = {  # defaults of environment variables that the user has not set
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM binds no thread to a core: the learner's threads use the cores too
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    SECOND_RUNNER: "0",  # tests ran with the first model runner; where Triton is installed vLLM takes the second
}


def import_vllm(compiles: bool) -> SimpleNamespace:
    """Import vLLM, repair vLLM's kernels for CPUs, and return the classes and functions of vLLM that an engine uses.

    The result has them as attributes, and the attribute `has_gpu`: whether the installed vLLM is for GPUs.

    Args:
        compiles: False disables torch.compile on this thread for good, and on no other thread. vLLM compiles at the
            first request, so torch.compile cannot be enabled again once vLLM has started.

    Raises:
        EngineError: vLLM is not installed.
    """
    # Set the variables of the environment that the user has not set.
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not compiles:
        torch._dynamo.config.disable = True  # vLLM would compile the gathering of log-probs: 14 s at the first request

    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.inputs import tokens_input
        from vllm.model_executor.kernels.linear.scaled_mm import cpu as cpu_int8
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.utils import cpu_triton_utils
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise EngineError(
            f"vLLM cannot be imported: {error}. Install it with {install('vllm')}, or use "
            f"engine=transformers; docs/vllm.md has the versions"
        ) from error

    # Repairs on a CPU: keep the temperatures of drafted tokens, and never choose the INT8 kernel for AMX.
    cpu_triton_utils._expand_kernel_impl = expand
    cpu_int8.check_cpu_sgl_kernel = lambda *_: False
    return SimpleNamespace(
        EngineArgs=EngineArgs,
        LLMEngine=LLMEngine,
        SamplingParams=SamplingParams,
        RequestOutputKind=RequestOutputKind,
        tokens_input=tokens_input,
        has_gpu=not current_platform.is_cpu(),
    )


def check_device(on_gpu: bool, has_gpu: bool) -> None:
    """Raise EngineError where vLLM would run on another kind of device than the learner.

    `on_gpu` says whether the learner runs on a GPU, `has_gpu` whether the installed vLLM is for GPUs.
    """
    if on_gpu != has_gpu:
        learner, vllm = ("a GPU", "the CPU") if on_gpu else ("the CPU", "a GPU")
        raise EngineError(
            f"training runs on {learner} and vLLM here is for {vllm}, so engine's settings would be meant for the "
            f"wrong one; set device: {'cpu' if on_gpu else 'cuda'}, install vLLM for {learner}, or use "
            f"engine=transformers"
        )


@contextmanager
def in_one_process() -> Iterator[None]:
    """Have vLLM engines made inside the `with` block run in this process, whatever environment variables say.

    Weights are handed to vLLM as tensors, which another process could not take.
    """
    before = os.environ.get(_MULTIPROCESSING)
    os.environ[_MULTIPROCESSING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MULTIPROCESSING]
        else:
            os.environ[_MULTIPROCESSING] = before


@contextmanager
def keep_process_groups() -> Iterator[None]:
    """Have a vLLM engine that ends inside the `with` block keep resources that other engines of the process use.

    Otherwise the end of an engine destroys vLLM's process groups and frees the scratch memory of kernels.
    """
    from vllm.v1.engine import core
    from vllm.v1.worker import workspace

    # The two functions that a vLLM engine calls at its end: in the block the first only collects garbage, and the
    # second does nothing.
    destroy_groups, forget_workspace = core.cleanup_dist_env_and_memory, workspace.reset_workspace_manager
    core.cleanup_dist_env_and_memory = gc.collect
    workspace.reset_workspace_manager = lambda: None
    try:
        yield
    finally:
        core.cleanup_dist_env_and_memory = destroy_groups
        workspace.reset_workspace_manager = forget_workspace


def register_loader(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return the value of `load_format` with which vLLM loads `weights` instead of those in the model's folder."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(_LOAD_FORMAT)
    class GivenWeightsLoader(BaseModelLoader):
        """A loader of vLLM that takes the tensors given to `register_loader`, which are in this process."""

        def download_model(self, model_config: Any) -> None:
            """Do nothing: the weights are in this process."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Load the weights given to `register_loader` into vLLM's model."""
            model.load_weights(iter(weights))

    return _LOAD_FORMAT


def reload_draft(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace the weights of vLLM's draft model, as `reload_weights` of vLLM's worker does for the main model.

    On a CPU, then pack a tied output layer again, since vLLM's packed copy still has the old weights.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model, config = worker.get_draft_model(), worker.vllm_config
    with set_current_vllm_config(config):
        initialize_layerwise_reload(model)
        model.load_weights(weights)
        finalize_layerwise_reload(model, config.speculative_config.draft_model_config)
    pack_tied_head(model)


def pack_tied_head(model: torch.nn.Module) -> None:
    """Pack a tied output layer again, because on a CPU `reload_weights` leaves vLLM's packed copy as it was.

    Do nothing on a GPU, where no layer is packed.
    """
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def mask_rows(rows: int, model: Any) -> None:
    """Have a model of vLLM give the logit -inf to every token id from `rows` on.

    vLLM normalizes the distribution after that, for sampling and for the log-probs it reports.
    """
    compute = model.compute_logits

    def masked(*arguments: Any, **named: Any) -> Tensor | None:
        """Compute logits [..., V] as the model does, but -inf for the token ids from `rows` on, which are not sampled.

        Return None where the model returns None.
        """
        if (logits := compute(*arguments, **named)) is not None:
            logits[..., rows:] = -torch.inf
        return logits

    model.compute_logits = masked


def keep_scales(model: torch.nn.Module) -> None:
    """Keep the scales of INT8 weights alive on a CPU.

    oneDNN reads the scales from the memory of the tensor that first held them, which vLLM 0.32 frees at the end of
    `reload_weights`.
    """
    for layer in model.modules():
        kernel: Any = getattr(getattr(layer, "scheme", None), "kernel", None)
        # Have a kernel of oneDNN also keep the scales whenever `reload_weights` lets it process new weights.
        if hasattr(kernel, "dnnl_handler"):
            kernel.process_weights_after_loading = partial(_pack_and_keep, kernel)


def _pack_and_keep(kernel: Any, layer: torch.nn.Module) -> None:
    """Pack a layer's INT8 weights as vLLM does, and keep a reference to the scales that oneDNN reads."""
    type(kernel).process_weights_after_loading(kernel, layer)
    kernel.first_scale = layer.weight_scale  # a reference that keeps the tensor alive
