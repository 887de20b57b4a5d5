"""`ridgeline`: the commands, and how an error looks."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Annotated, TextIO

import typer

from ridgeline import __version__
from ridgeline.cli import (
    bench,
    bench_serve,
    calibrate,
    chat,
    doctor,
    evaluate,
    explain,
    generate,
    inspect,
    plan,
    replay,
    run_batch,
    serve,
    simulate,
    train,
    verify,
)
from ridgeline.cli.flags.serve_flags import ServeCommand
from ridgeline.cli.signals import Interrupted, stop_signals
from ridgeline.errors import RidgelineError

EPILOG = "Other flags of vLLM's are understood too, and --config FILE with any of them: docs/serve.md lists them."
# What a system says of an output that has no room for more.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
INTERRUPTED = 130  # what typer makes of a KeyboardInterrupt

app = typer.Typer(
    name="ridgeline",
    help="LLM inference that predicts its cost, runs at the roofline, and proves its outputs.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve", cls=ServeCommand, epilog=EPILOG)(serve.serve)
app.command("run-batch")(run_batch.run_batch)
app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("calibrate")(calibrate.calibrate)
app.command("explain")(explain.explain)
app.command("simulate")(simulate.simulate)
app.command("doctor")(doctor.doctor)
app.command("verify")(verify.verify)
app.command("evaluate")(evaluate.evaluate)
app.command("train")(train.train)
bench.app.command("serve")(bench_serve.bench_serve)
bench.app.command("replay")(replay.replay)
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ridgeline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command.

    An error that a user can cause is one line on stderr and exit status 2, a disk that is full among them; a signal
    that ends it one line and 128 plus its number. A reader that went away (`| head`) has what it wanted: status 0, and
    nothing is said.
    """
    with stop_signals() as received:
        try:
            status = _run(received)
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:
            _drop_output()
            status = 0
        except OSError as e:
            if e.errno not in DISK_ERRORS:
                raise
            _drop_output()
            where = f" to {e.filename}" if e.filename else ""
            status = _fail(f"the output cannot be written{where}: {e.strerror}", 2)
    sys.exit(status)


def _drop_output() -> None:
    """Let go of what cannot be written to stdout or stderr: Python flushes both once more at its exit, and would print
    an error of its own. Nothing is printed on stdout after this.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    _close(sys.stdout)
    try:
        sys.stderr.flush()
    except OSError:
        _close(sys.stderr)


def _close(stream: TextIO) -> None:
    """Send what is still in the buffer of a stream nowhere. A stream in memory has none."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), stream.fileno())


def _run(received: list[int]) -> int:
    """The exit status of the command. Raises BrokenPipeError, and OSError for what else cannot be written."""
    reason = ""
    try:
        app()
    except RidgelineError as e:
        return _fail(str(e), 2)
    except Interrupted as e:
        reason = f": {e}"
    except SystemExit as e:  # typer always ends with one
        if isinstance(e.__context__, BrokenPipeError):
            raise e.__context__ from None
        if e.code != INTERRUPTED:
            return int(e.code or 0)
    except KeyboardInterrupt:
        pass
    except Exception:
        if not received:  # what was interrupted may say so in its own way: an import that failed, for one
            raise
    return _fail(f"interrupted{reason}", 128 + received[0] if received else INTERRUPTED)


def _fail(message: str, status: int) -> int:
    with contextlib.suppress(OSError):  # stderr may be what cannot be written
        print("ridgeline: " + " ".join(message.split()), file=sys.stderr)
    return status
