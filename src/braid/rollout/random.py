"""Counter-based random numbers: a pure function from integer keys to uniforms, with no state between calls.

A draw is identified by its key, say (seed, round, prompt, sample, turn, position), and gives the same number
regardless of other draws and their order.

A key is absorbed component by component: h <- mix(h ^ mix((component + 1) * g)), where mix is the finaliser
of SplitMix64 (a bijection of 64-bit words in which each input bit flips about half of the output bits) and g
its odd increment (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). Keys
of unequal length never continue each other by accident: a draw's key is the whole tuple.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_ONE, _DROPPED_BITS = np.uint64(1), np.uint64(11)
_ROOT = np.uint64(0x243F6A8885A308D3)  # the first digits of pi: anything but 0, which mix leaves as it is


def uniforms(keys: ArrayLike) -> NDArray[np.float64]:
    """One uniform in [0, 1) per key, with all of float64's 53 bits: integers [N, K] -> [N].

    Components are of int64; negative ones are fine.
    """
    keys = np.asarray(keys)
    state = np.broadcast_to(_ROOT, keys.shape[:1])
    for column in range(keys.shape[1]):
        state = absorb(state, keys[:, column])
    return unit_interval(state)


def stream(key: ArrayLike) -> np.uint64:
    """The state after a key [K]: `unit_interval(absorb(stream(k), p))` equals `uniforms([(*k, p)])`."""
    state = np.full(1, _ROOT)
    for word in _word(np.atleast_1d(np.asarray(key))):
        state = _mix(state ^ word)
    return state[0]


def absorb(state: NDArray[np.uint64], component: NDArray[np.integer]) -> NDArray[np.uint64]:
    """States [N] after one more key component [N]."""
    return _mix(state ^ _word(component))


def unit_interval(state: NDArray[np.uint64]) -> NDArray[np.float64]:
    """States [N] as multiples of 2**-53 in [0, 1)."""
    return (state >> _DROPPED_BITS).astype(np.float64) * 2.0**-53


def _word(component: NDArray[np.integer]) -> NDArray[np.uint64]:
    return _mix((component.astype(np.uint64) + _ONE) * _INCREMENT)


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    word = (word ^ (word >> _SHIFTS[0])) * _MULTIPLIERS[0]
    word = (word ^ (word >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return word ^ (word >> _SHIFTS[2])
