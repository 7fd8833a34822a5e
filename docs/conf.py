"""The site of the documentation, by Sphinx (`make docs`): it opens from the disk, and loads nothing else.

Its pages are Markdown files of the repository, which lie beside them; llms.txt (llmstxt.org) lists them.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
SKILLS = ("write-an-environment", "debug-a-flat-reward", "run-on-a-cluster", "read-a-report")
PAGES = {
    "Start": ["docs/concepts", "docs/install", "docs/commands", "docs/your-first-agent"],
    "Environments": [
        "docs/write-an-environment",
        "docs/tools",
        "docs/graders",
        "docs/your-own-data",
        "docs/environments",
        "docs/tasks-in-other-formats",
        "docs/reports",
        "docs/rfc-008",
        "docs/agentdojo",
        "docs/bfcl-and-tau2",
    ],
    "Training": [
        "docs/search-r1-and-retool",
        "docs/train-the-agent-you-have",
        "docs/models",
        "docs/one-gpu",
        "docs/lora",
        "docs/supervised-fine-tuning",
        "docs/algorithms",
        "docs/asynchronous-training",
        "docs/checkpoints-and-resume",
        "docs/your-own-loop",
        "docs/functions",
        "docs/dialects",
        "docs/coming-from-slime",
    ],
    "Looking and measuring": [
        "docs/view-episodes",
        "docs/when-nothing-is-learned",
        "docs/when-a-run-goes-wrong",
        "docs/evaluate-and-compare",
        "docs/record-and-replay",
        "docs/trajectory-formats",
    ],
    "Engines and clusters": [
        "docs/engines",
        "docs/gpus",
        "docs/megatron",
        "docs/mixtures-of-experts",
        "docs/ray",
        "docs/simulate",
    ],
    "Examples": [
        f"examples/{name}/README"
        for name in (
            "hop_search",
            "calculator",
            "search_r1",
            "retool",
            "babyai",
            "smollm2",
            "one_gpu",
            "sft_then_rl",
            "coding_agent",
            "framework_agent",
            "authors",
            "second_look",
            "multi_agent",
            "eval_multi_task",
            "agentdojo",
            "reproducibility",
            "true_on_policy",
        )
    ],
    "Reference": [
        "docs/reference/README",
        *(f"docs/reference/{path.stem}" for path in sorted(ROOT.glob("docs/reference/[a-z]*.md"))),
    ],
    "For coding agents": [
        "AGENTS",
        *(f"skills/{name}/SKILL" for name in SKILLS),
    ],
    "The project": [
        "docs/architecture",
        "docs/benchmarks",
        "docs/security",
        "docs/slime-features",
        "CONTRIBUTING",
        "CHANGELOG",
    ],
}
"""The pages below the README, in the order in which one needs them. A missing one fails the build."""

project = "agentrl"
root_doc = "README"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "AGENTS.md",
    "docs/**",
    "examples/*/README.md",
    "skills/**",
]
exclude_patterns = ["docs/conf.py"]
extensions = ["myst_parser"]
myst_heading_anchors = 5
html_theme = "furo"
html_title = "agentrl"
html_copy_source = False
html_permalinks_icon = "#"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _with_contents)
    app.connect("build-finished", _with_markdown)


def _with_contents(_: Sphinx, page: str, source: list[str]) -> None:
    if page == root_doc:
        trees = (
            "\n".join([f"```{{toctree}}\n:hidden:\n:caption: {name}", *pages, "```\n"])
            for name, pages in PAGES.items()
        )
        source[0] += "\n" + "\n".join(trees)


def _with_markdown(app: Sphinx, failed: Exception | None) -> None:
    if failed is not None or app.builder.name != "html":
        return
    site = Path(app.outdir)
    shutil.copyfile(site / "README.html", site / "index.html")
    lines = [f"# {project}", "", "> " + about((ROOT / "README.md").read_text(encoding="utf-8"))[1]]
    for name, pages in PAGES.items():
        lines += ["", f"## {name}", ""]
        for page in pages:
            shutil.copyfile(ROOT / f"{page}.md", site / f"{page}.md")
            title, sentence = about((ROOT / f"{page}.md").read_text(encoding="utf-8"))
            lines.append(f"- [{title}]({page}.md): {sentence}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def about(markdown: str) -> tuple[str, str]:
    """The title of a page, and the first sentence below it."""
    body = re.sub(r"\A---\n.*?\n---\n\n", "", markdown, flags=re.DOTALL)
    heading, _, rest = body.partition("\n")
    text = " ".join(rest.strip().partition("\n\n")[0].split())
    sentence = re.match(r".+?[.:](?= |$)", text)
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence[0] if sentence else text)
    return heading.removeprefix("# "), plain.removesuffix(":")
