"""Cases of the attention op, shared by the torch path's tests and the kernels' tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
