"""llama.cpp in this process, through the wheel `xllamacpp`, on the GGUF file that the target was made of.

It computes in the file's own quantisation, we in the dequantised weights, so its answers may differ from ours at near-ties.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from d3d.benchmarks.answers import Answer, Question, Setting, Stopwatch
from d3d.benchmarks.peers.extras import needed
from d3d.core.errors import InvalidRequest
from d3d.models.cache import file_sha256
from d3d.models.download import fetch
from d3d.models.open_model import TargetModel
from d3d.models.presets import PRESETS

MAX_CONTEXT = 8192
QUIET = -1


def gguf_file(target: str, given: str | None) -> Path:
    """The file to run. Raises InvalidRequest where the target is none and no other was given."""
    if given is None and target in PRESETS:
        return fetch(PRESETS[target])
    path = Path(given or target).expanduser()
    if path.suffix.lower() != ".gguf":
        raise InvalidRequest(f"method llama_cpp: {target} is no GGUF file; give the same model as one with --gguf FILE")
    if not path.is_file():
        raise InvalidRequest(f"method llama_cpp: there is no file {path}")
    return path


class LlamaCpp:
    """Greedy, one slot, as many threads as torch has, no reuse of earlier prompts."""

    def __init__(self, path: Path, target: TargetModel, *, ignore_eos: bool = False) -> None:
        """Raises MissingExtra without the wheel, InvalidRequest where llama.cpp can't open the file."""
        library = needed("xllamacpp", "llama.cpp")
        self._path = path
        self._ignore_eos = ignore_eos
        self._threads = torch.get_num_threads()
        parameters = library.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = min(target.max_length, MAX_CONTEXT)
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = self._threads
        parameters.cpuparams_batch.n_threads = self._threads
        parameters.cache_ram_mib = 0
        parameters.verbosity = QUIET
        try:
            self._server = library.Server(parameters)
        except RuntimeError as error:
            raise InvalidRequest(f"method llama_cpp: {path} can't be opened ({error})") from error

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
        try:
            self._server.handle_completions(request, chunks.take)
        except RuntimeError as error:
            raise InvalidRequest(f"method llama_cpp: it refuses a prompt of {len(question.token_ids)} tokens ({error})") from error
        wall_s = watch.elapsed()
        if chunks.error is not None:
            raise InvalidRequest(f"method llama_cpp: it refuses a prompt of {len(question.token_ids)} tokens ({chunks.error})")
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
            "note": "the wheel is built for any x86-64 or arm64 processor; llama.cpp built for this one can be faster",
        }

    def close(self) -> None:
        del self._server


class _Chunks:
    """What the stream brings; each chunk says how many tokens there are by now."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self.num_tokens = 0
        self.texts: list[str] = []
        self.finish_reason = "length"
        self.error: Any = None

    def take(self, chunk: dict[str, Any]) -> bool:
        """True would end the stream."""
        if "choices" not in chunk:
            self.error = chunk.get("error", chunk)
            return True
        choice = chunk["choices"][0]
        total = int(chunk.get("timings", {}).get("predicted_n", self.num_tokens))
        self._watch.deliver(total - self.num_tokens)
        self.num_tokens = max(self.num_tokens, total)
        self.texts.append(choice["text"])
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        return False
