"""The levels of the tests that need no GPU: which markers each leaves out, from the quickest to the whole."""

from __future__ import annotations

MAKE_TEST, MAKE_TEST_ALL, MAKE_TEST_NIGHTLY = "make test", "make test-all", "make test-nightly"

MARKERS = {
    MAKE_TEST: "not slow and not nightly and not gpu",
    MAKE_TEST_ALL: "not nightly and not gpu",
    MAKE_TEST_NIGHTLY: "not gpu",
}
"""The Makefile's argument of pytest's ``-m``, by level."""
