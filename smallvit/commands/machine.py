"""`smallvit doctor`."""

import sys

from rich.table import Table
from rich.text import Text

from smallvit.commands.terminal import open_console, plain


def doctor() -> None:
    """Report what this machine and installation have, and test the native kernels."""
    from smallvit.doctor import examine

    findings = examine()
    table = Table(box=None, show_header=False, pad_edge=False)
    for each in findings:
        table.add_row(Text(each.what, "red" if each.wrong else "bold"), plain(each.found))
    open_console().print(table)
    if any(each.wrong for each in findings):
        sys.exit(1)
