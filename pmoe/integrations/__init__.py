"""pmoe in other libraries and tools. Each module imports its library only when it is used."""
