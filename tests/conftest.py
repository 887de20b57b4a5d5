"""One thread per test process: the models are tiny, and spinning threads of two test runs starve each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
