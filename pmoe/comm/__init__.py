"""Collectives: the exchange of row counts and the all-to-alls that carry rows. One collective a file."""
