"""Training rows of demonstrations: one decision each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from braid.config.schema import RunConfig
from braid.data.lerobot import read_demonstrations
from braid.models.vla.actions import bins_of
from braid.models.vla.build import make_processor
from braid.models.vla.policy import num_positions
from braid.types import ActionSpace, Row, Spaces


def demonstration_rows(config: RunConfig) -> list[Row]:
    """A row for each frame of `sft.demonstrations`: its observation, and the chunk of actions that begins there. The last
    action of an episode is repeated where the chunk goes on. Raises DataError and ModelError."""
    sft, vla = config.sft, config.model.vla
    assert sft is not None, "the plan checks that it is there"
    assert sft.demonstrations is not None, "the plan checks that it is there"
    assert vla is not None, "the plan checks that it is there"
    width, rows, processor = num_positions(vla, config.algorithm.logprob_level), [], None
    for episode in read_demonstrations(Path(sft.demonstrations), "sft.demonstrations"):
        state = episode.observations.get("state")
        images = {name: of.shape[1:] for name, of in episode.observations.items() if name != "state"}
        size = 0 if state is None else state.shape[1]
        if processor is None:
            spaces = Spaces(
                size, ActionSpace("continuous", episode.actions.shape[1]), dict(sorted(images.items()))
            )
            processor = make_processor(config.model, spaces)
        chunk = vla.num_action_chunks
        actions = np.concatenate([episode.actions, np.repeat(episode.actions[-1:], chunk - 1, axis=0)])
        bins = bins_of(processor.actions.normalize(actions), processor.num_bins)
        chunks = sliding_window_view(bins, chunk, axis=0).swapaxes(1, 2)
        for frame, chosen in enumerate(chunks):
            seen = {name: of[frame] for name, of in episode.observations.items()}
            observed = processor.observe(seen, episode.instruction)
            rows.append(
                Row(
                    {"bins": chosen.reshape(width, -1)},
                    np.ones(width, np.bool_),
                    group=len(rows),
                    trajectory=len(rows),
                    observations={name: values[None] for name, values in observed.items()},
                )
            )
    return rows
