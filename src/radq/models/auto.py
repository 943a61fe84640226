"""Register reward models with AutoConfig and AutoModel of transformers, without importing torch in `import radq`.

The auto classes have tables that map a model type to the name of a class, which they look up in the module
transformers.models.TYPE. So the names are added to the tables as soon as transformers loads them, and the package radq
takes the place of that module. The classes themselves are imported on first use.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from radq.sources import MODEL_TYPE

CONFIG_CLASSES, MODEL_CLASSES = "transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto"
NAMES = {  # module of transformers: its table, and the name of our class
    CONFIG_CLASSES: ("CONFIG_MAPPING_NAMES", "RewardModelConfig"),
    MODEL_CLASSES: ("MODEL_MAPPING_NAMES", "RewardModel"),
}


def register_reward_models() -> None:
    """Make `AutoConfig` and `AutoModel` know the model type of radq."""
    if MODEL_CLASSES in sys.modules:  # the tables have been read already
        from transformers import AutoConfig, AutoModel

        from radq.models.config import RewardModelConfig
        from radq.models.reward import RewardModel

        AutoConfig.register(MODEL_TYPE, RewardModelConfig, exist_ok=True)
        AutoModel.register(RewardModelConfig, RewardModel, exist_ok=True)
        return
    sys.modules[f"transformers.models.{MODEL_TYPE}"] = sys.modules["radq"]
    for name in NAMES:
        if name in sys.modules:
            _add_name(sys.modules[name])
    sys.meta_path.insert(0, _TableFinder())


def _add_name(module: ModuleType) -> None:
    table, class_name = NAMES[module.__name__]
    getattr(module, table)[MODEL_TYPE] = class_name


class _TableFinder(MetaPathFinder):
    """Finds the modules that hold the tables in Python's usual way, and adds the names when they are loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in NAMES else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_name(module: ModuleType) -> None:
                load(module)
                _add_name(module)

            spec.loader.exec_module = load_and_name
        return spec
