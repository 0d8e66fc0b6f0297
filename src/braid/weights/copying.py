"""Copies of memory, and copies that sum what they copy in the same pass.

To copy first and to sum then reads everything twice. One pass over both costs no more than the copy, but no function of torch or of
the standard library makes one. It is a page of C, which this machine's own compiler compiles when it is first wanted (a fifth of a
second, in a folder that is gone at once). Without a compiler there are two passes and the same sums.
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
"""Words of 64 bits in a row, and rows in a block."""
FACTOR = 0x9E3779B97F4A7C15
"""Of all blocks before at each further one, modulo 2^64."""
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

/* A row of each of two blocks at once: memory is faster at two places than at one. What is written goes past the caches: it is not
   fetched first, and nobody's cache has to give it up. */
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
    """Copy as many bytes (uint8) as the shorter of the two has. In host memory by the C library, whose copy is a quarter faster
    than torch's at these sizes; what a GPU copies is waited for."""
    size = min(source.numel(), target.numel())
    if source.device.type == target.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
        return
    target[:size].copy_(source[:size])
    torch.cuda.current_stream((source if source.is_cuda else target).device).synchronize()


@cache
def copy_and_sum() -> Any:
    """(from, to, total, num_bytes), the first three addresses: copies, and folds the rows into the `total` of `COLUMNS` words, block
    by block: the total so far times FACTOR plus the block's columns. Of a rest after the last whole row nothing is summed, and
    to address 0 nothing copied. None where nothing can be compiled."""
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
