"""The engine of servers that the user has started, in other processes or on other machines: a pool of `Replica`s.

The caller's thread hands over prompts and new weights. It waits for rollouts in `collect`, for log-probs in `score` and
for the servers in `update_weights`. The pool (`engines/pool.py`) sends each prompt to a server in a request of its own.
"""

import math
import secrets
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import count
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config.engines import ServerEngineConfig, is_quantized
from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout, Version
from jackpot.models.forward import output_layer
from jackpot.models.load import DTYPES
from jackpot.rollout.engines.background import BackgroundEngine
from jackpot.rollout.engines.base import Capabilities, Request
from jackpot.rollout.engines.checks import check_request, check_weights
from jackpot.rollout.engines.pool import PeerRequest, Pool, PoolLimits
from jackpot.rollout.engines.servers.http import HTTPClient, open_session
from jackpot.rollout.engines.servers.protocol import LogProbRequest, score_by_requests
from jackpot.rollout.engines.servers.replica import Replica
from jackpot.rollout.engines.servers.weight_sync import Format, SavedWeights, WeightsFolder


class ServerEngine(BackgroundEngine):
    """An engine of servers that the user has started with one model. A subclass is for vLLM's or SGLang's servers."""

    client_class: ClassVar[type[HTTPClient]]
    # The module that translates requests and answers: `check_temperature`, `generate_body`, `parse_answer`,
    # `log_prob_body` and `parse_log_probs` of vllm/protocol.py and sglang/protocol.py.
    protocol: ClassVar[ModuleType]

    def __init__(
        self,
        model: PreTrainedModel,
        settings: ServerEngineConfig,
        *,
        eos_token_ids: Sequence[int],
        version: Version,
    ) -> None:
        """Send the weights of a model to the servers, and wait until all servers in reach hold them.

        Args:
            model: model whose weights the servers are sent first; the engine does not keep it.
            eos_token_ids: tokens that end every response, besides `Sampling.stop_token_ids`.
            version: version of the model's weights.

        Raises:
            EngineError: no server can be reached, or a server serves another model; the text says what to do.
        """
        super().__init__(version)
        self._settings, self._eos_token_ids = settings, tuple(eos_token_ids)
        self._dtype, self._vocab_size = DTYPES[settings.dtype], output_layer(model).out_features

        named = dict(model.named_parameters())
        name_by_id = {id(parameter): name for name, parameter in named.items()}
        # For every name of every parameter (a tied one has several), the name under which the parameter is sent.
        every_parameter = model.named_parameters(remove_duplicate=False)
        sent_names = {name: name_by_id[id(parameter)] for name, parameter in every_parameter}
        self._shapes = {name: parameter.shape for name, parameter in named.items()}
        weight_format = self._expect(model, frozenset(sent_names))  # stores what servers of this model must report

        self._id = f"jackpot-{secrets.token_hex(6)}"  # unique name of this engine
        aliases = {alias: name for alias, name in sent_names.items() if alias != name}
        self._files = WeightsFolder(settings.weights_folder, self._id, self._dtype, aliases, weight_format)
        self._weight_numbers = count()  # numbers in the names of the weights that are sent

        limits = PoolLimits(
            patience=settings.connect_timeout or math.inf,
            patience_setting="engine.connect_timeout",
            unreachable_advice="Are they running, and is engine.urls right?",
            attempts=settings.max_retries,
            attempts_setting="engine.max_retries",
            failing_advice="look at the servers' logs",
        )
        first_weights = self._save(list(named.items()))
        self._pool: Pool[Replica] = Pool(limits, first_weights, "the servers' thread", weight_format.events)
        self._pool.on_failure.append(self._fail)
        try:
            self._pool.call(self._start())
        except BaseException:
            self.close()
            raise

    # Methods that differ between vLLM and SGLang

    def _expect(self, model: PreTrainedModel, parameters: frozenset[str]) -> Format:
        """Store the facts that servers of this model must report; return the format in which the servers get weights.

        Args:
            parameters: names of the model's parameters, tied ones under each of their names.
        """
        self._parameters = parameters
        return Format()

    @abstractmethod
    def _replica(self, url: str, client: Any) -> Replica:
        """Return the `Replica` of the server at `url`, with the `client` that calls the server."""

    # Methods that the engines of vLLM and SGLang share

    def take_events(self) -> list[dict[str, Any]]:
        """Return and forget the events since the last call.

        Events are `server_lost`, `server_back` and `server_restarted`, each with the `server` (docs/vllm.md), and once
        `quantized`, where the settings quantize.
        """
        return self._pool.take_events()

    def _check(self, request: Request) -> None:
        check_request(request, self.capabilities)
        self.protocol.check_temperature(request.sampling.temperature, request.uid)

    def _begin(self, requests: Sequence[Request]) -> None:
        """Queue a call to a server for each request; `_complete` is given each rollout that comes back."""
        self._pool.begin(
            [
                (request.uid, self._generate_request(request), lambda rollout: self._complete([rollout]))
                for request in requests
            ]
        )

    def _generate_request(self, request: Request) -> PeerRequest:
        """Return the call to a server that generates the response to a request, with the function that parses it."""
        capabilities = self.capabilities
        body = self.protocol.generate_body(request, self._eos_token_ids, capabilities.max_model_len)
        return PeerRequest(
            message=body,
            parse=partial(
                self.protocol.parse_answer,
                request=request,
                body=body,
                vocab_size=capabilities.vocab_size,
                version=self._version,
            ),
        )

    def _score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        """Return log-probs as `Engine.score` says. At temperatures other than 1 each token takes one server request."""
        for rollout in rollouts:
            self.protocol.check_temperature(temperature, f"the score of {rollout.uid}")

        def answers(requests: Sequence[tuple[str, LogProbRequest]]) -> list[list[float]]:
            """Have the servers return the log-probs that each request asks for."""
            parse = self.protocol.parse_log_probs
            bodies = [self.protocol.log_prob_body(request) for _, request in requests]
            return self._pool.results(
                [
                    (uid, PeerRequest(message=body, parse=partial(parse, request=request, uid=uid)))
                    for body, (uid, request) in zip(bodies, requests, strict=True)
                ]
            )

        return score_by_requests(rollouts, temperature, answers)

    def _take_weights(self, weights: Sequence[tuple[str, Tensor]], version: Version) -> str:
        """Replace all weights as `Engine.update_weights` says; return the digest of the file that the servers read.

        The call returns once all servers in reach, at least one, hold the new weights. A server out of reach gets them
        before its next request.
        """
        check_weights(weights, self._shapes)
        saved = self._save(weights)
        self._pool.update(saved)
        # Keep also the files that a server still reads.
        loading = [replica.loading for replica in self._pool.peers if replica.loading is not None]
        self._files.remove_except([saved, *loading])
        return saved.digest

    def _save(self, weights: Sequence[tuple[str, Tensor]]) -> SavedWeights:
        """Write weights to a new folder; the folder and the weights get the same new name."""
        return self._files.save(weights, f"{self._id}-{next(self._weight_numbers)}")

    def _end(self) -> None:
        """Close the pool and, if it was opened, the HTTP session; then delete the files of weights."""
        try:
            self._pool.close(*([self._session.close] if hasattr(self, "_session") else []))
        finally:
            self._files.remove()

    async def _start(self) -> None:
        """Open the connections to all servers, wait for the servers, and find the engine's capabilities."""
        settings = self._settings
        self._session = open_session(settings.urls, self.client_class.api_key_var)
        timeout = settings.timeout or math.inf  # null in the settings: no limit
        clients = [(url, self.client_class(url, self._session, timeout=timeout)) for url in settings.urls]
        await self._pool.join(*(self._replica(url, client) for url, client in clients))

        self._capabilities = self._find_capabilities()
        self._pool.check = self._check_limits  # checks servers that are reached later

    def _find_capabilities(self) -> Capabilities:
        """Return the capabilities that all servers in reach have: the smallest of their limits."""
        infos = [replica.info for replica in self._pool.peers if replica.info is not None]
        return Capabilities(
            vocab_size=self._vocab_size,
            num_top_log_probs=min(info.num_top_log_probs for info in infos),
            max_model_len=min(info.max_model_len for info in infos),
            quantized=is_quantized(self._settings) or any(info.quantized for info in infos),
            dtype=self._dtype,
            # The engine counts as one on a GPU if at least one server is on a GPU.
            device="cpu" if all(info.device == "cpu" for info in infos) else "cuda",
        )

    def _check_limits(self, replica: Replica) -> None:
        """Raise EngineError if a server that was reached later has smaller limits than `capabilities`."""
        info = replica.info
        assert info is not None  # `sync` has read it
        for name in ("max_model_len", "num_top_log_probs"):
            limit, promised = getattr(info, name), getattr(self._capabilities, name)
            if limit < promised:
                raise EngineError(
                    f"{replica.name} has {name} {limit}, and the others {promised}; start it as the others are"
                )
        if info.quantized and not self._capabilities.quantized:
            raise EngineError(f"{replica.name} is quantized, and the others are not; start it as the others are")
