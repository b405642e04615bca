"""Rollouts as each other trainer writes them are read token by token; what is missing or damaged is named."""

import io
import json
import pickle
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from helpers.synthetic_rollouts import noise, records, write
from jackpot.analysis.replay.formats import FORMATS, find_format
from jackpot.analysis.replay.formats.base import read_files
from jackpot.analysis.replay.formats.records import DamagedRecord, batch_rows, torch_file
from jackpot.analysis.replay.replay import replay
from jackpot.analysis.replay.responses import SavedResponse
from jackpot.analysis.replay.results import dump_findings
from jackpot.core.errors import DataError
from jackpot.models import scoring

PAD = 99  # the id of a padding token
# Two responses, as every writer below writes them.
PROMPTS = [[7, 8], [9]]
RESPONSES = [[1, 2, 3], [4, 5]]
MASKS = [[1, 0, 1], [1, 1]]  # a tool wrote the token in the middle
ROLLOUT = [[-0.5, 0.0, -0.25], [-1.0, -2.0]]
OLD = [[-0.75, 0.0, -0.5], [-1.5, -2.5]]
ADVANTAGES = [[0.5, 0.0, 0.5], [-0.5, -0.5]]


def padded(rows, value, on_left=False):
    """Fill the rows up to the length of the longest."""
    width = max(map(len, rows))
    fill = [[value] * (width - len(row)) for row in rows]
    return [[*padding, *row] if on_left else [*row, *padding] for row, padding in zip(rows, fill, strict=True)]


def verl(folder: Path, **left_out) -> Path:
    """`_write_generations` with the tensors of the hint beside what it writes anyway."""
    folder.mkdir(exist_ok=True)
    prompts, responses = padded(PROMPTS, PAD, on_left=True), padded(RESPONSES, PAD)
    exists = [
        [int(token != PAD) for token in [*prompt, *response]]
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    columns = {
        "input": ["a", "b"],
        "output": ["c", "d"],
        "gts": [None, None],
        "score": [1.0, 0.0],
        "step": [3, 3],
        "prompts": prompts,
        "responses": responses,
        "attention_mask": exists,
        "response_mask": padded(MASKS, 0),
        "rollout_log_probs": padded(ROLLOUT, 0.0),
        "old_log_probs": padded(OLD, 0.0),
        "advantages": padded(ADVANTAGES, 0.0),
    }
    lines = [{name: column[row] for name, column in columns.items() if name not in left_out} for row in range(2)]

    (folder / "3.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def trl(folder: Path, **left_out) -> Path:
    """`completions_STEP.parquet` with the columns of the hint; TRL has one advantage for a response."""
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    columns = {
        "step": [3, 3],
        "prompt": ["a", "b"],
        "completion": ["c", "d"],
        "accuracy": [1.0, 0.0],
        "prompt_ids": padded(PROMPTS, PAD, on_left=True),
        "prompt_mask": padded([[1] * len(row) for row in PROMPTS], 0, on_left=True),
        "completion_ids": padded(RESPONSES, PAD),
        "completion_mask": padded([[1] * len(row) for row in RESPONSES], 0),
        "tool_mask": padded(MASKS, 1),
        "sampling_per_token_logps": padded(ROLLOUT, 0.0),
        "old_per_token_logps": padded(OLD, 0.0),
        "advantage": [0.5, -0.5],
    }
    table = pa.table({name: column for name, column in columns.items() if name not in left_out})
    pq.write_table(table, folder / "completions" / "completions_00003.parquet")

    return folder


def openrlhf(folder: Path, **left_out) -> Path:
    """A list of experiences; `sequences` are one longer than the columns, which begin at the second token."""
    folder.mkdir(exist_ok=True)
    width = max(len(prompt) + len(response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True))

    def spread(rows, value):
        placed = [[value] * (len(prompt) - 1) + row for prompt, row in zip(PROMPTS, rows, strict=True)]
        return torch.tensor([row + [value] * (width - 1 - len(row)) for row in placed])

    sequences = padded([prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)], PAD)
    columns = {
        "sequences": torch.tensor(sequences),
        "action_mask": spread(MASKS, 0).bool(),
        "rollout_log_probs": spread(ROLLOUT, 0.0),
        "action_log_probs": spread(OLD, 0.0),
        "advantages": spread(ADVANTAGES, 0.0),
    }
    torch.save([{k: v for k, v in columns.items() if k not in left_out}], folder / "experience_3.pt")
    return folder


def slime(folder: Path, **left_out) -> Path:
    """The dump of training: tensors, lengths and masks of every sample."""
    folder.mkdir(exist_ok=True)
    samples = [
        {
            "data_parallel_rank": 0,
            "sample_index": row,
            "rollout_ids": row,
            "tokens": torch.tensor(PROMPTS[row] + RESPONSES[row]),
            "response_lengths": len(RESPONSES[row]),
            "loss_masks": torch.tensor(MASKS[row]),
            "rollout_log_probs": torch.tensor(ROLLOUT[row]),
            "log_probs": torch.tensor(OLD[row]),
            "advantages": torch.tensor(ADVANTAGES[row]),
        }
        for row in range(2)
    ]

    samples = [{name: value for name, value in sample.items() if name not in left_out} for sample in samples]
    torch.save({"format_version": 2, "rollout_id": 3, "samples": samples}, folder / "3.pt")
    return folder


def prime_rl(folder: Path, **left_out) -> Path:
    """`TokenExporter._write`: whole sequences, with a uniform log-prob at the first token, which is masked."""
    (folder / "token_exports" / "step_3").mkdir(parents=True, exist_ok=True)
    lines = []
    for row in range(2):
        prompt = [0.0] * len(PROMPTS[row])
        length = len(prompt) + len(RESPONSES[row])
        line = {
            **{"schema_version": 1, "step": 3, "rank": 3, "micro_step": 0, "micro_sequence_idx": row},
            **{"export_sequence_idx": row, "env_name": "math", "token_ids": PROMPTS[row] + RESPONSES[row]},
            "position_ids": list(range(length)),
            "loss_mask": [False] * len(prompt) + [bool(kept) for kept in MASKS[row]],
            "advantages": prompt + ADVANTAGES[row],
            "inference_logprobs": [None, *prompt[1:], *ROLLOUT[row]],
            "trainer_logprobs": [-3.5, *prompt[1:], *OLD[row]],
            **{"entropy": [1.0] * length, "rl_weights": [None] * length, "ce_weights": [None] * length},
        }
        lines.append({name: column for name, column in line.items() if name not in left_out})

    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "token_exports" / "step_3" / "rank_3.jsonl").write_text(text)
    return folder


