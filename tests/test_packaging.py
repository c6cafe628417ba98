"""What is published: its metadata, its types for a user's program, and the built packages, installed elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ("sketch", "report", "tokens", "worst", "samples", "sinks_jsonl", "config", "offline")
"""Of the modules of tests: those that run in seconds and reach most of the package."""
PAGE = ("page/template.html", "page/page.css", "page/page.js")
PRINTED = "e1 4 +0.20 {'rollout_missing': 1} 0.2 True 0.5 1\n"


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What a command prints; it sees nothing of the repository unless a variable says so."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **variables}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


# --- without building -----------------------------------------------------------------------------------------------


def project() -> str:
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def requirements() -> dict[str, list[str]]:
    """Extra -> its requirements; those of the package itself under the empty name."""
    (own,) = re.findall(r"^dependencies = \[(.*)\]$", project(), re.MULTILINE)
    extras = project().split("[project.optional-dependencies]\n")[1].split("\n[tool.")[0]
    found = {"": own} | dict(re.findall(r"^([a-z]+) = \[(.*?)\]$", extras, re.MULTILINE | re.DOTALL))
    return {extra: re.findall(r'"([^"]+)"', listed) for extra, listed in found.items()}


def test_every_dependency_has_a_lower_bound() -> None:
    found = requirements()
    assert found[""] and found["fast"] == ["numba>=0.61"] and len(found["dev"]) > 10
    unbound = [text for texts in found.values() for text in texts if not re.match(r"[A-Za-z0-9._-]+>=\d", text)]
    assert unbound == []
    assert [text for texts in found.values() for text in texts if "==" in text.split(";")[0]] == []


def test_every_extra_is_in_the_readme() -> None:
    install = (ROOT / "README.md").read_text(encoding="utf-8").split("## Install\n")[1].split("\n## ")[0]
    assert [extra for extra in requirements() if extra and f"`{extra}`" not in install] == []


def citation() -> Mapping[str, str]:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z-]+):(?: (.+))?$", text, re.MULTILINE))


def test_the_citation_has_what_the_format_asks_for() -> None:
    fields = citation()
    assert fields["cff-version"] == "1.2.0" and fields["type"] == "software"
    assert {"message", "title", "authors", "version", "license"} <= set(fields)
    assert re.search(r"^authors:\n  - name: \S", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_citation_is_of_this_version() -> None:
    for field in ("version", "license"):
        (stated,) = re.findall(rf'^{field} = "(.+)"$', project(), re.MULTILINE)
        assert citation()[field] == stated


# What is wrong inside the package is told by `make lint`, whose cache saves these tests a minute.
MYPY = (sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent")
CACHE = ("--cache-dir", str(ROOT / ".mypy_cache"))


def test_a_typed_program_passes_and_runs(tmp_path: Path) -> None:
    """The interface of the package has types that a user's own program can rely on."""
    program = Path(__file__).with_name("typed_user.py")
    run(*MYPY, *CACHE, program, cwd=tmp_path, MYPYPATH=str(ROOT))
    printed = run(sys.executable, program, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert PRINTED in printed


def test_a_wrong_program_does_not_pass(tmp_path: Path) -> None:
    """Kills: types that are all Any."""
    program = tmp_path / "wrong.py"
    program.write_text("from rlk_audit import AuditConfig\nname: int = AuditConfig(worst_k='4').prefix\n")
    command = [*MYPY, *CACHE, str(program)]
    done = subprocess.run(command, env=os.environ | {"MYPYPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 1 and "[arg-type]" in done.stdout and "[assignment]" in done.stdout


# --- built and installed elsewhere (make test-wheel) ----------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel made of the sdist, as they would be published; made of a copy without build folders."""
    pytest.importorskip("build")
    source, out = tmp_path_factory.mktemp("source") / "rlk_audit", tmp_path_factory.mktemp("dist")
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in files:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--outdir", out, source, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel alone.

    Its dependencies are those of the environment that runs the tests, found behind its own packages: torch is large,
    and the same torch again would show nothing. An editable install there is no rival, since a path that a .pth file
    names has its own .pth files left alone.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", built[1], cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[1]).namelist()
    assert {f"rlk_audit/{name}" for name in ("py.typed", *PAGE)} <= set(names)
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "rlk_audit").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.split("/")[0].split("-")[0] for name in names} == {"rlk_audit"}


@pytest.mark.slow
def test_the_sdist_holds_tests_and_documents(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tests = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/*.py")}
    assert tests <= names and len(tests) > 50
    assert {"README.md", "CITATION.cff", "LICENSE", "docs/metrics.md", "Makefile", "rlk_audit/py.typed"} <= names
    assert not [name for name in names if name.endswith(".pyc")]


@pytest.mark.slow
def test_the_installed_command_reports_and_writes_a_page(installed: Path, tmp_path: Path) -> None:
    command = installed.with_name("rlk-audit")
    assert "Usage: rlk-audit" in run(command, "--help", cwd=tmp_path)
    where = run(installed, "-c", "import rlk_audit; print(rlk_audit.__file__, rlk_audit.__version__)", cwd=tmp_path)
    assert where.startswith(str(installed.parents[1])) and where.split()[1] == citation()["version"]
    (tmp_path / "step_1.jsonl").write_text('{"train_log_probs": [-0.5, -1.25], "rollout_log_probs": [-0.5, -1.0]}\n')
    assert "0.25" in run(command, "report", "step_1.jsonl", "--html", "page.html", cwd=tmp_path)
    assert (tmp_path / "page.html").stat().st_size > 100_000


@pytest.mark.slow
def test_the_types_are_installed(installed: Path, tmp_path: Path) -> None:
    program = shutil.copy(Path(__file__).with_name("typed_user.py"), tmp_path)
    run(*MYPY, "--python-executable", installed, "--cache-dir", tmp_path / "cache", program, cwd=tmp_path)
    assert PRINTED in run(installed, program, cwd=tmp_path)


@pytest.mark.slow
def test_the_tests_pass_against_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Of a copy of them, in a folder that holds nothing of the package."""
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__", "data"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    chosen = [f"tests/test_{name}.py" for name in TESTS]
    told = run(installed, "-m", "pytest", "-q", *chosen, cwd=tmp_path)
    assert re.search(r"\d{2,} passed", told), told
