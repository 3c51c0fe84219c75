"""The ops in plain PyTorch: the specification that the Triton kernels are held against, and the CPU path."""
