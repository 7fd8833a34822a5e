"""The embedded engine's process: python -m agentrl.engine.embedded FD (the child's end of a pipe)."""

from __future__ import annotations

import sys

from agentrl.engine.embedded.hosted import main

main(int(sys.argv[1]))
