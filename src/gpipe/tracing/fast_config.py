"""Replaces configurations of transformers by objects whose attributes are read faster.

A forward reads hundreds of attributes, for example to create a cache, and each stage repeats these reads.
transformers runs three Python functions for each read.
"""

from functools import cache
from operator import attrgetter
from typing import Any

READERS_OF_CONFIGS = {
    "builtins", "transformers.configuration_utils", "transformers.integrations.heterogeneity.configuration_utils"
}  # fmt: skip
"""The modules of the classes whose `__getattribute__` runs when an attribute of a configuration is read."""


@cache
def _fast_class(kind: Any) -> Any:
    """Returns a subclass of a configuration class of transformers whose attributes are read without Python code.

    transformers renames attributes by `attribute_map`, here done by properties, and rejects attributes that differ
    between the blocks of a heterogeneous model. Returns None for other classes.
    """
    if {owner.__module__ for owner in kind.__mro__ if "__getattribute__" in vars(owner)} != READERS_OF_CONFIGS:
        return None
    own = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__init__", "__eq__", "__hash__")}
    own |= {name: property(attrgetter(target)) for name, target in kind.attribute_map.items()}
    own |= {"__getattribute__": object.__getattribute__, "__class__": property(lambda _: kind)}
    return None if {*kind.attribute_map} & {*kind.attribute_map.values()} else type(kind)(kind.__name__, (kind,), own)


def fast_config(value: Any) -> Any:
    """Returns a faster object with the same `__dict__` for a configuration, and any other value unchanged."""
    kind: Any = type(value)
    fast = None if kind.__getattribute__ is object.__getattribute__ else _fast_class(kind)
    if fast is None or not {"attribute_map", "_heterogeneity_spec"}.isdisjoint(vars(value)):
        return value
    config = object.__new__(fast)
    object.__setattr__(config, "__dict__", vars(value))
    return config
