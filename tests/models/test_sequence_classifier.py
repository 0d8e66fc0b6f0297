"""Reward models: tiny random classifiers of transformers, saved as a user's folder would be."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import pictures
from tests.rounding import rounding
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from braid.errors import ModelError, RewardError
from braid.models.sequence_classifier import SequenceClassifier, load_classifier
from braid.models.tokenizer import character_tokenizer
from braid.rewards.kinds import ModelReward
from braid.types import Encoded, Message

LETTERS = "abcdefghijklmnopqrstuvwxyz|"
TEMPLATE = "{% for m in messages %}{{ m.content }}|{% endfor %}"
_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"pad_token_id": None},
    "qwen3": {"pad_token_id": 0},
    "mistral": {"pad_token_id": 1, "sliding_window": 5},
    "bert": {"pad_token_id": 0},
    "modernbert": {"pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 8},
}


def save(folder: Path, architecture: str, labels: int = 1, template: str | None = TEMPLATE) -> Path:
    config = AutoConfig.for_model(architecture, **(_SIZES | ARCHITECTURES[architecture]), num_labels=labels)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer = character_tokenizer(LETTERS)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, **settings: Any) -> SequenceClassifier:
    config = ModelReward.model_validate({"kind": "model", "path": str(folder), **settings})
    return load_classifier(config, device=torch.device("cpu"), key="reward.parts[0]")


def chat(prompt: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


TOLERANCE = rounding(2 * (32 + 48 + 24))
"""Of scores of size 1: sums over 32 and 48 features and some 24 positions, in each of 2 layers."""
CHATS = [chat("what", answer) for answer in ("a", "abcdefgh", "", "xyz" * 6, "hello", "zz", "b", "xyzzy")]


def by_itself(folder: Path, ids: list[int]) -> torch.Tensor:
    """The classifier's own numbers for one input alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


@pytest.fixture(params=list(ARCHITECTURES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(tmp_path / request.param, request.param)


@pytest.mark.parametrize("batch_tokens", [1, 60, 10_000])
def test_a_score_is_that_of_the_conversation_alone(folder: Path, batch_tokens: int) -> None:
    classifier = load(folder, batch_tokens=batch_tokens)
    rows = [classifier.encode(messages)[0] for messages in CHATS]
    assert rows[0].ids == character_tokenizer(LETTERS)("what|a|")["input_ids"]
    scores: dict[int, float] = {}
    for batch in classifier.batches(rows):
        assert len(batch) == 1 or len(batch) * max(len(rows[i].ids) for i in batch) <= batch_tokens
        scores |= dict(zip(batch, classifier.scores([rows[i] for i in batch]), strict=True))
    alone = [by_itself(folder, row.ids)[0].item() for row in rows]
    assert [scores[i] for i in range(len(rows))] == pytest.approx(alone, abs=TOLERANCE)
    assert len({round(score, 3) for score in alone}) > 5


def test_a_round_is_cut_the_same_way_whatever_its_order(folder: Path) -> None:
    classifier = load(folder, batch_tokens=60)
    rows = [classifier.encode(messages)[0] for messages in CHATS]
    cut = [[rows[i] for i in batch] for batch in classifier.batches(rows)]
    turned = rows[::-1]
    assert [[turned[i] for i in batch] for batch in classifier.batches(turned)] == cut
    assert [classifier.scores(batch) for batch in cut] == [classifier.scores(batch) for batch in cut]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"label": 2}, lambda logits: logits[2]),
        ({"label": 0, "activation": "sigmoid"}, lambda logits: logits[0].sigmoid()),
        ({"label": 1, "activation": "softmax"}, lambda logits: logits.softmax(-1)[1]),
    ],
)
def test_the_score_is_the_label_that_was_chosen(
    tmp_path: Path, settings: dict[str, Any], expected: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    folder = save(tmp_path / "three", "llama", labels=3)
    classifier = load(folder, **settings)
    row = classifier.encode(CHATS[1])[0]
    (score,) = classifier.scores([row])
    assert score == pytest.approx(expected(by_itself(folder, row.ids)).item(), abs=TOLERANCE)


def test_too_long_inputs_follow_the_rule(tmp_path: Path) -> None:
    folder = save(tmp_path / "llama", "llama")
    whole = load(folder).encode(chat("what", "abc"))[0]
    assert len(whole.ids) == 9
    assert load(folder, max_tokens=9).encode(chat("what", "abc")) == (whole, False)
    assert load(folder, max_tokens=5, overlong="left").encode(chat("what", "abc")) == (
        Encoded(whole.ids[-5:]),
        True,
    )
    assert load(folder, max_tokens=5, overlong="right").encode(chat("what", "abc")) == (
        Encoded(whole.ids[:5]),
        True,
    )
    with pytest.raises(
        RewardError, match=r"9 tokens, but the reward model accepts 5; set reward.parts\[0\].overlong"
    ):
        load(folder, max_tokens=5).encode(chat("what", "abc"))
    with pytest.raises(RewardError, match="but the reward model accepts 64;"):
        load(folder).encode(chat("what", "a" * 64))


def test_a_template_of_the_config_stands_in_for_the_tokenizers(tmp_path: Path) -> None:
    folder = save(tmp_path / "llama", "llama", template=None)
    with pytest.raises(ModelError, match=r"has no chat template; set reward.parts\[0\].template"):
        load(folder)
    (tmp_path / "chat.jinja").write_text("{{ messages[-1].content }}|")
    classifier = load(folder, template=str(tmp_path / "chat.jinja"))
    assert classifier.encode(CHATS[0])[0].ids == character_tokenizer(LETTERS)("a|")["input_ids"]


def test_a_conversation_that_the_template_refuses_has_no_score(tmp_path: Path) -> None:
    folder = save(tmp_path / "llama", "llama", template="{{ raise_exception('no system, please') }}")
    with pytest.raises(RewardError, match="rejects the roles user, assistant: no system, please"):
        load(folder).encode(CHATS[0])


@pytest.mark.parametrize(
    ("labels", "settings", "fault"),
    [
        (3, {}, "has 3 outputs; set reward.parts[0].label to the index of the score, 0 to 2"),
        (3, {"label": 3}, "reward.parts[0].label=3, but"),
        (1, {"normalize": True}, "has no numbers mean and std (above 0) of its scores"),
        (1, {"activation": "softmax"}, "softmax of a single output is always 1"),
        (1, {"device": "cuda"}, "reward.parts[0].device=cuda, but torch finds no GPU"),
    ],
)
def test_settings_that_do_not_fit_the_classifier_are_refused(
    tmp_path: Path, labels: int, settings: dict[str, Any], fault: str
) -> None:
    if "device" in settings and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ModelError) as caught:
        load(save(tmp_path / "llama", "llama", labels=labels), **settings)
    assert fault in str(caught.value)


