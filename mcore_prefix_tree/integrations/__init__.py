"""Folding under other libraries and trainers: each module or folder imports the library that it is named after."""
