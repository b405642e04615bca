"""The corrections that are replayed: every correction with its defaults, and some with a few other caps."""

from collections.abc import Sequence
from dataclasses import dataclass

from jackpot.config.config import Config
from jackpot.config.objective import ObjectiveConfig
from jackpot.core.errors import ConfigError, unknown_name
from jackpot.objectives.corrections import CORRECTIONS
from jackpot.objectives.joint import PolicyObjective
from jackpot.training.objectives import policy_objective

CLIP = 0.2  # PPO's clip for a run that sets none, and for another library's dump
# Corrections whose factor on a token depends on other tokens of its response.
WHOLE_RESPONSE = ("seq_tis", "seq_mask", "geo_mask", "prefix", "min_prefix", "f_tis")
# Surrogates with one ratio for a whole response: as soon as it is not 1, a token's factor depends on other tokens.
WHOLE_SURROGATE = ("gspo", "gmpo")
OBRS_PARTS = ("mask_only", "reweight_only", "z_only", "target_only", "coin_only")  # single parts of OBRS, for studies
_TO_NEW = {"target": "new", "proximal": "new"}  # for stale rollouts: align them to the updated policy
# Settings that are replayed beside the defaults. Those with `new`, for stale rollouts, come last: PPO's ratio is 1.
_VARIANTS = {
    "none": ({"proximal": "rollout"},),
    "tis": ({"cap": 2.0}, {"cap": 5.0}, {"cap": 10.0}, {"proximal": "new"}, {"proximal": "new", "cap": 10.0}),
    "icepop": ({"high": 2.0}, {"high": 10.0}),
    "drop": ({"cap": 10.0},),
    "seq_tis": ({"cap": 5.0},),
    "geo_mask": ({"low": 0.9, "high": 1.1},),
    "prefix": ({"low": 1.0, "high": 1.0},),
    "f_tis": ({"max_kl": 2.0},),
    "dppo": ({"divergence": "topk"},),
    "obrs": (
        {"mask": "expected"},
        {"mask": "expected", "c1": 10.0},
        _TO_NEW,
        {**_TO_NEW, "mask": "expected"},
        {**_TO_NEW, "mask": "expected", "c1": 10.0},
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionSetting:
    """A correction with fixed settings, which is replayed on saved rollouts."""

    name: str  # key of CORRECTIONS, or custom
    label: str  # the name, with the settings that differ from the defaults
    objective: PolicyObjective
    surrogate: str  # name of the surrogate
    changes: tuple[tuple[str, object], ...]  # settings that differ from the defaults, by their names in a recipe
    is_own: bool  # whether the run trains with this correction

    @property
    def weighs_whole_responses(self) -> bool:
        """Tell whether a token's factor depends on other tokens of the response."""
        return self.name in WHOLE_RESPONSE or (self.surrogate in WHOLE_SURROGATE and not self.aligns_to_new)

    @property
    def aligns_to_new(self) -> bool:
        """Tell whether PPO's ratio compares the updated policy with itself, so that the ratio is 1."""
        return self.objective.proximal == "new"


def settings_of(config: Config | None, names: Sequence[str]) -> list[CorrectionSetting]:
    """Return the corrections to replay, in the order of CORRECTIONS.

    Args:
        config: settings of the run; its clips are used, and its correction is added. None for another library's dump.
        names: names of the corrections to return; empty: all.

    Raises:
        ConfigError: an unknown name.
    """
    for name in names:
        if name not in CORRECTIONS:
            raise ConfigError(unknown_name("correction", name, CORRECTIONS))

    # Each correction with its defaults, then with other settings, then with the updated policy as its target.
    settings = [
        _setting(name, changes, config, is_own=False)
        for name in CORRECTIONS
        for changes in ({}, *_VARIANTS.get(name, ()))
    ]

    if config:  # the run's correction, without the settings that only say how Z is estimated
        changes = config.objective.correction.model_dump(exclude_unset=True, exclude={"name", "normalizer", "budget"})
        settings.append(_setting(config.objective.correction.name, changes, config, is_own=True))

    by_label = {setting.label: setting for setting in settings}  # the run's correction replaces an equal default
    return [setting for setting in by_label.values() if not names or setting.name in names]


def _setting(name: str, changes: dict[str, object], config: Config | None, is_own: bool) -> CorrectionSetting:
    """Build the setting of a correction from the changes to its defaults and from the run's surrogate and clips.

    Without a run, surrogate and clips are those of PPO. `is_own` says whether the correction is the run's own.
    """
    base = config.objective if config else ObjectiveConfig()
    surrogate = "ppo" if base.surrogate == "oapl" else base.surrogate  # oapl has no factor on an advantage
    default_clip = CLIP if surrogate == "ppo" else None
    objective = ObjectiveConfig.model_validate(
        {
            "correction": {"name": name, **changes},
            "surrogate": surrogate,
            "clip_low": default_clip if base.clip_low is None else base.clip_low,
            "clip_high": default_clip if base.clip_high is None else base.clip_high,
        }
    )

    # Read the changes back from the validated objective, without those that equal a default.
    correction = objective.correction
    fields = type(correction).model_fields  # settings of a custom correction may have no default
    defaults = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
    changes = {key: value for key, value in correction.model_dump().items() if value != defaults[key]}

    return CorrectionSetting(
        name=name,
        label=_label(name, changes, [key for key in ("target", "proximal") if key in fields]),
        objective=policy_objective(objective),
        surrogate=surrogate,
        changes=tuple(changes.items()),
        is_own=is_own,
    )


def _label(name: str, changes: dict[str, object], policies: list[str]) -> str:
    """Return a correction's name with the settings that differ from the defaults, such as `obrs new c1=10`.

    The single word `new` stands for `target=new proximal=new`, or for one of them where the correction lacks the other.

    Args:
        name: name of the correction.
        changes: settings that differ from the defaults.
        policies: the settings `target` and `proximal`, as far as the correction has them.
    """
    is_new = all(changes.get(key) == "new" for key in policies)
    texts = [_change_text(key, value) for key, value in changes.items() if not (is_new and key in policies)]
    return " ".join([name, *(["new"] if is_new else []), *texts])


def _change_text(key: str, value: object) -> str:
    """Return a changed setting as text: `key=value`, or the value alone for `mask`."""
    if key == "mask":
        return str(value)
    return f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
