"""Options that were set on a layer since its last call: all ranks must have set them.

Other options may make messages of other sizes, which abort a peer's process. So ranks compare them again, and
meet before that, in case that one of them alone has changed anything (`pmoe.comm.meeting`).
"""

from __future__ import annotations

from collections.abc import Mapping

from pmoe.layer.alike import options_in_words
from pmoe.layer.parts import Parts


def changed_options(words_before: Mapping[str, str], now: Parts) -> str:
    """What is set otherwise on a layer than at its last call, in words for the other ranks; "" if nothing is.

    words_before: `options_in_words` of when ranks last agreed.

    Example: "has set pipeline (4) of MoELayer 1 since its last call, and other ranks have not: ..."
    """
    words = options_in_words(now)
    changed = [f"{name} ({value})" for name, value in words.items() if words_before.get(name) != value]
    if not changed:
        return ""
    return (
        f"has set {', '.join(changed)} of {now.ranks.layer} since its last call, and other ranks have not: "
        "set a layer's options on all ranks, between the same calls"
    )
