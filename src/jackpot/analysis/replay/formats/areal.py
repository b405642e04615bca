"""The format of AReaL's `rollout.dump_to_file`: LOG_PATH/rollout/VERSION/TASK.jsonl, one response a line.

AReaL writes `task_id, sample_idx, seqlen, prompt_len, head_version, tail_version, reward, prompt, completion`
(`_dump_trajectory`, read at 4aef98d). Token ids and log-probs are missing, so AReaL's executor needs added lines.
"""

from jackpot.analysis.replay.formats.base import DumpFormat
from jackpot.analysis.replay.formats.columns import Columns
from jackpot.analysis.replay.formats.records import json_lines, matching

HOW = """AReaL's rollout.dump_to_file has only text and rewards. Add to areal/infra/workflow_executor.py, in
_dump_trajectory, before await f.write(json.dumps(record) + ...):
    record |= {"input_ids": ids, "loss_mask": mask, "logprobs": traj["logprobs"][i, :seqlen].tolist()}
and give --model: the policy's log-probs are scored (at --temperature), as AReaL computes them later."""


FORMAT = DumpFormat(
    name="areal",
    # Files of training tasks; those of evaluations are left out.
    files=lambda path: [file for file in matching(path, "*.jsonl") if "eval-rollout" not in file.parts],
    records=json_lines,
    marks=(frozenset({"task_id", "sample_idx", "tail_version"}),),
    needed=("input_ids", "loss_mask", "logprobs"),
    how=HOW,
    columns=Columns(
        ids="input_ids",
        masks=("loss_mask",),
        rollout_log_probs="logprobs",
        uid=("task_id", "sample_idx"),
        begins_sampled=True,
    ),
    where=lambda path: f"{path.parent.name}/{path.name}",
)
