"""What people ask about a fault before they inject it: where it was seen, what it needs, how to make it by hand.

Reports are public threads; that somebody saw it does not mean that today's engines still do it. `docs/faults.md` is made
from this table, and a test compares the two.
"""

from __future__ import annotations

from harness.faults.catalogue_of_damages import DAMAGES
from harness.faults.catalogue_of_engines import OF_ENGINES
from harness.faults.entry import Entry

CATALOGUE: dict[str, Entry] = DAMAGES | OF_ENGINES
