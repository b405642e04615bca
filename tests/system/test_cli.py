"""The command `jackpot` as a user types it: what train, eval, sample and starter print, write and refuse."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from typer.testing import CliRunner

from helpers.commands import jackpot
from helpers.engines.reference import save_tiny_model
from helpers.hub import without_hub
from helpers.runs import SMALL, FinishedRuns, metrics, run, small_config, weights
from jackpot.core.errors import ConfigError
from jackpot.models.hub import starter_path
from jackpot.models.load import load_model, load_tokenizer
from jackpot.models.published import PUBLISHED
from jackpot.ui import cli

JACKPOT = Path(sys.executable).with_name("jackpot")
FIRST_RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}  # as torchrun sets them


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of a finished small run in runs/quickstart-seed0, and what the command printed."""
    cwd = tmp_path_factory.mktemp("home")
    result = jackpot("train", "quickstart", *SMALL, "--run", "runs/quickstart-seed0", cwd=cwd)
    assert result.returncode == 0, result.stderr
    return cwd / "runs" / "quickstart-seed0", result.stdout


def test_train_shows_progress_a_table_and_the_folder(trained_run: tuple[Path, str]) -> None:
    folder, output = trained_run
    for text in ("iteration 4/4", "reward", "acceptance", "KL", "tokens/s", "before", "after 4 iterations", "points"):
        assert text in output
    assert "loading the model" in output
    assert "starting the engine" in output

    assert re.search(
        r"Cost of \d+ iterations: [\d.e+]+ FLOPs, \d+% for rollouts and \d+% for training", " ".join(output.split())
    )
    assert "Run folder: runs/quickstart-seed0" in output
    assert "  jackpot diagnose runs/quickstart-seed0  #" in output

    for name in ("config.yaml", "environment.json", "metrics.jsonl", "tensorboard", "rollouts", "eval", "checkpoints"):
        assert (folder / name).exists()


def test_a_finished_run_says_so_and_changes_nothing(trained_run: tuple[Path, str]) -> None:
    folder, _ = trained_run
    metrics_before = (folder / "metrics.jsonl").read_text()

    result = jackpot("train", "quickstart", *SMALL, "--run", str(folder), cwd=folder)

    assert result.returncode == 0
    assert "finished" in result.stdout
    assert "points" in result.stdout
    assert (folder / "metrics.jsonl").read_text() == metrics_before


def test_other_settings_in_the_same_folder_are_refused(trained_run: tuple[Path, str]) -> None:
    folder, _ = trained_run
    result = jackpot("train", "quickstart", *SMALL, "batch.prompts=8", "--run", str(folder), cwd=folder)

    assert result.returncode == 2
    assert "batch.prompts: 4 in the folder, 8 now" in result.stderr
    assert "--run" in result.stderr
    assert "Traceback" not in result.stderr


def test_sample_shows_both_models_before_and_after(trained_run: tuple[Path, str]) -> None:
    folder, _ = trained_run
    result = jackpot("sample", str(folder), "--problems", "2", cwd=folder)

    assert result.returncode == 0, result.stderr
    assert result.stdout.count("before") == 4  # two problems and two models
    assert result.stdout.count("after") == 4
    assert "policy" in result.stdout
    assert "rollout model" in result.stdout
    assert "answer:" in result.stdout


