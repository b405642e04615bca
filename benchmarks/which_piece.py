"""What each piece costs inside another trainer, for docs/frameworks.md: lines of code, CPU seconds, memory.

    python benchmarks/which_piece.py            # prints both tables of the page
    python benchmarks/which_piece.py --lines    # the lines alone, counted where the code stands

Every part runs in a process of its own on one thread: CPU seconds are the median of five calls (of replay one), memory
is by how much the first call raises the process's peak. Shapes: 64 responses of 256 tokens, K = 20; Z from a head of
151,936 by 1,024.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS, TOKENS, K, VOCABULARY, HIDDEN, POSITIONS = 64, 256, 20, 151_936, 1_024, 256
PARTS = {
    "tis": "`jackpot.correct`, `tis`",
    "obrs": "`jackpot.correct`, `obrs`, Z given",
    "z": "`jackpot.estimate_z`, from hidden states and the head",
    "replay": "`jackpot replay`, 20 corrections and more with other caps, no model",
}


def code_lines(page: str, heading: str, language: str = "python", first: str = "") -> int:
    """Lines of the first block of code below a heading that has `first` in it: without blank ones, comments, and
    those that a diff leaves."""
    text = (ROOT / "docs" / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    blocks = [block for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if first in block]
    lines = [line for line in blocks[0].splitlines() if line.strip() and not line.startswith(("#", "@@"))]
    return sum(line.startswith("+") for line in lines) if language == "diff" else len(lines)


def file_lines(framework: str) -> int:
    """Lines of a framework's file below its docstring, without blank ones and comments."""
    path = ROOT / "examples" / "frameworks" / f"jackpot_{framework.lower().replace('-', '_')}.py"
    _, _, code = path.read_text().partition('\n"""\n\n')
    return sum(bool(line.strip()) and not line.startswith("#") for line in code.splitlines())


def lines() -> dict[str, int]:
    """Lines of code that a user adds, by framework and piece."""
    recipes = {name: file_lines(name) for name in ("SkyRL", "slime", "prime-rl", "OpenRLHF", "AReaL")}
    trl = {
        "TRL, correction": code_lines("trl.md", "A script of TRL's", "diff", "CorrectedGRPOTrainer"),
        "TRL, two models": code_lines("trl.md", "A script of TRL's", "diff", "JackpotGRPOTrainer"),
    }
    own = {"a loop of yours": code_lines("../README.md", "Only the correction, in your own loop")}
    return recipes | trl | own


def action(part: str) -> tuple[Callable[[], object], int]:
    """Return the call to measure, and of how many tokens it is."""
    import torch

    import jackpot

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if part == "replay":
        from jackpot.analysis.replay.replay import replay

        path = Path(tempfile.mkdtemp()) / "dump.jsonl"
        log_probs = torch.rand(ROWS, TOKENS).sub(2.0)
        other = (log_probs + 0.1 * torch.randn(ROWS, TOKENS)).clamp(max=-1e-3)
        with path.open("w") as file:
            for row, old in zip(log_probs.tolist(), other.tolist(), strict=True):
                one = {"token_ids": [1] * TOKENS, "rollout_log_probs": row, "old_log_probs": old, "advantages": 1.0}
                file.write(json.dumps(one) + "\n")
        return lambda: replay(path), ROWS * TOKENS
    if part == "z":
        hidden, head = torch.randn(POSITIONS, HIDDEN), torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        ids = torch.stack([torch.randperm(VOCABULARY)[:K] for _ in range(POSITIONS)])
        known = {"rollout_top_ids": ids, "rollout_top_log_probs": torch.full(ids.shape, -4.0)}
        return lambda: jackpot.estimate_z(hidden_states=hidden, head=head, **known), POSITIONS
    rollout = torch.rand(ROWS, TOKENS).sub(2.0)
    given = {"rollout_log_probs": rollout, "target_log_probs": rollout + 0.1 * torch.randn(ROWS, TOKENS)}
    given |= {"response_mask": torch.ones(ROWS, TOKENS, dtype=torch.bool)}
    given |= {"z": torch.rand(ROWS, TOKENS).mul(0.2).add(0.8)} if part == "obrs" else {}
    return lambda: jackpot.correct(part, **given), ROWS * TOKENS


def measure(part: str) -> None:
    """Print CPU microseconds a token and MB of one part."""
    call, tokens = action(part)
    seconds: list[float] = []
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = _peak()
    call()
    memory = _peak() - before
    for _ in range(1 if part == "replay" else 5):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    print(json.dumps({"microseconds": 1e6 * statistics.median(seconds) / tokens, "mb": memory / 1e6}))


def _peak() -> int:
    """Bytes of the process's peak."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def main() -> None:
    """Print the tables."""
    if sys.argv[1:2] == ["--part"]:
        measure(sys.argv[2])
        return
    for name, count in lines().items():
        print(f"| {name} | {count} |")
    if "--lines" in sys.argv:
        return
    for part, title in PARTS.items():
        done = subprocess.run([sys.executable, __file__, "--part", part], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"| {title} | {found['microseconds']:.3g} | {found['mb']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
