"""One part of `gpipe doctor --gpu`, in this process: `MODULE:FUNCTION FILE EVERY`."""

import json
import logging
import sys
from importlib import import_module
from pathlib import Path


def main(part: str, file: str, every: str) -> None:
    """Writes what a part finds into a file, anew with each finding: a crash leaves those before it."""
    logging.getLogger("gpipe").setLevel(logging.ERROR)  # networks of no size have findings of their own
    module, _, function = part.partition(":")
    findings = []
    for finding in getattr(import_module(module), function)(int(every)):
        findings.append(finding._asdict())
        Path(f"{file}.part").write_text(json.dumps({"findings": findings}), encoding="utf-8")
        Path(f"{file}.part").replace(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
