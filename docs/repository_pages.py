"""A hook of MkDocs: pages of the site whose files lie elsewhere in the repository.

Documents link to each other as files of the repository, so that they can be read there. On the site, their links lead
to the pages of those files.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_PAGES = {"core/FORMAT.md": "format.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_PAGES |= {
    f"benchmarks/results/{one.name}": f"results/{one.name}" for one in ROOT.glob("benchmarks/results/*.[mp][dn]*")
}
_EXAMPLES = {f"examples/{one.name}": f"examples/{one.stem}.md" for one in ROOT.glob("examples/*.py")}
_REPOSITORY_PATHS = {page: path for path, page in (_PAGES | _EXAMPLES).items()}
_LINK = re.compile(r"\]\((?P<path>[\w./-]+)(?P<anchor>#[\w-]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages, and a page for each example."""
    for path, page in _PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    for path, page in _EXAMPLES.items():
        code = (ROOT / path).read_text()
        files.append(File.generated(config, page, content=f"# `{path}`\n\n```python\n{code}```\n"))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Turn links to files of the repository into links to their pages."""
    return with_site_links(markdown, page.file.src_uri)


def with_site_links(markdown: str, page: str) -> str:
    """
    >>> with_site_links("[how](../core/FORMAT.md#in-place), [other](data.md)", "remote.md")
    '[how](format.md#in-place), [other](data.md)'
    >>> with_site_links("[more](docs/data.md)", "changelog.md")
    '[more](data.md)'
    """
    folder_in_repository = posixpath.dirname(_REPOSITORY_PATHS.get(page, f"docs/{page}"))
    folder = posixpath.dirname(page) or "."

    def site_link(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder_in_repository, found["path"]))
        target = (_PAGES | _EXAMPLES).get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if target is None:  # not on the site, which MkDocs will say
            return found[0]
        return f"]({posixpath.relpath(target, folder)}{found['anchor'] or ''})"

    return _LINK.sub(site_link, markdown)
