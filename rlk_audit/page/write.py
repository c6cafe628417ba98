"""A view -> one HTML file, which holds its script, style and numbers and asks no network for anything."""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from rlk_audit.finding import plain
from rlk_audit.page import causes, excerpts
from rlk_audit.page.definitions import DEFINITIONS
from rlk_audit.page.sections import sections
from rlk_audit.page.text import count_of, figure, visible
from rlk_audit.page.totals import headlines, outcome, reports, worst_sentence
from rlk_audit.run_view import RunView
from rlk_audit.version import __version__

NOTES = {
    "self_comparison": "Both sides are bitwise equal in every token: is the rollout compared with itself?",
}
"""Notes of reports in words."""


def write_page(view: RunView, path: Path) -> int:
    """Write the page, whole or not at all, and return its size in bytes.

    Raises:
        ImportError: jinja2 or plotly is missing; the text names the extra that installs them.
        OSError: the file cannot be written.
    """
    data = page_html(view).encode("utf-8")
    path = Path(path)
    handle, partial_name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(partial_name, 0o644)  # mkstemp lets only its owner read
        os.replace(partial_name, path)
    except BaseException:
        Path(partial_name).unlink(missing_ok=True)
        raise
    return len(data)


def page_html(view: RunView) -> str:
    """Return the page of a view.

    Raises:
        ImportError: jinja2 or plotly is missing; the text names the extra that installs them.
    """
    jinja2, plotly_script = _optional_packages()
    environment = jinja2.Environment(
        autoescape=True, finalize=partial(_shown, jinja2.Undefined), trim_blocks=True, lstrip_blocks=True
    )
    environment.undefined = jinja2.StrictUndefined
    environment.filters |= {"figure": figure, "plain": plain}
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    script = _resource("page.js")
    groups, left_out = causes.cause_groups(view)
    shown = excerpts.worst_first(view.excerpts)
    page: str = environment.from_string(_resource("template.html")).render(
        view=view,
        version=__version__,
        policy=_policy(plotly_script, script),
        style=jinja2.utils.markupsafe.Markup(_resource("page.css")),
        plotly_script=jinja2.utils.markupsafe.Markup(plotly_script),
        script=jinja2.utils.markupsafe.Markup(script),
        outcome=outcome(view),
        headlines=headlines(view),
        worst=worst_sentence(view),
        notes=_notes(view),
        groups=groups,
        groups_left_out=left_out,
        sections=sections(view),
        excerpts=[(excerpts.excerpt_title(excerpt), list(excerpts.shown_tokens(excerpt))) for excerpt in shown],
        excerpts_left_out=len(view.excerpts) - len(shown),
        legend=excerpts.legend(),
        definitions=DEFINITIONS,
        steps=count_of(len(view.steps), "step"),
    )
    return page


def _optional_packages() -> tuple[Any, str]:
    """Return jinja2 and the text of plotly.js."""
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(f"the page cannot be made ({error}): pip install 'rlk_audit[report]'") from error
    return jinja2, str(get_plotlyjs())


def _resource(name: str) -> str:
    return resources.files("rlk_audit.page").joinpath(name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    """Return the content security policy: these scripts and no other, and nothing from elsewhere."""
    digests = (hashlib.sha256(script.encode("utf-8")).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _shown(undefined: type[Any], value: Any) -> Any:
    """Return what the template writes of a value: every text passes here, so that nothing hidden is shown."""
    if isinstance(value, undefined) or hasattr(value, "__html__"):
        return value
    return visible(str(value))


def _notes(view: RunView) -> list[str]:
    everything = reports(view)
    notes = list(view.notes)
    for code in dict.fromkeys(note for report in everything for note in report.notes):
        steps = sum(code in report.notes for report in everything)
        notes.append(f"{NOTES.get(code, code)} ({count_of(steps, 'report')})")
    incomplete = sum(not report.complete for report in everything)
    if incomplete:
        notes.append(f"An update failed in {count_of(incomplete, 'report')}, whose numbers lack its tokens.")
    if any(report.scope == "rank" for report in everything):
        notes.append("Numbers are of one rank alone, not of the group.")
    return notes
