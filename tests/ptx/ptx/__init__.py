"""An interpreter of PTX that checks while it runs: see ../README.md."""
from .errors import PtxError
from .grid import Limits, launch
from .memory import GlobalMemory
from .parser import parse

__all__ = ["GlobalMemory", "Limits", "PtxError", "launch", "parse"]
