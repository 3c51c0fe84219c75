"""The command ``specdec-triton``.

Each command is a module with ``NAME``, ``HELP``, ``DESCRIPTION``, ``add_arguments(parser)`` and ``run(args)``, which
returns the exit status: 0 done, 1 unexpected failure, 2 a user's mistake, 130 interrupted, 141 the reader of our output
has gone. Errors are one line on stderr; ``SPECDEC_DEBUG=1`` shows the traceback too.

torch and transformers are imported inside ``run``, so that help and mistakes in the arguments cost no seconds.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from specdec_triton import __version__
from specdec_triton.cli import audit, doctor, generate, train, tune, tune_skip, verify
from specdec_triton.cli.common import PROGRAM, HelpFormatter, Parser, UsageError, note, one_line, warn
from specdec_triton.cli.loading import default_draft
from specdec_triton.errors import BackendUnavailableError, ModelNotFoundError, UnsupportedModelError

__all__ = ["main"]

COMMANDS = (generate, doctor, audit, tune, tune_skip, train, verify)
_EPILOG = """examples:
  specdec-triton generate "Why is the sky blue?"
  specdec-triton generate --file report.txt --compare
  specdec-triton tune --draft MODEL
  specdec-triton verify --target MODEL --draft MODEL --prompts prompts.txt
  specdec-triton doctor
  specdec-triton audit --arch sm_90

specdec-triton COMMAND -h explains a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (None: the process's own) and return the exit status."""
    try:
        return _run(argv)
    except (UsageError, ModelNotFoundError, UnsupportedModelError, BackendUnavailableError) as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        note(f"{PROGRAM}: interrupted")
        return 130
    except BrokenPipeError:
        _drop_stdout()
        return 141
    except Exception as error:
        return _fail(f"{type(error).__name__}: {error}", 1)


def _run(argv: Sequence[str] | None) -> int:
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *args, **kwargs: warn(str(message))
        try:
            args = _parser().parse_args(argv)
            if args.command is None:
                raise UsageError(f"a command is missing, such as generate; {PROGRAM} -h lists them")
            if getattr(args, "draft", "") is None:
                args.draft = default_draft(args.target)
            status: int = args.run(args)
        except SystemExit as end:  # argparse, after -h and --version
            status = int(end.code or 0)
        if sys.stdout is not None:
            sys.stdout.flush()  # a broken pipe shall show here, not while the interpreter shuts down
        return status


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description="Speculative decoding for Hugging Face models: the same text, faster.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in COMMANDS:
        command = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.DESCRIPTION,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _fail(message: str, status: int) -> int:
    if os.environ.get("SPECDEC_DEBUG") == "1":
        traceback.print_exc()
    note(f"{PROGRAM}: error: {one_line(message)}")
    return status


def _drop_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's own flush finds no broken pipe."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file
        pass
