"""Lists the benchmarks with what they measure: `python -m bench`."""

import ast
import sys
from pathlib import Path


def benchmarks() -> dict[str, str]:
    """Returns the first line of each benchmark's docstring by the benchmark's name."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        text = path.read_text()
        if 'if __name__ == "__main__":' in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    return found


def main() -> int:
    asked = [word for word in sys.argv[1:] if word not in ("-h", "--help")]
    if asked:
        print(f"Each benchmark is a module. Run python -m bench.{asked[0]}\n", file=sys.stderr)
    print("python -m bench.NAME [--help]\n")
    found = benchmarks()
    for name, what in found.items():
        print(f"  {name:<{max(map(len, found)) + 2}}{what}")
    print("\nResults are kept in bench/results; bench/README.md explains them.")
    return 2 if asked else 0


if __name__ == "__main__":
    sys.exit(main())