def skyrl(folder: Path, **left_out) -> Path:
    """`TensorBatch.save`: padded on the left, one row copied to fill the batch up."""
    (folder / "dumped_data").mkdir(parents=True, exist_ok=True)
    sequences = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    columns = {
        "sequences": torch.tensor(padded(sequences, PAD, on_left=True)),
        "attention_mask": torch.tensor(padded([[1] * len(row) for row in sequences], 0, on_left=True)),
        "response_mask": torch.tensor(padded([[1] * len(row) for row in RESPONSES], 0, on_left=True)),
        "loss_mask": torch.tensor(padded(MASKS, 0.0, on_left=True)),
        "rollout_logprobs": torch.tensor(padded(ROLLOUT, 0.0, on_left=True)),
        "action_log_probs": torch.tensor(padded(OLD, 0.0, on_left=True)).bfloat16(),
        "advantages": torch.tensor(padded(ADVANTAGES, 0.0, on_left=True)),
        "values": None,
    }

    columns = {name: column for name, column in columns.items() if name not in left_out}
    path = folder / "dumped_data" / "global_step_3_training_input.pkl"
    path.write_bytes(
        skyrl_pickle({name: tensor if tensor is None else tensor[[0, 1, 0]] for name, tensor in columns.items()})
    )
    return folder


