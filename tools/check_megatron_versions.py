"""Run the tests that touch megatron-core against several of its releases, each in a virtual environment of its own.

    python tools/check_megatron_versions.py [--versions 0.12.3,0.19.2] [--folder .venvs]

An environment is kept and used again. Releases from 0.17 on need Python 3.12 or later; where the machine has none they
are named as not run. Ends with 1 if a test failed or a release could not be installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = "0.12.3,0.14.0,0.16.1,0.19.2"
TESTS = (
    "tests/test_megatron_plugin.py",
    "tests/test_megatron_pretrain.py",
    "tests/test_real_pretrain.py",
    "tests/test_megatron_layouts.py",
    "tests/test_example.py",
)
TRAINING_LOOP = ("six", "pydantic", "omegaconf", "accelerate")
"""What ``megatron.training`` of the wheels imports beside the packages of ``.[dev,example]``."""


def release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def interpreter(version: str) -> str | None:
    """A Python that the release accepts."""
    if release(version) < (0, 17) or sys.version_info >= (3, 12):
        return sys.executable
    return next(filter(works, map(shutil.which, ("python3.12", "python3.13"))), None)


def works(python: str | None) -> bool:
    return python is not None and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def install(python: str, version: str, folder: Path, torch: str) -> Path:
    """The Python of an environment with the release, torch and what the tests need."""
    own = folder / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [own, "-m", "pip", "install", "--quiet"]
    extras = TRAINING_LOOP if release(version) >= (0, 19) else ()
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, "--editable", f"{ROOT}[dev,example]", f"megatron-core=={version}", *extras], check=True)
    return own


def run_tests(python: Path, log: Path) -> tuple[int, str]:
    """The exit status and pytest's closing line."""
    tests = [test for test in TESTS if (ROOT / test).exists()]
    settings = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    settings["PYTHONWARNINGS"] = "ignore::UserWarning"
    with log.open("w") as file:
        done = subprocess.run(
            [python, "-m", "pytest", "-m", "not slow", *tests],
            cwd=ROOT,
            env=os.environ | settings,
            stdout=file,
            stderr=file,
        )
    return done.returncode, log.read_text().splitlines()[-1]


def check(version: str, folder: Path, torch: str) -> tuple[bool, str]:
    python = interpreter(version)
    if python is None:
        return True, "not run: there is no Python 3.12 or later"
    environment = folder / f"megatron-{version}"
    try:
        own = install(python, version, environment, torch)
    except subprocess.CalledProcessError as error:
        return False, f"could not be installed: {error}"
    status, line = run_tests(own, environment / "tests.log")
    name = subprocess.run([own, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return status == 0, f"{name}: {line} (see {environment / 'tests.log'})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", default=VERSIONS, help=f"releases of megatron-core (default: {VERSIONS})")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venvs", help="where the environments are")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip installs as torch")
    args = parser.parse_args()
    passed = True
    for version in args.versions.split(","):
        good, outcome = check(version, args.folder.absolute(), args.torch)
        passed &= good
        print(f"megatron-core {version}: {outcome}", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
