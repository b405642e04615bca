"""Every refusal inside verl: what it tells to do, done, gives verl its weights.

A row is settings of verl that are refused, and the remedies: a pattern that reads one out of the message, and the
settings that are then given. What is left of a message may tell to do nothing else.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from helpers.refusals import is_provoked, remedies_of, texts_of
from jackpot.core.errors import ConfigError, JackpotError

pytestmark = pytest.mark.adapters

SHAPE = (4, 6)
CORRECTION = "algorithm.rollout_correction"
NAME, BYPASS = f"{CORRECTION}.rollout_is", f"{CORRECTION}.bypass_mode"
THRESHOLD, NORMALIZE = f"{CORRECTION}.rollout_is_threshold", f"{CORRECTION}.rollout_is_batch_normalize"
ROLLOUT = "actor_rollout_ref.rollout"
PATCHED = {"patched": True, f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.calculate_log_probs": 20}
PATCH = "apply docs/verl.patch to verl"

Settings = Mapping[str, Any]


class Refused(NamedTuple):
    """Settings that are refused, and the remedies: a pattern in the message, and the settings that change then.

    A text with a group of the pattern, such as a backslash and 1, is what the message says there.
    """

    settings: Settings
    remedies: Mapping[str, Settings | None]  # None: it is done below


def named(rollout_is: str, remedies: Mapping[str, Settings | None], settings: Settings | None = None) -> Refused:
    """Make a row of a correction's name that is refused, alone or with other settings."""
    return Refused({NAME: rollout_is} | (settings or {}), remedies)


OTHERS = {r"(?:use one that does not, such as| or) (tis|icepop)\b": {NAME: r"jackpot:\1"}}
DECIDED = {
    r"write (jackpot:\w+:)SETTING=VALUE": {NAME: r"\1cap=5"},
    r"and leave proximal, target, normalizer, budget out": {NAME: "jackpot:tis"},
}
BYPASSED = {BYPASS: True, f"{CORRECTION}.loss_type": "reinforce", "trainer.use_v1": False}

REFUSED = [
    *(named(name, OTHERS) for name in ("jackpot:dppo", "jackpot:prefix:low=0.1", "jackpot:f_tis:max_kl=null")),
    named(
        "jackpot:ppo_is",
        {r"use (\S+)=(True) of verl in its place": {NAME: None, r"\1": r"\2"}},
    ),
    named(
        "jackpot:tis_adjusted",
        {
            r"use (tis) with bypass_mode: (true) and (loss_type): (reinforce).* only with (\S+): (false)": {
                NAME: r"jackpot:\1",
                BYPASS: r"\2",
                rf"{CORRECTION}.\3": r"\4",
                r"\5": r"\6",
            },
        },
    ),
    *(
        named(f"jackpot:tis:{setting}", DECIDED)
        for setting in ("2", "proximal=new", "target=old", "normalizer=topk", "budget=0.5")
    ),
    *(
        named(
            "jackpot:tis",
            {
                r"leave them at (\S+) and (\w+), and put numbers into the name, as in (\S+)$": {
                    THRESHOLD: r"\1",
                    NORMALIZE: r"\2",
                    NAME: r"\3",
                },
            },
            settings,
        )
        for settings in ({THRESHOLD: "0.5_2.0"}, {NORMALIZE: True})
    ),
    named("jackpot:tos", {r"did you mean '(\w+)'": {NAME: r"jackpot:\1"}}),
    named("jackpot:tis:cpa=2", {r"did you mean '(\w+)'": {NAME: r"jackpot:tis:\1=2"}}),
    named("jackpot:obrs:mask=expectd", {r"did you mean '(\w+)'": PATCHED | {NAME: r"jackpot:obrs:mask=\1"}}),
    named("jackpot:obrs:kappa=exact", {r"(?:Valid: |, )(\w+)": PATCHED | {NAME: r"jackpot:obrs:kappa=\1"}}),
    named("jackpot:icepop:low=5:high=1", {r"low must lie from (0) to high": {NAME: r"jackpot:icepop:low=\1:high=1"}}),
    # Z
    *(
        named(
            f"jackpot:{name}",
            {
                f"{PATCH}, and leave bypass_mode off": PATCHED | {BYPASS: False},
                r"(?:or use|or) (jackpot:\w+)": {NAME: r"\1"},
            },
            settings,
        )
        for name in ("obrs", "reweight_only", "z_only")
        for settings in ({}, BYPASSED)
    ),
    *(
        named("jackpot:obrs", {r"(\S+) is \S+; it must be (?:'(\w+)'|(False))$": {r"\1": r"\2\3"}}, PATCHED | settings)
        for settings in (
            {f"{ROLLOUT}.name": "sglang"},
            {"actor_rollout_ref.actor.strategy": "megatron"},
            {"actor_rollout_ref.model.use_fused_kernels": True},
            {"distillation.enabled": True},
        )
    ),
    *(
        named(
            "jackpot:obrs",
            {r"set (\S+) to the length of the sampler's top-k lists, such as (\d+), in place of \d": {r"\1": r"\2"}},
            PATCHED | {f"{ROLLOUT}.calculate_log_probs": length},
        )
        for length in (True, False, 1)
    ),
]
TEXTS = (  # of what is not refused by settings alone: the start of a message
    "an agent loop returned",
    "the batch has {} and no top-k lists",
)
NOT_HERE = {"jackpot.adapters.verl works inside verl": "it names no remedy: verl is not installed"}


@cache
def of_verl(file: str) -> Any:
    """Read a file of verl's own settings."""
    [installed] = find_spec("verl").submodule_search_locations
    return import_module("omegaconf").OmegaConf.load(Path(installed) / "trainer" / "config" / file)


