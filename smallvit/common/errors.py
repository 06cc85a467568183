"""Errors that a command reports in one line."""


class Stopped(Exception):
    """Training ended early. The last good state is saved, and `smallvit train --resume` continues from it."""
