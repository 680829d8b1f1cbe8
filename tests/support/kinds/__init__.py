"""What users do to networks, judged beside the reference loop; importing this enters all kinds in `KINDS`."""

from importlib import import_module
from pathlib import Path

from .case import KINDS

__all__ = ["KINDS"]

for _file in sorted(Path(__file__).parent.glob("[!_]*.py")):
    import_module(f"{__name__}.{_file.stem}")
