"""The simulated accelerator in programs that know nothing of it, as real devices that torch does not have come.

python -m tests.accelerator.installed gpipe doctor --gpu --quick
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.accelerator import NAME, built

HERE = Path(__file__).parents[2]


def environment(folder: Path) -> dict[str, str]:
    """What to start Python with, for `import torch` to load it: a package in the folder, whose entry point it is.

    One thread: its kernels are the CPU's, whose sums depend on how many there are, and autograd's thread has its own.
    """
    built()
    package = folder / f"{NAME}-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (package / "entry_points.txt").write_text(f"[torch.backends]\n{NAME} = tests.accelerator:load\n")
    paths = [str(folder), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def main() -> None:
    with TemporaryDirectory() as folder:
        raise SystemExit(subprocess.run(sys.argv[1:], env=environment(Path(folder)), check=False).returncode)


if __name__ == "__main__":
    main()
