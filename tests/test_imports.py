"""Imports point one way, nothing optional is imported, and two modules alone touch what is theirs alone."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import rlk_audit

PACKAGE = Path(rlk_audit.__file__).parent

LEVELS = (
    ("version", "config", "exact_sum", "places", "ragged", "verdict", "finding", "nonfinite"),
    ("metric_table", "sketch", "tokens", "metadata", "contracts", "token_table"),
    ("breakdowns", "samples"),
    ("layout",),
    ("worst", "metrics"),
    ("state", "report"),
    ("measure", "run_total", "signatures"),
    ("kernels",),
    ("collector", "evidence_table", "diagnose", "run_view"),
    ("allreduce", "dumps", "evidence", "limits", "sinks", "warning_log", "page"),
    ("offline",),
    ("setting_values", "auditor"),
    ("settings",),
    ("megatron_groups",),
    ("megatron_plugin",),
    ("megatron_pretrain",),
    ("integrations",),
    ("cli",),
    ("__main__",),
)
"""A module, or a folder of modules, may import those of earlier levels and, of its own level, only itself."""

LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
)

NEED_A_PACKAGE = (
    "cli", "integrations.torchmetrics", "integrations.skyrl", "integrations.trl", "integrations.verl",
    "integrations.verl_plugin", "kernels.numba_cpu", "kernels.triton_cuda",
)  # fmt: skip
"""Parts and modules that are of no use without a package, and import it."""

OPTIONAL = (
    "megatron", "torchmetrics", "rich", "transformers", "tensorboard", "wandb", "mlflow", "pandas", "pyarrow",
    "safetensors", "yaml", "hypothesis", "pytest", "vllm", "scipy", "matplotlib",
    "jinja2", "plotly", "typer", "tokenizers", "numba", "triton", "trl", "accelerate", "verl", "ray", "tensordict",
    "slime", "vime", "miles", "nemo_rl", "skyrl", "prime_rl", "swift",
)  # fmt: skip
OF_INTEGRATIONS = ("torchmetrics", "trl", "verl", "skyrl")
"""Packages that integrations are built on, which an environment may lack; the first three have extras, and make
test-integrations has them."""


def tree(name: str) -> ast.Module:
    return ast.parse(PACKAGE.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8"))


def imported(name: str) -> set[str]:
    """Every dotted name that a module imports, wherever in it."""
    names = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parts_imported(name: str) -> set[str]:
    """The parts of the package that a module imports."""
    return {dotted.split(".")[1] for dotted in imported(name) if dotted.startswith("rlk_audit.")}


def part_of(name: str) -> str:
    return name.split(".")[0]


def module(name: str) -> ModuleType:
    for package in OF_INTEGRATIONS:
        if package in imported_packages(name) and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return importlib.import_module(f"rlk_audit.{name}")


def imported_packages(name: str) -> set[str]:
    """Top-level packages that a module imports, its own modules' included."""
    found = {dotted.split(".")[0] for dotted in imported(name)}
    inner = {dotted.rsplit(".", 1)[0] for dotted in imported(name)} & {f"rlk_audit.{other}" for other in MODULES}
    return found.union(
        *(
            imported_packages(other.removeprefix("rlk_audit."))
            for other in inner
            if other.startswith("rlk_audit.integrations.")
        )
    )


@pytest.mark.parametrize("package", OF_INTEGRATIONS[:3])
def test_a_missing_package_is_told_in_one_sentence_with_its_extra(package: str) -> None:
    """Also where it is installed: it is hidden here."""
    script = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"
        f"try: import rlk_audit.integrations.{package}\n"
        "except ImportError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent
    )
    assert result.stdout.count("\n") == 1, result.stderr
    assert f"pip install 'rlk_audit[{package}]'" in result.stdout


def test_every_module_has_its_level() -> None:
    assert set(LEVEL) == set(map(part_of, MODULES)), "give a new module its place in LEVELS"
    assert sum(map(len, LEVELS)) == len(LEVEL)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_to_earlier_levels(name: str) -> None:
    own = part_of(name)
    others = parts_imported(name) - {own}
    upwards = {other for other in others if LEVEL.get(other, len(LEVELS)) >= LEVEL.get(own, len(LEVELS))}
    assert not upwards, f"{name} imports {', '.join(sorted(upwards))}"


def test_the_table_reads_imports() -> None:
    """Kills: a reader that finds none, for which every table is right."""
    assert parts_imported("layout") >= {"config", "sketch"}
    assert parts_imported("auditor") >= {"allreduce", "collector", "sinks"}


def uses_of(name: str, dotted: str) -> Iterator[str]:
    """Where a module reaches a library by an import or as an attribute (`torch.distributed`)."""
    yield from (found for found in imported(name) if f"{found}.".startswith(f"{dotted}."))
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Attribute) and f"{ast.unparse(node)}." == f"{dotted}.":
            yield ast.unparse(node)


@pytest.mark.parametrize("name", MODULES)
def test_one_module_reaches_collectives_and_one_megatron(name: str) -> None:
    assert bool(list(uses_of(name, "torch.distributed"))) == (name == "allreduce")
    assert not list(uses_of(name, "megatron"))
    texts = [str(node.value) for node in ast.walk(tree(name)) if isinstance(node, ast.Constant)]
    # It asks for the module that the training loaded; it loads nothing of megatron itself.
    assert any(text.startswith("megatron.core.") for text in texts) == (name == "megatron_groups")


def test_collectives_are_called_by_their_module() -> None:
    """`dist.all_reduce`, not a name of its own: what counts the collectives of a step relies on it."""
    assert not [found for found in imported("allreduce") if found.startswith("torch.distributed.")]


def test_no_module_imports_megatron_while_it_is_imported() -> None:
    for name in MODULES:
        for node in tree(name).body:
            found = ast.unparse(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else ""
            assert "megatron" not in re.sub(r"rlk_audit\.megatron_\w+", "", found), f"{name}: {found}"


@pytest.mark.parametrize("name", MODULES)
def test_no_module_holds_state(name: str) -> None:
    """Constants alone: what a process did before must not change what it does next."""
    for key, value in vars(module(name)).items():
        if not key.startswith("__") and isinstance(value, (list, set, dict, deque, bytearray)):
            assert key.isupper(), f"{name}.{key} is no constant"


def test_importing_the_package_imports_nothing_optional() -> None:
    """All modules, the plugin too, with every warning an error."""
    names = [name for name in MODULES if not {name, part_of(name)} & set(NEED_A_PACKAGE)]
    script = (
        "import sys, importlib, rlk_audit\n"
        f"for name in {names!r}: importlib.import_module('rlk_audit.' + name)\n"
        f"print([name for name in {OPTIONAL!r} if name in sys.modules])\n"
        "import torch.distributed; print(torch.distributed.is_initialized())\n"
    )
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (result.stdout, result.stderr, result.returncode) == ("[]\nFalse\n", "", 0)


def test_the_public_names() -> None:
    names = {name for name in vars(rlk_audit) if not name.startswith("_")} - set(LEVEL)
    assert names >= {
        "AuditConfig", "Auditor", "Collector", "LayoutMismatchError", "LogHistogram", "Pending", "StepReport",
        "TokenBatch", "all_reduce",
    }  # fmt: skip
    assert all(getattr(rlk_audit, name).__module__.startswith("rlk_audit.") for name in names)
    assert (PACKAGE / "py.typed").exists()
