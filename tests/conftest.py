import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models run faster on one thread, and tests may fork, which the threads of OpenMP do not survive.
os.environ.setdefault("OMP_NUM_THREADS", "1")
