"""Training of one run by several processes: rank 0 runs the trainer, and the other ranks follow its commands.

rank 0: Trainer, Sampler, engines, guards, run folder ──► LedLearner ──┬──► its own learner
rank r: follow ◄── one message a command, its own micro-batches ───────┴──► its learner, at the same time
"""

import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jackpot.config.sampling import Sampling
from jackpot.core.errors import CheckpointError, JackpotError, RankError, first_line
from jackpot.core.messages import MessageError, pack, unpack
from jackpot.core.roles import Role
from jackpot.core.types import ScoredRollout, TokenBatch, TrainingSample, Version
from jackpot.models.parts import write_index
from jackpot.training.batching import deal
from jackpot.training.joint_learner import JointLearner
from jackpot.training.learner import Learner, TrainResult

_BEATS = 4  # number of signs of life that rank 0 sends within one time-out
_PIECE = 2**28  # most bytes that are sent at once
# A sign of life, sent in place of a message's size. A size is sent with its complement, by which it is checked.
_ALIVE = torch.tensor([0, ~0])


class Ranks:
    """The channel for commands from rank 0 to the other ranks of torch.distributed's default group, and for replies.

    All ranks carry out a command at the same time, so that their collective calls (sums of gradients, gathered weights)
    meet. Commands and replies are messages over gloo (`core.messages`).

    Rank 0 may generate rollouts for hours between two commands, so it sends signs of life, a few within each time-out.
    A rank waits for a command as long as these signs come. Within a command, the time-out of the default group holds.

    Args:
        run: the run folder, in which every rank writes its newest command.
        timeout: time-out of the default group, in seconds.
    """

    def __init__(self, run: Path, timeout: float) -> None:
        """Open the group in which ranks wait for commands, and let rank 0 send signs of life from now on."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Twice the time-out: a rank may begin to wait while rank 0 still waits for the reply of another rank.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * timeout))
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        self._waiting = group  # the group in which ranks wait for a command
        self._run, self._last = run, LastCommand(run, self.rank)  # the newest command, also in ranks/R.json
        self._is_idle = True  # whether this rank is between two commands
        # The lock is held to send to waiting ranks; the event says that the run has ended.
        self._turn, self._ended = threading.Lock(), threading.Event()
        if self.rank == 0:  # send signs of life, _BEATS within one time-out
            threading.Thread(target=self._beat, args=(timeout / _BEATS,), daemon=True).start()

    def carry_out(self, name: str, arguments: Sequence[Any], work: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
        """Carry out one command on all ranks; only rank 0 calls this.

        Args:
            arguments: what each rank gets with the command.
            work: carries out the command on rank 0, with `arguments[0]`.

        Returns:
            What `work` returned, and the replies of ranks 1, 2, ...

        Raises:
            RankError: a rank was lost, or does not answer within the time-out. The message names what each rank did
                last.
        """
        # The lock `_turn` holds back signs of life; `_command` gives `_last` the next number.
        with self._turn, self._command(self._last.sequence_number + 1, name):
            for rank in range(1, self.size):  # `follow` reads these four values
                self._send([self._last.sequence_number, name, torch.get_num_threads(), arguments[rank]], rank)
            return work(arguments[0]), [self._receive(rank, group=None) for rank in range(1, self.size)]

    def follow(self, do: Callable[[str, Any], Any]) -> None:
        """Carry out the commands of rank 0 with `do`, and send back what `do` returns, until rank 0 ends.

        Torch gets as many threads as on rank 0, so that results do not depend on which rank computes what.

        Raises:
            RankError: rank 0 or another rank was lost.
        """
        while True:
            with self._lost_named(f"waiting for a command after {self._last}"):
                message = self._receive(0, group=self._waiting)
            if message is None:  # rank 0 has ended
                return
            sequence_number, name, threads, arguments = message
            with self._command(sequence_number, name):
                if threads != torch.get_num_threads():
                    torch.set_num_threads(threads)
                self._send(do(name, arguments), 0)

    def end(self) -> None:
        """End the other ranks; only rank 0 calls this. A rank within a command ends once it notices rank 0's end."""
        self._ended.set()
        if self._is_idle:
            with self._turn, self._lost_named("ending"):
                for rank in range(1, self.size):
                    self._send(None, rank)

    def _beat(self, interval: float) -> None:
        """Send signs of life to all waiting ranks, one an interval, until the run ends or a command fails."""
        while not self._ended.wait(interval):
            with self._turn:
                # A running command holds the lock, so if rank 0 is not idle here, a command has failed.
                if self._ended.is_set() or not self._is_idle:
                    return
                try:
                    for rank in range(1, self.size):
                        dist.send(_ALIVE, rank, group=self._waiting)
                except RuntimeError:  # a rank is lost; the next command reports which
                    return

    @contextmanager
    def _command(self, sequence_number: int, name: str) -> Iterator[None]:
        """Record in this rank's file that a command runs, and, after the block, that it is done or has failed."""
        self._last.begin(sequence_number, name)  # `_last` writes the file
        self._is_idle = False
        try:
            with self._lost_named(str(self._last)):  # an error about a lost rank names this command
                yield
        except BaseException as error:
            why = str(error).strip().partition("\n")[0]
            self._last.write("failed", error=f"{type(error).__name__}: {why}")
            raise
        self._is_idle = True
        self._last.write("done")

    @contextmanager
    def _lost_named(self, doing: str) -> Iterator[None]:
        """Turn torch's error about a lost rank in the block into a RankError with the newest command of each rank.

        Args:
            doing: what this rank does in the block, for the error's text.
        """
        try:
            yield
        except RuntimeError as error:
            # Raised as they are: the package's own errors, and those that are not about torch's connections.
            if isinstance(error, JackpotError) or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise RankError(
                f"rank {self.rank} lost another rank in {doing}: {_reason(error)}\n{describe(self._run, self.size)}\n"
                f"The run continues from its newest checkpoint when it is started again; torchrun --max-restarts N "
                f"does so by itself"
            ) from error

    def _send(self, value: Any, rank: int) -> None:
        """Send a value to another rank: a command from rank 0, or a reply to it; first its size, then its bytes."""
        message, is_command = pack(value), self.rank == 0
        dist.send(torch.tensor([len(message), ~len(message)]), rank, group=self._waiting if is_command else None)
        for piece in message.split(_PIECE):
            dist.send(piece, rank)

    def _receive(self, rank: int, group: dist.ProcessGroup | None) -> Any:
        """Wait for a value from another rank and return it; the signs of life that come before it are dropped.

        Args:
            group: the group in which the other rank sends the size of the value; None: the default group. The bytes
                of the value always come in the default group.

        Raises:
            MessageError: what comes is no message.
        """
        head = _ALIVE.clone()  # begin as if a sign of life had come
        while torch.equal(head, _ALIVE):
            dist.recv(head, rank, group=group)
        # A size comes with its bitwise complement; if it does not, the connection has delivered other bytes.
        size, complement = head.tolist()
        if size != ~complement:
            raise MessageError(
                f"rank {self.rank} got the size of no message, {size}; look at the connection, and type the same "
                f"command again, which continues from the newest checkpoint"
            )
        message = torch.empty(size, dtype=torch.uint8)
        for piece in message.split(_PIECE):  # views of the message, so this fills it
            dist.recv(piece, rank)
        return unpack(message)


