"""Checkpoints: orbax writes the arrays, from many machines too; a file beside them says that they are whole."""

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from smallvit.common.files import read_json, write_json

KEEP = 2


class Checkpoints:
    """A folder of states: `<step>/` has the arrays, `<step>.json`, written last, the notes and the arrays' digests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax raises its errors and prints them, too
        self._orbax = ocp.StandardCheckpointer()

    def save(self, step: int, state: PyTree, notes: dict[str, Any]) -> None:
        arrays = self.folder / f"{step:09d}"
        if jax.process_index() == 0:
            self.folder.mkdir(exist_ok=True)
            self._remove(arrays)  # what a run that was killed in the middle of it left
            self._check_room(state)
        multihost_utils.sync_global_devices("checkpoint")
        self._orbax.save(arrays, state)
        self._orbax.wait_until_finished()
        if jax.process_index() == 0:
            write_json(_notes(arrays), {"notes": notes, "files": _digests(arrays)})
            for old in self._all()[:-KEEP]:
                self._remove(old)
        multihost_utils.sync_global_devices("checkpoint")

    def restore(self, target: PyTree, say: Callable[[str], None]) -> tuple[PyTree, dict[str, Any]] | None:
        """The newest whole state, laid out as `target`, with its notes; None if there is none."""
        for arrays in reversed(self._all()):
            try:
                stored = read_json(_notes(arrays))
                if stored["files"] != _digests(arrays):
                    raise ValueError("its files are not the ones that were written")
                return self._orbax.restore(arrays, target), stored["notes"]
            except Exception as error:  # whatever is wrong with it, the one before may be whole
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                say(f"checkpoint {arrays.name} is damaged ({reason}): going back to the one before")
        return None

    def _check_room(self, state: PyTree) -> None:
        """Before rather than when: orbax's threads complain at length about a disk that fills up under them."""
        if shutil.disk_usage(self.folder).free < 1.1 * sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + 1e6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _all(self) -> list[Path]:
        return sorted(path.with_suffix("") for path in self.folder.glob("*.json"))

    def _remove(self, arrays: Path) -> None:
        _notes(arrays).unlink(missing_ok=True)  # first: arrays without it do not count
        shutil.rmtree(arrays, ignore_errors=True)


def _notes(arrays: Path) -> Path:
    return arrays.with_suffix(".json")


def _digests(arrays: Path) -> dict[str, str]:
    return {
        str(path.relative_to(arrays)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(arrays.rglob("*"))
        if path.is_file()
    }
