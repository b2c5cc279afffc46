"""Reproductions of the papers' figures and tables; nothing but the command line imports them."""
