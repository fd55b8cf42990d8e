"""TokenFlow: SGLang with buffer-aware preemptive scheduling.

Owns the version number, nothing else. Invariant: importing it imports nothing, because SGLang discovers plugins by
importing this package in every process, also in those that want none of it.
"""

__version__ = "0.1.0"
