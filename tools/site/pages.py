"""mkdocs hook: pages made of Markdown that lies elsewhere in the repository, and the API reference.

A link between files of the repository becomes one between pages; to what is no page, the text of
the link as it is.
"""

from __future__ import annotations

import inspect
import json
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "site")]

import plots  # noqa: E402  (which lies in this folder: the hook is no module of a package)
from notebooks import markdown  # noqa: E402  (a script, which lies beside it)

INSIDE = (
    "compilation",
    "dispatch",
    "plans",
    "execution",
    "lowering",
    "rules",
    "custom_ops",
    "parallel",
    "checkpoint",
)
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/train_llama/README.md": "train_llama.md",
    "tests/conformance/README.md": "conformance.md",
    "tests/conformance/REPORT.md": "conformance_report.md",
    "tests/oracle/README.md": "oracle.md",
    "tests/suites/README.md": "suites.md",
    "tests/suites/REPORT.md": "suites_report.md",
    **{f"xla_dtensor/{folder}/README.md": f"inside_{folder}.md" for folder in INSIDE},
}
"""Of files in the repository the pages made of them; a file in docs/ is one by its own name."""

TUTORIALS = ROOT / "docs" / "tutorials"
MERMAID = ROOT / ".cache" / "mermaid.min.js"
"""What draws the pictures; `make docs` gets it from npm. Without it the theme asks a network."""

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that don't lie in docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        if page == "benchmarks.md":
            text += "\n" + plots.section()
        files.append(File.generated(config, page, content=linked(text, source)))
    for path in sorted(TUTORIALS.glob("*.ipynb")):
        page = f"tutorials/{path.stem}.md"
        files.append(File.generated(config, page, content=markdown(json.loads(path.read_text()))))
    files.append(File.generated(config, "reference.md", content=reference()))
    if MERMAID.exists():
        where = "assets/mermaid.min.js"
        files.append(File.generated(config, where, abs_src_path=str(MERMAID)))
        config.extra_javascript.append(where)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of what lies in docs/."""
    path = page.file.src_uri
    generated = path in PAGES.values() or path == "reference.md" or path.startswith("tutorials/")
    return markdown if generated else linked(markdown, f"docs/{path}")


def on_page_content(html: str, **_: Any) -> str:
    """The heading of an example, which docstrings have as Sphinx reads it."""
    return html.replace("<p>Example::</p>", "<p><strong>Example:</strong></p>")


def linked(text: str, source: str) -> str:
    """``text`` of a file in the repository, with links between pages."""

    def replaced(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        page = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        page = page and page.replace(".ipynb", ".md")
        if page is None:
            return match["text"]
        return f"{match['image']}[{match['text']}]({page}{'#' + anchor if anchor else ''})"

    # Code has brackets and parentheses of its own.
    parts = re.split(r"(^```.*?^```|`[^`\n]+`)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(p if i % 2 else _LINK.sub(replaced, p) for i, p in enumerate(_joined(parts)))


def _joined(parts: list[str]) -> list[str]:
    """Inline code that is the text of a link belongs to the link."""
    result = [parts[0]]
    i = 1
    while i < len(parts):
        code, following = parts[i], parts[i + 1]
        if result[-1].endswith("[") and following.startswith("]("):
            result[-1] += code + following
        else:
            result += [code, following]
        i += 2
    return result


def reference() -> str:
    """What ``xla_dtensor`` exports, by where it is defined."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import xla_dtensor as xd

    lines = ["# API reference", "", "`import xla_dtensor as xd`", ""]
    modules = []
    for name in xd.__all__:
        value = getattr(xd, name)
        if inspect.ismodule(value):
            modules.append((name, value))
        else:
            lines += _entry(f"xd.{name}", value)
    for name, module in modules:
        lines += [f"## xd.{name}", "", (inspect.getdoc(module) or "").split("\n\n")[0], ""]
        for inner in module.__all__:
            lines += _entry(f"xd.{name}.{inner}", getattr(module, inner))
    return "\n".join(lines)


def _entry(path: str, value: Any) -> list[str]:
    if not inspect.isclass(value) and type(value).__module__.startswith("xla_dtensor"):
        value = type(value)  # of an object, as xd.config
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if not (module or "").startswith("xla_dtensor") or not name:
        where = f"{module}.{name}".strip(".")
        return [f"### {path}", "", f"`{where}`, of torch." if where else repr(value), ""]
    return [f"::: {module}.{name}", "    options:", f'      heading: "{path}"', ""]
