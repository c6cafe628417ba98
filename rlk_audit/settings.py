"""What a run can be told, and from where: command line, environment, YAML file, code.

SETTINGS is the one table. From it come the arguments, the variables ``RLK_AUDIT_<NAME>``, the keys of the file and
docs/settings.md. Each setting is taken whole from the first source that gives it: arguments, environment, file, code,
defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk_audit import setting_values as values
from rlk_audit.config import DEFAULT_STRICT_CLASSES, KERNELS, MODES, TOKEN_CLASSES, AuditConfig, as_config
from rlk_audit.contracts import apply_contract
from rlk_audit.limits import Judge
from rlk_audit.sinks import Sink, build_sinks
from rlk_audit.sinks.base import load_package
from rlk_audit.sinks.build import FILE_SINKS, SINK_NAMES, SINK_PACKAGES

ENVIRONMENT_PREFIX = "RLK_AUDIT_"
REDUCTION_GROUPS = ("training", "gloo")


@dataclass(frozen=True)
class Settings:
    """What a run was told.

    Attributes:
        config: settings of the audit itself, a contract's limits included; ``config.mode`` is the run's mode.
        sinks: names of the sinks that were chosen; None where none were: then those given in code, or the console.
        output_dir: folder of what sinks write.
        log_interval: every so many steps a report goes to the sinks.
        table_interval: every so many reports W&B and MLflow get the worst tokens as a table.
        jsonl_max_bytes: size at which ``audit.jsonl`` is moved aside; None never does.
        reduction_group: ``training`` or ``gloo``, see ``megatron_plugin.register``.
        cp_sharded: whether each context-parallel rank holds tokens of its own.
        tp_agreement_interval: every so many steps tensor-parallel replicas are compared; 0 never does.
        dump_on_fail: folder for the batches of a failed step; None keeps none.
        dump_max_bytes: what a rank may write there in all.
    """

    config: AuditConfig
    sinks: tuple[str, ...] | None = None
    output_dir: Path = Path("rlk_audit_output")
    log_interval: int = 1
    table_interval: int = 100
    jsonl_max_bytes: int | None = None
    reduction_group: str = "training"
    cp_sharded: bool = True
    tp_agreement_interval: int = 0
    dump_on_fail: Path | None = None
    dump_max_bytes: int = 1_000_000_000

    def build_sinks(self, in_code: Sequence[Sink] = (), **existing: Any) -> tuple[Sink, ...]:
        """Set up the chosen sinks beside those given in code; on the rank that writes, and on no other.

        Args:
            in_code: sinks that the program made itself; with none of them and none chosen it is the console.
            existing: ``tensorboard_writer`` and ``wandb_run`` of the training, see ``sinks.build_sinks``.
        """
        names = self.sinks if self.sinks is not None else () if in_code else ("console",)
        built = build_sinks(
            names,
            self.output_dir,
            log_interval=self.log_interval,
            table_interval=self.table_interval,
            jsonl_max_bytes=self.jsonl_max_bytes,
            **existing,
        )
        return (*in_code, *built)


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Attributes:
        name: field of AuditConfig or Settings; in lower case the file's key, in upper case the variable's end.
        read: a text, or a value of the file -> the field's value; raises ValueError with what was expected.
        metavar, help: as in argparse.
        flags: the options, if not ``--rlk-<name>``.
        repeatable: the option may be given several times; elsewhere ``;`` stands between.
    """

    name: str
    read: Callable[[Any], Any]
    metavar: str
    help: str
    flags: tuple[str, ...] = ()
    repeatable: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """The options on the command line, the main one first."""
        return self.flags or (f"--rlk-{self.name.replace('_', '-')}",)

    @property
    def destination(self) -> str:
        """The attribute of the parsed arguments."""
        return self.options[0].removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper()


_COUNT = functools.partial(values.integer, at_least=1)
_MODE_FLAGS = ("--rlk-consistency-mode", "--rl-kernel-consistency-mode")
_CLASSES = values.names_of(TOKEN_CLASSES[:-1])

