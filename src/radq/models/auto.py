"""Makes reward models known to transformers' AutoConfig and AutoModel, and yet `import radq` imports no torch.

The auto classes find a model by tables of names: type → class, in the module transformers.models.TYPE. So the names go
into the tables as soon as transformers loads them, and the package radq stands for that module; the classes themselves
are imported when somebody asks for one.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MODEL_TYPE = "radq"
CONFIG_CLASSES, MODEL_CLASSES = "transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto"
NAMES = {  # module: its table, and what belongs there
    CONFIG_CLASSES: ("CONFIG_MAPPING_NAMES", "RewardModelConfig"),
    MODEL_CLASSES: ("MODEL_MAPPING_NAMES", "RewardModel"),
}


def register_reward_models() -> None:
    if MODEL_CLASSES in sys.modules:  # too late for names
        _register_classes()
        return
    sys.modules[f"transformers.models.{MODEL_TYPE}"] = sys.modules["radq"]
    for name in NAMES:
        if name in sys.modules:
            _add_name(sys.modules[name])
    if not any(isinstance(finder, _TableFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TableFinder())


def _register_classes() -> None:
    from transformers import AutoConfig, AutoModel

    from radq.models.reward import RewardModel, RewardModelConfig

    AutoConfig.register(MODEL_TYPE, RewardModelConfig, exist_ok=True)
    AutoModel.register(RewardModelConfig, RewardModel, exist_ok=True)


def _add_name(module: ModuleType) -> None:
    table, class_name = NAMES[module.__name__]
    getattr(module, table)[MODEL_TYPE] = class_name


class _TableFinder(MetaPathFinder):
    """Finds the modules with the tables as Python does, and adds the names once they are loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in NAMES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _NamingLoader(spec.loader)
        return spec


class _NamingLoader(Loader):
    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _add_name(module)
