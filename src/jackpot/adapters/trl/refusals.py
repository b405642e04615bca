"""Refuses features of TRL's trainers that our corrections, or two models, cannot be combined with."""

import sys
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel, ProcessorMixin

from jackpot.adapters.trl.base import Batch, TRLTrainer
from jackpot.core.errors import ConfigError
from jackpot.objectives.joint import PolicyObjective

# LoRA settings of peft with which an adapter cannot be merged into the model's weights.
_UNMERGED = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices")
_IMAGES = "models that read images are not supported; give a model of text and its tokenizer"
_OF_RESPONSES = {"none", "seq_tis", "seq_mask", "geo_mask"}  # corrections that weight all tokens of a response alike


def _refuse(reasons: Mapping[str, object]) -> None:
    """Raise ConfigError with the first error text in `reasons` whose condition is true.

    `reasons` maps error texts to conditions.
    """
    for why, holds in reasons.items():
        if holds:
            raise ConfigError(why)


def has_turns(arguments: Mapping[str, Any]) -> bool:
    """Return whether responses have several turns, with text of tools between them; TRL drops their top-k lists."""
    return bool(arguments.get("tools") or arguments.get("environment_factory"))


def refuse_reference(batch: Batch, args: Any) -> None:
    """Raise ConfigError where TRL's KL compares a policy over the top_k tokens with a reference over all tokens."""
    if "ref_per_token_logps" in batch:
        raise ConfigError(
            f"beta is {args.beta} with top_k {args.top_k}: the policy is renormalized on the {args.top_k} tokens that "
            f"the sampler kept, and TRL reads the reference over the whole vocabulary, so their KL would be neither's; "
            f"use beta=0.0, or top_k=0"
        )


def refuse_anywhere(name: str, objective: PolicyObjective) -> None:
    """Raise ConfigError for what no trainer of TRL supports: corrections that read whole distributions, and Unsloth."""
    of_unsloth = "unsloth" in sys.modules or any("unsloth" in cls.__name__.lower() for cls in TRLTrainer.__mro__)
    # Each error text, and the condition on which it is raised.
    _refuse(
        {
            f"correction {name}: normalizer 'exact' needs the whole distribution that was sampled from, and TRL gets "
            f"its most probable tokens at best; use normalizer: topk, and no budget": objective.normalizer == "exact",
            "Unsloth rewrites the loss of TRL's trainer, so no correction of ours would reach it": of_unsloth,
        }
    )


def refuse(arguments: Mapping[str, Any], name: str, objective: PolicyObjective) -> None:
    """Raise ConfigError for arguments of TRL's trainer that the correction cannot be combined with.

    Args:
        arguments: the arguments of TRL's trainer, by name.
        name: name of the correction.
        objective: the policy's objective, which holds the correction.
    """
    args, rollout_func = arguments.get("args"), arguments.get("rollout_func")
    if args is None or not (args.use_vllm or rollout_func):
        raise ConfigError(
            "neither use_vllm=True nor a rollout_func was given: transformers generates with the policy itself and "
            "reports no log-probs, so there is nothing to correct; use TRL's GRPOTrainer"
        )

    refuse_anywhere(name, objective)
    # Each error text, and the condition on which it is raised.
    _refuse(
        {
            _IMAGES: isinstance(arguments.get("processing_class"), ProcessorMixin),
            f"vllm_importance_sampling_correction is True, TRL's own correction, and correction {name} would come on "
            f"top of it; set GRPOConfig(vllm_importance_sampling_correction=False)": (
                args.use_vllm and args.vllm_importance_sampling_correction
            ),
            "use_liger_kernel is True; its loss takes no weights of single tokens. Set it to False": (
                getattr(args, "use_liger_kernel", False)
            ),
            f"importance_sampling_level is 'sequence', where every token has the gradient of its whole response, so "
            f"correction {name} could not weigh or reject a token; use 'token', or one of the corrections "
            f"{', '.join(sorted(_OF_RESPONSES))}": (
                args.importance_sampling_level == "sequence" and name not in _OF_RESPONSES
            ),
            f"correction {name} needs the top-k of every token, which TRL drops between the turns of tools and "
            f"environments; use a correction that reads the ratio alone, such as tis, or a rollout_func in their "
            f"place": (has_turns(arguments) and "z" in objective.correction.reads),
        }
    )


def refuse_placement(trainer: TRLTrainer) -> None:
    """Raise ConfigError where this process does not hold the policy's whole output layer, or the policy reads images.

    A trainer calls this after TRL's set-up, which alone decides how the model is placed.
    """
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    sharded = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed ZeRO-3" if plugin and plugin.zero_stage == 3 else None
    if sharded:
        raise ConfigError(
            f"{sharded} shards the policy, and the correction reads its output layer whole; use DDP or DeepSpeed "
            f"ZeRO-1 or 2, or train with `jackpot train`, which shards (docs/distributed.md)"
        )
    # A model that reads images has a processor in the place of a tokenizer.
    _refuse({_IMAGES: isinstance(trainer.processing_class, ProcessorMixin)})


