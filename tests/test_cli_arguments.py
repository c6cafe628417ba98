"""Arguments of every kind: each command ends in one of its exit codes, and never in a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_offline_logs import dump, log, report
from typer.testing import CliRunner

from rlk_audit.cli.app import app

COMMANDS = ("report", "check", "compare", "diagnose")
"""``watch`` ends when it is interrupted."""
OPTIONS = (
    "--format", "--json", "--html", "--by", "--exact", "--tokenizer", "--limit", "--contract", "--dtype", "--baseline",
    "--ratio", "--version", "--help", "-", "--",
)  # fmt: skip
VALUES = (
    "dump.jsonl", "audit.jsonl", "absent.jsonl", "empty", "folder", "*.jsonl", "[", "", "-", "-1", "nan", "inf", "1.5",
    "auto", "table", "slime", "engine", "abs_dlogp_p99=0.05", "abs_dlogp_p99=", "ess0>=0.9", "=", "a=b", "bfloat16",
    "out",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the commands run, with something to read."""
    path = tmp_path_factory.mktemp("arguments")
    dump(path / "dump.jsonl")
    log(path / "audit.jsonl", report(1), report(2))
    (path / "empty").touch()
    (path / "folder").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


WORDS = st.sampled_from(OPTIONS) | st.sampled_from(VALUES) | st.text(max_size=8).filter(lambda text: "/" not in text)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(COMMANDS), st.lists(WORDS, max_size=6))
def test_any_arguments(command: str, words: list[str]) -> None:
    result = CliRunner().invoke(app, [command, *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2)
    if result.exit_code == 2:
        assert result.stderr.strip(), "a refusal says why"
        assert "Traceback" not in result.stderr
