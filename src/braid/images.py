"""Images in data rows and messages, in whatever form they come, as the bytes of their files."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from os.path import isfile  # False for names that no file can have
from pathlib import Path
from typing import Any, Protocol

from braid.types import Image, Placed


class PlacesImages(Protocol):
    """What data asks of a model that reads images; see braid.models.vision.Vision."""

    mark: str
    """The text that stands for an image in rendered prompts."""

    def expand(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[list[int], tuple[Placed, ...]]: ...

    def places(self, ids: Sequence[int], num_images: int) -> list[int]: ...

    def num_tokens(self, image: Image) -> int: ...


MARK = "<image>"
"""Stands for an image in plain text."""
FORMS = (
    "a path, the bytes of a file, base64 text, a data URI, a mapping with bytes, path, base64 or url, a "
    "PIL image, or an array [height, width, 3] of uint8"
)
_DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,")


def image_of(value: Any, base_dir: Path) -> Image:
    """The image `value` in one of FORMS; relative paths start from `base_dir`. Only its header is read.
    Raises ValueError for all else, also if there is no such file or it is no image."""
    image = Image.of(_data_of(value, base_dir))
    check_header(image)
    return image


def check_header(image: Image) -> None:
    """Raise ValueError if these bytes are not those of an image that can be read."""
    import PIL.Image

    try:
        with PIL.Image.open(BytesIO(image.data)):
            pass
    except Exception as error:  # Pillow's plugins raise many types for damaged files
        raise ValueError(f"{len(image.data)} bytes that are no image: {error}") from error


def images_of(value: Any, base_dir: Path) -> list[Image]:
    """The images of a column: one, or a list of them; none if it is null."""
    if value is None:
        return []
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    return [image_of(one, base_dir) for one in (value if several else [value])]


def content_of(content: Any, base_dir: Path) -> Any:
    """A message's content with the images of its parts as `{"type": "image", "image": Image}`, and text as
    `{"type": "text", "text": ...}`: OpenAI's parts, transformers' and those of data sets. Text stays text.
    Raises ValueError for parts of other types."""
    if isinstance(content, str) or content is None:
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"a content must be text or a list of parts, not {content!r:.200}")
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("text", "input_text", "output_text") and isinstance(text := part.get("text"), str):
            parts.append({"type": "text", "text": text})
        elif kind in ("image", "image_url", "input_image"):
            value = _first(part, ("image", "image_url", "url", "path", "bytes", "base64"))
            if value is None:
                raise ValueError(
                    f"the part {part!r:.200} has no image; give it an image, path, bytes or base64"
                )
            parts.append({"type": "image", "image": image_of(value, base_dir)})
        else:
            raise ValueError(
                f"the part {part!r:.200} is neither text nor an image; write {{type: text, text: ...}} or "
                "{type: image, image: ...}"
            )
    return parts


def marked_content(text: str, images: Sequence[Image]) -> Any:
    """Text with each MARK replaced by an image, in order; without marks the images come first. Raises
    ValueError if their numbers differ."""
    pieces = text.split(MARK)
    if len(pieces) == 1:
        pieces = [""] * len(images) + pieces
    elif len(pieces) != len(images) + 1:
        raise ValueError(
            f"the text has {len(pieces) - 1} marks {MARK} and the row {len(images)} images; give each "
            "image one mark"
        )
    parts: list[dict[str, Any]] = []
    for i, piece in enumerate(pieces):
        parts += [{"type": "image", "image": images[i - 1]}] if i else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


_MIME = {".png": "image/png", ".jpg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp"}
"""Types of files that servers with OpenAI's API read, by extension."""


def data_uri(image: Image) -> str:
    """The image as a data URI of a type that servers with OpenAI's API read; other files become PNG. Raises
    ValueError if it cannot be read."""
    kind, data = _MIME.get(extension_of(image)), image.data
    if kind is None:
        kind, data = _MIME[".png"], _encoded(opened(image))
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def opened(image: Image) -> Any:
    """The image as PIL's, in RGB, turned as its EXIF data say. Raises ValueError if it cannot be read."""
    import PIL.Image
    from PIL import ImageOps

    try:
        with PIL.Image.open(BytesIO(image.data)) as file:
            return ImageOps.exif_transpose(file).convert("RGB")
    except Exception as error:  # Pillow's plugins raise many types for damaged files
        raise ValueError(f"the image cannot be read: {type(error).__name__}: {error}") from error


