"""pmoe in other libraries and tools. A library is imported only by the modules that are for it."""
