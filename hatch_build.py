"""Compiles the native kernels while the package is installed; without a compiler the package is pure Python."""

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        self.folder = tempfile.TemporaryDirectory()
        package = Path(self.root, "smallvit", "kernels")
        spec = importlib.util.spec_from_file_location("smallvit_kernels_build", package / "build.py")
        assert spec is not None
        assert spec.loader is not None
        builder = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(builder)
        editable = version == "editable"
        target = builder.LIBRARY if editable else Path(self.folder.name, builder.LIBRARY.name)
        try:
            builder.build(target)
        except (builder.BuildError, OSError) as error:
            self.app.display_warning(f"smallvit: a pure Python install, without native kernels: {error}")
            return
        if not editable:
            build_data["force_include"][str(target)] = f"smallvit/kernels/{target.name}"
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.target_name == "wheel":
            self.folder.cleanup()
