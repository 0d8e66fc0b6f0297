"""What each file of the documentation means natively: its whole config, defaults included, and its plan are
those of tests/dialects/snapshots.

`python -m tests.dialects.test_snapshots` writes the snapshots again; read their diff before committing it.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from pathlib import Path

import pytest

from braid.config.load import plain_data, yaml_text
from braid.plan import default_verb, derive

from .conftest import ALL_SEEDS, ENVIRONMENT, Reader, Seed

SNAPSHOTS = Path(__file__).parent / "snapshots"
_NUM_PROMPTS = 10_000
"""As if the data that a file names had so many rows."""


def snapshot(reader: Reader, seed: Seed) -> str:
    """The seed's native config and plan as YAML."""
    loaded = reader.read(seed).loaded
    config = loaded.to_show()
    config["run"].pop("base_dir", None)
    plan = plain_data(derive(loaded.config, _NUM_PROMPTS, default_verb(loaded.config)))
    del plan["layout"]  # a list of every worker; that of a placement has its own tests
    return yaml_text({"config": config, "plan": plan})


@pytest.mark.parametrize("seed", ALL_SEEDS, ids=lambda seed: seed.name)
def test_a_page_s_file_means_what_its_snapshot_says(
    reader: Reader, seed: Seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    stored = (SNAPSHOTS / f"{seed.name}.yaml").read_text("utf-8")
    changes = difflib.unified_diff(
        stored.splitlines(), snapshot(reader, seed).splitlines(), "snapshot", "now", lineterm="", n=2
    )
    assert not (text := "\n".join(changes)), f"run: python -m tests.dialects.test_snapshots\n{text}"


def test_every_snapshot_is_of_a_file() -> None:
    assert {path.stem for path in SNAPSHOTS.iterdir()} == {seed.name for seed in ALL_SEEDS}


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    os.environ.pop("WANDB_API_KEY", None)
    with tempfile.TemporaryDirectory() as folder:
        files = Reader(Path(folder))
        for each in ALL_SEEDS:
            (SNAPSHOTS / f"{each.name}.yaml").write_text(snapshot(files, each), "utf-8")
