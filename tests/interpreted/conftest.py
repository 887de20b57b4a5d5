"""Tests in Triton's interpreter. They need a process of its own, because kernels read TRITON_INTERPRET when they are
defined: `TRITON_INTERPRET=1 pytest tests/interpreted`. tests/cpu/test_interpreted.py starts one for each file.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreted.mended import mend

    mend()
else:
    collect_ignore_glob = ["test_*.py"]
