"""The backend of the C++ kernels in csrc/: what they serve, and the reasons for what they do not."""