def skyrl_pickle(columns: dict[str, torch.Tensor | None]) -> bytes:
    """The last row fills the batch up. The classes that it names are made up, as SkyRL's would be imported."""
    module = ModuleType("skyrl.backends.skyrl_train.training_batch")

    def _rebuild_tensor_batch(*_: object) -> None:
        raise AssertionError("the reader called what the pickle names")

    class TrainingInputBatch(dict):
        def __reduce__(self):
            state = {"batch_dict": {name: packed(column) for name, column in self.items()}, "batch_size": 3}
            state |= {"device": torch.device("cpu"), "metadata": {"pad_size": 1, "mean": np.float32(0.5)}}
            return _rebuild_tensor_batch, (type(self), state)

    def packed(tensor: torch.Tensor | None) -> dict | None:
        if tensor is None or tensor.dtype != torch.bfloat16:
            array = tensor if tensor is None else tensor.numpy()
            return (
                array
                if array is None
                else dict(format="numpy", data=array.tobytes(), shape=array.shape, dtype=str(array.dtype))
            )

        with io.BytesIO() as buffer:
            torch.save(tensor, buffer)
            return {"format": "torch", "data": buffer.getvalue()}

    for made_up in (_rebuild_tensor_batch, TrainingInputBatch):
        made_up.__module__, made_up.__qualname__ = module.__name__, made_up.__name__
        setattr(module, made_up.__name__, made_up)
    names = ["skyrl", "skyrl.backends", "skyrl.backends.skyrl_train"]

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, module.__name__, module)
        return pickle.dumps(TrainingInputBatch(columns))


WRITERS = {
    "verl": verl,
    "trl": trl,
    "openrlhf": openrlhf,
    "slime": slime,
    "prime_rl": prime_rl,
    "skyrl": skyrl,
}
SAMPLER = {  # its log-probs, as each calls them
    "verl": "rollout_log_probs",
    "trl": "sampling_per_token_logps",
    "openrlhf": "rollout_log_probs",
    "slime": "rollout_log_probs",
    "prime_rl": "inference_logprobs",
    "skyrl": "rollout_logprobs",
}
OF_POLICY = {
    "verl": "old_log_probs",
    "trl": "old_per_token_logps",
    "openrlhf": "action_log_probs",
    "slime": "log_probs",
    "skyrl": "action_log_probs",
}


def read(path: Path) -> tuple[str, list[SavedResponse], list[str]]:
    """Name the format of a dump; read its responses, and what was told about it."""
    told: list[str] = []
    saved_format, files = find_format(path, "auto")
    return saved_format.name, list(read_files(saved_format, files, told.append)), told


def sampled(response: SavedResponse, column: torch.Tensor) -> list[float]:
    """List a column at the sampled tokens."""
    return column[response.sampled_mask].tolist()


@pytest.mark.parametrize("name", WRITERS)
def test_a_dump_is_recognised_and_read_token_by_token(name, tmp_path):
    format_name, responses, told = read(WRITERS[name](tmp_path / name))

    assert (format_name, told) == (name, []) and len(responses) == 2
    for row, response in enumerate(responses):
        kept = [index for index, mask in enumerate(MASKS[row]) if mask]
        assert response.prompt_ids.tolist() == PROMPTS[row]
        assert response.token_ids.tolist() == RESPONSES[row]
        assert response.sampled_mask.tolist() == [bool(mask) for mask in MASKS[row]]
        assert sampled(response, response.rollout_log_probs) == pytest.approx([ROLLOUT[row][index] for index in kept])
        policy = response.log_probs if response.old_log_probs is None else response.old_log_probs

        assert sampled(response, policy) == pytest.approx([OLD[row][index] for index in kept])
        assert sampled(response, response.advantages) == pytest.approx([ADVANTAGES[row][index] for index in kept])


@pytest.mark.parametrize("name", WRITERS)
def test_a_dump_without_log_probs_says_how_to_log_them(name, tmp_path):
    path = WRITERS[name](tmp_path / name, **{SAMPLER[name]: True})
    with pytest.raises(DataError) as error:
        replay(path)
    assert f"lacks {SAMPLER[name]}" in str(error.value)
    assert str(error.value).endswith(FORMATS[name].how)


@pytest.mark.parametrize("name", OF_POLICY)
def test_a_dump_without_the_policys_log_probs_asks_for_a_model(name, tmp_path):
    with pytest.raises(DataError, match="give --model PATH"):
        replay(WRITERS[name](tmp_path / name, **{OF_POLICY[name]: True}))


