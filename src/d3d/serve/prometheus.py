"""Prometheus metrics: vLLM's names where the figure is the same, `d3d:` for our own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from d3d.results import StreamChunk
from d3d.serve.service import Job

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN_TOKENS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
WHOLE_S = (0.1, 0.3, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)


class ServeMetrics:
    """Counters of one server, in a registry of their own."""

    def __init__(
        self, model_name: str, running: Callable[[], float], waiting: Callable[[], float]
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the running batch.", running),
            ("vllm:num_requests_waiting", "Requests that wait for room.", waiting),
        ):
            gauge = Gauge(name, text, list(self._labels), registry=self.registry)
            gauge.labels(**self._labels).set_function(value)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._tokens = self._counter("vllm:generation_tokens", "Answer tokens.")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Rounds with a draft.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were kept."
        )
        self._per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Rounds in which the drafted token at this position was kept.",
            [*self._labels, "position"],
            registry=self.registry,
        )
        self._ended = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self._rounds = Counter(
            "d3d:rounds",
            "Rounds by method and by the origin of their draft.",
            [*self._labels, "method", "origin"],
            registry=self.registry,
        )
        self._first_s = self._histogram(
            "vllm:time_to_first_token_seconds", "Time to the first token.", FIRST_TOKEN_S
        )
        self._between_s = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Time between tokens; tokens of one round share its time.",
            BETWEEN_TOKENS_S,
        )
        self._per_token_s = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of a further token, by request.",
            BETWEEN_TOKENS_S,
        )
        self._whole_s = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time of whole requests.", WHOLE_S
        )
        self._last_at: dict[int, float] = {}
        """Time of each open request's last tokens."""

    def observe(self, job: Job, chunks: Sequence[StreamChunk]) -> None:
        """Count what a step gave a job, and its end."""
        now = time.perf_counter()
        for chunk in chunks:
            count = len(chunk.token_ids)
            self._tokens.inc(count)
            last = self._last_at.get(job.handle.id)
            if last is None:
                self._first_s.observe(now - job.added)
                self._prompt_tokens.inc(job.handle.request.prompt_length)
            else:
                for _ in range(count):
                    self._between_s.observe((now - last) / count)
            self._last_at[job.handle.id] = now
        if job.has_ended:
            self._last_at.pop(job.handle.id, None)
            self._end(job, now)

    def _end(self, job: Job, now: float) -> None:
        result = job.result
        reason = "abort" if result is None else result.finish_reason
        self._ended.labels(**self._labels, finished_reason=reason).inc()
        self._whole_s.observe(now - job.added)
        if result is None:
            return
        if result.timing.tpot_s is not None:
            self._per_token_s.observe(result.timing.tpot_s)
        method = "plain" if result.speculation is None else result.speculation.mode
        for round_ in result.rounds:
            origin = "none"
            if round_.draft_length:
                origin = "copied" if round_.looked_up else "drafter"
                self._drafts.inc()
                self._drafted.inc(round_.draft_length)
                self._accepted.inc(round_.num_accepted)
            if round_.preparation is not None:
                origin = round_.preparation.readiness
            self._rounds.labels(**self._labels, method=method, origin=origin).inc()
            for position in range(round_.num_accepted):
                self._per_position.labels(**self._labels, position=str(position)).inc()

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self.registry).labels(
            **self._labels
        )

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            name, text, list(self._labels), registry=self.registry, buckets=buckets
        ).labels(**self._labels)
