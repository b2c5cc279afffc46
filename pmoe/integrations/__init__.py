"""pmoe in other libraries and tools; each module imports its library when it is used."""
