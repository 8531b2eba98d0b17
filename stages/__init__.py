"""One thin script a DVC stage. The library that runs is the one of this checkout, also in DVC's temporary copies."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
