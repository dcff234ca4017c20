"""An extension of Griffe: docstrings become Markdown, so that API pages show examples as code and names as links."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data):`~?([\w.]+)`")
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class MarkdownDocstrings(griffe.Extension):
    """Rewrites the docstring of each object."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            scope = obj if obj.is_class or obj.is_module else obj.parent
            obj.docstring.value = as_markdown(obj.docstring.value, scope.path if scope else "")


def as_markdown(docstring: str, scope: str) -> str:
    """
    >>> as_markdown("Then :meth:`wait`.", "a.B")
    'Then <autoref identifier="a.B.wait" optional><code>wait</code></autoref>.'
    >>> as_markdown(">>> 1 + 1\\n2\\n\\nMore.", "a.B").splitlines()
    ['```pycon', '>>> 1 + 1', '2', '```', '', 'More.']
    """

    def link(found: re.Match[str]) -> str:
        name = found[1]
        target = name if name.startswith("fastensor") else f"{scope}.{name}"
        return f'<autoref identifier="{target}" optional><code>{name}</code></autoref>'

    return _ROLE.sub(link, _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", docstring))
