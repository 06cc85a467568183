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
    for finding in findings:
        table.add_row(Text(finding.what, "red" if finding.wrong else "bold"), plain(finding.found))
    open_console().print(table)
    if any(finding.wrong for finding in findings):
        sys.exit(1)
