"""The benchmark of attention: back-ends beside their alternatives and other people's, on the same forests."""
