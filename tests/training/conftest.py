"""Makes `training`, which is not in the installed package, importable. No __init__.py may stand here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
