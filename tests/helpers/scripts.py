"""Programs that are no part of the package, loaded as modules: benchmarks, makers of pages."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_script(path: Path) -> ModuleType:
    """Returns a program's module; its name is made from those of its folder and file."""
    name = f"{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # data classes look their module up
    spec.loader.exec_module(module)
    return module
