"""CUDA kernels of kvrag; none is built yet, kvrag runs on torch without them."""
