"""Entry point of the `smallvit` command: applies the memory settings before anything heavy is imported."""

import sys

from smallvit.common.env import restart_fast
from smallvit.common.output import open_closed_streams


def main() -> None:
    open_closed_streams()
    if sys.argv[1:2] != ["serve"]:  # the server must return the memory of large images to the system
        restart_fast()
    from smallvit.cli import main

    main()


if __name__ == "__main__":
    main()
