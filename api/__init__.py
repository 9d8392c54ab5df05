"""The HTTP face, and the ``kvrelay`` command. Never torch, never ``workers``."""
