"""Images in data rows: every form is the same image, and what cannot be read is refused with its row."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from tests.pictures import FAMILIES, PAD, TOKENIZER, picture, vision_of

from braid.config.data import DataConfig, FileSource, ImageLimits
from braid.data.prompts import PromptSet, load_prompts
from braid.data.worked import load_examples
from braid.errors import DataError, ModelError
from braid.images import image_of, images_of
from braid.models.chat import ChatFormat
from braid.models.vision import Vision
from braid.types import Image
from braid.users import messages_of

IMAGE = picture(0)
TEXT = base64.b64encode(IMAGE.data).decode()
FORMS: dict[str, Callable[[Path], Any]] = {
    "an image": lambda _: IMAGE,
    "bytes": lambda _: IMAGE.data,
    "base64": lambda _: TEXT,
    "a data URI": lambda _: f"data:image/png;base64,{TEXT}",
    "a path": lambda folder: "a.png",
    "an absolute path": lambda folder: str(folder / "a.png"),
    "a mapping with bytes": lambda _: {"bytes": IMAGE.data, "path": None},
    "a mapping with a path": lambda _: {"bytes": None, "path": "a.png"},
    "a mapping with an address": lambda _: {"url": f"data:image/png;base64,{TEXT}"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(IMAGE.data)
    (tmp_path / "text.png").write_text("no image")
    return tmp_path


@pytest.fixture
def vision() -> Vision:
    return vision_of("qwen3_vl")


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_same_image(form: str, folder: Path) -> None:
    assert image_of(FORMS[form](folder), folder) == IMAGE
    assert images_of([FORMS[form](folder)] * 2, folder) == [IMAGE, IMAGE]


def test_images_in_memory_are_stored_without_loss(folder: Path) -> None:
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    for value in (pixels, PIL.Image.fromarray(pixels)):
        with PIL.Image.open(BytesIO(image_of(value, folder).data)) as opened:
            np.testing.assert_array_equal(np.asarray(opened), pixels)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("b.png", "no such image: b.png"),
        ("text.png", "8 bytes that are no image"),
        (b"x", "1 bytes that are no image"),
        ("https://example.org/a.png", "is an address; download it"),
        ("data:image/png;base64,A", "is not base64"),
        (3, "an image must be a path"),
        ({}, "an image must be a path"),
        ("x" * 5000, "no image"),
    ],
)
def test_what_is_no_image_is_refused(value: Any, message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        image_of(value, folder)


class Loader:
    def __init__(self, folder: Path, vision: Vision | None) -> None:
        self.folder, self.vision = folder, vision

    def __call__(self, row: dict[str, Any], **settings: Any) -> PromptSet:
        (self.folder / "rows.jsonl").write_text(json.dumps({"answer": "", **row}))
        of_data = {k: settings.pop(k) for k in list(settings) if k in DataConfig.model_fields}
        source = FileSource(path="rows.jsonl", **settings)
        data = DataConfig(**of_data)
        return load_prompts([source], data, TOKENIZER, base_dir=self.folder, role="train", vision=self.vision)

    def error(self, row: dict[str, Any], **settings: Any) -> str:
        with pytest.raises(DataError) as caught:
            self(row, **settings)
        return str(caught.value)


@pytest.fixture
def load(folder: Path, vision: Vision) -> Loader:
    return Loader(folder, vision)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "what ?", "image": "a.png"},
        {"prompt": "<image>what ?", "images": ["a.png"]},
        {"prompt": "what ?", "images": [{"path": "a.png", "bytes": None}]},
    ],
)
def test_a_prompt_has_the_tokens_of_its_images(row: dict[str, Any], load: Loader, vision: Vision) -> None:
    (prompt,) = load(row).prompts
    num = len(vision.tokenizer.encode(vision.read(IMAGE).text, add_special_tokens=False))
    text = TOKENIZER.encode("what ?", add_special_tokens=False)
    assert prompt.token_ids == (*[PAD] * num, *text)
    assert [(one.start, one.num, one.image) for one in prompt.images] == [(0, num, IMAGE)]


def test_marks_place_images_and_chosen_columns_have_them(load: Loader) -> None:
    (prompt,) = load({"prompt": "a <image> b <image>", "p": ["a.png", TEXT]}, images_key="p").prompts
    (first, second), (a, b) = prompt.images, TOKENIZER.encode("ab", add_special_tokens=False)
    assert [prompt.token_ids[i] for i in (0, first.start + first.num + 1)] == [a, b]
    assert second.start + second.num == len(prompt.token_ids)


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        (
            {"prompt": "<image><image>", "image": "a.png"},
            {},
            r"row 0: the text has 2 marks <image> and the row 1 image",
        ),
        ({"prompt": "x", "image": "b.png"}, {}, "row 0: no such image: b.png"),
        ({"prompt": "x", "image": "text.png"}, {}, "row 0: 8 bytes that are no image"),
        ({"prompt": "x"}, {"images_key": "p"}, "images_key"),
        (
            {"prompt": "x", "image": "a.png"},
            {"max_prompt_tokens": 4, "overlong": "truncate_left"},
            "data.max_prompt_tokens=4 tokens, and it cannot be cut; raise it",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_said(
    row: dict[str, Any], settings: dict[str, Any], message: str, load: Loader
) -> None:
    assert message.replace(r"\b", "") in load.error(row, **settings)


def test_the_length_limit_counts_the_tokens_of_images(load: Loader) -> None:
    rows = {"prompt": "x", "image": "a.png"}
    assert "all prompts are too long" in load.error(rows, max_prompt_tokens=4, overlong="drop")
    (prompt,) = load(rows, max_prompt_tokens=5).prompts
    assert len(prompt.token_ids) == 5


def test_a_model_of_text_refuses_images(folder: Path) -> None:
    load = Loader(folder, None)
    assert "the model reads only text; set model.vision" in load.error(
        {"prompt": "x", "p": "a.png"}, images_key="p"
    )


TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<eos>{% endfor %}"
)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "path": "a.png"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TEXT}"}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{TEXT}"},
        {"type": "image", "base64": TEXT},
    ],
)
def test_conversations_to_imitate_may_have_images(part: dict[str, Any], folder: Path, vision: Vision) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "see "}, part]},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": "b"},
    ]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": messages}))
    tokenizer = TOKENIZER.__class__(
        tokenizer_object=TOKENIZER.backend_tokenizer, eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    chat = ChatFormat(tokenizer, end_token_ids=[tokenizer.eos_token_id], vision=vision)
    source = FileSource(path="rows.jsonl", messages_key="messages")
    made = load_examples(
        [source], DataConfig(), tokenizer, base_dir=folder, conversation=chat.examples, vision=vision
    )
    (example,) = made.examples
    ids = (*example.prompt_ids, *example.response_ids)
    assert [one.image for one in example.images] == [IMAGE, IMAGE]
    for start, num, _ in example.images:
        assert set(ids[start : start + num]) == {PAD}
    assert sum(token == PAD for token in ids) == sum(one.num for one in example.images)
    assert not any(
        token == PAD and written
        for token, written in zip(example.response_ids, example.response_mask, strict=True)
    )


def test_an_image_is_equal_to_those_with_equal_bytes() -> None:
    assert Image.of(b"a") == Image.of(b"a") != Image.of(b"b")
    assert "data" not in repr(IMAGE)


def test_a_column_of_images_that_is_not_read_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    Loader(folder, None)({"prompt": "x", "image": "a.png"})
    assert "the column 'image' is not read, since the model reads only text" in caplog.text


def test_a_truncated_file_is_refused_with_its_row(load: Loader) -> None:
    (load.folder / "half.png").write_bytes(IMAGE.data[: len(IMAGE.data) // 2])
    assert "row 0: the image cannot be read" in load.error({"prompt": "x", "image": "half.png"})


def test_a_placeholder_in_the_text_of_a_row_is_refused(load: Loader) -> None:
    assert "the prompt has 0 images, but 1 placeholders (<|image_pad|>)" in load.error(
        {"prompt": "x<|image_pad|>"}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_tokens_follows_from_the_size(family: str) -> None:
    for seed in range(4):
        unread, read = vision_of(family), vision_of(family)
        assert unread.num_tokens(picture(seed)) == read.expand([read.placeholder], [picture(seed)])[1][0].num


def test_an_array_may_be_a_part_of_a_message() -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    (message,) = messages_of([{"role": "user", "content": [{"type": "image", "image": pixels}]}])
    assert isinstance(message["content"][0]["image"], Image)


def test_a_copy_for_another_process_has_no_images(vision: Vision) -> None:
    vision.read(IMAGE)
    again = pickle.loads(pickle.dumps(vision))
    assert not again._recent
    assert again.expand([PAD], [IMAGE]) == vision.expand([PAD], [IMAGE])


def test_limits_scale_images_and_are_refused_where_a_model_has_a_size_of_its_own() -> None:
    vision = vision_of("qwen3_vl")
    num = vision.num_tokens(IMAGE)
    vision.limit(ImageLimits(max_pixels=64))
    assert vision.num_tokens(IMAGE) < num
    assert vision.num_tokens(IMAGE) == vision.expand([PAD], [IMAGE])[1][0].num
    with pytest.raises(
        ModelError,
        match=r"data\.image: models of type llava resize every image to a fixed size; remove data.image",
    ):
        vision_of("llava").limit(ImageLimits(max_pixels=64))
    with pytest.raises(ValueError, match="min_pixels=9 is above max_pixels=4"):
        ImageLimits(min_pixels=9, max_pixels=4)