def test_what_verl_and_trl_write_themselves_is_refused_by_name(tmp_path):
    columns = ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs", "old_log_probs")
    with pytest.raises(DataError, match=r"lacks responses, response_mask, rollout_log_probs; it has .*input"):
        replay(verl(tmp_path / "verl", **dict.fromkeys((*columns, "advantages"))))

    columns = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampling_per_token_logps")
    with pytest.raises(DataError, match="lacks completion_ids, completion_mask, sampling_per_token_logps"):
        replay(trl(tmp_path / "trl", **dict.fromkeys((*columns, "old_per_token_logps"))))


def test_slimes_dump_of_rollouts_is_read_as_far_as_it_goes(tmp_path):
    """`Sample.to_dict`: lists, a status in words, no log-probs of the policy."""
    sample = {
        "index": 0,
        "rollout_id": None,
        "prompt": "a",
        "tokens": PROMPTS[0] + RESPONSES[0],
        "response_length": 3,
        "loss_mask": None,
        "rollout_log_probs": ROLLOUT[0],
        "status": "completed",
        "metadata": {},
        "spec_info": {"spec_verify_ct": 0},
    }
    torch.save({"rollout_id": 3, "samples": [sample]}, tmp_path / "3.pt")
    torch.save({"rollout_id": 3, "samples": [sample]}, tmp_path / "eval_3.pt")

    name, responses, _ = read(tmp_path)

    assert name == "slime" and len(responses) == 1  # what was evaluated is not trained on
    assert responses[0].token_ids.tolist() == RESPONSES[0] and responses[0].sampled_mask.all()
    assert responses[0].old_log_probs is None


def test_a_batch_that_trl_wrote_twice_is_read_once(tmp_path):
    folder = trl(tmp_path / "trl") / "completions"
    table = pq.read_table(folder / "completions_00003.parquet")
    repeated = table.set_column(0, "step", pa.array([4, 4]))
    pq.write_table(repeated, folder / "completions_00004.parquet")
    other = repeated.set_column(repeated.column_names.index("advantage"), "advantage", pa.array([0.25, -0.25]))
    pq.write_table(other, folder / "completions_00005.parquet")

    _, responses, told = read(tmp_path / "trl")
    assert [response.advantages[0].item() for response in responses] == [0.5, -0.5, 0.25, -0.25] and told == []


def test_a_repeated_batch_is_read_where_it_is_given_alone(tmp_path):
    folder = trl(tmp_path / "trl") / "completions"
    path = folder / "completions_00004.parquet"
    path.write_bytes((folder / "completions_00003.parquet").read_bytes())
    _, responses, _ = read(path)
    assert len(responses) == 2


def test_trls_completions_without_tools_have_no_mask_of_them(tmp_path):
    _, responses, told = read(trl(tmp_path / "trl", tool_mask=True))
    assert told == [] and all(response.sampled_mask.all() for response in responses)


def test_a_file_without_the_added_columns_is_told(tmp_path):
    for name, writer in WRITERS.items():
        folder = writer(tmp_path / name)
        file = next(path for path in folder.rglob("*.*") if path.is_file())
        bare = writer(tmp_path / f"{name} bare", **{SAMPLER[name]: True})
        old = next(path for path in bare.rglob("*.*") if path.is_file())
        shutil.copy(old, file.with_name(file.name.replace("3", "1")))

        result = replay(folder, names=["none"])

        assert float(result.run["responses"].value) == 2, name
        assert result.unreadable == 1 and "; the file is left out" in result.problems[0], name
        assert f"lacks {SAMPLER[name]}" in result.problems[0], name


def test_a_stray_file_among_a_dump_is_told(tmp_path):
    for name, stray in (("openrlhf", torch.ones(2)), ("slime", {"weight": torch.ones(2)})):
        folder = WRITERS[name](tmp_path / name)
        torch.save(stray, folder / "stray.pt")
        _, responses, told = read(folder)
        assert len(responses) == 2 and len(told) == 1 and "stray.pt has no" in told[0], name


def test_responses_without_a_policy_are_left_out_and_told(tmp_path):
    lines = list(records(noise(0.3)))
    for name in ("old_log_probs", "log_probs"):
        del lines[4][name]

    result = replay(write(tmp_path / "a.jsonl", iter(lines)), names=["none"])
    assert float(result.run["responses"].value) == 59 and result.unreadable == 1
    assert "no log-probs of the policy" in result.problems[0] and "response 4" in result.problems[0]


