"""Generation of responses of several turns: the engine samples the model's turns, the task replies between two turns.

The first turn is the request itself. The prompt of every later turn is the whole response so far, and the turn's uid
and seed are derived from the first request, so that a response depends neither on its batch nor on how long others
take.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from jackpot.core.errors import EngineError
from jackpot.core.prng import fold_in
from jackpot.core.types import TOKEN_COLUMNS, Finish, Rollout
from jackpot.rollout.engines.base import Engine, Request
from jackpot.rollout.tasks.base import Task, decoded_response


def stream_rollouts(
    engine: Engine, task: Task, tokenizer: PreTrainedTokenizerBase, requests: Sequence[Request]
) -> Iterator[Rollout]:
    """Generate the response to every request, and yield its rollout as soon as the response ends, in any order.

    For a task without `turn_end_token_ids` every response is a single turn, and the engine gets the requests unchanged.

    The call itself submits the first turns, so an engine that generates in the background starts at once. Later turns
    are submitted while the caller waits for the next rollout.

    `sampling.max_new_tokens` counts all tokens of a response, the environment's too. A reply of the environment that
    leaves no room for one more token, within that limit or in the context, is dropped, and the response ends as
    `length`. If the environment gives no reply, the response ends as `stop`. An aborted turn aborts its response.

    Raises:
        EngineError: a uid is already in flight, or the engine refuses a prompt or does not return a turn.
    """
    if not task.turn_end_token_ids:
        engine.submit(requests)
        return _single_turns(engine, {request.uid for request in requests})

    episodes = [_Episode(engine, task, tokenizer, request) for request in requests]
    first_turns = [episode.next_turn() for episode in episodes]
    engine.submit(first_turns)
    pending = {turn.uid: episode for turn, episode in zip(first_turns, episodes, strict=True)}
    return _as_completed(engine, pending)


def generate_rollouts(
    engine: Engine, task: Task, tokenizer: PreTrainedTokenizerBase, requests: Sequence[Request]
) -> list[Rollout]:
    """Generate the responses to all requests, of one or several turns; return the rollouts in the requests' order."""
    rollouts = {rollout.uid: rollout for rollout in stream_rollouts(engine, task, tokenizer, requests)}
    return [rollouts[request.uid] for request in requests]


def _single_turns(engine: Engine, pending: set[str]) -> Iterator[Rollout]:
    """Collect the rollouts of the requests with the uids `pending`, and yield each as it ends."""
    while pending:
        # Wait for one rollout, and take all others that have ended by then.
        rollouts = _next_turns(engine, pending)
        rollouts += engine.collect(len(pending), timeout=0.0, uids=pending)
        pending -= {rollout.uid for rollout in rollouts}
        yield from rollouts


def _as_completed(engine: Engine, pending: dict[str, "_Episode"]) -> Iterator[Rollout]:
    """Submit the next turn of each episode whose turn has finished, and yield the rollout of each episode that ends.

    `pending` has the episodes by the uid of the turn that is generated. Turns are collected one at a time, since the
    next turn must be in the engine's queue before the engine composes its next batch.
    """
    while pending:
        for turn in _next_turns(engine, pending):
            episode = pending.pop(turn.uid)
            episode.add_turn(turn)
            if episode.finish is not None:
                yield episode.rollout(episode.finish)
                continue

            following = episode.next_turn()
            pending[following.uid] = episode
            engine.submit([following])


def _next_turns(engine: Engine, pending: Collection[str]) -> list[Rollout]:
    """Wait until a turn with one of the uids `pending` is finished; return a list whose only item is this turn."""
    turns = engine.collect(1, uids=pending)
    if not turns:
        raise EngineError(f"the engine has nothing left to return; missing: {', '.join(sorted(pending)[:5])}")
    return turns


class _Episode:
    """A response of several turns while it is generated: turns of the model and, between them, replies.

    Turns and replies are segments, each stored as a `Rollout`. Each turn samples at least one token, so the limit on
    tokens also bounds the number of turns.
    """

    def __init__(self, engine: Engine, task: Task, tokenizer: PreTrainedTokenizerBase, request: Request) -> None:
        """Begin an empty response to `request`, limited by its settings and by the engine's context."""
        self._task, self._tokenizer = task, tokenizer
        self._request = request
        context = engine.capabilities.max_model_len - len(request.prompt.token_ids)
        self._limit = min(request.sampling.max_new_tokens, context)  # largest length of the response, tokens
        self._segments: list[Rollout] = []  # turns and replies so far, one after the other
        self.finish: Finish | None = None  # why the response has ended, None while it goes on

    def next_turn(self) -> Request:
        """Return the request for the model's next turn."""
        request, response = self._request, self._column("token_ids")
        settings = {
            "max_new_tokens": request.sampling.max_new_tokens - len(response),
            "stop_token_ids": request.sampling.stop_token_ids + self._task.turn_end_token_ids,
        }

        turn = len(self._segments) // 2  # number of earlier turns, each of which a reply follows
        return replace(
            request,
            uid=f"{request.uid}/turn {turn}" if turn else request.uid,
            prompt=replace(request.prompt, token_ids=(*request.prompt.token_ids, *response.tolist())),
            seed=fold_in("turn", request.seed, turn) if turn else request.seed,
            sampling=request.sampling.model_copy(update=settings),
        )

    def add_turn(self, turn: Rollout) -> None:
        """Append a turn of the model and the environment's reply to it; set `finish` if the response ends here."""
        self._segments.append(turn)
        response, sampled = self._column("token_ids"), self._column("sampled_mask")
        if turn.finish != "stop" or int(response[-1]) not in self._task.turn_end_token_ids:
            self.finish = turn.finish
            return

        decoded = decoded_response(self._tokenizer, self._request.prompt, response, sampled, finished=True)
        reply = self._task.reply(decoded)
        if reply is None:
            self.finish = "stop"
            return

        token_ids = self._tokenizer.encode(reply, add_special_tokens=False)
        if len(response) + len(token_ids) >= self._limit:  # no room for a token after the reply
            self.finish = "length"
        else:
            self._segments.append(_reply_segment(token_ids, turn))

    def rollout(self, finish: Finish) -> Rollout:
        """Return all turns and replies as one rollout, the response to the request; the sampler sets `sampled_by`."""
        columns = {name: self._column(name) for name in TOKEN_COLUMNS}
        return Rollout(uid=self._request.uid, prompt=self._request.prompt, finish=finish, sampled_by=None, **columns)

    def _column(self, name: str) -> torch.Tensor:
        """Join one of the fields of `Rollout` that have a row for each token, over all turns and replies so far.

        Args:
            name: name of the field, such as token_ids.

        Returns:
            [T, ...] for the T tokens of the response so far; an empty int64 tensor before the first turn.
        """
        if not self._segments:
            return torch.zeros(0, dtype=torch.int64)
        return torch.cat([getattr(segment, name) for segment in self._segments])


def _reply_segment(token_ids: list[int], turn: Rollout) -> Rollout:
    """Return the environment's reply to `turn` as a rollout: no model sampled it, so it has no log-probs."""
    length, num_top = len(token_ids), turn.top_ids.shape[1]
    return replace(
        turn,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        rollout_log_probs=torch.zeros(length),
        sampled_mask=torch.zeros(length, dtype=torch.bool),
        top_ids=torch.zeros(length, num_top, dtype=torch.int64),
        top_log_probs=torch.full((length, num_top), -torch.inf),
        versions=turn.versions[-1:].expand(length, -1),  # the version of the turn's last token
    )
