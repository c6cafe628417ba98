"""Hook of mkdocs.yml: pages of the site that stand elsewhere in the repository, and links that lead there.

So README.md is the site's first page and there is no copy of it. What a link names that is no page, such as a source
file, is shown by its place in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/megatron_grpo/README.md": "example.md",
}
"""File of the repository -> page of the site."""
SOURCE_OF = {page: source for source, page in OUTSIDE.items()}
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]+)\]\((?P<target>(?!https?:|#)[^)#]+)(?P<anchor>#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = SOURCE_OF.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return LINK.sub(lambda link: link_of_site(link, posixpath.dirname(source)), markdown)


def link_of_site(link: re.Match[str], folder: str) -> str:
    """Return a link of a file in a folder of the repository as the site has it."""
    path = posixpath.normpath(posixpath.join(folder, link["target"]))
    target = OUTSIDE.get(path) or OUTSIDE.get(f"{path}/README.md")
    if target is None and path.startswith("docs/"):
        target = path.removeprefix("docs/")
    if target is None:
        return f"`{path}`" if link["text"] in path else f"{link['text']} (`{path}`)"
    return f"{link['image']}[{link['text']}]({target}{link['anchor'] or ''})"
