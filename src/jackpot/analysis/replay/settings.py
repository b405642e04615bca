"""Which corrections are replayed: every one with its defaults, and with a few other caps."""

from collections.abc import Sequence
from dataclasses import dataclass

from jackpot.config.run import BatchConfig, Config, ObjectiveConfig, OptimizerConfig, PolicyConfig
from jackpot.core.errors import ConfigError, unknown_name
from jackpot.launch.objectives import policy_objective
from jackpot.objectives.corrections import CORRECTIONS
from jackpot.objectives.joint import PolicyObjective

CLIP = 0.2  # of PPO, where a run says nothing or has none
WHOLE = ("seq_tis", "seq_mask", "geo_mask")  # weigh a token by its whole response
PARTS = ("mask_only", "reweight_only", "z_only", "target_only", "coin_only")  # OBRS taken apart, for studies
_OTHER = {  # beside the defaults
    "tis": ({"cap": 2.0}, {"cap": 5.0}, {"cap": 10.0}),
    "icepop": ({"high": 2.0}, {"high": 10.0}),
    "drop": ({"cap": 10.0},),
    "seq_tis": ({"cap": 5.0},),
    "geo_mask": ({"low": 0.9, "high": 1.1},),
    "obrs": ({"mask": "expected"}, {"mask": "expected", "c1": 10.0}),
}
_TO_NEW = {"target": "new", "proximal": "new"}
_NEW = {  # aligned to the policy that is updated, for old text; PPO's ratio is then 1
    "tis_adjusted": ({}, {"cap": 10.0}),
    "obrs": (_TO_NEW, {**_TO_NEW, "mask": "expected"}, {**_TO_NEW, "mask": "expected", "c1": 10.0}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A correction with its numbers fixed."""

    name: str  # key of CORRECTIONS
    label: str  # the name, with what is not the default
    objective: PolicyObjective
    numbers: tuple[tuple[str, object], ...]  # of the settings, as a recipe takes them; the name is not among them
    is_own: bool  # the one that the run trains with

    @property
    def is_of_whole_responses(self) -> bool:
        return self.name in WHOLE

    @property
    def aligns_to_new(self) -> bool:
        return self.objective.proximal == "new"


def settings_of(config: Config | None, names: Sequence[str]) -> list[Setting]:
    """All settings in the order of CORRECTIONS, those of `names` alone where it is not empty.

    Args:
        config: of the run, whose clips are taken and whose own correction is among them; None for a dump of others.

    Raises:
        ConfigError: an unknown name.
    """
    for name in names:
        if name not in CORRECTIONS:
            raise ConfigError(unknown_name("correction", name, CORRECTIONS))
    found = {}
    for name in CORRECTIONS:
        for numbers in ({}, *_OTHER.get(name, ()), *_NEW.get(name, ())):
            setting = _setting(name, numbers, config, False)
            found[setting.label] = setting
    if config:
        own = config.objective.correction.model_dump(exclude_unset=True)
        setting = _setting(config.objective.correction.name, _comparable(own), config, True)
        found[setting.label] = setting
    return [setting for setting in found.values() if not names or setting.name in names]


def _comparable(own: dict[str, object]) -> dict[str, object]:
    """The run's own numbers but for those that change with what is at hand, not with the correction."""
    return {key: value for key, value in own.items() if key not in ("name", "normalizer")}


def _setting(name: str, numbers: dict[str, object], config: Config | None, is_own: bool) -> Setting:
    base = (config or _NOBODY).objective
    clips = {side: CLIP if getattr(base, side) is None else getattr(base, side) for side in ("clip_low", "clip_high")}
    objective = ObjectiveConfig(correction={"name": name, **numbers}, **clips)
    correction = objective.correction
    defaults = type(correction)()
    changed = {key: value for key, value in correction.model_dump().items() if value != getattr(defaults, key)}
    label = " ".join(filter(None, [name, *(_short(key, value) for key, value in changed.items())]))
    return Setting(
        name=name,
        label=label,
        objective=policy_objective((config or _NOBODY).model_copy(update={"objective": objective})),
        numbers=tuple(changed.items()),
        is_own=is_own,
    )


def _short(key: str, value: object) -> str:
    if key == "mask":
        return str(value)
    if key == "target":
        return "new" if value == "new" else f"target={value}"
    if key == "proximal":
        return "" if value == "new" else f"proximal={value}"
    return f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"


_NOBODY = Config(  # settings that a dump of another library does not come with
    iterations=1,
    policy=PolicyConfig(path="starter:policy", optimizer=OptimizerConfig(learning_rate=1e-6)),
    rollout_model=None,
    batch=BatchConfig(prompts=1, group_size=2),
)
