"""Lists the sick and the healthy runs, a few lines each, and what `jackpot diagnose` should say first of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from research.doctor import faults

SIZES = (
    "iterations=32",
    "batch.prompts=8",
    "batch.group_size=8",
    "sampling.max_new_tokens=24",
    "evaluation.every=16",
    "evaluation.problems=160",
    "checkpoint.every=1000",
    "threads=1",
)
UNGUARDED = "guard.check_engine=false"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run that is sick on purpose, or healthy though it may not look so."""

    name: str
    expected: str = ""  # regular expression that the cause in the first finding holds; empty: no finding
    settings: Sequence[str] = ()  # overrides; {folder}: where files of the case are
    task: str | None = None  # fault of `FaultySums`
    arm: str | None = None
    recipe: str = "quickstart"
    prepare: Callable[[Path], None] = lambda folder: None  # called in the run's process before it starts
    starts: int = 1  # starts of the run, each but the last killed half-way
    extra: bool = False  # not one of the 40 of the table; rules are tried on it

    def overrides(self, folder: Path, seed: int) -> list[str]:
        """Return the settings of a run of this case."""
        kwargs = f"{{fault: {self.task}, max_operand: 40}}"
        task = (
            [f"task={{name: custom, import_path: 'research.doctor.faults:FaultySums', kwargs: {kwargs}}}"]
            if self.task is not None
            else []
        )
        sizes = SIZES if self.recipe == "quickstart" else ()
        return [*sizes, *task, *(one.replace("{folder}", str(folder)) for one in self.settings), f"seed={seed}"]


def _file_task(reward: str) -> str:
    return (
        "task={name: math, train: '{folder}/train.jsonl', test: {source: '{folder}/test.jsonl', limit: 100}, "
        f"template: plain, instruction: '', reward_workers: 1, rewards: ['research.doctor.faults:{reward}'], "
        "verdict: reward}"
    )


ALONE = ("rollout_model=null", "objective.correction=none")
FROZEN = ("rollout_model.optimizer=null", "objective.correction=none")
ENGINE = "log-probs|distribution|probabilities"

