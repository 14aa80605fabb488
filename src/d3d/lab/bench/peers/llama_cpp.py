"""llama.cpp through the wheel `xllamacpp`, on the GGUF file that the target was made of, in a
process of its own.

It computes in the file's own quantisation, we in the dequantised weights, so its answers may differ
from ours at near-ties. In this process its threads would be managed by the same OpenMP library as
torch's; more threads than cores in all, and that library lets all of them sleep between parallel
sections, even while only one side works (docs/log.md)."""

from __future__ import annotations

import multiprocessing
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
from d3d.lab.bench.answers import Answer, Question, Setting, Stopwatch
from d3d.lab.bench.peers.extras import needed

MAX_CONTEXT = 8192
QUIET = -1
PATIENCE_S = 5.0


def gguf_file(target: str, given: str | None) -> Path:
    """The file to run. Raises InvalidRequest where the target is none and no other was given."""
    if given is None and target in PRESETS:
        return fetch(PRESETS[target])
    path = Path(given or target).expanduser()
    if path.suffix.lower() != ".gguf":
        raise InvalidRequest(
            f"method llama_cpp: {target} is no GGUF file; give the same model as one with --gguf FILE"
        )
    if not path.is_file():
        raise InvalidRequest(f"method llama_cpp: there is no file {path}")
    return path


class LlamaCpp:
    """Greedy, one slot, as many threads as torch has, no reuse of earlier prompts."""

    def __init__(self, path: Path, target: TargetModel, *, ignore_eos: bool = False) -> None:
        """Raises MissingExtra without the wheel, InvalidRequest where llama.cpp can't open the
        file."""
        needed("xllamacpp", "llama.cpp")
        self._path = path
        self._ignore_eos = ignore_eos
        self._threads = torch.get_num_threads()
        processes = multiprocessing.get_context("spawn")
        self._line, other = processes.Pipe()
        arguments = (other, str(path), min(target.max_length, MAX_CONTEXT), self._threads)
        self._process = processes.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other.close()
        problem = self._receive()
        if problem is not None:
            self.close()
            raise InvalidRequest(f"method llama_cpp: {path} can't be opened ({problem})")

    def answer(self, question: Question, setting: Setting) -> Answer:
        """Raises InvalidRequest for what llama.cpp refuses, a prompt beyond its context for one."""
        watch = Stopwatch()
        chunks = _Chunks(watch)
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
        wall_s = watch.elapsed()
        if (problem := message or chunks.error) is not None:
            raise InvalidRequest(
                f"method llama_cpp: it refuses a prompt of {len(question.token_ids)} tokens ({problem})"
            )
        return Answer(
            text="".join(chunks.texts),
            token_ids=None,
            num_tokens=chunks.num_tokens,
            finish_reason=chunks.finish_reason,
            deliveries=watch.deliveries,
            wall_s=wall_s,
        )

    def describe(self) -> dict[str, Any]:
        return {
            "xllamacpp": version("xllamacpp"),
            "file": self._path.name,
            "sha256": file_sha256(self._path),
            "threads": self._threads,
            "device": "cpu",
            "process": "its own",
            "note": "the wheel is built for any x86-64 or arm64 processor; llama.cpp built for this one can be faster",
        }

    def close(self) -> None:
        self._line.close()  # which ends it
        self._process.join(timeout=PATIENCE_S)
        self._process.kill()

    def _receive(self) -> dict[str, Any] | str | None:
        """A chunk of the stream; or what went wrong, or None, where there will be no more."""
        try:
            message: dict[str, Any] | str | None = self._line.recv()
        except (EOFError, OSError) as error:
            raise InvalidRequest(
                "method llama_cpp: its process has ended before it answered; is there memory enough?"
            ) from error
        return message


def _serve(line: Connection, path: str, context: int, threads: int) -> None:
    """The process: opens the model, then answers requests until the line is closed."""
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
    """None where nobody asks any more."""
    try:
        request: dict[str, Any] = line.recv()
    except (EOFError, OSError):
        return None
    return request


class _Chunks:
    """What the stream brings; each chunk says how many tokens there are by now."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self.num_tokens = 0
        self.texts: list[str] = []
        self.finish_reason = "length"
        self.error: Any = None

    def take(self, chunk: dict[str, Any]) -> None:
        if "choices" not in chunk:
            self.error = chunk.get("error", chunk)
            return
        choice = chunk["choices"][0]
        total = int(chunk.get("timings", {}).get("predicted_n", self.num_tokens))
        self._watch.deliver(total - self.num_tokens)
        self.num_tokens = max(self.num_tokens, total)
        self.texts.append(choice["text"])
        self.finish_reason = choice["finish_reason"] or self.finish_reason
