"""Real vLLM and SGLang servers on this machine, started, killed and started again."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar

import torch
from transformers import AutoModelForCausalLM

from helpers.paths import ROOT

Server = TypeVar("Server", bound="ServerProcess")
START_SECONDS = 300.0  # that a server may take until it is ready
SGLANG_PYTHON, VLLM_PYTHON = (ROOT / f".venv-{name}" / "bin" / "python" for name in ("sglang", "vllm"))
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
_FLAGS = {
    "host": "127.0.0.1",
    "dtype": "float32",
    "logprobs-mode": "processed_logprobs",
    "max-logprobs": "-1",
    "generation-config": "vllm",
    "max-num-seqs": "32",
    "block-size": "32",  # tokens, so that prompts of the tests are long enough for the prefix cache
    "kv-cache-memory-bytes": str(64 * 2**20),
}

_SGLANG_FLAGS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "dtype": "float32",
    "random-seed": "1",
    "max-total-tokens": "8192",
    "max-running-requests": "32",
}


def save_untied(folder: Path, target: Path) -> Path:
    """Save a copy of a model with an untied output layer, as vLLM needs it on a CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    model.save_pretrained(target)
    return target


class ServerProcess:
    """Starts and kills one server process with its children."""

    def __init__(self, port: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Keep the command; nothing runs yet.

        Args:
            environment: added to that of this process.
        """
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self._command, self._environment = command, {**os.environ, **environment}
        self._process: subprocess.Popen | None = None
        self._log = tempfile.TemporaryFile("a+", errors="replace")  # noqa: SIM115  closed with this object

    def start(self) -> Self:
        """Start the process without waiting; `wait_until_ready` waits."""
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        return self

    def wait_until_ready(self) -> Self:
        """Wait until the server answers; what it printed is the error where it does not."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(self._command)} did not start:\n{self.log()[-4000:]}")
            time.sleep(0.2)
        return self

    def _is_healthy(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=5.0).status == 200
        except (urllib.error.URLError, OSError):
            return False

    def log(self) -> str:
        """Return what the server has printed."""
        self._log.seek(0)
        return self._log.read()

    def kill(self) -> None:
        """Kill every process of the server at once, as a power cut would."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class VLLMServer(ServerProcess):
    """Runs vLLM's server, with the Python of this process unless another is given."""

    def __init__(
        self,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        python: Path | str = sys.executable,
        **flags: str,
    ) -> None:
        """Take the model of a folder.

        Args:
            flags: of vLLM, with underscores.
        """
        port = _free_port()
        all_flags = _FLAGS | {"model": str(folder), "port": str(port)}
        all_flags |= {name.replace("_", "-"): value for name, value in flags.items()}
        switches = ["--enforce-eager", "--skip-tokenizer-init", "--no-enable-chunked-prefill"]
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *switches, *_words_of(all_flags)]
        super().__init__(port, command, _ENVIRONMENT | dict(environment or {}))


class SGLangServer(ServerProcess):
    """Runs SGLang's server on the CPU, with the Python of `.venv-sglang`."""

    def __init__(self, folder: Path) -> None:
        port = _free_port()
        flags = _SGLANG_FLAGS | {"model-path": str(folder), "port": str(port)}
        command = [str(SGLANG_PYTHON), "-m", "sglang.launch_server", "--skip-tokenizer-init", *_words_of(flags)]
        super().__init__(port, command, {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _words_of(flags: Mapping[str, str]) -> list[str]:
    """Return flags as the words of a command line."""
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


@contextmanager
def started(*servers: Server) -> Iterator[tuple[Server, ...]]:
    """Start servers and wait until all are ready; kill them afterwards."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.kill()
