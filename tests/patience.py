"""How long tests wait for what must happen soon: as long as they say, and longer where other tests share the cores.

A bound on time says that something ends at all, and soon where a machine has nothing else to do. With six parts of the
suite on two cores (`make test`, which sets TEST_PATIENCE) the same bound would measure the company instead.
"""

import os

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
"""By how much every such bound is longer; 1 for a test that is run by hand."""


def patient(seconds: float) -> float:
    """Return for how long to wait for what takes at most `seconds` on a quiet machine."""
    return seconds * PATIENCE
