"""What CUDA and MUSA share: the kernels in one C++ dialect, its primitives, and the driver of a channel over them."""
