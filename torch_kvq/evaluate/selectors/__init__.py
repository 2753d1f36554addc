"""Ways to choose the tokens that sparse attention reads, one a file. To add one, write a ``Selector``."""

from .base import Selector
from .chance import Chance
from .oracle import Oracle
from .quest import Quest
from .rabitq import RaBitQ
from .refined import Refined
from .sparq import SparQ
from .top_p import TopP

__all__ = ["Chance", "Oracle", "Quest", "RaBitQ", "Refined", "Selector", "SparQ", "TopP", "default_selectors"]


def default_selectors() -> tuple[Selector, ...]:
    """All of them; those that adapt their budgets beside those that do not."""
    fixed = (Oracle(), Refined(), RaBitQ(), SparQ(0.25), SparQ(), Quest(), Chance())
    return *fixed, TopP(Oracle()), TopP(RaBitQ())