def test_a_language_model_is_not_a_reward_model(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **(_SIZES | ARCHITECTURES["llama"]))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    character_tokenizer(LETTERS).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"not a complete sequence classifier: it lacks 1 of .* score\.weight"
    ):
        load(tmp_path)


def test_a_missing_folder_is_reported_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"reward.parts\[0\].path=.*nowhere: no such folder"):
        load(tmp_path / "nowhere")


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "llama", "llama")
    tokenizer = character_tokenizer(LETTERS + "ABCDEFGHIJ")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="has 40 tokens, but the reward model has 32"):
        load(folder, tokenizer=str(tmp_path / "other"), template=TEMPLATE)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_have_the_type_that_was_asked_for(tmp_path: Path, dtype: str) -> None:
    folder = save(tmp_path / "qwen3", "qwen3")
    classifier = load(folder, dtype=dtype)
    row = classifier.encode(CHATS[3])[0]
    (score,) = classifier.scores([row])
    # Two layers in 8 bits of mantissa.
    assert score == pytest.approx(by_itself(folder, row.ids)[0].item(), abs=0.1, rel=0.1)


SHOWS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ 'i' ~ MARK if p.type == 'image' else p.text }}{% endfor %}{% endif %}.{% endfor %}"
)
"""A chat template that shows images by their mark."""


def save_with_tower(folder: Path, family: str) -> Path:
    config = pictures.config_of(family)
    config.num_labels = config.get_text_config().num_labels = 1
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # that of Gemma 3's projector starts at 0
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    tokenizer = copy.deepcopy(pictures.TOKENIZER)
    tokenizer.chat_template = SHOWS.replace("MARK", f"'{pictures.vision_of(family).mark}'")
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {name: getattr(tokenizer, name) for name in ("boi_token", "eoi_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    pictures.processor_of(family).save_pretrained(folder)
    return folder


def look(numbers: Sequence[int], answer: str) -> list[Message]:
    images = [{"type": "image", "image": pictures.picture(number)} for number in numbers]
    parts = [*images, {"type": "text", "text": "what"}]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_a_score_with_images_is_that_of_the_conversation_alone(tmp_path: Path, family: str) -> None:
    folder, vision = save_with_tower(tmp_path / family, family), pictures.vision_of(family)
    classifier = load(folder, images=True)
    chats = [look([0], "a"), look([], "abcdef"), look([1, 2], "xyz"), look([1], "a"), look([2, 1], "xyz")]
    rows = [classifier.encode(messages)[0] for messages in chats]
    assert [len(row.images) for row in rows] == [1, 0, 2, 1, 2]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    alone: list[float] = []
    for ids, images in rows:
        tokens = torch.tensor([ids])
        for module in model.modules():
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = None
        with torch.no_grad():
            alone.append(model(input_ids=tokens, **vision.plain_inputs(tokens, images)).logits[0, 0].item())
    assert classifier.scores(rows) == pytest.approx(
        alone, abs=1e-4
    )  # sums over up to 64 features, in 3 layers
    assert len({round(score, 3) for score in alone}) == len(rows), "images and their order change the score"
    turned = rows[::-1]
    cut = [[rows[i] for i in batch] for batch in classifier.batches(rows)]
    assert [[turned[i] for i in batch] for batch in classifier.batches(turned)] == cut


def test_without_images_the_text_alone_is_scored(tmp_path: Path) -> None:
    classifier = load(save(tmp_path / "llama", "llama"))
    assert classifier.encode(look([0], "a")) == classifier.encode(look([], "a"))


def test_images_that_the_reward_model_cannot_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="images: LlamaForSequenceClassification reads only text"):
        load(save(tmp_path / "llama", "llama"), images=True)
    folder = save_with_tower(tmp_path / "gemma3", "gemma3")
    classifier = load(folder, images=True, max_tokens=8, overlong="left")
    with pytest.raises(RewardError, match="tokens with images, which are not cut"):
        classifier.encode(look([0, 1], "a"))
    without = load(folder, images=True, template="{{ messages[-1].content }}")
    with pytest.raises(RewardError, match="1 images, but 0 placeholders"):
        without.encode(look([0], "a"))
