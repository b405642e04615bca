"""Responses that the model and a task's tool write by turns. An engine knows one turn, a task only text.

The first turn is the request itself. Every later one is a request of its own, whose prompt ids are all that was said
before it, and whose uid and seed follow from those of the request and the number of the turn. So a response depends
neither on its batch nor on how long others take. No turn waits for another conversation, and each samples at least one
token, so that the limit on tokens also bounds the turns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from jackpot.core.errors import EngineError
from jackpot.core.prng import stream_key
from jackpot.core.types import Finish, Rollout
from jackpot.rollout.engines.base import Engine, Request
from jackpot.rollout.tasks.base import Task, decode

_COLUMNS = ("token_ids", "rollout_log_probs", "sampled_mask", "top_ids", "top_log_probs", "versions")


def stream(
    engine: Engine, task: Task, tokenizer: PreTrainedTokenizerBase, requests: Sequence[Request]
) -> Iterator[Rollout]:
    """The response to every request as it ends, in any order; of a task without `turn_ends`, what the engine writes.

    The first turns are submitted by the call itself: an engine that writes by itself goes on while nobody asks for the
    next response. Later turns are submitted while somebody does.

    `sampling.max_new_tokens` counts all tokens of a response, the tool's too. A reply that leaves no room for one more
    token, there or in the context, is not written and ends the response as `length`. Where the task has no reply the
    response ends as `stop`. An aborted turn aborts its response.

    Raises:
        EngineError: a uid already in flight, a prompt that the engine refuses, or a turn that it does not return.
    """
    conversations = [_Conversation(engine, task, tokenizer, request) for request in requests]
    first = [conversation.next_turn() for conversation in conversations]
    engine.submit(first)
    waiting = {turn.uid: conversation for turn, conversation in zip(first, conversations, strict=True)}
    return _as_they_end(engine, waiting, has_tool=bool(task.turn_ends))


def write(engine: Engine, task: Task, tokenizer: PreTrainedTokenizerBase, requests: Sequence[Request]) -> list[Rollout]:
    """As `stream`, when all have ended and in the order of the requests."""
    rollouts = {rollout.uid: rollout for rollout in stream(engine, task, tokenizer, requests)}
    return [rollouts[request.uid] for request in requests]


def _as_they_end(engine: Engine, waiting: dict[str, "_Conversation"], has_tool: bool) -> Iterator[Rollout]:
    """Collect the turns of `waiting`, by uid, and answer them until every conversation has ended."""
    while waiting:
        turns = engine.collect(1, uids=waiting)
        if not turns:
            raise EngineError(f"the engine has nothing left to return; missing: {', '.join([*waiting][:5])}")
        if not has_tool:  # with one, its reply has to be in the queue before the engine makes up its next batch
            turns += engine.collect(len(waiting), timeout=0.0, uids=waiting)
        for turn in turns:
            conversation = waiting.pop(turn.uid)
            conversation.take_in(turn)
            if conversation.finish is None:
                following = conversation.next_turn()
                waiting[following.uid] = conversation
                engine.submit([following])
            else:
                yield conversation.response()


class _Conversation:
    """One response under way: parts that the model and the tool wrote in turn, each with the columns of a rollout."""

    def __init__(self, engine: Engine, task: Task, tokenizer: PreTrainedTokenizerBase, request: Request) -> None:
        self._task, self._tokenizer, self._request = task, tokenizer, request
        context = engine.capabilities.context_length - len(request.prompt.token_ids)
        self._limit = min(request.sampling.max_new_tokens, context)
        self._parts: list[Rollout] = []
        self.finish: Finish | None = None  # why the response has ended, None while it goes on

    def next_turn(self) -> Request:
        """The request for what the model says next."""
        request, number, said = self._request, len(self._parts) // 2, self._said()
        sampling = request.sampling
        settings = {
            "max_new_tokens": sampling.max_new_tokens - len(said),
            "stop_token_ids": sampling.stop_token_ids + self._task.turn_ends,
        }
        return Request(
            uid=f"{request.uid}/turn {number}" if number else request.uid,
            prompt=replace(request.prompt, token_ids=(*request.prompt.token_ids, *said.tolist())),
            seed=stream_key("turn", request.seed, number) if number else request.seed,
            sampling=sampling.model_copy(update=settings),
        )

    def take_in(self, turn: Rollout) -> None:
        """Append what the model said and what the tool replies, or end."""
        self._parts.append(turn)
        said = self._said()
        if turn.finish != "stop" or int(said[-1]) not in self._task.turn_ends:
            self.finish = turn.finish
        elif (reply := self._task.reply(self._request.prompt, decode(self._tokenizer, said))) is None:
            self.finish = "stop"
        elif len(said) + len(tokens := self._tokenizer.encode(reply, add_special_tokens=False)) >= self._limit:
            self.finish = "length"
        else:
            self._parts.append(_unsampled(tokens, turn))

    def response(self) -> Rollout:
        """All parts as one rollout of the request."""
        columns = {name: torch.cat([getattr(part, name) for part in self._parts]) for name in _COLUMNS}
        return Rollout(uid=self._request.uid, prompt=self._request.prompt, finish=self.finish, **columns)

    def _said(self) -> torch.Tensor:
        """All tokens so far, [T] int64."""
        return torch.cat([torch.zeros(0, dtype=torch.int64), *(part.token_ids for part in self._parts)])


def _unsampled(token_ids: list[int], turn: Rollout) -> Rollout:
    """What the tool said after `turn`: no distribution gave these tokens, so none has a probability."""
    length, top = len(token_ids), turn.top_ids.shape[1]
    return replace(
        turn,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        rollout_log_probs=torch.zeros(length),
        sampled_mask=torch.zeros(length, dtype=torch.bool),
        top_ids=torch.zeros(length, top, dtype=torch.int64),
        top_log_probs=torch.full((length, top), -torch.inf),
        versions=turn.versions[-1:].expand(length, -1),
    )
