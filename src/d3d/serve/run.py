"""Run the server: start, answer, drain, stop."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from d3d.api import Model
from d3d.errors import InvalidRequest
from d3d.serve.app import Access, make_app
from d3d.serve.prometheus import ServeMetrics
from d3d.serve.service import Service

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

HEADER_LIMIT_BYTES = 64 * 1024
MOST_CONNECTIONS = 512
"""Further ones get status 503."""
IDLE_S = 30
"""Seconds after which an idle connection is closed."""


class DrainingServer(uvicorn.Server):
    """Server that tells the service of SIGTERM and Ctrl-C before it waits for streams to end."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain = drain

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, but do not raise them again in the end: the model is
        still to be closed."""
        former = {sig: signal.signal(sig, self.handle_exit) for sig in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for sig, handler in former.items():
                signal.signal(sig, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does, once the service knows. Not in the signal's handler: it may have
        interrupted the very lock that it would wait for."""
        self._drain()
        await super().shutdown(sockets)


def check_host(host: str, api_key: str | None, *, no_api_key: bool) -> None:
    """Raise InvalidRequest for a server that anyone in the network could use."""
    if host not in LOOPBACK and api_key is None and not no_api_key:
        raise InvalidRequest(
            f"--host {host} can be reached from other machines; give --api-key, or --no-api-key if "
            "anyone may use it"
        )
    if api_key is not None and (no_api_key or not api_key.strip()):
        raise InvalidRequest("--api-key: it is empty, or --no-api-key is given as well")


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind the server's address before the model is loaded. Raises InvalidRequest if it is taken
    or impossible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(
            f"--host {host} --port {port}: can't listen there: {error}; name another"
        ) from error
    return bound


def _names(bound: socket.socket, api_key: str | None) -> frozenset[str] | None:
    """Host names that requests may give; None for any, if there is a key or others may ask."""
    return LOOPBACK if api_key is None and bound.getsockname()[0] in LOOPBACK else None


def serve(
    model: Model,
    options: dict[str, Any],
    bound: socket.socket,
    *,
    name: str,
    api_key: str | None,
    max_batch: int,
    max_waiting: int,
    drain_s: float,
    on_ready: Callable[[], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C. options: speculation options of all requests. drain_s: time
    that answers under way have to end after that; those that do not end with an error event.
    Raises InvalidRequest, WorkerFailed."""
    service: Service
    metrics = ServeMetrics(name, lambda: service.num_running, lambda: service.num_waiting)
    service = Service(
        model, options, max_batch=max_batch, max_waiting=max_waiting, observe=metrics.observe
    )
    service.start()
    try:
        config = uvicorn.Config(
            make_app(service, name, metrics, Access(api_key, _names(bound, api_key))),
            log_level=logging.WARNING,
            access_log=False,
            timeout_keep_alive=IDLE_S,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=int(drain_s) + 5,
            h11_max_incomplete_event_size=HEADER_LIMIT_BYTES,
            http="h11",
            lifespan="off",
        )
        server = DrainingServer(config, lambda: service.drain(drain_s))
        on_ready()
        server.run(sockets=[bound])
    finally:
        service.stop()
