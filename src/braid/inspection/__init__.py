"""Looks at runs from their folders: what they are, what is wrong with them, how two of them differ."""
