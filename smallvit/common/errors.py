"""Errors that a command reports in one line."""

RESUME = 75  # exit code of a run that was stopped and can be resumed; EX_TEMPFAIL of sysexits.h


class Stopped(Exception):
    """Training ended early. The last good state is saved, and `smallvit train --resume` continues from it."""

    code = 1  # exit code of the command


class Preempted(Stopped):
    """Training was asked to stop; this is not a failure."""

    code = RESUME
