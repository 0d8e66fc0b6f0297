"""Simulators of other libraries, each as an ordinary gymnasium.Env with images, a flat state and an
instruction."""
