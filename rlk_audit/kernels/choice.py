"""Which path measures the tokens: the readable reference, or a faster one that gives the same bits."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from rlk_audit.layout import StateLayout
from rlk_audit.measure import FlatTokens, measure
from rlk_audit.state import State

logger = logging.getLogger(__name__)

Measure = Callable[[FlatTokens, StateLayout, State], tuple[Tensor, Tensor]]


def measure_for(kernel: str, device: torch.device) -> Measure:
    """Return the function that adds tokens on a device to a state, see ``measure.measure``.

    Args:
        kernel: one of config.KERNELS. ``auto`` takes numba on a CPU where it is installed, else the reference.

    Raises:
        ImportError: the kernel that was asked for needs a package that is not here; the text names the extra.
        ValueError: it does not run on this device.
    """
    if kernel == "reference" or (kernel == "auto" and device.type != "cpu"):
        return measure
    if kernel == "auto":
        return _numba_or_reference()
    needed = {"numba": "cpu", "triton": "cuda"}[kernel]
    if device.type != needed:
        raise ValueError(f"kernel {kernel} runs on {needed}, got {device.type}; leave kernel at auto")
    return _numba() if kernel == "numba" else _triton()


@functools.cache
def _numba_or_reference() -> Measure:
    """Choose once a process: collectors are made often, and a numba that is broken takes its time to say so."""
    try:
        return _numba()
    except ImportError as error:
        logger.debug("the reference path measures: %s", error)
        return measure


@functools.cache
def _numba() -> Measure:
    try:
        from rlk_audit.kernels import numba_cpu

        numba_cpu.compile_all()
    except Exception as error:  # also what an installation that does not fit raises
        raise ImportError(f"kernel numba needs a working numba: pip install 'rlk_audit[fast]' ({error})") from error
    return numba_cpu.measure


@functools.cache
def _triton() -> Measure:
    try:
        from rlk_audit.kernels import triton_cuda
    except ImportError as error:
        raise ImportError(f"kernel triton needs triton, which PyTorch for CUDA brings along ({error})") from error
    return triton_cuda.measure
