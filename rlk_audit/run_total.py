"""RunTotal: the steps of a run, merged into one state that is as large as a step's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlk_audit.config import AuditConfig, differences
from rlk_audit.layout import StateLayout
from rlk_audit.report import StepReport
from rlk_audit.state import State


def _shapes(state: State) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(tensor.dtype, tuple(tensor.shape)) for tensor in state.tensors()]


class RunTotal:
    """Adds up the group's states of a run, on their device, without host syncs.

    Attributes:
        steps: steps added.
    """

    def __init__(self, config: AuditConfig) -> None:
        # A slot is another sample in each step, and so may a sample index be.
        self._config = replace(config, samples_per_step=None, worst_per_sample=None)
        self._layout = StateLayout(self._config)
        self._step_config = config
        self._state: State | None = None
        self._worst_k = config.worst_k
        self.steps = 0

    def add(self, vector: Tensor, group_size: int) -> None:
        """Add a step's summed state vector."""
        with torch.inference_mode(False), torch.no_grad():
            layout = StateLayout(self._step_config, group_size)
            self._worst_k = min(self._worst_k, layout.worst_k)
            step = State.of_vector(vector, layout)
            step.additive = step.additive[: self._layout.additive_length].clone()
            if self._state is None:
                self._state = step
            else:
                self._state = self._state.to(vector.device)  # one that was loaded lies where it was saved
                self._state.add(step, worst_per_sample=False)
        self.steps += 1

    def report(self) -> StepReport | None:
        """Return the figures of all tokens of the run (``kind == "run"``); None before the first step."""
        if self._state is None:
            return None
        # Of ranks that keep one worst token each the second worst of all is not known.
        config = replace(self._config, worst_k=self._worst_k)
        vector = self._state.pack(StateLayout(config), 0, -1)
        gaps = self._step_config.one_worst_per_sample
        report = StepReport.from_vector(vector, config, worst_have_gaps=gaps)
        report.kind = "run"
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return tensors on the CPU and plain values, to be saved with a checkpoint."""
        return {
            "steps": self.steps,
            "settings": self._settings(),
            "worst_k": self._worst_k,
            "state": None if self._state is None else [tensor.clone().cpu() for tensor in self._state.tensors()],
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take up a run where ``state_dict`` left it.

        Raises:
            ValueError: the run was made with other settings, which the text names, or the state is damaged.
        """
        told = differences(values["settings"], self._settings())
        if told:
            raise ValueError(f"the saved run total was made with other settings: {told}")
        empty = State.empty(self._layout, torch.device("cpu"))
        saved = None if values["state"] is None else State(*values["state"])
        if saved is not None and _shapes(saved) != _shapes(empty):
            raise ValueError(f"the saved run total must hold {_shapes(empty)}, got {_shapes(saved)}")
        self.steps = int(values["steps"])
        self._worst_k = int(values.get("worst_k", self._step_config.worst_k))  # earlier versions have none
        self._state = None if saved is None else saved.clone()

    def _settings(self) -> dict[str, str]:
        # The total has no table of samples, whatever its steps had.
        return {n: value for n, value in self._step_config.state_values().items() if n != "samples_per_step"}
