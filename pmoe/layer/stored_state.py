"""The old name of `pmoe.decide.stored_state`, kept for one release."""

from pmoe.decide.stored_state import ExpertPlace, _check_whose, _say_whose
from pmoe.warn import warn_of_old_name

__all__ = ["ExpertPlace", "_check_whose", "_say_whose"]

warn_of_old_name("pmoe.layer.stored_state", "pmoe.decide.stored_state")
