"""One thin module a command.

A working directory may have a folder `pipeline` or `drafter` of its own, which Python would import in place of ours:
`python -m` looks there first.
"""

import importlib.util
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def _prefer_own(names: tuple[str, ...]) -> None:
    """Put the folder of our packages first on the path where another one has a package of the same name.

    Raises:
        ImportError: Another package of such a name has been imported already.
    """
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
