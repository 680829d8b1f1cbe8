"""The simulated accelerator in programs that know nothing of it, as real devices that torch does not have come."""

import os
from pathlib import Path

from tests.accelerator import NAME

HERE = Path(__file__).parents[2]


def environment(folder: Path) -> dict[str, str]:
    """What to start Python with, for `import torch` to load it: a package in the folder, whose entry point it is."""
    package = folder / f"{NAME}-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (package / "entry_points.txt").write_text(f"[torch.backends]\n{NAME} = tests.accelerator:load\n")
    paths = [str(folder), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
