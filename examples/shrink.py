"""Makes a small rollout model for a policy that has no small sibling: drops layers, then distils the policy into it.

    python -m examples.shrink MODEL OUT --layers 15

MODEL is the policy, a folder or a name of the hub. The policy stays as it is and answers the prompts of a recipe's
task; the model with fewer layers is trained to give every token of these answers the policy's distribution. The
divergence is exact, over the whole vocabulary. Settings such as `iterations=30` come last. A second call goes on where
the first was stopped.
"""

import argparse
import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import jackpot
from jackpot.analysis.simulate.candidates import simulate_candidates
from jackpot.config.config import Config
from jackpot.config.recipes import resolve
from jackpot.models.cost import forward_cost
from jackpot.models.load import load_meta_model, load_model, load_tokenizer

DISTILLATION = (  # what differs from the recipe of the task
    "iterations=60",
    "policy.optimizer=null",
    "rollout_model.share=0.0",  # the policy generates everything
    "rollout_model.ppo_weight=0.0",
    "rollout_model.optimizer={learning_rate: 5.0e-4, warmup_steps: 5, schedule: cosine}",
    "objective.correction=none",
    "batch.mini_batch_size=32",
    "guard.check_engine=false",
    "evaluation={every: 30, problems: 64}",
)


def spread(count: int, layers: int) -> list[int]:
    """Choose `count` of a model's layers at equal distances, the first and the last among them."""
    return [round(index * (layers - 1) / max(count - 1, 1)) for index in range(count)]


def keep_layers(model: PreTrainedModel, kept: list[int]) -> PreTrainedModel:
    """Copy a model with some of its layers, in their order; what is not a layer is copied as it is."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in kept]

    small = type(model)(config)
    (layers,) = (name for name, part in model.named_modules() if name.endswith("layers"))
    for of_small, of_model in zip(small.get_submodule(layers), kept, strict=True):
        of_small.load_state_dict(model.get_submodule(layers)[of_model].state_dict())

    others = {name: weight for name, weight in model.state_dict().items() if not name.startswith(f"{layers}.")}
    small.load_state_dict(others, strict=False)
    small.tie_weights()
    small.generation_config = model.generation_config
    return small


def shrink(path: str, out: Path, kept: list[int], recipe: str, overrides: list[str]) -> None:
    """Write a model with some of the layers of another to `out`, distilled, and `out` with `-start` before that.

    Args:
        recipe: name or path of a recipe, whose task, batches and sampling are taken.
        overrides: further settings.
    """
    start, run = out.with_name(f"{out.name}-start"), out.with_name(f"{out.name}-run")
    if not start.exists():
        small = keep_layers(load_model(path, torch.float32), kept)
        small.save_pretrained(start)
        load_tokenizer(path).save_pretrained(start)

    settings = [f"policy.path={path}", f"rollout_model.path={start}", *DISTILLATION, *overrides]
    trained = jackpot.train(recipe, *settings, folder=run, on_metrics=show)
    newest = max((run / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name.partition("-")[2]))
    shutil.copytree(newest / "rollout_model", out, dirs_exist_ok=True)

    compare(path, [start, out], resolve(recipe, None, settings))
    seconds = sum(line.get("cpu_seconds/train", 0.0) + line.get("cpu_seconds/rollout", 0.0) for line in trained.metrics)
    print(f"{seconds / 60:.0f} CPU minutes of distillation. {out} is a rollout model: rollout_model.path={out}")


def show(line: Mapping[str, Any]) -> None:
    """Print how far the two models are apart in an iteration."""
    if "mismatch/kl_policy_rollout" in line:
        print(f"iteration {line['iteration']}: KL {line['mismatch/kl_policy_rollout']:.3f} nats a token", flush=True)
    if "eval/rollout_model_accuracy" in line:
        print(
            f"  right: {line['eval/rollout_model_accuracy']:.1%}, policy {line['eval/policy_accuracy']:.1%}", flush=True
        )


def compare(policy: str, folders: list[Path], config: Config) -> None:
    """Print what each model would be as the policy's rollout model, on held-out prompts."""
    costs = {path: forward_cost(load_meta_model(path)).per_token for path in (policy, *map(str, folders))}
    measured = simulate_candidates(config, [str(folder) for folder in folders], prompts=128, seed=0)
    print(f"{'model':24s} {'FLOPs a token':>14s} {'KL':>7s} {'acceptance':>11s} {'right':>7s}")
    for model in measured:
        share = costs[model.name] / costs[policy]
        print(
            f"{Path(model.name).name:24s} {share:13.0%} {model.kl_policy_rollout:8.3f} {model.acceptance:11.3f} "
            f"{model.accuracy or 0.0:7.1%}"
        )
        print(f"  {model.answer['sentence']}")


def main() -> None:
    """Shrink the model that the command line names."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("model", help="the policy: a folder, or a name of the hub")
    arguments.add_argument("out", type=Path, help="folder of the small model")
    arguments.add_argument("--layers", type=int, default=15, help="layers that are kept, at equal distances")
    arguments.add_argument("--keep", help="numbers of the layers that are kept, from 0, as 0,1,2,27,28,29")
    arguments.add_argument("--recipe", default="smollm", help="whose task is answered; default smollm")
    arguments.add_argument("overrides", nargs="*", help="settings of the distillation as key=value")
    options = arguments.parse_intermixed_args()

    config = load_meta_model(options.model).config
    kept = spread(options.layers, config.num_hidden_layers)
    if options.keep:
        kept = [int(layer) for layer in options.keep.split(",")]
    shrink(options.model, options.out, kept, options.recipe, options.overrides)


if __name__ == "__main__":
    main()
