"""Prints the shell commands that give a shell the device."""

import sys

from . import variables
from .build import built

for name, value in variables(built()).items():
    sys.stdout.write(f"export {name}={value!r}\n")
