"""Memory copies, with an optional checksum computed in the same pass.

Copying first and summing afterwards reads everything twice. A fused pass costs no more than the copy, but
neither torch nor the standard library has one. It is a page of C, compiled by the machine's own compiler on
first use (0.2 s, in a temporary folder that is removed at once). Without a compiler there are two passes,
with the same sums.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

COLUMNS, ROWS = 8 * 127, 64
"""64-bit words per row, and rows per block."""
FACTOR = 0x9E3779B97F4A7C15
"""Factor by which the running total is multiplied before each block is added, modulo 2^64."""
_SOURCE = r"""
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { ROW_BYTES = 8 * COLUMNS };

static void add(uint64_t *sums, const char *row) {
    const uint64_t *words = (const uint64_t *)row;
    for (int i = 0; i < COLUMNS; i++) sums[i] += words[i];
}

static void fold(uint64_t *total, const uint64_t *block) {
    for (int i = 0; i < COLUMNS; i++) total[i] = total[i] * FACTOR + block[i];
}

/* Copies a row of two blocks at a time, as two streams give more memory bandwidth than one. Non-temporal stores avoid reading the
   destination first and evicting cache lines. */
static void copy_and_add(char *to, const char *from, uint64_t *sums, size_t apart) {
#ifdef __AVX2__
    if ((uintptr_t)to % 32 == 0 && apart % 32 == 0) {
        for (int i = 0; i < ROW_BYTES; i += 32) {
            const __m256i first = _mm256_loadu_si256((const __m256i *)(from + i));
            const __m256i second = _mm256_loadu_si256((const __m256i *)(from + apart + i));
            __m256i *sum = (__m256i *)((char *)sums + i), *other = (__m256i *)((char *)(sums + COLUMNS) + i);
            _mm256_stream_si256((__m256i *)(to + i), first);
            _mm256_stream_si256((__m256i *)(to + apart + i), second);
            _mm256_storeu_si256(sum, _mm256_add_epi64(_mm256_loadu_si256(sum), first));
            _mm256_storeu_si256(other, _mm256_add_epi64(_mm256_loadu_si256(other), second));
        }
        return;
    }
#endif
    memcpy(to, from, ROW_BYTES);
    memcpy(to + apart, from + apart, ROW_BYTES);
    add(sums, from);
    add(sums + COLUMNS, from + apart);
}

void copy_and_sum(const char *from, char *to, uint64_t *total, size_t num_bytes) {
    const size_t block_bytes = (size_t)ROWS * ROW_BYTES;
    uint64_t blocks[2 * COLUMNS];
    for (; to && num_bytes >= 2 * block_bytes; num_bytes -= 2 * block_bytes) {
        memset(blocks, 0, sizeof blocks);
        for (int row = 0; row < ROWS; row++, from += ROW_BYTES, to += ROW_BYTES)
            copy_and_add(to, from, blocks, block_bytes);
        fold(total, blocks);
        fold(total, blocks + COLUMNS);
        from += block_bytes;
        to += block_bytes;
    }
    const size_t num_rows = num_bytes / ROW_BYTES;
    if (to) memcpy(to, from, num_bytes);
    for (size_t row = 0; row < num_rows; row++, from += ROW_BYTES) {
        if (row % ROWS == 0) memset(blocks, 0, ROW_BYTES);
        add(blocks, from);
        if (row % ROWS == ROWS - 1 || row == num_rows - 1) fold(total, blocks);
    }
#ifdef __AVX2__
    _mm_sfence();
#endif
}
"""
_COMPILE_S = 20.0


def copy(source: Tensor, target: Tensor) -> None:
    """Copy uint8 tensors, up to the length of the shorter one. Host copies use memmove, which is a quarter
    faster than torch's copy at these sizes; GPU copies are synchronised."""
    size = min(source.numel(), target.numel())
    if source.device.type == target.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
        return
    target[:size].copy_(source[:size])
    torch.cuda.current_stream((source if source.is_cuda else target).device).synchronize()


@cache
def copy_and_sum() -> Any:
    """The compiled function (from, to, total, num_bytes), or None if there is no working compiler.

    The first three arguments are addresses. The function copies, and folds the rows into the `COLUMNS` words
    of `total` block by block: total = total * FACTOR + column sums of the block. Bytes after the last whole
    row are not summed; if `to` is 0, nothing is copied."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    try:
        with tempfile.TemporaryDirectory(prefix="braid_copy_") as folder:
            made = Path(folder, "copy.so")
            options = ["-O3", "-march=native", "-fno-strict-aliasing", "-shared", "-fPIC"]
            options += [f"-DCOLUMNS={COLUMNS}", f"-DROWS={ROWS}", f"-DFACTOR={FACTOR}ULL"]
            subprocess.run(
                [*compiler, *options, "-x", "c", "-", "-o", str(made)],
                input=_SOURCE,
                text=True,
                capture_output=True,
                timeout=_COMPILE_S,
                check=True,
            )
            function = ctypes.CDLL(str(made)).copy_and_sum
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("weights are copied and summed in two passes: no C compiler works here (%s)", error)
        return None
    function.argtypes, function.restype = [ctypes.c_void_p] * 3 + [ctypes.c_size_t], None
    return function
