"""Arguments of public functions, checked: an error names the argument, the rule and the value."""

import math
import reprlib
from collections.abc import Iterable
from typing import Any


def check_type(name: str, value: Any, types: type | tuple[type, ...], rule: str) -> None:
    """Raises ``TypeError`` unless ``value`` is of ``types``, which ``rule`` has in words."""
    if not isinstance(value, types):
        raise TypeError(f"{name} must be {rule}, got {reprlib.repr(value)}")


def check_callable(name: str, value: Any, rule: str) -> None:
    """Raises ``TypeError`` unless ``value`` can be called; ``rule`` says what it is then."""
    if not callable(value):
        raise TypeError(f"{name} must be {rule}, got {reprlib.repr(value)}")


def check_count(name: str, value: int, least: int) -> None:
    """Raises ``ValueError`` unless ``value`` is an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_number(name: str, value: float, above: float = -math.inf) -> None:
    """Raises ``ValueError`` unless ``value`` is a number above ``above``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > above:
        rule = "a number" if above == -math.inf else f"a number above {above:g}"
        raise ValueError(f"{name} must be {rule}, got {value!r}")


def check_flag(name: str, value: bool) -> None:
    """Raises ``ValueError`` unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raises ``ValueError`` unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
