"""Parts of the pages that are made of the source when the site is built, so that nothing is written twice.

A page has a line ``<!-- made of: WORD -->``; :func:`filled` puts what :data:`PARTS` makes for the word behind it.
mkdocs calls :func:`on_page_markdown`, see ``mkdocs.yml``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import roamc
from roamc.gpus import GPUS
from roamc.options import Options
from roamc.planning.pipeline import PIPELINE
from roamc.units import format_bytes

ROOT = Path(__file__).parent.parent

MARK = re.compile(r"^<!-- made of: (\S+) -->$", re.MULTILINE)

PAGES = {
    "README.md": "index.md",
    "benchmarks/RESULTS.md": "results.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Files of the repository to the pages of the site that are made of them."""


CONSTANTS = {
    "__version__": 'The version, such as ``"0.1.0"``.',
    "progress": "Whether planning that takes longer than two seconds says so on stderr. Set it to False, or the "
    "environment variable ``ROAMC_PROGRESS`` to 0, for silence.",
}
"""Names of the interface that have no docstring, and what they mean."""


def options() -> str:
    """Return the table of all options: names and defaults of the fields of Options, and its docstring."""
    _, *parts = re.split(
        r"^    (\w+): ", (inspect.getdoc(Options) or "").partition("Attributes:\n")[2], flags=re.MULTILINE
    )
    meanings = dict(zip(parts[::2], parts[1::2], strict=True))
    rows = (
        f"| `{field.name}` | `{_default(field.default)}` | {_markdown(' '.join(meanings[field.name].split()))} |"
        for field in dataclasses.fields(Options)
    )
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])


def gpus() -> str:
    """Return the table of all GPUs that a step can be planned for by name."""
    rows = (f"| `{gpu.name}` | {gpu.title} | {format_bytes(gpu.capacity)} |" for gpu in GPUS.values())
    return "\n".join(["| name | GPU | capacity |", "|---|---|---|", *rows])


def interface() -> str:
    """Return the table of all names of the interface, with the first paragraph of each one's docstring."""
    rows = (f"| `roamc.{name}` | {_markdown(' '.join(_about(name).split()))} |" for name in roamc.__all__)
    return "\n".join(["| name | meaning |", "|---|---|", *rows])


def _about(name: str) -> str:
    value = getattr(roamc, name)
    if name in CONSTANTS:
        return CONSTANTS[name]
    return (inspect.getdoc(value) or "").partition("\n\n")[0]


def passes() -> str:
    """Return a section for each pass, in the order of the pipeline: the head of its module's docstring."""
    return "\n\n".join(line for each in PIPELINE for line in _pass(each.name))


def _pass(name: str) -> Iterator[str]:
    """Yield the heading, the sentence, and the lines ``rewrite:`` and ``checks:`` of a pass."""
    doc = importlib.import_module(f"roamc.passes.{name}").__doc__ or ""
    sentence, *paragraphs = doc.split("\n\n")
    head = paragraphs[: next((at for at, text in enumerate(paragraphs) if text[:1] != " "), len(paragraphs))]
    yield f"## {name}"
    sentence = _markdown(sentence.removeprefix(f"{name}: "))
    yield sentence[0].upper() + sentence[1:]
    yield "\n".join(["```text", textwrap.dedent(_markdown("\n\n".join(head), code="")), "```"])


def _default(value: object) -> str:
    return "none" if value in (None, ()) else repr(value).replace("'", '"')


def _markdown(text: str, code: str = "`") -> str:
    """Return a docstring's text with ``code`` in the place of the marks of reStructuredText."""
    text = re.sub(r":\w+:`[~.]?([^`]+)`", rf"{code}\1{code}", text)
    return text.replace("``", code).replace("|", "\\|" if code else "|").rstrip()


PARTS: dict[str, Callable[[], str]] = {
    "gpus": gpus,
    "interface": interface,
    "options": options,
    "passes": passes,
    **{name: functools.partial((ROOT / name).read_text, "utf-8") for name in PAGES},
}
"""Word of a mark to what makes the text."""


def filled(text: str) -> str:
    """Return a page with the text of every mark behind it, and with links as the site has them."""
    text = MARK.sub(lambda mark: f"{mark[0]}\n\n{PARTS[mark[1]]()}\n", text).replace("](docs/", "](")
    for path, page in PAGES.items():
        text = text.replace(f"](../{path}", f"]({page}").replace(f"]({path}", f"]({page}")
    return text


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill a page of the site; mkdocs calls it for each."""
    return filled(markdown)