def _reason(error: RuntimeError) -> str:
    """Return the message of an error of torch, without the position in torch's source and without advice."""
    return re.sub(r"^\[[^]]*\] ", "", first_line(error)).partition(". ")[0]


class LedLearner(Learner):
    """The learner of rank 0, each call of which is a command that the learners of all ranks carry out together.

    Args:
        learner: rank 0's own learner, which shares the models with the learners of the other ranks.
    """

    def __init__(self, learner: JointLearner, ranks: Ranks) -> None:
        self._learner, self._ranks = learner, ranks

    @property
    def version(self) -> Version:
        return self._learner.version

    @property
    def pads(self) -> bool:
        return self._learner.pads

    def compute_advantages(self, scored: Sequence[ScoredRollout]) -> list[TrainingSample]:
        """Compute the advantages on rank 0, with values from the critics of all ranks if there is a critic."""
        critic = self._learner.critic
        if critic is None or not scored:
            return self._learner.compute_advantages(scored)
        return critic.compute_advantages(scored, self._by_rollout("values", critic.batches(scored)))

    def train(
        self, mini_batches: Sequence[Sequence[TokenBatch]], trace: bool, with_rollout_model: bool = True
    ) -> TrainResult:
        """Train on all ranks, each on its share of every step's micro-batches, and join their traces and gaps."""
        # Deal the micro-batches of every step out to the ranks: [step][rank], a list of micro-batches.
        dealt = [deal(mini_batch, self._ranks.size) for mini_batch in mini_batches]
        arguments = [
            {"mini_batches": [step[rank] for step in dealt], "trace": trace, "with_rollout_model": with_rollout_model}
            for rank in range(self._ranks.size)
        ]
        result, *replies = self._all("train", arguments)

        # Ranks 1, 2, ... have replied with the traces and gaps of their rollouts; rank 0's own join them.
        replies.insert(0, _traces_and_gaps(result))
        traces = zip(*(reply["traces"] for reply in replies), strict=True)  # for each step, the traces of every rank
        steps = [
            replace(step, traces=_merged(rank_traces)) for step, rank_traces in zip(result.steps, traces, strict=True)
        ]
        return TrainResult(steps=steps, engine_gaps=_merged(reply["engine_gaps"] for reply in replies))

    def score(
        self, role: Role, batches: Sequence[TokenBatch], sampling: Sampling, from_copy: bool = False
    ) -> dict[str, Tensor]:
        if not batches:
            return {}
        return self._by_rollout("score", batches, role=role, sampling=sampling.model_dump(), from_copy=from_copy)

    def keep_weights(self, role: Role) -> None:
        self._on_all("keep_weights", role=role)

    def weights(self, role: Role, dtype: torch.dtype | None = None) -> list[tuple[str, Tensor]]:
        """Return a list of all weights of a model: they are gathered first, so no rank waits while an engine loads."""
        return self._on_all("weights", role=role, dtype=dtype and str(dtype).removeprefix("torch."))

    def release_memory(self) -> None:
        self._on_all("release_memory")

    def save(self, folder: Path, roles: Sequence[Role]) -> dict[str, Any]:
        """Let every rank write its part of the models, then write their indices; return the parts' checksums.

        If ranks cannot write, raise a CheckpointError with the errors of all of them.
        """
        arguments = {"folder": str(folder.resolve()), "roles": list(roles)}
        replies = self._all("save", [arguments] * self._ranks.size)
        if failures := [f"rank {rank}: {reply['failed']}" for rank, reply in enumerate(replies) if "failed" in reply]:
            raise CheckpointError("; ".join(failures))

        files = _merged(reply["files"] for reply in replies)  # checksums of the files of all ranks
        # Each rank has written a part of each model: write the index that says which weight is in which file.
        for role in roles:
            write_index(folder / role, [folder / name for name in files if Path(name).parent == Path(role)])
        return files

    def state_dict(self) -> dict[str, Any]:
        return self._learner.state_dict()

    def _by_rollout(self, name: str, batches: Sequence[TokenBatch], **arguments: Any) -> dict[str, Tensor]:
        """Deal batches out to the ranks, carry out a command on them, and join the ranks' results by rollout uid."""
        shares = deal(batches, self._ranks.size)
        return _merged(self._all(name, [{"batches": share} | arguments for share in shares]))

    def _on_all(self, name: str, **arguments: Any) -> Any:
        """Carry out a command with equal arguments on all ranks, and return the result of rank 0."""
        return self._all(name, [arguments] * self._ranks.size)[0]

    def _all(self, name: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """Carry out a command on all ranks; return the result of rank 0 and the replies of the others, by rank."""
        result, replies = self._ranks.carry_out(name, arguments, lambda share: _work(self._learner, name, share))
        return [result, *replies]


def follow(ranks: Ranks, build: Callable[[dict[str, Any]], JointLearner]) -> None:
    """Carry out the commands of rank 0 with this rank's learner, until rank 0 ends.

    Args:
        build: makes the learner that the command `build` describes, which replaces an earlier learner.

    Raises:
        RankError: rank 0 or another rank was lost.
    """
    learner: list[JointLearner] = []  # this rank's learner; empty until the first command `build`

    def do(name: str, arguments: dict[str, Any]) -> Any:
        """Carry out one command with this rank's learner, and return what rank 0 needs of its result."""
        if name == "build":
            learner.clear()  # frees the models before the next learner loads its own
            learner.append(build(arguments))
            return None
        result = _work(learner[0], name, arguments)
        if name == "train":
            return _traces_and_gaps(result)
        return result if name in _REPLIED else None  # of the other commands, rank 0 needs its own result alone

    ranks.follow(do)


def _work(learner: JointLearner, name: str, arguments: dict[str, Any]) -> Any:
    """Carry out a command with this rank's learner; return its result, for `save` a dict with "files" or "failed"."""
    match name:
        case "score":  # a message has the sampling settings as a dict
            arguments = arguments | {"sampling": Sampling(**arguments["sampling"])}
        case "save":
            try:
                return {"files": learner.save(Path(arguments["folder"]), arguments["roles"])}
            except CheckpointError as error:  # returned and not raised, because a full disk does not end a run
                return {"failed": str(error)}
        case "weights":  # a message has the dtype by its name, or None
            dtype = arguments["dtype"] and getattr(torch, arguments["dtype"])
            return list(learner.weights(arguments["role"], dtype))
    return getattr(learner, name)(**arguments)


def _traces_and_gaps(result: TrainResult) -> dict[str, Any]:
    """Return what rank 0 needs of a rank's results: each step's traces, and the engine gaps, both by rollout uid."""
    return {"traces": [step.traces for step in result.steps], "engine_gaps": result.engine_gaps}


_REPLIED = {"score", "values", "save"}  # commands whose whole result rank 0 needs from the other ranks


def _merged(dicts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join the dicts of all ranks, whose keys are rollout uids or names of files, into one dict."""
    return {key: value for of_rank in dicts for key, value in of_rank.items()}


class LastCommand:
    """The newest command of rank R, written to ranks/R.json for the error message when a rank is lost.

    If the file cannot be written, the run goes on without it.

    Args:
        run: the run folder.
    """

    def __init__(self, run: Path, rank: int) -> None:
        self._path = run / "ranks" / f"{rank}.json"
        self._facts: dict[str, Any] = {"rank": rank, "host": platform.node(), "pid": os.getpid()}
        self.sequence_number, self.name = 0, "none"
        self.write("waits")

    def begin(self, sequence_number: int, name: str) -> None:
        """Write to ranks/R.json that this rank now runs a command, its newest one; `describe` reads the file."""
        self.sequence_number, self.name = sequence_number, name
        self.write("runs")

    def __str__(self) -> str:
        return f"command {self.sequence_number} ({self.name})"

    def write(self, state: str, **more: Any) -> None:
        """Write the newest command and its state to the file: "runs", "done" or "failed"; before the first, "waits".

        Args:
            more: further entries of the file, such as the error.
        """
        command = {"number": self.sequence_number, "command": self.name, "state": state, "time": time.time()}
        partial = self._path.with_suffix(".partial")
        with suppress(OSError):  # the run goes on without the file
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self._facts | command | more) + "\n")
            partial.replace(self._path)


def describe(run: Path, size: int) -> str:
    """Return text for error messages that says of each rank which command it began or finished last, and when.

    The text is read from the files ranks/R.json in the run folder.

    Args:
        run: the run folder.
        size: number of ranks.
    """
    return "; ".join(_sentence(run / "ranks" / f"{rank}.json", rank) for rank in range(size))


def _sentence(path: Path, rank: int) -> str:
    """Describe the newest command of one rank, from its file; say so if the file is missing or damaged."""
    try:
        facts = json.loads(path.read_text())
        ago = f"{max(0.0, time.time() - facts['time']):.0f} s ago"
        process = f"rank {rank} (process {facts['pid']} on {facts['host']})"
        command = f"command {facts['number']} ({facts['command']})"
        if facts["state"] == "waits":
            return f"{process} has had no command"
        if facts["state"] == "failed":
            return f"{process} failed in {command} {ago}: {facts['error']}"
        return f"{process} {'began' if facts['state'] == 'runs' else 'finished'} {command} {ago}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"rank {rank} has left no ranks/{rank}.json"