def refuse_prompts(model: PreTrainedModel) -> None:
    """Raise ConfigError where an adapter of peft learns a prompt, which the correction's forward pass leaves out."""
    for name, settings in getattr(model, "peft_config", {}).items():
        if settings.is_prompt_learning:
            raise ConfigError(
                f"the adapter {name!r} is of type {settings.peft_type.value}, whose prompt peft puts before the model, "
                f"where the correction does not see it; use an adapter inside the layers, such as LoRA"
            )


def refuse_unmerged(model: PreTrainedModel) -> None:
    """Raise ConfigError where peft's adapters cannot be merged into the weights that the policy's engine gets."""
    adapters = getattr(model, "peft_config", {})
    # What cannot be merged: settings of `_UNMERGED` that are on, and adapters of an embedding.
    features = [name for settings in adapters.values() for name in _UNMERGED if getattr(settings, name, None)]
    if any("lora_embedding" in name for name in model.state_dict()):
        features.append("an embedding in target_modules")

    kinds = {name: settings.peft_type.value for name, settings in adapters.items()}
    if adapters and (kinds != {"default": "LORA"} or features):
        raise ConfigError(
            f"the policy has the adapters {kinds}{' with ' if features else ''}{', '.join(features)}, which cannot be "
            f"merged into what its engine gets; where the policy writes, as its share or in evaluations, give it one "
            f"adapter of plain LoRA on linear layers"
        )


def check_server(client: Any) -> None:
    """Raise ConfigError where a vLLM server does not report the log-probs of the distribution that it samples from.

    TRL checks this only where its own correction is on. Servers of TRL before 1.16 do not tell, and pass.

    Args:
        client: TRL's client of the server; None in all processes but the first.
    """
    if client is None or not hasattr(client, "get_server_info"):
        return
    mode = client.get_server_info()["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        raise ConfigError(
            f"the vLLM server runs with --logprobs-mode {mode}, so its log-probs are not those of what it samples "
            f"from; start it with --logprobs-mode processed_logprobs"
        )


def refuse_with_two_models(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments of TRL's trainer that a rollout model cannot be combined with.

    `refuse` refuses those that the correction cannot be combined with.

    Args:
        arguments: the arguments of TRL's trainer, by name.
    """
    args = arguments.get("args")
    if args is None:
        raise ConfigError("args is missing; give a GRPOConfig")

    # Each error text, and the condition on which it is raised.
    _refuse(
        {
            "use_vllm is True, and TRL's vLLM has no rollout model; set it to False, and give an engine of ours, such "
            "as VLLMEngine, as `engine`": args.use_vllm,
            "rollout_func was given, but the rollout model's engine writes; leave it out, or use "
            "CorrectedGRPOTrainer": arguments.get("rollout_func"),
            f"num_iterations is {args.num_iterations}, and two models are trained once on each generation batch; use "
            f"1, and steps_per_generation for several optimizer steps": args.num_iterations != 1,
            "tools or environment_factory was given, whose turns are not supported with two models": has_turns(
                arguments
            ),
            "loss_type is 'luspo', an average that the rollout model's loss does not have; use another": (
                args.loss_type == "luspo"
            ),
            "fp16 is True, and nothing scales the rollout model's loss; use bf16=True, or float32": args.fp16,
        }
    )


def refuse_processes(trainer: TRLTrainer) -> None:
    """Raise ConfigError where a second model cannot be trained in the environment that accelerate has set up.

    It cannot with DeepSpeed, in another number format than TRL's settings name, or with several GPUs in one process.
    """
    used, named = trainer.accelerator.mixed_precision, "bf16" if trainer.args.bf16 else "no"
    # Each error text, and the condition on which it is raised.
    _refuse(
        {
            "DeepSpeed is on, which takes the place of the optimizer beside which the rollout model steps; use DDP, or "
            "train with `jackpot train`": getattr(trainer.accelerator.state, "deepspeed_plugin", None),
            f"accelerate computes in mixed precision {used!r}, and by GRPOConfig it would be {named!r}; leave "
            f"--mixed_precision out, and set bf16 in GRPOConfig": used != named,
            f"this process trains on {trainer.args.n_gpu} GPUs by DataParallel; start one process for each with "
            f"`accelerate launch`, or hide all but one by CUDA_VISIBLE_DEVICES": trainer.args.n_gpu > 1,
        }
    )