def test_a_look_at_a_checkpoint_reads_none_of_its_tensors(tmp_path):
    torch.save({"weight": torch.ones(1000)}, tmp_path / "optimizer.pt")
    content = torch_file(tmp_path / "optimizer.pt", print)

    with (tmp_path / "optimizer.pt").open("r+b") as file:  # what is not read yet is what stands there now
        start = file.read().index(torch.ones(1000).numpy().tobytes())
        file.seek(start)
        file.write(torch.full((1000,), 2.0).numpy().tobytes())
    assert content["weight"].eq(2.0).all()

    torch.save({"weight": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch_file(tmp_path / "old.pt", print)["weight"].eq(1.0).all()


def test_files_are_read_in_the_order_of_their_steps(tmp_path):
    for step in (10, 9, 100):
        write(tmp_path / f"{step}.jsonl", records(noise(0.1), responses=1))

    saved_format, files = find_format(tmp_path, "auto")
    assert saved_format.name == "jsonl" and [file.stem for file in files] == ["9", "10", "100"]


def test_damaged_lines_are_named_and_the_rest_is_replayed(tmp_path):
    lines = [json.dumps(line) for line in records(noise(0.3))]
    short = json.loads(lines[1]) | {"rollout_log_probs": [-1.0]}
    nan = json.loads(lines[2]) | {"old_log_probs": [float("nan")] * 20}
    above = json.loads(lines[3]) | {"rollout_log_probs": [0.5] * 20}
    broken = [json.dumps(short), json.dumps(nan), json.dumps(above), lines[4][:100]]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[10:], *broken]))

    result = replay(tmp_path, names=["none"])
    assert result.unreadable == 4 and float(result.run["responses"].value) == 50

    text = "\n".join(result.problems)
    assert "rollout_log_probs has 1 entries, there are 20 token_ids" in text and "old_log_probs has nan at" in text
    assert "these are probabilities; write their logarithm" in text and "a.jsonl line 54 is no JSON" in text


def test_a_response_that_lacks_a_column_is_left_out_and_named(tmp_path):
    folder = slime(tmp_path / "slime")
    content = torch.load(folder / "3.pt")
    aborted = {"tokens": [1], "response_length": 0, "rollout_log_probs": None}
    torn = content["samples"][0] | {"response_lengths": None}
    torch.save(content | {"samples": [aborted, *content["samples"], torn]}, folder / "3.pt")

    _, responses, told = read(folder)
    assert len(responses) == 2 and len(told) == 2
    assert "response 3: TypeError" in told[0] and "response 0 lacks rollout_log_probs" in told[1]


def test_a_damaged_file_is_named_and_its_code_is_never_run(tmp_path):
    slime(tmp_path / "slime")
    (tmp_path / "slime" / "4.pt").write_bytes(b"nothing")
    torch.save({"samples": [Path("/")]}, tmp_path / "slime" / "5.pt")

    _, responses, told = read(tmp_path / "slime")
    assert len(responses) == 2 and len(told) == 2 and "4.pt" in told[0] and "5.pt" in told[1]

    trl(tmp_path / "trl")
    (tmp_path / "trl" / "completions" / "completions_00004.parquet").write_bytes(b"PAR1 nothing")
    _, responses, told = read(tmp_path / "trl")
    assert len(responses) == 2 and "completions_00004.parquet" in told[0]


GOOD = dict(
    tokens=torch.tensor([7, 8, 1, 2]),
    response_lengths=2,
    rollout_log_probs=torch.tensor([-0.5, -1.0]),
    log_probs=torch.tensor([-0.6, -1.0]),
)


