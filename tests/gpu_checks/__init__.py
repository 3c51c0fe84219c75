"""The checks of ``test_gpu.py``, by what they look at. Each module adds its own to ``common.CHECKS`` when it is imported."""

from gpu_checks import attention, engine, head, layers, pages, tokens

__all__ = ["attention", "engine", "head", "layers", "pages", "tokens"]
