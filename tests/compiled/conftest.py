"""Compiled kernels of one test session are kept in one folder, and no user's cache is read."""

import os
import tempfile

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="ridgeline-triton-")