SICK = (
    Case(name="learning rate x20", expected="learning rate", settings=("policy.optimizer.learning_rate=4e-3",)),
    Case(
        name="learning rate x1e-9",
        expected="learned nothing.*too low",
        settings=("policy.optimizer.learning_rate=2e-13", "rollout_model.optimizer.learning_rate=4e-13"),
    ),
    Case(name="reward always 0", expected="never had a reward", task="zero"),
    Case(
        name="reward raises at times",
        expected="scoring fails",
        settings=(_file_task("raises_at_times"),),
        prepare=faults.write_problems,
    ),
    Case(name="reward of the wrong sign", expected="sign", task="wrong sign"),
    Case(
        name="constant answer",
        expected="same answer",
        task="constant",
        settings=(*ALONE, "policy.optimizer.learning_rate=2e-3"),
    ),
    Case(name="template cut", expected="prompt", task="template"),
    Case(
        name="wrong stop tokens",
        expected="end-of-sequence|stop token",
        settings=("policy.path={folder}/policy", "rollout_model.path={folder}/rollout_model"),
        prepare=faults.never_ends,
    ),
    Case(name="responses all truncated", expected="cut at the limit", settings=("sampling.max_new_tokens=4",)),
    Case(
        name="stale weights",
        expected="old weights|new weights",
        settings=(UNGUARDED,),
        prepare=lambda folder: faults.keeps_old_weights(),
    ),
    Case(
        name="two temperatures",
        expected="temperature",
        prepare=lambda folder: faults.draws(temperature=0.6),
    ),
    Case(
        name="top-p unreported",
        expected="distribution",
        prepare=lambda folder: faults.draws_unreported(top_p=0.8),
    ),
    Case(
        name="log-probs off by one",
        expected="off by one",
        prepare=lambda folder: faults.reports(faults.shifted),
    ),
    Case(
        name="models swapped",
        expected="swapped",
        settings=("policy.path=starter:rollout_model", "rollout_model.path=starter:policy"),
    ),
    Case(
        name="log-probs in bf16",
        expected="bf16",
        prepare=lambda folder: faults.reports(faults.rounded),
    ),
    Case(
        name="far frozen rollout model, no correction",
        expected="drift|far apart",
        settings=(*FROZEN, "policy.optimizer.learning_rate=1e-3"),
    ),
    Case(name="prompts cut on the left", expected="prompt", task="left"),
    Case(
        name="group of one",
        expected="group|one response",
        settings=(
            "batch.group_size=1",
            "batch.prompts=64",
            "objective.advantage=reinforce_pp",
            "policy.optimizer.learning_rate=1e-6",
        ),
    ),
    Case(name="duplicate prompts", expected="same prompt", task="duplicates"),
    Case(name="leaked test problems", expected="held-out", task="leak"),
    Case(
        name="dead engine",
        expected="engine",
        settings=("placement.engines=1", "placement.timeout=400"),
        prepare=lambda folder: faults.kills_engine(12),
    ),
    Case(
        name="exploding KL",
        expected="drift|far apart",
        settings=(
            "rollout_model.distill_weight=0",
            "rollout_model.ppo_weight=1e-6",
            "policy.optimizer.learning_rate=1e-3",
        ),
    ),
    Case(
        name="collapsed entropy",
        expected="entropy|collapsed",
        task="echo",
        settings=(*ALONE, "policy.optimizer.learning_rate=2e-3", "iterations=72"),
    ),
    Case(
        name="length hacking",
        expected="longer|length",
        task="long",
        settings=(*ALONE, "policy.optimizer.learning_rate=1e-3"),
    ),
    Case(
        name="gradient 0",
        expected="gradient|nearly every token",
        settings=("objective.correction={name: icepop, low: 50, high: 100}",),
    ),
    Case(name="NaN steps", expected="not finite", prepare=lambda folder: faults.breaks_weights(12)),
    Case(
        name="clip share exactly 0",
        expected="clip",
        settings=("batch.ppo_epochs=4", "objective.correction.proximal=new"),
    ),
    Case(name="a phase six times its median", expected="times its median", task="sleeps"),
)
HEALTHY = (
    Case(name="lam 2", settings=("objective.correction.lam=2",)),
    Case(name="LoRA", arm="lora", settings=("policy.optimizer.learning_rate=2e-3",)),
    Case(name="annealed", settings=("rollout_model.share={schedule: step, hold: 24}",)),
    Case(name="stale", settings=("batch.ahead=2", "batch.mini_batch_size=16")),
    Case(name="INT8", settings=("engine.quantization=int8_w8a8",)),
    Case(name="sparse rewards", task="sparse"),
    Case(
        name="short answers by nature", settings=("task.max_terms=2", "task.max_operand=9", "sampling.max_new_tokens=8")
    ),
    Case(name="a critic", settings=("objective.advantage=gae", "critic={optimizer: {learning_rate: 1e-3}}")),
    Case(name="one bad batch", task="bad batch"),
    Case(name="a resume", settings=("checkpoint.every=10",), starts=2),
    Case(name="an early plateau", settings=("iterations=60", "task.max_terms=2", "task.max_operand=20")),
    Case(
        name="SmolLM2",
        recipe="smollm",
        settings=("iterations=16", "evaluation.every=16", "batch.mini_batch_size=16", "threads=1"),
    ),
)
EXTRA = tuple(
    Case(extra=True, **one)
    for one in (
        {"name": "healthy quickstart"},
        {"name": "healthy alone", "settings": ALONE},
        {  # the rollout model, smollm2/writer, is right in a few percent at first and does not stop in time
            "name": "SmolLM2, joint",
            "recipe": "smollm",
            "arm": "obrs",
            "settings": ("iterations=6", "evaluation.every=6", "evaluation.problems=64", "threads=1"),
        },
        {"name": "stale weights, guarded", "expected": "weights", "prepare": lambda folder: faults.keeps_old_weights()},
        {"name": "stops too early", "expected": "stop token", "settings": ("sampling.stop_token_ids=[18]",)},
        {"name": "rewards all 1", "expected": "every response|same reward", "task": "always one"},
        {
            "name": "both rates x20",
            "expected": "learning rate",
            "settings": ("policy.optimizer.learning_rate=4e-3", "rollout_model.optimizer.learning_rate=8e-3"),
        },
        {
            "name": "rate x20 alone",
            "expected": "learning rate",
            "settings": (*ALONE, "policy.optimizer.learning_rate=4e-3"),
        },
        {
            "name": "short answers paid",
            "expected": "",
            "task": "short",
            "settings": (*ALONE, "policy.optimizer.learning_rate=1e-3"),
        },
    )
)
CASES = {case.name: case for case in (*SICK, *HEALTHY, *EXTRA)}
