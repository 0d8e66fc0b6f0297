"""Training rows of demonstrations: one decision each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from braid.config.schema import RunConfig
from braid.data.lerobot import read_demonstrations
from braid.errors import DataError
from braid.models.vla.actions import bins_of
from braid.models.vla.build import make_processor
from braid.models.vla.pi0 import demonstrated, read_sizes
from braid.models.vla.policy import Processor, num_positions
from braid.types import ActionSpace, Row, Spaces

_NUM_NOISES = 8
"""Rows of a frame for pi0, each with other noise."""


def demonstration_rows(config: RunConfig) -> list[Row]:
    """A row for each frame of `sft.demonstrations`, several for pi0: its observation, and the chunk of
    actions that begins there. The last action of an episode is repeated where the chunk goes on. Raises
    DataError and ModelError."""
    sft, vla = config.sft, config.model.settings_of_vla
    assert sft is not None, "the plan checks that it is there"
    assert sft.demonstrations is not None, "the plan checks that it is there"
    rows, processor, generator = [], None, torch.Generator().manual_seed(config.run.seed)
    for episode in read_demonstrations(Path(sft.demonstrations), "sft.demonstrations"):
        state = episode.observations.get("state")
        images = {name: values.shape[1:] for name, values in episode.observations.items() if name != "state"}
        size = 0 if state is None else state.shape[1]
        if processor is None:
            spaces = Spaces(
                size, ActionSpace("continuous", episode.actions.shape[1]), dict(sorted(images.items()))
            )
            processor = make_processor(config.model, spaces)
        chunk = vla.num_action_chunks
        actions = np.concatenate([episode.actions, np.repeat(episode.actions[-1:], chunk - 1, axis=0)])
        chunks = (
            sliding_window_view(processor.actions.normalize(actions), chunk, axis=0).swapaxes(1, 2).copy()
        )
        drawn = _inputs(config, processor, chunks, generator)
        observed = processor.observe(episode.observations, [episode.instruction] * len(chunks))
        for frame in range(len(chunks)):
            for inputs in drawn:
                row_inputs = {name: values[frame] for name, values in inputs.items()}
                rows.append(
                    Row(
                        row_inputs,
                        np.ones(len(next(iter(row_inputs.values()))), np.bool_),
                        group=len(rows),
                        trajectory=len(rows),
                        observations={name: values[frame : frame + 1] for name, values in observed.items()},
                    )
                )
    return rows


def check_images(config: RunConfig, rows: Sequence[Row], spaces: Spaces) -> None:
    """Raise DataError if the images of demonstrations are not those that the policy reads in the
    simulator."""
    vla = config.model.settings_of_vla
    recorded = [name for name in rows[0].observations if name not in ("prompt_ids", "state")]
    read = list(spaces.images)[: vla.num_images]
    if recorded != read:
        raise DataError(
            f"sft.demonstrations has the images {', '.join(recorded)}, but the policy reads "
            f"{', '.join(read)} of the environment; give them the same names"
        )


def _inputs(
    config: RunConfig, processor: Processor, chunks: NDArray[np.float64], generator: torch.Generator
) -> list[dict[str, NDArray]]:
    """The policy's inputs [S, P, ...] for normalized chunks of actions [S, H, A], drawn several times for
    pi0."""
    vla, path = processor.config, config.model.path
    assert path is not None, "the plan checks that it is there"
    if vla.kind != "pi0":
        width = num_positions(vla, config.robot_logprob_level)
        return [{"bins": bins_of(chunks, processor.num_bins).reshape(len(chunks), width, -1)}]
    size, wide = read_sizes(path)
    padded = torch.zeros(len(chunks), size, wide)
    padded[:, : chunks.shape[1], : chunks.shape[2]] = torch.from_numpy(chunks)
    drawn = [demonstrated(vla, padded, generator) for _ in range(_NUM_NOISES)]
    return [{name: values.unsqueeze(1).numpy() for name, values in inputs.items()} for inputs in drawn]
