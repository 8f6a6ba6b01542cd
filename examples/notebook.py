"""Run a notebook's cells in this process, and write their outputs into it as Jupyter would.

python -m examples.notebook examples/answers.ipynb
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a notebook and write it again."""
    parser = argparse.ArgumentParser(prog="python -m examples.notebook", description=__doc__)
    parser.add_argument("notebook", type=Path)
    file = parser.parse_args(arguments).notebook
    done = run(json.loads(file.read_text(encoding="utf-8")))
    file.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook with the outputs of its cells: what they print, and the value of their last expression."""
    done, names = copy.deepcopy(notebook), {"__name__": "__main__"}
    cells = [cell for cell in done["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(cells, start=1):
        printed, value = _run_cell("".join(cell["source"]), names)
        cell |= {"execution_count": count, "outputs": []}
        if printed:
            cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": _lines(printed)})
        if value is not None:
            data = {"text/plain": _lines(repr(value))}
            if hasattr(value, "_repr_html_"):
                data["text/html"] = _lines(value._repr_html_())
            result = {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
            cell["outputs"].append(result)
    return done


def _run_cell(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    code = ast.parse(source)
    last = code.body[-1] if code.body else None
    if isinstance(last, ast.Expr):
        del code.body[-1]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "cell", "exec", dont_inherit=True), names)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return printed.getvalue(), value


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    main()