SETTINGS = (
    Setting("config", values.path, "FILE", "YAML file of settings (default: none)"),
    Setting(
        "mode",
        values.mode_of(MODES),
        "{off,audit,strict}",
        "off: build nothing; audit: measure and report; strict: stop on a failed verdict (default: off)",
        _MODE_FLAGS,
    ),
    Setting(
        "limits",
        values.limits,
        "METRIC=BOUND",
        "bound on a metric, such as abs_dlogp_p99=0.05, ess0>=0.9 or abs_dlogp_p99=3x_median_50; repeatable "
        "(default: none)",
        ("--rlk-limit",),
        repeatable=True,
    ),
    Setting("contract", values.path, "FILE", "contract file whose limits and clip interval are taken (default: none)"),
    Setting("execution_dtype", values.text, "DTYPE", "which of the contract's thresholds, such as bfloat16"),
    Setting(
        "strict_classes",
        _CLASSES,
        "NAME,...",
        f"token classes that must be empty in mode strict, or none (default: {','.join(DEFAULT_STRICT_CLASSES)}, and "
        "train_neginf without train_filter)",
    ),
    Setting("train_filter", values.flag, "", "the trainer filters (top-p, top-k) and may drop a token (default: no)"),
    Setting("expect_identical", values.flag, "", "train and rollout are meant to be bitwise equal (default: no)"),
    Setting("eps_low", values.number, "EPS", "the clip interval begins at 1 - EPS (default: 0.2)"),
    Setting("eps_high", values.number, "EPS", "the clip interval ends at 1 + EPS (default: 0.2)"),
    Setting("quantiles", values.names, "Q,...", "quantiles of abs(dlogp) (default: 0.5,0.9,0.99,0.999)"),
    Setting("grouping_power", values.integer, "N", "bits of mantissa of a sketch bin, 5 to 8 (default: 6)"),
    Setting("worst_k", values.integer, "N", "worst tokens kept a step, 1 to 64 (default: 4)"),
    Setting("worst_per_sample", values.integer, "1", "keep at most one worst token of a sample (default: no bound)"),
    Setting(
        "breakdowns",
        values.breakdowns,
        "NAME=CODES",
        "label of tokens with its codes, NAME=code,code, or their number, NAME=N; position=auto and confidence=auto "
        "are built in; repeatable (default: none)",
        ("--rlk-breakdown",),
        repeatable=True,
    ),
    Setting(
        "samples_per_step",
        values.integer,
        "N",
        "slots of the table of samples, at least the samples of a step (default: no table)",
    ),
    Setting("sentinel_floor", values.number, "NATS", "values at or below are placeholders (default: -1000)"),
    Setting("positive_tolerance", values.number, "NATS", "values above are no log-probabilities (default: 0.001)"),
    Setting("lag", values.integer, "{0,1}", "1 reads a step's reduction at the end of the next (default: 0)"),
    Setting("max_state_bytes", values.integer, "BYTES", "a larger state vector is refused (default: 2000000)"),
    Setting(
        "kernel",
        values.one_of(KERNELS),
        "{auto,reference,numba,triton}",
        "what does the per-token work, in the same bits (default: auto)",
    ),
    Setting("prefix", values.text, "TEXT", "put before every metric's key (default: rlk_audit/)"),
    Setting(
        "metadata",
        values.assignments,
        "NAME=TEXT",
        "text that is copied to every report; repeatable (default: none)",
        repeatable=True,
    ),
    Setting(
        "sinks",
        values.names_of(SINK_NAMES),
        "NAME,...",
        f"where reports go: {', '.join(SINK_NAMES)} (default: the program's own, or console)",
    ),
    Setting("output_dir", values.path, "DIR", "folder of what sinks write (default: rlk_audit_output)"),
    Setting("log_interval", _COUNT, "N", "write every N-th step, and each that failed (default: 1)"),
    Setting("table_interval", _COUNT, "N", "every N-th report, W&B and MLflow get the worst tokens (default: 100)"),
    Setting("jsonl_max_bytes", _COUNT, "BYTES", "move audit.jsonl aside before it grows larger (default: never)"),
    Setting(
        "reduction_group",
        values.one_of(REDUCTION_GROUPS),
        "{training,gloo}",
        "reduce over the training's own group, or over a gloo group of the audit's (default: training)",
    ),
    Setting(
        "cp_sharded",
        values.flag,
        "",
        "each context-parallel rank holds tokens of its own, rather than the same as its peers (default: yes)",
    ),
    Setting(
        "tp_agreement_interval",
        functools.partial(values.integer, at_least=0),
        "N",
        "compare tensor-parallel replicas every N steps, 0 never (default: 0)",
    ),
    Setting(
        "dump_on_fail",
        values.path,
        "DIR",
        "folder for the batches of a failed step, DIR/old or DIR/current (default: none is kept)",
    ),
    Setting("dump_max_bytes", _COUNT, "BYTES", "what a rank may write there in all (default: 1000000000)"),
)

