"""What benchmarks of programs give a program: names of the standard library, and deep recursion.

The starter code of LeetCode uses `List`, `heapq` and `Counter` without importing them, and the harness of
LiveCodeBench (arXiv:2403.07974) imports these modules, and all of their names, ahead of every program.
"""

import builtins
import sys

_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
_MAX_RECURSION = 50_000


def names() -> dict[str, object]:
    """The `__builtins__` of a program: Python's own, and what it may use without importing it.

    As builtins they never stand in the way of what a program defines, such as a method called `search`.
    """
    sys.setrecursionlimit(_MAX_RECURSION)
    space: dict[str, object] = {}
    # `typing` has another Counter and OrderedDict, so it comes first; modules come last, as in the harness.
    stars = "".join(f"from {module} import *\n" for module in ("typing", *_MODULES))
    exec(f"{stars}import {', '.join(_MODULES)}", space)
    return {**space, **vars(builtins)}
