"""Every setting of a run, with its default written once. Layer 0: pydantic only; frozen, unknown keys refused.

A recipe is the YAML form of `Config`, with `arms: {name: overrides}` beside it. Overrides are dotted keys with values.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jackpot.errors import ConfigError, unknown_name
from jackpot.types import Sampling

Positive = Annotated[float, Field(gt=0.0)]  # .inf is allowed: no cap, no clip
NonNegative = Annotated[float, Field(ge=0.0)]
Finite = Annotated[float, Field(gt=0.0, lt=float("inf"))]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _by_name(default: str) -> BeforeValidator:
    """`correction: tis` is short for `correction: {name: tis}`; a block without a name has the default one."""

    def named(value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        return {"name": default, **value} if isinstance(value, Mapping) else value

    return BeforeValidator(named)


# Corrections (objectives/corrections.py says what each computes).


class NoCorrection(Strict):
    name: Literal["none"] = "none"
    proximal: Literal["old", "new", "rollout"] = "old"


class ISCorrection(Strict):
    name: Literal["is"] = "is"
    proximal: Literal["old", "new"] = "old"


class TISCorrection(Strict):
    name: Literal["tis"] = "tis"
    proximal: Literal["old", "new"] = "old"
    cap: Positive = 3.0


class OBRSCorrection(Strict):
    name: Literal["obrs"] = "obrs"
    proximal: Literal["old", "new", "rollout"] = "old"
    target: Literal["old", "new"] = "old"
    lam: Positive = 1.0
    c1: Positive = 3.0
    c2: Positive = 3.0
    mask: Literal["sampled", "expected"] = "sampled"
    normalizer: Literal["topk", "exact"] = "topk"
    kappa: Literal["prepass", "previous", "none"] = "prepass"  # with an exact Z, none spares its noise


PolicyCorrection = Annotated[
    NoCorrection | ISCorrection | TISCorrection | OBRSCorrection, Field(discriminator="name"), _by_name("obrs")
]
RolloutModelCorrection = Annotated[
    NoCorrection | ISCorrection | TISCorrection, Field(discriminator="name"), _by_name("tis")
]


class ObjectiveConfig(Strict):
    """The policy's loss."""

    correction: PolicyCorrection = OBRSCorrection()
    advantage: Literal["grpo", "dr_grpo"] = "grpo"
    clip_low: NonNegative | None = 0.2  # null: no clip
    clip_high: NonNegative | None = 0.2
    aggregate: Literal["token", "sequence", "constant"] = "token"
    count: Literal["proposed", "accepted"] = "proposed"

    @model_validator(mode="after")
    def _check(self) -> "ObjectiveConfig":
        if self.aggregate == "constant" and self.count == "accepted":
            raise ValueError(
                "aggregate 'constant' divides by sequences x max_new_tokens whatever is accepted; use count: proposed, "
                "or aggregate: token or sequence"
            )
        return self


class OptimizerConfig(Strict):
    """AdamW for one model. Steps are optimizer steps."""

    learning_rate: Finite
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.99)  # a list in YAML
    eps: Finite = 1e-8
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after warm-up, down to 0 at the last step


class PolicyConfig(Strict):
    path: str  # a folder, a hub name, or starter:NAME
    optimizer: OptimizerConfig


class RolloutModelConfig(Strict):
    """The model that writes, trained jointly (eqs. 6 to 8) unless frozen."""

    path: str
    optimizer: OptimizerConfig | None = None  # null: frozen
    correction: RolloutModelCorrection = TISCorrection()
    clip_low: NonNegative | None = 0.2
    clip_high: NonNegative | None = 0.2
    ppo_weight: NonNegative = 1.0
    distill_weight: NonNegative = 1.0  # lambda_distill
    distill: Literal["forward", "reverse"] = "forward"


# Tasks and engines: one class each, chosen by name.


class ArithmeticConfig(Strict):
    """Sums with written-out steps, made up on the spot."""

    name: Literal["arithmetic"] = "arithmetic"
    min_terms: Annotated[int, Field(ge=2)] = 2
    max_terms: Annotated[int, Field(ge=2)] = 3
    max_operand: Annotated[int, Field(ge=9)] = 40  # fewer numbers make too few problems to hold some out

    @model_validator(mode="after")
    def _check(self) -> "ArithmeticConfig":
        if self.min_terms > self.max_terms:
            raise ValueError(
                f"min_terms {self.min_terms} is above max_terms {self.max_terms}; lower it or raise the other"
            )
        return self


