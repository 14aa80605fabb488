"""The command `d3d`: registers its subcommands and turns errors into exit codes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from d3d.cli.bench import bench
from d3d.cli.calibrate import calibrate
from d3d.cli.chat import chat
from d3d.cli.data import data
from d3d.cli.demo import demo
from d3d.cli.doctor import doctor
from d3d.cli.evaluate import evaluate
from d3d.cli.export import export
from d3d.cli.generate import generate
from d3d.cli.groups import CheckedCommand
from d3d.cli.plan import plan
from d3d.cli.profile import profile
from d3d.cli.prune import prune
from d3d.cli.pull import pull
from d3d.cli.serve import serve
from d3d.cli.show_preset import show
from d3d.cli.timeline import timeline
from d3d.cli.train import train
from d3d.cli.tune import tune
from d3d.errors import D3DError
from d3d.text.streams import prepare_standard_streams

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
CANT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)
EXIT_PIPE = 1
"""As typer does for its own output."""

app = typer.Typer(
    name="d3d",
    help="Speculative decoding with a block-diffusion drafter: the target's own tokens, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"d3d {version('d3d-decoding')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


# Modules of commands import torch and transformers inside their functions, so that --help is quick.
PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Answer": {"generate": generate, "chat": chat, "serve": serve, "demo": demo},
    "Drafters": {
        "data": data,
        "train": train,
        "evaluate": evaluate,
        "prune": prune,
        "export": export,
    },
    "Measure and tune": {
        "tune": tune,
        "calibrate": calibrate,
        "profile": profile,
        "plan": plan,
        "timeline": timeline,
    },
    "Models and machine": {"pull": pull, "show": show, "doctor": doctor},
}
for _panel, _commands in PANELS.items():
    for _name, _command in _commands.items():
        app.command(_name, cls=CheckedCommand, rich_help_panel=_panel)(_command)
app.add_typer(bench, name="bench", rich_help_panel="Measure and tune")


def main() -> None:
    """Entry point. Exit codes: 0 done; 2 for an error that the user can fix (one line on standard
    error); 130 after Ctrl-C; 1 if the reader of standard output has gone."""
    prepare_standard_streams()
    try:
        code = app(prog_name="d3d", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code)
    except D3DError as error:
        _refuse(str(error))
    except TyperException as error:
        _refuse(error.format_message())
    except (
        RuntimeError
    ) as error:  # torch's out-of-memory errors: a class of its own on CUDA, bare on a CPU
        if not any(words in str(error) for words in ("out of memory", "can't allocate memory")):
            raise
        _refuse(
            "out of memory: take --dtype bfloat16, fewer --max-tokens or another --device "
            "(d3d doctor --model shows what fits)"
        )
    except OSError as error:
        _explain(error)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(EXIT_INTERRUPTED)


def _explain(error: OSError) -> NoReturn:
    """End with one line if standard output or a full disk can't be written, or for a path that no
    check has looked at; raise other errors."""
    if error.errno not in (*CANT_WRITE, errno.EPIPE):
        if error.filename is None:
            raise error
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a file, where a directory is needed" if is_file else error.strerror
        _refuse(f"{error.filename}: {reason}")
    if error.filename is not None:
        _refuse(f"{error.filename} can't be written: {error.strerror}; free some space")
    with suppress(OSError, ValueError):  # the interpreter's own flush at the end is to succeed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:  # whoever reads it has read enough
        sys.exit(EXIT_PIPE)
    _refuse(
        f"standard output can't be written: {error.strerror}; files that the command writes are "
        "not affected; free some space, or send the output elsewhere"
    )


def _refuse(message: str) -> NoReturn:
    if message:  # empty if the help has been shown instead
        print(f"d3d: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