@pytest.mark.parametrize(
    "bad",
    [
        3,
        "text",
        [1, 2],
        None,
        {"tokens": 5, "rollout_log_probs": 1},
        GOOD | {"response_lengths": 10**400},
        GOOD | {"tokens": {"a": 1}},
        GOOD | {"rollout_log_probs": [[1.0], [2.0, 3.0]]},
        GOOD | {"loss_masks": torch.tensor(1)},
        GOOD | {"rollout_log_probs": [[["deep"]]]},
    ],
    ids=range(10),
)
def test_a_bad_sample_is_left_out_and_the_others_are_read(bad, tmp_path):
    torch.save({"samples": [GOOD, bad, GOOD]}, tmp_path / "3.pt")
    _, responses, told = read(tmp_path)
    assert len(responses) == 2 and len(told) == 1 and "3.pt, response 1" in told[0] and "left out" in told[0]


@pytest.mark.parametrize("samples", [3, {"a": GOOD}, "text", None, []], ids=str)
def test_samples_that_are_no_list_are_named(samples, tmp_path):
    torch.save({"samples": samples}, tmp_path / "3.pt")
    with pytest.raises(DataError, match=r"3\.pt has no list of samples and is left out"):
        replay(tmp_path)


def test_experiences_of_unequal_columns_cost_some_rows(tmp_path):
    folder = openrlhf(tmp_path / "openrlhf")
    [batch] = torch.load(folder / "experience_3.pt")
    short = batch | {"action_mask": batch["action_mask"][:1]}
    torch.save([short, batch | {"sequences": 3}, batch | {"advantages": torch.tensor(1.0)}], folder / "experience_3.pt")

    _, responses, told = read(folder)
    assert len(responses) == 3  # one of the first batch, both of the third
    assert len(told) == 2 and "lacks action_mask" in told[0] and "lacks sequences" in told[1]


def test_lines_nested_without_end_are_named_and_counted(tmp_path):
    lines = [json.dumps(line) for line in records(noise(0.3))]
    deep = "[" * 100_000
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*lines, *[deep] * 25]))

    result = replay(path, names=["none"])
    assert result.unreadable == 25 and float(result.run["responses"].value) == 60
    [problem] = result.problems
    assert "a.jsonl line 61 is no JSON" in problem and problem.endswith("(and 24 more like this)")


