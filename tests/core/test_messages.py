"""Messages between ranks: every kind of value comes back as it was sent, and nothing else is packed or unpacked."""

import io
import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from helpers.taps import sealed
from helpers.token_batches import token_batch
from jackpot.core.errors import RankError
from jackpot.core.messages import pack, unpack
from jackpot.core.types import AttentionBlock, PackedRow, Prompt, Rollout, Score, ScoredRollout, TokenBatch
from jackpot.models.packed_row import pack_row


def rollout() -> Rollout:
    """A rollout of two tokens."""
    prompt = Prompt(uid="p", text="2+3=\n", answer="5", token_ids=(5, 6), other_answers=("five",))

    return Rollout(
        uid="p#0",
        prompt=prompt,
        finish="stop",
        token_ids=torch.tensor([9, 1]),
        rollout_log_probs=torch.tensor([-0.1, float("-inf")]),
        sampled_mask=torch.tensor([True, False]),
        top_ids=torch.zeros(2, 0, dtype=torch.int64),
        top_log_probs=torch.zeros(2, 0),
        versions=torch.tensor([[8, 8], [8, 8]]),
    )


def same(sent: object, received: object) -> bool:
    """Whether two values are equal, down to their classes and number formats."""
    if isinstance(sent, torch.Tensor):
        return sent.dtype == received.dtype and torch.equal(sent, received)
    if isinstance(sent, TokenBatch | PackedRow | Rollout | ScoredRollout):
        return type(sent) is type(received) and all(
            same(getattr(sent, f.name), getattr(received, f.name)) for f in fields(sent)
        )
    if isinstance(sent, list | tuple):
        return type(sent) is type(received) and len(sent) == len(received) and all(map(same, sent, received))
    if isinstance(sent, dict):
        return list(sent) == list(received) and all(map(same, sent.values(), received.values()))
    return type(sent) is type(received) and sent == received


PACKED = pack_row([(5, 6), (7,)], [0, 1], [torch.tensor([8, 9, 1]), torch.tensor([9])])
VALUES = {
    "plain": [None, True, 3, 2.5, "ä", ("a", [1]), {"x": {"y": ()}}],
    "token batch": {"batches": [token_batch(), token_batch(2)], "trace": False},
    "packed row": PACKED,
    "scored rollouts": [ScoredRollout(rollout=rollout(), score=Score(reward=1.0, correct=True))],
    "odd sizes": [torch.ones(3, dtype=torch.bool), torch.tensor(1.0, dtype=torch.float64), torch.empty(0, 4)],
    "bfloat16, transposed": torch.arange(6.0).bfloat16().view(2, 3).T,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was_sent(name: str) -> None:
    message = pack(VALUES[name])
    assert message.dtype == torch.uint8 and same(VALUES[name], unpack(message))


@pytest.mark.parametrize("value", [Path("x"), {1: 2}, [{3}], pack, AttentionBlock])
def test_nothing_else_can_be_sent(value: object) -> None:
    with pytest.raises(TypeError, match="a message between ranks holds a "):
        pack(value)


def test_a_message_makes_no_other_class() -> None:
    text = b'[{"Path": ["/etc/passwd"]}, []]'
    with pytest.raises(ValueError, match="KeyError: 'Path'"):
        unpack(sealed(len(text).to_bytes(8, "little") + text))


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable, tuple]:
        return Path.write_text, (self._file, "gone off")


def _saved(value: object) -> bytes:
    """Save a value as torch does."""
    torch.save(value, buffer := io.BytesIO())
    return buffer.getvalue()


@pytest.mark.parametrize("dump", [pickle.dumps, _saved])
@pytest.mark.parametrize("is_framed", [False, True])
def test_a_pickled_payload_is_refused_and_runs_nothing(
    dump: Callable[[object], bytes], is_framed: bool, tmp_path: Path
) -> None:
    """Also where it stands in place of the JSON of a message, after the length."""
    file = tmp_path / "bomb"
    payload = dump(Bomb(file))
    message = len(payload).to_bytes(8, "little") + payload if is_framed else payload

    for received in (sealed(message), torch.frombuffer(bytearray(message), dtype=torch.uint8)):
        with pytest.raises(ValueError):
            unpack(received)
    assert not file.exists()

    pickle.loads(pickle.dumps(Bomb(file)))
    assert file.exists()


@pytest.mark.parametrize("name", ["load", "nothing"])
def test_a_number_format_is_one_of_torch(name: str) -> None:
    text = f'[{{"tensor": 0}}, [["{name}", [1]]]]'.encode()
    with pytest.raises(ValueError, match="no number format of torch"):
        unpack(sealed(len(text).to_bytes(8, "little") + text + bytes(8)))


def test_a_message_with_one_other_byte_is_refused() -> None:
    message = pack({"ids": torch.arange(3), "seed": 12})

    for index in range(len(message)):
        message[index] ^= 1
        with pytest.raises(RankError, match="altered on its way"):
            unpack(message)
        message[index] ^= 1
    assert unpack(message)["seed"] == 12


def test_a_tensor_of_one_number_of_a_larger_one_travels() -> None:
    """torch takes any stride of a dimension of one for contiguous, and then no view of its bytes."""
    single = torch.arange(84).view(2, 42)[:1, 3]
    assert single.stride() == (42,) and torch.equal(unpack(pack(single)), single)
