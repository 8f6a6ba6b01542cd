"""Command modules, one per job.

A working directory may have its own folder `pipeline` or `drafter`, which `python -m` would import in place of ours.
"""

import importlib.util
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def _prefer_own(names: tuple[str, ...]) -> None:
    """Put our packages first on the path if other packages hide them."""
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None:
            continue
        folder = next(iter(found.submodule_search_locations or ()), found.origin)
        if Path(str(folder)).resolve() == _ROOT / name:
            continue
        if name in sys.modules:
            raise ImportError(f"{folder} is imported as {name}, which is also a package of ours in {_ROOT}")
        print(f"note: {folder} has the name of a package of ours, in {_ROOT}, which is used", file=sys.stderr)
        sys.path.insert(0, str(_ROOT))


_prefer_own(("drafter", "pipeline"))
