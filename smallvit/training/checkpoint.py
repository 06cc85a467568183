"""Checkpoints: orbax writes the arrays, from many machines too; a file beside them says that they are whole."""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from smallvit.common.files import read_json, sync_folder, write_json
from smallvit.training.cluster import agree

KEEP = 2
ASIDE = "set-aside-"  # before the step of a state that is no longer used, and is not deleted either


class Checkpoints:
    """A folder of states: `<step>/` has the arrays, `<step>.json`, written last, the notes and the arrays' digests."""

    def __init__(self, folder: Path) -> None:
        import orbax.checkpoint as ocp  # slow to import, and nothing needs it before

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
            digests = _digests(arrays, sync=True)  # the notes must not reach the disk before the arrays do
            write_json(_notes(arrays), {"notes": notes, "structure": _structure(state), "files": digests})
            for old in self._all()[:-KEEP]:
                self._remove(old)
        multihost_utils.sync_global_devices("checkpoint")

    def restore(
        self, target: PyTree, say: Callable[[str], None], *, from_scratch: bool = False
    ) -> tuple[PyTree, dict[str, Any]] | None:
        """The newest whole state, laid out as `target`, with its notes; None if the run has none yet.

        Damaged states are set aside under another name, and whatever is newer than the restored state goes. A
        ValueError if there are states and none can be used; `from_scratch` sets all aside. The first process decides.
        """
        decided = json.loads(agree(lambda: json.dumps(self._decide(target, say, from_scratch))))
        if "error" in decided:
            raise ValueError(decided["error"])
        if decided["name"] is None:
            return None
        arrays = self.folder / decided["name"]
        return self._orbax.restore(arrays, target), read_json(_notes(arrays))["notes"]

    def _decide(self, target: PyTree, say: Callable[[str], None], from_scratch: bool) -> dict[str, str | None]:
        """The name of the state to restore, or what is wrong with all of them."""
        states = list(reversed(self._all()))
        if from_scratch:
            for arrays in states:
                self._set_aside(arrays)
            self._clear(above="")
            return {"name": None}
        damaged: dict[Path, str] = {}
        for arrays in states:
            try:
                stored = read_json(_notes(arrays))
                if stored["files"] != _digests(arrays):
                    raise ValueError("its files are not the ones that were written")
            except Exception as error:  # whatever is wrong with it, the one before may be whole
                damaged[arrays] = str(error).splitlines()[0] if str(error) else type(error).__name__
                continue
            if differs := _difference(stored.get("structure"), _structure(target)):
                advice = "resume with the version that wrote it, or begin anew with --from-scratch"
                return {"error": f"checkpoint {arrays.name} is of another model or optimiser ({differs}): {advice}"}
            for broken, reason in damaged.items():
                say(f"checkpoint {broken.name} is damaged ({reason}): set aside, going back to {arrays.name}")
                self._set_aside(broken)
            self._clear(above=arrays.name)
            return {"name": arrays.name}
        if damaged:
            newest, reason = next(iter(damaged.items()))
            which = f"no checkpoint in {self.folder} can be loaded ({newest.name}: {reason})"
            return {"error": f"{which}: put a copy back, or begin this run anew with --from-scratch"}
        self._clear(above="")
        return {"name": None}

    def _check_room(self, state: PyTree) -> None:
        """Before rather than when: orbax's threads complain at length about a disk that fills up under them."""
        if shutil.disk_usage(self.folder).free < 1.1 * sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + 1e6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _all(self) -> list[Path]:
        return sorted(path.with_suffix("") for path in self.folder.glob("[0-9]*.json"))

    def _remove(self, arrays: Path) -> None:
        _notes(arrays).unlink(missing_ok=True)  # first: arrays without it do not count
        shutil.rmtree(arrays, ignore_errors=True)

    def _set_aside(self, arrays: Path) -> None:
        aside = self.folder / f"{ASIDE}{arrays.name}"
        self._remove(aside)
        _notes(arrays).rename(_notes(aside))
        if arrays.exists():
            arrays.rename(aside)
        sync_folder(self.folder)

    def _clear(self, above: str) -> None:
        """Removes what is newer than the state of this name, and what saves that were killed have left."""
        whole = {path.name for arrays in self._all() if arrays.name <= above for path in (arrays, _notes(arrays))}
        for path in self.folder.glob("*") if self.folder.exists() else ():
            if path.name in whole or path.name.startswith(ASIDE):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _notes(arrays: Path) -> Path:
    return arrays.with_suffix(".json")


def _structure(state: PyTree) -> dict[str, str]:
    """The shape and type of each array by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _difference(stored: dict[str, str] | None, wanted: dict[str, str]) -> str | None:
    for path in sorted({*(stored or wanted), *wanted}):
        was, now = (each.get(path, "missing") for each in (stored or wanted, wanted))
        if was != now:
            return f"{path} is {was} there and {now} here"
    return None


def _digests(arrays: Path, *, sync: bool = False) -> dict[str, str]:
    found = {}
    for path in sorted(arrays.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                found[str(path.relative_to(arrays))] = hashlib.file_digest(file, "sha256").hexdigest()
            if sync:
                with path.open("r+b") as file:  # Windows syncs only what may be written
                    os.fsync(file.fileno())
        elif sync:
            sync_folder(path)
    if sync:
        sync_folder(arrays)
        sync_folder(arrays.parent)
    return found