class ToolArithmeticConfig(ArithmeticConfig):
    """The same sums, with a calculator that answers every `=`."""

    name: Literal["tool_arithmetic"] = "tool_arithmetic"


class TransformersEngineConfig(Strict):
    """The learner's process decodes with Hugging Face transformers. Runs everywhere."""

    name: Literal["transformers"] = "transformers"
    max_batch_size: Count = 256  # sequences decoded at once
    dtype: Literal["fp32", "bf16"] = "fp32"


TaskConfig = Annotated[ArithmeticConfig | ToolArithmeticConfig, Field(discriminator="name"), _by_name("arithmetic")]
EngineConfig = Annotated[TransformersEngineConfig, _by_name("transformers")]


class BatchConfig(Strict):
    """Batches count sequences. prompts x group_size of them are one iteration's rollout batch."""

    prompts: Count
    group_size: Count
    step_size: Count | None = None  # sequences per optimizer step; null: the whole rollout batch
    epochs: Count = 1  # passes over one rollout batch
    micro_batch_tokens: Count = 16_384  # padded tokens in one forward pass

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group_size

    @property
    def steps_per_iteration(self) -> int:
        return self.rollouts // (self.step_size or self.rollouts) * self.epochs

    @model_validator(mode="after")
    def _check(self) -> "BatchConfig":
        step = self.step_size or self.rollouts
        if self.rollouts % step:
            raise ValueError(
                f"prompts {self.prompts} x group_size {self.group_size} = {self.rollouts} sequences do not divide into "
                f"optimizer steps of step_size {step}; choose a step_size that divides {self.rollouts}, or other "
                f"prompts or group_size"
            )
        return self


class EvaluationConfig(Strict):
    every: Count = 50  # iterations; before the first and after the last one too
    problems: Count = 512  # held out, one sampled answer each


class CheckpointConfig(Strict):
    every: Count = 100  # iterations; after the last one too
    keep: Count = 2  # the newest ones; the best is kept beside them


class RolloutsConfig(Strict):
    every: Count = 10  # iterations between saved rollout batches
    keep: Count = 20  # the newest files