def _data_of(value: Any, base_dir: Path) -> bytes:
    if isinstance(value, Image):
        return value.data
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return _data_of_text(value, base_dir)
    if isinstance(value, Mapping):
        inner = _first(value, ("bytes", "path", "base64", "url", "image"))
        if inner is not None:
            return _data_of(inner, base_dir)
    elif hasattr(value, "save") and hasattr(value, "size"):  # of PIL
        return _encoded(value)
    elif getattr(value, "ndim", 0) == 3 and str(getattr(value, "dtype", "")) == "uint8":
        import PIL.Image

        return _encoded(PIL.Image.fromarray(value))
    raise ValueError(f"an image must be {FORMS}, not {value!r:.200}")


def _first(value: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The first of the keys' values that is neither null nor empty."""
    values = (value[key] for key in keys if value.get(key) is not None)
    return next((one for one in values if not isinstance(one, str | bytes) or one), None)


def _data_of_text(text: str, base_dir: Path) -> bytes:
    if match := _DATA_URI.match(text):
        return _decoded(text[match.end() :], text)
    if re.match(r"[a-z][a-z0-9+.-]*://", text):
        raise ValueError(f"the image {text[:200]!r} is an address; download it, and give its path")
    path = os.path.expanduser(base_dir / text)
    if isfile(path):
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"the image {path} cannot be read: {error.strerror or error}") from error
    if len(text) >= 64 and re.fullmatch(r"[A-Za-z0-9+/=\s]+", text):
        return _decoded(text, text)
    raise ValueError(f"no such image: {text:.200}; paths are relative to the config's folder")


def _decoded(encoded: str, text: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=False)
    except binascii.Error as error:
        raise ValueError(f"the image {text[:80]!r} is not base64: {error}") from error


def _encoded(image: Any) -> bytes:
    """As PNG, without loss, and equal for equal pixels."""
    out = BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def plain_content(content: Any, mark: str) -> str:
    """A content as plain text, with `mark` for each image."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else mark for part in content)


def shown_content(content: Any) -> Any:
    """A content as transformers' chat templates take it: an image is a part without its data."""
    if isinstance(content, str) or content is None:
        return content
    return [{"type": "image"} if part["type"] == "image" else part for part in content]


def placed_in_messages(contents: Sequence[Any], roles: Sequence[str], images: Sequence[Image]) -> list[Any]:
    """Contents of messages with the images of a row's columns in place of their marks, in order; without
    marks the images come first in the first message of the role `user`. Raises ValueError if the numbers
    of marks and images differ."""
    out, left = list(contents), list(images)
    if not images:
        return out
    marks = [content.count(MARK) if isinstance(content, str) else 0 for content in out]
    if not any(marks):
        first = next((i for i, role in enumerate(roles) if role == "user" and isinstance(out[i], str)), None)
        if first is None:
            raise ValueError("no message of the role user is text, which the images of the row could precede")
        marks[first] = len(images)
    elif sum(marks) != len(images):
        raise ValueError(f"the messages have {sum(marks)} marks {MARK} and the row {len(images)} images")
    for i, num in enumerate(marks):
        if num:
            out[i], left = marked_content(out[i], left[:num]), left[num:]
    return out


def extension_of(image: Image) -> str:
    """The usual extension of the names of such files; empty if their format is unknown."""
    heads = {b"\x89PNG": ".png", b"\xff\xd8": ".jpg", b"GIF8": ".gif", b"BM": ".bmp", b"II*\0": ".tif"}
    if image.data[:4] == b"RIFF" and image.data[8:12] == b"WEBP":
        return ".webp"
    return next((name for head, name in heads.items() if image.data.startswith(head)), "")
