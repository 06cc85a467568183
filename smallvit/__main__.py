"""Where the `smallvit` command begins: with the memory settings, before anything heavy is imported."""

from smallvit.common.env import restart_fast


def main() -> None:
    restart_fast()
    from smallvit.cli import main

    main()


if __name__ == "__main__":
    main()
