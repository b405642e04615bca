"""The format of verl's `trainer.rollout_data_dir`: one STEP.jsonl for each step, a line for each response.

verl writes `input, output, gts, score, step` and every list of `reward_extra_infos_dict` that has an entry for each
response (`_write_generations`; read at 1dda039, version 0.10.0.dev). No column has log-probs, so verl's trainer needs
added lines. The tensors of ray_trainer.py are padded: prompts [P] on the left, responses [R] on the right, and
`attention_mask` has [P + R] entries. The tensors of v1/trainer_base.py, the default, are nested, without padding.
"""

from typing import Any

from jackpot.analysis.replay.formats.base import DumpFormat, DumpWriter
from jackpot.analysis.replay.formats.columns import Columns
from jackpot.analysis.replay.formats.records import DumpRecord, json_lines, matching

HOW = """verl's rollout_data_dir has only text and scores. Set actor_rollout_ref.rollout.calculate_log_probs=True, and
add to _log_rollout_data in verl/trainer/ppo/v1/trainer_base.py, before self._dump_generations( ... ):
    names = ["prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs", "advantages"]
    more = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    for name in names:
        reward_extra_infos_dict[name] = [more[name][row].tolist() for row in sorted_indices]
With trainer.use_v1=False, add to that of verl/trainer/ppo/ray_trainer.py, in the same place:
    for name in ("prompts", "responses", "attention_mask", "response_mask",
                 "rollout_log_probs", "old_log_probs", "advantages"):
        reward_extra_infos_to_dump[name] = batch.batch[name].tolist()
Without old_log_probs, give --model and it is scored (at --temperature)."""
_TOKENS = ("rollout_log_probs", "old_log_probs", "advantages")  # columns with the same name in both formats


def record(iteration: int, row: DumpRecord) -> dict[str, Any]:
    """Return our response as a record of verl's dump, without padding: verl's columns, and log-probs and advantages.

    Log-probs and advantages have the names under which verl writes them after the change to verl that HOW describes.
    """
    return {
        "input": row["prompt"],
        "output": row["response"],
        "gts": row["answer"],
        "score": row["reward"],
        "step": iteration,
        "uid": row["uid"],
        "prompts": row["prompt_ids"],
        "responses": row["token_ids"],
        "attention_mask": [1] * (len(row["prompt_ids"]) + len(row["token_ids"])),
        "response_mask": [*map(int, row["sampled_mask"])],
    } | {name: row[name] for name in _TOKENS}


FORMAT = DumpFormat(
    name="verl",
    files=lambda path: matching(path, "*.jsonl"),
    records=json_lines,
    marks=(frozenset({"input", "output", "step"}),),
    needed=("responses", "response_mask", "rollout_log_probs"),
    how=HOW,
    columns=Columns(
        prompt="prompts",
        ids="responses",
        present=("attention_mask",),
        masks=("response_mask",),
        uid=("uid", "request_id"),
        ends_sampled=True,
    ),
    writer=DumpWriter(
        file_name="{}.jsonl",
        columns=("uid", "prompt", "answer", "response", "reward", "prompt_ids", "token_ids", "sampled_mask", *_TOKENS),
        lost="top-k lists, log_probs at the update",
        record=record,
    ),
)
