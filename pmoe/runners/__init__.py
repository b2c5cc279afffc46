"""How a decided call is computed: one runner a file behind one interface."""
