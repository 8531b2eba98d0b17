"""Other people's packages, imported where not all that they import is there."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import torch


def stand_in(*packages: str) -> None:
    """Let packages be imported that are missing here: a name of theirs is a class of nothing."""
    missing = {name for name in packages if importlib.util.find_spec(name) is None}

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
            found = name.split(".")[0] in missing
            return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

        def create_module(self, spec: Any) -> types.ModuleType:
            module = types.ModuleType(spec.name)
            module.__path__ = []
            module.__getattr__ = class_of_nothing  # type: ignore[method-assign]
            return module

        def exec_module(self, module: types.ModuleType) -> None:
            pass

    sys.meta_path.append(Finder())


def class_of_nothing(name: str) -> type:
    """What a stand-in has under ``name``. It has no file, version or the like: who inspects it asks for those."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def open_speculators(*unused: str) -> None:
    """Make speculators 0.9.0 importable without what it serves and fetches by, and without ``unused`` packages."""
    stand_in("openai", "datasets", "httpx", "aiohttp", *unused)
    import speculators.models.dflash.core as core

    # Compiled on torch 2.11 it fails here: two Triton kernels share one list of configurations.
    core.compute_metrics = torch.compiler.disable(core.compute_metrics)