_BY_NAME = {setting.name: setting for setting in SETTINGS}
# A contract is a file here, and a version in AuditConfig.
_AUDIT_FIELDS = frozenset(_BY_NAME) & {field.name for field in dataclasses.fields(AuditConfig)} - {"contract"}
_RUN_FIELDS = frozenset(_BY_NAME) & {field.name for field in dataclasses.fields(Settings)} - {"config"}


def add_rlk_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the audit's arguments to a parser and return it; each is None where it is not given."""
    group = parser.add_argument_group("rlk_audit", "audit of train-versus-rollout log-probabilities")
    for setting in SETTINGS:
        options: dict[str, Any] = {"dest": setting.destination, "default": None, "help": setting.help}
        if setting.read is values.flag:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": _argument_type(setting), "metavar": setting.metavar}
            options["action"] = "append" if setting.repeatable else "store"
        group.add_argument(*setting.options, **options)
    return parser


def resolve_settings(
    args: argparse.Namespace | None = None,
    config: AuditConfig | None = None,
    environ: Mapping[str, str] | None = None,
    **in_code: Any,
) -> Settings:
    """Return the settings of a run: arguments, then environment, then file, then code, then defaults.

    The mode is ``off`` where nothing says otherwise. With mode ``off`` no contract is read.

    Args:
        args: what a parser with ``add_rlk_args`` made.
        config: the audit's settings as given in code.
        environ: the variables; those of the process if None.
        in_code: other fields of ``Settings`` as given in code, such as ``cp_sharded=False``.

    Raises:
        ValueError: a setting is unknown or wrong; the text begins with the option, variable or file that gave it.
        ImportError: there is a file, and no package that reads YAML.
    """
    if isinstance(args, Mapping):
        raise TypeError(f"args must be what a parser with add_rlk_args made, got {type(args).__name__}")
    given = _given(args, os.environ if environ is None else environ)
    read = {name: _checked(name, value, where) for name, (value, where) in given.items()}
    base = AuditConfig(mode="off") if config is None else as_config(config)
    try:
        merged = dataclasses.replace(base, **{name: read[name] for name in read.keys() & _AUDIT_FIELDS})
    except ValueError as error:
        # Each value was fine alone, so it is these two that do not go together.
        places = [given[name][1] for name in ("mode", "lag") if name in given]
        raise ValueError(f"{', '.join(places)}: {error}") from error
    if merged.mode != "off":
        merged = _with_contract(merged, read, given)
    for name in in_code:
        _refuse_unknown(name, f"{name} in code", _RUN_FIELDS)
    own = {name: _checked(name, value, f"{name} in code") for name, value in in_code.items() if value is not None}
    return Settings(merged, **{**own, **{name: read[name] for name in read.keys() & _RUN_FIELDS}})


def validate_rlk_args(
    args: argparse.Namespace | None = None,
    config: AuditConfig | None = None,
    environ: Mapping[str, str] | None = None,
    **in_code: Any,
) -> Settings:
    """Check all that can be checked before the processes know of each other, and return the settings.

    The arguments are those of ``resolve_settings``. Sinks are checked on the rank that will write: the last one of a
    torchrun, or this one where there is none.

    Raises:
        ValueError: a setting is unknown or wrong, or a limit names no metric.
        ImportError: a package that a chosen sink or the file needs is not installed.
        OSError: the output folder cannot be made or written to.
    """
    environ = os.environ if environ is None else environ
    settings = resolve_settings(args, config, environ, **in_code)
    if settings.config.mode == "off":
        return settings
    Judge(settings.config)
    if int(environ.get("RANK", 0)) == int(environ.get("WORLD_SIZE", 1)) - 1:
        _check_sinks(settings)
    return settings


