"""Compiled kernels of one test session are kept in one folder that is removed at its end. No user's cache is read."""

import atexit
import os
import shutil
import tempfile

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="ridgeline-triton-")
atexit.register(shutil.rmtree, os.environ["TRITON_CACHE_DIR"], ignore_errors=True)
