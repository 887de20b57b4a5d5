"""`ridgeline`: register the commands, and print errors."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from inspect import cleandoc
from typing import Annotated, TextIO

import typer

from ridgeline import __version__
from ridgeline.cli import (
    bench,
    bench_serve,
    calibrate,
    chat,
    cheaper,
    convert,
    distill,
    doctor,
    embed,
    evaluate,
    explain,
    generate,
    inspect,
    lab,
    man,
    merge,
    plan,
    prune,
    quantize,
    replay,
    run_batch,
    serve,
    simulate,
    train,
    verify,
)
from ridgeline.cli.flags.described import with_spec
from ridgeline.cli.flags.serve_flags import ServeCommand
from ridgeline.cli.signals import Interrupted, stop_signals
from ridgeline.errors import RidgelineError

EPILOG = "Many flags of vLLM work too, and --config FILE may hold any of the flags: docs/serve.md lists them."
# The errors of the operating system for a full disk, a quota and a file that is too large.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
INTERRUPTED = 130  # typer's exit status for a KeyboardInterrupt

app = typer.Typer(
    name="ridgeline",
    help="LLM inference that predicts its cost, runs at the roofline, and proves its outputs.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("generate")(with_spec(generate.generate))
app.command("chat")(with_spec(chat.chat))
app.command("serve", cls=ServeCommand, epilog=EPILOG)(with_spec(serve.serve))
app.command("embed")(with_spec(embed.embed))
app.command("rerank")(with_spec(embed.rerank))
app.command("run-batch")(with_spec(run_batch.run_batch))
app.command("inspect")(with_spec(inspect.inspect))
app.command("plan")(with_spec(plan.plan))
app.command("calibrate")(calibrate.calibrate)
app.command("explain")(with_spec(explain.explain))
app.command("simulate")(with_spec(simulate.simulate))
app.command("doctor")(doctor.doctor)
app.command("verify")(with_spec(verify.verify))
app.command("evaluate")(with_spec(evaluate.evaluate))
app.command("train")(train.train)
app.command("distill")(distill.distill)
app.command("quantize")(with_spec(quantize.quantize))
app.command("prune")(with_spec(prune.prune))
app.command("convert")(with_spec(convert.convert))
app.command("merge")(with_spec(merge.merge))
app.command("cheaper")(with_spec(cheaper.cheaper))
app.command("lab")(lab.lab)
app.command("man")(man.man)
bench.app.command("serve")(bench_serve.bench_serve)
bench.app.command("replay")(with_spec(replay.replay))
for command in (*app.registered_commands, *bench.app.registered_commands):
    # Typer keeps a docstring's line breaks, which a terminal of another width would show in the middle of a sentence.
    paragraphs = cleandoc(getattr(command.callback, "__doc__", None) or "").split("\n\n")
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ridgeline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command, and exit with its status.

    An error that a user can cause, such as a full disk, prints one line on stderr and exits with status 2. A signal
    prints one line and exits with 128 plus its number. A closed pipe (`| head`) is no error: the command exits with
    status 0.
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
    """Discard output that cannot be written to stdout or stderr.

    Python flushes both again at exit and would print its own error. Nothing is printed on stdout after this.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    _close(sys.stdout)
    try:
        sys.stderr.flush()
    except OSError:
        _close(sys.stderr)


def _close(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that its buffered output is discarded. A stream in memory has no
    descriptor and is left alone.
    """
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), stream.fileno())


def _run(received: list[int]) -> int:
    """Run the command and return its exit status. Raises BrokenPipeError, and OSError if output cannot be written."""
    reason = ""
    try:
        app()
    except RidgelineError as e:
        return _fail(str(e), 2)
    except Interrupted as e:
        reason = f": {e}"
    except SystemExit as e:  # typer always raises SystemExit at its end
        if isinstance(e.__context__, BrokenPipeError):
            raise e.__context__ from None
        if e.code != INTERRUPTED:
            return int(e.code or 0)
    except KeyboardInterrupt:
        pass
    except Exception:
        if not received:  # an interrupted import, for example, may fail with any error
            raise
    return _fail(f"interrupted{reason}", 128 + received[0] if received else INTERRUPTED)


def _fail(message: str, status: int) -> int:
    with contextlib.suppress(OSError):  # stderr itself may be closed or full
        print("ridgeline: " + " ".join(message.split()), file=sys.stderr)
    return status