def _argument_type(setting: Setting) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = setting.read([text] if setting.repeatable else text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text if setting.repeatable else value

    return parse


Given = dict[str, tuple[Any, str]]
"""Setting -> (value as it was given, the option, variable or file that gave it)."""


def _given(args: argparse.Namespace | None, environ: Mapping[str, str]) -> Given:
    arguments = _from_arguments(args)
    variables = _from_environment(environ)
    path, where = (variables | arguments).pop("config", (None, ""))
    file = {} if path is None else _from_file(values.path(path), where)
    return {name: origin for name, origin in (file | variables | arguments).items() if name != "config"}


def _from_arguments(args: argparse.Namespace | None) -> Given:
    found = ((setting, getattr(args, setting.destination, None)) for setting in SETTINGS)
    return {setting.name: (value, setting.options[0]) for setting, value in found if value is not None}


def _from_environment(environ: Mapping[str, str]) -> Given:
    """Return what variables say; an empty one says nothing."""
    given = {}
    for variable, text in environ.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and text:
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            _refuse_unknown(name, f"the variable {variable}", _BY_NAME)
            given[name] = (text, variable)
    return given


def _from_file(path: Path, where: str) -> Given:
    yaml = load_package("yaml", "yaml")
    try:
        contents = yaml.load(path.read_text(encoding="utf-8"), Loader=_strict_loader(yaml))
    except OSError as error:
        raise ValueError(f"{where}: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also a date that is none, and bad encoding
        raise ValueError(f"{where}: {path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(contents, dict | None):
        raise ValueError(f"{path}: expected settings, one a line, got {type(contents).__name__}")
    given = {}
    for name, value in (contents or {}).items():
        _refuse_unknown(str(name), f"{path}, {name}", _BY_NAME.keys() - {"config"})
        if value is not None:
            given[str(name)] = (value, f"{path}, {name}")
    return given


def _strict_loader(yaml: Any) -> Any:
    """Return the safe loader, which here refuses a key that is given twice instead of dropping the first."""

    class StrictLoader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = sorted({str(key) for key in keys if keys.count(key) > 1})
            if twice:
                raise ValueError(f"{', '.join(twice)} is given twice")
            return super().construct_mapping(node, deep)

    return StrictLoader


def _refuse_unknown(name: str, where: str, known: Any) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(sorted(known))}"
        raise ValueError(f"{where}: there is no such setting; {hint}")


def _checked(name: str, value: Any, where: str) -> Any:
    """Return a setting's value, refused in the name of the source that gave it."""
    try:
        read = _BY_NAME[name].read(value)
        if name in _AUDIT_FIELDS:
            AuditConfig(**{name: read})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
    return read


def _with_contract(config: AuditConfig, read: Mapping[str, Any], given: Given) -> AuditConfig:
    path, dtype = read.get("contract"), read.get("execution_dtype")
    if path is None and dtype is None:
        return config
    if path is None or dtype is None:
        (lone,) = given.keys() & {"contract", "execution_dtype"}
        missing = {"contract": "execution_dtype", "execution_dtype": "contract"}[lone]
        raise ValueError(f"{given[lone][1]}: it needs {_BY_NAME[missing].options[0]} too")
    applied = apply_contract(config, path, dtype)
    for name in ("eps_low", "eps_high"):
        theirs = getattr(applied, name)
        if name in read and read[name] != theirs:
            raise ValueError(f"{given[name][1]}: {name} is {read[name]}, the contract {path} sets {theirs}")
    return applied


def _check_sinks(settings: Settings) -> None:
    names = settings.sinks or ()
    for name in names:
        package = SINK_PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ImportError(f"the sink {name} needs {package}, which is not installed: pip install rlk_audit[{name}]")
    if set(names) & set(FILE_SINKS):
        folder = settings.output_dir.absolute()
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise OSError(f"the output folder {folder} cannot be made or written to: see {existing}")
