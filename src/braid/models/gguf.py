"""From a GGUF file to an ordinary model folder, once for each file: transformers reads one slowly (14 s for
135M parameters, of which most goes into the vocabulary), and a run reads its model several times, in several
processes.

The folder is in the user's cache; its weights are the file's numbers in fp32, without quantization.
Everything else sees the folder.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import tempfile
import time
from contextlib import redirect_stderr, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from braid.errors import ModelError
from braid.gguf_file import Header, converted_folder, read_header

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

_UNUSED_S = 30 * 24 * 3600
"""Conversions that nothing has used for as long are removed before the next one."""
_LEFT_S = 24 * 3600
"""Unfinished conversions of killed processes are removed when they are as old."""
_SAME = {
    "rope.dimension_count": ("head_dim",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
"""Settings that transformers does not read from the file -> those of its config that must have the same
value."""


def convert(file: str, key: str) -> str:
    """The model folder with the content of a GGUF file, made if it is not there. Other processes that want it
    wait. Raises ModelError, naming config key `key`, for a file that cannot be read as transformers' model of
    the same function."""
    where = f"{key}={file}"
    try:
        folder = converted_folder(file)
    except RuntimeError as error:
        raise ModelError(
            f"{where}: no place for the converted model ({error}); set XDG_CACHE_HOME to a folder"
        ) from error
    if not folder.is_dir():
        header = _checked(file, where)
        from filelock import FileLock

        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if not folder.is_dir():
                    _clean(folder.parent)
                    _convert(Path(file), header, folder, where)
        except OSError as error:
            size = sum(int(np.prod(shape)) for shape, _ in header.tensors.values()) * 4 / 2**30
            raise ModelError(
                f"{where}: cannot write the converted model, {size:.2g} GiB, to {folder.parent} ({error}); "
                "set XDG_CACHE_HOME to a folder with enough space"
            ) from error
    with suppress(OSError):
        os.utime(folder)
    return str(folder)


def _checked(file: str, where: str) -> Header:
    """The header. Raises ModelError if the package is missing, or the file has an architecture or
    quantization that cannot be read."""
    if find_spec("gguf") is None:
        raise ModelError(
            f"{where} needs the package gguf, which is not installed; run: pip install 'braid-rl[gguf]', or "
            "set it to a Hugging Face folder"
        )
    try:
        header = read_header(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{where}: {error}") from error
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    known = sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"})
    name = header.architecture
    if name.replace("-", "_").replace("moe", "_moe").replace("__", "_") not in known and name not in known:
        raise ModelError(
            f"{where} has the architecture {name or 'of no name'}, which transformers "
            f"{version('transformers')} does not read from GGUF; it reads {', '.join(known)}; use the "
            "model's Hugging Face folder"
        )
    import gguf

    for kind in sorted({kind for _, kind in header.tensors.values()}):
        try:
            quantization = gguf.GGMLQuantizationType(kind)
            _, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
            gguf.dequantize(np.zeros(block_bytes, np.uint8), quantization)
        except (ValueError, KeyError, NotImplementedError) as error:
            label = getattr(error, "name", None) or _name_of(kind)
            tensor = next(name for name, (_, other) in header.tensors.items() if other == kind)
            raise ModelError(
                f"{where} has the quantization {label} ({tensor}), which gguf {version('gguf')} cannot "
                "undo; use a file with another one, such as Q8_0, Q4_K or F16, or the model's Hugging Face "
                "folder"
            ) from error
    return header


def _name_of(kind: int) -> str:
    import gguf

    try:
        return gguf.GGMLQuantizationType(kind).name
    except ValueError:
        return f"of number {kind}"


def _convert(file: Path, header: Header, folder: Path, where: str) -> None:
    """Write the folder at once: a temporary one beside it that is renamed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .folders import read  # which imports this module

    _log.info("%s is converted to a model folder, once: %s", where, folder)
    start = time.monotonic()
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, suffix=".new"))
    options: dict[str, Any] = {"gguf_file": file.name}
    try:
        with redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
            loaded: Any = read(
                str(file.parent),
                where.partition("=")[0],
                "causal language model",
                AutoModelForCausalLM.from_pretrained,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
            model, info = loaded
            _check_read(model, info, header, where)
            if "tokenizer.ggml.tokens" in header.settings:
                try:
                    AutoTokenizer.from_pretrained(str(file.parent), **options).save_pretrained(temporary)
                except (
                    Exception
                ) as error:  # converters raise many types; model.tokenizer may name another tokenizer
                    _log.warning("%s: transformers cannot read its tokenizer: %s", where, error)
        model.hf_quantizer = None
        del model.config.quantization_config
        model.config._name_or_path = ""
        model.save_pretrained(temporary)
        os.chmod(temporary, 0o755)
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _log.info("converted in %.0f s", time.monotonic() - start)


def _check_read(model: PreTrainedModel, info: dict[str, Any], header: Header, where: str) -> None:
    """Raise ModelError unless transformers used all that the file has: it skips settings and tensors that it
    does not know."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    config: Any = model.config
    name = header.architecture
    read = GGUF_CONFIG_MAPPING.get(config.model_type) or GGUF_CONFIG_MAPPING.get(name, {})
    ignored: list[str] = []
    for key, value in header.settings.items():
        setting = key.removeprefix(f"{name}.")
        if (
            setting == key
            or read.get(setting) is not None
            or (setting, value) == ("rope.scaling.type", "none")
        ):
            continue
        if setting in read and setting not in _SAME:
            continue
        values = [getattr(config, other, None) for other in _SAME.get(setting, ())]
        if "head_dim" in _SAME.get(setting, ()) and values == [None]:
            values = [config.hidden_size // config.num_attention_heads]
        if value not in values:
            ignored.append(f"{key}={value!r:.40}")
    if "rope_freqs.weight" in header.tensors:
        ignored.append("rope_freqs.weight")
    if ignored:
        raise ModelError(
            f"{where}: transformers {version('transformers')} does not read {', '.join(ignored)} from GGUF, "
            "and would compute another model; use the model's Hugging Face folder"
        )
    faults = [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]
    used = sum(tensor.numel() for tensor in {t.data_ptr(): t for t in model.state_dict().values()}.values())
    held = sum(int(np.prod(shape)) for shape, _ in header.tensors.values())
    if faults or used != held:
        why = f", among them {sorted(faults)[0]}" if faults else ""
        raise ModelError(
            f"{where}: its tensors do not fit transformers' {type(model).__name__}: the file has {held:,} "
            f"numbers, the model {used:,}{why}; use the model's Hugging Face folder"
        )


def _clean(cache: Path) -> None:
    """Remove conversions that were not used for long, and what killed processes left."""
    for folder in cache.iterdir():
        with suppress(OSError):
            age = time.time() - folder.stat().st_mtime
            if folder.is_dir() and age > (_LEFT_S if folder.suffix == ".new" else _UNUSED_S):
                shutil.rmtree(folder)
