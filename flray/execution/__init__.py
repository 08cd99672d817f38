"""Where clients run, and the federation that algorithms talk to."""
