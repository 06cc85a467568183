"""Checkpoints: orbax writes the arrays, from many machines too; a JSON file confirms that they are complete."""

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

from smallvit.common.files import make_folder, read_json, sync_folder, write_json
from smallvit.training.cluster import broadcast_choice

KEEP = 2
ASIDE = "set-aside-"  # prefix of a state that is no longer used, but not deleted


class Checkpoints:
    """A folder of states: `<step>/` has the arrays; `<step>.json`, written last, has notes and the files' digests."""

    def __init__(self, folder: Path) -> None:
        import orbax.checkpoint as ocp  # slow to import

        self.folder = folder.absolute()
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax also prints the errors that it raises
        self._orbax = ocp.StandardCheckpointer()

    def save(self, step: int, state: PyTree, notes: dict[str, Any]) -> None:
        arrays = self.folder / f"{step:09d}"
        if jax.process_index() == 0:
            make_folder(self.folder)
            self._remove(arrays)  # left by a run that was killed while saving
            self._check_room(state)
        multihost_utils.sync_global_devices("checkpoint")
        self._orbax.save(arrays, state)
        self._orbax.wait_until_finished()
        if jax.process_index() == 0:
            digests = _digests(arrays, sync=True)  # the notes must not reach the disk before the arrays
            write_json(_notes(arrays), {"notes": notes, "structure": _structure(state), "files": digests})
            for old in self._all()[:-KEEP]:
                self._remove(old)
        multihost_utils.sync_global_devices("checkpoint")

    def restore(
        self, target: PyTree, log: Callable[[str], None], *, from_scratch: bool = False
    ) -> tuple[PyTree, dict[str, Any]] | None:
        """Restores the newest complete state, laid out like `target`, with its notes; None if there is none.

        Damaged states are renamed and kept; everything newer than the restored state is removed. Raises a ValueError if
        there are states but none can be used. `from_scratch` sets all states aside. The first process decides.
        """
        decided = json.loads(broadcast_choice(lambda: json.dumps(self._decide(target, log, from_scratch))))
        if "error" in decided:
            raise ValueError(decided["error"])
        if decided["name"] is None:
            return None
        arrays = self.folder / decided["name"]
        return self._orbax.restore(arrays, target), read_json(_notes(arrays))["notes"]

    def _decide(self, target: PyTree, log: Callable[[str], None], from_scratch: bool) -> dict[str, str | None]:
        """The name of the state to restore, or the error if no state can be used."""
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
                    raise ValueError("its files have changed")
            except Exception as error:  # whatever is wrong, an older one may be complete
                damaged[arrays] = str(error).splitlines()[0] if str(error) else type(error).__name__
                continue
            if differs := _difference(stored.get("structure"), _structure(target)):
                advice = "resume with the version that wrote it, or start again with --from-scratch"
                return {"error": f"checkpoint {arrays.name} is from another model or optimiser ({differs}): {advice}"}
            for broken, reason in damaged.items():
                log(f"checkpoint {broken.name} is damaged ({reason}): set aside, going back to {arrays.name}")
                self._set_aside(broken)
            self._clear(above=arrays.name)
            return {"name": arrays.name}
        if damaged:
            newest, reason = next(iter(damaged.items()))
            which = f"no checkpoint in {self.folder} can be loaded ({newest.name}: {reason})"
            return {"error": f"{which}: restore a copy, or start this run again with --from-scratch"}
        self._clear(above="")
        return {"name": None}

    def _check_room(self, state: PyTree) -> None:
        """Checks the free space first: orbax's threads print long errors if the disk fills up."""
        if shutil.disk_usage(self.folder).free < 1.1 * sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + 1e6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _all(self) -> list[Path]:
        return sorted(path.with_suffix("") for path in self.folder.glob("[0-9]*.json"))

    def _remove(self, arrays: Path) -> None:
        _notes(arrays).unlink(missing_ok=True)  # first: arrays without notes do not count
        shutil.rmtree(arrays, ignore_errors=True)

    def _set_aside(self, arrays: Path) -> None:
        aside = self.folder / f"{ASIDE}{arrays.name}"
        self._remove(aside)
        _notes(arrays).rename(_notes(aside))
        if arrays.exists():
            arrays.rename(aside)
        sync_folder(self.folder)

    def _clear(self, above: str) -> None:
        """Removes everything newer than the state of this name, and the remains of interrupted saves."""
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
    """The shape and dtype of each array by path."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _difference(stored: dict[str, str] | None, wanted: dict[str, str]) -> str | None:
    for path in sorted({*(stored or wanted), *wanted}):
        was, now = (structure.get(path, "missing") for structure in (stored or wanted, wanted))
        if was != now:
            return f"{path} is {was} in the checkpoint and {now} in this run"
    return None


def _digests(arrays: Path, *, sync: bool = False) -> dict[str, str]:
    digests = {}
    for path in sorted(arrays.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digests[str(path.relative_to(arrays))] = hashlib.file_digest(file, "sha256").hexdigest()
            if sync:
                with path.open("r+b") as file:  # Windows only syncs files opened for writing
                    os.fsync(file.fileno())
        elif sync:
            sync_folder(path)
    if sync:
        sync_folder(arrays)
        sync_folder(arrays.parent)
    return digests
