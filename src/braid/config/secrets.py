"""Keeps the values of environment variables out of everything that is stored: they stay `${oc.env:NAME}`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .schema import RunConfig
from .source import map_values

_ENV = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(?:,[^${}]*)?\}")
_NAMED = re.compile(
    r"(.*[_-])?(api[_-]?key|secret|password|authorization|(access|auth)[_-]?token)", re.IGNORECASE
)
_VARIABLE = re.compile(r"(?:^|_)(TOKENS?|KEYS?|AUTH|CREDENTIALS?)(?:_|$)|SECRET|PASSW|APIKEY", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/@\s]+@")
_MIN_LENGTH = 4
"""Minimum length, in characters, of a secret that is replaced in texts that do not name its variable."""


class Reference(str):
    """An interpolation that stands for a value and is written out unquoted."""

    __slots__ = ()


def is_secret_variable(name: str, value: str) -> bool:
    """Whether an environment variable that a config sets is a secret: by its name, or as a URL with a
    password."""
    return bool(_VARIABLE.search(name) or _LOGIN.search(value))


def environment_values(texts: Iterable[str]) -> dict[str, str]:
    """Value -> reference of each environment variable that is set and named in the texts of a config."""
    names = dict.fromkeys(name for text in texts for name in _ENV.findall(text))
    return {value: f"${{oc.env:{name}}}" for name in names if (value := os.environ.get(name))}


def reference_for(text: str, value: Any, secrets: Mapping[str, str]) -> Any:
    """The form in which `value`, the result of the interpolation `text`, is stored; `value` itself if it
    contains no secret."""
    if "oc.env" not in text:
        return hidden(value, distinct(secrets))
    kept = hidden(value, secrets)
    is_plain = not isinstance(value, dict | list)
    return Reference(text) if is_plain and (not _ENV.sub("", text).count("${") or kept == value) else kept


def distinct(secrets: Mapping[str, str]) -> dict[str, str]:
    """The secrets that are long enough to be recognised in any text."""
    return {secret: reference for secret, reference in secrets.items() if len(secret) >= _MIN_LENGTH}


def hidden(value: Any, secrets: Mapping[str, str]) -> Any:
    """Replace the secrets in the texts of `value` by their references."""

    def replaced(_: str, text: Any) -> Any:
        if not isinstance(text, str) or isinstance(text, Reference):
            return text
        kept = text
        for secret in sorted(secrets, key=len, reverse=True):
            kept = kept.replace(secret, secrets[secret])
        return text if kept == text else Reference(kept)

    return map_values(value, replaced)


def plain_secrets(config: RunConfig, references: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, message) of every judge setting whose name suggests a secret and whose value is written in the
    config."""
    for i, part in enumerate(config.reward.parts):
        for path, name in part.secrets(f"reward.parts[{i}]"):
            if _NAMED.fullmatch(name) and path not in references:
                yield (
                    path,
                    f"{name} looks like a secret, which would be stored in the run folder; put it into an "
                    "environment variable and write ${oc.env:NAME} instead",
                )