@pytest.mark.parametrize("name", ["old_log_probs", "response_mask", "attention_mask"])
def test_a_column_of_another_length_than_the_tokens_is_named(name, tmp_path):
    folder = verl(tmp_path / "verl")
    first, second = map(json.loads, (folder / "3.jsonl").read_text().splitlines())
    first[name] = [*first[name], 0]
    (folder / "3.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (first, second)))

    _, responses, told = read(folder)
    assert len(responses) == 1 and len(told) == 1 and name in told[0] and "entries, there are" in told[0]


def expanded_sample(folder: Path) -> None:
    """3 * 10^8 tokens that take eight bytes in the file."""
    ids = torch.zeros(1, dtype=torch.int64).expand(3 * 10**8)
    torch.save({"samples": [GOOD | {"tokens": ids, "response_lengths": 3 * 10**8}]}, folder / "3.pt")


def repeated_lists(folder: Path) -> None:
    """A list of lists that is one list, a thousand times."""
    lists = [[0.0] * 100_000] * 1_000
    torch.save({"samples": [GOOD | {"rollout_log_probs": lists}]}, folder / "3.pt")


def parquet_row(folder: Path) -> None:
    """Two million tokens of zeros, which compress to almost nothing."""
    columns = {"prompt_ids": 1, "completion_ids": 2_000_000, "completion_mask": 1, "sampling_per_token_logps": 1}
    lists = {name: pa.array([np.zeros(count, np.int8)]) for name, count in columns.items()}
    table = pa.table({"step": [1], "prompt": ["a"], "completion": ["b"]} | lists)
    pq.write_table(table, folder / "completions_1.parquet", compression="zstd")


@pytest.mark.parametrize(
    ("bomb", "why"),
    [
        (expanded_sample, "300,000,000 tokens, and at most 1,000,000 are read"),
        (repeated_lists, "a column of 100,000,000 numbers, and at most 64,000,000 are read"),
        (parquet_row, "2,000,000 tokens, and at most 1,000,000 are read"),
    ],
)
def test_a_huge_response_in_a_small_file_is_never_unpacked(bomb, why, tmp_path):
    bomb(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 10**6

    with pytest.raises(DataError, match=why):
        replay(tmp_path)


def test_a_batch_that_repeats_one_row_is_refused():
    repeated = {"sequences": torch.zeros(1, 4, dtype=torch.int64).expand(10**9, 4)}
    with pytest.raises(DamagedRecord, match="1,000,000,000 sequences"):
        next(batch_rows(repeated))


def test_what_no_format_knows_is_refused_with_the_columns(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "hello"}\n')

    with pytest.raises(DataError, match=r"token_ids .*of the response"):
        replay(tmp_path)
    with pytest.raises(DataError, match="lacks token_ids, rollout_log_probs; it has text"):
        replay(tmp_path, "jsonl")
    with pytest.raises(DataError, match="has no saved rollouts of trl"):
        replay(tmp_path, "trl")


def test_what_a_model_cannot_read_is_refused(tmp_path):
    bare = write(tmp_path / "bare.jsonl", records(noise(0.3), responses=1))
    with pytest.raises(DataError, match="has no prompt_ids"):
        replay(bare, model="starter:policy")

    line = next(records(noise(0.3), responses=1)) | {"prompt_ids": [99]}
    with pytest.raises(DataError, match="token id 99 in response 0 or its lists, but --model has 32 tokens"):
        replay(write(tmp_path / "other.jsonl", iter([line])), model="starter:policy")

    for outside in (32, -1):
        line = next(records(noise(0.3), responses=1)) | {"prompt_ids": [9]}
        line["rollout_top_ids"][3][5] = outside
        with pytest.raises(DataError, match=f"token id {outside} in response 0 or its lists"):
            replay(write(tmp_path / "lists.jsonl", iter([line])), model="starter:policy")


def test_long_prompts_are_read_a_few_at_a_time_and_the_same(tmp_path, monkeypatch):
    lines = list(records(noise(0.3), responses=8))
    for row, line in enumerate(lines):
        line["prompt_ids"] = [4 + row % 3] * (30 + row)
    path = write(tmp_path / "a.jsonl", iter(lines))

    unsplit = replay(path, model="starter:policy", names=["none"])

    batch_sizes = []
    forward = scoring.predicting_hidden

    def watched(model, prompts, prompt_mask, index, ids, mask):
        batch_sizes.append(len(ids) * (prompts.shape[1] + ids.shape[1]))
        return forward(model, prompts, prompt_mask, index, ids, mask)

    monkeypatch.setattr(scoring, "predicting_hidden", watched)
    monkeypatch.setattr("jackpot.analysis.replay.scoring.BATCH_TOKENS", 160)

    split = replay(path, model="starter:policy", names=["none"])

    assert (
        len(batch_sizes) == 4 and max(batch_sizes) <= 160
    )  # and not 8 responses of 20 tokens at once, with prompts of 37
    assert float(split.run["ratio"].value) == pytest.approx(float(unsplit.run["ratio"].value), rel=1e-4)


@pytest.mark.parametrize("name", WRITERS)
def test_diagnose_tells_healthy_and_mixed_up_dumps_apart(name, tmp_path, monkeypatch):
    """`jackpot diagnose DUMP` of the trainers that docs/my-run-collapses.md names, on two responses of 600 tokens."""
    responses = list(records(noise(0.3), responses=2, length=600))
    engine, policy = ([response[column] for response in responses] for column in ("rollout_log_probs", "old_log_probs"))
    columns = {
        "RESPONSES": [response["token_ids"] for response in responses],
        "MASKS": [[1] * 600] * 2,
        "ADVANTAGES": [[1.0] * 600] * 2,
    }
    shifted = [[*row[1:], -1.0] for row in engine]

    findings = []  # of the healthy dump, and of the one whose engine column is shifted
    for reported in (engine, shifted):
        for constant, rows in (columns | {"ROLLOUT": reported, "OLD": policy}).items():
            monkeypatch.setattr(sys.modules[__name__], constant, rows)
        findings.append(dump_findings(replay(WRITERS[name](tmp_path / str(len(findings))), names=["none"])))

    assert set(findings[0]) == ({"Precision"} if name == "skyrl" else set())  # which wrote bfloat16
    assert f"{SAMPLER[name]} (the engine's) has at each token the log-prob of the next" in findings[1]["Log-probs"]
