"""Errors that a user can act on. Each message says what is wrong, where, and what to do."""


class D3DError(Exception):
    """Base of all errors that d3d raises on purpose; the command line prints it as one line and
    exits with 2."""


class InvalidRequest(D3DError):
    """A request that can't be served: an empty prompt, too long a prompt, an impossible
    parameter."""


class InvalidCheckpoint(D3DError):
    """A model directory, drafter or download that is damaged, incomplete, foreign or of an
    unsupported kind."""


class MissingExtra(D3DError):
    """An optional dependency is absent; the message carries the line that installs it."""


class Disconnected(Exception):  # no D3DError: whoever uses a line has to deal with its end
    """The other end of a line is gone."""


class WorkerFailed(D3DError):
    """A draft worker that could not be started."""