def start(plugin: ModuleType, settings: Settings) -> dict[str, float]:
    """Weigh a batch as verl does with these settings; return the metrics of the step.

    With docs/verl.patch, the key `patched`, the trainer asks for Z, which the batch then has.
    """
    omegaconf = import_module("omegaconf").OmegaConf
    overrides = [f"{key}={'null' if value is None else value}" for key, value in settings.items() if key != "patched"]
    config = omegaconf.merge(
        {
            "algorithm": {"rollout_correction": of_verl("algorithm/rollout_correction.yaml")},
            "actor_rollout_ref": {"actor": {"strategy": "fsdp"}},
            "trainer": {"use_v1": of_verl("ppo_trainer.yaml").trainer.get("use_v1", False)},
        },
        omegaconf.from_dotlist(overrides),
    )
    correction = config.algorithm.rollout_correction
    random = torch.Generator().manual_seed(0)
    rollout, old, new, advantages = -3.0 * torch.rand((4, *SHAPE), generator=random)
    mask = torch.ones(SHAPE, dtype=torch.long)

    if correction.bypass_mode:
        return bypassed(config, rollout, new, advantages, mask)

    has_z = settings.get("patched") and plugin.z_request(config)
    columns = {name: torch.full(SHAPE, 0.6) for name in plugin.Z_FIELDS} if has_z else {}
    of_weights = {name: correction[name] for name in ("rollout_is_threshold", "rollout_is_batch_normalize")}
    proto, _, metrics = plugin.compute_rollout_correction_and_rejection_mask(
        old, rollout, mask, correction.rollout_is, **of_weights, **columns
    )
    assert proto.batch["rollout_is_weights"].isfinite().all()
    return metrics


def bypassed(config: Any, rollout: torch.Tensor, new: torch.Tensor, *others: torch.Tensor) -> dict[str, float]:
    """Compute verl's loss with `bypass_mode`; the trainer of verl 0.9 alone has one that reads no `rollout_is`."""
    algos = import_module("verl.trainer.ppo.core_algos")
    clips = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    policy_loss = {"rollout_correction": dict(config.algorithm.rollout_correction)}
    loss = algos.compute_policy_loss_vanilla if config.trainer.use_v1 else algos.compute_policy_loss_bypass_mode

    class OfActor(SimpleNamespace):
        def get(self, name: str, default: Any = None) -> Any:
            return getattr(self, name, default)

    of_actor = OfActor(**clips, loss_agg_mode="token-mean", global_batch_info={}, policy_loss=policy_loss)
    value, metrics = loss(rollout, new, *others, "token-mean", of_actor)
    assert value.isfinite()
    return metrics


@cache
def message_of(plugin: ModuleType, index: int) -> str:
    """Return what a row of REFUSED is refused with."""
    with pytest.raises(ConfigError) as error:
        start(plugin, REFUSED[index].settings)
    return str(error.value)


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_every_remedy_works(plugin: ModuleType, index: int) -> None:
    refused, message = REFUSED[index], message_of(plugin, index)

    for remedy, changes in remedies_of(message, refused.remedies):
        expanded = {
            remedy.expand(name): remedy.expand(value) if isinstance(value, str) else value
            for name, value in changes.items()
        }
        try:
            settings = refused.settings | expanded
            effect = "jackpot/correction/weight" if settings[NAME] else "actor/ppo_kl"
            assert effect in start(plugin, settings), f"{message}\n{remedy[0]!r} was done, to no effect"
        except JackpotError as error:
            pytest.fail(f"{message}\n{remedy[0]!r} was done, and refused:\n{error}")


@pytest.fixture(scope="module")
def answers(run: Callable[..., Any], patched: Path, steps: dict[str, Any]) -> dict[str, str]:
    """What steps of verl are refused with, by the file that the patch has not reached or the agent loop; `steps` ran
    with both as the messages want them."""
    editing = f"{ROLLOUT}.agent.default_agent_loop=editing_agent"
    server = Path("workers") / "rollout" / "vllm_rollout" / "vllm_async_server.py"
    unpatched = Path(find_spec("verl").submodule_search_locations[0]) / server
    refusals = {"editing_agent": run("jackpot:obrs", editing, fails=True)}

    patched_text = (patched / "verl" / server).read_text()
    (patched / "verl" / server).write_text(unpatched.read_text())
    refusals["vllm_async_server.py"] = run("jackpot:obrs", fails=True)
    (patched / "verl" / server).write_text(patched_text)
    return refusals


def test_a_server_is_patched_too(answers: dict[str, str], steps: dict[str, Any]) -> None:
    message = answers["vllm_async_server.py"]
    assert "no top-k lists; apply docs/verl.patch to verl's server of vLLM too, on every node" in message
    assert all("jackpot/obrs/z" in step["metrics"] for step in steps.values())


def test_a_loop_that_keeps_its_tokens_has_lists(answers: dict[str, str], run: Callable[..., Any]) -> None:
    loops = re.search(r"a loop that keeps what was sampled, such as verl's (\w+) and (\w+)$", answers["editing_agent"])
    assert loops and loops[1] == "single_turn_agent"  # that of `steps`
    done = run("jackpot:obrs", f"{ROLLOUT}.agent.default_agent_loop={loops[2]}")
    assert all("jackpot/obrs/z" in step["metrics"] for step in done.values())


def test_every_refusal_stands_in_a_table(plugin: ModuleType) -> None:
    messages = [message_of(plugin, index) for index in range(len(REFUSED))]
    unsaid = [text for text in sorted(texts_of([Path(plugin.__file__)])) if not is_provoked(text, messages)]
    missing = [text for text in unsaid if not text.startswith((*TEXTS, *NOT_HERE))]
    assert not missing, missing
    assert all(any(text.startswith(start) for text in unsaid) for start in (*TEXTS, *NOT_HERE))
