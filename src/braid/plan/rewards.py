"""Consistency checks of reward parts with the data, the model and each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from braid.config.data import REST, MixShare, covers, source_name
from braid.config.reward import RewardPart
from braid.config.schema import RunConfig
from braid.errors import suggest

from .plan import Plan


def reward_problems(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of every problem that can be found without reading the data."""
    sources = (*config.data.train, *config.data.eval)
    if sources and all(source.source_key is None for source in sources):
        trained, evaluated = (
            {source_name(source) for source in sources_of_use}
            for sources_of_use in (config.data.train, config.data.eval)
        )
        yield from source_problems(config.reward.parts, trained, evaluated, config.data.mix)
        yield from weight_problems(config, {*trained, *evaluated})
        yield from mix_problems("data.mix", config.data.mix, trained)
    else:
        yield from weight_problems(config, ())
    names: dict[str, int] = {}
    for i, part in enumerate(config.reward.parts):
        if (first := names.setdefault(part.metric_name, i)) != i:
            why = f"reward.parts[{first}] is also named {part.metric_name!r}, and metrics are by name"
            yield f"reward.parts[{i}].name", f"{why}; choose another name"
    limit = None if plan.model_size is None else plan.model_size.max_positions
    for i, part in enumerate(config.reward.parts):
        yield from part.problems(f"reward.parts[{i}]", limit)
        if part.shows_images and config.model.vision is None:
            why = "prompts have no images, since the policy reads only text; set model.vision, or remove it"
            yield f"reward.parts[{i}].images", why


def weight_problems(config: RunConfig, sources: Collection[str]) -> Iterator[tuple[str, str]]:
    """(key, message) of sources whose reward is always 0, since only parts of weight 0 score them. Agent
    environments may return rewards themselves."""
    parts = config.reward.parts
    if config.env.gives_rewards or not parts:
        return
    if not any(part.weight for part in parts):
        yield "reward.parts", "every weight is 0, so every reward would be 0; set the weight of a part"
        return
    named = {name for part in parts for name in part.sources}
    for source in sorted(sources):
        scoring = [part for part in parts if covers(part.sources, named, source)]
        if scoring and not any(part.weight for part in scoring):
            why = f"only parts of weight 0 score the source {source!r}, so its rewards would all be 0"
            yield "reward.parts", f"{why}; set the weight of one, or score the source with another part"


def mix_problems(key: str, mix: Sequence[MixShare], known: Collection[str]) -> Iterator[tuple[str, str]]:
    """(key, message) of sources in the shares at `key` that the training data does not have, and of sources
    without a share."""
    if not mix or not known:
        return
    named = [name for entry in mix for name in entry.sources]
    names = ", ".join(sorted(known))
    for i, entry in enumerate(mix):
        if entry.share and REST not in entry.sources and not set(entry.sources) & set(known):
            why = f"no training source is named {', '.join(entry.sources)}; the sources are {names}"
            yield f"{key}[{i}].sources", why
    for name in sorted({name for name in named if named.count(name) > 1}):
        yield key, f"the source {name!r} has two shares; remove one"
    for name in sorted(set(known) - set(named) if REST not in named else ()):
        fix = "add it to an entry, or to one with share: 0 to exclude it"
        yield key, f"the source {name!r} has no share; {fix}"
    if not sum(entry.share for entry in mix):
        yield key, "all shares are 0, so nothing would be drawn; raise one"


def source_problems(
    parts: Sequence[RewardPart],
    trained: Collection[str],
    evaluated: Collection[str],
    mix: Sequence[MixShare] = (),
    *,
    by_row: bool = False,
) -> Iterator[tuple[str, str]]:
    """(key, message) of sources that reward parts name but the data does not have, and of sources that no
    part scores, except for training sources that data.mix excludes. If rows name their sources, a part may
    list sources that this data does not have, as long as it has one of them."""
    known, named = {*trained, *evaluated, REST}, {name for part in parts for name in part.sources}
    for i, part in enumerate(parts):
        for j, name in enumerate(part.sources):
            if name not in known and not (by_row and set(part.sources) & known):
                names = ", ".join(sorted(known - {REST}))
                near = f"{suggest(name, known - {REST})}; the sources are {names}"
                yield f"reward.parts[{i}].sources[{j}]", f"unknown data source {name!r}{near}"
    if parts and REST not in named and all(part.sources for part in parts):
        shared = {name for entry in mix for name in entry.sources}
        excluded = {
            s for s in trained for entry in mix if not entry.share and covers(entry.sources, shared, s)
        }
        for name in sorted({*evaluated, *(set(trained) - excluded)} - named):
            fix = "add it to the sources of a part, or add a part without sources"
            yield "reward.parts", f"no part scores the source {name!r}; {fix}"
