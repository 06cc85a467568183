"""The command line: finds the command, parses its arguments, runs it, and prints errors as one line."""

import errno
import io
import os
import sys

from smallvit import __version__
from smallvit.commands.catalogue import models
from smallvit.commands.evaluation import evaluate
from smallvit.commands.explanation import explain
from smallvit.commands.exporting import export, pull, push
from smallvit.commands.machine import doctor
from smallvit.commands.prediction import predict
from smallvit.commands.serving import serve
from smallvit.commands.training import compare, train
from smallvit.common.arguments import parse
from smallvit.common.errors import Stopped
from smallvit.common.text import shown
from smallvit.common.words import did_you_mean

COMMANDS = {
    f.__name__: f for f in (train, evaluate, predict, explain, export, serve, push, pull, compare, models, doctor)
}


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # pipes on Windows cannot encode all characters
            stream.reconfigure(errors="backslashreplace")
    command, *args = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(_overview())
    elif command == "--version":
        print(f"smallvit {__version__}")
    elif command in COMMANDS:
        _run(command, args)
    else:
        what = "option" if command.startswith("-") else "command"
        hint = did_you_mean(command, [*COMMANDS, "--help", "--version"])
        _end(f"unknown {what} {command!r}{hint or ':'} `smallvit --help` lists all commands", 2)


def _overview() -> str:
    lines = [f"  {name:10} {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join(
        (
            "usage: smallvit [-h] [--version] COMMAND ...",
            "",
            "Vision transformers that learn from small image data sets.",
            "",
            *lines,
            "",
            "`smallvit COMMAND --help` shows the options of a command.",
        )
    )


def _run(command: str, args: list[str]) -> None:
    try:
        parse(COMMANDS[command], f"smallvit {command}", args)()
    except ValueError as error:
        _end(str(error), 2)
    except Stopped as error:
        _end(str(error), error.code)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
            raise
        _end(f"{error.filename or 'a file'} cannot be written: {error.strerror}", 1)


def _end(line: str, code: int) -> None:
    print(f"smallvit: {shown(line)}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
