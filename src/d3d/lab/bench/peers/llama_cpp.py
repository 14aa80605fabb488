"""llama.cpp through the wheel `xllamacpp`, on the target's GGUF file, in a process of its own.

It computes in the file's quantisation, we in dequantised weights, so its answers may differ from
ours at near-ties. A process of its own, since its threads and torch's would share one OpenMP
library, which puts all of them to sleep between parallel sections once there are more threads than
cores (docs/log.md)."""

from __future__ import annotations

from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from d3d.errors import InvalidRequest
from d3d.hub.cache import file_sha256
from d3d.hub.download import fetch
from d3d.hub.open_model import TargetModel
from d3d.hub.presets import PRESETS
from d3d.inputs import input_path
from d3d.lab.bench.answers import DeliveryTimer, Question, Setting, TimedAnswer
from d3d.lab.bench.peers import needed
from d3d.processes import ChildProcess

MAX_CONTEXT = 8192
QUIET = -1
PATIENCE_S = 5.0


def gguf_file(target: str, given: str | None) -> Path:
    """The file to run: `given`, or the target's own. Raises InvalidRequest if there is none."""
    if given is None and target in PRESETS:
        return fetch(PRESETS[target])
    path = input_path(given or target)
    if path.suffix.lower() != ".gguf":
        raise InvalidRequest(
            f"method llama_cpp: {target} is no GGUF file; "
            "give the same model as one with --gguf FILE"
        )
    if not path.is_file():
        raise InvalidRequest(f"method llama_cpp: there is no file {path}")
    return path


class LlamaCpp:
    """Greedy, one slot, torch's number of threads, no prompt cache."""

    def __init__(self, path: Path, target: TargetModel, *, ignore_eos: bool = False) -> None:
        """Raises MissingExtra without the wheel, InvalidRequest if the file can't be opened."""
        needed("xllamacpp", "llama.cpp")
        self._path = path
        self._ignore_eos = ignore_eos
        self._threads = torch.get_num_threads()
        context = min(target.max_length, MAX_CONTEXT)
        self._process = ChildProcess(_serve, str(path), context, self._threads)
        self._line = self._process.connection
        problem = self._receive()
        if problem is not None:
            self.close()
            raise InvalidRequest(f"method llama_cpp: {path} can't be opened ({problem})")

    def answer(self, question: Question, setting: Setting) -> TimedAnswer:
        """The answer's `error` tells why it breaks off. Raises InvalidRequest if llama.cpp refuses
        the prompt, for example as too long."""
        timer = DeliveryTimer()
        chunks = _Chunks(timer)
        request = {
            "prompt": question.token_ids,
            "max_tokens": setting.max_tokens,
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": self._ignore_eos,
            "cache_prompt": False,
            "stream": True,
            "timings_per_token": True,
        }
        self._line.send(request)
        while isinstance(message := self._receive(), dict):
            chunks.take(message)
        wall_s = timer.elapsed()
        problem = message or chunks.error
        if problem is None and chunks.finish_reason is None:
            problem = "its stream ended without a finish_reason"
        if problem is not None and not chunks.num_tokens:
            count = len(question.token_ids)
            raise InvalidRequest(
                f"method llama_cpp: it refuses a prompt of {count} tokens ({problem})"
            )
        return TimedAnswer(
            text="".join(chunks.texts),
            token_ids=None,
            num_tokens=chunks.num_tokens,
            finish_reason=chunks.finish_reason or "error",
            deliveries=timer.deliveries,
            wall_s=wall_s,
            error=None if problem is None else f"llama.cpp broke off: {problem}",
        )

    def describe(self) -> dict[str, Any]:
        return {
            "xllamacpp": version("xllamacpp"),
            "file": self._path.name,
            "sha256": file_sha256(self._path),
            "threads": self._threads,
            "device": "cpu",
            "process": "its own",
            "note": "the wheel is built for any x86-64 or arm64 processor; "
            "llama.cpp built for this one can be faster",
        }

    def close(self) -> None:
        self._line.close()  # which ends it
        self._process.wait(PATIENCE_S)
        self._process.kill()

    def _receive(self) -> dict[str, Any] | str | None:
        """A chunk of the stream; at its end None, or the error."""
        try:
            message: dict[str, Any] | str | None = self._line.recv()
        except (EOFError, OSError) as error:
            raise InvalidRequest(
                "method llama_cpp: its process ended before it answered; is there enough memory?"
            ) from error
        return message


def _serve(line: Connection, path: str, context: int, threads: int) -> None:
    """Body of the process: open the model, then answer requests until the line is closed."""
    library = needed("xllamacpp", "llama.cpp")
    parameters = library.CommonParams()
    parameters.model.path = path
    parameters.n_ctx = context
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = threads
    parameters.cpuparams_batch.n_threads = threads
    parameters.cache_ram_mib = 0
    parameters.verbosity = QUIET
    try:
        server = library.Server(parameters)
    except RuntimeError as error:
        line.send(str(error))
        return
    line.send(None)
    while (request := _next(line)) is not None:
        problem = None
        try:
            server.handle_completions(request, line.send)
        except RuntimeError as error:
            problem = str(error)
        line.send(problem)


def _next(line: Connection) -> dict[str, Any] | None:
    """The next request; None if the line is closed."""
    try:
        request: dict[str, Any] = line.recv()
    except (EOFError, OSError):
        return None
    return request


class _Chunks:
    """Collects the stream's chunks; each reports the number of tokens so far."""

    def __init__(self, timer: DeliveryTimer) -> None:
        self._timer = timer
        self.num_tokens = 0
        self.texts: list[str] = []
        self.finish_reason: str | None = None
        self.error: Any = None

    def take(self, chunk: dict[str, Any]) -> None:
        if "choices" not in chunk:
            self.error = chunk.get("error", chunk)
            return
        choice = chunk["choices"][0]
        total = int(chunk.get("timings", {}).get("predicted_n", self.num_tokens))
        self._timer.deliver(total - self.num_tokens)
        self.num_tokens = max(self.num_tokens, total)
        self.texts.append(choice["text"])
        self.finish_reason = choice["finish_reason"] or self.finish_reason
