"""The training job: a draft head learns from distilled text, on Ray Train and DeepSpeed."""

import os
from pathlib import Path

if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it has found no GPU, where there is none
