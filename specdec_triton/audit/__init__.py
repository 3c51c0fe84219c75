"""The compile audit: what the compiler makes of every kernel, for chips that need not be here. See ``cli/audit.py``."""
