"""Folders of tasks in Harbor's format, written for the tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

TEMPLATE = """#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf astral.sh/uv/0.9.5/install.sh | sh
source $HOME/.local/bin/env
uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 \\
    pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
HELLO: Mapping[str, str | bytes] = {
    "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 30.0\n',
    "instruction.md": "Write `Hello, world!` to /app/hello.txt.\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
    "tests/test.sh": TEMPLATE,
    "tests/test_outputs.py": (
        "from pathlib import Path\n\n\ndef test_hello():\n"
        "    assert Path('/app/hello.txt').read_text().strip() == 'Hello, world!'\n"
    ),
    "solution/solve.sh": "#!/bin/bash\necho 'Hello, world!' > hello.txt\n",
}
PLAIN_TEST = """#!/bin/sh
mkdir -p /logs/verifier
reward=0
python3 /tests/check.py && reward=1
echo $reward > /logs/verifier/reward.txt
"""
REPORT: Mapping[str, str | bytes] = {
    "task.toml": (
        '[environment]\nmemory_mb = 256\nenv = { REGION = "north" }\n[solution]\nenv = { STEP = "1" }\n'
    ),
    "instruction.md": "Sum the column `amount` of /app/data/sales.csv into /app/out/total.txt.",
    "environment/Dockerfile": r"""
# A comment
FROM python:3.11-slim
ENV CURRENCY=EUR \
    NAME="two words"
WORKDIR /app
COPY data/ /app/data/
COPY --chmod=755 tools/gen.py make.sh /app/tools/
RUN apt-get update && apt-get install -y --no-install-recommends git curl && rm -rf /var/lib/apt/lists/*
RUN mkdir -p /app/out && \
    python3 tools/gen.py > data/more.csv && echo "$CURRENCY of $NAME" > /app/note.txt || exit 1
RUN ["sh", "-c", "cd /app && git init -q . && git add -A"]
EXPOSE 80
CMD ["sleep", "infinity"]
""",
    "environment/data/sales.csv": "amount\n3\n4\n",
    "environment/data/pixel.bin": bytes(range(256)),
    "environment/tools/gen.py": "print('amount')\nprint(35)\n",
    "environment/make.sh": "#!/bin/sh\necho made\n",
    "tests/test.sh": PLAIN_TEST,
    "tests/check.py": """
import os, subprocess
assert open("/app/out/total.txt").read().split() == ["42", "north", "EUR"], "total"
assert open("/app/data/pixel.bin", "rb").read() == bytes(range(256))
assert os.access("/app/tools/make.sh", os.X_OK)
assert open("/app/note.txt").read() == "EUR of two words\\n"
assert b"data/sales.csv" in subprocess.run(["git", "-C", "/app", "ls-files"], capture_output=True).stdout
""",
    "solution/solve.sh": '#!/bin/bash\nset -e\n[ "$STEP" = 1 ]\npython3 /solution/total.py\n',
    "solution/total.py": """
import csv, os
rows = [row for name in ("sales", "more") for row in csv.DictReader(open(f"/app/data/{name}.csv"))]
total = sum(int(row["amount"]) for row in rows)
open("/app/out/total.txt", "w").write(f"{total} {os.environ['REGION']} {os.environ['CURRENCY']}")
""",
}
PARTS: Mapping[str, str | bytes] = {
    **HELLO,
    "environment/Dockerfile": "FROM debian:bookworm-slim\n",
    "tests/test.sh": """#!/bin/bash
found=0
[ "$(cat /app/hello.txt 2>/dev/null)" = "Hello, world!" ] && found=1
echo "{\\"reward\\": $found, \\"speed\\": 0.25}" > /logs/verifier/reward.json
""",
}


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """A task of these files."""
    for name, contents in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(contents.encode() if isinstance(contents, str) else contents)
        if name.endswith(".sh"):
            place.chmod(0o755)
    return folder