@pytest.fixture
def quick_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plans without the step on fake tensors, which takes seconds and says only how much memory is needed."""
    monkeypatch.setattr("jackpot.analysis.plan.memory.dry_step", lambda config, shape: 2**20)


@pytest.mark.usefixtures("quick_plan")
def test_a_dry_run_says_how_many_ranks_of_torchrun_train(tmp_path: Path) -> None:
    plan = jackpot("train", "quickstart", "--dry-run", cwd=tmp_path, **FIRST_RANK).stdout
    assert "2 ranks; rank 0 generates" in plan
    assert "  torchrun --nproc-per-node 2 -m -- jackpot train quickstart  # train\n" in plan


@pytest.mark.usefixtures("quick_plan")
def test_a_dry_run_says_how_many_ranks_and_engines_ray_places(tmp_path: Path) -> None:
    ray_settings = ("--dry-run", "placement.launcher=ray", "placement.ranks=3", "placement.engines=2")
    plan = jackpot("train", "quickstart", *ray_settings, cwd=tmp_path).stdout
    assert "Ray places 3 ranks and 2 engines" in plan
    plan = jackpot("train", "quickstart", *ray_settings[:-1], "engine.name=vllm", cwd=tmp_path).stdout
    assert "Ray places 3 ranks and 3 engines" in plan


@pytest.mark.usefixtures("quick_plan")
def test_a_rank_that_is_not_the_first_prints_no_plan(tmp_path: Path) -> None:
    second_rank = FIRST_RANK | {"RANK": "1", "LOCAL_RANK": "1"}
    result = jackpot("train", "quickstart", "--dry-run", cwd=tmp_path, **second_rank)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_eval_in_several_ranks_is_refused(tmp_path: Path) -> None:
    result = jackpot("eval", "starter:policy", cwd=tmp_path, **FIRST_RANK)
    assert result.returncode == 2
    assert "error: torchrun started 2 processes; eval runs in one, without it" in result.stderr


def plan_of(*arguments: str, cwd: Path) -> str:
    """Return what a dry run prints, in one line of single spaces; it writes nothing."""
    result = jackpot("train", "quickstart", *arguments, "--dry-run", cwd=cwd)
    assert result.returncode == 0, result.stderr
    assert not list(cwd.iterdir())
    return " ".join(result.stdout.replace("│", " ").split())


@pytest.mark.usefixtures("quick_plan")
def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    plan = plan_of("--arm", "tis", "seed=3", cwd=tmp_path)
    for text in ("sequences", "correction", "tis", "run folder", "runs/quickstart-tis-seed3", "memory"):
        assert text in plan

    assert "policy 280,416, rollout model 88,512 parameters" in plan  # trained
    assert "H100" not in plan


@pytest.mark.usefixtures("quick_plan")
def test_the_command_behind_a_plan_trains_into_its_folder(tmp_path: Path) -> None:
    setting = "rollout_model.optimizer=null"
    plan = plan_of("--arm", "none", setting, "--run", "my run", cwd=tmp_path)
    assert f"jackpot train quickstart --arm none {setting} --run 'my run' # train" in plan
    assert f"jackpot train quickstart --arm none {setting} --tiny # " in plan  # the folder of the other would refuse it
    assert "policy 280,416, rollout model 0 parameters" in plan


@pytest.mark.usefixtures("quick_plan")
def test_the_plan_names_the_engines(tmp_path: Path) -> None:
    plan = plan_of(*SERVERS, "evaluation.engine=transformers", cwd=tmp_path)
    for text in ("vllm_server in fp32", "http://127.0.0.1:1", "evaluation of the policy", "transformers"):
        assert text in plan


@pytest.mark.usefixtures("quick_plan")
def test_the_plan_says_what_engines_compute_with(tmp_path: Path) -> None:
    engine = ("engine.quantization=fp8", "engine.kv_cache_dtype=fp8", "engine.attn_implementation=eager")
    plan = plan_of(*engine, "evaluation.engine=transformers", "policy.lora.rank=8", cwd=tmp_path)
    engine_text = "transformers in fp32, linear layers fp8, keys and values fp8, eager attention, training in fp32"
    assert f"{engine_text}; evaluation of the policy with transformers in fp32 evaluation" in plan
    assert "policy 39,168 (LoRA of rank 8), rollout model 88,512 parameters" in plan


@pytest.mark.usefixtures("quick_plan")
def test_the_plan_of_a_large_model_says_what_is_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_hub(monkeypatch, tmp_path / "nothing")
    monkeypatch.delenv("JACKPOT_DATA", raising=False)
    name = "Qwen/Qwen2.5-Two-Layers"  # of its own: what has counted a published model in this process keeps the count
    monkeypatch.setitem(PUBLISHED, name, PUBLISHED["Qwen/Qwen2.5-0.5B-Instruct"] | {"num_hidden_layers": 2})
    int8_settings = ("precision=int8", "engine.quantization=int8_w8a8")
    settings = (f"policy.path={name}", "task.max_prompt_tokens=700", *int8_settings)

    result = jackpot("train", "stale_4b", *settings, "--dry-run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    plan = " ".join(result.stdout.replace("│", " ").split())
    for text in (
        f"{151_936 * 896 + 2 * 14_912_384 + 896:,} parameters",
        "64 per rollout batch",
        "rollout share",
        "on policy",
        "saved",
    ):
        assert text in plan

    rows = [line for line in result.stdout.splitlines() if re.match(r"│ \d H[12]00 ", line)]
    machines = [[str(count), kind] for kind in ("H100", "H200") for count in (1, 2, 4, 8)]
    assert [row.split()[1:3] for row in rows] == machines

    assert "Assumed: responses of 2,048 tokens in the mean, 33,554,432 an iteration. This guess from" in plan
    assert "These hours do not hold for precision int8" in plan

    [(machine, evaluation_share)] = re.findall(r"On (\d H\d00) evaluations, .* take (\d+)% of the hours", plan)
    [(rollout_share, flop_share, share_of_hours)] = re.findall(
        r"(\d+)% of its rollout FLOPs, (\d+)% .* (\d+)% of its hours", plan
    )
    assert rollout_share == "100"
    assert int(flop_share) > 100  # the policy's own rollouts, and a pass of anchors

    row = next(line.split("│") for line in result.stdout.splitlines() if line.startswith(f"│ {machine} "))
    hours, evaluation_hours, policy_hours = (float(row[column]) for column in (3, 6, 8))  # to 0.05
    assert (evaluation_hours - 0.05) / (hours + 0.05) <= int(evaluation_share) / 100 + 0.005
    assert (evaluation_hours + 0.05) / (hours - 0.05) >= int(evaluation_share) / 100 - 0.005
    assert abs(int(share_of_hours) / 100 - hours / policy_hours) < 0.15 / policy_hours + 0.005

    assert "Assumed: prompts of 120 tokens, at most 700. Why: cannot load a tokenizer from the hub" in plan
    assert f"Shapes of {name}: Jackpot's own table" in plan
    assert "More than one GPU are ranks of torchrun" in plan
    assert not list(tmp_path.iterdir())

    command = f"train stale_4b {' '.join(settings)}"
    assert f"  torchrun --nproc-per-node 8 -m -- jackpot {command}\n      # train, on 8 H100\n" in result.stdout
    assert f"  hf download {name}  # first" in result.stdout


@pytest.mark.slow
def test_ctrl_c_checkpoints_and_the_same_command_ends_bit_equal(tmp_path: Path) -> None:
    settings = (*SMALL, "iterations=20", "evaluation.every=10", "checkpoint.every=100")
    command = [JACKPOT, "train", "quickstart", *settings, "--run", "stopped"]
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}  # prints each import
    with (tmp_path / "imports").open("w") as imports:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=imports, text=True
        )

    deadline = time.monotonic() + 200
    log = tmp_path / "stopped" / "metrics.jsonl"
    while not log.exists() or '"iteration": 2,' not in log.read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)

    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    assert "same command continues" in output
    assert (tmp_path / "stopped" / "rollouts" / "iteration-000001.parquet").exists()

    modules = {line.rpartition("|")[2].strip() for line in (tmp_path / "imports").read_text().splitlines()}
    assert "pyarrow" in modules
    assert "pandas" not in modules  # 0.3 s of every run, where it is installed

    last_iteration = json.loads(log.read_text().splitlines()[-1])["iteration"]
    assert 2 <= last_iteration < 20
    assert (tmp_path / "stopped" / "checkpoints" / f"step-{last_iteration}").is_dir()

    config = small_config(*settings[len(SMALL) :])
    run(config, tmp_path / "stopped")
    run(config, tmp_path / "whole")

    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    for role in ("policy", "rollout_model"):
        stopped_weights, whole_weights = weights(tmp_path / "stopped", role), weights(tmp_path / "whole", role)
        assert all(stopped_weights[name].equal(whole_weights[name]) for name in whole_weights)


def test_eval_measures_a_model_once_and_refuses_other_settings(tmp_path: Path) -> None:
    command = ("eval", "starter:policy", "--benchmarks", "arithmetic", "--k", "4", "problems=16", "threads=1")
    result = jackpot(*command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "4 answers to each problem, sampled" in result.stdout
    for text in ("arithmetic", "16", "mean@4", "pass@4", "pass@2", "truncated", "64/64 answers"):
        assert text in result.stdout

    folder = tmp_path / "runs" / "eval-starter-policy"
    assert {path.name for path in folder.iterdir()} == {".lock", "arithmetic.parquet", "config.yaml", "summary.json"}

    summary = json.loads((folder / "summary.json").read_text())["benchmarks"]["arithmetic"]
    assert f"{100 * summary['mean_at_k']['value']:.1f} (" in result.stdout
    assert f"{100 * summary['pass_at_k']['4']['value']:.1f} (" in result.stdout

    second_result = jackpot(*command, cwd=tmp_path)
    assert second_result.returncode == 0
    assert "finished before; nothing was generated" in second_result.stdout

    changed_result = jackpot(*command, "seed=1", cwd=tmp_path)
    assert changed_result.returncode == 2
    assert "seed: 0 in the folder, 1 now" in changed_result.stderr
    assert "Traceback" not in changed_result.stderr


@pytest.mark.slow
def test_ctrl_c_in_eval_says_how_to_go_on(tmp_path: Path) -> None:
    command = [JACKPOT, "eval", "starter:policy", "--benchmarks", "arithmetic", "--k", "64", "threads=1"]

    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    answer_file = tmp_path / "runs" / "eval-starter-policy" / "arithmetic.jsonl"
    deadline = time.monotonic() + 200

    while not answer_file.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)

    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=200)

    assert process.returncode == 130
    assert "the same command goes on from here" in output
    assert answer_file.read_text().endswith("\n")


def test_eval_of_an_unknown_benchmark_lists_those_that_exist(tmp_path: Path) -> None:
    result = jackpot("eval", "starter:policy", "--benchmarks", "arithmetic,gsm8", cwd=tmp_path)
    assert result.returncode == 2
    assert "did you mean 'gsm8k'" in result.stderr
    assert "math500" in result.stderr
    assert not list(tmp_path.iterdir())


def save_tiny_starter(folder: Path, vocab_size: int = 32) -> str:
    """Save a tiny model with the tokenizer of the starters, and return its path."""
    save_tiny_model(folder, seed=0, vocab_size=vocab_size)
    load_tokenizer("starter:policy").save_pretrained(folder)
    return str(folder)


def make_empty_folder(folder: Path) -> str:
    folder.mkdir()
    return str(folder)


def save_corrupt_model(folder: Path) -> str:
    """Save a model whose weights end after 100 bytes, and return its path."""
    save_tiny_starter(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    return str(folder)


def save_model_of_another_tokenizer(folder: Path) -> str:
    """Save a model whose tokenizer reads ~ in place of +, and return its path."""
    save_tiny_starter(folder)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"+"', '"~"'))
    return str(folder)


SERVERS = ("engine=vllm_server", "engine.urls=http://127.0.0.1:1", "engine.weights_folder=weights")
BAD_INPUT = {  # what is typed, and the texts that the error must hold
    "unknown recipe": (["quickstrat"], ["quickstrat", "did you mean 'quickstart'"]),
    "unknown arm": (["quickstart", "--arm", "obsr"], ["unknown arm 'obsr'", "did you mean 'obrs'"]),
    "unknown key": (["quickstart", "batch.promts=3"], ["batch.promts", "did you mean 'batch.prompts'"]),
    "wrong type": (["quickstart", "iterations=many"], ["iterations", "'many'"]),
    "no value": (["quickstart", "iterations"], ["key=value"]),
    "impossible batch": (["quickstart", "batch.mini_batch_size=5"], ["mini_batch_size 5", "group_size"]),
    "missing model": (["quickstart", "policy.path=nowhere"], ["nowhere", "save_pretrained"]),
    "corrupt model": (["quickstart", "policy.path={corrupt}"], ["corrupt"]),
    "other tokenizer": (["quickstart", "policy.path={tokenizer}"], ["'~'", "same vocabulary"]),
    "short output layer": (["quickstart", "policy.path={vocabulary}"], ["32 tokens", "policy only 24 rows"]),
    "prompt too long": (["quickstart", "sampling.max_new_tokens=5000"], ["5000", "context"]),
    "budget too small": (
        ["quickstart", "batch.micro_batch_tokens=4"],
        ["micro_batch_tokens of 4 tokens", "or raise batch.micro_batch_tokens"],
    ),
    "more than the vocabulary": (["quickstart", "sampling.num_top_log_probs=99"], ["99", "at most 32"]),
    "unknown target module": (["quickstart", "policy.lora.target_modules=q_pro"], ["did you mean 'q_proj'", "v_proj"]),
    "unknown engine": (["quickstart", "engine=vlm"], ["'vlm'", "did you mean 'vllm'", "transformers"]),
    "engine not installed": (["quickstart", "engine=vllm"], ["pip install -c constraints.txt '.[vllm]'"]),
    "ranks without a launcher": (["quickstart", "placement.ranks=2"], ["placement.launcher=ray", "--nproc-per-node 2"]),
    "servers without an address": (["quickstart", "engine=vllm_server"], ["engine.urls: is missing", "set it"]),
    "servers of one model for two": (["quickstart", "--dry-run", *SERVERS], ["evaluation.engine=transformers"]),
    "text that looks like markup": (["quickstart", "[/red]"], ["[/red]", "key=value"]),
    "a plan for no model": (["quickstart", "--dry-run", "policy.path={empty}"], ["empty", "config"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_says_what_was_given_and_what_to_do(case: str, tmp_path: Path) -> None:
    folders = {
        "corrupt": lambda: save_corrupt_model(tmp_path / "corrupt"),
        "tokenizer": lambda: save_model_of_another_tokenizer(tmp_path / "tokenizer"),
        "vocabulary": lambda: save_tiny_starter(tmp_path / "vocabulary", vocab_size=24),
        "empty": lambda: make_empty_folder(tmp_path / "empty"),
    }

    arguments, messages = BAD_INPUT[case]
    folder_by_name = {
        name: make_folder() for name, make_folder in folders.items() if any(f"{{{name}}}" in text for text in arguments)
    }
    arguments = [text.format(**folder_by_name) for text in arguments]

    result = jackpot("train", *arguments, "--run", str(tmp_path / "run"), "threads=1", cwd=tmp_path)

    assert result.returncode == 2
    assert all(text in result.stderr for text in messages), result.stderr
    assert "Traceback" not in result.stderr


def test_the_starters_are_what_the_recipe_loads() -> None:
    for role in ("policy", "rollout_model"):
        assert load_model(f"starter:{role}", torch.float32).config.head_dim >= 32
        assert (starter_path(role) / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("options", "names"),
    [([], {"policy", "rollout_model"}), (["--text"], {"text_policy", "text_rollout_model"})],
)
def test_starter_copies_a_pair_and_overwrites_nothing(options, names, tmp_path: Path) -> None:
    command = ["starter", str(tmp_path), *options]
    result = CliRunner().invoke(cli.app, command, env={"COLUMNS": "300"})

    assert result.exit_code == 0, result.output
    assert {folder.name for folder in tmp_path.iterdir()} == names
    for name in names:
        assert str(tmp_path / name) in result.output
        packaged_files = {path.name: path.read_bytes() for path in starter_path(name).iterdir()}
        assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == packaged_files

    second_result = CliRunner().invoke(cli.app, command)
    assert isinstance(second_result.exception, ConfigError)
    assert "exists already" in str(second_result.exception)


@pytest.mark.usefixtures("quick_plan")
def test_every_answer_fits_80_columns(finished_run: FinishedRuns, tmp_path: Path) -> None:
    """All but lines with commands and names of files, which are copied and never broken."""
    run = str(finished_run())
    settings_by_command = {
        ("recipes",): [],
        ("train", "quickstart", "--dry-run"): SMALL,
        ("diagnose", run): [],
        ("replay", run): [],
        ("report", run, "--out", str(tmp_path / "page.html")): [],
        ("sample", run): [],
    }

    wide_lines = {}
    for command, settings in settings_by_command.items():
        result = CliRunner().invoke(cli.app, [*command, *settings], env={"COLUMNS": "80", "TTY_COMPATIBLE": "1"})
        assert result.exit_code == 0, (command, result.output, result.exception)
        assert result.stdout, command

        lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", result.stdout).splitlines()
        copied_texts = ("  jackpot ", run, str(tmp_path))
        lines = [line for line in lines if cell_len(line) > 80 and not any(text in line for text in copied_texts)]
        wide_lines |= {command[0]: lines} if lines else {}

    assert wide_lines == {}