class Config(Strict):
    """A whole run."""

    description: str = ""
    seed: Annotated[int, Field(ge=0)] = 0
    iterations: Count
    task: TaskConfig = ArithmeticConfig()
    policy: PolicyConfig
    rollout_model: RolloutModelConfig | None  # null: the policy writes for itself
    engine: EngineConfig = TransformersEngineConfig()
    sampling: Sampling = Sampling()
    batch: BatchConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    precision: Literal["fp32", "bf16"] = "fp32"  # of the training forward pass; weights and optimizer are fp32
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Count | Literal["auto"] = "auto"  # auto: the cores that are free when the run starts
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rollouts: RolloutsConfig = RolloutsConfig()

    @model_validator(mode="after")
    def _check(self) -> "Config":
        correction = self.objective.correction
        if correction.name == "obrs":
            self._check_obrs(correction)
        if self.batch.group_size == 1:
            raise ValueError(
                f"batch.group_size is 1, so every advantage of {self.objective.advantage!r} would be 0; use at least 2"
            )
        return self

    def _check_obrs(self, correction: OBRSCorrection) -> None:
        if correction.normalizer == "topk" and self.sampling.num_top_log_probs == 0:
            raise ValueError(
                "normalizer 'topk' needs the engine's top-k, but sampling.num_top_log_probs is 0; set it (20 is usual) "
                "or use normalizer: exact"
            )
        if correction.normalizer == "exact" and self.sampling.truncated:
            raise ValueError(
                f"normalizer 'exact' sums over the untruncated vocabulary, but the engine samples with top_p "
                f"{self.sampling.top_p} and top_k {self.sampling.top_k}; use top_p 1 and top_k 0, or normalizer: topk"
            )
        frozen = self.rollout_model is not None and self.rollout_model.optimizer is None
        moves = self.batch.steps_per_iteration > 1 and not frozen
        if correction.normalizer == "exact" and correction.target == "new" and moves:
            raise ValueError(
                f"normalizer 'exact' needs the weights that wrote the batch, but with {self.batch.steps_per_iteration} "
                f"optimizer steps per iteration they have moved on when target 'new' asks; use target: old or "
                f"normalizer: topk"
            )


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` laid over `base`, key by key and downwards. A change of `name` replaces its whole block.

    >>> merge({"a": {"name": "x", "k": 1}, "b": {"c": 1}}, {"a": {"name": "y"}, "b": {"d": 2}})
    {'a': {'name': 'y'}, 'b': {'c': 1, 'd': 2}}
    """
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, str) and "name" in old:
            value = {"name": value}
        elif isinstance(old, str) and isinstance(value, Mapping):
            old = {"name": old}
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        renamed = both and "name" in value and value["name"] != old.get("name")
        merged[key] = merge(old, value) if both and not renamed else value
    return merged


def nest(key: str, value: Any) -> dict[str, Any]:
    """`nest("a.b", 1)` is `{"a": {"b": 1}}`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def build_config(recipe: Mapping[str, Any], arm: str | None = None, overrides: Sequence[dict[str, Any]] = ()) -> Config:
    """The recipe with one arm's and the user's overrides, in this order of increasing strength.

    Raises:
        ConfigError: an unknown arm, an unknown key (with the likely one), a wrong type, or numbers that do not fit.
    """
    settings = {key: value for key, value in recipe.items() if key != "arms"}
    arms = recipe.get("arms") or {}
    if not isinstance(arms, Mapping) or not all(isinstance(changes or {}, Mapping) for changes in arms.values()):
        raise ConfigError(f"arms: {arms!r} was given; arms is a mapping from a name to a mapping of settings")
    if arm is not None:
        if arm not in arms:
            raise ConfigError(unknown_name("arm", arm, arms))
        settings = merge(settings, arms[arm] or {})
    for override in overrides:
        settings = merge(settings, override)
    try:
        return Config.model_validate(settings)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explain(one, settings) for one in error.errors())) from None


def _explain(error: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """One pydantic error as a sentence that names the key, the value and what is allowed."""
    location, value = _location(error["loc"], settings)
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        siblings = _valid_keys(location[:-1], settings)
        return unknown_name("setting", key, [".".join([*location[:-1], name]) for name in siblings])
    if error["type"] == "missing" and not isinstance(error["loc"][-1], int):
        return f"{key}: is missing; every run must set it"
    if error["type"] in ("union_tag_invalid", "literal_error"):
        given, allowed = _choice(error, value)
        return f"{key}: {unknown_name('value', given, allowed)}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {value!r} was given. {message}"


def _choice(error: Mapping[str, Any], value: Any) -> tuple[str, list[str]]:
    """What was given and what may be, for an error about one of a fixed set of names."""
    context = error["ctx"]
    given = context.get("tag", value if not isinstance(value, Mapping) else value.get("name"))
    return str(given), re.findall(r"'([^']+)'", context.get("expected_tags") or context["expected"])


def _location(loc: Sequence[str | int], settings: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Pydantic's location without the union tags it puts between keys, and the value that stands there."""
    path: list[str] = []
    here: Any = settings
    for index, part in enumerate(loc):
        keyed = isinstance(here, Mapping) and part in here
        indexed = isinstance(here, list | tuple) and isinstance(part, int) and part < len(here)
        if keyed or indexed:
            here = here[part]
        elif index < len(loc) - 1 or not isinstance(here, Mapping) or here.get("name") == part:
            continue  # a union's tag
        path.append(str(part))
    return path, here


def _valid_keys(path: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """The settings allowed in the block at `path`, with the class that the block's `name` chooses."""
    classes: list[type[BaseModel]] = [Config]
    here: Any = settings
    for part in path:
        here = here.get(part) if isinstance(here, Mapping) else None
        annotations = [cls.model_fields[part].annotation for cls in classes if part in cls.model_fields]
        classes = [cls for annotation in annotations for cls in _model_classes(annotation)]
        name = here.get("name") if isinstance(here, Mapping) else here
        named = [cls for cls in classes if "name" in cls.model_fields and cls.model_fields["name"].default == name]
        classes = named or classes
    return sorted({name for cls in classes for name in cls.model_fields})


def _model_classes(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [cls for part in getattr(annotation, "__args__", ()) for cls in _model_classes(part)]
